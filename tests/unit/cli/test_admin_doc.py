"""docs/admin.md names all jobs of mqadmin, and commands that there are."""

from __future__ import annotations

import re
import shlex

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
