"""The broker's process: sockets, timers, files and helper threads around its role.

It leads its group, or follows the master of it (``role.py``); what that takes is the role's. The
store, the command server and everything else that outlives a role is here.
"""

import logging
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Any, Final

from mqmesh.clock import Clock
from mqmesh.coordination.backends import open_coordinator
from mqmesh.coordination.interface import MemberIncarnation, StateRecord
from mqmesh.errors import ConfigError, CorruptRecord, MQMeshError, StoreClosed, TooManyOpenFiles
from mqmesh.host import host_id, socket_path
from mqmesh.hosts import bindable
from mqmesh.logs import LogLevel, root_level, set_level
from mqmesh.private_files import make_folder, make_private
from mqmesh.protocol.command import Answer
from mqmesh.protocol.commands import RequestCode, ServedBy
from mqmesh.protocol.replication import HaStatus, HaStatusRequest
from mqmesh.protocol.request import Peer, Request
from mqmesh.protocol.route import BrokerAddress
from mqmesh.roles.broker.all_features import FEATURES, BrokerFeatures
from mqmesh.roles.broker.auto_creation import AUTO_CREATION_METRICS
from mqmesh.roles.broker.config import CHANGEABLE, MASTER_ID, BrokerConfig
from mqmesh.roles.broker.environment import Environment
from mqmesh.roles.broker.feature import BrokerTurn, Feature
from mqmesh.roles.broker.follower.follower_role import FollowerRole
from mqmesh.roles.broker.ha.confirm import AckPolicy
from mqmesh.roles.broker.ha.leadership import Leadership
from mqmesh.roles.broker.ha.member.group_member import GroupMember
from mqmesh.roles.broker.ha.member.ha_metrics import MEMBER_METRICS
from mqmesh.roles.broker.ha.member.process import LogPosition, World
from mqmesh.roles.broker.ha.replica_peers import ReplicaPeers
from mqmesh.roles.broker.ha.replica_role import ROLE_FILE, ReplicaRole, decode_role, encode_role
from mqmesh.roles.broker.ha.replica_state import (
    DRAWN_BITS,
    ReplicaState,
    decode_replica_state,
    encode_replica_state,
    first_state,
)
from mqmesh.roles.broker.ha.replica_state import NAME as REPLICA_STATE
from mqmesh.roles.broker.ha.replica_state import PLACE as REPLICA_PLACE
from mqmesh.roles.broker.ha.store_history import StoreHistory
from mqmesh.roles.broker.ha.vote_state import KeptVoteState, NoVoteState, VoteState
from mqmesh.roles.broker.ha_config import HaMode
from mqmesh.roles.broker.helper_thread import OnDone, as_mqmesh_error
from mqmesh.roles.broker.index.index_process import begin_index, has_index
from mqmesh.roles.broker.index.index_status import (
    INDEX_PROCESS_METRICS,
    INDEX_STATE,
    IndexStatus,
)
from mqmesh.roles.broker.index.indexer_link import IndexerLink, LogExtent
from mqmesh.roles.broker.master_role import MasterRole
from mqmesh.roles.broker.namesrv_links import REGISTRATION_METRICS
from mqmesh.roles.broker.replica_metrics import (
    COUNT_METRICS,
    REPLICA_METRICS,
    ReplicaCounts,
)
from mqmesh.roles.broker.role import BrokerRole
from mqmesh.roles.broker.stats import SAMPLE_MS, Stats
from mqmesh.roles.descriptors import room_for_connections
from mqmesh.roles.document_saver import DocumentSaver, MakeSaver, Read
from mqmesh.roles.live_settings import LiveSettings
from mqmesh.roles.process import StoppedEarly
from mqmesh.roles.settings_service import OnKept, SettingsService
from mqmesh.roles.shell import RoleShell
from mqmesh.roles.started_as import (
    StartedAs,
    check_security,
    read_started_as,
    remember_start,
)
from mqmesh.roles.store_metrics import INDEX_METRICS, STORE_METRICS
from mqmesh.storage.backends import OpenStore, open_store
from mqmesh.storage.commitlog.checkpoint import read_boot_id
from mqmesh.storage.commitlog.log_copy import BeginCopy, begin_copy
from mqmesh.storage.files.atomic_file import load_document, save_document
from mqmesh.storage.files.file_place import file_place
from mqmesh.storage.interface import (
    FlushDiskType,
    LogStart,
    MessageStore,
    RecoveryProgress,
    RetainingStore,
    begin_own_epoch,
    replicable,
)
from mqmesh.storage.lmdb.table_file import TableFile
from mqmesh.storage.table_rows import MemoryRows, TableRows
from mqmesh.storage.tools.snapshot_making import remove_unfinished
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.transport.interface import Connection, ServerLimits, Timer, Transport

