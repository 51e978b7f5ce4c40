"""The gateway's process: its ports, connections and timers."""

import logging
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mqmesh.certificates import LOOK_MS, ServerCertificate, file_marks
from mqmesh.clock import Clock
from mqmesh.config import MAX_FILE_BYTES
from mqmesh.errors import ConfigError, MQMeshError, StorageError, StoreLocked
from mqmesh.host import claim_port, socket_path
from mqmesh.metrics import Measured, counter, gauge
from mqmesh.private_files import make_folder
from mqmesh.protocol.commands import RequestCode, ServedBy
from mqmesh.protocol.gateway import GatewayClients, GatewayClientsRequest
from mqmesh.protocol.remoting.frame import RemotingCommand
from mqmesh.protocol.request import Request
from mqmesh.protocol.route import BrokerData
from mqmesh.roles.gateway.backend import GatewayBackend, OnBroker, OnCommand
from mqmesh.roles.gateway.client_list import list_clients
from mqmesh.roles.gateway.config import SHARED_LOCK, GatewayConfig
from mqmesh.roles.gateway.grpc.handles import Handles
from mqmesh.roles.gateway.messages import Address
from mqmesh.roles.gateway.ports import VIP_STEP, BrokerPorts
from mqmesh.roles.gateway.session import Handler, RemotingSession, SessionLimits
from mqmesh.roles.gateway.upstream import Upstream
from mqmesh.roles.gateway.user_backends import UserBackends
from mqmesh.roles.gateway.users import GatewayUser, parse_users
from mqmesh.roles.shell import RoleShell
from mqmesh.roles.started_as import begin_in
from mqmesh.security.keys import KeyRing, load_credentials
from mqmesh.storage.files.atomic_file import load_document, save_document
from mqmesh.storage.files.directory_lock import hold_file
from mqmesh.storage.files.store_lock import StoreLock
from mqmesh.transport.interface import ByteStream, Transport
from mqmesh.transport.tls_streams import TlsGate

if TYPE_CHECKING:
    # It needs packages of an extra.
    from mqmesh.roles.gateway.grpc.front import GrpcFront
    from mqmesh.roles.gateway.grpc.service import GrpcService
    from mqmesh.roles.gateway.grpc.session import GrpcSession

PORTS_FILE: Final = "gateway.json"
SECRET_FILE: Final = "gateway.secret"
SECRET_BYTES: Final = 32
LATE_CALLS_MS: Final = 500
"""Interval at which calls by gRPC are looked at that took too long."""
GRPC_PACKAGES: Final = ("h2", "google", "google.protobuf")
IDLE_LOOK_MS: Final = 10_000
LOCKED_MS: Final = 200
"""Pause before broker groups are looked for again, when another worker held the file of ports."""
LOG_BROKEN_MS: Final = 1_000
"""Connections that speak another protocol are logged no oftener."""

_log = logging.getLogger(__name__)


