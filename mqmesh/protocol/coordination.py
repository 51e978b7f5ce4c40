"""Headers of the embedded coordinator's commands.

It keeps records and sessions below keys, and does not look into what they say: a record's value is
the business of its writer, so a coordinator need not know the fields of newer brokers.
"""

import enum
from typing import Annotated

import msgspec

from mqmesh.host import ProcessMark
from mqmesh.units import KIB, MAX_OFFSET

MAX_KEY_CHARACTERS = 480
"""Most characters, and most bytes: LMDB's keys have 511 at most."""
MAX_VALUE_BYTES = 64 * KIB
MAX_PRESENCE_BYTES = 4 * KIB
MAX_WATCHED_KEYS = 1_024
"""Most keys that one connection watches."""

_Key = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_KEY_CHARACTERS)]
_Session = Annotated[str, msgspec.Meta(max_length=64)]
_Version = Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]
_Value = Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)]
_Presence = Annotated[bytes, msgspec.Meta(max_length=MAX_PRESENCE_BYTES)]


class ChangeStatus(enum.IntEnum):
    """Outcomes of a change. On the wire."""

    CHANGED = 0
    """The record has the new value."""
    CONFLICT = 1
    """The record has another version."""
    SESSION_LOST = 2
    """The session has ended."""


class BeginSessionRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """BEGIN_SESSION: begins a session, which lives while it is renewed; one that the same owner of
    the key had before ends. It is on disk before it is answered.

    Attributes:
        key: Record that the session belongs to.
        owner: Number of the owner among those of the key.
        ttl_ms: Time from the last renewal to the end, ms.
        presence: Data that the owner publishes about itself.
        process: Process of the owner; None when it is not said.

    Errors:
        SYSTEM_BUSY: ``max_sessions`` is reached.
        DISK_FULL: No room to write.
    """

    key: _Key
    owner: Annotated[int, msgspec.Meta(ge=1, le=64)]
    ttl_ms: Annotated[int, msgspec.Meta(ge=2_000, le=600_000)]
    presence: _Presence = b""
    process: ProcessMark | None = None


class BeginSessionResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to BEGIN_SESSION.

    Attributes:
        session: Its name.
    """

    session: _Session


class KeepSessionRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """KEEP_SESSION: renews a session and its presence, in memory only: after a restart of the
    coordinator every session has its whole time again.

    Attributes:
        session: Its name.
        presence: New data that the owner publishes about itself.
    """

    session: _Session
    presence: _Presence = b""


class KeepSessionResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to KEEP_SESSION.

    Attributes:
        alive: False when it has ended.
        ttl_ms: Time from this renewal to the end, ms.
    """

    alive: bool
    ttl_ms: Annotated[int, msgspec.Meta(ge=0, le=600_000)] = 0


class EndSessionRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """END_SESSION: ends a session at once, also one of another process that is known to be dead.

    Attributes:
        session: Its name; one that has ended does no harm.
    """

    session: _Session


class ReadRecordRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """READ_RECORD: a record, with all changes that were answered before, and the live sessions of
    its key. An unknown record has version 0.

    Attributes:
        key: Of the record.
    """

    key: _Key


class LiveSession(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A session that lives.

    Attributes:
        session: Its name.
        presence: Presence that its owner sent last.
        age_ms: So long ago.
    """

    session: _Session
    presence: _Presence
    age_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]


class RecordView(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A record, and its live sessions: the answer to READ_RECORD, and what NOTIFY_RECORD carries.

    Attributes:
        key: Of the record.
        version: 0 when there is none.
        value: Empty when there is none.
        sessions: By owner.
    """

    key: _Key
    version: _Version = 0
    value: _Value = b""
    sessions: Annotated[list[LiveSession], msgspec.Meta(max_length=64)] = []


class ChangeRecordRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """CHANGE_RECORD: replaces the value of a record, if it has the given version, and the session
    lives and belongs to the same key.

    It is on disk before it is answered. If the disk fails nothing is answered, and the coordinator
    ends: the outcome is unknown.

    Attributes:
        key: Of the record.
        version: Version that it must have; 0 for none.
        value: The new one.
        session: Session that must live; empty for none.

    Errors:
        SYSTEM_BUSY: ``max_records`` is reached.
        DISK_FULL: No room to write.
    """

    key: _Key
    version: _Version
    value: _Value
    session: _Session = ""


class ChangeRecordResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to CHANGE_RECORD.

    Attributes:
        status: See ``ChangeStatus``.
        version: Of the record as it is now.
        value: And its value; empty when it was changed.
    """

    status: Annotated[int, msgspec.Meta(ge=0, le=2)]
    version: _Version = 0
    value: _Value = b""


class WatchRecordsRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """WATCH_RECORDS: has the coordinator send NOTIFY_RECORD by this connection: of each of these
    keys once, then when its record, a session or a presence changes; of no other key.

    The answer may come before the first of them or later. The client repeats the request on every
    new connection, and each 10 s.

    Attributes:
        keys: Of the records.

    Errors:
        SYSTEM_BUSY: ``max_watches`` is reached; former watches stay.
    """

    keys: Annotated[list[_Key], msgspec.Meta(max_length=MAX_WATCHED_KEYS)] = []
