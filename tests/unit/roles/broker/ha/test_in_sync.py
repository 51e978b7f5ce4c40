"""Who is in the in-sync set, and what is confirmed while that changes."""

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
    SessionLost,
    StateRecord,
)
from mqmesh.errors import InvalidArgument
from mqmesh.roles.broker.ha.confirm import ConfirmedLog, rule_of
from mqmesh.roles.broker.ha.effects import Follow, ReadRecord
from mqmesh.roles.broker.ha.in_sync import GONE_MS, InSyncSet

ONE, TWO, THREE = EVERYBODY = tuple(MemberIncarnation(number, 1) for number in (1, 2, 3))
TWO_AGAIN = MemberIncarnation(2, 2)
EPOCH = 5
LOG_END = 1_000


class Leader:
    """Replica 1 leads with a log of 1,000 bytes, of which the first 100 end with the marker."""

    def __init__(self, *members, mode=AckReplicas.ALL, copies=2, voters=()):
        state = GroupState(
            log_id=7,
            epoch=EPOCH,
            master=1,
            in_sync=members,
            mode=mode,
            copies=copies,
            voters=voters,
        )
        self.log = ConfirmedLog(EPOCH, ONE, rule_of(state), 100)
        self.set = InSyncSet(self.log, StateRecord(1, state))
        self.log.on_own(LOG_END)

    def opens(self, member, at=LOG_END, now_ms=0, **more):
        self.log.on_opened(member, at)
        self.log.on_sent(member.replica_id, 10 * LOG_END)
        self.set.on_follower(member.replica_id, LOG_END, now_ms, **more)

    def hears(self, replica_id, at, now_ms, log_end=LOG_END, **more):
        self.log.on_ack(replica_id, EPOCH, at)
        self.set.on_follower(replica_id, log_end, now_ms, **more)

    def proposes(self, now_ms):
        """Whom the set is to have now; None for no change."""
        effects = self.set.tick(now_ms)
        assert len(effects) <= 1
        return effects[0].state.in_sync if effects else None

    def makes(self, now_ms):
        """The change that is due is made."""
        proposed = self.proposes(now_ms)
        assert proposed is not None
        assert self.set.on_outcome(self.set.record.version + 1, now_ms) == []
        return proposed


def test_who_has_all_that_is_confirmed_comes_in():
    leader = Leader(ONE, TWO)
    leader.opens(TWO)
    leader.opens(THREE, 999)
    assert leader.proposes(0) is None
    leader.hears(3, 1_000, 10)
    assert leader.makes(10) == EVERYBODY
    assert leader.log.rule.members == EVERYBODY


def test_nobody_comes_in_without_the_marker_of_the_epoch():
    leader = Leader(ONE, TWO)
    leader.opens(TWO, 0)
    leader.opens(THREE, 99)
    assert leader.log.confirmed == 0
    assert leader.proposes(0) is None
    leader.hears(3, 100, 0)
    assert leader.proposes(0) == EVERYBODY


@pytest.mark.parametrize("can_store", [False, True])
def test_a_full_disk_neither_comes_in_nor_stays(can_store):
    leader = Leader(ONE, TWO)
    leader.opens(TWO, can_store=can_store)
    leader.opens(THREE, can_store=can_store)
    assert leader.proposes(0) == (EVERYBODY if can_store else (ONE,))


def test_who_is_gone_leaves_after_a_while():
    leader = Leader(*EVERYBODY)
    leader.opens(TWO)
    leader.opens(THREE)
    leader.log.on_disconnected(2)
    leader.hears(3, 1_000, 3_001)
    assert leader.proposes(3_000) is None
    assert leader.makes(3_001) == (ONE, THREE)


def test_who_never_came_in_this_epoch_leaves_after_a_while():
    leader = Leader(ONE, TWO)
    assert leader.proposes(500) is None
    assert leader.proposes(3_500) is None
    assert leader.proposes(3_501) == (ONE,)


def test_lag_is_time_and_not_bytes():
    """A follower that is always behind, but never by more than a second, stays."""
    leader = Leader(ONE, TWO)
    leader.opens(TWO)
    for second in range(1, 10):
        leader.hears(2, LOG_END + 500 * (second - 1), second * 1_000, LOG_END + 500 * second)
        assert leader.proposes(second * 1_000) is None


