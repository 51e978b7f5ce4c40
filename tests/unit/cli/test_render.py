"""Tables, JSON, durations and the log stream."""

from __future__ import annotations

import io
import json
import re
import sys

import click
import msgspec
import pytest
from harness.terminal import on_terminal
from rich.text import Text

from mqmesh.cli.notes import Options
from mqmesh.cli.render import (
    MANY_ROWS,
    Column,
    LogStream,
    counted,
    duration,
    print_answer,
    print_as_is,
    print_body,
    print_fields,
    print_json,
    print_records,
    print_table,
    print_text,
    say,
    shortened,
    timestamp,
)
from mqmesh.roles.supervisor.log_lines import LogLine

LINE = LogLine("2026-01-01T12:00:00.123Z", "broker-a", "WARNING", "a.b: [red]oh[/]", "raw")


def test_a_table_for_a_pipe_has_one_line_a_row_and_no_padding(capsys):
    print_table(("NAME", "COUNT"), [("a" * 200, 1), ("b [x]", 1_234_567)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{'NAME':<200}      COUNT"
    assert lines[2] == f"{'b [x]':<200}  1,234,567"


HEADS = ("MESSAGE ID", "STATE", "COUNT", "ENDPOINT")
ROWS = [
    ("0C6A9F0E5D3B7A12000000000000002A", Text("up", style="green"), 1_234_567, "tcp://[::1]:1"),
    ("0C6A9F0E5D3B7A12000000000000002B", "down", 5, "ipc:///var/lib/mqmesh/a/sock"),
]


def test_a_narrow_terminal_gets_no_optional_columns(monkeypatch, capsys):
    terminal = on_terminal(monkeypatch, 75, "dumb")
    print_table(HEADS, ROWS, optional=("STATE", "COUNT", "ENDPOINT"))
    assert terminal.lines == [
        "MESSAGE ID                            COUNT  ENDPOINT",
        "0C6A9F0E5D3B7A12000000000000002A  1,234,567  tcp://[::1]:1",
        "0C6A9F0E5D3B7A12000000000000002B          5  ipc:///var/lib/mqmesh/a/sock",
    ]
    assert capsys.readouterr().err == "no room for STATE: widen the terminal, or take --json\n"


def test_a_wide_column_that_is_left_out_makes_room_for_narrow_ones(monkeypatch, capsys):
    terminal = on_terminal(monkeypatch, 60, "dumb")
    print_table(HEADS, ROWS, optional=("STATE", "COUNT", "ENDPOINT"))
    assert terminal.lines == [
        "MESSAGE ID                        STATE      COUNT",
        "0C6A9F0E5D3B7A12000000000000002A  up     1,234,567",
        "0C6A9F0E5D3B7A12000000000000002B  down           5",
    ]
    assert capsys.readouterr().err == "no room for ENDPOINT: widen the terminal, or take --json\n"


def test_where_that_is_not_enough_each_row_is_a_block(monkeypatch, capsys):
    terminal = on_terminal(monkeypatch, 40, "dumb")
    print_table(HEADS, ROWS, optional=("STATE", "COUNT"))
    assert terminal.lines == [
        "MESSAGE ID 0C6A9F0E5D3B7A12000000000000002A",
        "STATE      up",
        "COUNT      1,234,567",
        "ENDPOINT   tcp://[::1]:1",
        "",
        "MESSAGE ID 0C6A9F0E5D3B7A12000000000000002B",
        "STATE      down",
        "COUNT      5",
        "ENDPOINT   ipc:///var/lib/mqmesh/a/sock",
    ]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("term", ["xterm", "dumb"])
@pytest.mark.parametrize("columns", range(10, 131, 10))
def test_no_width_breaks_a_value(monkeypatch, columns, term):
    terminal = on_terminal(monkeypatch, columns, term)
    print_table(HEADS, ROWS, optional=("STATE",))
    shown = terminal.getvalue()
    for row in ROWS:
        for value in (row[0], f"{row[2]:,}", row[3]):
            assert value in shown


class Record(msgspec.Struct):
    name: str
    size_bytes: int
    is_open: bool
    tags: list[str]


COLUMNS = (
    Column("name", "NAME"),
    Column("size_bytes", "SIZE", lambda size: f"{size // 1_024} KiB", rank=1),
    Column("is_open", "OPEN", rank=2),
    Column("tags", "TAGS"),
    Column("", "KEY", value=lambda record: record.name.upper()),
)
RECORDS = [Record("a", 2_048, True, ["x", "y"]), Record("b", 0, False, [])]


def test_records_are_json_for_programs_and_a_table_for_people(capsys):
    options = Options()
    options.as_json = True
    with click.Context(click.Command("list"), obj=options):
        print_records(COLUMNS, RECORDS)
    found = json.loads(capsys.readouterr().out)
    assert found == [msgspec.structs.asdict(one) for one in RECORDS]
    print_records(COLUMNS, RECORDS)
    assert capsys.readouterr().out.splitlines() == [
        "NAME  SIZE   OPEN  TAGS  KEY",
        "a     2 KiB  yes   x y   A",
        "b     0 KiB  no    -     B",
    ]


def test_an_answer_is_json_for_programs_and_lines_for_people(capsys):
    options = Options()
    options.as_json = True
    with click.Context(click.Command("create"), obj=options):
        print_answer({"topic": "t"}, "topic t is there")
        assert capsys.readouterr().out == '{"topic":"t"}\n'
    print_answer({"topic": "t"}, "topic t is there", "so is u")
    assert capsys.readouterr().out == "topic t is there\nso is u\n"


def test_columns_of_the_highest_rank_leave_first(monkeypatch):
    terminal = on_terminal(monkeypatch, 23, "dumb")
    print_records(COLUMNS, RECORDS)
    assert terminal.lines[0] == "NAME  SIZE   TAGS  KEY"


def test_colours_do_not_move_columns(monkeypatch):
    terminal = on_terminal(monkeypatch, 130)
    print_table(HEADS, ROWS)
    coloured = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in terminal.lines]
    plain = on_terminal(monkeypatch, 130, "dumb")
    print_table(HEADS, ROWS)
    assert coloured == plain.lines
    assert "\x1b" in terminal.getvalue()


def test_a_terminal_gets_many_rows_in_their_columns_at_once(monkeypatch):
    terminal = on_terminal(monkeypatch, 80)
    print_table(("NAME",), [(str(number),) for number in range(MANY_ROWS + 1)])
    assert terminal.lines == ["NAME", *map(str, range(MANY_ROWS + 1))]


def test_an_empty_table_has_its_heads(capsys):
    print_table(("NAME", "COUNT"), [])
    assert capsys.readouterr().out == "NAME  COUNT\n"


def test_json_is_one_line(capsys):
    print_json({"a": [1, None, "é\n"]})
    assert capsys.readouterr().out == '{"a":[1,null,"é\\n"]}\n'


@pytest.mark.parametrize(
    ("ms", "words"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (59_999, "59 s"),
        (185_000, "3 min 5 s"),
        (7_800_000, "2 h 10 min"),
        (273_600_000, "3 d 4 h"),
    ],
)
def test_a_duration_has_words(ms, words):
    assert duration(ms) == words


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "-"), (1_767_225_600_123, "2026-01-01T00:00:00.123Z"), (2**62, str(2**62))],
)
def test_a_timestamp_is_utc(ms, text):
    assert timestamp(ms) == text


