"""Handing the lead over: who may take it, and what happens to sends and confirmations meanwhile."""

from __future__ import annotations

import msgspec
import pytest

from mqmesh.coordination.interface import (
    AckReplicas,
    Conflict,
    CoordinatorUnavailable,
    GroupState,
    MemberIncarnation,
    OutcomeUnknown,
    StateRecord,
)
from mqmesh.errors import InvalidArgument, NotMaster
from mqmesh.roles.broker.ha.confirm import AckPolicy
from mqmesh.roles.broker.ha.effects import ChangeRecord, Follow, ReadRecord, ResumeSends
from mqmesh.roles.broker.ha.in_sync import REREAD_MS
from mqmesh.roles.broker.ha.lead.switch_over import (
    MOST_LAG_BYTES,
    OTHERS_LEAVE_MS,
    PATIENCE_MS,
    RETIRE_MS,
    Retirement,
    RetirementStep,
    SwitchOver,
    choose_successor,
)
from mqmesh.roles.broker.ha.leadership import Leadership

ME, SECOND, THIRD = (MemberIncarnation(number, 1) for number in (1, 2, 3))
RECORD = StateRecord(
    7,
    GroupState(
        log_id=1, epoch=4, master=1, in_sync=(ME, SECOND, THIRD), mode=AckReplicas.ALL, copies=1
    ),
)


def leading(end: int = 1_000, **has: int) -> Leadership:
    """The leader of epoch 4; ``_2=900`` is a follower that is connected and has so much."""
    made = Leadership(
        RECORD,
        ME,
        AckPolicy(AckReplicas.ALL, 2, refuses_below=True),
        marker_end=0,
        log_end=lambda: end,
        lag_max_ms=3_000,
        counts_synced=False,
    )
    made.on_own(end)
    for name, position in has.items():
        made.on_opened(MemberIncarnation(int(name[1:]), 1), position, position, 0)
    return made


def switching(leadership: Leadership, mark: int = 1_000) -> SwitchOver:
    made = SwitchOver(leadership, 2, mark, PATIENCE_MS, "why")
    made.begin()
    return made


def test_whoever_has_most_takes_over_and_the_lower_id_of_equals():
    assert choose_successor(leading(_2=900, _3=1_000), 1_000) == 3
    assert choose_successor(leading(_2=1_000, _3=1_000), 1_000) == 2
    assert choose_successor(leading(_2=900, _3=1_000), 1_000, wanted=2) == 2
    assert choose_successor(leading(_2=900, _3=1_000), 1_000, preferred={1, 2}) == 2


@pytest.mark.parametrize(
    ("wanted", "why"),
    [(1, "leads already"), (3, "is not connected"), (4, "not in sync"), (2, "lacks")],
)
def test_who_cannot_take_over_is_refused_with_the_reason(wanted, why):
    end = MOST_LAG_BYTES + 1_001
    with pytest.raises(InvalidArgument, match=why):
        choose_successor(leading(end, _2=1_000), end, wanted)


def test_one_whose_disk_takes_no_writes_is_no_successor():
    leadership = leading(_2=1_000, _3=900)
    assert choose_successor(leadership, 1_000, unable={2}) == 3
    with pytest.raises(InvalidArgument, match="replica 2 takes no writes"):
        choose_successor(leadership, 1_000, 2, unable={2})


def test_with_nobody_there_nobody_takes_over():
    with pytest.raises(InvalidArgument, match=r"replica 2 is not connected; replica 3 is not"):
        choose_successor(leading(), 1_000)


def test_one_of_another_incarnation_is_no_member():
    leadership = leading()
    leadership.on_opened(MemberIncarnation(2, 9), 1_000, 1_000, 0)
    with pytest.raises(InvalidArgument, match="replica 2 is not connected"):
        choose_successor(leadership, 1_000, 2)


def test_sends_are_refused_from_the_beginning():
    leadership = leading(_2=1_000, _3=1_000)
    leadership.check()
    switching(leadership)
    with pytest.raises(NotMaster, match="replica 2 takes over"):
        leadership.check()


def test_the_record_changes_once_the_successor_has_all():
    leadership = leading(_2=900, _3=900)
    switch = switching(leadership)
    assert switch.tick(10) == []
    leadership.on_ack(2, 4, 1_000, 1_000, 1_000, 20)
    (change,) = switch.tick(20)
    assert isinstance(change, ChangeRecord)
    assert (change.version, change.state.epoch, change.state.master) == (7, 5, 2)
    assert change.state.in_sync == RECORD.state.in_sync
    assert switch.tick(30) == [], "it is asked for once"
    (end,) = switch.on_outcome(8, 40)
    assert end == Follow("replica 2 leads", StateRecord(8, change.state))


def test_nothing_is_confirmed_from_the_change_on():
    leadership = leading(_2=1_000, _3=900)
    switch = switching(leadership)
    assert switch.tick(10)
    leadership.on_ack(3, 4, 1_000, 1_000, 1_000, 20)
    assert leadership.confirmed() == 900


