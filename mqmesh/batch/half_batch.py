"""Record batches of half messages: the group that decides about them, and their target.

A batch with ``Attributes.TRANSACTION_HALF`` is in ``RMQ_SYS_TRANS_HALF_TOPIC`` and has more in its
meta than others (readers that do not support it skip the rest of the array). All its messages are
of one producer group and for one queue of one topic, so the broker commits a whole batch without
touching its payload.
"""

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from mqmesh.batch.payload import Buffer, Payload
from mqmesh.batch.record_batch import HEADER_SIZE, Attributes, BatchHeader, BatchMeta, batch_parts
from mqmesh.errors import CorruptBatch, InvalidArgument
from mqmesh.message import (
    TRANS_HALF_TOPIC,
    Message,
    check_group,
    check_topic,
)

PROPERTY_CHECK_IMMUNITY_TIME: Final = "CHECK_IMMUNITY_TIME_IN_SECONDS"
"""Property of a message in a transaction: time before the broker queries its sender."""
HALF_QUEUE: Final = 0
"""Queue of all half messages of a broker, in the order of their arrival."""
MAX_IMMUNITY_S: Final = 7 * 24 * 3_600
TRANSACTION_TYPE: Final = int(
    Attributes.TRANSACTION_HALF | Attributes.TRANSACTION_COMMIT | Attributes.TRANSACTION_ROLLBACK
)
"""Bits of the attributes that distinguish half messages and committed ones from plain ones."""


class HalfMeta(BatchMeta, array_like=True, frozen=True, gc=False):
    """The meta of a batch of half messages. Array positions are on disk and never change.

    Attributes:
        producer_group: Group whose members may be queried about the transaction's outcome.
        real_topic: Topic that the messages are written to when they are committed.
        real_queue_id: Queue that the messages are written to.
        has_immunity: A message has a time of its first check
            (``CHECK_IMMUNITY_TIME_IN_SECONDS``).
    """

    producer_group: Annotated[str, msgspec.Meta(max_length=255)] = ""
    real_topic: Annotated[str, msgspec.Meta(max_length=127)] = ""
    real_queue_id: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = 0
    has_immunity: bool = False


_decoder = msgspec.msgpack.Decoder(HalfMeta)


def half_parts(
    payload: Payload,
    *,
    producer_group: str,
    real_topic: str,
    real_queue_id: int,
    has_immunity: bool,
    producer_id: int,
    first_sequence: int,
    born_timestamp: int,
    born_host: str = "",
    attributes: int = 0,
) -> tuple[bytes, ...]:
    """Encode a batch of half messages in pieces; arguments and errors as of ``batch_parts``."""
    meta = HalfMeta(
        TRANS_HALF_TOPIC,
        payload.tag_hashes,
        born_host,
        producer_group,
        real_topic,
        real_queue_id,
        has_immunity,
    )
    return batch_parts(
        payload,
        topic=TRANS_HALF_TOPIC,
        queue_id=HALF_QUEUE,
        producer_id=producer_id,
        first_sequence=first_sequence,
        born_timestamp=born_timestamp,
        born_host=born_host,
        attributes=attributes | Attributes.TRANSACTION_HALF,
        meta=meta,
    )


def is_half(header: BatchHeader) -> bool:
    """Return True for a batch of half messages."""
    return header.attributes & TRANSACTION_TYPE == Attributes.TRANSACTION_HALF


def read_half_meta(buffer: Buffer, header: BatchHeader) -> HalfMeta:
    """Decodes the meta of a batch of half messages.

    Raises:
        CorruptBatch: The meta does not have the format.
    """
    try:
        meta = _decoder.decode(memoryview(buffer)[HEADER_SIZE : HEADER_SIZE + header.meta_size])
        check_topic(meta.real_topic)
        check_group(meta.producer_group)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, InvalidArgument) as error:
        raise CorruptBatch(f"the meta of half messages cannot be decoded: {error}") from error
    if (
        meta.topic != TRANS_HALF_TOPIC
        or header.queue_id != HALF_QUEUE
        or not is_half(header)
        or len(meta.tag_hashes) not in (0, 8, 8 * header.message_count)
    ):
        raise CorruptBatch(
            f"half messages in queue {header.queue_id} of topic {meta.topic!r} with "
            f"{len(meta.tag_hashes)} bytes of tag hashes"
        )
    return meta


def immunity_ms(message: Message) -> int | None:
    """Return the delay before the broker queries a message's sender; None if it sets none.

    A value that is no whole number of seconds from 0 to a week counts as none, since any producer
    may write the property.
    """
    text = message.property(PROPERTY_CHECK_IMMUNITY_TIME)
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 6:
        return None
    seconds = int(text)
    return seconds * 1_000 if seconds <= MAX_IMMUNITY_S else None


def have_immunity(messages: Sequence[Message]) -> bool:
    """Return True when one of the messages sets the time of its first check."""
    return any(one.properties is not None and immunity_ms(one) is not None for one in messages)
