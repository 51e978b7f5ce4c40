"""Seeds with security on: the same promises hold, and strangers get nothing in."""

from __future__ import annotations

from unittest import mock

import pytest
from harness.simulation.run import run_seed
from simulation.test_seeds import simulate

from mqmesh.security.guard import Guard


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "count"), [("", 4), ("--election", 2)])
def test_with_security_on_all_promises_hold_and_strangers_are_refused(kind, count):
    done = simulate(*kind.split(), "--secure", "--seed", "0", "--count", str(count))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} seeds, 0 failed" in done.stdout


def test_a_right_that_nobody_looks_up_is_found():
    with mock.patch.object(Guard, "check_topic"):
        outcome = run_seed(0, secure=True)
    assert any("S1: reader sent a message" in one for one in outcome.violations)
    assert outcome.replay == "scripts/simulate --seed 0 --secure"