def test_a_log_line_for_people(capsys):
    LogStream().say(LINE)
    assert capsys.readouterr().out == "12:00:00.123 broker-a   WARNING a.b: [red]oh[/]\n"


def test_a_log_line_for_programs(capsys):
    LogStream(as_json=True).say(LINE)
    assert json.loads(capsys.readouterr().out) == {
        "time": "2026-01-01T12:00:00.123Z",
        "name": "broker-a",
        "level": "WARNING",
        "text": "a.b: [red]oh[/]",
    }


@pytest.mark.parametrize(
    "show",
    [
        lambda: LogStream().say(LINE),
        lambda: LogStream(as_json=True).say(LINE),
        lambda: print_table(("NAME",), [("a",)]),
        lambda: print_fields([("name", "a")]),
        lambda: print_body(["a"]),
        lambda: print_text("a"),
        lambda: print_as_is(b"a"),
        lambda: say("a"),
        lambda: print_json("a"),
    ],
)
def test_the_reader_of_a_pipe_has_it_at_once(monkeypatch, show):
    pipe = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe))
    show()
    assert pipe.getvalue().endswith(b"\n")


def test_a_reader_that_is_gone_costs_the_lines_only(monkeypatch):
    def gone(*args, **kwargs):
        raise BrokenPipeError

    stream = LogStream()
    monkeypatch.setattr(stream._lines, "say", gone)
    stream.say(LINE)
    stream.say(LINE)


def test_columns_of_a_pipe_stand_below_one_another_whatever_is_in_them(capsys):
    print_table(("A", "WIDE", "N"), [("x", Text("漢字", style="red"), 1_234), ("longer", "y", -5)])
    assert capsys.readouterr().out == (
        "A       WIDE      N\nx       漢字  1,234\nlonger  y        -5\n"
    )


def test_one_of_a_thing_is_no_plural():
    shown = [counted(number, "member") for number in (0, 1, 2_000)]
    assert shown == ["0 members", "1 member", "2,000 members"]
    assert [counted(number, "retry", "retries") for number in (1, 2)] == ["1 retry", "2 retries"]


def test_what_was_cut_is_marked():
    assert [shortened("12345", width) for width in (4, 5, 6)] == ["123…", "12345", "12345"]
