"""Result of a benchmark, for people and for programs. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from mqmesh.units import MIB

from .words import PERCENTS, ClientReport, Latencies


class ClientResult(msgspec.Struct, kw_only=True):
    """Result of one client.

    Attributes:
        messages: Acknowledged, or read.
        failed: Number of sends that failed.
        seconds: From the first message to the last.
        messages_per_second: Rate in these seconds.
        mib_per_second: Rate of their bodies.
        cpu_seconds: Processor time of its process.
    """

    messages: int
    failed: int
    seconds: float
    messages_per_second: float
    mib_per_second: float
    cpu_seconds: float


class BenchResult(msgspec.Struct, kw_only=True):
    """Result of all clients of a benchmark.

    Attributes:
        command: ``produce``, ``consume`` or ``latency``.
        topic: Topic of the messages.
        is_interrupted: Ctrl-C ended it early.
        total: Sum over all clients.
        clients: Result of each client.
        missing: Messages that were sent and did not come in time; for ``latency`` only.
        latency_ms: ``send`` or ``delivery`` -> ``p50`` … ``p99_9``, ``max``; milliseconds.
        error: Text of the first send error.
    """

    command: str
    topic: str
    is_interrupted: bool
    total: ClientResult
    clients: list[ClientResult]
    missing: int
    latency_ms: dict[str, dict[str, float]]
    error: str


def summarize(
    command: str,
    topic: str,
    reports: Sequence[ClientReport],
    readers: Sequence[ClientReport] = (),
    *,
    is_interrupted: bool = False,
) -> BenchResult:
    """Sums up the reports of clients.

    Args:
        command: ``produce``, ``consume`` or ``latency``.
        topic: Topic of the messages.
        reports: Reports of the clients whose messages count, at least one.
        readers: Reports of clients beside, which read the messages of the others.
        is_interrupted: Ctrl-C ended it early.
    """
    everyone = [*reports, *readers]
    whole = ClientReport(
        done=sum(one.done for one in reports),
        body_bytes=sum(one.body_bytes for one in reports),
        failed=sum(one.failed for one in reports),
        begin_s=min((one.begin_s for one in reports if one.done), default=0.0),
        end_s=max((one.end_s for one in reports if one.done), default=0.0),
        cpu_s=sum(one.cpu_s for one in everyone),
    )
    latency_ms = {}
    for name in ("send", "delivery"):
        all_of_it = Latencies()
        for one in everyone:
            all_of_it.add_all(getattr(one, name))
        if all_of_it.count:
            latency_ms[name] = _percentiles(all_of_it)
    return BenchResult(
        command=command,
        topic=topic,
        is_interrupted=is_interrupted,
        total=_client(whole),
        clients=[_client(one) for one in reports],
        missing=max(whole.done - sum(one.done for one in readers), 0) if readers else 0,
        latency_ms=latency_ms,
        error=next((one.error for one in reports if one.error), ""),
    )


def rate_rows(result: BenchResult) -> list[tuple[Any, ...]]:
    """Returns rows of a table: each client if there are several, and all together."""
    rows = [(str(number), *_cells(one)) for number, one in enumerate(result.clients, 1)]
    return [*(rows if len(rows) > 1 else []), ("all", *_cells(result.total))]


RATE_HEAD = ("CLIENT", "MESSAGES", "FAILED", "SECONDS", "MESSAGES/S", "MIB/S", "CPU S")


def latency_rows(result: BenchResult) -> list[tuple[str, ...]]:
    """Returns rows of a table: the timed steps, and their percentiles in milliseconds."""
    return [
        (name, *(f"{value:.3f}" for value in metrics.values()))
        for name, metrics in result.latency_ms.items()
    ]


LATENCY_HEAD = ("MS", *(f"P{percent:g}" for percent in PERCENTS), "MAX")


def _percentiles(latencies: Latencies) -> dict[str, float]:
    found = {
        f"p{percent:g}".replace(".", "_"): round(latencies.percentile_us(percent) / 1_000, 3)
        for percent in PERCENTS
    }
    return {**found, "max": round(latencies.most_us / 1_000, 3)}


def _client(report: ClientReport) -> ClientResult:
    seconds = report.end_s - report.begin_s
    each = 1 / seconds if seconds > 0 else 0.0
    return ClientResult(
        messages=report.done,
        failed=report.failed,
        seconds=round(seconds, 3),
        messages_per_second=round(report.done * each, 1),
        mib_per_second=round(report.body_bytes * each / MIB, 3),
        cpu_seconds=round(report.cpu_s, 3),
    )


def _cells(one: ClientResult) -> tuple[Any, ...]:
    return (
        one.messages,
        one.failed,
        f"{one.seconds:.2f}",
        round(one.messages_per_second),
        f"{one.mib_per_second:.1f}",
        f"{one.cpu_seconds:.2f}",
    )
