"""The interface to a coordination engine: sessions, one record a group, compare-and-swap.

Messages never pass through it, and no promise about messages rests on its clock: the end of a
session makes a replica stand for election, and no more. Only ``change`` decides. It is carried out
only on the version that was read, and only while the caller's session lives.

Every call returns at once and has one outcome, a value or an error, which comes to ``on_done`` in
the thread of the loop that the coordinator was opened on, never before the call returns, and not
later than the timeout that it was opened with. None comes after ``close``.

All implementations pass ``mqmesh.testing.coordinator_contract``.
"""

import enum
from collections.abc import Callable, Collection
from typing import Annotated, Any, Final, NewType, Protocol, TypeVar

import msgspec

from mqmesh.errors import InvalidArgument, MQMeshError, RemoteProtocolError
from mqmesh.host import ProcessMark
from mqmesh.units import KIB, MAX_OFFSET

MOST_REPLICAS: Final = 64
"""Limit of the replicas of one group."""
MAX_STATE_BYTES: Final = 16 * KIB
"""Longest encoded ``GroupState``."""
MAX_PRESENCE_BYTES: Final = 4 * KIB
"""Longest encoded ``Presence``."""
MAX_SETTINGS_BYTES: Final = 64 * KIB
"""Longest encoded settings of a cluster."""
MIN_TTL_MS: Final = 2_000
MAX_TTL_MS: Final = 600_000

SessionId = NewType("SessionId", str)
"""A session, in the words of the engine; only the engine parses it."""

_Text = Annotated[str, msgspec.Meta(max_length=255)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]
_ReplicaId = Annotated[int, msgspec.Meta(ge=1, le=MOST_REPLICAS)]

SettingValue = bool | int | str

_T = TypeVar("_T")
OnDone = Callable[[_T | MQMeshError], None]
"""Callback for the outcome of a call; called once."""


class AckReplicas(enum.StrEnum):
    """Number of replicas that have a message before it is acknowledged."""

    NONE = "none"
    ONE = "one"
    ALL = "all"
    QUORUM = "quorum"


class MemberIncarnation(msgspec.Struct, frozen=True, array_like=True):
    """One member of an in-sync set.

    Attributes:
        replica_id: Id of the replica, 1 to 64.
        incarnation: Incarnation of its store; the member counts only while the store has lost
            nothing since.
    """

    replica_id: _ReplicaId
    incarnation: _Number


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """State of one broker group, as it was decided; JSON in every engine.

    Attributes:
        log_id: Id of the log that all replicas have.
        epoch: Epoch of the last election, from 1 on.
        master: Replica that leads in this epoch; None for no leader.
        in_sync: Replicas that have everything that is confirmed.
        mode: Replicas whose copies a message needs.
        copies: Number of copies that confirm a message.
        voters: Replicas of the group; no other one comes in sync. None named: all do.
        mode_since_epoch: Epoch in which ``mode`` came into force.
        unclean_since: Epoch of the last election that may have lost confirmed messages; 0 for none.
        reason: Reason of the last change of master.
        preferred_ms: Time of the last hand-over to a preferred replica; 0 for never. Wall clock.
        switched_ms: Time of the last change of master, wall clock of the replica that made it; for
            people.
        paused: No replica stands for election when the master is missed: an administrator is at
            work.
    """

    log_id: _Number
    epoch: _Number
    master: _ReplicaId | None
    in_sync: Annotated[tuple[MemberIncarnation, ...], msgspec.Meta(max_length=MOST_REPLICAS)]
    mode: AckReplicas = AckReplicas.NONE
    copies: Annotated[int, msgspec.Meta(ge=1, le=MOST_REPLICAS)] = 1
    voters: Annotated[tuple[_ReplicaId, ...], msgspec.Meta(max_length=MOST_REPLICAS)] = ()
    mode_since_epoch: _Number = 0
    unclean_since: _Number = 0
    reason: _Text = ""
    switched_ms: _Number = 0
    paused: bool = False
    preferred_ms: _Number = 0

    def is_voter(self, replica_id: int) -> bool:
        """Return True if a replica belongs to the group."""
        return not self.voters or replica_id in self.voters


