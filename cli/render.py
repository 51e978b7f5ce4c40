"""Formats of answers: tables and lines for people, JSON for programs, one log stream for both.

All that commands print on standard output goes through here. Texts of other people, clients and
servers can neither break a line nor move a terminal's cursor.
"""

import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from mqmesh.logs import one_line
from mqmesh.roles.supervisor.log_lines import LogLine

from .notes import answers_json, print_note
from .streams import ClosedOutput, json_text, standard_output

NAME_COLOURS: Final = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green")
LEVEL_STYLES: Final = {
    "DEBUG": "dim",
    "INFO": "",
    "WARNING": "yellow",
    "ERROR": "bold red",
    "CRITICAL": "bold red",
}
NAME_WIDTH: Final = 10
LABEL_WIDTH: Final = 17
GAP: Final = "  "
"""Between two columns."""
MANY_ROWS: Final = 1_000
"""A terminal gets more rows than this without colours, at once."""


def _plainly(value: Any) -> object:
    if value is None or value == "" or value == []:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) if isinstance(value, list) else value


def text_or_dash(value: object) -> str:
    """Returns a value as text, ids and the like without separators; "-" for nothing."""
    return "-" if value is None or value == "" else str(value)


def print_json(value: Any, *, flush: bool = True) -> None:
    """Prints a value as one line of JSON."""
    out = standard_output()
    out.write(json_text(value, out) + "\n")
    if flush:
        out.flush()


def say(text: str = "") -> None:
    """Prints a sentence for people as one line; control characters are escaped."""
    out = standard_output()
    out.write(one_line(text) + "\n")
    out.flush()


def print_text(text: str) -> None:
    """Prints a text of ours that has several lines: a script, a document."""
    out = standard_output()
    for line in text.removesuffix("\n").split("\n"):
        out.write(one_line(line) + "\n")
    out.flush()


def print_as_is(data: bytes) -> None:
    """Prints bytes of others and a line break: as they are for programs, as one line for people."""
    out = standard_output()
    out.flush()
    if out.isatty():
        out.write(one_line(data.decode(errors="backslashreplace")) + "\n")
    else:
        out.buffer.write(data + b"\n")
    out.flush()


class StyledLines:
    """Prints lines of several parts, in colours where a terminal shows them."""

    def __init__(self) -> None:
        self._out = standard_output()
        console = Console(file=self._out, highlight=False, soft_wrap=True)
        self._console = console if console.is_terminal else None

    def flush(self) -> None:
        """Hands the printed text to the reader."""
        self._out.flush()

    def say(self, parts: Iterable[tuple[str, str]], separator: str = "  ") -> None:
        """Prints one line; ``flush`` hands it to a reader.

        Args:
            parts: Texts, each with a style of rich or "".
            separator: Stands between them.
        """
        if self._console is None:
            self._out.write(separator.join(one_line(text) for text, _ in parts) + "\n")
        else:
            styled = [Text(one_line(text), style=style) for text, style in parts]
            self._console.print(Text(separator).join(styled))


def print_fields(
    fields: Iterable[tuple[str, str]], width: int = LABEL_WIDTH, lines: StyledLines | None = None
) -> None:
    """Prints names and values, one pair a line.

    Args:
        fields: Name and value.
        width: Columns for the names.
        lines: Output for the lines; None for a new one.
    """
    lines = StyledLines() if lines is None else lines
    for name, value in fields:
        name = one_line(name)
        lines.say([(name + " " * (width - cell_len(name)), "dim"), (value, "")], separator=" ")
    lines.flush()


def print_body(lines: Iterable[str]) -> None:
    """Prints the lines of a message's body below ``print_fields``."""
    styled = StyledLines()
    styled.say([("body", "dim")])
    for line in lines:
        styled.say([(f"  {line}", "")])
    styled.flush()


