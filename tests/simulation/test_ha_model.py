"""All courses of three replicas within bounds; the search finds every planted mistake."""

from __future__ import annotations

from unittest import mock

import pytest
from harness import ha_model
from harness.ha_model import Step, Violation, World, bounds, explore

from mqmesh.coordination.interface import AckReplicas
from mqmesh.roles.broker.ha import election
from mqmesh.roles.broker.ha.confirm import ConfirmedLog, rule_of
from mqmesh.roles.broker.ha.effects import ChangeRecord
from mqmesh.roles.broker.ha.election import FenceAnswer
from mqmesh.roles.broker.ha.in_sync import InSyncSet, with_voters
from mqmesh.roles.broker.ha.replica_state import ReplicaState

ALL, QUORUM = AckReplicas.ALL, AckReplicas.QUORUM
MOST_STATES = 30_000


@pytest.mark.parametrize(
    ("mode", "within"),
    [
        (ALL, bounds(crashes=1)),
        (ALL, bounds(set_changes=1)),
        (ALL, bounds(unknown=1)),
        (QUORUM, bounds(1)),
        (QUORUM, bounds(power_cuts=1)),
        (QUORUM, bounds(voters=1)),
        (ALL, bounds(voters=1)),
        (ALL, bounds(groups=1)),
        (QUORUM, bounds(groups=1, crashes=1)),
    ],
)
def test_nothing_confirmed_is_lost_within_the_bounds(mode, within):
    told = explore(mode, within, most_states=MOST_STATES)
    assert told.is_exhausted, told.states
    assert told.found is None, (told.found, told.course)


def confirms_by_the_new_set(self):
    """rocketmq#5663."""
    reached = (self.next_rule or self.rule).position(self.positions)
    if reached >= self.marker_end:
        self.confirmed = max(self.confirmed, reached)
    return self.confirmed


def takes_out_at_once(self, change, now_ms):
    wanted = with_voters(self.state, change.voters)
    self.pending = wanted
    if self.log.next_rule is None:
        self.log.on_changing(rule_of(wanted))
    return [ChangeRecord(self.record.version, wanted)]


MISTAKES = {
    "a chunk ends inside of a group": (
        mock.patch.object(ha_model, "chunk_end", lambda log, start: start + 1),
        QUORUM,
        bounds(groups=1),
    ),
    "a start keeps a part of a group": (
        mock.patch.object(ha_model, "recovered", lambda log: log),
        QUORUM,
        bounds(groups=1, crashes=1),
    ),
    "a smaller quorum is made before it has what is confirmed": (
        mock.patch.object(InSyncSet, "_tick_voters", takes_out_at_once),
        QUORUM,
        bounds(voters=1),
    ),
    "a change counts before it is made": (
        mock.patch.object(ConfirmedLog, "_move", confirms_by_the_new_set),
        ALL,
        bounds(set_changes=1),
    ),
    "nobody promises anything": (
        mock.patch.object(ReplicaState, "promise", lambda self, epoch: self),
        QUORUM,
        bounds(),
    ),
    "anybody wins": (
        mock.patch.object(
            FenceAnswer, "rank", property(lambda self: (0, 0, False, -self.member.replica_id))
        ),
        QUORUM,
        bounds(crashes=1),
    ),
    "a quorum shrinks at an election": (
        mock.patch.object(election, "HAS_VOTERS", frozenset()),
        QUORUM,
        bounds(epochs=3, elections=2),
    ),
    "a new incarnation counts as the old one": (
        mock.patch.object(ReplicaState, "started", lambda self, *a, **b: self),
        QUORUM,
        bounds(power_cuts=1),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name):
    patch, mode, within = MISTAKES[name]
    with patch:
        told = explore(mode, within, most_states=MOST_STATES)
    assert told.found is not None, told.states


FIGURE_8: tuple[Step, ...] = (
    ("append", 1),  # it stays with replica 1
    *(("stand", 2), ("fence", 2, 2), ("fence", 2, 3), ("wait_no_longer", 2), ("carry_out", 0)),
    *(("crash", 2), ("read", 1), ("stand", 1), ("fence", 1, 1), ("fence", 1, 3)),
    *(("wait_no_longer", 1), ("carry_out", 0)),
    *(("follow", 3, 3), ("copy", 3), ("ack", 3), ("copy", 3), ("ack", 3)),  # two have it
    *(("crash", 1), ("stand", 2), ("fence", 2, 2), ("fence", 2, 3), ("wait_no_longer", 2)),
    ("carry_out", 0),  # and it is gone
)
"""Metric 8 of the Raft paper: what a leader inherits is with most, and is replaced all the same."""


def run_figure_8() -> World:
    world = World(QUORUM, bounds(1, epochs=4, elections=3, crashes=2))
    for step in FIGURE_8:
        assert step in world.steps()
        world = world.after(step)
    return world


def test_what_is_inherited_is_not_confirmed_by_copies_alone():
    world = run_figure_8()
    assert dict(world.masters) == {1: 1, 2: 2, 3: 1, 4: 2}
    assert world.confirmed == ()


def test_without_the_rule_of_markers_what_was_confirmed_is_lost():
    made = ConfirmedLog._move

    def without_the_rule(self):
        self.marker_end = 0
        return made(self)

    with mock.patch.object(ConfirmedLog, "_move", without_the_rule), pytest.raises(Violation):
        run_figure_8()


TWICE: tuple[Step, ...] = (
    *(("stand", 2), ("fence", 2, 2), ("fence", 2, 3), ("wait_no_longer", 2), ("give_up", 2)),
    *(("stand", 2), ("fence", 2, 2), ("wait_no_longer", 2)),  # for a smaller set
)


def test_the_outcome_of_an_election_that_was_given_up_is_not_taken_for_the_next_one():
    for first in (0, 1):
        world = World(ALL, bounds(elections=3))
        for step in (*TWICE, ("carry_out", first)):
            assert step in world.steps()
            world = world.after(step)
        leader = world.replicas[2].lead
        assert leader is None or leader.log.rule.members == world.record.state.in_sync
