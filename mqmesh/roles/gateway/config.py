"""Settings of a gateway. The defaults stand here only."""

import ipaddress
from pathlib import Path
from typing import Annotated, Final

import msgspec

from mqmesh.config import check_names
from mqmesh.errors import ConfigError
from mqmesh.hosts import check_listen
from mqmesh.security.config import SecurityConfig
from mqmesh.units import MIB

SHARED_LOCK: Final = "shared.lock"
"""Lock file in ``store_path_root_dir``: a worker holds it while it changes files that all share."""

_Address = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
_Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a gateway, by which RocketMQ's own clients speak to a cluster.

    Attributes:
        enable: Let `mqmesh up` run a gateway; `mqmesh up --gateway` does so, too.
        name: Name of the instance, shown in logs and to administrators.
        store_path_root_dir: Folder of the file that keeps the ports of broker groups. It must not
            be lost while clients run: they know broker groups by their ports.
        listen_host: Address to listen at. The default serves this machine only.
        advertised_host: IPv4 address that clients are given; "" for ``listen_host``.
        allow_insecure_bind: Listen beyond this machine, where every client that reaches it may do
            everything, or read what is sent.
        namesrv_port: TCP port that clients take for that of a name server, 0 to 65,535; 0 takes a
            free one, for tests.
        broker_port_base: TCP port of the first broker group, 1,024 to 60,000; each further one has
            a port that is 10 higher, and keeps it.
        vip_ports: Listen two ports below each broker group's, too, where clients look with
            ``vipChannelEnabled`` and RocketMQ's dashboard always.
        grpc_port: TCP port for clients of RocketMQ 5 by gRPC, 0 to 65,535; 0 for none. Needs the
            packages of ``mqmesh[gateway]``; without them the port is closed, and the log says so.
        workers: Processes that serve these ports together, 1 to 64, each on a core of its own;
            `mqmesh up` runs them all. A client's connections may be at different ones.
        worker: Number of this process among them, from 1; `mqmesh up` gives it.
        secret_file: File with which receipts of messages and ids of transactions are signed; "" for
            one in ``store_path_root_dir``. It is made if it is missing. Gateways that clients know
            together have copies of one.

        namesrv_addr: Name servers of the cluster, ``host:port`` each.
        use_ipc: Prefer the brokers' Unix sockets when they run on this machine.
        security: Keys of the gateway; see docs/security.md.
        users_file: With security on: file of the users of RocketMQ's clients, which sign their
            requests; "" for none, but for `mqmesh up`, which takes gateway-users.toml of
            data_dir/security. Read again when it changes.
        allow_anonymous: With security on: accept unsigned clients of RocketMQ; every client that
            reaches the gateway has the permissions of its keys then.
        tls_cert_file: Certificate, PEM, followed by those that vouch for it: clients may speak TLS
            at every port then. Read again when it changes; "" for one that `mqmesh gateway` makes
            for itself.
        tls_key_file: Private key of the certificate, PEM, without a passphrase.
        tls_only: End connections that speak plain text.

        max_connections: Connections at a time, 1 to 100,000; also clients at broker groups.
        max_frame_bytes: Longest request of a client, 1 MiB to 64 MiB.
        max_requests_in_flight: Requests of one connection without an answer, 1 to 100,000; nothing
            more is read of it then.
        max_output_bytes: Answers that one connection has not taken, 1 MiB to 1 GiB; nothing more is
            read of it then.
        idle_timeout_ms: A connection that is silent for so long is closed, 10,000 to 3,600,000 ms.
            RocketMQ's clients send something each 30 s.
        max_waiting_bytes: Bodies of one user that wait for brokers, 1 MiB to 4 GiB; sends are
            refused then.
        pull_cache_bytes: Messages that brokers gave for one user beyond what a pull took, 0 to
            4 GiB.
        max_receipts: Messages that consumers by gRPC have received and not reported on, 1,000 to
            10,000,000; no more are given then. Each takes some 200 bytes.
    """

    enable: bool = False
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] = "gateway"
    store_path_root_dir: Annotated[str, msgspec.Meta(min_length=1)] = "./mqmesh-data/gateway"
    listen_host: _Address = "127.0.0.1"
    advertised_host: Annotated[str, msgspec.Meta(max_length=255)] = ""
    allow_insecure_bind: bool = False
    namesrv_port: _Port = 19_876
    broker_port_base: Annotated[int, msgspec.Meta(ge=1_024, le=60_000)] = 20_911
    vip_ports: bool = True
    grpc_port: _Port = 8_081
    workers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    worker: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    secret_file: Annotated[str, msgspec.Meta(max_length=4_096)] = ""

    namesrv_addr: Annotated[list[_Address], msgspec.Meta(min_length=1, max_length=16)] = (
        msgspec.field(default_factory=lambda: ["127.0.0.1:9876", "127.0.0.1:9877"])
    )
    use_ipc: bool = True
    security: SecurityConfig = msgspec.field(default_factory=SecurityConfig)
    users_file: str = ""
    allow_anonymous: bool = False
    tls_cert_file: str = ""
    tls_key_file: str = ""
    tls_only: bool = False

    max_connections: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 10_000
    max_frame_bytes: Annotated[int, msgspec.Meta(ge=1 * MIB, le=64 * MIB)] = 16 * MIB
    max_requests_in_flight: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1_000
    max_output_bytes: Annotated[int, msgspec.Meta(ge=1 * MIB, le=1024 * MIB)] = 16 * MIB
    idle_timeout_ms: Annotated[int, msgspec.Meta(ge=10_000, le=3_600_000)] = 120_000
    max_waiting_bytes: Annotated[int, msgspec.Meta(ge=1 * MIB, le=4_096 * MIB)] = 128 * MIB
    pull_cache_bytes: Annotated[int, msgspec.Meta(ge=0, le=4_096 * MIB)] = 64 * MIB
    max_receipts: Annotated[int, msgspec.Meta(ge=1_000, le=10_000_000)] = 200_000

    def __post_init__(self) -> None:
        """Checks what needs more than a bound.

        Raises:
            ConfigError: Names the field and what to write instead.
        """
        check_names(self, "name")
        if self.security.enable and not (self.users_file or self.allow_anonymous):
            raise ConfigError(
                "security is on, and nobody may use the gateway: name users of RocketMQ's clients "
                "(users_file), or set allow_anonymous = true where everybody who reaches it may do "
                "what its keys may"
            )
        if self.users_file and not self.security.enable:
            raise ConfigError("users_file needs security.enable: users have rights there only")
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ConfigError("tls_cert_file and tls_key_file belong together: set both, or none")
        if self.worker > self.workers:
            raise ConfigError(
                f"worker = {self.worker} is more than there are (workers = {self.workers})"
            )
        if self.workers > 1 and not self.namesrv_port:
            raise ConfigError("workers need one port: set namesrv_port to one that is not 0")
        if self.tls_only and not self.tls_cert_file:
            raise ConfigError("tls_only needs tls_cert_file and tls_key_file")
        check_listen(
            "gateway",
            self.listen_host,
            self.advertised_host,
            allow_insecure_bind=self.allow_insecure_bind
            or (self.tls_only and self.security.enable and not self.allow_anonymous),
            advice="turn security on, name users_file, and set tls_only",
        )
        try:
            ipaddress.IPv4Address(self.client_host)
        except ValueError:
            raise ConfigError(
                f"advertised_host = {self.client_host!r} is no IPv4 address; RocketMQ's ids of "
                "messages have room for no other: set advertised_host to one that clients reach"
            ) from None

    @property
    def instance(self) -> str:
        """Name of this process."""
        return self.name if self.worker == 1 else f"{self.name}-{self.worker}"

    @property
    def own_folder(self) -> Path:
        """Folder of what this process has for itself, in that of all workers."""
        root = Path(self.store_path_root_dir)
        return root if self.worker == 1 else root / f"worker-{self.worker}"

    @property
    def client_host(self) -> str:
        """IPv4 address that clients are given."""
        return self.advertised_host or self.listen_host
