"""The client of the embedded coordinator, ``embedded://host:port``.

It has one connection, which is made again after a break. A request without a connection waits for
one until its timeout, except for a change: a change follows a read, so without a connection it is
too late already.
"""

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Final, TypeVar

import msgspec

from mqmesh.coordination.interface import (
    Conflict,
    CoordinatorUnavailable,
    GroupState,
    GroupView,
    LiveReplica,
    OnDone,
    OutcomeUnknown,
    Presence,
    SessionId,
    SessionLost,
    SettingsRecord,
    SettingValue,
    StateRecord,
    check_session,
    decode,
    encode_presence,
    encode_settings,
    encode_state,
)
from mqmesh.errors import BrokerError, InvalidArgument, MQMeshError, TransportError
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.coordination import (
    MAX_KEY_CHARACTERS,
    MAX_WATCHED_KEYS,
    BeginSessionRequest,
    BeginSessionResponse,
    ChangeRecordRequest,
    ChangeRecordResponse,
    ChangeStatus,
    EndSessionRequest,
    KeepSessionRequest,
    KeepSessionResponse,
    ReadRecordRequest,
    RecordView,
    WatchRecordsRequest,
)
from mqmesh.transport.interface import Transport

WATCH_AGAIN_MS: Final = 10_000
"""Interval at which watches are renewed; each time all is sent once more, so lost
notifications do no lasting harm."""

