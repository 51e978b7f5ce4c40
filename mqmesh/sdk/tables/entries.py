"""Entries of tables: one revision of a key each, from an answer or from a message."""

from collections.abc import Sequence

import msgspec

from mqmesh.batch.payload import Buffer
from mqmesh.errors import RemoteProtocolError
from mqmesh.message import StoredMessage
from mqmesh.protocol.tables import OPERATIONS, PROPERTY_KV_OPERATION, KvOperation, TableEntry


class KvEntry(msgspec.Struct, frozen=True):
    """One revision of a key of a table.

    Attributes:
        key: Key.
        value: The value; empty of a tombstone.
        revision: From 1, larger than those of all that was written before in the table.
        stored_ms: When the broker stored it, wall clock, ms since 1970.
        operation: ``PUT``, or which tombstone it is.
        expires_ms: When the value expires, wall clock, ms; 0 for never. Of a tombstone, when it
            goes; 0 if that is not known.
    """

    key: str
    value: bytes
    revision: int
    stored_ms: int
    operation: KvOperation = KvOperation.PUT
    expires_ms: int = 0

    @property
    def is_deleted(self) -> bool:
        """Return whether the key has no value since."""
        return self.operation is not KvOperation.PUT


def entries_of(entries: Sequence[TableEntry], values: Buffer) -> list[KvEntry]:
    """Return the entries of an answer.

    Args:
        entries: Of its header.
        values: Its body; empty where none were asked for.

    Raises:
        RemoteProtocolError: The values do not fit the entries.
    """
    found, place, body = [], 0, bytes(values)
    for one in entries:
        if one.operation >= len(OPERATIONS):
            raise RemoteProtocolError(f"operation {one.operation} of {one.key!r} is not known")
        value = body[place : place + one.size]
        place += one.size
        operation = OPERATIONS[one.operation]
        found.append(
            KvEntry(one.key, value, one.revision, one.stored_ms, operation, one.expires_ms)
        )
    if body and place != len(body):
        raise RemoteProtocolError(f"{len(body)} bytes of values for entries of {place}")
    return found


def entry_of(message: StoredMessage, expires_ms: int) -> KvEntry | None:
    """Return the entry that a message of a table is, None for one that is none.

    Args:
        message: From the table's queue.
        expires_ms: When the values of its batch expire, 0 for never.
    """
    if len(message.keys) != 1:
        return None
    text = message.property(PROPERTY_KV_OPERATION) or KvOperation.PUT
    if text not in list(KvOperation):
        return None
    operation = KvOperation(text)
    is_put = operation is KvOperation.PUT
    return KvEntry(
        message.keys[0],
        bytes(message.body) if is_put else b"",
        int(message.queue_offset) + 1,
        int(message.store_timestamp),
        operation,
        expires_ms if is_put else 0,
    )
