"""docs/reliability.md and its tests' page name all promises, tests and scenarios that exist."""

from __future__ import annotations

import itertools
import re

import pytest
from harness.chaos import ROUNDS, SCENARIOS
from harness.checker import History, check

from mqmesh.storage.interface import FlushDiskType, StoreConfig

EVENTS = (
    "process kill",
    "OS crash, power cut",
    "full disk",
    "failed sync",
    "a segment that is truncated or deleted from outside while the broker runs",
    "a sector that cannot be read",
    "bit rot",
)


@pytest.fixture(scope="module")
def promises(project_root):
    return (project_root / "docs" / "reliability.md").read_text()


@pytest.fixture(scope="module")
def text(project_root):
    return (project_root / "docs" / "reliability-tests.md").read_text()


def rows(text, heading, head="| "):
    """Cells of the first table under a heading that begins with ``head``, without its head."""
    part = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = itertools.dropwhile(lambda line: not line.startswith(head), part.splitlines())
    table = list(itertools.takewhile(lambda line: line.startswith("| "), lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def named_tests(cell):
    return re.findall(r"`(test_\w+)`", cell)


def test_every_mode_and_event_has_one_promise_with_its_proof(promises, text):
    proofs = {(mode, event): proof for mode, event, proof in rows(text, "Proofs")}
    seen = []
    for mode, event, *columns in rows(promises, "The promises", "| flush mode |"):
        assert all(columns), event
        assert named_tests(proofs[mode, event]), f"nothing proves {mode}, {event}"
        modes = [one.value for one in FlushDiskType] if mode == "both" else [mode.strip("`")]
        seen += [(one, event) for one in modes]
    wanted = itertools.product([one.value for one in FlushDiskType], EVENTS)
    assert sorted(seen) == sorted(wanted)


def test_every_scenario_has_its_row_and_its_test(text):
    table = rows(text, "Scenarios")
    assert [name.strip("`") for name, _, _ in table] == list(SCENARIOS)
    # Scenes with PostgreSQL, or with many programs, take too long for each build.
    long = [test for *_, test in table if test.startswith("long runs only")]
    assert len(long) == 2
    assert all(len(named_tests(test)) == 1 for *_, test in table if test not in long)


def test_every_chaos_test_of_a_scenario_is_named(text, project_root):
    source = (project_root / "tests" / "process" / "test_chaos.py").read_text()
    harming = re.findall(r"^def (test_\w+)\((?:harm|short_tmp_path)\)", source, re.MULTILINE)
    assert sorted(harming) == sorted(named_tests(str(rows(text, "Scenarios"))))


def test_the_invariants_are_the_checkers(text):
    names = [row[0] for row in rows(text, "What is checked")]
    # By ``simulation.deliveries``, and D4 by ``simulation.key_books``.
    received = [name for name in names if name.startswith("D")]
    assert received == ["D1", "D2", "D3", "D4", "D5", "D6"]
    # P15 by ``simulation.processing`` and ``processing_scene``.
    assert "P15" in names
    # T by ``simulation.tables``, K by ``table_rounds``.
    tables = [name for name in names if name[0] in "TK"]
    assert tables == [f"{letter}{number}" for letter in "TK" for number in range(1, 6)]
    others = [name for name in names if name not in [*received, *tables, "P15"]]
    assert others == [verdict.invariant for verdict in check(History()).verdicts]


def test_metrics_are_those_of_the_code(promises, text):
    assert f"({StoreConfig().flush_interval_commitlog_ms} ms)" in promises
    assert f"with {ROUNDS} kills" in text
