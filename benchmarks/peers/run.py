"""Measures mqmesh beside its peers and prints the README's table: ``scripts/bench --peers``.

Every figure is the median of the runs; the systems take turns, each run in fresh processes and
a fresh folder, so that the moods of a machine fall on all alike. A cell has messages a second, or
p50 and p99 in microseconds; behind the semicolon microseconds of processor time a message: of the
programs that send and read, and of the servers.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from client import ACTIONS, is_blocking
from rich.console import Console
from rich.progress import Progress
from servers import SERVERS, Missing, Running, mqmesh_replicas
from table import ROWS, Measured, Row, format_table, measured, messages_of

HERE = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")
RUN_TIMEOUT_S = 600


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
    asked = [(row, system) for row in rows for system in systems if _has(system, row)]
    figures: dict[str, dict[str, list[Measured]]] = {row.name: {} for row in rows}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("measuring", total=len(asked) * options.runs)
        for row in rows:
            for _ in range(options.runs):
                for system in [one for of, one in asked if of is row]:
                    progress.update(bar, description=f"{row.name}: {system}")
                    figures[row.name].setdefault(system, []).append(_measure(row, system, options))
                    progress.advance(bar)
    if options.json:
        print(json.dumps(_plain(figures)))
    else:
        print(format_table(figures, systems))


def _plain(figures: dict[str, dict[str, list[Measured]]]) -> dict[str, Any]:
    return {
        name: {system: [one._asdict() for one in runs] for system, runs in by_system.items()}
        for name, by_system in figures.items()
    }


def _has(system: str, row: Row) -> bool:
    """Returns whether a system has clients for a row."""
    if row.replicas > 1 and system != "mqmesh":
        return False
    return all(
        is_blocking(system, ACTIONS[name]) is not None for name in (row.writes, row.reads) if name
    )


def _available(wanted: list[str], folder: str | None) -> list[str]:
    found = []
    for system in wanted:
        if system not in SERVERS:
            raise SystemExit(f"error: {system} is none of {', '.join(SERVERS)}")
        try:
            with tempfile.TemporaryDirectory(dir=folder) as data, SERVERS[system](Path(data), 1):
                found.append(system)
        except Missing as error:
            print(f"{system} is left out: {error}", file=sys.stderr)
    return found


def _running(row: Row, system: str, folder: Path) -> contextlib.AbstractContextManager[Running]:
    start = mqmesh_replicas if row.replicas > 1 else SERVERS[system]
    return start(folder, row.topics)


def _measure(row: Row, system: str, options: argparse.Namespace) -> Measured:
    count = messages_of(row, system, options.scale)
    with (
        tempfile.TemporaryDirectory(dir=options.dir, ignore_cleanup_errors=True) as data,
        _running(row, system, Path(data)) as (address, servers),
    ):

        def run(*programs: str) -> Measured:
            """Runs programs side by side."""
            with contextlib.ExitStack() as stack:
                clients = [
                    stack.enter_context(_client(system, one, row.kind, address, count, row.topics))
                    for one in programs
                ]
                used_s = _cpu_s(servers)
                for client in clients:
                    client.stdin.write("go\n")
                    client.stdin.flush()
                reports = [_report(client) for client in clients]
                return measured(count, reports, _cpu_s(servers) - used_s)

        if row.reads and not row.at_once:
            run(row.writes)
            return run(row.reads)
        programs = (row.reads, row.writes) if row.reads else (row.writes,)
        if row.is_twice:
            run(*programs)
        return run(*programs)


@contextlib.contextmanager
def _client(system: str, action: str, *arguments: object) -> Iterator[Any]:
    command = [sys.executable, str(HERE / "client.py"), system, action, *map(str, arguments)]
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


def _report(client: Any) -> Any:
    line = client.stdout.readline()
    client.wait(RUN_TIMEOUT_S)
    if not line:
        raise RuntimeError("a client ended without a report; its error stands above")
    return json.loads(line)


def _cpu_s(sessions: list[int]) -> float:
    """Returns the processor time of servers, and of the processes that they have started."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = file.read_text().rpartition(")")[2].split()
            if int(fields[3]) in sessions:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS


if __name__ == "__main__":
    main()
