"""Who stands, who wins, and by which record."""

from __future__ import annotations

import msgspec
import pytest

from mqmesh.coordination.interface import (
    AckReplicas,
    Conflict,
    CoordinatorUnavailable,
    GroupState,
    GroupView,
    LiveReplica,
    MemberIncarnation,
    OutcomeUnknown,
    Presence,
    SessionId,
    StateRecord,
)
from mqmesh.roles.broker.ha.effects import (
    AskToStand,
    ChangeRecord,
    Fence,
    Follow,
    Lead,
    ReadRecord,
)
from mqmesh.roles.broker.ha.election import (
    ELECTION_MS,
    OTHERS_WAIT_MS,
    Election,
    FenceAnswer,
    Suspicion,
    standing_delay_ms,
    suspicion_of,
)

TTL_MS = 3_000
EVERYBODY = tuple(MemberIncarnation(number, 1) for number in (1, 2, 3))
ALL = GroupState(log_id=7, epoch=4, master=3, in_sync=EVERYBODY, mode=AckReplicas.ALL)
QUORUM = msgspec.structs.replace(ALL, mode=AckReplicas.QUORUM, copies=2)


def replace(state, **changes):
    return msgspec.structs.replace(state, **changes)


def answer(number, end=100, *, epoch=4, incarnation=1, **more):
    return FenceAnswer(MemberIncarnation(number, incarnation), epoch, end, **more)


def candidate(state=ALL, *, incarnation=1, is_unclean=False) -> Election:
    """Replica 1 stands at the time 0 and has read the record, version 9."""
    one = Election(MemberIncarnation(1, incarnation))
    assert one.stand("for a test", 0, is_unclean=is_unclean) == [ReadRecord()]
    (fence,) = one.on_read(StateRecord(9, state), 0, leader_lives=False)
    assert fence == Fence(5, (1, 2, 3))
    return one


def elect(one, *answers, now_ms=0):
    """What the last answer brings."""
    found = []
    for each in answers:
        found = one.on_fence_answer(5, each, now_ms)
    return found


def wanted(effects) -> GroupState:
    (change,) = effects
    assert isinstance(change, ChangeRecord)
    assert change.version == 9
    return change.state


@pytest.mark.parametrize("state", [ALL, QUORUM, replace(ALL, mode=AckReplicas.NONE)])
def test_the_best_of_all_leads_in_the_next_epoch(state):
    one = candidate(state)
    change = wanted(elect(one, answer(1), answer(2, 99), answer(3, 100)))
    assert (change.epoch, change.master, change.in_sync) == (5, 1, EVERYBODY)
    assert change.unclean_since == 0
    assert change.reason == "for a test"
    assert one.on_outcome(10, 0) == [Lead(StateRecord(10, change))]


@pytest.mark.parametrize(
    "better",
    [answer(2, 101), answer(2, 1, epoch=5), answer(2, 100, preferred=True)],
)
def test_who_has_the_better_position_is_told_to_stand(better):
    told, stop = elect(candidate(), answer(1), better, answer(3, 0))
    assert told == AskToStand(2)
    assert isinstance(stop, Follow)


def test_with_one_position_the_lower_id_leads():
    assert wanted(elect(candidate(), answer(1), answer(2), answer(3))).master == 1


def test_in_mode_all_who_answered_is_the_new_set():
    one = candidate()
    assert elect(one, answer(1)) == []
    assert one.tick(OTHERS_WAIT_MS - 1) == []
    assert elect(one, answer(2, 50), now_ms=OTHERS_WAIT_MS - 1) == []
    assert wanted(one.tick(OTHERS_WAIT_MS)).in_sync == EVERYBODY[:2]


def test_in_mode_quorum_the_voters_stay_and_so_many_must_answer():
    one = candidate(QUORUM)
    assert elect(one, answer(1)) == []
    assert one.tick(ELECTION_MS - 1) == []
    assert elect(one, answer(2, 50), now_ms=800) == []
    assert wanted(one.tick(800 + OTHERS_WAIT_MS)).in_sync == EVERYBODY


