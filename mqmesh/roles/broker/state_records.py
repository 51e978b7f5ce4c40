"""State of a broker beside its messages, as records of its log: topics, groups, offsets.

A state record says what is true of one thing from now on. Records stand in the message bodies of
``RMQ_SYS_STATE_TOPIC``, queue 0, one body a batch:

======== ============ ==================================================================
position msgpack      meaning
======== ============ ==================================================================
0        int          version, 6; version 5 has no tables, version 4 does not say which queues were
                      processed either, version 3 has no parts of records and says nothing of
                      what is known of owners, version 2 has no owners, version 1 fewer settings
                      as well
1        int          snapshot_at: from this queue offset on the topic holds everything
2        array        state records, each an array that begins with its kind
======== ============ ==================================================================

==== ======================== =========================================================
kind state record             fields
==== ======================== =========================================================
1    ``TopicRecord``          topic, settings or nil when it was deleted
2    ``GroupRecord``          group, settings or nil
3    ``OffsetsRecord``        group, topic, offsets by queue id or nil, whether it adds, queues
                              that were processed
4    ``SentBackRecord``       group, queue offset from which its marks count, or nil
5    ``DeliveryRecord``       group, topic, queue id, floor or nil, next offset, first valid
                              lease, spans cleared, runs in them, whether it adds
6    ``OwnersRecord``         group, members by client id or nil, owners of queues, epoch
                              whose master knew all owners or nil
7    ``RecordPart``           number, whether it is the last, bytes
==== ======================== =========================================================

On disk: kinds are never renumbered, fields are added at the end only. The same tables stand in
``docs/storage-format.md``.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final

import msgspec

from mqmesh.batch.payload import Buffer
from mqmesh.batch.record_batch import Attributes, decode_messages, encode_batch, read_header
from mqmesh.errors import CorruptBatch, CorruptRecord
from mqmesh.message import STATE_TOPIC, Message
from mqmesh.protocol.groups import BY_CONSUMER
from mqmesh.units import TimestampMs

STATE_VERSION: Final = 6
STATE_QUEUE: Final = 0
_PRODUCER_ID: Final = 1

MOST_PARTS: Final = 4_096
"""Parts of a state record: those of the largest request, in segments of the smallest size, are a
quarter of it."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class TopicSettings(msgspec.Struct, array_like=True, frozen=True):
    """Settings of a topic: numbers of queues, ``Perm`` bits, whether it is ordered, whether a
    message made it, its retention, schema, priorities, life times, revisions of a table's keys, and
    when a table was made, wall clock, ms; see ``TopicConfig``."""

    read_queue_nums: _Count
    write_queue_nums: _Count
    perm: _Count
    order: bool = False
    is_auto: bool = False
    retention_ms: _Offset = 0
    retention_messages: _Offset = 0
    schema: str = ""
    priorities: _Count = 0
    message_ttl: bool = False
    on_expired: str = "drop"
    history: _Count = 0
    table_id: _Offset = 0


class GroupSettings(msgspec.Struct, array_like=True, frozen=True):
    """Settings of a consumer group, see ``GroupConfig``."""

    consume_enable: bool = True
    consume_broadcast_enable: bool = True
    retry_max_times: int = BY_CONSUMER
    notify_consumer_ids_changed_enable: bool = True
    retry_delays: str = ""
    dead_letter: str = "keep"
    paused_until: _Offset = 0
    paused_topics: dict[str, _Offset] = {}
    max_messages_per_s: _Count = 0
    delivery: str = "queue"
    invisible_ms: _Count = 60_000
    max_unsettled: _Count = 10_000
    lost_grace_ms: _Count = 10_000
    priority_fairness: _Count = 0


