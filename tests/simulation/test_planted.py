"""Bugs that are planted are found; the rare ones wander to other seeds with each change."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation.planted import BUGS

TESTS = Path(__file__).resolve().parent.parent
COMMON = (
    "an acknowledgement before the write",
    "a commit ahead of the listener",
    "an offset that goes back",
    "a lost retry",
    "a forgotten half message",
    "an early delay",
)
"""Those that one of the first twenty seeds finds; CONTRIBUTING says what the others take."""


def hunt(name: str) -> subprocess.CompletedProcess[str]:
    """Runs seeds with a bug, in a process of its own: a replaced method must not stay."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(TESTS)}
    program = [sys.executable, "-P", "-m", "simulation.planted", name]
    return subprocess.run(
        [*program, "--count", "20"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_bugs_that_are_looked_for_can_be_planted():
    assert set(COMMON) <= BUGS.keys()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", COMMON)
def test_a_planted_bug_is_found(name):
    done = hunt(name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"finds {name}" in done.stdout
