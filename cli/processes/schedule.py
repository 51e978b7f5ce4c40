"""`mqmesh schedule`: the schedule service alone, and the cancelling of delayed messages."""

from functools import partial
from typing import Final

import click

from mqmesh.clock import SystemClock
from mqmesh.roles.process import ExitCode, Role
from mqmesh.roles.schedule.config import ScheduleConfig
from mqmesh.transport.zmq.transport import ZmqTransport

from ..options import json_option, namesrv_option
from ..render import duration, print_json, print_table, say, timestamp
from .serve import ProcessOptions, open_transport, server_options

DEFAULT_SHOWN: Final = 32


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
@click.option(
    "-n",
    "--max",
    "most",
    type=click.IntRange(1, 1_000_000),
    default=DEFAULT_SHOWN,
    show_default=True,
    help="Messages to show: those that are due next.",
)
@namesrv_option
@json_option
def list_waiting(topic: str, most: int, namesrv: str, as_json: bool) -> None:
    """List delayed messages that wait, those that are due next first.

    Messages that failed wait here as well, on their way to %RETRY%<group>. It reads all that
    the brokers have of delayed messages, so it takes a while where there are many.

    \b
    Examples:
      mqmesh schedule list
      mqmesh schedule list --topic orders --max 1000 --json
    """
    from mqmesh.sdk.admin.delays import DelayClient

    from ..messages.shown_message import message_dict

    with DelayClient(namesrv) as client:
        found = client.waiting(topic, max_count=most)
    if as_json:
        print_json(
            [
                {"due_ms": one.due_ms, "real_topic": one.real_topic} | message_dict(one.message)
                for one in found
            ]
        )
        return
    now_ms = SystemClock().wall_ms()
    print_table(
        ("DUE", "IN", "TO TOPIC", "BROKER", "MESSAGE ID", "TAG", "KEYS"),
        [
            (
                timestamp(one.due_ms),
                duration(max(one.due_ms - now_ms, 0)),
                one.real_topic,
                one.broker_name,
                one.message.message_id,
                one.message.tag or "-",
                ", ".join(one.message.keys) or "-",
            )
            for one in found
        ],
        optional=("IN", "KEYS", "TAG", "BROKER"),
    )


@schedule.command()
@click.argument("message_id")
@namesrv_option
@json_option
def cancel(message_id: str, namesrv: str, as_json: bool) -> None:
    """Cancel a delayed message that was not delivered yet.

    \b
    Examples:
      mqmesh schedule cancel 0C6A9F0E5D3B7A12000000000000002A
    """
    from mqmesh.sdk.admin.delays import DelayClient

    with DelayClient(namesrv) as client:
        brokers = client.cancel(message_id)
    if as_json:
        print_json({"message_id": message_id.upper(), "cancelled_at": brokers})
    else:
        say(f"message {message_id.upper()} is cancelled at {', '.join(brokers)}")