def test_nothing_is_decided_before_the_candidate_itself_has_promised():
    one = candidate()
    elect(one, answer(2, 0), answer(3, 0))
    assert one.tick(500) == []
    assert wanted(elect(one, answer(1), now_ms=500)).master == 1


def test_another_incarnation_is_no_member():
    one = candidate(QUORUM)
    elect(one, answer(1), answer(2, 500, incarnation=2))
    assert one.tick(ELECTION_MS - 1) == []
    one = candidate()
    assert wanted(elect(one, answer(1), answer(2, 500, incarnation=2), answer(3, 50))).in_sync == (
        EVERYBODY[0],
        EVERYBODY[2],
    )


def test_who_lost_records_lets_another_stand():
    one = candidate(incarnation=2)
    told, _ = elect(one, answer(1, 500, incarnation=2), answer(2, 50), answer(3, 50))
    assert told == AskToStand(2)


@pytest.mark.parametrize(
    ("state", "members"),
    [
        (ALL, (MemberIncarnation(1, 2),)),
        (QUORUM, (MemberIncarnation(1, 2), *EVERYBODY[1:])),
    ],
)
def test_when_all_lost_records_the_best_of_all_leads_and_the_record_says_so(state, members):
    one = candidate(state, incarnation=2)
    lost = [answer(number, 100, incarnation=2) for number in (1, 2, 3)]
    assert elect(one, *lost[:2]) == []
    assert one.tick(ELECTION_MS - 1) == []
    change = wanted(elect(one, lost[2], now_ms=ELECTION_MS - 1))
    assert change.unclean_since == 5
    assert change.in_sync == members


def test_a_bad_disk_leads_nowhere_and_is_no_reason_to_lose_records():
    one = candidate()
    found = wanted(elect(one, answer(1), answer(2, 500, can_lead=False), answer(3)))
    assert found.in_sync == (EVERYBODY[0], EVERYBODY[2])
    one = candidate(QUORUM)
    bad = [answer(number, 500, can_lead=False) for number in (2, 3)]
    assert elect(one, answer(1), *bad) == []
    assert one.tick(ELECTION_MS - 1) == []


def test_an_administrator_may_elect_one_alone():
    one = candidate(QUORUM, incarnation=2, is_unclean=True)
    change = wanted(elect(one, answer(1, 10, incarnation=2)))
    assert (change.unclean_since, change.in_sync[0]) == (5, MemberIncarnation(1, 2))


@pytest.mark.parametrize(
    ("state", "leader_lives"),
    [(ALL, True), (None, False), (replace(ALL, in_sync=EVERYBODY[1:]), False)],
)
def test_some_stop_at_what_they_read(state, leader_lives):
    one = Election(EVERYBODY[0])
    one.stand("for a test", 0)
    (stop,) = one.on_read(StateRecord(9, state), 0, leader_lives=leader_lives)
    assert isinstance(stop, Follow)
    assert one.stand("again", 1) == [ReadRecord()]


def test_answers_of_another_election_do_not_count():
    one = candidate()
    assert one.on_fence_answer(4, answer(1), 0) == []
    assert one.on_fence_answer(6, answer(1), 0) == []
    assert one.answers == {}


def test_a_higher_promise_ends_the_candidature():
    one = candidate()
    assert one.on_stale(5) == []
    (stop,) = one.on_stale(6)
    assert isinstance(stop, Follow)
    assert elect(one, answer(1), answer(2), answer(3)) == []


def test_it_ends_after_a_while():
    one = candidate(QUORUM)
    (stop,) = one.tick(ELECTION_MS)
    assert isinstance(stop, Follow)
    assert one.tick(ELECTION_MS + 1) == []


def changing():
    one = candidate()
    return one, wanted(elect(one, answer(1), answer(2), answer(3)))


def test_who_was_first_is_followed():
    one, _ = changing()
    newer = StateRecord(10, replace(ALL, epoch=5, master=2))
    assert one.on_outcome(Conflict("another", newer), 0) == [Follow("another was first", newer)]


