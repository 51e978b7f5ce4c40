"""The client of etcd, ``etcd://host:port,host:port,…``; see docs/coordination.md.

A session is a lease with one key, the presence. A change is a transaction that compares the
revision of the record, and the lease of the session's key: it is made only while the session lives.
"""

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from mqmesh.coordination.etcd.gateway import Gateway
from mqmesh.coordination.etcd.groups import (
    Ages,
    WatchedKeys,
    members_of,
    revisions_of,
    settings_of,
    state_of,
)
from mqmesh.coordination.etcd.helper import Helper
from mqmesh.coordination.etcd.http_line import HttpLine
from mqmesh.coordination.etcd.keys import EtcdKeys, replica_and_lease
from mqmesh.coordination.etcd.members import Members, addresses_of
from mqmesh.coordination.etcd.messages import EtcdKeyValue, KeyEvent
from mqmesh.coordination.etcd.records import EtcdRecords
from mqmesh.coordination.etcd.stream import GroupStream
from mqmesh.coordination.interface import (
    GroupState,
    GroupView,
    LiveReplica,
    OnDone,
    Presence,
    SessionId,
    SettingsRecord,
    SettingValue,
    StateRecord,
    check_session,
    encode_presence,
    encode_settings,
    encode_state,
)
from mqmesh.errors import InvalidArgument, MQMeshError
from mqmesh.transport.interface import Transport

MAX_WATCHED: Final = 128
"""Limit of the groups that one process watches."""

_log = logging.getLogger(__name__)


def open_etcd(
    url: str, transport: Transport, *, cluster: str, timeout_ms: int
) -> "EtcdCoordinator":
    """Opens a way to etcd; see ``mqmesh.coordination.backends.open_coordinator``.

    Raises:
        ConfigError: The URL names no members, or the cluster's name cannot be part of a key.
    """
    addresses = addresses_of(url.removeprefix("etcd://"))
    return EtcdCoordinator(transport, addresses, cluster, timeout_ms=timeout_ms)