def test_who_takes_too_long_for_what_was_there_leaves():
    leader = Leader(ONE, TWO)
    leader.opens(TWO)
    for step in range(1, 4):
        leader.hears(2, LOG_END + step, step * 1_000, 2 * LOG_END)
    assert leader.proposes(3_000) is None
    assert leader.proposes(3_001) == (ONE,)


def test_one_change_at_a_time():
    leader = Leader(*EVERYBODY)
    leader.opens(TWO, can_store=False)
    leader.opens(THREE)
    assert leader.proposes(0) == (ONE, THREE)
    leader.hears(3, 1_000, 1, can_store=False)
    assert leader.proposes(1) is None
    leader.set.on_outcome(2, 1)
    assert leader.makes(1) == (ONE,)


def test_both_sets_confirm_while_a_change_is_on_its_way():
    leader = Leader(ONE, TWO)
    leader.opens(TWO, 500)
    leader.opens(THREE, 500)
    leader.proposes(0)
    leader.hears(2, 1_000, 0)
    assert leader.log.confirmed == 500
    leader.set.on_outcome(2, 0)
    assert leader.log.confirmed == 500
    leader.hears(3, 700, 0)
    assert leader.log.confirmed == 700


def test_a_change_that_was_not_made_is_made_again():
    leader = Leader(*EVERYBODY)
    leader.opens(TWO, 500, can_store=False)
    leader.opens(THREE, 1_000)
    for outcome in (CoordinatorUnavailable("gone"), SessionLost("over")):
        assert leader.proposes(0) == (ONE, THREE)
        assert leader.set.on_outcome(outcome, 0) == []
        assert leader.log.next_rule is None
        assert leader.log.confirmed == 500


def test_an_outcome_that_nobody_knows_holds_both_sets_until_the_version_moves():
    leader = Leader(*EVERYBODY)
    leader.opens(TWO, 500, can_store=False)
    leader.opens(THREE, 1_000)
    (change,) = leader.set.tick(0)
    assert leader.set.on_outcome(OutcomeUnknown("?"), 0) == [ReadRecord()]
    assert leader.set.on_read(leader.set.record, 0) == [change]
    assert leader.log.next_rule is not None
    assert leader.set.on_outcome(CoordinatorUnavailable("gone"), 100) == []
    assert leader.log.next_rule is not None
    assert leader.set.tick(299) == []
    assert leader.set.tick(300) == [ReadRecord()]
    assert leader.log.confirmed == 500
    assert leader.set.on_read(StateRecord(2, change.state), 300) == []
    assert leader.log.confirmed == 1_000


def test_a_conflict_with_the_own_change_is_its_answer():
    leader = Leader(*EVERYBODY)
    leader.opens(TWO, can_store=False)
    leader.opens(THREE)
    (change,) = leader.set.tick(0)
    leader.set.on_outcome(OutcomeUnknown("?"), 0)
    leader.set.on_read(leader.set.record, 0)
    ours = StateRecord(2, change.state)
    assert leader.set.on_outcome(Conflict("it is there", ours), 0) == []
    assert leader.set.record == ours


def test_who_is_deposed_steps_down_and_confirms_no_more():
    leader = Leader(*EVERYBODY)
    leader.opens(TWO, 500, can_store=False)
    leader.opens(THREE)
    leader.set.tick(0)
    newer = StateRecord(2, msgspec.structs.replace(leader.set.state, epoch=6, master=2))
    (stop,) = leader.set.on_outcome(Conflict("another", newer), 0)
    assert stop == Follow("another replica leads, or will", newer)
    leader.hears(3, 1_000, 0)
    assert leader.log.confirmed == 500


def test_a_change_by_an_administrator_is_taken():
    leader = Leader(ONE, TWO)
    state = msgspec.structs.replace(leader.set.state, in_sync=(ONE,))
    assert leader.set.on_read(StateRecord(2, state), 0) == []
    assert leader.log.rule.members == (ONE,)


def test_a_watch_does_not_end_a_change_whose_answer_will_come():
    leader = Leader(ONE, TWO)
    leader.opens(TWO, can_store=False)
    (change,) = leader.set.tick(0)
    assert leader.set.on_read(StateRecord(2, change.state), 0) == []
    assert leader.set.pending is not None
    leader.set.on_outcome(2, 0)
    assert leader.set.state == change.state


