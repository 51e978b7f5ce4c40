"""The broker's process: sockets, timers, files and a helper thread around its parts."""

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Any, Final

from mqmesh.clock import Clock
from mqmesh.errors import StorageError, StoreClosed, TooManyOpenFiles
from mqmesh.host import host_id, socket_path
from mqmesh.hosts import bindable
from mqmesh.private_files import make_folder, make_private
from mqmesh.protocol.commands import ServedBy
from mqmesh.protocol.route import BrokerAddress, DataVersion
from mqmesh.roles.broker.all_features import FEATURES
from mqmesh.roles.broker.commit_point import commit_point_of
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.context import BrokerContext, Retries, Wire
from mqmesh.roles.broker.feature import BrokerTurn, Features
from mqmesh.roles.broker.features.delays.schedule_desk import ScheduleDesk
from mqmesh.roles.broker.features.groups.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.features.groups.queue_locks import QueueLocks
from mqmesh.roles.broker.features.pulls.filter_servers import FilterServers
from mqmesh.roles.broker.features.pulls.meta_cache import MetaCache
from mqmesh.roles.broker.features.pulls.pull_hold import PullHold
from mqmesh.roles.broker.features.pulls.pull_turns import PullTurns
from mqmesh.roles.broker.features.retries.dead_letter_marks import DeadLetterMarks
from mqmesh.roles.broker.features.sends.send_admission import SendAdmission
from mqmesh.roles.broker.features.snapshots.snapshot_desk import (
    OnDone,
    SnapshotDesk,
    as_mqmesh_error,
)
from mqmesh.roles.broker.features.storing.staging import SendStage
from mqmesh.roles.broker.features.topics.creation_rates import CreationRates
from mqmesh.roles.broker.features.transactions.check_timetable import TransactionSettings
from mqmesh.roles.broker.features.transactions.half_checkpoint_file import HalfCheckpointFile
from mqmesh.roles.broker.features.transactions.transaction_desk import TransactionDesk
from mqmesh.roles.broker.features.transactions.transactions import (
    has_queue,
)
from mqmesh.roles.broker.index_status import INDEX_FIGURES, INDEX_STATE, IndexStatus
from mqmesh.roles.broker.indexer_link import TICK_MS as INDEX_TICK_MS
from mqmesh.roles.broker.indexer_link import IndexerLink, LogExtent, indexer_arguments
from mqmesh.roles.broker.life import LIFE_FILE, dump_life, first_number, next_life
from mqmesh.roles.broker.namesrv_links import GOODBYE_MS, REGISTRATION_FIGURES, NamesrvLinks
from mqmesh.roles.broker.producer_keys import ProducerKeys
from mqmesh.roles.broker.state_answers import write_state
from mqmesh.roles.broker.stats import SAMPLE_MS, BrokerStats
from mqmesh.roles.broker.store_figures import STORE_FIGURES
from mqmesh.roles.broker.tables import BrokerTables
from mqmesh.roles.descriptors import room_for_connections
from mqmesh.roles.document_saver import DocumentSaver, MakeSaver, Read
from mqmesh.roles.helper_process import HelperProcess
from mqmesh.roles.process import StoppedEarly
from mqmesh.roles.shell import RoleShell
from mqmesh.storage.backends import OpenStore, open_store
from mqmesh.storage.files.atomic_file import load_document, save_document
from mqmesh.storage.interface import MessageStore, RecoveryProgress
from mqmesh.storage.tools.snapshot_making import remove_unfinished
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.transport.interface import Connection, ServerLimits, Timer, Transport

TICK_MS: Final = 100
"""Deadlines are looked at, and the store's chores done, so often."""
CHORES_REST: Final = 4
"""While requests come, the store's chores rest so many times as long as they work."""
PROGRESS_TICK_MS: Final = 20
"""PING is answered so often while the store recovers."""

CONFIG_DIRECTORY: Final = "config"
INDEX_SOCKET: Final = "index.sock"

_log = logging.getLogger(__name__)


