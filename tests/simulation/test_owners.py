"""Members of ordered groups come and go while masters are lost: a queue has one owner at a time."""

from __future__ import annotations

import pytest
from harness.simulation.owners import OwnersRun
from harness.simulation.run import run_seed
from simulation.planted import OWNERS_BUGS, run_planted

SEEDS = 3
"""One of each mode; scripts/simulate --owners runs more."""
MOST_SEEDS = 40
HINTS = {
    "a lock answered before it is confirmed": 1,
    "a lock relied on longer than the next master keeps it": 0,
}
"""Seeds that found each bug when they were counted last."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_queue_has_one_owner_whoever_leads_whatever_the_seed(seed):
    assert run_seed(seed, kind=OwnersRun).violations == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", OWNERS_BUGS)
def test_a_planted_mistake_about_owners_is_found(name):
    first = HINTS[name]
    seeds = range(first, first + MOST_SEEDS)
    assert any(run_planted(name, seed).violations for seed in seeds)