def test_a_successor_has_what_is_confirmed_not_only_what_there_was():
    leadership = leading(_2=900, _3=1_000)
    leadership.log.confirmed = 950  # as in a quorum, by others
    switch = switching(leadership, mark=800)
    assert switch.tick(10) == []


def test_a_successor_that_is_late_changes_nothing():
    leadership = leading(_2=900, _3=900)
    switch = switching(leadership)
    assert switch.tick(PATIENCE_MS - 1) == []
    (end,) = switch.tick(PATIENCE_MS)
    assert isinstance(end, ResumeSends)
    leadership.check()


def test_a_change_that_was_not_made_lets_all_go_on():
    leadership = leading(_2=1_000, _3=900)
    switch = switching(leadership)
    switch.tick(10)
    (end,) = switch.on_outcome(CoordinatorUnavailable("away"), 20)
    assert end == ResumeSends("away")
    leadership.check()
    leadership.on_ack(3, 4, 1_000, 1_000, 1_000, 30)
    assert leadership.confirmed() == 1_000


def test_an_unknown_outcome_is_read_until_it_is_known():
    leadership = leading(_2=1_000, _3=900)
    switch = switching(leadership)
    (change,) = switch.tick(10)
    assert switch.on_outcome(OutcomeUnknown("?"), 20) == []
    assert switch.tick(20 + REREAD_MS - 1) == []
    assert switch.tick(20 + REREAD_MS) == [ReadRecord()]
    assert switch.on_read(RECORD, 300) == [change], "it was not made, and may be still"
    leadership.on_ack(3, 4, 1_000, 1_000, 1_000, 310)
    assert leadership.confirmed() == 900
    made = StateRecord(8, change.state)
    assert switch.on_read(made, 400) == [Follow("another replica leads", made)]


def test_a_conflict_with_a_later_epoch_ends_the_leadership():
    switch = switching(leading(_2=1_000, _3=1_000))
    (change,) = switch.tick(10)
    other = StateRecord(9, change.state)
    assert switch.on_outcome(Conflict("late", other), 20) == [
        Follow("another replica leads", other)
    ]


def test_what_becomes_of_a_change_of_the_set_is_no_matter_of_the_switch_over():
    leadership = leading(_2=1_000, _3=1_000)
    leadership.in_sync.on_follower(3, 1_000, 0, can_store=False)
    (change,) = leadership.in_sync.tick(0)
    switch = switching(leadership)
    assert switch.tick(1) == []
    assert switch.on_outcome(8, 2) == []
    assert leadership.members == [1, 2]
    (change,) = switch.tick(3)
    assert (change.version, change.state.master) == (8, 2)


def step(retirement: Retirement, now_ms: int, *, leads: bool = True, is_switching: bool = False):
    return retirement.step(now_ms, leads=leads, is_switching=is_switching)


def test_a_master_that_is_stopped_hands_over_once_others_could_have_said_that_they_stop_too():
    retirement = Retirement(50)
    assert step(retirement, 50) is RetirementStep.WAIT
    assert step(retirement, 50 + OTHERS_LEAVE_MS) is RetirementStep.HAND_OVER
    assert step(retirement, 200, is_switching=True) is RetirementStep.WAIT
    assert step(retirement, 300, leads=False) is RetirementStep.STOP


def test_a_stop_asks_one_successor_and_waits_no_longer_than_whoever_supervises_it():
    retirement = Retirement(0)
    assert step(retirement, OTHERS_LEAVE_MS) is RetirementStep.HAND_OVER
    assert step(retirement, OTHERS_LEAVE_MS + 1) is RetirementStep.STOP, "it was given up"
    assert step(Retirement(0), 0, leads=False) is RetirementStep.STOP
    assert step(Retirement(0), RETIRE_MS, is_switching=True) is RetirementStep.STOP


def test_a_switch_over_that_is_under_way_is_waited_for_and_none_begun_after_it():
    retirement = Retirement(0)
    assert step(retirement, 0, is_switching=True) is RetirementStep.WAIT
    assert step(retirement, OTHERS_LEAVE_MS) is RetirementStep.STOP


def test_the_record_tells_when_a_preferred_replica_got_the_lead():
    for by_preference, told_ms in ((True, 77), (False, 0)):
        switch = switching(leading(_2=1_000, _3=1_000))
        switch.wall_ms, switch.is_by_preference = 77, by_preference
        (change,) = switch.tick(0)
        assert (change.state.switched_ms, change.state.preferred_ms) == (77, told_ms)


def test_a_leader_that_stops_is_not_waited_for_by_the_next_one_unless_too_few_would_be_left():
    leadership = leading(_2=1_000, _3=1_000)
    switch = switching(leadership)
    switch.leaves = True
    assert [one.state.in_sync for one in switch.tick(0)] == [(SECOND, THIRD)]
    leadership = leading(_2=1_000, _3=1_000)
    leadership.policy = msgspec.structs.replace(leadership.policy, minimum=3)
    switch = switching(leadership)
    switch.leaves = True
    assert [one.state.in_sync for one in switch.tick(0)] == [(ME, SECOND, THIRD)]
