"""`mqmesh schedule`: the schedule service alone, and the cancelling of delayed messages."""

from functools import partial
from typing import Final

import click

from mqmesh.clock import SystemClock
from mqmesh.roles.process import ExitCode, Role
from mqmesh.roles.schedule.config import ScheduleConfig
from mqmesh.transport.zmq.transport import ZmqTransport

from ..options import cluster_options, max_option
from ..render import Column, duration, print_answer, print_records, timestamp
from .serve import ProcessOptions, open_transport, server_options

DEFAULT_SHOWN: Final = 32


def _until(due_ms: int) -> str:
    return duration(max(due_ms - SystemClock().wall_ms(), 0))


_WAITING: Final = (
    Column("due_ms", "DUE", timestamp),
    Column("due_ms", "IN", _until, rank=4),
    Column("real_topic", "TO TOPIC"),
    Column("broker_name", "BROKER", rank=1),
    Column("message_id", "MESSAGE ID"),
    Column("tag", "TAG", rank=2),
    Column("keys", "KEYS", lambda keys: ", ".join(keys) or "-", rank=3),
)


@click.group(invoke_without_command=True)
@server_options
@click.pass_context
def schedule(context: click.Context, process: ProcessOptions) -> int:
    """Run the schedule service of a broker group; list or cancel delayed messages.

    \b
    Examples:
      mqmesh schedule -c conf/schedule.toml
      mqmesh schedule --set broker_name=broker-b
      mqmesh schedule list
      mqmesh schedule cancel 0C6A9F0E5D3B7A12000000000000002A
    """
    if context.invoked_subcommand is not None:
        return ExitCode.OK
    config = process.load(ScheduleConfig)

    def make(transport: ZmqTransport) -> Role:
        from mqmesh.roles.schedule.server import ScheduleServer

        return ScheduleServer(config, transport)

    security = partial(open_transport, config.security, config.namesrv_addr)
    return process.serve("schedule", config.name, make, security)


@schedule.command("list")
@click.option("-t", "--topic", default="", help="Only messages that go to this topic.")
@max_option(DEFAULT_SHOWN, "Messages to show: those that are due next.")
@cluster_options
def list_waiting(topic: str, most: int, namesrv: str) -> None:
    """List delayed messages that wait, those that are due next first.

    Messages that failed wait here as well, on their way to %RETRY%<group>. It reads all that
    the brokers have of delayed messages, so it takes a while where there are many.

    \b
    Examples:
      mqmesh schedule list
      mqmesh schedule list --topic orders --max 1000 --json
    """
    from mqmesh.sdk.admin.delays import DelayClient
    from mqmesh.sdk.admin.views.messages import delayed_view

    with DelayClient(namesrv) as client:
        found = [delayed_view(one) for one in client.waiting(topic, max_count=most)]
    print_records(_WAITING, found)


@schedule.command()
@click.argument("message_id")
@cluster_options
def cancel(message_id: str, namesrv: str) -> None:
    """Cancel a delayed message that was not delivered yet.

    \b
    Examples:
      mqmesh schedule cancel 0C6A9F0E5D3B7A12000000000000002A
    """
    from mqmesh.sdk.admin.delays import DelayClient

    with DelayClient(namesrv) as client:
        brokers = client.cancel(message_id)
    print_answer(
        {"message_id": message_id.upper(), "cancelled_at": brokers},
        f"message {message_id.upper()} is cancelled at {', '.join(brokers)}",
    )