def test_who_comes_and_goes_too_often_waits():
    leader, now_ms = Leader(ONE), 0
    leader.opens(TWO)
    for _ in range(3):
        leader.hears(2, LOG_END, now_ms)
        assert leader.makes(now_ms) == (ONE, TWO)
        leader.hears(2, LOG_END, now_ms, can_store=False)
        assert leader.makes(now_ms) == (ONE,)
        now_ms += 100
    for wait_ms in (10_000, 20_000):
        last_ms = leader.set.followers[2].entered_ms[-1]
        leader.hears(2, LOG_END, last_ms + wait_ms - 1)
        assert leader.proposes(last_ms + wait_ms - 1) is None
        leader.hears(2, LOG_END, last_ms + wait_ms)
        assert leader.makes(last_ms + wait_ms) == (ONE, TWO)
        leader.hears(2, LOG_END, last_ms + wait_ms, can_store=False)
        assert leader.makes(last_ms + wait_ms) == (ONE,)


@pytest.mark.parametrize("mode", [AckReplicas.QUORUM, AckReplicas.ONE])
def test_voters_stay_and_get_the_incarnation_that_they_have(mode):
    leader = Leader(*EVERYBODY, mode=mode)
    leader.opens(TWO_AGAIN, 50)
    leader.opens(THREE, 500)
    assert leader.log.confirmed == 500
    assert leader.proposes(60_000) is None
    leader.hears(2, 499, 60_000)
    assert leader.proposes(60_000) is None
    leader.hears(2, 500, 60_000)
    assert leader.makes(60_000) == (ONE, TWO_AGAIN, THREE)
    leader.hears(2, 800, 60_000)
    assert leader.log.confirmed == 800


def test_in_mode_all_a_new_incarnation_takes_the_place_of_the_old_one():
    leader = Leader(ONE, TWO)
    leader.opens(TWO_AGAIN)
    assert leader.makes(0) == (ONE, TWO_AGAIN)


# ---- Who belongs to the group ------------------------------------------------------------

FOUR = MemberIncarnation(4, 1)


def asks(leader, replica_id, *, adds, minimum=2, deadline_ms=1_000):
    leader.set.change_voters(replica_id, minimum, adds=adds, deadline_ms=deadline_ms)


def changes(leader, now_ms):
    """The state that the record is to get; None for no change."""
    effects = leader.set.tick(now_ms)
    return effects[0].state if effects else None


def test_nobody_comes_in_who_does_not_belong_to_the_group():
    leader = Leader(ONE, TWO, voters=(1, 2))
    leader.opens(TWO)
    leader.opens(THREE)
    assert changes(leader, 0) is None
    asks(leader, 3, adds=True)
    wanted = changes(leader, 0)
    assert (wanted.voters, wanted.in_sync) == ((1, 2, 3), (ONE, TWO))
    leader.set.on_outcome(2, 0)
    assert leader.set.voters_change is None
    assert leader.makes(0) == EVERYBODY


@pytest.mark.parametrize("mode", [AckReplicas.QUORUM, AckReplicas.ONE])
def test_who_was_added_counts_among_the_voters_once_it_has_all_that_is_confirmed(mode):
    leader = Leader(*EVERYBODY, mode=mode, voters=(1, 2, 3, 4))
    leader.opens(TWO)
    leader.opens(FOUR, 999)
    assert changes(leader, 0) is None
    leader.hears(4, LOG_END, 0)
    wanted = changes(leader, 0)
    assert wanted.in_sync == (*EVERYBODY, FOUR)
    assert wanted.copies == (3 if mode is AckReplicas.QUORUM else 2)
    leader.set.on_outcome(2, 0)
    assert leader.log.rule == rule_of(wanted)


def test_who_is_removed_is_in_sync_no_more_and_is_not_waited_for():
    leader = Leader(*EVERYBODY, voters=(1, 2, 3))
    leader.opens(TWO)
    leader.opens(THREE, 500)
    assert leader.log.confirmed == 500
    asks(leader, 3, adds=False)
    wanted = changes(leader, 0)
    assert (wanted.voters, wanted.in_sync) == ((1, 2), (ONE, TWO))
    leader.log.on_own(LOG_END)
    assert leader.log.confirmed == 500, "both rules hold until that is made"
    leader.set.on_outcome(2, 0)
    assert leader.log.confirmed == LOG_END
    assert changes(leader, 0) is None, "it is connected, and comes in no more"


