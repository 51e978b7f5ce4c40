"""`mqmesh namesrv`, `mqmesh broker` and others: the one door to a role's process."""

import os
from collections.abc import Callable, Iterable
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import click
import msgspec

from mqmesh.config import load_config
from mqmesh.logs import FORMAT_VARIABLE, LEVELS, LogFormat, configure_logging
from mqmesh.private_files import keep_private
from mqmesh.roles.access_keeper import open_guard, open_ring
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.coordinator.config import CoordinatorConfig
from mqmesh.roles.exporter.config import ExporterConfig
from mqmesh.roles.filtersrv.config import FiltersrvConfig
from mqmesh.roles.health import parse_health_address
from mqmesh.roles.namesrv.config import NamesrvConfig
from mqmesh.roles.process import ExitCode, Role, report_failure, run_role
from mqmesh.sdk.client.options import namesrv_addresses
from mqmesh.security.config import SecurityConfig
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.transport.zmq.transport import ZmqTransport

from ..lazy_group import LazyGroup
from ..options import config_options, namesrv_option

EMBEDDED: Final = "embedded://"

_Config = TypeVar("_Config", bound=msgspec.Struct)
Make = Callable[[ZmqTransport], Role]


class ProcessOptions(msgspec.Struct, frozen=True):
    """Command line options of every role's process, as ``mqmesh COMMAND --help`` lists them."""

    config_path: Path | None
    table: str | None
    overrides: tuple[str, ...]
    log_level: str
    log_file: Path | None
    log_format: LogFormat
    health: str | None
    supervised: bool
    insecure: bool = False

    def load(self, kind: type[_Config], namesrv: str = "") -> _Config:
        """Loads the settings of a role.

        Args:
            kind: Type of the role's settings.
            namesrv: Name servers that a command would ask: of a role that watches a cluster, unless
                its settings name some.

        Raises:
            ConfigError: A setting is wrong.
        """

        def fill(data: dict[str, Any]) -> None:
            if namesrv:
                data.setdefault("namesrv_addr", namesrv_addresses(namesrv))

        opens = ("security.enable=false", "security.insecure=true") if self.insecure else ()
        return load_config(kind, self.config_path, self.table, (*self.overrides, *opens), fill=fill)

    def begin(
        self, role: str, name: str, *, is_piped: bool | None = None
    ) -> tuple[str, int] | None:
        """Sets up the log of the process, and keeps its files private.

        Args:
            role: ``namesrv``, ``broker``, …
            name: Name in the log.
            is_piped: As of ``serve``.

        Returns:
            Host and port of the health page; None for none.

        Raises:
            ConfigError: ``--health`` is no address.
        """
        keep_private()
        health = None if self.health is None else parse_health_address(self.health)
        os.environ[FORMAT_VARIABLE] = self.log_format  # its helpers write the same
        configure_logging(
            name,
            self.log_level.upper(),
            self.log_file,
            role=role,
            form=self.log_format,
            supervised=self.supervised if is_piped is None else is_piped,
        )
        return health

    def serve(
        self,
        role: str,
        name: str,
        make: Make,
        security: Callable[[], ZmqTransport] = ZmqTransport,
        *,
        log_name: str = "",
        is_piped: bool | None = None,
    ) -> int:
        """Runs a role over ZeroMQ.

        Args:
            role: ``namesrv``, ``broker``, …
            name: Name of the instance.
            make: Makes the role.
            security: Makes its transport, with the keys that it has.
            log_name: Name in the log, if it is another one.
            is_piped: A process reads its log, and must not hold it up; by default True if it is
                supervised.

        Returns:
            Exit code.
        """
        health = self.begin(role, log_name or name, is_piped=is_piped)
        supervised = self.supervised
        try:
            transport = security()
        except Exception as error:
            return report_failure(name, error)
        try:
            try:
                server = make(transport)
            except Exception as error:
                return report_failure(name, error)
            return run_role(
                role, name, transport.loop, server, supervised=supervised, health=health
            )
        finally:
            transport.loop.close()
            transport.close()


