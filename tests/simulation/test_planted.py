"""Every bug that is planted is found by the seed that found it first; CONTRIBUTING lists them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation.planted import BUGS

TESTS = Path(__file__).resolve().parent.parent
FOUND_BY = {
    "an acknowledgement before the write": 0,
    "a commit ahead of the listener": 0,
    "an offset that goes back": 0,
    "a lost retry": 0,
}
"""The first seed that finds each."""


def hunt(name: str, seed: int) -> subprocess.CompletedProcess[str]:
    """Runs a seed with a bug, in a process of its own: a replaced method must not stay."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(TESTS)}
    program = [sys.executable, "-P", "-m", "simulation.planted", name]
    return subprocess.run(
        [*program, "--seed", str(seed), "--count", "1"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_bug_has_a_seed_that_finds_it():
    assert FOUND_BY.keys() == BUGS.keys()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FOUND_BY)
def test_a_planted_bug_is_found(name):
    done = hunt(name, FOUND_BY[name])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"finds {name}" in done.stdout
