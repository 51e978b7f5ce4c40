"""Records, sessions, and their watches. Pure: events and the time go in, changes come out.

A change is *decided* first, then written to disk by the caller, then *applied*: a change
that is not on disk is never sent to a client. Renewals of sessions are in memory only; after a
restart every session has its whole time again.

A coordinator that stood still would take all owners for dead when it goes on, before it has read
what they sent meanwhile. So a look that comes late gives all sessions as much time as it was late,
from then on.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from mqmesh.errors import SystemBusy
from mqmesh.host import ProcessMark
from mqmesh.metrics import Measured, counter, gauge
from mqmesh.protocol.coordination import (
    BeginSessionRequest,
    ChangeRecordRequest,
    ChangeRecordResponse,
    ChangeStatus,
    LiveSession,
    RecordView,
)
from mqmesh.protocol.request import Peer
from mqmesh.storage.lmdb.coordinator_file import KeptChange, KeptRecord, KeptSession

LATE_MS: Final = 200
"""A look that is later than this was held up."""


class _Session(msgspec.Struct, eq=False):
    kept: KeptSession
    presence: bytes
    renewed_ms: int
    deadline_ms: int
    peer: Peer | None


class Registry:
    """State of an embedded coordinator: records, sessions and watches.

    Args:
        max_records: More are refused.
        max_sessions: More are refused.
        max_watches: More are refused.
        new_id: Gives unpredictable names, and none twice.

    Attributes:
        change_count: Records that were changed.
        conflict_count: Changes that came too late.
        expired_count: Sessions that were not renewed in time.
        ended_count: Sessions that their owners ended, or replaced by another one.
    """

    def __init__(
        self, *, max_records: int, max_sessions: int, max_watches: int, new_id: Callable[[], str]
    ) -> None:
        self._max_records = max_records
        self._max_sessions = max_sessions
        self._new_id = new_id
        self._records: dict[str, KeptRecord] = {}
        self._sessions: dict[str, _Session] = {}
        self._owners: dict[str, dict[int, str]] = {}
        self._next_look_ms: int | None = None
        self.watches = Watches(max_watches)
        self.change_count = 0
        self.conflict_count = 0
        self.expired_count = 0
        self.ended_count = 0

    def restore(
        self, records: Mapping[str, KeptRecord], sessions: Mapping[str, KeptSession], now_ms: int
    ) -> None:
        """Begins with what a former life has left."""
        self.apply(KeptChange(dict(records), dict(sessions)), now_ms)
        self.change_count = 0

    # ---- Decisions -----------------------------------------------------------------------

    def begin(self, request: BeginSessionRequest) -> tuple[str, KeptChange]:
        """Decides on the beginning of a session.

        Returns:
            Its name, and the change that makes it; one of the same owner ends by it.

        Raises:
            SystemBusy: The limit of sessions is reached.
        """
        owners = self._owners.get(request.key, {})
        former = owners.get(request.owner)
        if former is None and len(self._sessions) >= self._max_sessions:
            raise SystemBusy(f"there are max_sessions = {self._max_sessions} sessions already")
        name = self._new_id()
        kept = KeptSession(
            request.key, request.owner, request.ttl_ms, bytes(request.presence), request.process
        )
        ended = () if former is None else (former,)
        self.ended_count += len(ended)
        return name, KeptChange(sessions={name: kept}, ended=ended)

    def change(self, request: ChangeRecordRequest) -> ChangeRecordResponse | KeptChange:
        """Decides on another value of a record.

        Returns:
            The refusal, or the change that does it.

        Raises:
            SystemBusy: The limit of records is reached.
        """
        found = self._records.get(request.key)
        version = 0 if found is None else found.version
        if request.session and not self._may_change(request.session, request.key):
            return ChangeRecordResponse(ChangeStatus.SESSION_LOST, version)
        if request.version != version:
            self.conflict_count += 1
            value = b"" if found is None else found.value
            return ChangeRecordResponse(ChangeStatus.CONFLICT, version, value)
        if found is None and len(self._records) >= self._max_records:
            raise SystemBusy(f"there are max_records = {self._max_records} records already")
        return KeptChange(records={request.key: KeptRecord(version + 1, bytes(request.value))})

    def end(self, name: str) -> KeptChange | None:
        """Decides on the end of a session; None if there is none."""
        if name not in self._sessions:
            return None
        self.ended_count += 1
        return KeptChange(ended=(name,))

    def expire(self, now_ms: int) -> KeptChange | None:
        """Looks for sessions that were not renewed in time.

        Returns:
            The change that ends them, if there are any.
        """
        planned_ms, self._next_look_ms = self._next_look_ms, None
        late_ms = now_ms - planned_ms if planned_ms is not None else 0
        if late_ms > LATE_MS:
            for session in self._sessions.values():
                more_ms = min(late_ms, session.kept.ttl_ms)
                session.deadline_ms = max(session.deadline_ms, now_ms + more_ms)
        over = [name for name, one in self._sessions.items() if one.deadline_ms <= now_ms]
        self.expired_count += len(over)
        return KeptChange(ended=tuple(over)) if over else None

    # ---- Changes -------------------------------------------------------------------------

    def apply(self, change: KeptChange, now_ms: int, peer: Peer | None = None) -> None:
        """Applies a change that is on disk, or need not be: it is true from now on.

        Args:
            change: Change that was decided.
            now_ms: Monotonic time.
            peer: Connection of the sessions that begin by it.
        """
        for name in change.ended:
            self._remove(name)
        for name, kept in change.sessions.items():
            self._sessions[name] = _Session(kept, kept.presence, now_ms, now_ms + kept.ttl_ms, peer)
            self._owners.setdefault(kept.key, {})[kept.owner] = name
            self.watches.touch(kept.key)
        for key, record in change.records.items():
            self._records[key] = record
            self.change_count += 1
            self.watches.touch(key)

    def keep(self, name: str, presence: bytes, peer: Peer, now_ms: int) -> int | None:
        """Renews a session.

        Returns:
            How long it lives from now on, in ms; None if it has ended.
        """
        session = self._sessions.get(name)
        if session is None:
            return None
        kept = session.kept
        session.renewed_ms, session.deadline_ms = now_ms, now_ms + kept.ttl_ms
        session.peer = peer
        if presence != session.presence:
            session.presence = bytes(presence)
            self.watches.touch(kept.key)
        return kept.ttl_ms

    # ---- Questions -----------------------------------------------------------------------

    def view(self, key: str, now_ms: int) -> RecordView:
        """Return a record and its live sessions."""
        found = self._records.get(key)
        owners = self._owners.get(key, {})
        sessions = []
        for owner in sorted(owners):
            one = self._sessions[owners[owner]]
            sessions.append(LiveSession(owners[owner], one.presence, now_ms - one.renewed_ms))
        if found is None:
            return RecordView(key, sessions=sessions)
        return RecordView(key, found.version, found.value, sessions)

    def next_look_ms(self) -> int | None:
        """Return when to call ``expire`` next; None while there are no sessions."""
        due_ms = min((one.deadline_ms for one in self._sessions.values()), default=None)
        if due_ms is not None and (self._next_look_ms is None or due_ms < self._next_look_ms):
            self._next_look_ms = due_ms
        return self._next_look_ms

    def left_by(self, peer: Peer) -> dict[str, ProcessMark]:
        """Return the sessions of this connection whose processes have named themselves."""
        return {
            name: one.kept.process
            for name, one in self._sessions.items()
            if one.peer == peer and one.kept.process is not None
        }

    @property
    def record_count(self) -> int:
        """Number of records."""
        return len(self._records)

    @property
    def session_count(self) -> int:
        """Sessions that live."""
        return len(self._sessions)

    # ---- Inside --------------------------------------------------------------------------

    def _may_change(self, name: str, key: str) -> bool:
        session = self._sessions.get(name)
        return session is not None and session.kept.key == key

    def _remove(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        if session is None:
            return
        key, owner = session.kept.key, session.kept.owner
        owners = self._owners[key]
        if owners.get(owner) == name:
            del owners[owner]
        if not owners:
            del self._owners[key]
        self.watches.touch(key)


class Watches:
    """Watches of connections on keys.

    Args:
        most: Pairs of connection and key; more are refused.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: dict[Peer, frozenset[str]] = {}
        self._peers: dict[str, dict[Peer, None]] = {}
        self._touched: dict[Peer, dict[str, None]] = {}
        self.count = 0

    def watch(self, peer: Peer, keys: Iterable[str]) -> None:
        """Watches these keys for a connection, and no others; each is reported once at first.

        Raises:
            SystemBusy: The limit of watches would be exceeded; the former watches stay.
        """
        wanted = frozenset(keys)
        count = self.count - len(self._keys.get(peer, ())) + len(wanted)
        if count > self._most:
            raise SystemBusy(f"{count} groups would be watched, max_watches = {self._most}")
        self.forget(peer)
        if not wanted:
            return
        self._keys[peer] = wanted
        self.count = count
        self._touched[peer] = dict.fromkeys(sorted(wanted))
        for key in wanted:
            self._peers.setdefault(key, {})[peer] = None

    def forget(self, peer: Peer) -> None:
        """Drops all watches of a connection."""
        keys = self._keys.pop(peer, frozenset())
        self.count -= len(keys)
        self._touched.pop(peer, None)
        for key in keys:
            peers = self._peers[key]
            peers.pop(peer, None)
            if not peers:
                del self._peers[key]

    def touch(self, key: str) -> None:
        """Marks a key as changed for its watches."""
        for peer in self._peers.get(key, ()):
            self._touched.setdefault(peer, {})[key] = None

    @property
    def has_changes(self) -> bool:
        """True if a connection has a change to be sent."""
        return bool(self._touched)

    def take_changes(self) -> dict[Peer, list[str]]:
        """Return the changed keys of each connection, once."""
        touched, self._touched = self._touched, {}
        return {peer: list(keys) for peer, keys in touched.items()}


REGISTRY_METRICS: Final[tuple[Measured[Registry], ...]] = (
    gauge("records", "broker groups and clusters that are known", lambda one: one.record_count),
    gauge("sessions", "sessions that live", lambda one: one.session_count),
    gauge("watches", "groups that are watched", lambda one: one.watches.count),
    counter("changes_total", "records that were changed", lambda one: one.change_count),
    counter("conflicts_total", "changes that came too late", lambda one: one.conflict_count),
    counter(
        "sessions_expired_total", "sessions that nobody renewed", lambda one: one.expired_count
    ),
    counter("sessions_ended_total", "sessions that were ended", lambda one: one.ended_count),
)