def open_transport(security: SecurityConfig, common: Iterable[str] = ()) -> ZmqTransport:
    """Opens the transport of a role that others connect to.

    Args:
        security: Settings. Where it is enabled, keys and access list are read before anything is
            opened, and every connection is checked, from the first one on.
        common: Addresses of name servers and coordinators that it uses.

    Raises:
        ConfigError: Keys or access list cannot be used.
    """
    return ZmqTransport(open_ring(security, common), open_guard(security))


def open_client_transport(config: BrokerConfig) -> ZmqTransport:
    """Opens a transport without a server, with the keys of a broker.

    Raises:
        ConfigError: The keys cannot be used.
    """
    return ZmqTransport(open_ring(config.security, _common_of(config)))


def _common_of(config: BrokerConfig) -> list[str]:
    """Returns the addresses of the name servers and of the coordinator that a broker uses."""
    embedded = config.ha.coordinator.removeprefix(EMBEDDED)
    return [*config.namesrv_addr, *([embedded] if embedded != config.ha.coordinator else [])]


def process_options(function: Callable[..., int]) -> Callable[..., int]:
    """Adds the options of every role's process; the command gets them as one."""

    @wraps(function)
    def with_options(**options: Any) -> int:
        own = {
            name: options.pop(name) for name in ProcessOptions.__struct_fields__ if name in options
        }
        return function(process=ProcessOptions(**own), **options)

    command: Callable[..., int] = with_options
    for option in (
        click.option("--supervised", is_flag=True, hidden=True),
        click.option(
            "--health",
            metavar="[HOST:]PORT",
            help="Answer GET /healthz there, for Kubernetes. [default host: 127.0.0.1]",
        ),
        click.option(
            "--log-file", type=click.Path(path_type=Path), help="Log into a file, with rotation."
        ),
        click.option(
            "--log-format",
            type=click.Choice(get_args(LogFormat)),
            default="text",
            envvar=FORMAT_VARIABLE,
            show_default=True,
            help="json writes an object a line.",
        ),
        click.option(
            "--log-level",
            type=click.Choice(LEVELS, case_sensitive=False),
            default="INFO",
            show_default=True,
            help="Least level that is logged.",
        ),
        click.option("--table", help="Table of the file that holds the settings, dotted."),
    ):
        command = option(command)
    return config_options(command)


def server_options(function: Callable[..., int]) -> Callable[..., int]:
    """Adds the options of a process that may be secured: those of every role, ``--insecure``."""
    return click.option(
        "--insecure",
        is_flag=True,
        help="Start without security, though this data folder was used with it before.",
    )(process_options(function))


# Processes of their own do not load modules that draw tables.
_NAMESRV_COMMANDS: Final = {
    "config": ("admin.settings", "namesrv_config"),
    "set": ("admin.settings", "namesrv_set"),
}


@click.group(cls=LazyGroup, places=_NAMESRV_COMMANDS, invoke_without_command=True)
@server_options
@click.pass_context
def namesrv(context: click.Context, process: ProcessOptions) -> int:
    """Run a name server alone, for systemd or a container; or see to those that run.

    \b
    Examples:
      mqmesh namesrv config
      mqmesh namesrv set broker_expire_ms=60000
      mqmesh namesrv -c conf/namesrv.toml
      mqmesh namesrv --set listen_port=9877
    """
    if context.invoked_subcommand is not None:
        return ExitCode.OK
    config = process.load(NamesrvConfig)

    def make(transport: ZmqTransport) -> Role:
        from mqmesh.roles.namesrv.server import NameServer

        return NameServer(config, transport)

    return process.serve("namesrv", config.name, make, partial(open_transport, config.security))


