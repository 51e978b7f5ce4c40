"""`mqmesh topic probe`, `broker probe`, `cluster probe`: test messages, and how long they took."""

import time
from collections.abc import Iterator
from typing import Any

import click

from mqmesh.protocol.messaging import SendStatus
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.probes import Probe, ProbeClient

from ..options import json_option, namesrv_option
from ..render import print_json, say

_count = click.option(
    "-n", "--count", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Messages."
)


@click.command("probe")
@click.argument("name")
@_count
@namesrv_option
@json_option
def probe_topic(name: str, count: int, namesrv: str, as_json: bool) -> int:
    """Send test messages to each queue of the topic NAME in turn. Exit code 1 if one fails.

    Whoever reads the topic gets them.

    \b
    Examples:
      mqmesh topic probe orders --count 16
    """
    with ProbeClient(namesrv) as client:
        return _show(client.probe_topic(name, count), as_json)


@click.command("probe")
@click.argument("name")
@_count
@namesrv_option
@json_option
def probe_broker(name: str, count: int, namesrv: str, as_json: bool) -> int:
    """Send test messages to the master of NAME, to SELF_TEST_TOPIC. Exit code 1 if one fails.

    \b
    Examples:
      mqmesh broker probe broker-a
    """
    with ProbeClient(namesrv, broker_name=name) as client:
        return _show(client.probe_brokers(count), as_json)


@click.command("probe")
@click.option(
    "-n",
    "--max",
    "most",
    type=click.IntRange(1, 10_000),
    default=1,
    show_default=True,
    help="Messages to each broker.",
)
@click.option(
    "--interval",
    type=click.FloatRange(0, 3_600),
    default=1.0,
    show_default=True,
    help="Seconds between two rounds.",
)
@namesrv_option
@json_option
def probe_cluster(most: int, interval: float, namesrv: str, as_json: bool) -> int:
    """Send test messages to the master of every broker, again and again. Exit code 1 if one fails.

    With --json one object a line.

    \b
    Examples:
      mqmesh cluster probe
      mqmesh cluster probe --max 60 --interval 10 --json
    """
    with ProbeClient(namesrv) as client:
        return _show(client.probe_brokers(most), as_json, interval)


def _show(probes: Iterator[Probe], as_json: bool, interval_s: float = 0) -> int:
    failed, first, took = 0, "", []
    for one in probes:
        queue = one.message_queue
        if first == queue.broker_name and interval_s:
            time.sleep(interval_s)
        first = first or queue.broker_name
        failed += one.status is not SendStatus.SEND_OK
        took.append(one.took_ms)
        told = "" if one.status is None else one.status.name
        if as_json:
            row: dict[str, Any] = {"topic": queue.topic, "broker_name": queue.broker_name}
            row |= {"queue_id": queue.queue_id, "took_ms": round(one.took_ms, 3)}
            print_json(row | {"status": told, "problem": one.problem})
        else:
            say(
                f"{queue.broker_name:<16} queue {queue.queue_id:<4} {one.took_ms:9.3f} ms  "
                f"{told or one.problem}"
            )
    if not as_json:
        took.sort()
        say(
            f"{len(took)} messages, {failed} failed; half within {took[len(took) // 2]:.3f} ms, "
            f"all within {took[-1]:.3f} ms"
        )
    return ExitCode.FAILED if failed else ExitCode.OK
