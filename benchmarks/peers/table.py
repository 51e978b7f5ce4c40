"""The rows of the comparison, and the table that is made of their figures."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

TITLES: Final = {
    "redis": "Redis Streams",
    "kafka": "Kafka 4",
    "nats": "NATS JetStream",
}
"""Headings of columns, where they are not the name of the system."""

SHARES: Final = {"nats": 0.1, "beanstalkd": 0.1}
"""Part of a row's messages for systems that move a tenth as many in a second as the others; rows
that run twice have as many for all."""


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        name: For people.
        kind: Of messages, plain or ordinary.
        writes: Task of the producer.
        reads: Task of the consumer; "" for none.
        at_once: Both together; else the consumer starts when the producer has ended.
        messages: How many at scale 1.
        topics: Topics to send to.
        replicas: Of mqmesh's broker: 3 are for mqmesh alone.
        is_twice: The programs run twice on the same servers, and the second time counts: so few
            messages would measure how long a JVM takes to get warm.
    """

    name: str
    kind: str
    writes: str
    reads: str = ""
    at_once: bool = False
    messages: int = 1_000_000
    topics: int = 1
    replicas: int = 1
    is_twice: bool = False


THROUGHPUT: Final = (
    Row("produce, batches of 500", "", "produce_batches"),
    Row("produce, a call a message", "", "produce_singles"),
    Row("drain, reading bodies", "", "produce_batches", "drain_bodies"),
    Row("drain, reading every field", "", "produce_batches", "drain_fields"),
    Row("both at once", "", "produce_batches", "drain_bodies", at_once=True),
)
LONE: Final = (
    Row("one send after the other", "ordinary", "send_sync", messages=5_000),
    Row("the same from one coroutine", "ordinary", "send_coroutine", messages=5_000),
    Row("16 threads", "ordinary", "send_threads", messages=50_000),
    Row("asyncio.gather of 1,000", "ordinary", "send_gather", messages=50_000),
    Row("send_async at 10,000/s", "ordinary", "send_at_rate", messages=50_000),
    Row("100 topics at 10,000/s", "ordinary", "send_at_rate", messages=50_000, topics=100),
    Row("send to listener at 500/s", "ordinary", "send_stamped", "listen", True, 2_500),
    Row(
        "send to async for at 500/s",
        "ordinary",
        "send_stamped_asyncio",
        "listen_asyncio",
        True,
        2_500,
    ),
    Row("one send, three replicas have it", "ordinary", "send_sync", messages=5_000, replicas=3),
)
ROWS: Final = (
    *(
        row._replace(name=f"{row.name}, {kind}", kind=kind)
        for row in THROUGHPUT
        for kind in ("plain", "ordinary")
    ),
    *(row._replace(is_twice=True) for row in LONE),
)


class Measured(NamedTuple):
    """One run of one row.

    Attributes:
        rate: Messages a second.
        p50_us: Of a send, or of the way to the reader; 0 where a row is about rates.
        p99_us: The same.
        client_us: Processor time a message, of the programs that send and read.
        server_us: The same of servers.
    """

    rate: float
    p50_us: float
    p99_us: float
    client_us: float
    server_us: float


def messages_of(row: Row, system: str, scale: float) -> int:
    """Returns how many messages a system moves in a row: whole batches of 500."""
    share = 1.0 if row.is_twice else SHARES.get(system, 1.0)
    return max(int(row.messages * scale * share) // 500, 1) * 500


def measured(count: int, reports: Sequence[Any], server_cpu_s: float) -> Measured:
    """Returns the figures of one run.

    Args:
        count: Messages.
        reports: Of the measured programs; latencies are those of the first one.
        server_cpu_s: Processor time of the servers meanwhile.
    """
    seconds = max(one["end_s"] for one in reports) - min(one["begin_s"] for one in reports)
    latencies = sorted(reports[0]["latencies_us"])
    return Measured(
        count / seconds,
        statistics.median(latencies) if latencies else 0.0,
        latencies[len(latencies) * 99 // 100] if latencies else 0.0,
        sum(one["cpu_s"] for one in reports) * 1e6 / count,
        server_cpu_s * 1e6 / count,
    )


def medians(runs: Iterable[Measured]) -> Measured:
    """Returns the median of each figure."""
    return Measured(*map(statistics.median, zip(*runs, strict=True)))


def format_table(figures: dict[str, dict[str, list[Measured]]], systems: Sequence[str]) -> str:
    """Returns the table of the README.

    Args:
        figures: Runs by row and system; a system that has no client for a row has none.
        systems: Columns.
    """
    heads = " | ".join(TITLES.get(one, one) for one in systems)
    lines = [f"| | {heads} |", f"|---|{'---|' * len(systems)}"]
    for name, runs in figures.items():
        cells = [_cell(medians(runs[one])) if runs.get(one) else "–" for one in systems]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(one: Measured) -> str:
    value = f"{one.p50_us:,.0f}, {one.p99_us:,.0f} µs" if one.p50_us else f"{one.rate:,.0f}/s"
    return f"{value}; {_short(one.client_us)} + {_short(one.server_us)}"


def _short(us: float) -> str:
    return f"{us:,.0f}" if us >= 10 else f"{us:.1f}"
