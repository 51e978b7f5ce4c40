"""How answers look: tables for people, JSON for programs, one log stream for both."""

import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mqmesh.roles.supervisor.log_lines import LogLine

NAME_COLOURS: Final = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green")
LEVEL_STYLES: Final = {
    "DEBUG": "dim",
    "INFO": "",
    "WARNING": "yellow",
    "ERROR": "bold red",
    "CRITICAL": "bold red",
}
NAME_WIDTH: Final = 10
MANY_ROWS: Final = 1_000
"""A terminal gets more rows than this without colours, at once."""


def print_json(value: Any, *, flush: bool = True) -> None:
    """Prints a value as one line of JSON."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    if flush:
        sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a table; numbers stand at the right.

    Args:
        columns: Heads.
        rows: A cell may be a rich ``Text``.
    """
    rows = [list(row) for row in rows]
    is_number = [
        bool(rows) and all(isinstance(row[index], int) for row in rows)
        for index in range(len(columns))
    ]
    console = Console(highlight=False)
    if not console.is_terminal or len(rows) > MANY_ROWS:
        _print_plain(columns, rows, is_number)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, right in zip(columns, is_number, strict=True):
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    console.print(table)


def _print_plain(
    columns: Sequence[str], rows: Sequence[Sequence[object]], is_number: Sequence[bool]
) -> None:
    """Prints a table without a look at the terminal: every row on one line.

    So programs want it that read a pipe; and rich takes 3 s for 10,000 rows.
    """
    lines = [list(columns), *([_cell(value).plain.rstrip() for value in row] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            " " * (width - cell_len(text)) + text
            if right
            else text + " " * (width - cell_len(text))
            for text, width, right in zip(line, widths, is_number, strict=True)
        ]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def state_text(state: str) -> Text:
    """A process state in its colour."""
    style = {"running": "green", "down": "bold red"}.get(state, "yellow")
    return Text(state, style=style)


def timestamp(ms: int) -> str:
    """A wall-clock time in ms as UTC text; "-" for 0."""
    if not ms:
        return "-"
    try:
        moment = datetime.fromtimestamp(ms / 1_000, UTC)
    except (OverflowError, OSError, ValueError):
        return str(ms)  # anybody may send any number
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def duration(ms: int) -> str:
    """A duration in words: ``340 ms``, ``12 s``, ``3 min 5 s``, ``2 h 10 min``, ``3 d 4 h``."""
    seconds = ms // 1_000
    if seconds < 1:
        return f"{ms} ms"
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3_600:
        return f"{seconds // 60} min {seconds % 60} s"
    if seconds < 86_400:
        return f"{seconds // 3_600} h {seconds % 3_600 // 60} min"
    return f"{seconds // 86_400} d {seconds % 86_400 // 3_600} h"


def counted(count: int, one: str, many: str = "") -> str:
    """So many of something: ``1 member``, ``2,000 members``; ``many`` where an s is not enough."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def shortened(text: str, width: int) -> str:
    """A text of at most so many characters; ``…`` stands for what was cut off."""
    return text if len(text) <= width else text[: width - 1] + "…"


def rate(per_second: float) -> str:
    """So many a second: whole numbers from 10 on."""
    return f"{per_second:,.0f}" if per_second >= 10 or not per_second else f"{per_second:.1f}"


class LogStream:
    """Prints the lines of all processes, each with its process's colour on a terminal.

    Args:
        as_json: Print objects with time, name, level and text.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self._as_json = as_json
        self._console = Console(highlight=False, soft_wrap=True)
        self._colours: dict[str, str] = {}
        self._is_open = True

    def say(self, line: LogLine) -> None:
        """Prints a line; a reader that is gone costs the lines, not the cluster."""
        if not self._is_open:
            return
        try:
            if self._as_json:
                print_json(
                    {"time": line.time, "name": line.name, "level": line.level, "text": line.text}
                )
            else:
                self._console.print(self._pretty(line))
        except (BrokenPipeError, ValueError):
            self._is_open = False

    def _pretty(self, line: LogLine) -> Text:
        colour = self._colours.setdefault(
            line.name, NAME_COLOURS[len(self._colours) % len(NAME_COLOURS)]
        )
        style = LEVEL_STYLES.get(line.level, "")
        return Text.assemble(
            (line.time.partition("T")[2].removesuffix("Z"), "dim"),
            " ",
            (f"{line.name:<{NAME_WIDTH}}", colour),
            " ",
            (f"{line.level:<7}", style),
            " ",
            (line.text, style),
        )


def _cell(value: object) -> Text:
    if isinstance(value, Text):
        return value
    return Text(f"{value:,}" if type(value) is int else str(value))
