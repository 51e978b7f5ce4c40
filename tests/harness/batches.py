"""Record batches with any contents, also such as no producer would make."""

from typing import Any, Final

from mqmesh.batch.payload import CODEC_NONE, Buffer, Payload
from mqmesh.batch.record_batch import (
    BatchHeader,
    BatchMeta,
    batch_parts,
    check_batch,
    decode_messages,
    encode_batch,
    read_header,
    stamp,
)
from mqmesh.errors import CorruptBatch
from mqmesh.message import Message, StoredMessage
from mqmesh.producer_key import producer_id_of

PRODUCER_KEY: Final = b"the key of tests"
PRODUCER_ID: Final = producer_id_of(PRODUCER_KEY)
"""Under this id a test may send when it shows ``PRODUCER_KEY``."""


def join_batch(
    payload: bytes,
    meta: BatchMeta | None = None,
    *,
    raw_size: int | None = None,
    message_count: int = 1,
    queue_id: int = 3,
    producer_id: int = 5,
    first_sequence: int = 7,
    born_timestamp: int = 1_700_000_000_000,
    attributes: int = 0,
    codec: int = CODEC_NONE,
) -> bytes:
    """Puts a header that says what is given before a payload, whatever that is.

    Returns:
        Layout: record batch, broker part blank, checksum right.
    """
    meta = meta or BatchMeta("flights")
    raw_size = len(payload) if raw_size is None else raw_size
    parts = batch_parts(
        Payload(payload, codec, raw_size, message_count, False, meta.tag_hashes),
        topic=meta.topic,
        queue_id=queue_id,
        producer_id=producer_id,
        first_sequence=first_sequence,
        born_timestamp=born_timestamp,
        born_host=meta.born_host,
        attributes=attributes,
    )
    return b"".join(parts)


def encode_flights(*messages: Message, **options: Any) -> bytes:
    """Encodes messages of topic flights, by default a single one; options of ``encode_batch``."""
    values: dict[str, Any] = {
        "topic": "flights",
        "queue_id": 3,
        "producer_id": 5,
        "first_sequence": 7,
        "born_timestamp": 1_700_000_000_000,
    }
    return encode_batch(messages or (Message("flights", b"body"),), **(values | options))


def stored_batch(batch: bytes, **options: Any) -> bytes:
    """Stamps a batch as a broker does; options of ``stamp``."""
    values: dict[str, Any] = {
        "commitlog_offset": 1000,
        "base_queue_offset": 50,
        "store_timestamp": 1_700_000_000_001,
        "epoch": 1,
        "store_id": 2,
    }
    part = stamp(read_header(batch), **(values | options))
    return part + batch[len(part) :]


def decode_sent(batch: bytes) -> list[StoredMessage]:
    """Decodes the messages of one batch after its checks."""
    return decode_messages(batch, check_batch(batch))


def split_batches(buffer: Buffer, *, most: int) -> list[tuple[int, BatchHeader]]:
    """Finds the batches that stand one behind the other, as in a request.

    Args:
        buffer: Nothing but batches.
        most: Limit of batches.

    Returns:
        Position and header of each; all are checked as by ``check_batch``.

    Raises:
        CorruptBatch: A batch fails its checks, or there are none or too many.
    """
    found: list[tuple[int, BatchHeader]] = []
    position, end = 0, len(buffer)
    while position < end:
        if len(found) == most:
            raise CorruptBatch(f"more than {most} batches in one request")
        header = check_batch(buffer, position)
        found.append((position, header))
        position += header.total_size
    if not found:
        raise CorruptBatch("a request without a batch")
    return found
