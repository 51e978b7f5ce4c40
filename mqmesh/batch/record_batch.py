"""The record batch: the one format of wire, log, replica and archive.

A batch holds 1 to 65,536 messages of one message queue. The producer encodes
it once; the broker stores those very bytes and fills in only the first 48, so
no byte of a message is touched between the producer and the consumer.

Layout, little endian (the same table stands in ``docs/storage-format.md``):

======== ===== ======= ==========================================================
position bytes type    meaning
======== ===== ======= ==========================================================
0        4     bytes   magic, ``MQB1``
4        4     u32     header_crc: CRC-32 of bytes 8 to 51
8        8     u64     commitlog_offset: where the batch begins in the log
16       8     u64     base_queue_offset: queue offset of its first message
24       8     i64     store_timestamp, ms
32       4     u32     epoch: grows whenever a log's tail is cut or a master changes
36       4     u32     store_id: random number of the store that wrote it
40       8     bytes   store_check: by the store's key over bytes 8 to 39 and 48 to 55; else 0
48       4     u32     producer_crc: CRC-32 of byte 52 to the end
52       4     u32     total_size: header, meta and payload
56       1     u8      version, 1
57       1     u8      codec of the payload: 0 none, 1 zstd
58       2     u16     attributes, see ``Attributes``
60       4     u32     message_count
64       4     u32     queue_id
68       4     u32     meta_size
72       4     u32     payload_size: as stored
76       4     u32     raw_size: of the payload without compression
80       8     u64     producer_id: instance id of the producer
88       8     u64     first_sequence: of the first message; the others follow by one
96       8     i64     born_timestamp, ms
104      …     msgpack meta: array of topic, tag hashes, born host
…        …     msgpack payload: array of messages (``mqmesh.message.Message``)
======== ===== ======= ==========================================================

The broker writes bytes 0 to 47, the producer all others. ``producer_crc`` is
checked by broker, slave, consumer and recovery; ``header_crc`` covers it too,
so a header never passes for another batch's. These values reach disk and wire
and never change; a new layout gets a new version, and this reader stays.
"""

import enum
import operator
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Final

import msgspec

from mqmesh.batch.native_decode import decode_at_once
from mqmesh.batch.payload import (
    CODEC_NONE,
    CODEC_ZSTD,
    MAX_MESSAGES,
    MAX_RAW_BYTES,
    Buffer,
    Payload,
    decode_payload,
    encode_payload,
    find_messages,
    open_payload,
)
from mqmesh.batch.store_check import NO_CHECK, StoreCheck
from mqmesh.checksum import crc32
from mqmesh.errors import CorruptBatch, InvalidArgument, LocalProtocolError
from mqmesh.message import BatchInfo, Message, StoredMessage, check_topic, is_system_topic
from mqmesh.namespaces import shown_name
from mqmesh.units import (
    MAX_OFFSET,
    MAX_TIMESTAMP_MS,
    MIB,
    CommitLogOffset,
    QueueOffset,
    TimestampMs,
)

MAGIC: Final = b"MQB1"
VERSION: Final = 1
HEADER_SIZE: Final = 104
BROKER_PART_SIZE: Final = 48
"""The broker writes this many bytes at the front; the rest is the producer's."""

MAX_META_BYTES: Final = 1 * MIB
MAX_BATCH_BYTES: Final = 16 * MIB

_HEADER = struct.Struct("<4sIQQqII8sIIBBHIIIIIQQq")
_BROKER_PART = struct.Struct("<4sIQQqII8s")
_STAMPED = struct.Struct("<QQqIIII")
_PRODUCER_PART = struct.Struct("<IBBHIIIIIQQq")
_U32 = struct.Struct("<I")
_NO_BROKER_PART = MAGIC + bytes(BROKER_PART_SIZE - len(MAGIC))
_CRC_IN_STAMPED = 32
_CRC_END_IN_STAMPED = 36
_CHECKED = struct.Struct("<4sI")
_MIN_MESSAGE_BYTES = 5  # an array of a topic and a body: a store believes no more messages

