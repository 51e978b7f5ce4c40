"""Seeds of simulated clusters: whatever goes wrong, what is promised holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SEEDS = 20
"""Of each profile, with and without an administrator, two with the real store; scripts/simulate
runs more."""

TESTS = Path(__file__).resolve().parent.parent


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs seeds in a process of its own: the order of sets, too, is to be that of a replay."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(TESTS)}
    return subprocess.run(
        [sys.executable, "-P", "-m", "harness.simulation.main", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


COURSES = """
import sys
from harness.simulation.election import ElectionRun
from harness.simulation.run import run_seed

for word in sys.argv[1:]:
    option, seed = word.split(":")
    print(word, run_seed(int(seed), kind=ElectionRun) if option else run_seed(int(seed)))
"""
"""What became of seeds, one behind the other in one process."""


def courses(*seeds: str, hash_seed: int) -> list[str]:
    """Return a line for each seed, of a process whose sets are ordered by a hash seed."""
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(TESTS)}
    program = [sys.executable, "-P", "-c", COURSES, *seeds]
    return subprocess.run(
        program, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.timeout(300)
def test_a_seed_is_one_course_of_events_alone_and_behind_others_whatever_the_order_of_sets():
    seeds = (":3", ":5", "election:0", "election:1")
    there, back = courses(*seeds, hash_seed=0), courses(*reversed(seeds), hash_seed=1)
    assert "events=" in there[0]
    assert there == back[::-1]


@pytest.mark.timeout(900)
def test_a_cluster_keeps_its_promises_whatever_the_seed():
    done = simulate("--seed", "0", "--count", str(SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SEEDS} seeds, 0 failed" in done.stdout