def test_a_smaller_quorum_is_made_once_it_has_all_that_was_confirmed():
    leader = Leader(*EVERYBODY, mode=AckReplicas.QUORUM, voters=(1, 2, 3))
    leader.opens(TWO, 500)
    leader.opens(THREE)
    assert leader.log.confirmed == LOG_END
    asks(leader, 3, adds=False)
    assert changes(leader, 0) is None, "replica 2 lacks what 1 and 3 have"
    leader.hears(2, LOG_END, 10)
    wanted = changes(leader, 10)
    assert (wanted.in_sync, wanted.copies) == ((ONE, TWO), 2)


def test_nothing_more_is_confirmed_by_the_old_rule_alone_while_the_new_one_lags():
    leader = Leader(*EVERYBODY, mode=AckReplicas.QUORUM, voters=(1, 2, 3))
    leader.opens(TWO, 500)
    leader.opens(THREE, 600)
    assert leader.log.confirmed == 600
    asks(leader, 3, adds=False, deadline_ms=1_000)
    assert changes(leader, 0) is None
    leader.hears(3, LOG_END, 10)
    assert leader.log.confirmed == 600
    assert changes(leader, 1_000) is None
    assert leader.set.voters_change is None, "it is given up"
    assert leader.log.confirmed == LOG_END
    assert leader.set.state.voters == (1, 2, 3)


@pytest.mark.parametrize("was_made", [False, True])
def test_a_lost_answer_is_settled_before_another_change(was_made):
    leader = Leader(*EVERYBODY, voters=(1, 2, 3))
    leader.opens(TWO)
    leader.opens(THREE)
    asks(leader, 3, adds=False)
    wanted = changes(leader, 0)
    assert leader.set.on_outcome(OutcomeUnknown("lost"), 0) == [ReadRecord()]
    assert leader.log.next_rule == rule_of(wanted)
    if was_made:
        assert leader.set.on_read(StateRecord(2, wanted), 10) == []
    else:
        (again,) = leader.set.on_read(leader.set.record, 10)
        assert (again.version, again.state) == (1, wanted), "until the version has moved"
        leader.set.on_outcome(2, 20)
    assert leader.set.state.voters == (1, 2)
    assert (leader.set.voters_change, leader.log.next_rule) == (None, None)


def test_a_change_that_another_was_faster_than_is_made_on_what_is_there_then():
    leader = Leader(*EVERYBODY, voters=(1, 2, 3))
    leader.opens(TWO)
    asks(leader, 4, adds=True)
    changes(leader, 0)
    paused = msgspec.structs.replace(leader.set.state, paused=True)
    assert leader.set.on_outcome(Conflict("late", StateRecord(7, paused)), 0) == []
    (again,) = leader.set.tick(0)
    assert (again.version, again.state.voters, again.state.paused) == (7, (1, 2, 3, 4), True)


def test_what_belongs_to_the_group_already_is_no_change():
    leader = Leader(*EVERYBODY, voters=(1, 2, 3))
    asks(leader, 3, adds=True)
    asks(leader, 4, adds=False)
    assert leader.set.voters_change is None


@pytest.mark.parametrize(
    ("mode", "members", "replica_id", "why"),
    [
        (AckReplicas.ALL, EVERYBODY, 1, "is the master: have it hand the lead over"),
        (AckReplicas.ALL, (ONE, TWO), 2, "1 replicas would be in sync, 2 must be"),
        (AckReplicas.ONE, (ONE, TWO), 2, "1 replicas would be left, and 2 must have"),
    ],
)
def test_who_is_needed_cannot_be_removed(mode, members, replica_id, why):
    ids = tuple(one.replica_id for one in members)
    leader = Leader(*members, mode=mode, voters=ids)
    with pytest.raises(InvalidArgument, match=why):
        asks(leader, replica_id, adds=False)


def test_who_is_gone_already_can_be_removed_although_too_few_are_left_in_sync():
    leader = Leader(ONE, voters=(1, 2, 3))
    asks(leader, 3, adds=False)
    assert changes(leader, 0).voters == (1, 2)
    with pytest.raises(InvalidArgument, match=r"replicas \[1, 2\] are to belong to the group"):
        asks(leader, 2, adds=False)


