"""The embedded coordinator's process: its socket, its timers and its file around the registry."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mqmesh.clock import Clock
from mqmesh.errors import DiskFull, StorageError, StoreClosed
from mqmesh.host import ProcessMark, is_gone
from mqmesh.hosts import bindable
from mqmesh.private_files import make_folder, make_private
from mqmesh.protocol.command import EMPTY_REPLY, MAX_HEADER_BYTES, Answer, Reply, encode_header
from mqmesh.protocol.commands import RequestCode, ServedBy
from mqmesh.protocol.coordination import (
    BeginSessionRequest,
    BeginSessionResponse,
    ChangeRecordRequest,
    ChangeRecordResponse,
    ChangeStatus,
    EndSessionRequest,
    KeepSessionRequest,
    KeepSessionResponse,
    ReadRecordRequest,
    WatchRecordsRequest,
)
from mqmesh.protocol.request import Peer, Request
from mqmesh.roles.coordinator.config import CoordinatorConfig
from mqmesh.roles.coordinator.registry import REGISTRY_METRICS, Registry
from mqmesh.roles.descriptors import room_for_connections
from mqmesh.roles.dispatch import Handler
from mqmesh.roles.shell import RoleShell
from mqmesh.roles.started_as import begin_in
from mqmesh.storage.files.store_lock import StoreLock
from mqmesh.storage.lmdb.coordinator_file import CoordinatorFile, KeptChange
from mqmesh.transport.interface import ServerLimits, Timer, Transport
from mqmesh.units import MIB

SESSION_BITS: Final = 128
LOOKS_MS: Final = (5, 20, 50, 100, 250, 500, 1_000)
"""After a connection broke, when to look whether its process is gone: the kernel closes the sockets
of a dying process a little before the process is removed."""

_log = logging.getLogger(__name__)


class CoordinatorServer:
    """One embedded coordinator.

    Args:
        config: Settings.
        transport: Transport of the process.
        clock: Source of time, the loop's by default.
    """

    def __init__(
        self, config: CoordinatorConfig, transport: Transport, clock: Clock | None = None
    ) -> None:
        self._config = config
        self._loop = transport.loop
        self._clock = clock or transport.loop.clock
        self._shell = RoleShell(ServedBy.COORDINATOR, "coordinator", config.name, transport, clock)
        self._registry = Registry(
            max_records=config.max_records,
            max_sessions=config.max_sessions,
            max_watches=config.max_watches,
            new_id=lambda: f"{transport.random.getrandbits(SESSION_BITS):032x}",
        )
        self._folder = Path(config.data_dir)
        self._lock: StoreLock | None = None
        self._file: CoordinatorFile | None = None
        self._look: Timer | None = None
        self._look_due_ms = 0
        self._will_notify = False

    # ---- Life ------------------------------------------------------------------------

    def start(self) -> str:
        """Reads its file, and listens.

        Returns:
            The endpoint for requests.

        Raises:
            OSError: The port is taken, or ``data_dir`` cannot be used.
            StoreLocked: Another process uses ``data_dir``.
            ConfigError: Security was on in ``data_dir``, and is off now.
            StorageError: The file is damaged, or cannot be opened.
        """
        config = self._config
        make_folder(self._folder)
        make_private(self._folder)
        self._lock = StoreLock(self._folder)
        begin_in(self._folder, config.security)
        file = self._file = CoordinatorFile(self._folder)
        now_ms = self._clock.monotonic_ms()
        self._registry.restore(file.records, file.sessions, now_ms)
        limits = ServerLimits(
            max_connections=room_for_connections(config.max_connections, 0),
            max_total_pending_bytes=config.max_total_pending_bytes,
            max_frame_bytes=MAX_HEADER_BYTES + MIB,
        )
        server = self._shell.open(self._handlers(), self._on_disconnect, limits)
        endpoint = server.bind(f"tcp://{bindable(config.listen_host)}:{config.listen_port}")
        self._shell.expose(REGISTRY_METRICS, lambda: self._registry)
        self._shell.look_after_peers()
        self._plan_look()
        self._shell.ready()
        if config.allow_insecure_bind:
            _log.warning("allow_insecure_bind: everybody who reaches %s may do all", endpoint)
        return endpoint

    def stop(self) -> None:
        """Closes everything; also what a failed ``start`` left open. Sessions go on living."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        self._shell.close()
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # ---- Handlers --------------------------------------------------------------------

    def _handlers(self) -> dict[RequestCode, Handler]:
        return {
            RequestCode.BEGIN_SESSION: self._begin,
            RequestCode.KEEP_SESSION: self._keep,
            RequestCode.END_SESSION: self._end,
            RequestCode.READ_RECORD: self._read,
            RequestCode.CHANGE_RECORD: self._change,
            RequestCode.WATCH_RECORDS: self._watch,
        }

    def _begin(self, request: Request, header: BeginSessionRequest) -> BeginSessionResponse | None:
        name, change = self._registry.begin(header)
        if not self._save(change):
            return None
        self._registry.apply(change, self._clock.monotonic_ms(), request.peer)
        _log.info("a session of %s %d begins", header.key, header.owner)
        self._after_change()
        return BeginSessionResponse(name)

    def _keep(self, request: Request, header: KeepSessionRequest) -> KeepSessionResponse:
        now_ms = self._clock.monotonic_ms()
        ttl_ms = self._registry.keep(header.session, header.presence, request.peer, now_ms)
        self._notify_soon()
        if ttl_ms is None:
            return KeepSessionResponse(False)
        return KeepSessionResponse(True, ttl_ms)

    def _end(self, request: Request, header: EndSessionRequest) -> Reply:
        self._end_session(header.session, "it was ended")
        return EMPTY_REPLY

    def _read(self, request: Request, header: ReadRecordRequest) -> Answer:
        return self._registry.view(header.key, self._clock.monotonic_ms())

    def _change(self, request: Request, header: ChangeRecordRequest) -> Answer | None:
        decided = self._registry.change(header)
        if isinstance(decided, ChangeRecordResponse):
            return decided
        if not self._save(decided):
            return None
        self._registry.apply(decided, self._clock.monotonic_ms())
        self._after_change()
        version = decided.records[header.key].version
        _log.info("%s has version %d", header.key, version)
        return ChangeRecordResponse(ChangeStatus.CHANGED, version)

    def _watch(self, request: Request, header: WatchRecordsRequest) -> Reply:
        self._registry.watches.watch(request.peer, header.keys)
        self._notify_soon()
        return EMPTY_REPLY

    # ---- Sessions that end -----------------------------------------------------------

    def _expire(self) -> None:
        self._look = None
        now_ms = self._clock.monotonic_ms()
        change = self._registry.expire(now_ms)
        if change is not None:
            _log.info("%d sessions were not renewed in time", len(change.ended))
            self._drop(change)
        self._plan_look()

    def _plan_look(self) -> None:
        due_ms = self._registry.next_look_ms()
        if due_ms is None or (self._look is not None and due_ms >= self._look_due_ms):
            return
        if self._look is not None:
            self._look.cancel()
        self._look_due_ms = due_ms
        delay_ms = max(due_ms - self._clock.monotonic_ms(), 0)
        self._look = self._loop.call_later(delay_ms, self._expire)

    def _on_disconnect(self, peer: Peer) -> None:
        self._registry.watches.forget(peer)
        left = self._registry.left_by(peer)
        if left:
            self._look_for(peer, left, 0)

    def _look_for(self, peer: Peer, left: Mapping[str, ProcessMark], number: int) -> None:
        if self._file is None:
            return
        still = self._registry.left_by(peer)
        for name, process in left.items():
            if name in still and is_gone(process):
                self._end_session(name, f"process {process.pid} is gone")
        if still and number < len(LOOKS_MS):
            self._loop.call_later(LOOKS_MS[number], lambda: self._look_for(peer, left, number + 1))

    def _end_session(self, name: str, why: str) -> None:
        change = self._registry.end(name)
        if change is not None:
            _log.info("a session ends: %s", why)
            self._drop(change)

    def _drop(self, change: KeptChange) -> None:
        # Also where the disk is full: a session that comes back by a restart ends again.
        if self._save(change, must_save=False):
            self._registry.apply(change, self._clock.monotonic_ms())
            self._after_change()

    # ---- Effects ---------------------------------------------------------------------

    def _save(self, change: KeptChange, *, must_save: bool = True) -> bool:
        """Writes a change; False if it failed, so that the content of the file is unknown.

        Then no request is answered, since the outcome is unknown, and the process ends.

        Raises:
            DiskFull: Nothing was written.
        """
        if self._file is None:
            return False
        try:
            self._file.write(change)
        except DiskFull as error:
            if must_save:
                raise
            _log.error("%s", error)
        except StorageError as error:
            _log.error("the coordinator's file has stopped: %s", error)
            self._file.close()
            self._file = None
            self._loop.fail(StoreClosed(f"the coordinator's file cannot be written: {error}"))
            return False
        return True

    def _after_change(self) -> None:
        self._plan_look()
        self._notify_soon()

    def _notify_soon(self) -> None:
        # After this turn of the loop: of many changes only the newest is sent.
        if self._registry.watches.has_changes and not self._will_notify:
            self._will_notify = True
            self._loop.call_later(0, self._notify)

    def _notify(self) -> None:
        self._will_notify = False
        now_ms = self._clock.monotonic_ms()
        for peer, keys in self._registry.watches.take_changes().items():
            for key in keys:
                view = self._registry.view(key, now_ms)
                peer.notify(RequestCode.NOTIFY_RECORD, encode_header(view))