assert _HEADER.size == HEADER_SIZE
assert _BROKER_PART.size == BROKER_PART_SIZE


class Attributes(enum.IntFlag):
    """Bits of the attributes field. On disk: never renumbered."""

    HAS_KEYS = 1
    HAS_TAGS = 2
    TRANSACTION_HALF = 4
    TRANSACTION_COMMIT = 8
    TRANSACTION_ROLLBACK = 12
    SPARSE = 16
    """A filter left messages out: meta then lists those that remain. Never stored."""
    REDELIVERED = 32
    """Carries an older message's id; takes no part in duplicate detection."""
    HAS_DELAY = 64
    NO_WAIT_STORE = 128
    """The producer does not wait for disk or slave, whatever the broker's mode."""
    HAS_EXPIRY = 256
    """The messages expire: meta then has the time, see ``delayed_batch``."""
    HAS_EXPECTED = 512
    """Messages for a table that count only if meta's revisions are the newest of their keys, see
    ``delayed_batch``."""


class BatchHeader(msgspec.Struct, frozen=True, gc=False):
    """The fixed fields of a batch; see the table at the head of the module."""

    magic: bytes
    header_crc: int
    commitlog_offset: CommitLogOffset
    base_queue_offset: QueueOffset
    store_timestamp: TimestampMs
    epoch: int
    store_id: int
    store_check: bytes
    producer_crc: int
    total_size: int
    version: int
    codec: int
    attributes: int
    message_count: int
    queue_id: int
    meta_size: int
    payload_size: int
    raw_size: int
    producer_id: int
    first_sequence: int
    born_timestamp: TimestampMs

    @property
    def next_queue_offset(self) -> QueueOffset:
        """Queue offset of the message behind the batch."""
        return QueueOffset(self.base_queue_offset + self.message_count)

    @property
    def end_offset(self) -> CommitLogOffset:
        """Offset in the log where the next batch begins."""
        return CommitLogOffset(self.commitlog_offset + self.total_size)


