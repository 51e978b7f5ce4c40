"""Changes of tables, as they stand in messages: those of producers, and those that are carried.

A carried message is the message of a table once more, in ``RMQ_SYS_CARRIED_TOPIC``, and keeps its
table's topic. Its property ``KV_CARRIED`` has four numbers with blanks between: ``table_id``,
revision, and in ms of the wall clock when it was stored and when it expires (``Revision``). The
names are on disk.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec

from mqmesh.batch.delayed_batch import expires_ms
from mqmesh.batch.payload import COMPRESS_OVER_BYTES, Buffer
from mqmesh.batch.record_batch import Attributes, BatchHeader, encode_batch, read_payload
from mqmesh.errors import CorruptBatch
from mqmesh.message import CARRIED_TOPIC, Message
from mqmesh.protocol.tables import MAX_KEY_BYTES, OPERATIONS, PROPERTY_KV_OPERATION, KvOperation
from mqmesh.roles.broker.features.tables.row import MOST_INLINE_BYTES, PUT, Revision
from mqmesh.units import TimestampMs

PROPERTY_CARRIED: Final = "KV_CARRIED"
CARRIED_QUEUE: Final = 0
_PRODUCER_ID: Final = 2
_NUMBERS: Final = {operation.value: number for number, operation in enumerate(OPERATIONS)}
_TOMBSTONE: Final = b"\0"
"""Body of a tombstone: a message has one."""


class TableMessage(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A message, as far as tables look at it."""

    topic: str
    body: bytes
    tag: msgspec.Raw = msgspec.Raw()
    keys: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()
    properties: dict[str, str] | None = None

    def key(self) -> bytes | None:
        """Return its key, None for a message without exactly one that a table may have."""
        if len(self.keys) != 1:
            return None
        key = self.keys[0].encode()
        return key if 0 < len(key) <= MAX_KEY_BYTES else None

    def operation(self) -> int | None:
        """Return the number of its operation, None for one that is not known."""
        if not self.properties:
            return PUT
        return _NUMBERS.get(self.properties.get(PROPERTY_KV_OPERATION, KvOperation.PUT))


class Change(msgspec.Struct, frozen=True, gc=False):
    """One revision of a key, with its value.

    Attributes:
        key: In UTF-8.
        revision: The revision.
        value: Of a put; empty of a tombstone.
    """

    key: bytes
    revision: Revision
    value: bytes

    def for_row(self) -> "Change":
        """Return the change as a row needs it: a long value stays in the log alone."""
        if len(self.value) <= MOST_INLINE_BYTES:
            return self
        return Change(self.key, self.revision, b"")


class CarriedChange(msgspec.Struct, frozen=True, gc=False):
    """A change that was carried.

    Attributes:
        topic: Of the table.
        table_id: ``Topic.table_id``.
        change: The change.
    """

    topic: str
    table_id: int
    change: Change


_decoder = msgspec.msgpack.Decoder(list[TableMessage])


def table_messages(data: Buffer, header: BatchHeader) -> list[TableMessage]:
    """Return the messages of a batch.

    Raises:
        CorruptBatch: They cannot be decoded.
    """
    try:
        return _decoder.decode(read_payload(data, header))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptBatch(f"messages of a table cannot be decoded: {error}") from error


def changes_of(
    messages: Sequence[TableMessage],
    *,
    base: int,
    place: int,
    stored_ms: int,
    expires_ms: int,
    tombstone_ms: int,
) -> list[Change]:
    """Return the changes that messages of a stored batch are; others than a table's are none.

    Args:
        messages: All of the batch.
        base: Queue offset of the first one.
        place: Commit-log offset of the batch.
        stored_ms: Store time.
        expires_ms: When its values expire, 0 for never.
        tombstone_ms: Life of a tombstone.
    """
    found = []
    for number, message in enumerate(messages, base + 1):
        key, operation = message.key(), message.operation()
        if key is None or operation is None:
            continue
        if operation == PUT:
            body = message.body
            revision = Revision(number, place, stored_ms, PUT, expires_ms, len(body))
            found.append(Change(key, revision, body))
        else:
            due_ms = stored_ms + tombstone_ms
            found.append(Change(key, Revision(number, place, stored_ms, operation, due_ms), b""))
    return found


def read_changes(data: Buffer, header: BatchHeader, tombstone_ms: int) -> list[Change]:
    """Return the changes in a stored batch of a table.

    Raises:
        CorruptBatch: It cannot be decoded.
    """
    return changes_of(
        table_messages(data, header),
        base=header.base_queue_offset,
        place=header.commitlog_offset,
        stored_ms=header.store_timestamp,
        expires_ms=expires_ms(data, header),
        tombstone_ms=tombstone_ms,
    )


def read_carried(data: Buffer, header: BatchHeader) -> list[CarriedChange]:
    """Return the changes in a stored batch of carried messages.

    Raises:
        CorruptBatch: It cannot be decoded.
    """
    found = []
    for message in table_messages(data, header):
        key, operation = message.key(), message.operation()
        text = (message.properties or {}).get(PROPERTY_CARRIED, "").split()
        if key is None or operation is None or len(text) != 4:
            raise CorruptBatch(f"a carried message of {message.topic!r} says not what it is")
        table_id, number, stored_ms, due_ms = map(int, text)
        value = message.body if operation == PUT else b""
        revision = Revision(
            number, header.commitlog_offset, stored_ms, operation, due_ms, len(value)
        )
        found.append(CarriedChange(message.topic, table_id, Change(key, revision, value)))
    return found


def carried_batch(changes: Iterable[CarriedChange], now_ms: TimestampMs) -> bytes:
    """Return the batch that carries changes; the place in their revisions does not matter."""
    messages = []
    for one in changes:
        revision = one.change.revision
        properties = {
            PROPERTY_CARRIED: f"{one.table_id} {revision.revision} {revision.stored_ms} "
            f"{revision.expires_ms}"
        }
        if revision.operation != PUT:
            properties[PROPERTY_KV_OPERATION] = OPERATIONS[revision.operation].value
        body = one.change.value or _TOMBSTONE
        messages.append(
            Message(one.topic, body, keys=[one.change.key.decode()], properties=properties)
        )
    return _own_batch(messages, CARRIED_TOPIC, now_ms)


def expiry_batch(topic: str, keys: Iterable[bytes], now_ms: TimestampMs) -> bytes:
    """Return the batch of tombstones for keys of a table whose values have expired."""
    properties = {PROPERTY_KV_OPERATION: KvOperation.EXPIRE.value}
    messages = [
        Message(topic, _TOMBSTONE, keys=[key.decode()], properties=properties) for key in keys
    ]
    return _own_batch(messages, topic, now_ms)


def _own_batch(messages: list[Message], topic: str, now_ms: TimestampMs) -> bytes:
    return encode_batch(
        messages,
        compress_over_bytes=COMPRESS_OVER_BYTES,
        topic=topic,
        queue_id=CARRIED_QUEUE,
        producer_id=_PRODUCER_ID,
        first_sequence=0,
        born_timestamp=now_ms,
        attributes=Attributes.REDELIVERED,
    )