class Column(msgspec.Struct, frozen=True):
    """One column of a table.

    Attributes:
        name: Field of the records that it shows, by its name in JSON.
        heading: Head of the column.
        shown: Format of the field for people; by default "-" for nothing, yes or no, or a list
            with blanks between.
        value: Takes what is shown out of a whole record, where one field does not say it.
        rank: Columns of the highest rank leave a narrow terminal first, those of rank 0 never.
    """

    name: str
    heading: str
    shown: Callable[[Any], object] = _plainly
    value: Callable[[Any], Any] | None = None
    rank: int = 0

    def of(self, record: Any) -> object:
        """Returns the cell of a record."""
        if self.value is not None:
            return self.shown(self.value(record))
        is_dict = isinstance(record, dict)
        return self.shown(record[self.name] if is_dict else getattr(record, self.name))


class Table(msgspec.Struct, frozen=True):
    """Records as people see them, one a line.

    Attributes:
        columns: Columns to show of each record.
        records: In the order of the lines.
    """

    columns: Sequence[Column]
    records: Sequence[Any]

    def print(self) -> None:
        """Prints the table."""
        ranked = sorted(self.columns, key=lambda one: -one.rank)
        print_table(
            [one.heading for one in self.columns],
            [[one.of(record) for one in self.columns] for record in self.records],
            optional=[one.heading for one in ranked if one.rank],
        )


def print_answer(value: Any, *parts: str | Table) -> bool:
    """Prints the result of a command.

    Args:
        value: Whole result, for ``--json``.
        parts: Lines and tables for people.

    Returns:
        True if it was printed for people, for whom more may follow; False if it was printed as
        JSON.
    """
    if answers_json():
        print_json(value)
        return False
    for part in parts:
        if isinstance(part, Table):
            part.print()
        else:
            say(part)
    return True


def print_records(columns: Sequence[Column], records: Sequence[Any]) -> None:
    """Prints records: as a list of JSON objects, or as a table."""
    print_answer(records, Table(columns, records))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], optional: Sequence[str] = ()
) -> None:
    """Prints a table; numbers stand at the right. No value is ever broken or cut.

    A terminal that is too narrow gets no optional columns, as many as it takes; if that is not
    enough, all columns of each row below one another.

    Args:
        columns: Heads.
        rows: A cell may be a rich ``Text``.
        optional: Heads of columns that may be left out, the least important first.
    """
    assert set(optional) <= set(columns), "what may be left out is there"
    rows = [list(row) for row in rows]
    numbers = [
        bool(rows) and all(isinstance(row[index], int) for row in rows)
        for index in range(len(columns))
    ]
    table = _Table(columns, [[_cell(value) for value in row] for row in rows], numbers)
    out = standard_output()
    room = shutil.get_terminal_size().columns if out.isatty() else None
    if room is not None and rows:
        left_out = table.fit(room, optional)
        if left_out is None:
            table.print_blocks()
            return
        if left_out:
            print_note(f"no room for {', '.join(left_out)}: widen the terminal, or take --json")
    console = Console(file=out, highlight=False, soft_wrap=True)
    # Colours take 0.3 ms a row.
    table.print_lines(console if console.is_terminal and len(rows) <= MANY_ROWS else None)
    out.flush()


class _Table:
    """Cells that stand below one another.

    Args:
        columns: Heads.
        rows: Cells.
        numbers: Indexes of the columns that hold numbers.
    """

    def __init__(
        self, columns: Sequence[str], rows: list[list[Text]], numbers: Sequence[bool]
    ) -> None:
        self._heads = [_cell(column) for column in columns]
        self._rows = rows
        self._numbers = numbers
        self._widths = [
            max(cell.cell_len for cell in column) for column in zip(self._heads, *rows, strict=True)
        ]
        self._shown = list(range(len(columns)))

    def fit(self, room: int, optional: Sequence[str]) -> list[str] | None:
        """Leaves out optional columns until lines are short enough.

        Args:
            room: Width of a terminal.
            optional: Heads of columns that may go, the least important first.

        Returns:
            Heads of those that were left out; None if that would not be enough.
        """
        left_out: list[str] = []
        shown = list(self._shown)
        gone = iter(optional)
        while self._width(shown) > room:
            name = next(gone, None)
            if name is None:
                return None
            shown = [at for at in shown if self._heads[at].plain != name]
            left_out.append(name)
        for name in reversed(left_out.copy()):  # a wide one may have made room for narrow ones
            wider = sorted([*shown, *(at for at in self._shown if self._heads[at].plain == name)])
            if self._width(wider) <= room:
                shown = wider
                left_out.remove(name)
        self._shown = shown
        return left_out

    def _width(self, shown: Sequence[int]) -> int:
        widths: int = sum(self._widths[at] for at in shown)
        return widths + len(GAP) * (len(shown) - 1)

    def print_lines(self, console: Console | None) -> None:
        """Prints a line a row, in colours if there is a console."""
        out = standard_output()
        for row in (self._heads, *self._rows):
            cells = [self._padded(row[at], at) for at in self._shown]
            if console is None:
                out.write(GAP.join(cell.plain for cell in cells).rstrip() + "\n")
            else:
                line = Text(GAP).join(cells)
                line.rstrip()
                console.print(line, style="bold" if row is self._heads else None)

    def print_blocks(self) -> None:
        """Prints a line a cell, and an empty line between rows."""
        width = max(head.cell_len for head in self._heads)
        lines = StyledLines()
        for number, row in enumerate(self._rows):
            if number:
                say()
            heads = (head.plain for head in self._heads)
            print_fields(zip(heads, (cell.plain for cell in row), strict=True), width, lines)

    def _padded(self, cell: Text, at: int) -> Text:
        blank = " " * (self._widths[at] - cell.cell_len)
        return Text(blank).append(cell) if self._numbers[at] else cell.copy().append(blank)


