"""`mqmesh receive`: receives messages as a member of a group that acknowledges each."""

import time
from typing import Final

import click

from mqmesh.filtering.tags import ALL
from mqmesh.message import StoredMessage
from mqmesh.protocol.delivery import MAX_RECEIVED
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.views.messages import received_view
from mqmesh.sdk.client.interrupt import Interrupt
from mqmesh.sdk.consumer.simple_consumer import SimpleConsumer

from ..notes import answers_json, print_error, print_note
from ..options import SECONDS, cluster_options
from ..render import StyledLines, counted, print_json
from .shown_message import parts_of

WAIT_MS: Final = 500
"""Time within which Ctrl-C is noticed."""


@click.command()
@click.argument("topic")
@click.option("-g", "--group", required=True, help="Group, whose delivery is `message`.")
@click.option(
    "-n",
    "--max",
    "most",
    type=click.IntRange(1, MAX_RECEIVED),
    default=10,
    show_default=True,
    help="End after so many messages.",
)
@click.option(
    "--ack/--no-ack", default=False, help="Acknowledge them. [default: they come again at once]"
)
@click.option("-t", "--tags", default=ALL, help="Tags that the group subscribes to. [default: all]")
@click.option(
    "--timeout",
    type=SECONDS,
    default=5.0,
    show_default=True,
    help="End when nothing has come for so many seconds.",
)
@cluster_options
def receive(
    topic: str, group: str, most: int, ack: bool, tags: str, timeout: float, namesrv: str
) -> int:
    """Receive messages of TOPIC as a member of a group, and print them.

    Exit code 1 if none came. With --json one object a line, with delivery_attempt and receipt.
    Messages without an acknowledgement go to others when the command ends, and the attempt does not
    count.

    \b
    Examples:
      mqmesh receive orders --group billing --max 10 --ack
      mqmesh receive orders --group billing --no-ack --json
    """
    lines = StyledLines()
    count = 0
    with Interrupt() as interrupt, SimpleConsumer(group, namesrv_addr=namesrv) as consumer:
        consumer.subscribe(topic, tags)
        last_s = time.monotonic()
        while count < most and not interrupt and time.monotonic() - last_s < timeout:
            found = consumer.receive(most - count, wait_ms=WAIT_MS)
            for message in found:
                _show(message, lines)
            if ack and found:
                consumer.ack_many(found)
            if found:
                count, last_s = count + len(found), time.monotonic()
    if not count and not interrupt:
        print_error(f"no message of {topic} came for group {group} within {timeout:g} s")
        return ExitCode.FAILED
    print_note(f"{counted(count, 'message')}, {'' if ack else 'not '}acknowledged")
    return ExitCode.OK


def _show(message: StoredMessage, lines: StyledLines) -> None:
    if answers_json():
        print_json(received_view(message))
        return
    attempt = (f"attempt {message.delivery_attempt}", "yellow")
    lines.say(([attempt] if message.delivery_attempt > 1 else []) + parts_of(message))
