"""Every command line that the documentation shows can be parsed."""

from __future__ import annotations

import re
import shlex

import pytest

from mqmesh.cli import main

DOCUMENTS = [
    "README.md",
    "docs/operations.md",
    "docs/retries.md",
    "docs/groups.md",
    "docs/benchmarks.md",
    "docs/transactions.md",
]
SOURCES = [
    "main",
    "processes/cluster",
    "admin/topic",
    "messages/send",
    "messages/consume",
    "processes/serve",
    "bench/commands",
    "messages/dlq",
    "admin/group",
    "admin/group_offsets",
    "messages/tx",
]


def command_lines(text):
    """Yield the arguments of every `mqmesh …` line in a fenced block, docstring or comment."""
    joined = re.sub(r"\\+\n +", "", text)
    for match in re.finditer(r"^(?:#? *|.*\| )mqmesh +(.*)$", joined, re.MULTILINE):
        # What stands behind two blanks or a # is a remark; ` | ` lists alternatives.
        line = re.split(r" {2,}|\s#", match[1])[0].rstrip(" `.,;:")
        if "…" not in line and " | " not in line and "`" not in line:
            yield line


def test_command_lines_are_found():
    text = "# mqmesh up -c x   a remark\n  mqmesh send a \\\n      --tag b\ncat x | mqmesh status\n"
    assert list(command_lines(text)) == ["up -c x", "send a --tag b", "status"]


@pytest.mark.parametrize("path", [*DOCUMENTS, *(f"cli/{name}.py" for name in SOURCES)])
def test_what_is_documented_can_be_parsed(project_root, capsys, path):
    text = (project_root / path).read_text()
    found = list(command_lines(text))
    for line in found:
        # Help is shown in place of running it, but only if everything else is right.
        code = main.main([*shlex.split(line), "--help"])
        assert code == 0, f"{line}: {capsys.readouterr().err}"
    assert found