def state_text(state: str) -> Text:
    """Returns a process state in its colour."""
    style = {"running": "green", "down": "bold red"}.get(state, "yellow")
    return Text(state, style=style)


def timestamp(ms: int) -> str:
    """Formats a wall-clock time in ms as UTC text; "-" for 0."""
    if not ms:
        return "-"
    try:
        moment = datetime.fromtimestamp(ms / 1_000, UTC)
    except (OverflowError, OSError, ValueError):
        return str(ms)  # a client may send any number
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def duration(ms: int) -> str:
    """Formats a duration: ``340 ms``, ``12 s``, ``3 min 5 s``, ``2 h 10 min``, ``3 d 4 h``."""
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
    """Returns a count and its noun: ``1 member``, ``2,000 members``; ``many`` for other plurals."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def shortened(text: str, width: int) -> str:
    """Shortens a text to so many characters; ``…`` stands for the part that is cut off."""
    return text if len(text) <= width else text[: width - 1] + "…"


def rate(per_second: float) -> str:
    """Returns a rate a second as text: whole numbers from 10 on."""
    return f"{per_second:,.0f}" if per_second >= 10 or not per_second else f"{per_second:.1f}"


class LogStream:
    """Prints the lines of all processes, each with its process's colour on a terminal.

    Args:
        as_json: Print objects with time, name, level and text.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self._as_json = as_json
        self._lines = None if isinstance(sys.stdout, ClosedOutput) else StyledLines()
        self._colours: dict[str, str] = {}

    def say(self, line: LogLine) -> None:
        """Prints a line; a reader that is gone costs the lines, not the cluster."""
        if self._lines is None:
            return
        try:
            if self._as_json:
                print_json(
                    {"time": line.time, "name": line.name, "level": line.level, "text": line.text}
                )
            else:
                text, *traceback = line.text.split("\n")
                self._lines.say(self._parts(line, text), separator=" ")
                for further in traceback:
                    self._lines.say([(further, LEVEL_STYLES.get(line.level, ""))])
                self._lines.flush()
        except (BrokenPipeError, ValueError):
            self._lines = None

    def _parts(self, line: LogLine, text: str) -> list[tuple[str, str]]:
        colour = self._colours.setdefault(
            line.name, NAME_COLOURS[len(self._colours) % len(NAME_COLOURS)]
        )
        style = LEVEL_STYLES.get(line.level, "")
        return [
            (line.time.partition("T")[2].removesuffix("Z"), "dim"),
            (f"{line.name:<{NAME_WIDTH}}", colour),
            (f"{line.level:<7}", style),
            (text, style),
        ]


def _cell(value: object) -> Text:
    if isinstance(value, Text):
        text, style = value.plain, value.style
    else:
        text, style = f"{value:,}" if type(value) is int else str(value), ""
    # A tab would push the columns behind it aside.
    return Text(one_line(text).replace("\t", "\\t").rstrip(), style=style)
