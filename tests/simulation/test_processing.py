"""Members make messages of messages while masters are lost: each input is in the outputs once."""

from __future__ import annotations

import pytest
from simulation.test_seeds import simulate

SEEDS = 3
"""One of each kind of faults; scripts/simulate --processing runs more."""


@pytest.mark.timeout(300)
def test_each_input_is_in_the_outputs_once_over_failovers():
    done = simulate("--processing", "--seed", "0", "--count", str(SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SEEDS} seeds, 0 failed" in done.stdout
