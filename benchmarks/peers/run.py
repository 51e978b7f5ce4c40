"""Measures mqmesh beside its peers and prints the README's table: ``scripts/bench --peers``.

Every figure is the median of the runs; the systems take turns, each run in fresh processes and
a fresh folder, so that the moods of a machine fall on all alike. Rates are messages a second. The
row of single sends has microseconds (p50) and, behind the slash, microseconds of processor time
of client and servers together.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress
from servers import SERVERS, Missing

HERE = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")
RUN_TIMEOUT_S = 600


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        name: For people.
        kind: Of messages, plain or ordinary.
        writes: What the producer does.
        reads: What the consumer does; "" for none.
        at_once: Both together; else the consumer reads what the producer left.
        count: Messages at scale 1.
    """

    name: str
    kind: str
    writes: str
    reads: str = ""
    at_once: bool = False
    count: int = 1_000_000


ROWS = [
    Row(f"{name}, {kind}", kind, *rest)
    for name, *rest in (
        ("produce, explicit batches", "produce_batches"),
        ("produce, a call a message", "produce_singles"),
        ("drain, reading bodies", "produce_batches", "drain_bodies"),
        ("drain, reading every field", "produce_batches", "drain_fields"),
        ("both at once", "produce_batches", "drain_bodies", True),
    )
    for kind in ("plain", "ordinary")
] + [Row("one send after the other", "ordinary", "send_sync", count=5_000)]


class Measured(NamedTuple):
    """One run of one row.

    Attributes:
        value: Messages a second, or p50 in microseconds.
        cpu_us: Processor time a message, of clients and servers.
    """

    value: float
    cpu_us: float


def main() -> None:
    """Runs the rows and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="factor for all counts")
    parser.add_argument("--systems", default=",".join(SERVERS))
    parser.add_argument("--rows", default="", help="part of a row's name")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dir", default=None, help="where data goes")
    options = parser.parse_args()
    systems = _available(options.systems.split(","), options.dir)
    rows = [row for row in ROWS if options.rows in row.name]
    figures: dict[str, dict[str, list[Measured]]] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("measuring", total=len(rows) * len(systems) * options.runs)
        for row in rows:
            runs = figures[row.name] = {system: [] for system in systems}
            for _ in range(options.runs):
                for system in systems:
                    progress.update(bar, description=f"{row.name}: {system}")
                    runs[system].append(_measure(row, system, options))
                    progress.advance(bar)
    if options.json:
        print(json.dumps(figures))
    else:
        print(_table(figures, systems))


def _available(wanted: list[str], folder: str | None) -> list[str]:
    found = []
    for system in wanted:
        if system not in SERVERS:
            raise SystemExit(f"error: {system} is none of {', '.join(SERVERS)}")
        try:
            with tempfile.TemporaryDirectory(dir=folder) as data, _running(system, Path(data)):
                found.append(system)
        except Missing as error:
            print(f"{system} is left out: {error}", file=sys.stderr)
    return found


def _running(system: str, folder: Path) -> Any:
    return SERVERS[system](folder)


def _measure(row: Row, system: str, options: argparse.Namespace) -> Measured:
    count = max(int(row.count * options.scale) // 500, 1) * 500
    with (
        tempfile.TemporaryDirectory(dir=options.dir, ignore_cleanup_errors=True) as data,
        _running(system, Path(data)) as (address, servers),
    ):
        arguments = (row.kind, address, count)
        if row.reads and not row.at_once:
            with _client(system, row.writes, *arguments) as writer:
                _finish(writer)
        programs = [row.reads or row.writes]
        if row.at_once:
            programs.append(row.writes)
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(_client(system, one, *arguments)) for one in programs]
            used = sum(map(_cpu_s, servers))
            for client in clients:
                _go(client)
            reports = [_report(client) for client in clients]
            cpu_s = sum(map(_cpu_s, servers)) - used + sum(one["cpu_s"] for one in reports)
    latencies = reports[0]["latencies_us"]
    if latencies:
        value = statistics.median(latencies)
    else:
        begin = min(one["begin_s"] for one in reports)
        value = count / (max(one["end_s"] for one in reports) - begin)
    return Measured(value, cpu_s * 1e6 / count)


@contextlib.contextmanager
def _client(system: str, action: str, kind: str, address: str, count: int) -> Iterator[Any]:
    command = [sys.executable, str(HERE / "client.py"), system, action, kind, address, str(count)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"the client of {system} did not begin")
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


def _go(client: Any) -> None:
    client.stdin.write("go\n")
    client.stdin.flush()


def _report(client: Any) -> Any:
    line = client.stdout.readline()
    client.wait(RUN_TIMEOUT_S)
    if not line:
        raise RuntimeError("a client ended without a report; its error stands above")
    return json.loads(line)


def _finish(client: Any) -> None:
    _go(client)
    _report(client)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _table(figures: dict[str, dict[str, list[Measured]]], systems: list[str]) -> str:
    lines = [f"| | {' | '.join(systems)} |", f"|---|{'---|' * len(systems)}"]
    for name, runs in figures.items():
        cells = []
        for system in systems:
            value = statistics.median(one.value for one in runs[system])
            cpu_us = statistics.median(one.cpu_us for one in runs[system])
            if "one send" in name:
                cells.append(f"{value:,.0f} us / {cpu_us:,.0f} us")
            else:
                cells.append(f"{value:,.0f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
