"""Seeds of clusters whose members acknowledge each message: D1 to D6 hold, whatever goes wrong."""

from __future__ import annotations

import pytest
from simulation.test_seeds import simulate

SEEDS = {(): 6, ("--election",): 3, ("--failover",): 2}
"""They take some 12 s of two processors; scripts/simulate --receive runs more."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("options", "count"), SEEDS.items())
def test_what_is_acknowledged_never_comes_again_and_what_is_not_does_whatever_the_seed(
    options, count
):
    done = simulate("--receive", *options, "--seed", "0", "--count", str(count))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} seeds, 0 failed" in done.stdout