def test_a_change_of_the_set_meanwhile_ends_it_too():
    one, _ = changing()
    newer = StateRecord(10, replace(ALL, in_sync=EVERYBODY[1:]))
    assert one.on_outcome(Conflict("another", newer), 0) == [Follow("another was first", newer)]


def test_an_outcome_that_nobody_knows_is_read():
    one, change = changing()
    assert one.on_outcome(OutcomeUnknown("?"), 0) == [ReadRecord()]
    assert one.on_read(StateRecord(9, ALL), 0, leader_lives=False) == [ChangeRecord(9, change)]
    assert one.on_outcome(OutcomeUnknown("?"), 0) == [ReadRecord()]
    assert one.tick(199) == []
    assert one.tick(200) == [ReadRecord()]
    ours = StateRecord(10, change)
    assert one.on_read(ours, 300, leader_lives=False) == [Lead(ours)]


def test_a_conflict_with_the_own_change_is_a_victory():
    one, change = changing()
    one.on_outcome(OutcomeUnknown("?"), 0)
    one.on_read(StateRecord(9, ALL), 0, leader_lives=False)
    ours = StateRecord(10, change)
    assert one.on_outcome(Conflict("it is there", ours), 0) == [Lead(ours)]


def test_a_change_that_was_not_made_ends_it():
    one, _ = changing()
    (stop,) = one.on_outcome(CoordinatorUnavailable("gone"), 0)
    assert isinstance(stop, Follow)
    assert one.on_outcome(10, 0) == []


def view(state=ALL, *ages, ends=(100, 100, 100), **presence):
    """Replicas 1 to 3, those whose age is not None."""
    members = [
        LiveReplica(
            SessionId(str(number)),
            Presence(group="g", replica_id=number, end_offset=end, **presence),
            age,
        )
        for number, (age, end) in enumerate(zip(ages, ends, strict=True), 1)
        if age is not None
    ]
    return GroupView("g", StateRecord(9, state), tuple(members))


@pytest.mark.parametrize(
    ("state", "ages", "silent_ms", "suspicion"),
    [
        (ALL, (0, 0, 0), 0, Suspicion.NONE),
        (ALL, (0, 0, None), 0, Suspicion.SESSION_ENDED),
        (ALL, (0, 0, 1_499), 1_200, Suspicion.BAD_LINK),
        (ALL, (0, 0, 1_500), 1_200, Suspicion.SILENT),
        (ALL, (0, 0, 1_500), 1_199, Suspicion.NONE),
        (replace(ALL, mode=AckReplicas.NONE), (0, 0, 1_500), 9_000, Suspicion.NONE),
        (replace(ALL, mode=AckReplicas.NONE), (0, 0, None), 0, Suspicion.SESSION_ENDED),
        (replace(ALL, master=None), (0, 0, 0), 0, Suspicion.NOBODY),
        (replace(ALL, master=1), (0, 0, 0), 0, Suspicion.NAMED),
        (replace(ALL, in_sync=EVERYBODY[1:]), (0, 0, None), 9_000, Suspicion.NONE),
        (None, (0, 0, None), 9_000, Suspicion.NONE),
        (replace(ALL, paused=True), (0, 0, None), 0, Suspicion.PAUSED),
        (replace(ALL, paused=True), (0, 0, 1_500), 1_200, Suspicion.PAUSED),
        (replace(ALL, paused=True, master=1), (0, 0, 0), 0, Suspicion.NAMED),
        (replace(ALL, paused=True, master=None), (0, 0, 0), 0, Suspicion.NOBODY),
    ],
)
def test_what_a_replica_thinks_of_its_leader(state, ages, silent_ms, suspicion):
    found = suspicion_of(view(state, *ages), 1, silent_ms=silent_ms, ttl_ms=TTL_MS)
    assert found is suspicion
    rests = (Suspicion.NONE, Suspicion.BAD_LINK, Suspicion.PAUSED)
    assert found.stands == (suspicion not in rests)


