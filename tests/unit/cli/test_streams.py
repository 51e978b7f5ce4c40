"""What becomes of output that its reader's encoding cannot hold, or that nobody reads."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import click
import pytest
from harness.terminal import on_terminal

from mqmesh.cli import main
from mqmesh.cli.lazy_group import LazyGroup
from mqmesh.cli.names import ClusterName, Integer, Number
from mqmesh.cli.render import (
    StyledLines,
    print_as_is,
    print_fields,
    print_json,
    print_table,
    print_text,
    say,
)
from mqmesh.cli.streams import json_line
from mqmesh.logs import one_line

HOSTILE = (
    "a\x1b]0;t\x07b\x1b[2J\nFORGED\r\x9b31m\x85\u2028\u202eevil\u2066\u200fz\ufeff\ud800\U000e0041"
)
RAW = [mark for mark in HOSTILE if not (mark.isascii() and mark.isprintable())]


@pytest.fixture
def contexts(tmp_path, monkeypatch):
    """Four names that no 8-bit encoding holds all of; one is what is left of a byte."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "mqmesh").mkdir()
    (tmp_path / "mqmesh" / "contexts.json").write_text(
        json.dumps({"version": 1, "contexts": {"gr😀é": ["a:1"], "b\x9b": ["b:2"]}})
    )


def shown_hostile_texts():
    say(f"say {HOSTILE}")
    print_table((f"HEAD {HOSTILE}", "N"), [(HOSTILE, 1)])
    print_fields([(f"property {HOSTILE}", HOSTILE)])
    StyledLines().say([(HOSTILE, "red"), (HOSTILE, "")])
    print_json({HOSTILE: HOSTILE})


def test_no_text_of_others_moves_a_terminal_or_forges_a_line(monkeypatch):
    terminal = on_terminal(monkeypatch, 300)
    shown_hostile_texts()
    shown = terminal.getvalue()
    # The colours are our own.
    for style in ("\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[0m"):
        shown = shown.replace(style, "")
    assert [mark for mark in RAW if mark in shown and mark != "\n"] == []
    assert not [line for line in shown.split("\n") if line.startswith("FORGED")]
    assert shown.count("\n") == 6


def test_nor_does_it_where_output_is_no_terminal(capsys):
    shown_hostile_texts()
    shown = capsys.readouterr().out
    assert [mark for mark in RAW if mark in shown and mark != "\n"] == []
    assert shown.count("\n") == 6


def test_bytes_of_others_are_as_they_are_for_programs_and_a_line_for_people(
    monkeypatch, capsysbinary
):
    body = b"a\nFORGED \x1b[2J\xff"
    print_as_is(body)
    assert capsysbinary.readouterr().out == body + b"\n"
    terminal = on_terminal(monkeypatch, 80)
    print_as_is(body)
    assert terminal.lines == [r"a\nFORGED \x1b[2J\xff"]


def test_a_text_of_several_lines_keeps_them(capsys):
    print_text("a\n\tb\x1b\n\n")
    assert capsys.readouterr().out == "a\n\tb\\x1b\n\n"


def test_a_line_keeps_what_people_write():
    text = "naïve 漢字 👩\u200d🚀 עברית العربية\tend"
    assert one_line(text) == text
    assert json.loads(json_line([text])) == [text]


def test_json_for_files_says_the_same_with_escapes():
    assert json.loads(json_line({"a": HOSTILE})) == {"a": HOSTILE}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-16", "utf-8"])
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_an_encoding_that_cannot_hold_a_text_gets_escapes(monkeypatch, contexts, encoding, as_json):
    data = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(data, encoding=encoding))
    assert main.main(["context", "list", *as_json]) == 0
    shown = data.getvalue().decode(encoding)
    assert "a:1" in shown
    if as_json:
        assert [row["context"] for row in json.loads(shown)] == ["b\x9b", "gr😀é"]
    assert "\x9b" not in shown


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_so_do_errors(monkeypatch, contexts, encoding, as_json):
    data = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(data, encoding=encoding))
    assert main.main(["context", "use", "ü😀", *as_json]) == 2
    assert b"internal error" not in data.getvalue()
    if as_json:
        assert "ü😀" in json.loads(data.getvalue().decode(encoding))["error"]


SCRIPT = """
exec 3>&1
"$PYTHON" -m mqmesh.cli context list >&- 2>"$DIR/err"; echo $? >&3
"$PYTHON" -m mqmesh.cli context list --json >&- 2>&- <&-; echo $? >&3
"$PYTHON" -m mqmesh.cli --version >&- 2>>"$DIR/err"; echo $? >&3
"$PYTHON" -m mqmesh.cli context list --help >&- 2>>"$DIR/err"; echo $? >&3
"$PYTHON" -m mqmesh.cli context use nobody 2>&-; echo $? >&3
"$PYTHON" -m mqmesh.cli context list >/dev/full 2>>"$DIR/err"; echo $? >&3
"""


def test_closed_streams_and_a_full_disk_are_errors_in_a_line(contexts, tmp_path):
    done = subprocess.run(
        ["sh", "-c", SCRIPT],
        env={"PYTHON": sys.executable, "DIR": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    # What was meant for a closed standard error is not on standard output.
    assert done.stdout.split() == ["1", "1", "1", "1", "2", "1"]
    lost = "error: standard output is closed, so the answer is lost\n"
    assert (tmp_path / "err").read_text() == f"{3 * lost}error: No space left on device\n"


def test_a_shell_completes_no_name_that_holds_more_than_letters(monkeypatch):
    class Name(ClusterName):
        def known(self, namesrv):
            return {"orders", "orders\x1b]0;t\x07", "orders\nrm", "orders\u202e"}

    context = click.Context(main.root)
    context.params = {"namesrv": "127.0.0.1:1"}
    found = Name().shell_complete(context, click.Argument(["topic"]), "ord")
    assert [one.value for one in found] == ["orders"]


def all_commands(command, path=()):
    context = click.Context(command)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            yield from all_commands(command.get_command(context, name), (*path, name))
    else:
        yield path, command


NUMBERS = [
    pytest.param(param, id=f"{' '.join(path)} {param.name}")
    for path, command in all_commands(main.root)
    for param in command.params
    if isinstance(param.type, click.types.IntParamType | click.types.FloatParamType)
]


@pytest.mark.parametrize("param", NUMBERS)
def test_what_is_no_number_is_refused(param):
    assert isinstance(param.type, Integer | Number)
    for text in ("nan", "-nan", "inf", "-inf", "1e309", "1" + "0" * 30):
        with pytest.raises(click.BadParameter):
            param.type.convert(text, param, None)


def test_there_are_numbers_to_look_at():
    assert isinstance(main.root, LazyGroup)
    assert len(NUMBERS) > 50