class GatewayServer:
    """One gateway.

    Args:
        config: Settings.
        transport: Transport of the process.
        clock: Source of time, the loop's by default.

    Raises:
        ConfigError: The file of users, or the certificate, cannot be used.
    """

    def __init__(
        self, config: GatewayConfig, transport: Transport, clock: Clock | None = None
    ) -> None:
        self._config = config
        self._transport = transport
        self._clock = clock or transport.loop.clock
        self._root = Path(config.store_path_root_dir)
        self._lock: StoreLock | None = None
        self._shell = RoleShell(ServedBy.GATEWAY, "gateway", config.instance, transport, clock)
        self._listeners: list[ExitStack] = []
        self._sessions: dict[RemotingSession, None] = {}
        self._limits = SessionLimits(
            config.max_frame_bytes,
            config.max_requests_in_flight,
            config.max_output_bytes,
            config.idle_timeout_ms,
        )
        self.refused_connections = 0
        self._broken = self._log_broken_at_ms = 0
        self._ports = BrokerPorts(
            config.client_host, config.broker_port_base, self._serve_broker, self._change_ports
        )
        self._looks_again = False
        self._handles = Handles()
        self._has_grpc = bool(config.grpc_port) and self._can_grpc()
        self._backend = self._connect(transport, self._take_groups)
        self._users: UserBackends | None = None
        self._users_seen = file_marks((config.users_file,))
        if config.security.enable:
            anonymous = self._backend if config.allow_anonymous else None
            now_ms = self._clock.monotonic_ms
            users = read_users(config.users_file) if config.users_file else {}
            self._users = UserBackends(users, self._make_backend, anonymous, now_ms)
        self._certificate: ServerCertificate | None = None
        self._tls: TlsGate | None = None
        if config.tls_cert_file:
            certificate = ServerCertificate(
                config.tls_cert_file, config.tls_key_file, protocols=("h2",)
            )
            self._certificate = certificate
            self._tls = TlsGate(certificate, only_tls=config.tls_only)
        self._grpc = self._make_grpc() if self._has_grpc else None

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
        make_folder(config.own_folder)
        self._lock = StoreLock(config.own_folder)
        try:
            with hold_file(self._root / SHARED_LOCK):
                begin_in(self._root, config.security)
        except StorageError as error:
            raise ConfigError(f"store_path_root_dir cannot be used: {error}") from error
        self._load_ports()
        handlers = {RequestCode.GET_GATEWAY_CLIENTS: self._list_clients}
        endpoint = self._shell.open(handlers).bind(f"ipc://{socket_path(config.own_folder)}")
        self._shell.expose(GATEWAY_METRICS, lambda: self)
        self._shell.every(IDLE_LOOK_MS, self._end_idle)
        self._shell.every(LOOK_MS, self._look_at_files)
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
        self._backend.start()
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
        for backend in self._backends():
            backend.stop()
        self._shell.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # ---- Connections -----------------------------------------------------------------------

    def _listen(self, port: int, broker_name: str) -> str:
        return self._listen_for(port, partial(self._accept, broker_name))

    def _listen_for(self, port: int, accept: Callable[[ByteStream], None]) -> str:
        config = self._config
        with ExitStack() as undo:
            if config.workers > 1:
                claim = claim_port(config.listen_host, port, self._root, config.worker)
                undo.callback(claim.close)
            guard = None if self._tls is None else self._tls.guard
            listener = self._transport.listen(accept, guard)
            undo.callback(listener.close)
            endpoint = listener.bind(
                f"tcp://{config.listen_host}:{port}", shares_port=config.workers > 1
            )
            self._listeners.append(undo.pop_all())
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
            self._admit,
            self._limits,
            self._clock.monotonic_ms,
            self._ended,
            self._note_broken,
        )
        self._sessions[session] = None
        stream.start(session)

    def _admit(self, session: RemotingSession, request: RemotingCommand) -> Mapping[int, Handler]:
        users = self._users
        return self._backend.handlers if users is None else users.admit(session, request)

    def _note_broken(self, text: str) -> None:
        # No oftener: a client that connects again and again must not fill the disk.
        now_ms = self._clock.monotonic_ms()
        self._broken += 1
        if now_ms >= self._log_broken_at_ms:
            self._log_broken_at_ms = now_ms + LOG_BROKEN_MS
            _log.warning("%s (%d so far)", text, self._broken)

    def _ended(self, session: RemotingSession) -> None:
        self._sessions.pop(session, None)
        backend = self._backend if self._users is None else self._users.of(session)
        if backend is not None:
            backend.members.session_ended(session)

    def _all_sessions(self) -> "list[RemotingSession | GrpcSession]":
        return [*self._sessions, *(self._grpc.sessions if self._grpc else ())]

    def _end_idle(self) -> None:
        now_ms = self._clock.monotonic_ms()
        for session in list(self._sessions):
            session.end_if_idle(now_ms)
        if self._users is not None:
            self._users.tidy(self._all_sessions())

    # ---- gRPC ------------------------------------------------------------------------------

    def _can_grpc(self) -> bool:
        if all(find_spec(name) is not None for name in GRPC_PACKAGES):
            return True
        _log.warning(
            "clients by gRPC are not served: install mqmesh[gateway], or set grpc_port = 0"
        )
        return False

    def _make_grpc(self) -> "GrpcFront":
        from mqmesh.roles.gateway.grpc.front import GrpcFront

        return GrpcFront(
            self._admit_call,
            self._limits,
            self._clock,
            self._backend.upstream.post,
            self._note_broken,
        )

    def _add_grpc(self, backend: GatewayBackend) -> None:
        from mqmesh.roles.gateway.grpc.service import GrpcService

        config = self._config
        backend.grpc = GrpcService(
            backend.upstream,
            self._ports,
            backend.sends,
            backend.cache,
            backend.transactions,
            handles=self._handles,
            key=backend.key,
            clock=self._clock,
            address=Address(config.client_host, config.grpc_port),
            max_clients=config.max_connections,
            max_receipts=config.max_receipts,
        )

    def _admit_call(self, session: "GrpcSession", headers: Mapping[str, str]) -> "GrpcService":
        users = self._users
        backend = self._backend if users is None else users.admit_call(session, headers)
        assert backend.grpc is not None
        return backend.grpc

    def _start_grpc(self, front: "GrpcFront") -> None:
        self._handles.secret = self._load_secret()
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
        self._shell.every(LATE_CALLS_MS, front.tick)
        _log.info("clients by gRPC are served at %s", found.removeprefix("tcp://"))

    def _load_secret(self) -> bytes:
        path = Path(self._config.secret_file or self._root / SECRET_FILE)
        try:
            with hold_file(self._root / SHARED_LOCK):
                found = load_document(path)
                if found is None:
                    found = self._transport.random.randbytes(SECRET_BYTES)
                    save_document(path, found)
        except MQMeshError as error:
            raise ConfigError(f"secret_file {path} cannot be used: {error}") from error
        return found

    # ---- Users and certificates ------------------------------------------------------------

    def _backends(self) -> list[GatewayBackend]:
        return [backend for _, backend in self._named_backends()]

    def _named_backends(self) -> list[tuple[str, GatewayBackend]]:
        return [("", self._backend), *(() if self._users is None else self._users.all())]

    def _list_clients(self, request: Request, query: GatewayClientsRequest) -> GatewayClients:
        namespace = request.peer.principal.namespace or query.namespace
        return list_clients(query, self._named_backends(), self._clock.monotonic_ms(), namespace)

    def _make_backend(self, user: GatewayUser) -> GatewayBackend:
        own = load_credentials(Path(user.credentials))
        transport = self._transport.with_keys(KeyRing(own, *own.namesrv_keys))
        backend = self._connect(transport, lambda groups: None)
        backend.start()
        # The first request may be to a broker: a client repeats a failed heartbeat 30 s later.
        backend.upstream.routes.learn(self._backend.upstream.groups)
        return backend

    def _connect(
        self, transport: Transport, on_groups: Callable[[list[BrokerData]], None]
    ) -> GatewayBackend:
        config = self._config

        def make(on_command: OnCommand, on_broker: OnBroker) -> Upstream:
            return Upstream(
                transport,
                config.namesrv_addr,
                use_ipc=config.use_ipc,
                on_groups=on_groups,
                on_command=on_command,
                on_broker=on_broker,
            )

        backend = GatewayBackend(config, make, self._clock, self._ports, transport.random)
        if self._has_grpc:
            self._add_grpc(backend)
        return backend

    def _look_at_files(self) -> None:
        if self._certificate is not None:
            self._certificate.look()
        path = self._config.users_file
        found = file_marks((path,))
        if self._users is None or not path or found == self._users_seen:
            return
        self._users_seen = found
        try:
            changed = self._users.put(read_users(path))
        except ConfigError as error:
            _log.error("the users stay the old ones: %s", error)
            return
        _log.info("%s was read again: %d users changed or are gone", path, len(changed))
        for session in self._all_sessions():
            if session.access_key in changed:
                session.close()

    # ---- Brokers ---------------------------------------------------------------------------

    def _take_groups(self, groups: list[BrokerData]) -> None:
        for group in groups:
            self._ports.serve(group.broker_name, group.cluster_name)

    # ---- The file of ports -----------------------------------------------------------------

    def _load_ports(self) -> None:
        path = self._root / PORTS_FILE
        try:
            found = load_document(path)
            if found is not None:
                self._ports.load(found)
        except MQMeshError as error:
            raise ConfigError(f"{path} cannot be used: {error}") from error

    def _change_ports(self, change: Callable[[bytes | None], bytes]) -> None:
        path = self._root / PORTS_FILE
        try:
            with hold_file(self._root / SHARED_LOCK, wait=False):
                save_document(path, change(load_document(path)))
        except StoreLocked:
            if not self._looks_again:
                self._looks_again = True
                self._transport.loop.call_later(LOCKED_MS, self._look_again)
            raise

    def _look_again(self) -> None:
        self._looks_again = False
        self._backend.upstream.look()

    # ---- Metrics ---------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        """Connections of clients."""
        return len(self._sessions) + (self._grpc.connections if self._grpc else 0)

    @property
    def members(self) -> int:
        """Clients at broker groups, and those by gRPC."""
        by_grpc = sum(one.grpc.clients for one in self._backends() if one.grpc)
        return by_grpc + sum(len(one.members) for one in self._backends())

    @property
    def sent_messages(self) -> int:
        """Messages of clients that were stored."""
        before = 0 if self._users is None else self._users.sent_before
        return before + sum(one.sends.messages for one in self._backends())

    @property
    def given_messages(self) -> int:
        """Messages that were given to clients."""
        before = 0 if self._users is None else self._users.given_before
        return before + sum(one.given_messages for one in self._backends())

    @property
    def held_messages(self) -> int:
        """Messages that consumers by gRPC have without a report."""
        return sum(one.grpc.held_messages for one in self._backends() if one.grpc)

    @property
    def waiting_bytes(self) -> int:
        """Bodies that wait for brokers."""
        return sum(one.sends.waiting_bytes for one in self._backends())

    @property
    def cached_bytes(self) -> int:
        """Bytes that brokers gave beyond what pulls took."""
        return sum(one.cache.held_bytes for one in self._backends())


def read_users(path: str) -> dict[str, GatewayUser]:
    """Read the file of users.

    Raises:
        ConfigError: It cannot be read, is no such file, or others may read it.
    """
    try:
        with open(path, encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(MAX_FILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"users_file {path}: {getattr(error, 'strerror', error)}") from error
    if mode & 0o077:
        raise ConfigError(f"users_file {path}: others may read it; run chmod 600 {path}")
    return parse_users(text, path)


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
