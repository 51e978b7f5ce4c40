"""Measures throughput and latency with real processes on this machine: ``scripts/bench``.

Every row is measured beside its limit: a bare ZeroMQ program that moves the same bytes with the
same encoding, checksums and writes. Only ratios mean anything on a busy machine.
"""

import argparse
import json
import math
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mqmesh.errors import InvalidArgument
from rows.processes import BenchError
from rows.report import Line, encode_line, format_table
from rows.rows import ROWS
from rows.runner import OnStep, count_steps, run_row, select_rows
from rows.sides import Conditions

QUICK_SCALE: Final = 0.05
RUNS: Final = 3
MAX_RUNS: Final = 100
MAX_SCALE: Final = 1_000.0
FAILED: Final = 1
INTERRUPTED: Final = 130


def main(arguments: list[str] | None = None) -> int:
    """Runs the rows and prints a table, or a line of JSON for each.

    Returns:
        Exit code: 0 when all rows ran, 1 when one failed or (``--check``) missed its goal, 130
        after Ctrl-C.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.list:
        _list_rows(options.json)
        return 0
    try:
        rows = "secure_" if options.secure else options.rows
        chosen = select_rows([name for name in rows.split(",") if name])
    except InvalidArgument as error:
        parser.error(str(error))
    runs = options.runs or (1 if options.quick else RUNS)
    conditions = Conditions(
        folder=options.dir,
        transport=options.transport,
        scale=options.scale or (QUICK_SCALE if options.quick else 1.0),
    )
    lines: list[Line] = []
    failed = False
    try:
        with (
            _terminable(),
            _progress(count_steps(chosen, runs)) as on_step,
            _open(options.out) as file,
        ):
            for row in chosen:
                try:
                    line = run_row(row, conditions, runs, on_step)
                except BenchError as error:
                    print(f"error: {row.name}: {error}", file=sys.stderr, flush=True)
                    failed = True
                    continue
                lines.append(line)
                if options.json:
                    print(encode_line(line), flush=True)
                if file is not None:
                    file.write(encode_line(line) + "\n")
                    file.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    if lines and not options.json:
        print(format_table(lines))
    missed = options.check and any(line.met is False for line in lines)
    return FAILED if failed or missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rows", metavar="NAME,…", default="", help="rows to run, or beginnings of their names"
    )
    parser.add_argument(
        "--secure", action="store_true", help="the rows of security on beside off, and no others"
    )
    parser.add_argument("--list", action="store_true", help="say what the rows are, and stop")
    parser.add_argument(
        "--runs", type=_runs, help=f"runs of each side; medians are shown (default: {RUNS})"
    )
    parser.add_argument(
        "--scale", type=_scale, help="factor for the number of messages (default: 1)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one short run of each; only tells that all works"
    )
    parser.add_argument(
        "--transport",
        choices=["ipc", "tcp"],
        default="ipc",
        help="between clients and brokers, mqmesh's and the limit's (default: %(default)s)",
    )
    parser.add_argument(
        "--dir",
        type=_folder,
        default=Path(tempfile.gettempdir()),
        help="where temporary data goes: the disk to be measured (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="append JSON lines to a file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal was missed")
    parser.add_argument("--json", action="store_true", help="answer in JSON, for programs")
    return parser


def _runs(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_RUNS:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and {MAX_RUNS}")
    return value


def _scale(text: str) -> float:
    value = float(text)
    if not 0 < value <= MAX_SCALE or math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most {MAX_SCALE:,.0f}")
    return value


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no directory")
    return Path(text)


def _list_rows(as_json: bool) -> None:
    if as_json:
        print(json.dumps([{"row": row.name, "what": row.what} for row in ROWS.values()]))
        return
    for row in ROWS.values():
        print(f"{row.name:<20} {row.what}")


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


if __name__ == "__main__":
    sys.exit(main())
