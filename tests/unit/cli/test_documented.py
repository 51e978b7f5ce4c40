"""Every command line that the documentation shows can be parsed."""

from __future__ import annotations

import itertools
import re
import shlex
from unittest import mock

import click
import pytest

from mqmesh.cli import main

DOCUMENTS = [
    "README.md",
    "docs/admin.md",
    "docs/alarms.md",
    "docs/archive.md",
    "docs/benchmarks.md",
    "docs/console.md",
    "docs/exactly-once.md",
    "docs/groups.md",
    "docs/high-availability.md",
    "docs/job-queue.md",
    "docs/metrics.md",
    "docs/namespaces.md",
    "docs/operations.md",
    "docs/payments.md",
    "docs/per-message.md",
    "docs/policies.md",
    "docs/priority.md",
    "docs/programs.md",
    "docs/per-message.md",
    "docs/policies.md",
    "docs/priority.md",
    "docs/retries.md",
    "docs/security.md",
    "docs/tracing.md",
    "docs/transactions.md",
]

SHELL = (">", "<", "|", "||", "&")
"""Words with which the shell's part of a line begins."""


def command_lines(text):
    """Yield the arguments of every `mqmesh …` line in a fenced block, docstring or comment."""
    joined = re.sub(r"\\+\n +", "", text)
    for match in re.finditer(r"^(?:#? *|.*\| )mqmesh +(.*)$", joined, re.MULTILINE):
        # What stands behind two blanks or a # is a remark; ` | ` lists alternatives.
        line = re.split(r" {2,}|\s#", match[1])[0].rstrip(" `.,;:")
        if "…" not in line and " | " not in line and "`" not in line:
            yield line


def parse(line, capsys):
    """Parse a command line with its values, and run nothing; files may be missing."""
    words = itertools.takewhile(lambda word: word not in SHELL, shlex.split(line))
    with mock.patch.object(click.Command, "invoke", return_value=None):
        code = main.main(list(words))
    said = capsys.readouterr().err
    assert code == 0 or "does not exist" in said, f"{line}: {said}"


def commands(command, path=()):
    context = click.Context(command)
    yield " ".join(path), command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            yield from commands(command.get_command(context, name), (*path, name))


@pytest.mark.parametrize(
    ("name", "command"), [pytest.param(*one, id=one[0] or "mqmesh") for one in commands(main.root)]
)
def test_every_command_has_examples_that_can_be_parsed(capsys, name, command):
    examples = list(command_lines(f"{command.help}{command.epilog}"))
    assert [line for line in examples if f"{line} ".startswith(f"{name} ".lstrip())], (
        "none of its own"
    )
    for line in examples:
        code = main.main([*shlex.split(line), "--help"])
        assert code == 0, f"{line}: {capsys.readouterr().err}"
        parse(line, capsys)


def test_every_option_has_a_help_text():
    bare = [
        f"{name} {option.opts[-1]}"
        for name, command in commands(main.root)
        for option in command.params
        if isinstance(option, click.Option) and not (option.help or option.hidden)
    ]
    assert bare == []


def test_command_lines_are_found():
    text = "# mqmesh up -c x   a remark\n  mqmesh send a \\\n      --tag b\ncat x | mqmesh status\n"
    assert list(command_lines(text)) == ["up -c x", "send a --tag b", "status"]


@pytest.mark.parametrize("path", DOCUMENTS)
def test_what_is_documented_can_be_parsed(project_root, capsys, path):
    text = (project_root / path).read_text()
    found = list(command_lines(text))
    for line in found:
        # Help is shown in place of running it, but only if everything else is right.
        code = main.main([*shlex.split(line), "--help"])
        assert code == 0, f"{line}: {capsys.readouterr().err}"
        parse(line, capsys)
    assert found