class StateRecord(msgspec.Struct, frozen=True):
    """A group's state as the engine has it.

    Attributes:
        version: Version of the record, for ``change``; 0 when there is none. It says nothing
            else: engines count in their own ways.
        state: State of the group, or None when the engine has no record of it. None never means
            that there are no messages: an engine may have lost its files.
    """

    version: int
    state: GroupState | None


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """Presence of a replica while its session lives, as it reports it. JSON in every engine.

    Attributes:
        group: Broker group.
        replica_id: Id of the replica, 1 to 64.
        identity: Identity of its store, drawn once.
        incarnation: See ``MemberIncarnation``.
        address: Address for clients, ``host:port``.
        replica_address: Address for replicas.
        server_key: Public key that it proves to clients; "" where nothing is encrypted.
            Replicas trust it if the access list has it as a broker's of this group.
        last_epoch: Epoch of the last record of its log.
        end_offset: Commit-log offset behind the last record of its log.
        synced_offset: Commit-log offset behind the records on its disk.
        can_lead: Its disk takes writes.
        is_cut_off: The replica leads, and for some seconds has reached too few followers to commit.
        preferred: The replica leads where others could as well.
        zone: Zone of the replica.
        process: Process of the session, which can be ended when the process is dead.
    """

    group: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    replica_id: _ReplicaId
    identity: _Text = ""
    incarnation: _Number = 0
    address: _Text = ""
    replica_address: _Text = ""
    server_key: _Text = ""
    last_epoch: _Number = 0
    end_offset: _Number = 0
    synced_offset: _Number = 0
    can_lead: bool = True
    is_cut_off: bool = False
    preferred: bool = False
    zone: _Text = ""
    process: ProcessMark | None = None


class LiveReplica(msgspec.Struct, frozen=True):
    """A replica whose session lives, as far as the engine knows.

    Attributes:
        session: Id of its session.
        presence: Presence that it sent last.
        age_ms: Time since its last renewal, at least. Less than the truth after a restart or a new
            connection, so a large one proves that nothing was renewed, and a small one little.
    """

    session: SessionId
    presence: Presence
    age_ms: int


class GroupView(msgspec.Struct, frozen=True):
    """View of a group at one moment, as a watch reports it.

    Attributes:
        group: Broker group.
        record: State of the group.
        members: Replicas whose sessions live, by replica id.
    """

    group: str
    record: StateRecord
    members: tuple[LiveReplica, ...] = ()


class SettingsRecord(msgspec.Struct, frozen=True):
    """Settings that must be equal in all of a cluster.

    Attributes:
        version: Version of the record, 0 when there is none.
        settings: Settings by name.
    """

    version: int
    settings: dict[str, SettingValue] = {}


class CoordinatorUnavailable(MQMeshError):
    """Raised when the coordinator cannot be reached; nothing was changed by the call."""

    retriable = True


class SessionLost(MQMeshError):
    """Raised when a session has ended, for any reason; begin another one."""


class OutcomeUnknown(MQMeshError):
    """Raised when it is unknown whether a change was made; read before anything else.

    A read that finds the old version does not prove that the change was not made: it may be on its
    way, and be made behind that read. Only another change of that version settles it.
    """


class Conflict(MQMeshError):
    """Raised when a change was not made, since the record has another version by now.

    Attributes:
        record: The newer record.
    """

    def __init__(self, message: str, record: StateRecord | SettingsRecord) -> None:
        super().__init__(message)
        self.record = record


class GroupWatch(Protocol):
    """Groups that are watched."""

    def close(self) -> None:
        """Ends the watch: its callback is called no more. Calling twice does no harm."""