def test_a_lag_is_the_time_since_a_follower_had_all_that_there_was():
    leader = Leader(*EVERYBODY)
    leader.opens(TWO)
    leader.opens(THREE, 500)
    assert leader.set.lags_ms(LOG_END, 300) == {2: 0, 3: 300}
    leader.hears(3, LOG_END, 400, log_end=LOG_END + 50)
    assert leader.set.lags_ms(LOG_END + 50, 1_000) == {2: 1_000, 3: 1_000}
    leader.hears(3, LOG_END + 50, 1_100, log_end=LOG_END + 60)
    assert leader.set.lags_ms(LOG_END + 60, 1_200)[3] == 800, "it had what there was at 400"
    leader.log.on_disconnected(2)
    assert list(leader.set.lags_ms(LOG_END + 60, 1_200)) == [3]


# ---- Who has ended -----------------------------------------------------------------------

ALL_THERE = frozenset({1, 2, 3})


def test_a_member_whose_process_has_ended_is_not_waited_for():
    leader = Leader(*EVERYBODY)
    leader.opens(TWO)
    leader.opens(THREE)
    leader.set.on_sessions(ALL_THERE, 0)
    leader.set.on_sessions(frozenset({1, 2}), 100)
    assert leader.proposes(100 + GONE_MS) is None, "it is connected: the coordinator errs"
    leader.log.on_disconnected(3)
    assert leader.proposes(99 + GONE_MS) is None
    assert leader.makes(100 + GONE_MS) == (ONE, TWO)


def test_a_member_that_ended_before_the_epoch_began_is_not_waited_for_either():
    leader = Leader(*EVERYBODY)
    leader.opens(TWO)
    leader.set.on_sessions(frozenset({1, 2}), 0)
    leader.set.on_sessions(frozenset({1, 2}), GONE_MS)
    assert leader.makes(GONE_MS) == (ONE, TWO)


def test_a_member_that_is_back_at_once_stays():
    leader = Leader(*EVERYBODY)
    leader.opens(TWO)
    leader.opens(THREE)
    leader.set.on_sessions(ALL_THERE, 0)
    leader.log.on_disconnected(3)
    leader.set.on_sessions(frozenset({1, 2}), 0)
    leader.set.on_sessions(ALL_THERE, 100)
    assert leader.proposes(2_000) is None


def test_a_member_that_is_needed_for_the_minimum_has_its_time_to_come_back():
    leader = Leader(ONE, TWO)
    leader.set.fewest = 2
    leader.opens(TWO)
    leader.set.on_sessions(ALL_THERE, 0)
    leader.log.on_disconnected(2)
    leader.set.on_sessions(frozenset({1, 3}), 0)
    assert leader.proposes(3_000) is None
    assert leader.makes(3_001) == (ONE,)


def test_where_sends_wait_for_nobody_nobody_leaves_early():
    leader = Leader(*EVERYBODY, mode=AckReplicas.NONE)
    leader.opens(TWO)
    leader.opens(THREE)
    leader.set.on_sessions(ALL_THERE, 0)
    leader.log.on_disconnected(3)
    leader.set.on_sessions(frozenset({1, 2}), 0)
    assert leader.proposes(3_000) is None


def test_members_that_live_elsewhere_stay_where_too_few_would_be_left():
    """Who leaves the set can be elected no more, and the leader acknowledges nothing alone."""
    leader = Leader(*EVERYBODY)
    leader.set.fewest = 2
    for member in (TWO, THREE):
        leader.opens(member)
    leader.log.on_disconnected(2)
    leader.log.on_disconnected(3)
    assert leader.proposes(3_001) is None
    leader.set.on_sessions(frozenset({1, 2}), 3_001)
    assert leader.makes(3_001) == (ONE, TWO)
    leader.set.on_sessions(frozenset({1}), 9_000)
    assert leader.makes(9_000) == (ONE,), "nobody could be elected anyway"


@pytest.mark.parametrize("can_store", [True, False])
def test_a_member_that_is_heard_and_behind_leaves_whoever_is_left(can_store):
    leader = Leader(ONE, TWO)
    leader.set.fewest = 2
    leader.opens(TWO, 500)
    leader.hears(2, 500, 3_001, can_store=can_store)
    assert leader.makes(3_001) == (ONE,)
