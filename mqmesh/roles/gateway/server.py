"""The gateway's process: its ports, connections and timers."""

import logging
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mqmesh.clock import Clock
from mqmesh.errors import (
    ClientClosed,
    ConfigError,
    CorruptBatch,
    CorruptRecord,
    MQMeshError,
    ProtocolError,
)
from mqmesh.host import socket_path
from mqmesh.metrics import Measured, counter, gauge
from mqmesh.private_files import make_folder
from mqmesh.producer_key import new_key
from mqmesh.protocol.command import Command
from mqmesh.protocol.commands import RequestCode, ServedBy
from mqmesh.protocol.route import BrokerData
from mqmesh.roles.gateway.config import GatewayConfig
from mqmesh.roles.gateway.consuming import Consuming, PullCache
from mqmesh.roles.gateway.members import GatewayMembers
from mqmesh.roles.gateway.messages import Address
from mqmesh.roles.gateway.ports import VIP_STEP, BrokerPorts
from mqmesh.roles.gateway.producing import Producing
from mqmesh.roles.gateway.queries import Queries
from mqmesh.roles.gateway.routing import Routing
from mqmesh.roles.gateway.send_backs import GatewaySendBacks
from mqmesh.roles.gateway.sends import MAX_REQUESTS_IN_FLIGHT, Sends
from mqmesh.roles.gateway.session import Handler, RemotingSession, SessionLimits
from mqmesh.roles.gateway.transactions import GatewayTransactions
from mqmesh.roles.gateway.upstream import Upstream
from mqmesh.roles.shell import RoleShell
from mqmesh.roles.started_as import begin_in
from mqmesh.sdk.client.options import born_host
from mqmesh.sdk.client.outbox import RequestOutbox
from mqmesh.storage.files.atomic_file import load_document, save_document
from mqmesh.storage.files.store_lock import StoreLock
from mqmesh.transport.interface import ByteStream, ByteStreamListener, Transport

if TYPE_CHECKING:
    # It needs packages of an extra.
    from mqmesh.roles.gateway.grpc.front import GrpcFront

PORTS_FILE: Final = "gateway.json"
SECRET_FILE: Final = "gateway.secret"
SECRET_BYTES: Final = 32
GRPC_PACKAGES: Final = ("h2", "google", "google.protobuf")
IDLE_LOOK_MS: Final = 10_000
LOG_BROKEN_MS: Final = 1_000
"""Connections that speak another protocol are logged no oftener."""

_log = logging.getLogger(__name__)