_BROKER_COMMANDS: Final = {
    "show": ("admin.broker", "show"),
    "config": ("admin.settings", "broker_config"),
    "set": ("admin.settings", "broker_set"),
    "clients": ("admin.broker", "clients"),
    "queue": ("admin.broker", "queue"),
    "clean": ("admin.broker", "clean"),
    "drain": ("admin.broker", "drain"),
    "undrain": ("admin.broker", "undrain"),
    "probe": ("admin.probe", "probe_broker"),
}


@click.group(cls=LazyGroup, places=_BROKER_COMMANDS, invoke_without_command=True)
@server_options
@click.pass_context
def broker(context: click.Context, process: ProcessOptions) -> int:
    """Run a broker alone, for systemd or a container; or see to one that runs.

    \b
    Examples:
      mqmesh broker show broker-a
      mqmesh broker drain broker-a
      mqmesh broker -c conf/broker.toml
      mqmesh broker --set listen_port=10921 --set broker_name=broker-b \\
                    --set store_path_root_dir=/data/broker-b
    """
    if context.invoked_subcommand is not None:
        return ExitCode.OK
    config = process.load(BrokerConfig)

    def make(transport: ZmqTransport) -> Role:
        from mqmesh.roles.broker.server import BrokerServer

        return BrokerServer(config, transport)

    common = _common_of(config)

    def security() -> ZmqTransport:
        transport = open_transport(config.security, common)
        if transport.ring is not None and config.ha.master_addr:
            master = endpoint_of(config.ha.master_addr)
            transport.ring.learn(master, config.ha.master_server_key)
        return transport

    return process.serve("broker", config.broker_name, make, security)


@click.command()
@server_options
def filtersrv(process: ProcessOptions) -> int:
    """Run a filter server beside a broker; it must be allowed, see docs/filters.md.

    \b
    Examples:
      mqmesh filtersrv -c conf/filtersrv.toml --set enable=true
      mqmesh filtersrv --set enable=true --set broker_addr=127.0.0.1:10921 \\
                       --set broker_name=broker-b
    """
    config = process.load(FiltersrvConfig)

    def make(transport: ZmqTransport) -> Role:
        from mqmesh.roles.filtersrv.server import FilterServer
        from mqmesh.sandbox.worker_process import WorkerProcess

        return FilterServer(config, transport, partial(WorkerProcess, transport.loop))

    return process.serve("filtersrv", config.name, make, partial(open_transport, config.security))


@click.command()
@server_options
def coordinator(process: ProcessOptions) -> int:
    """Run a coordinator, which knows who leads each broker group.

    \b
    Examples:
      mqmesh coordinator -c conf/coordinator.toml
      mqmesh coordinator --set listen_port=9871 --set data_dir=/data/coordinator
    """
    config = process.load(CoordinatorConfig)

    def make(transport: ZmqTransport) -> Role:
        from mqmesh.roles.coordinator.server import CoordinatorServer

        return CoordinatorServer(config, transport)

    security = partial(open_transport, config.security)
    return process.serve("coordinator", config.name, make, security)


@click.group(
    cls=LazyGroup,
    places={"boards": ("processes.exporter", "boards")},
    invoke_without_command=True,
)
@process_options
@namesrv_option
@click.pass_context
def exporter(context: click.Context, process: ProcessOptions, namesrv: str) -> int:
    """Run an exporter, from which Prometheus gets the metrics of a cluster.

    It reads them from name servers and brokers at each request of Prometheus to
    http://127.0.0.1:5557/metrics.

    \b
    Examples:
      mqmesh exporter --namesrv 10.0.0.1:9876
      mqmesh exporter -c conf/exporter.toml
      mqmesh exporter boards ./grafana
    """
    if context.invoked_subcommand is not None:
        return ExitCode.OK
    config = process.load(ExporterConfig, namesrv)

    def make(transport: ZmqTransport) -> Role:
        from mqmesh.roles.exporter.server import ExporterServer

        return ExporterServer(config, transport.clock)

    return process.serve("exporter", config.name, make)
