"""SEND_MESSAGE: batches to a broker, and the outcome of each.

The hot header is a fixed struct, ``<IHH16s``: timeout_ms u32, batch_count u16,
reserved u16, and the instance key of the producer that all batches are of. The
body is that many record batches, one behind the other, each for one queue of
the broker.

The response's header is one 32-byte entry a batch, ``<HHIqqq``: response code
u16, send status u16, retry_after_ms u32, base_queue_offset i64,
commitlog_offset i64, store_timestamp i64. If a batch was refused, the body is
a msgpack array of remarks, one a batch.
"""

import enum
import operator
import struct
from collections.abc import Sequence
from itertools import starmap
from typing import Annotated, Final

import msgspec

from mqmesh.errors import RemoteProtocolError
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.names import TopicName
from mqmesh.protocol.pulling import QueueId

MAX_BATCHES_PER_REQUEST: Final = 4_096

_SEND = struct.Struct("<IHH16s")
_ENTRY = struct.Struct("<HHIqqq")
_OK: Final = int(ResponseCode.SUCCESS)
_remarks_encoder = msgspec.msgpack.Encoder()
_remarks_decoder = msgspec.msgpack.Decoder(
    Annotated[list[str], msgspec.Meta(max_length=MAX_BATCHES_PER_REQUEST)]
)
_status = operator.itemgetter(1)


class SendStatus(enum.IntEnum):
    """Durability that an accepted message may still lack; RocketMQ's names. On the wire."""

    SEND_OK = 0
    """Stored as safely as the broker is configured to."""
    FLUSH_DISK_TIMEOUT = 1
    """Stored in memory; the disk did not confirm in time (``SYNC_FLUSH``)."""
    FLUSH_SLAVE_TIMEOUT = 2
    """Stored; the slave did not confirm in time (``SYNC_MASTER``)."""
    SLAVE_NOT_AVAILABLE = 3
    """Stored; no slave is near enough (``SYNC_MASTER``)."""

    def __str__(self) -> str:
        """Return its name, for people; numbers of the wire are for programs."""
        return self.name


_LAST_STATUS: Final = int(max(SendStatus))


class BatchOutcome(msgspec.Struct, frozen=True, gc=False):
    """Result of one batch.

    Attributes:
        code: Response code; only with SUCCESS do the offsets mean anything, but that of the newest
            message of the key with REVISION_CONFLICT, -1 for none.
        status: ``SendStatus`` as a number.
        retry_after_ms: For SYSTEM_BUSY.
        base_queue_offset: Queue offset of the first message.
        commitlog_offset: Where the batch begins in the log.
        store_timestamp: When it was stored, ms.
        remark: Why it was refused.
    """

    code: int
    status: int = 0
    retry_after_ms: int = 0
    base_queue_offset: int = -1
    commitlog_offset: int = -1
    store_timestamp: int = 0
    remark: str = ""


class ProducerRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """QUERY_PRODUCER: the batches of a producer that a broker remembers in a queue.

    After its program died, a sender uses the answer to find out whether the last send is stored,
    before it sends again.

    Attributes:
        topic: Topic that the producer sends to.
        queue_id: Message queue.
        producer_id: Of the producer instance.
        delayed: Delayed messages are meant, which wait in queues that all topics share.

    Errors:
        TOPIC_NOT_EXIST: No such topic.
        SYSTEM_BUSY: A batch of the producer is not safe yet: it may be acknowledged, or taken back.
        NOT_MASTER: The broker is a follower.
    """

    topic: TopicName
    queue_id: QueueId
    producer_id: Annotated[int, msgspec.Meta(ge=0)]
    delayed: bool = False


class ProducerBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Batch that a broker remembers of a producer.

    Attributes:
        first_sequence: Sequence of its first message.
        message_count: Number of its messages.
        status: ``SendStatus`` that a send of it would be answered with by now.
    """

    first_sequence: int
    message_count: int
    status: int = 0


class ProducerInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to QUERY_PRODUCER.

    Attributes:
        batches: The newest ones of each queue; empty for a producer that is not known, or not any
            more.
        min_offset: Commit-log offset where the broker's log begins.
        end_offset: Commit-log offset where it ends.
    """

    batches: list[ProducerBatch]
    min_offset: int
    end_offset: int


def encode_send(timeout_ms: int, batch_count: int, key: bytes) -> bytes:
    """Encodes the header of SEND_MESSAGE.

    Args:
        timeout_ms: How long the sender will wait, 0 to 2**32 - 1.
        batch_count: 1 to 4,096.
        key: Of the producer instance, 16 bytes; see ``producer_key``.
    """
    return _SEND.pack(timeout_ms, batch_count, 0, key)


def decode_send(header: memoryview) -> tuple[int, int, bytes]:
    """Decodes the header of SEND_MESSAGE.

    Returns:
        timeout_ms, batch_count and the key.

    Raises:
        RemoteProtocolError: Wrong size, or a batch count out of bounds.
    """
    if len(header) != _SEND.size:
        raise RemoteProtocolError(f"a send header has {_SEND.size} bytes, not {len(header)}")
    timeout_ms, batch_count, _, key = _SEND.unpack(header)
    if not 0 < batch_count <= MAX_BATCHES_PER_REQUEST:
        raise RemoteProtocolError(
            f"{batch_count} batches in a request; 1 to {MAX_BATCHES_PER_REQUEST} are allowed"
        )
    return timeout_ms, batch_count, key


def encode_outcomes(outcomes: Sequence[BatchOutcome]) -> tuple[bytes, bytes]:
    """Encodes the response to SEND_MESSAGE.

    Returns:
        Header and body.
    """
    entries = []
    is_refused = False
    for one in outcomes:
        code = one.code
        entries.append(
            _ENTRY.pack(
                code,
                one.status,
                one.retry_after_ms,
                one.base_queue_offset,
                one.commitlog_offset,
                one.store_timestamp,
            )
        )
        if code != _OK:
            is_refused = True
    header = b"".join(entries)
    if not is_refused:
        return header, b""
    return header, _remarks_encoder.encode([one.remark for one in outcomes])


def decode_outcomes(header: memoryview, body: memoryview) -> list[BatchOutcome]:
    """Decodes the response to SEND_MESSAGE.

    Raises:
        RemoteProtocolError: Sizes that do not fit, or remarks that are none.
    """
    if not header or len(header) % _ENTRY.size:
        raise RemoteProtocolError(f"a send response of {len(header)} bytes is no array of entries")
    entries: list[tuple[int, int, int, int, int, int]] = list(_ENTRY.iter_unpack(header))
    if max(map(_status, entries)) > _LAST_STATUS:
        raise RemoteProtocolError(f"an unknown send status in {entries[:8]}")
    if not len(body):
        return list(starmap(BatchOutcome, entries))
    try:
        remarks = _remarks_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"remarks of a send response: {error}") from error
    if len(remarks) != len(entries):
        raise RemoteProtocolError(f"{len(remarks)} remarks for {len(entries)} batches")
    return [
        BatchOutcome(*entry, remark=remark) for entry, remark in zip(entries, remarks, strict=True)
    ]