class GatewayServer:
    """One gateway.

    Args:
        config: Settings.
        transport: Of the process.
        clock: Source of time, the loop's by default.
    """

    def __init__(
        self, config: GatewayConfig, transport: Transport, clock: Clock | None = None
    ) -> None:
        self._config = config
        self._transport = transport
        self._clock = clock or transport.loop.clock
        self._root = Path(config.store_path_root_dir)
        self._lock: StoreLock | None = None
        self._shell = RoleShell(ServedBy.GATEWAY, "gateway", config.name, transport, clock)
        self._listeners: list[ByteStreamListener] = []
        self._sessions: dict[RemotingSession, None] = {}
        self._limits = SessionLimits(
            config.max_frame_bytes,
            config.max_requests_in_flight,
            config.max_output_bytes,
            config.idle_timeout_ms,
        )
        self.refused_connections = 0
        self._broken = self._log_broken_at_ms = 0
        self._upstream = Upstream(
            transport,
            config.namesrv_addr,
            use_ipc=config.use_ipc,
            on_groups=self._take_groups,
            on_command=self._take_command,
            on_broker=self._broker_changed,
        )
        self._ports = BrokerPorts(
            config.client_host, config.broker_port_base, self._serve_broker, self._save_ports
        )
        self._members = GatewayMembers(self._upstream, config.max_connections)
        key = new_key(transport.random)
        self._sends = Sends(
            lambda source: RequestOutbox(self._upstream, source, MAX_REQUESTS_IN_FLIGHT),
            self._clock,
            key,
            born_host(),
            self._upstream.brokers.follow,
            config.max_waiting_bytes,
        )
        self._cache = PullCache(config.pull_cache_bytes, self._clock.monotonic_ms)
        self._consuming = Consuming(self._upstream, self._members, self._ports, self._cache)
        self._transactions = GatewayTransactions(
            self._upstream, self._members, self._ports, self._sends.producer_id, key
        )
        send_backs = GatewaySendBacks(self._upstream)
        producing = Producing(
            self._upstream, self._sends, self._ports, self._transactions, send_backs, self._clock
        )
        routing = Routing(
            self._upstream, self._ports, lambda group: bool(self._members.consumers(group))
        )
        self._handlers: dict[int, Handler] = {
            **routing.handlers(),
            **producing.handlers(),
            **self._consuming.handlers(),
            **self._members.handlers(),
            **self._transactions.handlers(),
            **send_backs.handlers(),
            **Queries(self._upstream, self._ports).handlers(),
        }
        self._grpc = self._make_grpc(key) if config.grpc_port else None

    def start(self) -> str:
        """Takes its folder, listens, and begins to look for broker groups.

        Returns:
            Where it answers PING, and serves its metrics.

        Raises:
            ConfigError: The folder or the port cannot be used; or security was on there, and is off
                now.
            StoreLocked: Another gateway has the folder.
        """
        config = self._config
        make_folder(self._root)
        self._lock = StoreLock(self._root)
        begin_in(self._root, config.security)
        self._load_ports()
        endpoint = self._shell.open().bind(f"ipc://{socket_path(self._root)}")
        self._shell.expose(GATEWAY_METRICS, lambda: self)
        self._shell.every(IDLE_LOOK_MS, self._end_idle)
        try:
            found = self._listen(config.namesrv_port, "")
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {config.listen_host}:{config.namesrv_port}: "
                f"{error.strerror or error}; set namesrv_port to another"
            ) from error
        _log.info("RocketMQ's clients find the name server at %s", found.removeprefix("tcp://"))
        if self._grpc is not None:
            self._start_grpc(self._grpc)
        self._upstream.start()
        self._shell.ready()
        return endpoint

    def stop(self) -> None:
        """Closes everything; also what a failed ``start`` left open."""
        self._shell.stopping()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for session in list(self._sessions):
            session.close()
        if self._grpc is not None:
            self._grpc.close()
        stopping = ClientClosed("the gateway stops")
        self._sends.close(stopping)
        self._transactions.close(stopping)
        self._upstream.close(self._leave_all)
        self._shell.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # ---- Connections -----------------------------------------------------------------------

    def _leave_all(self) -> None:
        self._members.leave_all()
        if self._grpc is not None:
            self._grpc.leave_all()

    def _listen(self, port: int, broker_name: str) -> str:
        return self._listen_for(port, partial(self._accept, broker_name))

    def _listen_for(self, port: int, accept: Callable[[ByteStream], None]) -> str:
        listener = self._transport.listen(accept)
        try:
            endpoint = listener.bind(f"tcp://{self._config.listen_host}:{port}")
        except OSError:
            listener.close()
            raise
        self._listeners.append(listener)
        return endpoint

    def _serve_broker(self, port: int, broker_name: str) -> None:
        self._listen(port, broker_name)
        if self._config.vip_ports:
            try:
                self._listen(port - VIP_STEP, broker_name)
            except OSError as error:
                _log.warning("no VIP port for broker group %s: %s", broker_name, error)

    def _has_room(self, stream: ByteStream) -> bool:
        """Close a connection for which there is no room."""
        if self.connections < self._config.max_connections:
            return True
        self.refused_connections += 1
        stream.close()
        return False

    def _accept(self, broker_name: str, stream: ByteStream) -> None:
        if not self._has_room(stream):
            return
        session = RemotingSession(
            stream,
            broker_name,
            self._handlers,
            self._limits,
            self._clock.monotonic_ms,
            self._ended,
            self._note_broken,
        )
        self._sessions[session] = None
        stream.start(session)

    def _note_broken(self, text: str) -> None:
        # No oftener: who connects again and again must not fill the disk.
        now_ms = self._clock.monotonic_ms()
        self._broken += 1
        if now_ms >= self._log_broken_at_ms:
            self._log_broken_at_ms = now_ms + LOG_BROKEN_MS
            _log.warning("%s (%d so far)", text, self._broken)

    def _ended(self, session: RemotingSession) -> None:
        self._sessions.pop(session, None)
        self._members.session_ended(session)

    def _end_idle(self) -> None:
        now_ms = self._clock.monotonic_ms()
        for session in list(self._sessions):
            session.end_if_idle(now_ms)

    # ---- gRPC ------------------------------------------------------------------------------

    def _make_grpc(self, key: bytes) -> "GrpcFront | None":
        if any(find_spec(name) is None for name in GRPC_PACKAGES):
            _log.warning(
                "clients by gRPC are not served: install mqmesh[gateway], or set grpc_port = 0"
            )
            return None
        from mqmesh.roles.gateway.grpc.front import GrpcFront

        config = self._config
        return GrpcFront(
            self._upstream,
            self._ports,
            self._sends,
            self._transactions,
            key=key,
            clock=self._clock,
            limits=self._limits,
            address=Address(config.client_host, config.grpc_port),
            max_clients=config.max_connections,
            max_receipts=config.max_receipts,
            on_broken=self._note_broken,
        )

    def _start_grpc(self, front: "GrpcFront") -> None:
        front.handles.secret = self._load_secret()
        config = self._config

        def accept(stream: ByteStream) -> None:
            if self._has_room(stream):
                stream.start(front.accept(stream))

        try:
            found = self._listen_for(config.grpc_port, accept)
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {config.listen_host}:{config.grpc_port}: "
                f"{error.strerror or error}; set grpc_port to another, or to 0"
            ) from error
        front.start()
        _log.info("clients by gRPC are served at %s", found.removeprefix("tcp://"))

    def _load_secret(self) -> bytes:
        path = Path(self._config.secret_file or self._root / SECRET_FILE)
        try:
            found = load_document(path)
            if found is None:
                found = self._transport.random.randbytes(SECRET_BYTES)
                save_document(path, found)
        except (CorruptRecord, MQMeshError) as error:
            raise ConfigError(f"secret_file {path} cannot be used: {error}") from error
        return found

    # ---- Brokers ---------------------------------------------------------------------------

    def _take_groups(self, groups: list[BrokerData]) -> None:
        for group in groups:
            self._ports.serve(group.broker_name, group.cluster_name)

    def _take_command(self, broker_name: str, command: Command) -> None:
        try:
            if command.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED:
                self._members.on_changed(broker_name, command)
            elif command.code == RequestCode.CHECK_TRANSACTION_STATE:
                if self._grpc is None or not self._grpc.on_check(broker_name, command):
                    self._transactions.on_check(broker_name, command)
        except (ProtocolError, CorruptBatch) as error:
            _log.warning("broker %s cannot be understood: %s", broker_name, error)

    def _broker_changed(self, broker_name: str, up: bool) -> None:
        self._cache.drop_broker(broker_name)
        if up:
            self._members.on_broker_up(broker_name)
            if self._grpc is not None:
                self._grpc.on_broker_up(broker_name)

    # ---- The file of ports -----------------------------------------------------------------

    def _load_ports(self) -> None:
        path = self._root / PORTS_FILE
        try:
            found = load_document(path)
            if found is not None:
                self._ports.load(found)
        except (CorruptRecord, MQMeshError) as error:
            raise ConfigError(f"{path} cannot be used: {error}") from error

    def _save_ports(self, document: bytes) -> None:
        save_document(self._root / PORTS_FILE, document)

    # ---- Metrics ---------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        """Connections of clients."""
        return len(self._sessions) + (self._grpc.connections if self._grpc else 0)

    @property
    def members(self) -> int:
        """Clients at broker groups, and those by gRPC."""
        return len(self._members) + (self._grpc.clients if self._grpc else 0)

    @property
    def sent_messages(self) -> int:
        """Messages of clients that were stored."""
        return self._sends.messages

    @property
    def given_messages(self) -> int:
        """Messages that were given to clients."""
        return self._consuming.messages + (self._grpc.given_messages if self._grpc else 0)

    @property
    def held_messages(self) -> int:
        """Messages that consumers by gRPC have without a report."""
        return self._grpc.held_messages if self._grpc else 0

    @property
    def waiting_bytes(self) -> int:
        """Bodies that wait for brokers."""
        return self._sends.waiting_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes that brokers gave beyond what pulls took."""
        return self._cache.held_bytes


GATEWAY_METRICS: Final[tuple[Measured[GatewayServer], ...]] = (
    gauge(
        "gateway_connections",
        "connections of RocketMQ's clients",
        lambda server: server.connections,
        unit="connections",
    ),
    gauge(
        "gateway_members",
        "RocketMQ's clients at broker groups",
        lambda server: server.members,
        unit="clients",
    ),
    counter(
        "gateway_refused_connections_total",
        "connections beyond max_connections",
        lambda server: server.refused_connections,
        unit="connections",
    ),
    counter(
        "gateway_sent_messages_total",
        "messages of RocketMQ's producers that were stored",
        lambda server: server.sent_messages,
        unit="messages",
    ),
    counter(
        "gateway_given_messages_total",
        "messages that RocketMQ's consumers were given",
        lambda server: server.given_messages,
        unit="messages",
    ),
    gauge(
        "gateway_held_messages",
        "messages that consumers by gRPC have received and not reported on",
        lambda server: server.held_messages,
        unit="messages",
    ),
    gauge(
        "gateway_waiting_bytes",
        "bodies of sends without an outcome",
        lambda server: server.waiting_bytes,
    ),
    gauge(
        "gateway_cached_bytes",
        "batches that brokers gave beyond what pulls took",
        lambda server: server.cached_bytes,
    ),
)