class EtcdCoordinator:
    """Coordinator whose engine is etcd, see ``mqmesh.coordination.interface.Coordinator``.

    Args:
        transport: Transport whose loop calls back.
        addresses: Addresses of etcd's members, ``host:port``.
        cluster: Cluster of the groups and settings.
        timeout_ms: Time for each call.

    Raises:
        ConfigError: An address is malformed, or the cluster's name cannot be part of a key.
    """

    def __init__(
        self, transport: Transport, addresses: tuple[str, ...], cluster: str, *, timeout_ms: int
    ) -> None:
        self._keys = EtcdKeys(cluster)
        self._clock = transport.clock
        members = Members(addresses)
        made = (members, HttpLine, transport.clock, transport.pause, timeout_ms)
        gateway = Gateway(*made)
        self._records = EtcdRecords(gateway.ask, transport.clock)
        self._helper = Helper(transport, timeout_ms, gateway.interrupt, gateway.close)
        self._stream = GroupStream(
            transport, Gateway(*made), self._keys, timeout_ms, self._on_read, self._on_events
        )
        self._ages = Ages()
        self._tables: dict[str, WatchedKeys] = {}
        self._watches: list[EtcdWatch] = []
        self._closed = False

    def begin_session(self, ttl_ms: int, presence: Presence, on_done: OnDone[SessionId]) -> None:
        """Begins a session."""
        value = check_session(ttl_ms, presence)
        key = self._keys.session(presence.group, presence.replica_id)
        job = partial(self._records.begin, ttl_ms, key, presence.replica_id, value)
        self._helper.ask(job, on_done)

    def keep_alive(self, session: SessionId, presence: Presence, on_done: OnDone[int]) -> None:
        """Renews a session."""
        value = encode_presence(presence)
        key = self._keys.session(presence.group, presence.replica_id)
        job = partial(self._records.keep, session, key, value)
        self._helper.ask(job, on_done)

    def end_session(self, session: SessionId, on_done: OnDone[None] | None = None) -> None:
        """Ends a session."""
        job = partial(self._records.end, session)
        self._helper.ask(job, on_done or _nothing, outlives=True)

    def read(self, group: str, on_done: OnDone[StateRecord]) -> None:
        """Reads a group's record."""
        key = self._keys.state(group)
        self._helper.ask(lambda deadline: state_of(self._records.read(key, deadline)), on_done)

    def change(
        self,
        group: str,
        version: int,
        state: GroupState,
        session: SessionId,
        on_done: OnDone[int],
    ) -> None:
        """Replaces a group's record."""
        value = encode_state(state)
        replica_id, _ = replica_and_lease(session)
        keys = (self._keys.state(group), self._keys.session(group, replica_id))
        job = partial(self._records.change, *keys, version, value, session)
        self._helper.ask(job, on_done, changes=True)

    def presences(self, group: str, on_done: OnDone[tuple[LiveReplica, ...]]) -> None:
        """Reads the replicas whose sessions live."""
        prefix = self._keys.group(group) + b"session/"
        sent_ms = self._clock.monotonic_ms()

        def on_answer(outcome: list[EtcdKeyValue] | MQMeshError) -> None:
            if isinstance(outcome, MQMeshError):
                on_done(outcome)
                return
            revisions = revisions_of(self._keys, group, outcome)
            ages = self._ages.on_read(group, revisions, sent_ms, self._clock.monotonic_ms())
            found: tuple[LiveReplica, ...] | MQMeshError
            try:
                found = members_of(self._keys, group, outcome, ages)
            except MQMeshError as error:
                found = error
            on_done(found)

        self._helper.ask(partial(self._records.read_all, prefix), on_answer)

    def watch(self, groups: Collection[str], on_change: Callable[[GroupView], None]) -> "EtcdWatch":
        """Watches groups."""
        wanted = frozenset(groups)
        for group in wanted:
            self._keys.group(group)
        if len(wanted.union(*(one.groups for one in self._watches))) > MAX_WATCHED:
            raise InvalidArgument(f"one process watches at most {MAX_WATCHED} groups")
        made = EtcdWatch(wanted, on_change, self._end_watch)
        self._watches.append(made)
        self._follow()
        return made

    def put_settings(
        self, version: int, settings: dict[str, SettingValue], on_done: OnDone[int]
    ) -> None:
        """Replaces the settings of the cluster."""
        job = partial(
            self._records.put_settings, self._keys.settings, version, encode_settings(settings)
        )
        self._helper.ask(job, on_done, changes=True)

    def read_settings(self, on_done: OnDone[SettingsRecord]) -> None:
        """Reads the settings of the cluster."""
        key = self._keys.settings
        self._helper.ask(lambda deadline: settings_of(self._records.read(key, deadline)), on_done)

    def close(self) -> None:
        """Closes the connections; sessions end by themselves."""
        if not self._closed:
            self._closed = True
            self._watches.clear()
            self._stream.close()
            self._helper.close()

    # ---- Watches ---------------------------------------------------------------------

    def _follow(self) -> None:
        groups: frozenset[str] = frozenset().union(*(one.groups for one in self._watches))
        self._tables = {
            group: self._tables.get(group) or WatchedKeys(self._keys, group) for group in groups
        }
        self._stream.follow(groups)

    def _end_watch(self, watch: "EtcdWatch") -> None:
        if watch in self._watches:
            self._watches.remove(watch)
            self._follow()

    def _on_read(self, group: str, kvs: list[EtcdKeyValue], sent_ms: int) -> None:
        table = self._tables.get(group)
        if table is not None and not self._closed:
            table.replace(kvs)
            now_ms = self._clock.monotonic_ms()
            self._notify_watches(
                table, self._ages.on_read(group, table.revisions(), sent_ms, now_ms)
            )

    def _on_events(self, group: str, events: list[KeyEvent]) -> None:
        table = self._tables.get(group)
        if table is not None and not self._closed:
            table.apply(events)
            now_ms = self._clock.monotonic_ms()
            self._notify_watches(table, self._ages.on_watch(group, table.revisions(), now_ms))

    def _notify_watches(self, table: WatchedKeys, ages: dict[int, int]) -> None:
        try:
            view = table.view(ages)
        except MQMeshError as error:
            _log.error("a watched group makes no sense: %s", error)
            return
        for watch in list(self._watches):
            if view.group in watch.groups and not watch.closed:
                watch.on_change(view)


class EtcdWatch:
    """Groups that are watched.

    Args:
        groups: Broker groups.
        on_change: Called with the view of a group that changed.
        on_close: Called when the watch is closed.

    Attributes:
        closed: ``on_change`` is called no more.
    """

    def __init__(
        self,
        groups: frozenset[str],
        on_change: Callable[[GroupView], None],
        on_close: Callable[["EtcdWatch"], None],
    ) -> None:
        self.groups = groups
        self.on_change = on_change
        self.closed = False
        self._on_close = on_close

    def close(self) -> None:
        """Ends the watch: ``on_change`` is called no more. Calling twice does no harm."""
        if not self.closed:
            self.closed = True
            self._on_close(self)


def _nothing(outcome: object) -> None:
    """Ignores the outcome."""