@pytest.mark.parametrize(
    ("state", "ages", "silent_ms", "suspicion"),
    [
        (ALL, (0, 0, None), 1_499, Suspicion.RESTARTING),
        (ALL, (0, 0, None), 1_500, Suspicion.SESSION_ENDED),
        (ALL, (0, 0, 1_500), 1_200, Suspicion.SILENT),
        (replace(ALL, master=1), (None, 0, 0), 0, Suspicion.NAMED),
    ],
)
def test_a_leader_whose_process_ended_has_time_to_come_back(state, ages, silent_ms, suspicion):
    group = view(state, *ages)
    found = suspicion_of(group, 1, silent_ms=silent_ms, ttl_ms=TTL_MS, restart_ms=1_500)
    assert found is suspicion
    assert found.stands == (suspicion is not Suspicion.RESTARTING)


@pytest.mark.parametrize(
    ("state", "ages", "silent_ms", "minimum", "suspicion"),
    [
        (ALL, (0, 0, 0), 2_500, 2, Suspicion.CUT_OFF),
        (QUORUM, (0, 0, 0), 2_500, 1, Suspicion.CUT_OFF),
        (replace(QUORUM, mode=AckReplicas.ONE), (0, 0, 0), 2_500, 1, Suspicion.CUT_OFF),
        (QUORUM, (0, 0, 0), 2_499, 1, Suspicion.BAD_LINK),
        # As many as are needed to confirm are not there without the leader.
        (ALL, (0, None, 0), 9_000, 2, Suspicion.BAD_LINK),
        (QUORUM, (0, None, 0), 9_000, 1, Suspicion.BAD_LINK),
        (replace(QUORUM, voters=(1, 3)), (0, 0, 0), 9_000, 1, Suspicion.BAD_LINK),
        (replace(QUORUM, paused=True), (0, 0, 0), 2_500, 1, Suspicion.PAUSED),
        (replace(ALL, mode=AckReplicas.NONE), (0, 0, 0), 9_000, 1, Suspicion.NONE),
    ],
)
def test_a_leader_that_says_it_is_cut_off_is_replaced_if_others_can_confirm(
    state, ages, silent_ms, minimum, suspicion
):
    group = view(state, *ages, is_cut_off=True)
    found = suspicion_of(group, 1, silent_ms=silent_ms, ttl_ms=TTL_MS, minimum=minimum)
    assert found is suspicion
    assert found.stands == (suspicion is Suspicion.CUT_OFF)


def test_whoever_replaces_a_leader_that_lives_needs_as_many_as_confirm():
    """In mode all the candidate alone would be safe; here it has to be able to confirm, too."""
    state = replace(ALL, in_sync=(EVERYBODY[0], EVERYBODY[2]), voters=(1, 2, 3))
    one = Election(MemberIncarnation(1, 1))
    one.stand("cut off", 0, least=2)
    (fence,) = one.on_read(StateRecord(9, state), 0, leader_lives=False)
    assert fence == Fence(5, (1, 2, 3)), "one that is not in sync can be brought in sync"
    assert elect(one, answer(1)) == []
    assert one.tick(ELECTION_MS - 1) == []
    assert elect(one, answer(2, 50), now_ms=ELECTION_MS - 1) == []
    (found,) = one.tick(ELECTION_MS)
    assert isinstance(found, Follow)
    one.stand("cut off", 0, least=2)
    one.on_read(StateRecord(9, state), 0, leader_lives=False)
    assert elect(one, answer(1), answer(2, 500)) == []
    assert wanted(one.tick(OTHERS_WAIT_MS)).in_sync == EVERYBODY[:1]


def test_the_best_position_stands_first():
    group = view(ALL, 0, 0, 0, ends=(100, 300, 200))
    assert [standing_delay_ms(group, number, 149) for number in (1, 2, 3)] == [149, 49, 99]


def test_who_is_not_seen_by_the_coordinator_stands_behind_the_others():
    group = view(ALL, None, 0, None)
    assert standing_delay_ms(group, 1, 0) == 50
    assert standing_delay_ms(group, 2, 0) == 0
