"""Seeds in which replicas elect their master: what is acknowledged stays, whoever leads."""

from __future__ import annotations

from unittest import mock

import pytest
from harness.simulation.election import ElectionRun
from harness.simulation.run import run_seed
from simulation.test_seeds import simulate

from mqmesh.protocol.replication import FenceResponse
from mqmesh.roles.broker.ha.confirm import ConfirmedLog
from mqmesh.roles.broker.ha.group_member import GroupMember
from mqmesh.roles.broker.ha.promises import KeptPromises

SEEDS = 8
MOST_SEEDS = 60


def first_violation(*bugs, hint: int) -> str | None:
    """What the first seed says that finds a bug, from the one that found it once; None if none."""
    for seed in range(hint, hint + MOST_SEEDS):
        for bug in bugs:
            bug.start()
        try:
            outcome = run_seed(seed, kind=ElectionRun)
        finally:
            for bug in bugs:
                bug.stop()
        if outcome.violations:
            return outcome.violations[0]
    return None


@pytest.mark.timeout(600)
def test_nothing_acknowledged_is_lost_whoever_leads_whatever_the_seed():
    done = simulate("--election", "--seed", "0", "--count", str(SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SEEDS} seeds, 0 failed" in done.stdout


def test_a_leader_that_goes_on_though_it_promised_to_another_is_found():
    def promise(self, epoch):
        at, state = self._replica.position(), self._promises.state
        return FenceResponse(
            state.replica_id, epoch, state.incarnation, at.last_epoch, at.end, at.can_lead
        )

    bugs = (
        mock.patch.object(GroupMember, "_promise", promise),
        mock.patch.object(GroupMember, "step_down", return_value=None),
        mock.patch.object(KeptPromises, "promise", return_value=None),
    )
    assert first_violation(*bugs, hint=4) is not None


def test_a_leader_that_confirms_alone_is_found():
    def confirmed(self, position):
        self.confirmed = max(self.confirmed, position)
        return self.confirmed

    bug = mock.patch.object(ConfirmedLog, "on_own", confirmed)
    assert first_violation(bug, hint=25) is not None
