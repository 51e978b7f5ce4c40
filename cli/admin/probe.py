"""`mqmesh topic probe`, `broker probe`, `cluster probe`: test messages, and how long they took."""

import time
from collections.abc import Iterator

import click

from mqmesh.protocol.messaging import SendStatus
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.views.sends import probe_view
from mqmesh.sdk.probes import Probe, ProbeClient

from ..notes import answers_json
from ..options import cluster_options, max_option
from ..render import print_answer, say

_count = click.option(
    "-n", "--count", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Messages."
)


@click.command("probe")
@click.argument("name")
@_count
@cluster_options
def probe_topic(name: str, count: int, namesrv: str) -> int:
    """Send test messages to each queue of the topic NAME in turn. Exit code 1 if one fails.

    Consumers of the topic get them.

    \b
    Examples:
      mqmesh topic probe orders --count 16
    """
    with ProbeClient(namesrv) as client:
        return _print_probes(client.probe_topic(name, count))


@click.command("probe")
@click.argument("name")
@_count
@cluster_options
def probe_broker(name: str, count: int, namesrv: str) -> int:
    """Send test messages to the master of NAME, to SELF_TEST_TOPIC. Exit code 1 if one fails.

    \b
    Examples:
      mqmesh broker probe broker-a
    """
    with ProbeClient(namesrv, broker_name=name) as client:
        return _print_probes(client.probe_brokers(count))


@click.command("probe")
@max_option(1, "Messages to each broker.", 10_000)
@click.option(
    "--interval",
    type=click.FloatRange(0, 3_600),
    default=1.0,
    show_default=True,
    help="Seconds between two rounds.",
)
@cluster_options
def probe_cluster(most: int, interval: float, namesrv: str) -> int:
    """Send test messages to the master of every broker, again and again. Exit code 1 if one fails.

    With --json one object a line.

    \b
    Examples:
      mqmesh cluster probe
      mqmesh cluster probe --max 60 --interval 10 --json
    """
    with ProbeClient(namesrv) as client:
        return _print_probes(client.probe_brokers(most), interval)


def _print_probes(probes: Iterator[Probe], interval_s: float = 0) -> int:
    failed, first, took = 0, "", []
    for probe in probes:
        one = probe_view(probe)
        if first == one.broker_name and interval_s:
            time.sleep(interval_s)
        first = first or one.broker_name
        failed += probe.status is not SendStatus.SEND_OK
        took.append(probe.took_ms)
        print_answer(
            one,
            f"{one.broker_name:<16} queue {one.queue_id:<4} {one.took_ms:9.3f} ms  "
            f"{one.status or one.problem}",
        )
    if not answers_json():
        took.sort()
        say(
            f"{len(took)} messages, {failed} failed; half within {took[len(took) // 2]:.3f} ms, "
            f"all within {took[-1]:.3f} ms"
        )
    return ExitCode.FAILED if failed else ExitCode.OK