class BrokerServer:
    """The master of a broker group.

    Args:
        config: Settings.
        transport: Of the process.
        clock: Source of time, the loop's by default.
        opener: Opens the store; the configuration says which by default.
    """

    def __init__(
        self,
        config: BrokerConfig,
        transport: Transport,
        clock: Clock | None = None,
        opener: OpenStore | None = None,
    ) -> None:
        self._config = config
        self._transport = transport
        self._loop = transport.loop
        transport.busy_poll(config.busy_poll_us)
        self._open_store = opener or open_store
        self._clock = clock or transport.loop.clock
        self._instance_id = transport.random.getrandbits(63)
        self._root = Path(config.store_path_root_dir)
        self._life = 0
        self._pumped_ms = 0
        self._wake_planned = False
        self._store_failed = False
        self._shell = RoleShell(ServedBy.BROKER, "broker", config.broker_name, transport, clock)
        self._store: MessageStore | None = None
        self._broker: BrokerContext | None = None
        self._features: Features | None = None
        self._announced: DataVersion | None = None
        self._links: NamesrvLinks | None = None
        self._index: IndexerLink | None = None
        self._executor: Executor | None = None
        # Copying a segment takes seconds, which no topic or offset shall wait for.
        self._aside = transport.executor("snapshot")
        self._files: tuple[Read, MakeSaver] | None = None
        self._half_checkpoint: HalfCheckpointFile | None = None
        self._chores: Timer | None = None
        self._requests_seen = 0

    # ---- Life ------------------------------------------------------------------------

    def start(self) -> str:
        """Listens, opens the store, and registers with the name servers.

        While the store recovers, PING is answered and everything else refused.

        Returns:
            The TCP endpoint.

        Raises:
            ConfigError: A setting cannot be used.
            OSError: The port is taken, or a directory cannot be used.
            StoreLocked: Another process has the store open.
            StorageError: The store or a table cannot be opened.
            StoppedEarly: The loop was told to stop while the store recovered.
        """
        config = self._config
        files = config.storage.max_open_files
        limits = ServerLimits(
            max_connections=room_for_connections(config.max_connections, files),
            max_pending_bytes=config.max_pending_bytes,
            max_total_pending_bytes=config.max_total_pending_bytes,
        )
        server = self._shell.open(on_disconnect=self._on_disconnect, limits=limits)
        endpoint = server.bind(f"tcp://{bindable(config.listen_host)}:{config.listen_port}")
        self._shell.state = "recovering"
        self._store = self._open_store(
            config.storage.backend,
            self._root,
            config.storage,
            clock=self._clock,
            wake=self._wake,
            on_progress=self._on_progress,
        )
        broker = self._broker = self._build(self._store)
        write_state(broker)  # shows from the beginning whether there is room
        self._recover_transactions(broker, self._store)
        address = self._address(endpoint.rpartition(":")[2])
        remove_unfinished(config.snapshot.root(self._root), config.broker_name)
        self._links = NamesrvLinks(
            config,
            address,
            self._instance_id,
            connect=self._connect,
            clock=self._clock,
            call_soon=partial(self._loop.call_later, 0),
        )
        self._features = Features(FEATURES, broker)
        self._shell.dispatch.open(self._features.handlers)
        self._tell_figures(broker)
        self._loop.at_tick_end(self._on_tick_end)
        self._shell.every(TICK_MS, self._on_tick)
        self._shell.every(SAMPLE_MS, self._on_sample)
        self._shell.every(config.flush_consumer_offset_interval_ms, self._on_save)
        self._shell.ready()
        self._links.connect(broker)
        if config.allow_insecure_bind:
            _log.warning("allow_insecure_bind: everybody who reaches %s may do all", endpoint)
        return endpoint

    def stop(self) -> None:
        """Says goodbye, saves and closes everything; also what a failed ``start`` left open."""
        self._shell.stopping()
        if self._index is not None:
            self._index.ask_to_stop()
        try:
            if self._broker is not None and self._features is not None:
                self._say_goodbye(self._broker, self._features)
        finally:
            self._broker = self._features = None
            self._close()

    def _say_goodbye(self, broker: BrokerContext, features: Features) -> None:
        features.stopping()
        self._on_save()
        links = self._links
        if links is not None:
            links.unregister()
        until_ms = self._clock.monotonic_ms() + GOODBYE_MS
        while broker.commit_point.waiting_count or (links is not None and links.in_flight):
            now_ms = self._clock.monotonic_ms()
            if now_ms >= until_ms:
                break
            self._loop.tick(min(until_ms - now_ms, 20))
            features.durable()
        features.stopped()

    def _close(self) -> None:
        if self._links is not None:
            self._links.close()
            self._links = None
        if self._half_checkpoint is not None:
            self._half_checkpoint.close()
            self._half_checkpoint = None
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
        self._aside.shutdown()
        if self._index is not None:
            self._index.close()
            self._index = None
        if self._store is not None:
            self._store.close()
            self._store = None
        self._shell.close()

    # ---- Building --------------------------------------------------------------------

    def _build(self, store: MessageStore) -> BrokerContext:
        config, server = self._config, self._shell.server
        assert server is not None
        retry_after_ms, chance = config.busy_retry_after_ms, self._transport.random
        # What a store in memory forgets anyway is not kept at all.
        is_kept = config.storage.backend != "memory"
        tables = BrokerTables(config, self._clock, store if is_kept else None)
        tables.load()
        self._begin_life(is_kept=is_kept)
        return BrokerContext(
            config=config,
            clock=self._clock,
            instance_id=self._instance_id,
            store=store,
            commit_point=commit_point_of(config, store),
            topics=tables.topics,
            offsets=tables.offsets,
            group_table=tables.groups,
            groups=ConsumerGroups(
                grace_ms=config.client_lost_grace_ms,
                expiry_ms=config.client_channel_expired_timeout_ms,
                most_clients=config.max_clients,
                first_generation=first_number(self._life),
                busy_retry_after_ms=retry_after_ms,
            ),
            locks=self._make_locks(store),
            holds=PullHold(config.max_held_pulls, retry_after_ms),
            turns=PullTurns(config.max_held_pulls, retry_after_ms),
            stage=SendStage(),
            producer_keys=ProducerKeys(config.max_producers_per_connection),
            metas=MetaCache(),
            stats=BrokerStats(),
            wire=Wire(
                self._shell.reply,
                self._shell.fail,
                server.notify,
                server.note_refusal,
                server.room,
            ),
            state=tables.state,
            creation_rates=CreationRates(config.auto_topics_per_minute),
            admission=SendAdmission(
                wait_limit_ms=config.wait_time_mills_in_send_queue,
                busy_timeout_ms=config.os_page_cache_busy_timeout_mills,
            ),
            index=self._make_index(),
            filter_servers=FilterServers(config.filter_server_enable, config.broker_name),
            snapshots=SnapshotDesk(self._run_aside, self._root.absolute()),
            transactions=TransactionDesk(
                TransactionSettings(
                    timeout_ms=config.transaction_timeout_ms,
                    check_interval_ms=config.transaction_check_interval_ms,
                    check_max=config.transaction_check_max,
                    pending_max=config.transaction_pending_max,
                    parked_max=config.transaction_parked_max,
                    busy_retry_after_ms=retry_after_ms,
                ),
                chance,
            ),
            schedule=ScheduleDesk(chance),
            retries=Retries(marks=DeadLetterMarks(chance)),
        )

    def _make_locks(self, store: MessageStore) -> QueueLocks:
        config = self._config
        # Who consumed from an earlier life of this broker may still do so.
        wait_ms = config.rebalance_lock_lost_grace_ms if store.topics() else 0
        return QueueLocks(
            lease_ms=config.rebalance_lock_max_live_time_ms,
            lost_grace_ms=config.rebalance_lock_lost_grace_ms,
            most=config.max_consumer_offsets,
            first_token=first_number(self._life) + 1,
            settled_ms=self._clock.monotonic_ms() + wait_ms,
            busy_retry_after_ms=config.busy_retry_after_ms,
        )

    def _begin_life(self, *, is_kept: bool) -> None:
        if not is_kept:
            self._life = next_life(None, self._clock.wall_ms())
            return
        directory = self._root / CONFIG_DIRECTORY
        make_folder(directory)
        make_private(directory)
        executor = self._executor = self._transport.executor("save")
        call_soon = self._loop.call_soon_threadsafe
        self._files = (
            lambda name: load_document(directory / name),
            lambda name, dump: DocumentSaver(directory / name, dump, executor, call_soon),
        )
        self._life = next_life(load_document(directory / LIFE_FILE), self._clock.wall_ms())
        try:
            save_document(directory / LIFE_FILE, dump_life(self._life))
        except StorageError as error:
            # Reading and committing go on without it, and the clock mostly tells lives apart.
            _log.error("the life of this broker could not be noted: %s", error)

    def _make_index(self) -> IndexerLink | None:
        config = self._config
        if not config.index.enable or config.storage.backend != "commitlog":
            return None
        # Without a place for its socket there is no start: a broker without index would only be
        # noticed by those who miss it.
        endpoint = f"ipc://{socket_path(self._root, INDEX_SOCKET)}"
        self._index = IndexerLink(
            start_process=lambda suspect: HelperProcess(
                indexer_arguments(config, self._root.absolute(), endpoint, suspect=suspect)
            ),
            connect=lambda: self._transport.connect(endpoint),
            look=self._log_extent,
            clock=self._clock,
            max_queries=config.index.max_queries,
            query_timeout_ms=config.index.query_timeout_ms,
        )
        return self._index

    def _log_extent(self) -> LogExtent | None:
        if self._broker is None:
            return None
        stats = self._broker.store.stats()
        visible = self._broker.commit_point.visible(stats.max_commitlog_offset)
        return LogExtent(stats.store_id, stats.min_commitlog_offset, visible)

    def _run_aside(self, work: Callable[[], Any], on_done: OnDone) -> None:
        """Has the thread for snapshots do something, then calls back in the loop's thread."""

        def done(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                self._loop.call_soon_threadsafe(partial(on_done, None, as_mqmesh_error(error)))
            else:
                self._loop.call_soon_threadsafe(partial(on_done, future.result(), None))

        self._aside.submit(work).add_done_callback(done)

    def _recover_transactions(self, broker: BrokerContext, store: MessageStore) -> None:
        document = None
        if self._files is not None:
            self._half_checkpoint = HalfCheckpointFile(broker.transactions, *self._files)
            document = self._half_checkpoint.load()
        broker.transactions.recover(
            store,
            document,
            partial(has_queue, broker.topics),
            wall_ms=self._clock.wall_ms(),
            now_ms=self._clock.monotonic_ms(),
            segment_bytes=self._config.storage.mapped_file_size_commit_log,
        )

    def _address(self, port: str) -> BrokerAddress:
        host = self._config.advertised_host or bindable(self._config.listen_host)
        return BrokerAddress(f"{host}:{port}", self._bind_ipc(), host_id())

    def _connect(self, address: str, on_connection: Callable[[bool], None]) -> Connection:
        return self._transport.connect(endpoint_of(address), on_connection=on_connection)

    def _bind_ipc(self) -> str:
        # Only now that the store is ours: binding takes the path from whoever has it.
        if not self._config.enable_ipc:
            return ""
        assert self._shell.server is not None
        path = socket_path(self._root)
        self._shell.server.bind(f"ipc://{path}")
        return str(path)

    # ---- Events ----------------------------------------------------------------------

    def _on_progress(self, progress: RecoveryProgress) -> None:
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._pumped_ms >= PROGRESS_TICK_MS:
            self._pumped_ms = now_ms
            self._loop.tick(0)
            if self._loop.stopping:
                # Nothing is half done: recovery begins anew with the next start.
                raise StoppedEarly("told to stop while the store was recovering")

    def _on_disconnect(self, peer: bytes) -> None:
        if self._features is not None:
            self._features.client_gone(peer, self._clock.monotonic_ms())

    def _on_tick_end(self) -> None:
        features, server = self._features, self._shell.server
        if features is None or server is None:
            return
        self._announce_topics()
        if features.turn_ended(BrokerTurn(server.readable_ms, server.drained_ms)):
            self._loop.call_later(0, _take_next_turn)

    def _announce_topics(self) -> None:
        if self._broker is not None and self._links is not None:
            version = self._broker.topics.version
            if version is not self._announced:
                self._announced = version
                self._links.topics_changed()

    def _on_tick(self) -> None:
        if self._features is None:
            return
        now_ms = self._clock.monotonic_ms()
        if self._shell.server is not None:
            self._shell.server.tick(now_ms)
        if self._broker is not None and self._broker.state.is_due:
            write_state(self._broker)
        self._features.tick(now_ms)
        if self._links is not None:
            self._links.tick()
        self._tick_index()
        if self._index is not None and self._index.is_behind:
            # Only while the log grows: an idle broker is to sleep.
            self._loop.call_later(INDEX_TICK_MS, self._tick_index)
        if self._chores is None:
            self._do_chores()

    def _tick_index(self) -> None:
        if self._index is not None and self._shell.state == "running":
            self._index.tick()

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
            # Whoever starts it again has it recover; as it is, it would never write again.
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
        if self._broker is not None and self._features is not None:
            self._broker.stats.sample(self._clock.monotonic_ms())
            self._features.sample()

    def _on_save(self) -> None:
        if self._broker is not None:
            write_state(self._broker)
        if self._broker is not None and self._half_checkpoint is not None:
            self._half_checkpoint.save()

    def _wake(self) -> None:
        # Comes from the store's thread, after each sync.
        if not self._wake_planned:
            self._wake_planned = True
            self._loop.call_soon_threadsafe(self._on_durable)

    def _on_durable(self) -> None:
        self._wake_planned = False
        if self._features is not None:
            self._features.durable()

    # ---- Figures -----------------------------------------------------------------------

    def _tell_figures(self, broker: BrokerContext) -> None:
        links, index, tell = self._links, self._index, self._shell.tell
        assert links is not None
        for feature in FEATURES:
            tell(feature.figures, lambda: broker)
        tell(STORE_FIGURES, broker.store.stats)
        tell(REGISTRATION_FIGURES, lambda: links)
        if index is None:
            tell((INDEX_STATE,), IndexStatus)
        else:
            tell((INDEX_STATE, *INDEX_FIGURES), index.status)


def _take_next_turn() -> None:
    """Nothing to do, but the loop takes its next turn without a wait."""
