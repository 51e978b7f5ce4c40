"""Members of ordered groups come and go while masters are lost: a queue has one owner at a time."""

from __future__ import annotations

import pytest
from simulation.test_seeds import simulate

SEEDS = 3
"""One of each mode; scripts/simulate --owners runs more."""


@pytest.mark.timeout(300)
def test_a_queue_has_one_owner_whoever_leads_whatever_the_seed():
    done = simulate("--owners", "--seed", "0", "--count", str(SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SEEDS} seeds, 0 failed" in done.stdout