_SETTINGS: Final = "settings"
_REFUSED: Final = frozenset(
    {ResponseCode.SYSTEM_BUSY, ResponseCode.DISK_FULL, ResponseCode.MESSAGE_ILLEGAL}
)
"""Codes that prove that nothing was changed."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_H = TypeVar("_H", bound=msgspec.Struct)


class EmbeddedCoordinator:
    """Client of the embedded coordinator, see ``mqmesh.coordination.interface.Coordinator``.

    Args:
        transport: Transport whose loop calls back.
        address: Address of the coordinator, ``host:port``.
        cluster: Cluster of the groups and settings.
        timeout_ms: Time for each call.
    """

    def __init__(
        self, transport: Transport, address: str, cluster: str, *, timeout_ms: int
    ) -> None:
        self._loop = transport.loop
        self._clock = transport.clock
        self._address = address
        self._cluster = cluster
        self._timeout_ms = timeout_ms
        self._watches: list[EmbeddedWatch] = []
        self._closed = False
        self._connection = transport.connect(
            f"tcp://{address}", on_command=self._on_command, on_connection=self._on_connection
        )
        self._again = self._loop.call_every(WATCH_AGAIN_MS, self._watch_again)

    def begin_session(self, ttl_ms: int, presence: Presence, on_done: OnDone[SessionId]) -> None:
        """Begins a session."""
        value = check_session(ttl_ms, presence)
        key = self._key(presence.group)
        request = BeginSessionRequest(key, presence.replica_id, ttl_ms, value, presence.process)
        self._ask(
            RequestCode.BEGIN_SESSION,
            request,
            BeginSessionResponse,
            lambda answer: SessionId(answer.session),
            on_done,
        )

    def keep_alive(self, session: SessionId, presence: Presence, on_done: OnDone[int]) -> None:
        """Renews a session."""
        request = KeepSessionRequest(session, encode_presence(presence))
        sent_ms = self._clock.boot_ms()

        def outcome_of(answer: KeepSessionResponse) -> int | MQMeshError:
            return sent_ms + answer.ttl_ms if answer.alive else _lost(session)

        self._ask(RequestCode.KEEP_SESSION, request, KeepSessionResponse, outcome_of, on_done)

    def end_session(self, session: SessionId, on_done: OnDone[None] | None = None) -> None:
        """Ends a session."""
        request = EndSessionRequest(session)
        self._ask(RequestCode.END_SESSION, request, None, lambda answer: None, on_done or _nothing)

    def read(self, group: str, on_done: OnDone[StateRecord]) -> None:
        """Reads a group's record."""
        self._view(self._key(group), lambda view: _state_of(view.version, view.value), on_done)

    def change(
        self,
        group: str,
        version: int,
        state: GroupState,
        session: SessionId,
        on_done: OnDone[int],
    ) -> None:
        """Replaces a group's record."""
        request = ChangeRecordRequest(self._key(group), version, encode_state(state), session)

        def outcome_of(answer: ChangeRecordResponse) -> int | MQMeshError:
            if answer.status == ChangeStatus.SESSION_LOST:
                return _lost(session)
            if answer.status == ChangeStatus.CHANGED:
                return answer.version
            return Conflict(
                f"group {group} has version {answer.version} by now, not {version}",
                _state_of(answer.version, answer.value),
            )

        self._change(request, outcome_of, on_done)

    def presences(self, group: str, on_done: OnDone[tuple[LiveReplica, ...]]) -> None:
        """Reads the replicas whose sessions live."""
        self._view(self._key(group), _members_of, on_done)

    def watch(
        self, groups: Collection[str], on_change: Callable[[GroupView], None]
    ) -> "EmbeddedWatch":
        """Watches groups."""
        keys = {self._key(group): group for group in groups}
        if len(self._watched() | keys.keys()) > MAX_WATCHED_KEYS:
            raise InvalidArgument(f"one process watches at most {MAX_WATCHED_KEYS} groups")
        made = EmbeddedWatch(keys, on_change, self._end_watch)
        self._watches.append(made)
        self._watch_again()
        return made

    def put_settings(
        self, version: int, settings: dict[str, SettingValue], on_done: OnDone[int]
    ) -> None:
        """Replaces the settings of the cluster."""
        request = ChangeRecordRequest(self._settings_key(), version, encode_settings(settings))

        def outcome_of(answer: ChangeRecordResponse) -> int | MQMeshError:
            if answer.status == ChangeStatus.CHANGED:
                return answer.version
            return Conflict(
                f"the settings have version {answer.version} by now, not {version}",
                _settings_of(answer.version, answer.value),
            )

        self._change(request, outcome_of, on_done)

    def read_settings(self, on_done: OnDone[SettingsRecord]) -> None:
        """Reads the settings of the cluster."""
        self._view(
            self._settings_key(), lambda view: _settings_of(view.version, view.value), on_done
        )

    def close(self) -> None:
        """Closes the connection; sessions end by themselves."""
        self._closed = True
        self._again.cancel()
        self._watches.clear()
        self._connection.close()

    # ---- Requests --------------------------------------------------------------------

    def _view(
        self, key: str, outcome_of: Callable[[RecordView], _T | MQMeshError], on_done: OnDone[_T]
    ) -> None:
        self._ask(RequestCode.READ_RECORD, ReadRecordRequest(key), RecordView, outcome_of, on_done)

    def _change(
        self,
        request: ChangeRecordRequest,
        outcome_of: Callable[[ChangeRecordResponse], int | MQMeshError],
        on_done: OnDone[int],
    ) -> None:
        code, kind = RequestCode.CHANGE_RECORD, ChangeRecordResponse
        if not self._connection.connected:
            error = CoordinatorUnavailable(f"no connection to the coordinator at {self._address}")
            self._loop.call_later(0, partial(self._finish, on_done, error))
            return
        self._ask(code, request, kind, outcome_of, on_done, changes=True)

    def _ask(
        self,
        code: RequestCode,
        request: msgspec.Struct,
        kind: type[_H] | None,
        outcome_of: Callable[[_H], _T | MQMeshError],
        on_done: OnDone[_T],
        *,
        changes: bool = False,
    ) -> None:
        def take(answer: Command | MQMeshError) -> None:
            if isinstance(answer, MQMeshError):
                self._finish(on_done, self._error(answer, changes=changes))
                return
            outcome: _T | MQMeshError
            try:
                outcome = outcome_of(None if kind is None else decode_header(kind, answer.header))  # type: ignore[arg-type]  # None where there is no header
            except MQMeshError as error:
                outcome = error
            self._finish(on_done, outcome)

        try:
            self._connection.request(
                code, take, header=encode_header(request), timeout_ms=self._timeout_ms
            )
        except MQMeshError as error:
            failure = CoordinatorUnavailable(f"the coordinator cannot be asked: {error}")
            self._loop.call_later(0, partial(self._finish, on_done, failure))

    def _error(self, error: MQMeshError, *, changes: bool) -> MQMeshError:
        refused = isinstance(error, BrokerError) and error.code in _REFUSED
        if changes and not refused:
            return OutcomeUnknown(f"whether the change was made is unknown: {error}")
        if isinstance(error, TransportError | BrokerError):
            return CoordinatorUnavailable(f"the coordinator at {self._address}: {error}")
        return error

    def _finish(self, on_done: OnDone[_T], outcome: _T | MQMeshError) -> None:
        if not self._closed:
            on_done(outcome)

    # ---- Watches ---------------------------------------------------------------------

    def _watched(self) -> set[str]:
        return {key for one in self._watches for key in one.keys}

    def _end_watch(self, watch: "EmbeddedWatch") -> None:
        if watch in self._watches:
            self._watches.remove(watch)
            self._watch_again(also_none=True)

    def _on_connection(self, up: bool) -> None:
        if up:
            self._loop.call_later(0, self._watch_again)

    def _watch_again(self, *, also_none: bool = False) -> None:
        keys = sorted(self._watched())
        if self._closed or not self._connection.connected or not (keys or also_none):
            return  # the request follows when the connection comes back
        self._ask(
            RequestCode.WATCH_RECORDS,
            WatchRecordsRequest(keys),
            None,
            lambda answer: None,
            self._watched_again,
        )

    def _watched_again(self, outcome: MQMeshError | None) -> None:
        if outcome is not None:
            _log.warning("groups are not watched for now: %s", outcome)

    def _on_command(self, command: Command) -> None:
        if command.code != RequestCode.NOTIFY_RECORD or self._closed:
            return
        view = decode_header(RecordView, command.header)
        for watch in list(self._watches):
            group = watch.keys.get(view.key)
            if group is not None and not watch.closed:
                record = _state_of(view.version, view.value)
                watch.on_change(GroupView(group, record, _members_of(view)))

    def _key(self, group: str) -> str:
        return self._checked(f"groups/{self._cluster}/{group}")

    def _settings_key(self) -> str:
        return self._checked(f"{_SETTINGS}/{self._cluster}")

    def _checked(self, key: str) -> str:
        if len(key.encode(errors="replace")) > MAX_KEY_CHARACTERS:
            raise InvalidArgument(
                f"the names of cluster and group are too long together: {key!r} has more than "
                f"{MAX_KEY_CHARACTERS} bytes"
            )
        return key


