"""A leader with copies that hears nobody takes nothing, until it hears enough again."""

from __future__ import annotations

import pytest

from mqmesh.coordination.interface import AckReplicas, GroupState, MemberIncarnation, StateRecord
from mqmesh.errors import BrokerNotAvailable, NotMaster
from mqmesh.roles.broker.ha.confirm import AckPolicy, ConfirmRule
from mqmesh.roles.broker.ha.in_sync import ACKS_MS
from mqmesh.roles.broker.ha.lead.isolation import CUT_OFF_MS, FollowerWatch, is_isolated
from mqmesh.roles.broker.ha.leadership import Leadership

LATE_MS = 100_000


def leading(
    mode: AckReplicas, *others: int, copies: int = 1, has_lease: bool = False, minimum: int = 1
) -> Leadership:
    me = MemberIncarnation(1, 1)
    members = (me, *(MemberIncarnation(one, 1) for one in others))
    state = GroupState(log_id=1, epoch=4, master=1, in_sync=members, mode=mode, copies=copies)
    made = Leadership(
        StateRecord(7, state),
        me,
        AckPolicy(mode, minimum),
        marker_end=0,
        log_end=lambda: 100,
        lag_max_ms=3_000,
        counts_synced=False,
    )
    made.lease_holds = lambda: has_lease
    made.on_own(100)
    return made


@pytest.mark.parametrize(
    ("mode", "needed"),
    [(AckReplicas.QUORUM, {2}), (AckReplicas.ONE, {3}), (AckReplicas.ALL, {2, 3})],
)
def test_a_leader_without_a_session_goes_on_while_enough_to_confirm_are_heard(mode, needed):
    leadership = leading(mode, 2, 3, copies=2)
    for one in needed:
        leadership.last_seen_ms[one] = LATE_MS - ACKS_MS
    assert not is_isolated(leadership, LATE_MS)
    leadership.is_isolated = is_isolated(leadership, LATE_MS + 1)
    assert leadership.is_isolated
    with pytest.raises(NotMaster, match="neither the coordinator nor enough followers"):
        leadership.check()
    leadership.last_seen_ms = dict.fromkeys(needed, LATE_MS + 1)
    leadership.is_isolated = is_isolated(leadership, LATE_MS + 2)
    leadership.check()


def test_a_session_is_enough_to_go_on_and_so_is_a_set_of_one():
    leadership = leading(AckReplicas.ALL, 2, 3, has_lease=True)
    assert not is_isolated(leadership, LATE_MS)
    alone = leading(AckReplicas.ALL)
    assert not is_isolated(alone, LATE_MS)


def test_while_the_set_changes_enough_of_both_must_be_heard():
    leadership = leading(AckReplicas.ALL, 2)
    leadership.last_seen_ms = {2: LATE_MS}
    bigger = (*leadership.log.rule.members, MemberIncarnation(3, 1))
    leadership.log.on_changing(ConfirmRule(bigger, 3))
    assert is_isolated(leadership, LATE_MS)
    assert leadership.electable == {2, 3}


@pytest.mark.parametrize(
    ("mode", "minimum"), [(AckReplicas.QUORUM, 1), (AckReplicas.ONE, 1), (AckReplicas.ALL, 2)]
)
def test_a_leader_that_hears_too_few_for_a_while_is_cut_off_though_its_session_lives(mode, minimum):
    leadership = leading(mode, 2, 3, copies=2, has_lease=True, minimum=minimum)
    watch, since_ms = FollowerWatch(), LATE_MS + ACKS_MS + 1
    leadership.last_seen_ms = {3: LATE_MS}
    assert not watch.is_cut_off(leadership, LATE_MS + ACKS_MS), "one is enough"
    assert not watch.is_cut_off(leadership, since_ms)
    assert not watch.is_cut_off(leadership, since_ms + CUT_OFF_MS - 1)
    leadership.is_cut_off = watch.is_cut_off(leadership, since_ms + CUT_OFF_MS)
    assert leadership.is_cut_off
    with pytest.raises(BrokerNotAvailable, match="too few replicas in sync are reached"):
        leadership.check()
    leadership.last_seen_ms = {2: since_ms + CUT_OFF_MS}
    assert not watch.is_cut_off(leadership, since_ms + CUT_OFF_MS)
    assert watch.since_ms is None


@pytest.mark.parametrize("mode", [AckReplicas.NONE, AckReplicas.ALL])
def test_a_leader_that_may_acknowledge_alone_is_never_cut_off(mode):
    leadership, watch = leading(mode, 2, 3, has_lease=True), FollowerWatch()
    assert not any(watch.is_cut_off(leadership, at) for at in (LATE_MS, LATE_MS + 60_000))
