"""Settings of a name server. Names are RocketMQ's in snake case; the defaults stand here only."""

from typing import Annotated, Final

import msgspec

from mqmesh.config import check_names
from mqmesh.errors import ConfigError
from mqmesh.hosts import check_listen
from mqmesh.security.config import SecurityConfig
from mqmesh.units import GIB, KIB, MIB

_Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]


CHANGEABLE: Final = ("broker_expire_ms", "scan_interval_ms")
"""Settings that administrators may change while a name server runs."""


class NamesrvConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a name server.

    Attributes:
        name: Name of the instance, shown in logs and to administrators.
        listen_host: Address to listen at. The default serves this machine only.
        listen_port: TCP port for requests, 0 to 65,535; 0 takes a free one, for tests.
        publish_port: TCP port of the route-change hints, 0 to 65,535; 0 takes a free one, since
            clients learn the port from the name server. Fix it where a firewall must know it.
        advertised_host: Host that clients connect to for hints; empty for
            ``listen_host``. Needed when that is a wildcard or behind a translated address.
        allow_insecure_bind: Listen beyond this machine without encryption and without
            authentication of clients. Only for networks in which every client may do all.
        security: Keys and access list; see docs/security.md.
        broker_expire_ms: A broker silent for so long is dropped though its connection stands,
            1,000 to 3,600,000 ms. Must be well above the brokers' heartbeat of 30 s.
        scan_interval_ms: Interval of the search for silent brokers, 10 to 600,000 ms.

        data_dir: Directory for what must outlive a restart: key/value configuration, drained
            brokers, queues of ordered topics. Empty to keep them in memory only.

        max_connections: Connections at a time, 1 to 1,000,000; more are refused with SYSTEM_BUSY,
            then ended. Each takes a descriptor; see the broker's setting.
        max_total_pending_bytes: Bytes that may wait for all connections together, or of them, 32
            MiB to 1 TiB; where it is used up, those that have the most are ended.
        max_brokers: Broker groups known at a time, 1 to 100,000; more are refused.
        max_topic_entries: Topics of all brokers together, 1 to 100,000,000; about 300 bytes
            of memory each.
        max_kv_bytes: Key/value configuration, all together, 1 KiB to 1 GiB.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] = "namesrv"
    listen_host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] = "127.0.0.1"
    listen_port: _Port = 9_876
    publish_port: _Port = 0
    advertised_host: Annotated[str, msgspec.Meta(max_length=255)] = ""
    allow_insecure_bind: bool = False
    broker_expire_ms: Annotated[int, msgspec.Meta(ge=1_000, le=3_600_000)] = 120_000
    scan_interval_ms: Annotated[int, msgspec.Meta(ge=10, le=600_000)] = 10_000

    security: SecurityConfig = msgspec.field(default_factory=SecurityConfig)
    data_dir: str = ""

    max_connections: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10_000
    max_total_pending_bytes: Annotated[int, msgspec.Meta(ge=32 * MIB, le=1024 * GIB)] = 256 * MIB
    max_brokers: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1_024
    max_topic_entries: Annotated[int, msgspec.Meta(ge=1, le=100_000_000)] = 1_000_000
    max_kv_bytes: Annotated[int, msgspec.Meta(ge=KIB, le=GIB)] = 16 * MIB

    def __post_init__(self) -> None:
        """Checks what concerns several fields, or needs more than a bound.

        Raises:
            ConfigError: Names the field and what to write instead.
        """
        check_names(self, "name")
        check_listen(
            "name server",
            self.listen_host,
            self.advertised_host,
            allow_insecure_bind=self.allow_insecure_bind or self.security.enable,
        )
        if self.publish_port and self.publish_port == self.listen_port:
            raise ConfigError(
                f"publish_port = {self.publish_port} is the listen_port too; change one of them"
            )
