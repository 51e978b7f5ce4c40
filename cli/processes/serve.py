"""`mqmesh namesrv`, `mqmesh broker` and others: the one door to a role's process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from mqmesh.config import load_config
from mqmesh.logs import LEVELS, configure_logging
from mqmesh.private_files import keep_private
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.coordinator.config import CoordinatorConfig
from mqmesh.roles.filtersrv.config import FiltersrvConfig
from mqmesh.roles.namesrv.config import NamesrvConfig
from mqmesh.roles.process import ExitCode, Role, run_role, tell_failure
from mqmesh.transport.zmq.transport import ZmqTransport

from ..options import config_options, json_option, namesrv_option

_F = TypeVar("_F", bound=Callable[..., Any])
Make = Callable[[ZmqTransport], Role]


def process_options(function: _F) -> _F:
    """Adds the options of every role's process."""
    for option in (
        click.option("--supervised", is_flag=True, hidden=True),
        click.option(
            "--log-file", type=click.Path(path_type=Path), help="Log into a file, with rotation."
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
        function = option(function)
    return config_options(function)


@click.command()
@process_options
def namesrv(
    config_path: Path | None,
    table: str | None,
    overrides: tuple[str, ...],
    log_level: str,
    log_file: Path | None,
    supervised: bool,
) -> int:
    """Run a name server alone, for systemd or a container.

    \b
    Examples:
      mqmesh namesrv -c conf/namesrv.toml
      mqmesh namesrv --set listen_port=9877
    """
    config = load_config(NamesrvConfig, config_path, table, overrides)

    def make(transport: ZmqTransport) -> Role:
        from mqmesh.roles.namesrv.server import NameServer

        return NameServer(config, transport)

    keep_private()
    configure_logging(config.name, log_level.upper(), log_file, supervised=supervised)
    return serve_role("namesrv", config.name, make, supervised=supervised)


@click.group(invoke_without_command=True)
@process_options
@click.pass_context
def broker(
    context: click.Context,
    config_path: Path | None,
    table: str | None,
    overrides: tuple[str, ...],
    log_level: str,
    log_file: Path | None,
    supervised: bool,
) -> int:
    """Run a broker alone, for systemd or a container; or show one that runs.

    \b
    Examples:
      mqmesh broker show broker-a
      mqmesh broker -c conf/broker.toml
      mqmesh broker --set listen_port=10921 --set broker_name=broker-b \\
                    --set store_path_root_dir=/data/broker-b
    """
    if context.invoked_subcommand is not None:
        return ExitCode.OK
    config = load_config(BrokerConfig, config_path, table, overrides)

    def make(transport: ZmqTransport) -> Role:
        from mqmesh.roles.broker.server import BrokerServer

        return BrokerServer(config, transport)

    keep_private()
    configure_logging(config.broker_name, log_level.upper(), log_file, supervised=supervised)
    return serve_role("broker", config.broker_name, make, supervised=supervised)


@broker.command()
@click.argument("name")
@namesrv_option
@json_option
def show(name: str, namesrv: str, as_json: bool) -> int:
    """Show the broker NAME: where it is, how it is, and its figures.

    \b
    Examples:
      mqmesh broker show broker-a
      mqmesh broker show broker-a --namesrv 10.0.0.1:9876 --json
    """
    # A broker's own process does not carry what draws tables.
    from ..admin.clusters import show_broker

    return show_broker(name, namesrv, as_json)


@click.command()
@process_options
def filtersrv(
    config_path: Path | None,
    table: str | None,
    overrides: tuple[str, ...],
    log_level: str,
    log_file: Path | None,
    supervised: bool,
) -> int:
    """Run a filter server beside a broker; it must be allowed, see docs/filters.md.

    \b
    Examples:
      mqmesh filtersrv -c conf/filtersrv.toml --set enable=true
      mqmesh filtersrv --set enable=true --set broker_addr=127.0.0.1:10921 \\
                       --set broker_name=broker-b
    """
    config = load_config(FiltersrvConfig, config_path, table, overrides)

    def make(transport: ZmqTransport) -> Role:
        from mqmesh.roles.filtersrv.server import FilterServer
        from mqmesh.sandbox.worker_process import WorkerProcess

        return FilterServer(config, transport, partial(WorkerProcess, transport.loop))

    keep_private()
    configure_logging(config.name, log_level.upper(), log_file, supervised=supervised)
    return serve_role("filtersrv", config.name, make, supervised=supervised)


@click.command()
@process_options
def coordinator(
    config_path: Path | None,
    table: str | None,
    overrides: tuple[str, ...],
    log_level: str,
    log_file: Path | None,
    supervised: bool,
) -> int:
    """Run a coordinator, which knows who leads each broker group.

    \b
    Examples:
      mqmesh coordinator -c conf/coordinator.toml
      mqmesh coordinator --set listen_port=9871 --set data_dir=/data/coordinator
    """
    config = load_config(CoordinatorConfig, config_path, table, overrides)

    def make(transport: ZmqTransport) -> Role:
        from mqmesh.roles.coordinator.server import CoordinatorServer

        return CoordinatorServer(config, transport)

    keep_private()
    configure_logging(config.name, log_level.upper(), log_file, supervised=supervised)
    return serve_role("coordinator", config.name, make, supervised=supervised)


def serve_role(role: str, name: str, make: Make, *, supervised: bool) -> int:
    """Runs a role over ZeroMQ.

    Args:
        role: ``namesrv``, ``broker``, …
        name: Name of the instance.
        make: Makes the role.
        supervised: Somebody holds the other end of standard input.

    Returns:
        Exit code.
    """
    transport = ZmqTransport()
    try:
        try:
            server = make(transport)
        except Exception as error:
            return tell_failure(name, error)
        return run_role(role, name, transport.loop, server, supervised=supervised)
    finally:
        transport.loop.close()
        transport.close()
