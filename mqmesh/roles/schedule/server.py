"""The schedule service's process: its connection, its timers, and the files of the timetable."""

import logging
from functools import partial
from pathlib import Path
from typing import Final

from mqmesh.clock import Clock
from mqmesh.errors import CorruptRecord, MQMeshError, ProtocolError, StorageError
from mqmesh.host import host_id, socket_path
from mqmesh.private_files import make_folder
from mqmesh.protocol.command import (
    Command,
    decode_header,
    encode_header,
)
from mqmesh.protocol.commands import RequestCode, ServedBy
from mqmesh.protocol.route import ClusterInfo, GetClusterRequest, RouteHint
from mqmesh.roles.schedule.config import ScheduleConfig
from mqmesh.roles.schedule.service import SCHEDULE_METRICS, ScheduleService
from mqmesh.roles.schedule.timetable import Timetable
from mqmesh.roles.shell import RoleShell
from mqmesh.roles.started_as import begin_in
from mqmesh.sdk.client.broker_connections import choose_endpoint
from mqmesh.sdk.client.namesrv_link import NamesrvLink
from mqmesh.storage.commitlog.checkpoint import read_boot_id
from mqmesh.storage.files.store_lock import StoreLock
from mqmesh.storage.lmdb.env import DATA_FILE, LmdbEnv
from mqmesh.transport.endpoints import learn_keys
from mqmesh.transport.interface import Connection, Transport

TIMETABLE_DIRECTORY: Final = "timetable"
LOOK_MS: Final = 200
"""Interval at which the name servers are queried for the broker, without a session."""
NAMESRV_TIMEOUT_MS: Final = 3_000
MASTER_ID: Final = 0

_log = logging.getLogger(__name__)


class ScheduleServer:
    """The schedule service of one broker group.

    Args:
        config: Settings.
        transport: Transport of the process.
        clock: Source of time, the loop's by default.
    """

    def __init__(
        self, config: ScheduleConfig, transport: Transport, clock: Clock | None = None
    ) -> None:
        self._config = config
        self._transport = transport
        self._loop = transport.loop
        self._clock = clock or transport.loop.clock
        self._root = Path(config.store_path_root_dir)
        self._host_id = host_id() if config.use_ipc else None
        self._lock: StoreLock | None = None
        self._env: LmdbEnv | None = None
        self._shell = RoleShell(ServedBy.SCHEDULE, "schedule", config.name, transport, clock)
        self._link: NamesrvLink | None = None
        self._client: Connection | None = None
        self._looking = False
        self._look_planned = False
        self._service = ScheduleService(
            config,
            clock=self._clock,
            call_later=transport.loop.call_later,
            open_table=self._open_table,
            boot_id=read_boot_id(),
            on_session_lost=self._look_later,
        )

    def start(self) -> str:
        """Takes its directory, and begins to look for the broker.

        Returns:
            Where it answers PING, and serves its metrics.

        Raises:
            ConfigError: The directory for sockets cannot be used; or security was on there, and is
                off now.
            StoreLocked: Another process has the timetable.
            OSError: The directory cannot be used.
        """
        make_folder(self._root)
        self._lock = StoreLock(self._root)
        begin_in(self._root, self._config.security)
        endpoint = self._shell.open().bind(f"ipc://{socket_path(self._root)}")
        self._shell.expose(SCHEDULE_METRICS, self._service.status)
        self._link = NamesrvLink(
            self._transport,
            list(self._config.namesrv_addr),
            timeout_ms=NAMESRV_TIMEOUT_MS,
            on_hint=self._on_hint,
            on_connected=self._look,
        )
        self._look_later()
        self._shell.ready()
        return endpoint

    def stop(self) -> None:
        """Closes everything; also what a failed ``start`` left open."""
        self._shell.stopping()
        table = self._service.close()
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._link is not None:
            self._link.close()
            self._link = None
        self._shell.close()
        self._close_env(table)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _close_env(self, table: Timetable | None) -> None:
        if self._env is None:
            return
        if table is not None:
            try:
                self._env.sync()
                table.mark(clean=True)
                self._env.sync()
            except StorageError as error:
                _log.warning("the timetable may have to be made anew: %s", error)
        self._env.close()
        self._env = None

    # ---- The timetable's file ------------------------------------------------------------

    def _open_table(self, anew: bool) -> Timetable:
        directory = self._root / TIMETABLE_DIRECTORY
        if anew:
            if self._env is not None:
                self._env.close()
                self._env = None
            (directory / DATA_FILE).unlink(missing_ok=True)
        if self._env is None:
            self._env = self._open_env(directory)
        return Timetable(self._env)

    def _open_env(self, directory: Path) -> LmdbEnv:
        try:
            return LmdbEnv(directory, map_size=self._config.map_size)
        except CorruptRecord as error:
            _log.error("the timetable is damaged, it is made anew: %s", error)
            (directory / DATA_FILE).unlink(missing_ok=True)
            return LmdbEnv(directory, map_size=self._config.map_size)

    # ---- The way to the broker -------------------------------------------------------------

    def _on_hint(self, hint: RouteHint) -> None:
        self._look()

    def _look_later(self) -> None:
        # Only until there is a session: an idle service is to sleep. A connection is not enough,
        # for a master that handed over goes on to answer, and a hint at the new one may get lost.
        if not self._look_planned:
            self._look_planned = True
            self._loop.call_later(LOOK_MS, self._look_if_away)

    def _look_if_away(self) -> None:
        self._look_planned = False
        if self._link is None or self._service.in_session:
            return
        self._look()
        self._look_later()

    def _look(self) -> None:
        if self._looking or self._link is None:
            return
        self._looking = True
        header = encode_header(GetClusterRequest())
        self._link.request(RequestCode.GET_BROKER_CLUSTER_INFO, header, self._take_cluster)

    def _take_cluster(self, answer: Command | MQMeshError) -> None:
        self._looking = False
        if isinstance(answer, MQMeshError) or self._link is None:
            return
        try:
            cluster = decode_header(ClusterInfo, answer.header)
        except ProtocolError as error:
            _log.warning("a name server cannot be understood: %s", error)
            return
        for group in cluster.brokers:
            if group.broker_name == self._config.broker_name and MASTER_ID in group.addresses:
                learn_keys(self._transport.ring, group.addresses.values())
                self._connect(choose_endpoint(group.addresses[MASTER_ID], self._host_id))

    def _connect(self, endpoint: str) -> None:
        old = self._client
        if old is not None:
            if old.endpoint == endpoint:
                return
            self._service.on_disconnected()
            old.close()
        _log.info("the broker is at %s", endpoint)
        client = self._client = self._transport.connect(
            endpoint,
            on_command=self._service.on_command,
            on_connection=lambda up: self._on_connection(client, up),
        )
        self._look_later()

    def _on_connection(self, client: Connection, up: bool) -> None:
        if client is not self._client:
            return
        if up:
            # Later: its requests must not come before this call returns.
            self._loop.call_later(0, partial(self._begin, client))
        else:
            self._service.on_disconnected()
            self._look_later()

    def _begin(self, client: Connection) -> None:
        if client is self._client and client.connected:
            self._service.on_connected(client)
