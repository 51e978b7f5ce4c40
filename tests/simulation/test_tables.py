"""Registers of a table while masters are lost: no write is lost, doubled, or wrongly founded."""

from __future__ import annotations

import pytest
from simulation.test_seeds import simulate

SEEDS = 3
"""They take some 10 s of a processor; scripts/simulate --tables runs more."""


@pytest.mark.timeout(300)
def test_writes_by_revision_follow_one_another_over_failovers():
    done = simulate("--tables", "--seed", "0", "--count", str(SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SEEDS} seeds, 0 failed" in done.stdout
