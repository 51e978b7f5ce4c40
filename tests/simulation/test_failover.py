"""Seeds in which a follower becomes the master: what double write promises, holds."""

from __future__ import annotations

from unittest import mock

import pytest
from harness.simulation.failover import FailoverRun
from harness.simulation.run import run_seed
from simulation.test_seeds import simulate

from mqmesh.roles.broker.commit_point import CommitPoint
from mqmesh.storage.commitlog.log_applier import LogApplier
from mqmesh.units import MAX_OFFSET

SEEDS = 5
MOST_SEEDS = 40


def first_violation(*bugs) -> str | None:
    """What the first seed says that finds a bug, None if none does."""
    for seed in range(MOST_SEEDS):
        for bug in bugs:
            bug.start()
        try:
            outcome = run_seed(seed, kind=FailoverRun)
        finally:
            for bug in bugs:
                bug.stop()
        if outcome.violations:
            return outcome.violations[0]
    return None


@pytest.mark.timeout(600)
def test_nothing_acknowledged_is_lost_with_a_machine_whatever_the_seed():
    done = simulate("--failover", "--seed", "0", "--count", str(SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SEEDS} seeds, 0 failed" in done.stdout


def safe_at_once(self):
    return MAX_OFFSET


@pytest.mark.timeout(600)
def test_a_master_that_acknowledges_alone_is_found():
    found = first_violation(mock.patch.object(CommitPoint, "offset", safe_at_once))
    assert found is not None


@pytest.mark.timeout(600)
def test_a_follower_that_does_not_know_what_producers_sent_before_is_found():
    class Forgetful(LogApplier):
        def _apply_batch(self, record, header):
            note, self._states.note = self._states.note, lambda *arguments: None
            super()._apply_batch(record, header)
            self._states.note = note

    bug = mock.patch("mqmesh.storage.commitlog.store.LogApplier", Forgetful)
    assert first_violation(bug) is not None