class BatchMeta(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The variable facts of a batch.

    Attributes:
        topic: Physical topic.
        tag_hashes: Little-endian u64 of ``message.tag_hash``: none at all when no message
            has a tag, one when all have the same, else one a message.
        born_host: The producer as ``host:pid``.
    """

    topic: str
    tag_hashes: bytes = b""
    born_host: Annotated[str, msgspec.Meta(max_length=255)] = ""


class CommitMeta(BatchMeta, array_like=True, frozen=True, gc=False):
    """The meta of a batch of committed half messages. Array positions are on disk.

    Attributes:
        prepared_transaction_offset: Commit-log offset of the batch of half messages.
    """

    prepared_transaction_offset: Annotated[int, msgspec.Meta(ge=-1, le=MAX_OFFSET)] = -1


class SparseMeta(BatchMeta, array_like=True, frozen=True, gc=False):
    """The meta of a batch that a filter left messages out of; it is never stored.

    Attributes:
        ordinals: Little-endian u16 of the position that each message had in the whole batch,
            ascending. ``message_count`` and the tag hashes, if any, are those of the whole.
        stored_size: Size of the whole batch in the log, in bytes.
        stored_crc: ``producer_crc`` of the whole batch.
    """

    ordinals: bytes = b""
    stored_size: Annotated[int, msgspec.Meta(ge=0, le=MAX_BATCH_BYTES)] = 0
    stored_crc: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = 0


_encoder = msgspec.msgpack.Encoder()
_meta_decoder = msgspec.msgpack.Decoder(BatchMeta)
_sparse_decoder = msgspec.msgpack.Decoder(SparseMeta)
_commit_decoder = msgspec.msgpack.Decoder(CommitMeta)
# Plain numbers: each operator of enum.Flag takes a microsecond.
_HAS_KEYS = int(Attributes.HAS_KEYS)
_HAS_TAGS = int(Attributes.HAS_TAGS)
_SPARSE = int(Attributes.SPARSE)
_COMMITTED = int(Attributes.TRANSACTION_COMMIT)
_TRANSACTION = int(Attributes.TRANSACTION_HALF | Attributes.TRANSACTION_ROLLBACK)


def encode_batch(
    messages: Sequence[Message],
    *,
    topic: str,
    queue_id: int,
    producer_id: int,
    first_sequence: int,
    born_timestamp: int,
    born_host: str = "",
    attributes: int = 0,
    compress_over_bytes: int | None = None,
) -> bytes:
    """Encodes messages of one queue as a batch whose broker part is still blank.

    The messages are taken as valid (the producer checks them) and of exactly the
    class ``Message``.

    Args:
        messages: 1 to 65,536 messages.
        topic: Physical topic of the batch.
        queue_id: Queue the batch is for, 0 to 2**32 - 1.
        producer_id: Instance id of the producer, u64.
        first_sequence: Sequence of the first message, u64.
        born_timestamp: Now, in ms.
        born_host: ``host:pid``.
        attributes: Transaction and redelivery bits; those for keys and tags are found here.
        compress_over_bytes: Compress when messages have at least so many bytes on average,
            and only if that makes the batch smaller; None never compresses.

    Returns:
        Layout: record batch.

    Raises:
        LocalProtocolError: No message, too many, a batch over ``MAX_BATCH_BYTES``, or one
            with over ``MAX_STRINGS``.
    """
    parts = batch_parts(
        encode_payload(messages, compress_over_bytes=compress_over_bytes),
        topic=topic,
        queue_id=queue_id,
        producer_id=producer_id,
        first_sequence=first_sequence,
        born_timestamp=born_timestamp,
        born_host=born_host,
        attributes=attributes,
    )
    return b"".join(parts)


def batch_parts(
    payload: Payload,
    *,
    topic: str,
    queue_id: int,
    producer_id: int,
    first_sequence: int,
    born_timestamp: int,
    born_host: str = "",
    attributes: int = 0,
    meta: BatchMeta | None = None,
) -> tuple[bytes, ...]:
    """Puts a header before an encoded payload; arguments and errors as of ``encode_batch``.

    The broker uses it, too, to give stored messages another topic or queue without
    decoding them. ``meta`` stands in place of the plain one of topic, tags and host: batches
    of delayed messages have a longer one.

    Returns:
        The batch in pieces, so that it need not be copied before its frame is made.
    """
    assert 0 <= born_timestamp <= MAX_TIMESTAMP_MS
    assert 0 < payload.message_count <= (1 << 64) - first_sequence
    if meta is None:
        meta = BatchMeta(topic, payload.tag_hashes, born_host)
    meta_data = _encoder.encode(meta)
    if len(meta_data) > MAX_META_BYTES:
        raise LocalProtocolError(
            f"tags and times of {payload.message_count} messages take {len(meta_data)} bytes; a "
            f"batch has room for {MAX_META_BYTES}"
        )
    total_size = HEADER_SIZE + len(meta_data) + len(payload.data)
    if total_size > MAX_BATCH_BYTES:
        raise LocalProtocolError(f"a batch of {total_size} bytes is over {MAX_BATCH_BYTES}")
    if payload.tag_hashes:
        attributes |= _HAS_TAGS
    if payload.has_keys:
        attributes |= _HAS_KEYS
    fields = _PRODUCER_PART.pack(
        total_size,
        VERSION,
        payload.codec,
        attributes,
        payload.message_count,
        queue_id,
        len(meta_data),
        len(payload.data),
        payload.raw_size,
        producer_id,
        first_sequence,
        born_timestamp,
    )
    crc = crc32(payload.data, crc32(meta_data, crc32(fields)))
    return (_NO_BROKER_PART, _U32.pack(crc), fields, meta_data, payload.data)


def read_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """Reads and bounds-checks the fixed fields; no checksum is looked at.

    Args:
        buffer: Bytes that should hold a batch.
        position: Position at which the batch should begin.

    Raises:
        CorruptBatch: Too short, no magic, unknown version, or sizes that contradict
            each other or exceed a limit.
    """
    if len(buffer) - position < HEADER_SIZE:
        raise CorruptBatch(
            f"{len(buffer) - position} bytes are too few for a batch header of {HEADER_SIZE}"
        )
    header = BatchHeader(*_HEADER.unpack_from(buffer, position))
    if header.magic != MAGIC:
        raise CorruptBatch(f"no batch here: magic {header.magic!r} instead of {MAGIC!r}")
    if header.version != VERSION:
        raise CorruptBatch(f"batch version {header.version} is unknown; this reader knows 1")
    if (
        header.total_size > MAX_BATCH_BYTES
        or header.meta_size > MAX_META_BYTES
        or header.raw_size > MAX_RAW_BYTES
        or header.total_size != HEADER_SIZE + header.meta_size + header.payload_size
        or not 0 < header.message_count <= MAX_MESSAGES
        or (
            header.raw_size < header.message_count * _MIN_MESSAGE_BYTES
            and not header.attributes & _SPARSE
        )
        or header.codec > CODEC_ZSTD
        or (header.codec == CODEC_NONE and header.raw_size != header.payload_size)
    ):
        raise CorruptBatch(
            f"impossible batch: total {header.total_size}, meta {header.meta_size}, payload "
            f"{header.payload_size}, raw {header.raw_size}, messages {header.message_count}, "
            f"codec {header.codec}"
        )
    # Numbers that no reader could count on from, or turn into a date.
    if (
        header.first_sequence > (1 << 64) - header.message_count
        or header.base_queue_offset > MAX_OFFSET - header.message_count
        or header.commitlog_offset > MAX_OFFSET - header.total_size
        or not 0 <= header.born_timestamp <= MAX_TIMESTAMP_MS
        or not 0 <= header.store_timestamp <= MAX_TIMESTAMP_MS
    ):
        raise CorruptBatch(
            f"impossible batch: sequence {header.first_sequence}, queue offset "
            f"{header.base_queue_offset}, log offset {header.commitlog_offset}, born "
            f"{header.born_timestamp}, stored {header.store_timestamp}"
        )
    return header


def check_batch(buffer: Buffer, position: int = 0) -> BatchHeader:
    """Checks the producer's part: lengths, then its checksum.

    Returns:
        The header; the broker's fields are not checked.

    Raises:
        CorruptBatch: The bytes are no batch, cut short, or changed on the way.
    """
    header = read_header(buffer, position)
    end = position + header.total_size
    if len(buffer) < end:
        raise CorruptBatch(
            f"batch of {header.total_size} bytes is cut off after {len(buffer) - position}"
        )
    crc = crc32(memoryview(buffer)[position + BROKER_PART_SIZE + 4 : end])
    if crc != header.producer_crc:
        raise CorruptBatch(f"producer checksum is {crc:#010x}, not {header.producer_crc:#010x}")
    return header


def check_stored(buffer: Buffer, position: int = 0) -> BatchHeader:
    """Checks a stored batch: the producer's and the broker's part.

    Raises:
        CorruptBatch: As ``check_batch``, or the broker's part fails its checksum.
    """
    header = check_batch(buffer, position)
    crc = crc32(memoryview(buffer)[position + 8 : position + BROKER_PART_SIZE + 4])
    if crc != header.header_crc:
        raise CorruptBatch(f"header checksum is {crc:#010x}, not {header.header_crc:#010x}")
    return header


def stamp(
    header: BatchHeader,
    *,
    commitlog_offset: int,
    base_queue_offset: int,
    store_timestamp: int,
    epoch: int,
    store_id: int,
    store_check: StoreCheck | None = None,
) -> bytes:
    """Make the broker's part of a batch.

    Args:
        header: Header that the producer wrote.
        commitlog_offset: Commit-log offset of the batch.
        base_queue_offset: Queue offset of its first message.
        store_timestamp: Current time, in ms.
        epoch: Epoch of the log.
        store_id: Identity of the store.
        store_check: Check of a store whose records are adjacent, so that they can be forged
            from inside a body; None leaves zeros.

    Returns:
        The first 48 bytes; the producer's bytes follow them in the log unchanged.
    """
    fields = _STAMPED.pack(
        commitlog_offset,
        base_queue_offset,
        store_timestamp,
        epoch,
        store_id,
        header.producer_crc,
        header.total_size,
    )
    check = NO_CHECK if store_check is None else store_check(fields)
    part = fields[:_CRC_IN_STAMPED] + check
    crc = crc32(part + fields[_CRC_IN_STAMPED:_CRC_END_IN_STAMPED])
    return _CHECKED.pack(MAGIC, crc) + part


def read_meta(buffer: Buffer, header: BatchHeader, position: int = 0) -> BatchMeta:
    """Decodes the meta section of a batch whose header was read.

    Raises:
        CorruptBatch: The meta does not have the format.
    """
    start = position + HEADER_SIZE
    try:
        meta = _meta_decoder.decode(memoryview(buffer)[start : start + header.meta_size])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptBatch(f"batch meta cannot be decoded: {error}") from error
    if len(meta.tag_hashes) not in (0, 8, 8 * header.message_count):
        raise CorruptBatch(
            f"{len(meta.tag_hashes)} bytes of tag hashes for {header.message_count} messages"
        )
    _check_foreign_topic(meta.topic)
    return meta


def is_of_topic(buffer: Buffer, topic: str, position: int = 0) -> bool:
    """Return whether a stored batch is of a topic; its checksums are not compared.

    Args:
        buffer: Has the batch, at least its header and meta.
        topic: Physical topic.
        position: Position at which the batch begins.
    """
    start = position + HEADER_SIZE + 1
    mark = topic_mark(topic)
    if buffer[start : start + len(mark)] == mark:
        return True
    # A producer of another maker may write the topic's length otherwise.
    try:
        return read_meta(buffer, read_header(buffer, position), position).topic == topic
    except CorruptBatch:
        return False


def topic_mark(topic: str) -> bytes:
    """Return the bytes behind the first byte of a meta: the topic, as msgpack writes it."""
    return msgspec.msgpack.encode(topic)


def _read_prepared(buffer: Buffer, header: BatchHeader, position: int) -> int:
    start = position + HEADER_SIZE
    try:
        meta = _commit_decoder.decode(memoryview(buffer)[start : start + header.meta_size])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptBatch(f"the meta of committed messages cannot be decoded: {error}") from error
    return meta.prepared_transaction_offset


def read_sparse_meta(
    buffer: Buffer, header: BatchHeader, position: int = 0
) -> tuple[SparseMeta, tuple[int, ...]]:
    """Decodes the meta of a batch with ``Attributes.SPARSE`` whose header was read.

    Returns:
        The meta, and the position of each message of the payload in the whole batch.

    Raises:
        CorruptBatch: The meta does not have the format.
    """
    start = position + HEADER_SIZE
    try:
        meta = _sparse_decoder.decode(memoryview(buffer)[start : start + header.meta_size])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptBatch(f"meta of a cut batch cannot be decoded: {error}") from error
    number, rest = divmod(len(meta.ordinals), 2)
    ordinals = struct.unpack(f"<{number}H", meta.ordinals[: 2 * number])
    if (
        rest
        or not ordinals
        or ordinals[-1] >= header.message_count
        or not all(map(operator.lt, ordinals, ordinals[1:]))
    ):
        raise CorruptBatch(
            f"{number} ordinals of a cut batch do not ascend within {header.message_count} messages"
        )
    _check_foreign_topic(meta.topic)
    return meta, ordinals


def read_payload(
    buffer: Buffer, header: BatchHeader, position: int = 0, *, message_count: int | None = None
) -> memoryview | bytes:
    """Read the payload of a batch whose header was read: an array of the header's message count.

    ``message_count`` is the number of a sparse batch, in place of the header's.

    Raises:
        CorruptBatch: The payload does not inflate, or has another number of messages.
    """
    start = position + HEADER_SIZE + header.meta_size
    stored = memoryview(buffer)[start : start + header.payload_size]
    count = header.message_count if message_count is None else message_count
    return open_payload(stored, header.codec, header.raw_size, count)


def decode_messages(
    buffer: Buffer,
    header: BatchHeader,
    *,
    position: int = 0,
    broker_name: str = "",
    store_host: str = "",
    containing: bytes = b"",
    fencing_token: int = 0,
    attempt: int = 0,
    namespace: str = "",
) -> list[StoredMessage]:
    """Decodes the messages of a batch that passed ``check_batch``.

    Args:
        buffer: Bytes that hold the batch.
        header: Header of the batch.
        position: Position at which the batch begins.
        broker_name: Broker group that the batch came from, for the messages' facts.
        store_host: Address of that broker.
        containing: Only messages that have these bytes somewhere in their encoding.
        fencing_token: Token of the lock, or number of the lease, under which they are consumed, for
            the messages' facts.
        attempt: Number of deliveries under a lease.
        namespace: Namespace taken off the topics of batch and messages.

    Returns:
        All messages, or those with ``containing``, in order; of a sparse batch those it has.

    Raises:
        CorruptBatch: The payload does not inflate or decode to so many messages. Memory
            stays within ten times ``MAX_RAW_BYTES`` whatever the bytes are.
    """
    base: int = header.base_queue_offset
    meta: BatchMeta
    places: Sequence[int] = range(base, base + header.message_count)
    prepared = -1
    if header.attributes & _SPARSE:
        meta, ordinals = read_sparse_meta(buffer, header, position)
        payload = read_payload(buffer, header, position, message_count=len(ordinals))
        places = [base + ordinal for ordinal in ordinals]
        stored_size, stored_crc = meta.stored_size, meta.stored_crc
    else:
        meta = read_meta(buffer, header, position)
        if header.attributes & _TRANSACTION == _COMMITTED:
            prepared = _read_prepared(buffer, header, position)
        payload = read_payload(buffer, header, position)
        stored_size, stored_crc = header.total_size, header.producer_crc
    info = BatchInfo(
        shown_name(namespace, meta.topic) if namespace else meta.topic,
        header.queue_id,
        broker_name,
        header.base_queue_offset,
        header.commitlog_offset,
        stored_size,
        header.born_timestamp,
        header.store_timestamp,
        meta.born_host,
        store_host,
        header.producer_id,
        header.first_sequence,
        stored_crc,
        CommitLogOffset(prepared),
        fencing_token,
        attempt,
    )
    if not containing and type(places) is range:
        plain = decode_at_once(payload, header.message_count, info, meta.topic)
        if plain is not None:
            return plain
    if containing:
        found, payload = find_messages(payload, containing)
        places = [places[number] for number in found]
    messages = decode_payload(payload)
    _give_places(messages, places, info, meta.topic, namespace)
    return messages


def _give_places(
    messages: list[StoredMessage],
    places: Sequence[int],
    info: BatchInfo,
    topic: str,
    namespace: str,
) -> None:
    shown = info.topic
    for queue_offset, message in zip(places, messages, strict=False):
        if message.topic != topic:
            _check_foreign_topic(message.topic)
            if is_system_topic(topic):  # a retried message keeps the topic it was sent to
                message.topic = shown_name(namespace, message.topic)
            else:
                message.topic = shown
        elif namespace:
            message.topic = shown
        message.queue_offset = queue_offset  # type: ignore[assignment]  # no call in the hot loop
        message.batch = info


@lru_cache(maxsize=1024)
def _check_foreign_topic(topic: str) -> None:
    # Topics become parts of queries and archives, so no reader lets a strange one through.
    try:
        check_topic(topic)
    except InvalidArgument as error:
        raise CorruptBatch(str(error)) from None