class EmbeddedWatch:
    """Groups that are watched.

    Args:
        keys: Keys of the groups' records, and the groups.
        on_change: Called with the view of a group that changed.
        on_close: Called when the watch is closed.

    Attributes:
        closed: ``on_change`` is called no more.
    """

    def __init__(
        self,
        keys: dict[str, str],
        on_change: Callable[[GroupView], None],
        on_close: Callable[["EmbeddedWatch"], None],
    ) -> None:
        self.keys = keys
        self.on_change = on_change
        self.closed = False
        self._on_close = on_close

    def close(self) -> None:
        """Ends the watch: ``on_change`` is called no more. Calling twice does no harm."""
        if not self.closed:
            self.closed = True
            self._on_close(self)


def _state_of(version: int, value: bytes) -> StateRecord:
    return StateRecord(version, decode(GroupState, value) if version else None)


def _settings_of(version: int, value: bytes) -> SettingsRecord:
    return SettingsRecord(version, decode(dict[str, SettingValue], value) if version else {})


def _members_of(view: RecordView) -> tuple[LiveReplica, ...]:
    return tuple(
        LiveReplica(SessionId(one.session), decode(Presence, one.presence), one.age_ms)
        for one in view.sessions
    )


def _lost(session: SessionId) -> SessionLost:
    return SessionLost(f"session {session} has ended")


def _nothing(outcome: object) -> None:
    """Ignores the outcome."""