class Coordinator(Protocol):
    """A coordination engine, as one cluster uses it."""

    def begin_session(self, ttl_ms: int, presence: Presence, on_done: OnDone[SessionId]) -> None:
        """Begins a session; it ends an earlier one of the same replica of the group.

        Args:
            ttl_ms: Time from the last renewal to the end, ``MIN_TTL_MS`` to ``MAX_TTL_MS``.
                Engines may take a little longer, never much less.
            presence: Presence, which can be read while the session lives.
            on_done: Called with the session, or ``CoordinatorUnavailable``: then one may have
                begun, which is never renewed.

        Raises:
            InvalidArgument: An argument is out of bounds.
        """

    def keep_alive(self, session: SessionId, presence: Presence, on_done: OnDone[int]) -> None:
        """Renews a session and its presence.

        Args:
            session: Session to renew.
            presence: Presence of the same replica.
            on_done: Called with the deadline, in ms of ``Clock.boot_ms``: until then the engine
                does not report that the session ended by itself. It counts from when the request
                was sent. Or called with ``SessionLost``, ``CoordinatorUnavailable``.

        Raises:
            InvalidArgument: An argument is out of bounds.
        """

    def end_session(self, session: SessionId, on_done: OnDone[None] | None = None) -> None:
        """Ends a session at once; one that has ended already does no harm.

        A process that knows that another one is dead ends its session: a certificate of death.

        Args:
            session: Any session.
            on_done: Called with None, or ``CoordinatorUnavailable``.
        """

    def read(self, group: str, on_done: OnDone[StateRecord]) -> None:
        """Reads a group's record, with all changes that were answered before the call.

        Args:
            group: Broker group.
            on_done: Called with the record, or ``CoordinatorUnavailable``.
        """

    def change(
        self,
        group: str,
        version: int,
        state: GroupState,
        session: SessionId,
        on_done: OnDone[int],
    ) -> None:
        """Replaces a group's record, if it has this version and the session lives.

        Args:
            group: Broker group.
            version: Version that was read; 0 if there was none.
            state: The new state.
            session: Session of the caller.
            on_done: Called with the new version, or ``Conflict``, ``SessionLost``,
                ``CoordinatorUnavailable`` when the change was certainly not made,
                ``OutcomeUnknown`` when it may have been.

        Raises:
            InvalidArgument: An argument is out of bounds.
        """

    def presences(self, group: str, on_done: OnDone[tuple[LiveReplica, ...]]) -> None:
        """Reads the replicas whose sessions live.

        Args:
            group: Broker group.
            on_done: Called with the members, by replica id, or ``CoordinatorUnavailable``.
        """

    def watch(self, groups: Collection[str], on_change: Callable[[GroupView], None]) -> GroupWatch:
        """Watches groups until the watch is closed.

        Args:
            groups: Broker groups.
            on_change: Called for each group once soon, then when its state, a presence or a session
                changed. It may get the same view twice, and may skip to the newest; after every
                new connection all groups are read again.

        Raises:
            InvalidArgument: Too many groups.
        """

    def put_settings(
        self, version: int, settings: dict[str, SettingValue], on_done: OnDone[int]
    ) -> None:
        """Replaces the settings of the cluster, if they have this version.

        Args:
            version: Version that was read; 0 if there was none.
            settings: The new settings.
            on_done: Called with the new version, or ``Conflict``, ``CoordinatorUnavailable``,
                ``OutcomeUnknown``.

        Raises:
            InvalidArgument: The settings are too long.
        """

    def read_settings(self, on_done: OnDone[SettingsRecord]) -> None:
        """Reads the settings of the cluster.

        Args:
            on_done: Called with the record, or ``CoordinatorUnavailable``.
        """

    def close(self) -> None:
        """Closes all connections; sessions end by themselves. Calling twice does no harm."""


def check_session(ttl_ms: int, presence: Presence) -> bytes:
    """Checks the arguments of a new session.

    Returns:
        The encoded presence.

    Raises:
        InvalidArgument: A value is out of bounds; the message names both.
    """
    if not MIN_TTL_MS <= ttl_ms <= MAX_TTL_MS:
        raise InvalidArgument(
            f"a session of {ttl_ms} ms is out of bounds: {MIN_TTL_MS} to {MAX_TTL_MS} ms; "
            "see lease_ttl_ms"
        )
    return encode_presence(presence)


def encode_presence(presence: Presence) -> bytes:
    """Return the JSON of a presence.

    Raises:
        InvalidArgument: The presence is too long, or a field is out of bounds.
    """
    return _encode(presence, Presence, MAX_PRESENCE_BYTES)


def encode_state(state: GroupState) -> bytes:
    """Return the JSON of a group's state.

    Raises:
        InvalidArgument: The state is too long, or a field is out of bounds.
    """
    return _encode(state, GroupState, MAX_STATE_BYTES)


def encode_settings(settings: dict[str, SettingValue]) -> bytes:
    """Return the JSON of settings.

    Raises:
        InvalidArgument: The settings are too long.
    """
    return _encode(settings, dict[str, SettingValue], MAX_SETTINGS_BYTES)


def decode(kind: type[_T], data: bytes) -> _T:
    """Decodes a value of an engine; a newer program's fields are left out.

    Raises:
        RemoteProtocolError: The bytes are no such value.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(
            f"the coordinator has no {kind.__name__} there but {bytes(data[:80])!r}: {error}"
        ) from error


def _encode(value: Any, kind: Any, limit: int) -> bytes:
    try:
        msgspec.convert(msgspec.to_builtins(value), kind)
        data = msgspec.json.encode(value)
    except (msgspec.MsgspecError, UnicodeEncodeError, TypeError) as error:
        raise InvalidArgument(f"{value!r} cannot be kept by a coordinator: {error}") from error
    if len(data) > limit:
        raise InvalidArgument(
            f"{type(value).__name__} has {len(data)} bytes as JSON, {limit} at most"
        )
    return data
