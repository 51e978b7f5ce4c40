"""Settings of an embedded coordinator. The defaults stand here only."""

from typing import Annotated

import msgspec

from mqmesh.config import check_names
from mqmesh.hosts import check_listen
from mqmesh.security.config import SecurityConfig
from mqmesh.units import GIB, MIB


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an embedded coordinator.

    Attributes:
        name: Name of the instance, shown in logs and to administrators.
        listen_host: Address to listen at. The default serves this machine only.
        listen_port: TCP port, 0 to 65,535; 0 takes a free one, for tests.
        allow_insecure_bind: Listen beyond this machine without encryption and without
            authentication of clients. Only for networks in which every client may do all.
        security: Keys and access list; see docs/security.md.
        data_dir: Directory of its file. Losing it loses no message, but every group must be
            entered again (`mqmesh ha init`); see docs/high-availability.md.

        max_connections: Connections at a time, 1 to 1,000,000; more are refused with SYSTEM_BUSY.
        max_total_pending_bytes: Bytes that may wait for all connections together, or of them, 32
            MiB to 1 TiB.
        max_records: Broker groups and clusters, 1 to 100,000; more are refused with SYSTEM_BUSY.
        max_sessions: Sessions at a time, 1 to 1,000,000; more are refused with SYSTEM_BUSY.
        max_watches: Groups that are watched, those of all connections together, 1 to 1,000,000;
            more are refused with SYSTEM_BUSY.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] = "coordinator"
    listen_host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] = "127.0.0.1"
    listen_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 9_870
    allow_insecure_bind: bool = False
    security: SecurityConfig = msgspec.field(default_factory=SecurityConfig)
    data_dir: Annotated[str, msgspec.Meta(min_length=1)] = "./mqmesh-data/coordinator"

    max_connections: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 4_096
    max_total_pending_bytes: Annotated[int, msgspec.Meta(ge=32 * MIB, le=1024 * GIB)] = 64 * MIB
    max_records: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 10_000
    max_sessions: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10_000
    max_watches: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 100_000

    def __post_init__(self) -> None:
        """Checks what needs more than a bound.

        Raises:
            ConfigError: Names the field and what to write instead.
        """
        check_names(self, "name")
        # Nothing publishes its address: each client has it in its configuration.
        check_listen(
            "coordinator",
            self.listen_host,
            self.listen_host,
            allow_insecure_bind=self.allow_insecure_bind or self.security.enable,
        )
