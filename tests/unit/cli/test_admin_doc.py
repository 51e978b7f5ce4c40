"""docs/admin.md names all jobs of mqadmin, and commands that there are."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from mqmesh.cli import main

JOBS = 56
"""Of RocketMQ 4.9.8's mqadmin."""


@pytest.fixture(scope="module")
def rows(project_root):
    text = (project_root / "docs/admin.md").read_text()
    return re.findall(r"^\| ([a-z]\w+) \| (–|`[^`]+`) \| (.*?) ?\|$", text, re.MULTILINE)


def test_every_job_has_a_command_or_a_reason(rows):
    assert len({name for name, _, _ in rows}) == len(rows) == JOBS
    assert [name for name, command, remark in rows if command == "–" and not remark] == []


def test_every_command_can_be_called(rows, capsys):
    for _, command, _ in rows:
        if command != "–":
            program, *arguments = shlex.split(command.strip("`"))
            assert program == "mqmesh"
            assert main.main([*arguments, "--help"]) == 0, capsys.readouterr().err


def test_all_commands_have_json_but_those_that_the_page_names(project_root):
    text = (project_root / "docs/admin.md").read_text()
    sentence = re.search(r"`--json` but for(.*?)\. ", text, re.DOTALL)[1]
    assert set(re.findall("`([a-z]+)`", sentence)) == {" ".join(path) for path in without_json()}


def without_json(command=main.root, path=()):
    """Commands without --json, as their words; of groups only those that do something alone."""
    is_group = isinstance(command, click.Group)
    has_json = any("--json" in one.opts for one in command.params)
    if not has_json and (not is_group or command.invoke_without_command):
        yield path
    if is_group:
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from without_json(command.get_command(context, name), (*path, name))
