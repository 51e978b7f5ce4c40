"""Commands that delete, skip or shut out for good ask first, or want ``--yes``."""

from __future__ import annotations

import click
import pytest

from mqmesh.cli import main, options

IRREVERSIBLE = {
    "clone-offset",
    "commit",
    "delete",
    "drain",
    "elect",
    "expire",
    "promote",
    "purge",
    "remove-key",
    "reset-offset",
    "rollback",
    "skip",
}
"""Names of such commands; what is added to the command line later is found by its name."""
CAN_BE_UNDONE = {("user", "expire")}
"""Sets a date, which may be set again."""


def commands(group, path=()):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def test_a_command_that_cannot_be_undone_has_yes():
    found = {path: one for path, one in commands(main.root) if path[-1] in IRREVERSIBLE}
    lacking = {
        path for path, command in found.items() if "yes" not in {one.name for one in command.params}
    }
    assert lacking == CAN_BE_UNDONE


@pytest.mark.parametrize(
    "arguments",
    [
        ["topic", "delete", "t"],
        ["user", "delete", "u"],
        ["user", "remove-key", "u", "k"],
        ["snapshot", "delete", "mqmesh-data/snapshots/broker-a.1"],
        ["archive", "expire", "archive", "--older-than", "400d"],
        ["archive", "expire", "archive"],
        ["broker", "drain", "broker-a"],
        ["kv", "delete", "shop", "currency"],
        ["dlq", "purge", "billing"],
        ["tx", "commit", "0" * 32],
    ],
)
@pytest.mark.parametrize("mode", [[], ["--json"]])
def test_without_a_terminal_it_is_refused_before_anything_is_done(capsys, arguments, mode):
    assert main.main(["--namesrv", "127.0.0.1:1", *arguments, *mode]) == 2
    assert "add --yes" in capsys.readouterr().err


def test_the_answer_no_ends_the_command(monkeypatch):
    monkeypatch.setattr(options.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(options.click, "confirm", lambda question, abort: asked.append(question))
    asked: list[str] = []
    options.confirm("this deletes it", "Delete it?", yes=True)
    assert asked == []
    options.confirm("this deletes it", "Delete it?", yes=False)
    assert asked == ["Delete it?"]
