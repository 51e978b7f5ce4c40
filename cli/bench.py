"""`mqmesh bench`: how fast it is on this machine, beside what bare ZeroMQ reaches here."""

import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, TextIO

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mqmesh.bench.processes import BenchError
from mqmesh.bench.report import Line, encode_line, format_table
from mqmesh.bench.rows import ROWS
from mqmesh.bench.runner import count_steps, run_row, select_rows
from mqmesh.bench.sides import Conditions
from mqmesh.roles.process import ExitCode

from .notes import tell_error
from .options import json_option
from .render import print_json

QUICK_SCALE: Final = 0.05
OnStep = Callable[[str], None]


@click.command()
@click.option(
    "--rows",
    metavar="NAME,…",
    help="Rows to run, or beginnings of their names. [default: all]",
)
@click.option("--list", "only_list", is_flag=True, help="Say what the rows are, and stop.")
@click.option(
    "--runs",
    type=click.IntRange(1, 100),
    help="Runs of each side; medians are shown. [default: 3]",
)
@click.option(
    "--scale",
    type=click.FloatRange(0, 1_000, min_open=True),
    help="Factor for the number of messages. [default: 1]",
)
@click.option("--quick", is_flag=True, help="One short run of each; only tells that all works.")
@click.option(
    "--transport",
    type=click.Choice(["ipc", "tcp"]),
    default="ipc",
    show_default=True,
    help="Between clients and brokers, mqmesh's and the limit's.",
)
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where temporary data goes: the disk to be measured. [default: the system's]",
)
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Append JSON lines to a file."
)
@click.option("--check", is_flag=True, help="Exit with 1 if a goal was missed.")
@json_option
def bench(
    rows: str | None,
    only_list: bool,
    runs: int | None,
    scale: float | None,
    quick: bool,
    transport: str,
    folder: Path | None,
    out: Path | None,
    check: bool,
    as_json: bool,
) -> int:
    """Measure throughput and latency with real processes on this machine.

    Every row is measured beside its limit: a bare ZeroMQ program that moves the same bytes
    with the same encoding, checksums and writes. Only ratios mean anything on a busy machine.

    \b
    Examples:
      mqmesh bench
      mqmesh bench --rows produce_128,sync_send --runs 5
      mqmesh bench --quick --json
    """
    if only_list:
        if as_json:
            print_json([{"row": row.name, "what": row.what} for row in ROWS.values()])
        else:
            for row in ROWS.values():
                click.echo(f"{row.name:<20} {row.what}")
        return ExitCode.OK
    chosen = select_rows([name for name in (rows or "").split(",") if name])
    runs = runs or (1 if quick else 3)
    conditions = Conditions(
        folder=folder or Path(tempfile.gettempdir()),
        transport=transport,
        scale=scale or (QUICK_SCALE if quick else 1.0),
    )
    lines: list[Line] = []
    failed = False
    with _terminable(), _progress(count_steps(chosen, runs)) as on_step, _open(out) as file:
        for row in chosen:
            try:
                line = run_row(row, conditions, runs, on_step)
            except BenchError as error:
                tell_error(f"{row.name}: {error}")
                failed = True
                continue
            lines.append(line)
            if as_json:
                click.echo(encode_line(line))
            if file is not None:
                file.write(encode_line(line) + "\n")
                file.flush()
    if lines and not as_json:
        click.echo(format_table(lines))
    missed = check and any(line.met is False for line in lines)
    return ExitCode.FAILED if failed or missed else ExitCode.OK


@contextmanager
def _terminable() -> Iterator[None]:
    """Makes SIGTERM do what Ctrl-C does: end all processes and remove the data."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress(steps: int) -> Iterator[OnStep]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    # Drawn only between the runs: a thread that draws would be measured along.
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, redirect_stdout=False
    ) as progress:
        task = progress.add_task("", total=steps)
        done = -1

        def on_step(text: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, completed=done, description=text, refresh=True)

        yield on_step


@contextmanager
def _open(path: Path | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    with path.open("a", encoding="utf-8") as file:
        yield file
