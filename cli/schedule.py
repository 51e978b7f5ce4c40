"""`mqmesh schedule`: the schedule service alone, and the cancelling of delayed messages."""

from pathlib import Path

import click

from mqmesh.config import load_config
from mqmesh.logs import configure_logging
from mqmesh.private_files import keep_private
from mqmesh.roles.process import ExitCode, Role
from mqmesh.roles.schedule.config import ScheduleConfig
from mqmesh.transport import sockets
from mqmesh.transport.loop import EventLoop

from .options import json_option, namesrv_option
from .render import print_json
from .serve import process_options, serve_role


@click.group(invoke_without_command=True)
@process_options
@click.pass_context
def schedule(
    context: click.Context,
    config_path: Path | None,
    table: str | None,
    overrides: tuple[str, ...],
    log_level: str,
    log_file: Path | None,
    supervised: bool,
) -> int:
    """Run the schedule service of a broker group, or cancel a delayed message.

    \b
    Examples:
      mqmesh schedule -c conf/schedule.toml
      mqmesh schedule --set broker_name=broker-b
      mqmesh schedule cancel 0C6A9F0E5D3B7A12000000000000002A
    """
    if context.invoked_subcommand is not None:
        return ExitCode.OK
    config = load_config(ScheduleConfig, config_path, table, overrides)

    def make(context: sockets.Context, loop: EventLoop) -> Role:
        from mqmesh.roles.schedule.server import ScheduleServer

        return ScheduleServer(config, context, loop)

    keep_private()
    configure_logging(config.name, log_level.upper(), log_file, supervised=supervised)
    return serve_role("schedule", config.name, make, supervised=supervised)


@schedule.command()
@click.argument("message_id")
@namesrv_option
@json_option
def cancel(message_id: str, namesrv: str, as_json: bool) -> None:
    """Cancel a delayed message that was not delivered yet."""
    from mqmesh.sdk.delays import DelayClient

    with DelayClient(namesrv) as client:
        brokers = client.cancel(message_id)
    if as_json:
        print_json({"message_id": message_id.upper(), "cancelled_at": brokers})
    else:
        click.echo(f"message {message_id.upper()} is cancelled at {', '.join(brokers)}")
