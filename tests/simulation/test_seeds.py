"""Seeds of simulated clusters: whatever goes wrong, what is promised holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SEEDS = 30
"""They take some 10 s of two processors; scripts/simulate runs more."""

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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [3, 5])
def test_a_seed_is_one_course_of_events(seed):
    first, second = (simulate("--seed", str(seed)).stdout for _ in range(2))
    assert "events" in first
    assert first.splitlines()[0] == second.splitlines()[0]


@pytest.mark.timeout(900)
def test_a_cluster_keeps_its_promises_whatever_the_seed():
    done = simulate("--seed", "0", "--count", str(SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SEEDS} seeds, 0 failed" in done.stdout
