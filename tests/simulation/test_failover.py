"""Seeds in which a follower becomes the master: what double write promises, holds."""

from __future__ import annotations

from unittest import mock

import pytest
from harness.simulation.failover import LOST, FailoverRun
from harness.simulation.run import run_seed
from simulation.test_seeds import simulate

from mqmesh.roles.broker.commit_point import CommitPoint
from mqmesh.storage.commitlog.log_applier import LogApplier
from mqmesh.units import MAX_OFFSET

SEEDS = 5
MOST_SEEDS = 40
BEHIND_MS = 500
"""Shorter than a master waits for its follower (``slave_timeout_ms``)."""


class FollowerBehindRun(FailoverRun):
    """The follower gets nothing from its master in the half second before that is lost."""

    def _await_write(self) -> None:
        world = self.world
        world.network.cut(world.brokers[LOST].node, self.follower.node)
        world.simulation.after(BEHIND_MS, super()._await_write)


def first_violation(bug, kind: type[FailoverRun]) -> str | None:
    """Return the first violation of the first seed that finds a bug, None if no seed does."""
    for seed in range(MOST_SEEDS):
        with bug:
            outcome = run_seed(seed, kind=kind)
        if outcome.violations:
            return outcome.violations[0]
    return None


@pytest.mark.timeout(600)
def test_nothing_acknowledged_is_lost_with_a_machine_whatever_the_seed():
    done = simulate("--failover", "--seed", "0", "--count", str(SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SEEDS} seeds, 0 failed" in done.stdout


def test_nothing_acknowledged_is_lost_with_a_master_whose_follower_is_behind():
    assert run_seed(0, kind=FollowerBehindRun).violations == []


def safe_at_once(self):
    return MAX_OFFSET


@pytest.mark.timeout(600)
def test_a_master_that_acknowledges_alone_is_found():
    """By most seeds: 10 of the first 12 when they were counted last."""
    bug = mock.patch.object(CommitPoint, "offset", safe_at_once)
    assert first_violation(bug, FollowerBehindRun) is not None


@pytest.mark.timeout(600)
def test_a_follower_that_does_not_know_what_producers_sent_before_is_found():
    """By one seed of four: 7 of the first 25 when they were counted last."""

    class Forgetful(LogApplier):
        def _apply_batch(self, record, header):
            note, self._states.note = self._states.note, lambda *arguments: None
            super()._apply_batch(record, header)
            self._states.note = note

    bug = mock.patch("mqmesh.storage.commitlog.store.LogApplier", Forgetful)
    assert first_violation(bug, FailoverRun) is not None