class TopicRecord(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """A topic has these settings; with None it was deleted."""

    topic: str
    settings: TopicSettings | None = None


class GroupRecord(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """A consumer group has these settings; with None it has none."""

    group: str
    settings: GroupSettings | None = None


class OffsetsRecord(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Offsets at which a group goes on in the queues of a topic; with None it was nowhere yet.

    Attributes:
        group: Consumer group.
        topic: Physical topic.
        offsets: Queue offset by queue id.
        adds: To what the record before says of the same; else instead of it.
        processed: Queue ids: outputs are stored of messages before these offsets.
    """

    group: str
    topic: str
    offsets: dict[_Count, _Offset] | None = None
    adds: bool = False
    processed: list[_Count] = []


class SentBackRecord(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Marks of what a group sent back count from this queue offset on; with None all do."""

    group: str
    counts_from: _Offset | None = None


class DeliveryRun(msgspec.Struct, array_like=True, frozen=True):
    """Messages that were handed out and are not settled.

    Attributes:
        first: Queue offset of the first one.
        held: How many follow one another; else a bit each, from the lowest bit of the first byte.
        attempt: How often they were handed out.
        due_ms: When they are handed out again, wall clock; 0 while a member has them.
        lease: Number of the lease, with order by key; else 0.
    """

    first: _Offset
    held: (
        Annotated[int, msgspec.Meta(ge=1, le=1_024)]
        | Annotated[bytes, msgspec.Meta(max_length=128)]
    )
    attempt: _Count
    due_ms: _Offset = 0
    lease: _Offset = 0


class DeliveryRecord(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """Delivery window of a group in a queue, or what has changed of it.

    Attributes:
        group: Consumer group.
        topic: Physical topic.
        queue_id: Message queue.
        floor: All messages before it are settled; None for no window any more.
        next_offset: No message from it on was ever handed out.
        valid_from: Leases of smaller numbers are stale.
        cleared: Spans, first offset and end, of which ``runs`` says all: what else was open in
            them is settled.
        runs: Messages that are open.
        adds: To what the record before says of the window; else instead of it.
        previous_offset: ``next_offset`` of the record before, with ``adds``: if that one cannot be
            read, what was handed out up to there is open.
    """

    group: str
    topic: str
    queue_id: _Count
    floor: _Offset | None = None
    next_offset: _Offset = 0
    valid_from: _Offset = 0
    cleared: list[tuple[_Offset, _Offset]] = []
    runs: list[DeliveryRun] = []
    adds: bool = False
    previous_offset: _Offset = 0


class MemberSubscriptions(msgspec.Struct, array_like=True, frozen=True):
    """Part of a member in its group, see ``ConsumerData``; subscriptions are topic, expression and
    its type."""

    message_model: str
    consume_from_where: str
    subscriptions: list[tuple[str, str, str]]
    delivery: str = "queue"
    divides_by_number: bool = False


class QueueOwner(msgspec.Struct, array_like=True, frozen=True):
    """Owner of a queue in a group.

    Attributes:
        topic: Physical topic.
        queue_id: Message queue.
        client_id: The member; empty for nobody.
        token: Of its lock; 0 if it has none, as without order.
    """

    topic: str
    queue_id: _Count
    client_id: str = ""
    token: _Offset = 0


class OwnersRecord(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """Members of a group that came, changed or, with None, left, and owners of queues that changed;
    all others stay as they were.

    Attributes:
        group: Consumer group; empty where only ``known_epoch`` is said.
        members: Members by client id.
        queues: Owners of queues.
        known_epoch: Epoch of a master that knew the owners of all groups, 0 if the records before
            may lack some; None says nothing of that.
    """

    group: str
    members: dict[str, MemberSubscriptions | None] = {}
    queues: list[QueueOwner] = []
    known_epoch: _Offset | None = None


class RecordPart(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """Part of an encoded state record that is larger than a body may be; all follow one another.

    Attributes:
        number: From 0.
        is_last: The record is whole.
        data: Bytes of the record.
    """

    number: Annotated[int, msgspec.Meta(ge=0, lt=MOST_PARTS)]
    is_last: bool
    data: bytes


StateRecord = (
    TopicRecord | GroupRecord | OffsetsRecord | SentBackRecord | DeliveryRecord | OwnersRecord
)


class StateBody(msgspec.Struct, array_like=True, frozen=True):
    """One message body; see the head of the module."""

    version: int
    snapshot_at: _Offset
    records: list[StateRecord | RecordPart]


class JoinedRecords:
    """Reader of the state records of bodies that follow one another; it joins those in parts."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def read(self, body: StateBody) -> Iterator[StateRecord | None]:
        """Yield the records that end in a body; None for one whose parts cannot be read."""
        for record in body.records:
            if not isinstance(record, RecordPart):
                self._parts = []  # the end of what was begun was not written
                yield record
                continue
            if record.number == 0:
                self._parts = []
            if record.number != len(self._parts):
                self._parts = []
                yield None
                continue
            self._parts.append(record.data)
            if record.is_last:
                data, self._parts = b"".join(self._parts), []
                try:
                    yield _record_decoder.decode(data)
                except (ValueError, RecursionError):
                    yield None


class _Head(msgspec.Struct, array_like=True, frozen=True):
    version: int


class _RawBody(msgspec.Struct, array_like=True, frozen=True):
    version: int
    snapshot_at: int
    records: Sequence[msgspec.Raw]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StateBody)
_record_decoder: msgspec.msgpack.Decoder[StateRecord] = msgspec.msgpack.Decoder(StateRecord)
_head_decoder = msgspec.msgpack.Decoder(_Head)


def in_bodies(records: Iterable[StateRecord], most_bytes: int) -> list[list[msgspec.Raw]]:
    """Encodes state records and divides them, in order, into bodies.

    Args:
        records: Any number.
        most_bytes: A body has at most so many; larger records are divided into ``RecordPart``.

    Returns:
        Arguments for ``encode_state``; at least one list.
    """
    bodies: list[list[msgspec.Raw]] = [[]]
    size = 0
    for data in _encoded(records, most_bytes):
        if bodies[-1] and size + len(data) > most_bytes:
            bodies.append([])
            size = 0
        bodies[-1].append(msgspec.Raw(data))
        size += len(data)
    return bodies


def _encoded(records: Iterable[StateRecord], most_bytes: int) -> Iterator[bytes]:
    for record in records:
        data = _encoder.encode(record)
        if len(data) <= most_bytes:
            yield data
            continue
        for number, start in enumerate(range(0, len(data), most_bytes)):
            end = start + most_bytes
            yield _encoder.encode(RecordPart(number, end >= len(data), data[start:end]))


def encode_state(
    records: Sequence[msgspec.Raw], snapshot_at: int, born_timestamp: TimestampMs
) -> bytes:
    """The batch that puts one body into the log.

    Args:
        records: Encoded ones.
        snapshot_at: Queue offset from which on the topic has everything.
        born_timestamp: Wall clock, ms.

    Returns:
        Layout: record batch, its broker part blank.
    """
    body = _encoder.encode(_RawBody(STATE_VERSION, snapshot_at, records))
    return encode_batch(
        [Message(STATE_TOPIC, body)],
        topic=STATE_TOPIC,
        queue_id=STATE_QUEUE,
        producer_id=_PRODUCER_ID,
        first_sequence=0,
        born_timestamp=born_timestamp,
        attributes=Attributes.REDELIVERED,
    )


def decode_state(data: Buffer) -> StateBody:
    """Reads the body of a stored batch.

    Raises:
        CorruptRecord: It is not what ``encode_state`` wrote, or a later program did.
    """
    try:
        (message,) = decode_messages(data, read_header(data))
        version = _head_decoder.decode(message.body).version
        if not 1 <= version <= STATE_VERSION:
            raise CorruptRecord(
                f"a state record has version {version}; this broker reads 1 to {STATE_VERSION}"
            )
        return _decoder.decode(message.body)
    except (CorruptBatch, ValueError, RecursionError) as error:
        raise CorruptRecord(f"a state record cannot be read: {error}") from error


def in_parts(record: OffsetsRecord, most_queues: int) -> Iterator[OffsetsRecord]:
    """Divides offsets of many queues, so that no record is too large for a batch."""
    offsets = record.offsets
    if offsets is None or len(offsets) <= most_queues:
        yield record
        return
    items = list(offsets.items())
    for start in range(0, len(items), most_queues):
        part = dict(items[start : start + most_queues])
        processed = [queue_id for queue_id in record.processed if queue_id in part]
        yield OffsetsRecord(record.group, record.topic, part, start > 0, processed)