TICK_MS: Final = 100
"""Deadlines are looked at, and the store's chores done, so often."""
CHORES_REST: Final = 4
"""While requests come, the store's chores rest so many times as long as they work."""
RETIRE_TICK_MS: Final = 20
PROGRESS_TICK_MS: Final = 20
"""PING is answered so often while the store recovers."""

CONFIG_DIRECTORY: Final = "config"
TABLES: Final = "tables"
OVERRIDES_FILE: Final = "overrides.json"

_log = logging.getLogger(__name__)


class BrokerServer:
    """A replica of a broker group: its master, or a follower.

    Args:
        config: Settings.
        transport: Of the process.
        clock: Source of time, the loop's by default.
        opener: Opens the store; the configuration says which by default.
        copier: Makes the folder of a closed store an empty copy of a master's.

    Attributes:
        rows: Rows of tables.
    """

    def __init__(
        self,
        config: BrokerConfig,
        transport: Transport,
        clock: Clock | None = None,
        opener: OpenStore | None = None,
        copier: BeginCopy = begin_copy,
    ) -> None:
        self._settings = LiveSettings(config, CHANGEABLE, f"broker {config.broker_name}")
        self._config = config
        self._transport = transport
        self._loop = transport.loop
        self._log_level = root_level()
        self._open_store = opener or open_store
        self._copy = copier
        self._clock = clock or transport.loop.clock
        self._instance_id = transport.random.getrandbits(63)
        self._address = BrokerAddress("")  # until it listens
        self._root = Path(config.store_path_root_dir)
        self._pumped_ms = 0
        self._replication = Stats(ReplicaCounts())
        self._wake_planned = False
        self._store_failed = False
        self._shell = RoleShell(
            ServedBy.BROKER, "broker", config.broker_name, transport, clock, config.max_label_sets
        )
        self._desk = SettingsService(
            self._settings, self._keep_overrides, self._on_settings, self._shell.dispatch
        )
        self._store: MessageStore | None = None
        self._role: BrokerRole | None = None
        self._member: GroupMember | None = None
        self._promises: VoteState = NoVoteState()
        self._index: IndexerLink | None = None
        self.rows: TableRows = MemoryRows()
        self._executor: Executor | None = None
        # Copying a segment takes seconds, which no topic or offset shall wait for.
        self._aside = transport.executor("snapshot")
        self._chores: Timer | None = None
        self._requests_seen = 0

    # ---- Life ------------------------------------------------------------------------

    def start(self) -> str:
        """Listens, opens the store, and registers with the name servers.

        While the store recovers, PING is answered and everything else refused.

        Returns:
            The TCP endpoint.

        Raises:
            ConfigError: A setting cannot be used, or the store was secured or a replica's before
                and these settings hide it.
            OSError: The port is taken, or a directory cannot be used.
            StoreLocked: Another process has the store open.
            StorageError: The store or a table cannot be opened.
            StoppedEarly: The loop was stopped while the store recovered.
        """
        self._load_overrides()
        config = self._config
        before, history = self._check_start()
        files = config.storage.max_open_files
        limits = ServerLimits(
            max_connections=room_for_connections(config.max_connections, files),
            max_pending_bytes=config.max_pending_bytes,
            max_total_pending_bytes=config.max_total_pending_bytes,
        )
        server = self._shell.open(on_disconnect=self._on_disconnect, limits=limits)
        endpoint = server.bind(f"tcp://{bindable(config.listen_host)}:{config.listen_port}")
        self._shell.state = "recovering"
        self._store = self._open()
        if self._keeps:
            self.rows = TableFile(self._root / TABLES, read_boot_id())
            follows = history.follows_next(config)
            remember_start(before, self._root, config.security, follows=follows)
        host = config.advertised_host or bindable(config.listen_host)
        ring = self._transport.ring
        self._address = BrokerAddress(
            f"{host}:{endpoint.rpartition(':')[2]}",
            self._bind_ipc(),
            host_id(),
            "" if ring is None else ring.own.public_key,
        )
        remove_unfinished(config.snapshot.root(self._root), config.broker_name)
        self._expose_metrics()
        connect = self._transport.connect
        self._index = begin_index(
            config, lambda at: connect(at), ring, self._clock, self._root, self._log_extent
        )
        self._join_group()
        self._begin_role()
        self._loop.at_tick_end(self._on_tick_end)
        self._shell.every(TICK_MS, self._on_tick)
        self._shell.every(SAMPLE_MS, self._on_sample)
        self._shell.every(config.flush_consumer_offset_interval_ms, self._on_save)
        self._shell.ready()
        self._opened_role().announce()
        if self._member is not None:
            self._member.start()
        if config.allow_insecure_bind:
            _log.warning("allow_insecure_bind: everybody who reaches %s may do all", endpoint)
        return endpoint

    def _check_start(self) -> tuple[StartedAs, StoreHistory]:
        """Looks how the store was used before, and whether it may be used so now."""
        if not self._keeps:
            return StartedAs(), StoreHistory()
        before = read_started_as(self._root)
        check_security(before, self._root, self._config.security)
        document = load_document(self._root / REPLICA_STATE)
        history = StoreHistory(
            follows=before.follows,
            is_promoted=self._was_promoted(),
            replica=None if document is None else decode_replica_state(document),
        )
        history.check_start(self._root, self._config)
        return before, history

    def stop(self) -> None:
        """Unregister, save and close everything, also after a ``start`` that failed."""
        if self._member is not None:
            self._retire(self._member)
            self._member.leave()
        self._shell.stopping()
        role = self._role
        if self._index is not None:
            self._index.ask_to_stop()
        try:
            if role is not None:
                role.say_goodbye(self._loop.tick)
        finally:
            self._close()

    def _retire(self, member: GroupMember) -> None:
        """Has another replica lead before this one stops, if it leads and can write."""
        while self._shell.state == "running" and not self._store_failed and not member.retire():
            self._loop.tick(RETIRE_TICK_MS)

    def _close(self) -> None:
        if self._member is not None:
            self._member.close()
            self._member = None
        if self._role is not None:
            self._role.close()
            self._role = None
        if self._index is not None:
            self._index.close()
            self._index = None
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
        self._aside.shutdown()
        self.rows.close()
        if self._store is not None:
            self._store.close()
            self._store = None
        self._shell.close()

    # ---- Roles -----------------------------------------------------------------------

    def _begin_role(self) -> None:
        """Begins what the settings say, or what an administrator made of it."""
        assert self._store is not None
        config = self._config
        is_master = config.broker_id == MASTER_ID or self._was_promoted()
        if config.ha.mode is not HaMode.AUTO and is_master:
            self._begin_leading(self._own_epoch())
            return
        self._begin_following(config.ha.master_addr)

    def _begin_leading(self, epoch: int) -> None:
        """Begins a master that was not elected."""
        assert self._store is not None
        self._role = MasterRole(self._environment(), self._store, epoch)

    def _own_epoch(self) -> int:
        assert self._store is not None
        if self._config.storage.backend == "memory":
            # Nothing remembers earlier ones; let no number of theirs pass for one of this.
            return 1 + self._transport.random.getrandbits(30)
        return begin_own_epoch(self._store)

    def _begin_following(self, leader: str, epoch: int = 0) -> None:
        assert self._store is not None
        role = FollowerRole(
            self._environment(),
            self._store,
            replace_store=self._replace_store,
            promote=self._promote,
            promises=self._promises,
        )
        self._role = role
        role.follow(leader, epoch)

    def _was_promoted(self) -> bool:
        document = load_document(self._root / CONFIG_DIRECTORY / ROLE_FILE)
        return document is not None and decode_role(document).epoch > 0

    def _promote(self, epoch: int) -> None:
        """Makes a follower the master; where that fails the process ends, and follows again."""
        assert self._role is not None and self._store is not None
        config = self._root / CONFIG_DIRECTORY
        try:
            replicable(self._store).begin_epoch(epoch, b"promoted by an administrator")
            make_folder(config)
            save_document(config / ROLE_FILE, encode_role(ReplicaRole(epoch)))
            self._role.close()
            self._role = None
            self._begin_leading(epoch)
            self._opened_role().announce()
        except MQMeshError as error:
            _log.critical("this follower cannot become the master: %s", error)
            self._loop.fail(error)
            return
        _log.warning("this replica is the master of %s now", self._config.broker_name)

    # ---- Roles by election -----------------------------------------------------------

    def _join_group(self) -> None:
        """Prepares to be elected, where masters are."""
        config = self._config
        if config.ha.mode is not HaMode.AUTO:
            return
        chance = self._transport.random.getrandbits
        promises = KeptVoteState(self._begin_replica_state(), self._save_replica_state, chance)
        coordinator = open_coordinator(
            config.ha.coordinator, self._transport, cluster=config.cluster_name
        )
        self._promises = promises
        self._member = GroupMember(
            config,
            self._address,
            coordinator,
            promises,
            self,
            ReplicaPeers(self._connect_replica),
            World(self._loop, self._clock, chance),
        )
        self._shell.expose(MEMBER_METRICS, self._member.status)

    def _connect_replica(self, where: str, server_key: str) -> Connection:
        """Return a connection to another replica, which must prove the key that it reports."""
        endpoint, guard, ring = endpoint_of(where), self._transport.guard, self._transport.ring
        if ring is not None and server_key:
            if guard is None or not guard.is_broker(server_key, self._config.broker_name):
                raise ConfigError(
                    f"{where} names the key {server_key:.40}, which no user of role broker has "
                    f"that may be {self._config.broker_name!r}"
                )
            ring.learn(endpoint, server_key)
        return self._transport.connect(endpoint)

    def _begin_replica_state(self) -> ReplicaState:
        """Return this replica's state, with what this start of the process changes of it."""
        assert self._store is not None
        make_folder(self._root)
        # Beside what a copy moves aside: promises hold for whatever the store has.
        document = load_document(self._root / REPLICA_STATE)
        boot_id, place = read_boot_id().hex(), file_place(self._root / REPLICA_PLACE)
        chance = self._transport.random
        drawn, identity = chance.getrandbits(DRAWN_BITS), f"{chance.getrandbits(64):016x}"
        if document is not None:
            syncs = self._config.storage.flush_disk_type is FlushDiskType.SYNC_FLUSH
            before = decode_replica_state(document)
            own = before.adopted(self._config.broker_id, place, identity=identity)
            state = own.started(boot_id, place, syncs=syncs, drawn=drawn)
            if state.incarnation != before.incarnation:
                _log.warning(
                    "this replica counts as a new member until it is in sync: %s",
                    "its store was copied, or put back from a backup"
                    if place != before.place
                    else "the machine was started, and not all was on the disk (flush_disk_type)",
                )
        else:
            state = first_state(
                replicable(self._store).identity().store_id,
                self._config.broker_id,
                identity=identity,
                boot_id=boot_id,
                place=place,
                drawn=drawn,
            )
        self._save_replica_state(state)
        return state

    def _save_replica_state(self, state: ReplicaState) -> None:
        document = encode_replica_state(state)
        save_document(self._root / REPLICA_STATE, document)

    def position(self) -> LogPosition:
        """Implement ``Replica.position``."""
        assert self._store is not None
        log = replicable(self._store)
        epochs, end = log.epochs(), log.log_end()
        return LogPosition(
            log.identity().store_id,
            epochs[-1].epoch if epochs and end else 0,
            end,
            min(self._store.durable_offset(), end),
            can_lead=not self._store_failed,
        )

    def silent_ms(self, now_ms: int) -> int:
        """Implement ``Replica.silent_ms``."""
        return self._role.silent_ms(now_ms) if isinstance(self._role, FollowerRole) else 0

    def lead(self, record: StateRecord) -> Leadership:
        """Implement ``Replica.lead``."""
        assert record.state is not None and self._store is not None
        store, config, state = self._store, self._in_force(), record.state
        log, before = replicable(store), self.position()
        self._end_role()
        try:
            log.begin_epoch(state.epoch, b"elected")
            leadership = Leadership(
                record,
                MemberIncarnation(config.broker_id, self._promises.incarnation),
                AckPolicy(
                    state.mode,
                    config.ha.min_in_sync_replicas,
                    refuses_below=True,
                    fall_behind_bytes=config.ha.ha_slave_fallbehind_max,
                ),
                marker_end=log.log_end(),
                log_end=log.log_end,
                lag_max_ms=config.ha.replica_lag_max_ms,
                counts_synced=config.storage.flush_disk_type is FlushDiskType.SYNC_FLUSH,
                owners_from=max(
                    state.unclean_since, state.mode_since_epoch + 1 if before.end else 0
                ),
            )
            self._role = MasterRole(self._environment(), store, state.epoch, leadership)
        except MQMeshError:
            self._begin_following("")
            raise
        return leadership

    def follow(self, leader: str, epoch: int, unclean_since: int) -> None:
        """Implement ``Replica.follow``."""
        if isinstance(self._role, FollowerRole):
            self._role.follow(leader, epoch, unclean_since)
            return
        self._end_role()
        self._begin_following(leader, epoch)

    def stay_outside(self, reason: str) -> None:
        """Implement ``Replica.stay_outside``."""
        if not isinstance(self._role, FollowerRole):
            self.follow("", 0, 0)
        assert isinstance(self._role, FollowerRole)
        self._role.stay_outside(reason)

    def _end_role(self) -> None:
        if isinstance(self._role, MasterRole):
            self._role.depose(f"another replica of {self._config.broker_name} is the master")
        if self._role is not None:
            self._role.close()
        self._role = None

    def _on_deposed(self, reason: str) -> None:
        if self._member is not None:
            self._loop.call_later(0, partial(self._member.step_down, reason))

    # ---- Settings --------------------------------------------------------------------

    def _load_overrides(self) -> None:
        """Takes over what administrators have changed; where that is damaged, nothing of it."""
        path = self._overrides_path
        try:
            document = load_document(path) if self._keeps else None
            if document is not None:
                self._settings.load(document)
        except (CorruptRecord, ConfigError) as error:
            _log.error("what `mqmesh broker set` has changed is not in force, %s: %s", path, error)
        self._config = self._settings.now
        self._transport.busy_poll(self._config.busy_poll_us)
        if self._config.log_level is not LogLevel.AS_STARTED:
            set_level(self._config.log_level)

    def _keep_overrides(self, overrides: dict[str, str], on_kept: OnKept) -> None:
        if not self._keeps:
            on_kept(None)
            return
        path, document = self._overrides_path, self._settings.dump(overrides)
        self._folder()

        def done(saving: Future[bool]) -> None:
            error = saving.exception()
            known = None if error is None else as_mqmesh_error(error)
            self._loop.call_soon_threadsafe(partial(on_kept, known))

        self._saver().submit(save_document, path, document).add_done_callback(done)

    def _on_settings(self) -> None:
        before, config = self._config, self._settings.now
        self._config = config
        self._transport.busy_poll(config.busy_poll_us)
        if config.log_level is not before.log_level:
            is_own = config.log_level is not LogLevel.AS_STARTED
            set_level(config.log_level if is_own else self._log_level)
        if isinstance(self._store, RetainingStore):
            self._store.retention.configure(config.storage)
        if self._role is not None:
            self._role.settings_changed()

    @property
    def _keeps(self) -> bool:
        return self._config.storage.backend != "memory"

    @property
    def _overrides_path(self) -> Path:
        return self._root / CONFIG_DIRECTORY / OVERRIDES_FILE

    # ---- The store -------------------------------------------------------------------

    def _replace_store(self, beginning: LogStart) -> MessageStore:
        """Moves the store aside, and opens an empty copy of another one's log."""
        assert self._store is not None
        held = replicable(self._store).identity()
        keeps = held.log_end > held.log_start
        if self._index is not None:
            self._index.close()  # it is another log's; the next tick starts it anew
        self.rows.close()  # likewise
        self._store.close()
        try:
            aside = self._copy(self._root, beginning, now_ms=self._clock.wall_ms(), keeps=keeps)
            if self._settings.overrides:
                document = self._settings.dump(self._settings.overrides)
                save_document(self._folder() / OVERRIDES_FILE, document)
            self._store = self._open()
            self._documents()  # their folder went with the store
        except MQMeshError as error:
            # The next start finds a whole store or begins a new copy; this process has no store.
            self._store_failed = True
            _log.critical("the store cannot become a copy, so this broker ends: %s", error)
            self._loop.fail(error)
            raise
        former = "it held nothing" if aside is None else f"its former files are in {aside}"
        _log.warning("the store begins anew as a copy of its master's; %s", former)
        return self._store

    def _open(self) -> MessageStore:
        return self._open_store(
            self._config.storage.backend,
            self._root,
            self._config.storage,
            clock=self._clock,
            wake=self._wake,
            on_progress=self._on_progress,
        )

    def _environment(self) -> Environment:
        return Environment(
            self._settings,
            self._transport,
            self._clock,
            self._shell,
            self._root,
            self._instance_id,
            self._address,
            self._documents(),
            self._run_aside,
            {
                RequestCode.GET_HA_STATUS: self._get_ha_status,
                RequestCode.GET_BROKER_CONFIG: self._desk.get,
                RequestCode.UPDATE_BROKER_CONFIG: self._desk.update,
                **(self._member.handlers if self._member is not None else {}),
            },
            self._replica_state,
            self._on_deposed,
            self._replication.total,
            lambda: self._in_force().ha,
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            self._index,
            self.rows,
        )

    def _in_force(self) -> BrokerConfig:
        """The settings, with those of the cluster above them."""
        return self._config if self._member is None else self._member.config

    def _replica_state(self) -> str:
        return "FOLLOWING" if self._member is None else self._member.state

    def _documents(self) -> tuple[Read, MakeSaver] | None:
        """Return how documents are read and saved; None where nothing is kept."""
        if not self._keeps:
            return None
        directory = self._folder()
        executor, call_soon = self._saver(), self._loop.call_soon_threadsafe
        return (
            lambda name: load_document(directory / name),
            lambda name, dump: DocumentSaver(directory / name, dump, executor, call_soon),
        )

    def _folder(self) -> Path:
        """Return the folder of the documents; make it where it is missing."""
        directory = self._root / CONFIG_DIRECTORY
        make_folder(directory)
        make_private(directory)
        return directory

    def _saver(self) -> Executor:
        """The thread that writes documents."""
        if self._executor is None:
            self._executor = self._transport.executor("save")
        return self._executor

    def _run_aside(self, work: Callable[[], Any], on_done: OnDone) -> None:
        """Has the thread for snapshots do something, then calls back in the loop's thread."""

        def done(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                self._loop.call_soon_threadsafe(partial(on_done, None, as_mqmesh_error(error)))
            else:
                self._loop.call_soon_threadsafe(partial(on_done, future.result(), None))

        self._aside.submit(work).add_done_callback(done)

    def _bind_ipc(self) -> str:
        # Only now that the store is ours: binding takes the path from its owner.
        if not self._config.enable_ipc:
            return ""
        assert self._shell.server is not None
        path = socket_path(self._root)
        self._shell.server.bind(f"ipc://{path}")
        return str(path)

    # ---- Events ----------------------------------------------------------------------

    def _on_progress(self, progress: RecoveryProgress) -> None:
        now_ms = self._clock.monotonic_ms()
        # A follower that cuts its log is in a turn of the loop already.
        if self._shell.state == "recovering" and now_ms - self._pumped_ms >= PROGRESS_TICK_MS:
            self._pumped_ms = now_ms
            self._loop.tick(0)
            if self._loop.stopping:
                # Nothing is half done: recovery begins anew with the next start.
                raise StoppedEarly("asked to stop while the store was recovering")

    def _on_disconnect(self, peer: Peer) -> None:
        if self._role is not None:
            self._role.client_gone(peer, self._clock.monotonic_ms())

    def _on_tick_end(self) -> None:
        role, server = self._role, self._shell.server
        if role is None or server is None:
            return
        if role.turn_ended(BrokerTurn(server.readable_ms, server.drained_ms)):
            self._loop.call_later(0, _take_next_turn)
        if self._member is not None:
            self._member.turn_ended()

    def _on_tick(self) -> None:
        if self._role is None:
            return
        now_ms = self._clock.monotonic_ms()
        if self._shell.server is not None:
            self._shell.server.tick(now_ms)
        self._role.tick(now_ms)
        if self._member is not None:
            self._member.tick(now_ms)
        if self._chores is None:
            self._do_chores()

    def _do_chores(self) -> None:
        self._chores = None
        if self._store is None or self._store_failed:
            return
        began_ms = self._clock.monotonic_ms()
        try:
            more = self._store.tick(began_ms)
        except StoreClosed as error:
            self._store_failed = True
            _log.critical("the store has stopped, so this broker ends: %s", error)
            # When it is started again, it recovers; as it is, it would never write again.
            self._loop.fail(error)
            return
        except TooManyOpenFiles as error:
            _log.warning("the store's chores have to wait: %s", error)
            return
        if more:
            # At once when nobody wants anything, else so that most of the time is theirs.
            spent_ms = max(self._clock.monotonic_ms() - began_ms, 1)
            delay_ms = spent_ms * CHORES_REST if self._is_busy() else 0
            self._chores = self._loop.call_later(delay_ms, self._do_chores)

    def _is_busy(self) -> bool:
        server = self._shell.server
        requests = server.requests if server is not None else 0
        busy, self._requests_seen = requests != self._requests_seen, requests
        return busy

    def _on_sample(self) -> None:
        now_ms = self._clock.monotonic_ms()
        self._replication.sample(now_ms)
        if self._role is not None:
            self._role.sample()

    def _on_save(self) -> None:
        if self._role is not None:
            self._role.save()

    def _wake(self) -> None:
        # Comes from the store's thread, after each sync.
        if not self._wake_planned:
            self._wake_planned = True
            self._loop.call_soon_threadsafe(self._on_durable)

    def _on_durable(self) -> None:
        self._wake_planned = False
        if self._role is not None:
            self._role.durable()

    # ---- Metrics -----------------------------------------------------------------------

    def _expose_metrics(self) -> None:
        expose = self._shell.expose
        for kind in FEATURES:
            expose(kind.metrics, partial(self._feature, kind))
        expose(STORE_METRICS, lambda: self._opened_features().core.store.stats())
        expose(AUTO_CREATION_METRICS, lambda: self._opened_features().state.auto_creation)
        expose(REGISTRATION_METRICS, lambda: self._opened_role().links)
        expose((INDEX_STATE,), self._index_status)
        if has_index(self._config):
            expose(INDEX_PROCESS_METRICS, self._index_status)
            expose(INDEX_METRICS, lambda: self._index_status().progress)
        if self._config.ha.mode is not HaMode.OFF:
            expose(REPLICA_METRICS, self._ha_status)
            expose(COUNT_METRICS, lambda: self._replication)

    def _ha_status(self) -> HaStatus:
        role = self._role
        if isinstance(role, FollowerRole):
            return role.ha_status()
        return self._opened_features().replication.ha_status()

    def _get_ha_status(self, request: Request, header: HaStatusRequest) -> Answer:
        status = self._ha_status()
        return status if self._member is None else self._member.complete(status)

    def _index_status(self) -> IndexStatus:
        return IndexStatus() if self._index is None else self._index.status()

    def _log_extent(self) -> LogExtent | None:
        return None if self._role is None else self._role.log_extent()

    def _opened_role(self) -> BrokerRole:
        assert self._role is not None
        return self._role

    def _feature(self, kind: type[Feature]) -> Feature:
        return self._opened_features().of(kind)

    def _opened_features(self) -> BrokerFeatures:
        features = self._opened_role().features
        assert features is not None
        return features


def _take_next_turn() -> None:
    """Nothing to do, but the loop takes its next turn without a wait."""
