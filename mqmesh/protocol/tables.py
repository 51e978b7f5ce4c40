"""READ_TABLE, and the words about tables: topics that keep the newest revisions of each key."""

import enum
from typing import Annotated, Final

import msgspec

from mqmesh.message import MAX_KEY_LENGTH
from mqmesh.protocol.names import TopicName
from mqmesh.units import KIB, MIB

MAX_TABLE_KEYS: Final = 1_000
"""Keys of one READ_TABLE, and entries of an answer to one that names none."""
MAX_KEY_BYTES: Final = 255
"""Bytes of a key of a table, as UTF-8."""
MAX_TABLE_BYTES: Final = 4 * MIB
"""Bytes of values in one answer, unless a single one is larger."""
LEAST_TABLE_BYTES: Final = 1 * KIB
PROPERTY_KV_OPERATION: Final = "KV_OPERATION"
"""Property of a message of a table that is no value; see ``KvOperation``."""

_Key = Annotated[str, msgspec.Meta(max_length=MAX_KEY_LENGTH)]
_Revision = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class KvOperation(enum.StrEnum):
    """Operations on a key: texts of the property ``KV_OPERATION``, on disk."""

    PUT = "PUT"
    """The body is the value; also where the property is missing."""
    DEL = "DEL"
    """A tombstone: a client deleted the key."""
    EXPIRE = "EXPIRE"
    """A tombstone: the broker found that the time of the value was over."""


OPERATIONS: Final = (KvOperation.PUT, KvOperation.DEL, KvOperation.EXPIRE)
"""Operations by their numbers on the wire and in rows. Never renumbered."""


class ReadTableRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """READ_TABLE: the newest revisions of keys, of which no failover takes any back.

    Either of keys that are named, or of all keys with a prefix, in the order of their UTF-8. An
    answer has as many entries as fit; for the rest the client repeats the request with ``after``.
    Watchers read with ``newer_than`` and ``deleted``, and then pull the queue of the table from
    the answer's ``revision`` on: a revision is an offset of that queue.

    Attributes:
        topic: Table.
        keys: Up to 1,000; if there are any, the four fields behind do not count, but for
            ``newer_than`` of a history.
        prefix: Of the keys.
        after: Only keys behind this one; "" for all.
        limit: Entries of the answer, 1 to 1,000.
        newer_than: Only keys whose newest revision is above it.
        deleted: Tombstones, too.
        history: Of one key, the only one that is named: the revisions above ``newer_than``, oldest
            first, tombstones among them. If there are more, the next request has the revision of
            the last one as ``newer_than``.
        keys_only: Without values.
        max_bytes: Values stop before they would exceed it; one is given, of any size.

    Errors:
        TOPIC_NOT_EXIST: No such topic.
        MESSAGE_ILLEGAL: The topic is no table, a key is too long, or a history is not of one key.
        NO_PERMISSION: The topic is not readable.
        SERVICE_NOT_AVAILABLE: The table is being made again from the log.
        NOT_MASTER: The broker is a follower.
    """

    topic: TopicName
    keys: Annotated[list[_Key], msgspec.Meta(max_length=MAX_TABLE_KEYS)] = []
    prefix: _Key = ""
    after: _Key = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_TABLE_KEYS)] = MAX_TABLE_KEYS
    newer_than: _Revision = 0
    deleted: bool = False
    history: bool = False
    keys_only: bool = False
    max_bytes: Annotated[int, msgspec.Meta(ge=LEAST_TABLE_BYTES, le=MAX_TABLE_BYTES)] = (
        MAX_TABLE_BYTES
    )


class TableEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One revision of a key.

    Attributes:
        key: Key.
        revision: The queue offset of its message plus one; it stays when the value is carried.
        stored_ms: When it was stored, wall clock, ms.
        operation: Its place in ``OPERATIONS``.
        expires_ms: When the value expires, 0 for never; of a tombstone, when it goes.
        size: Bytes of the value; 0 of a tombstone.
    """

    key: str
    revision: int
    stored_ms: int
    operation: int = 0
    expires_ms: int = 0
    size: int = 0


class TableEntries(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to READ_TABLE; the body has the values, one behind the other, in the same order. None
    are there with ``keys_only``.

    Attributes:
        revision: Of the table: all of its messages before this offset of its queue count here.
        entries: Of keys that have one, in the order of the request's keys, or of the keys.
        after: The last key that was looked at.
        more: There are keys behind it that were not; of a history, newer revisions.
    """

    revision: int
    entries: list[TableEntry]
    after: str = ""
    more: bool = False
