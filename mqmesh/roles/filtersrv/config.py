"""Settings of a filter server; the defaults stand here only."""

from typing import Annotated

import msgspec

from mqmesh.config import check_names
from mqmesh.errors import ConfigError
from mqmesh.hosts import check_listen
from mqmesh.security.config import SecurityConfig
from mqmesh.units import GIB, MIB

_Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


class FiltersrvConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a filter server.

    Attributes:
        enable: Run code that consumers upload. Without it a filter server does not start.
            The broker must allow it too (``filter_server_enable``).
        name: Name of the instance, shown in logs and to administrators.
        broker_name: Broker group that it filters for.
        broker_addr: Address of that broker, ``host:port``; it pulls and registers there.
        listen_host: Address to listen at. The default serves this machine only.
        listen_port: TCP port, 0 to 65,535; 0 takes a free one, since consumers learn it.
        advertised_host: Host that consumers connect to; empty for ``listen_host``.
        allow_insecure_bind: Listen beyond this machine without encryption and without
            authentication of clients. Only for networks in which every client may do all.
        security: Keys and access list; see docs/security.md.
        enable_ipc: Also listen at a Unix socket, which consumers on the same host prefer.
        require_seccomp: Refuse filters where the platform has no filter of system calls
            (Linux on x86-64 and aarch64 has). Without it, limits and namespaces alone hold.

        worker_memory_bytes: Address space of a filter's process, 64 MiB to 16 GiB. It must
            hold the messages of one batch, decoded.
        max_total_worker_memory_bytes: The same of all processes together, 64 MiB to 1 TiB: it says
            how many run at once. A filter that has nothing to do makes room for another one. If all
            are busy, a user (without security: a group) that has two more than the asking one
            gives one up, and a filter that has had one for 10 s gives it to those that wait; else
            the request is refused with SYSTEM_BUSY.
        worker_cpu_s: Processor time of such a process in seconds, 2 to 86,400; at half of it
            it is renewed.
        match_timeout_ms: Time for up to 16,384 messages, or one batch, 10 to 600,000 ms. A filter
            that is not done by then is ended.
        load_timeout_ms: Time for the start of a process and of the filter, 100 to 600,000 ms.
        failures_to_park: A filter whose process died so often in a row is parked, 1 to 100.
        park_ms: A parked filter refuses its consumers for so long, then it is tried once
            more, 100 to 86,400,000 ms.

        max_filters: Filters at a time, 1 to 10,000; not all of them have a process.
        max_filters_per_group: Filters in one consumer group, 1 to 1,000.
        max_pulls_per_filter: Pulls that wait at a time, 1 to 100,000; more are refused with
            SYSTEM_BUSY.
        max_pending_bytes: Messages of one filter that wait for it, 16 MiB to 4 GiB; with
            more, pulls are refused with SYSTEM_BUSY.
        max_total_pending_bytes: The same of all filters together, 16 MiB to 64 GiB.
        filter_idle_ms: Time after its last pull at which a filter is forgotten, 100 to
            86,400,000 ms; its consumers upload it again.
    """

    enable: bool = False
    name: _Name = "filtersrv"
    broker_name: _Name = "broker-a"
    broker_addr: _Name = "127.0.0.1:10911"
    listen_host: _Name = "127.0.0.1"
    listen_port: _Port = 0
    advertised_host: Annotated[str, msgspec.Meta(max_length=255)] = ""
    allow_insecure_bind: bool = False
    security: SecurityConfig = msgspec.field(default_factory=SecurityConfig)
    enable_ipc: bool = True
    require_seccomp: bool = True

    worker_memory_bytes: Annotated[int, msgspec.Meta(ge=64 * MIB, le=16 * GIB)] = 512 * MIB
    max_total_worker_memory_bytes: Annotated[int, msgspec.Meta(ge=64 * MIB, le=1024 * GIB)] = (
        2 * GIB
    )
    worker_cpu_s: Annotated[int, msgspec.Meta(ge=2, le=86_400)] = 600
    match_timeout_ms: Annotated[int, msgspec.Meta(ge=10, le=600_000)] = 3_000
    load_timeout_ms: Annotated[int, msgspec.Meta(ge=100, le=600_000)] = 10_000
    failures_to_park: Annotated[int, msgspec.Meta(ge=1, le=100)] = 3
    park_ms: Annotated[int, msgspec.Meta(ge=100, le=86_400_000)] = 60_000

    max_filters: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 64
    max_filters_per_group: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 8
    max_pulls_per_filter: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1_024
    max_pending_bytes: Annotated[int, msgspec.Meta(ge=16 * MIB, le=4 * GIB)] = 64 * MIB
    max_total_pending_bytes: Annotated[int, msgspec.Meta(ge=16 * MIB, le=64 * GIB)] = 256 * MIB
    filter_idle_ms: Annotated[int, msgspec.Meta(ge=100, le=86_400_000)] = 300_000

    def __post_init__(self) -> None:
        """Checks what concerns several fields, or needs more than a bound.

        Raises:
            ConfigError: Names the field and what to write instead.
        """
        check_names(self, "name", "broker_name")
        if not self.most_workers:
            raise ConfigError(
                f"max_total_worker_memory_bytes = {self.max_total_worker_memory_bytes} is less "
                f"than one worker may have: worker_memory_bytes = {self.worker_memory_bytes}"
            )
        host, _, port = self.broker_addr.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"broker_addr = {self.broker_addr!r} is not of the form host:port")
        check_listen(
            "filter server",
            self.listen_host,
            self.advertised_host,
            allow_insecure_bind=self.allow_insecure_bind or self.security.enable,
        )

    @property
    def most_workers(self) -> int:
        """Processes of filters that may run at once."""
        return self.max_total_worker_memory_bytes // self.worker_memory_bytes
