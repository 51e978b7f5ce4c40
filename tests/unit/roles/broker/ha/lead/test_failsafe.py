"""A leader without copies goes on while the coordinator is away, while nobody else can lead."""

from __future__ import annotations

import pytest

from mqmesh.coordination.interface import AckReplicas, GroupState, MemberIncarnation
from mqmesh.roles.broker.ha.lead.failsafe import Failsafe, VoteAbstention
from mqmesh.roles.broker.ha.lead.lease import ISOLATED_MS

TTL_MS = 3_000
STATE = GroupState(
    log_id=7,
    epoch=5,
    master=1,
    in_sync=tuple(MemberIncarnation(one, 1) for one in (1, 2, 3)),
    mode=AckReplicas.NONE,
)


def test_nobody_is_asked_while_the_session_is_renewed_and_all_each_quarter_when_it_is_not():
    failsafe = Failsafe(TTL_MS)
    assert not failsafe.must_ask(TTL_MS // 2 + 1, 100)
    assert failsafe.must_ask(TTL_MS // 2, 100)
    assert not failsafe.must_ask(0, 100 + TTL_MS // 4 - 1)
    assert failsafe.must_ask(-5_000, 100 + TTL_MS // 4)


def test_it_holds_while_all_have_promised_and_counts_from_when_they_were_asked():
    failsafe = Failsafe(TTL_MS)
    failsafe.on_promised(2, 1_000)
    assert not failsafe.holds({2, 3}, 1_000), "replica 3 may be elected"
    failsafe.on_promised(3, 1_500)
    until_ms = 1_000 + TTL_MS - ISOLATED_MS
    assert failsafe.holds({2, 3}, until_ms - 1)
    assert not failsafe.holds({2, 3}, until_ms)
    failsafe.on_promised(2, 2_000)
    failsafe.on_promised(2, 500)
    assert failsafe.holds({2, 3}, until_ms), "what came late takes nothing back"


def test_where_nobody_else_can_be_elected_no_promise_is_needed():
    assert Failsafe(TTL_MS).holds((), 10**9)
    assert not Failsafe(TTL_MS, is_enabled=False).holds((), 0)
    assert not Failsafe(TTL_MS, is_enabled=False).must_ask(0, 0)


def left(
    still: VoteAbstention, now_ms: int, state: GroupState = STATE, *, me: int = 2, last: int = 5
):
    return still.left_ms(state, me, last, now_ms)


def test_who_has_promised_holds_still_for_that_time():
    still = VoteAbstention()
    assert left(still, 0) == 0
    still.promise(2_000)
    still.promise(1_000)
    assert left(still, 500) == 1_500
    assert left(still, 2_000) == 0


@pytest.mark.parametrize(
    ("me", "last_epoch", "master", "left_ms"),
    [
        (2, 5, 1, 3_000),  # it may have promised something to replica 1 before it was started
        (1, 5, 1, 0),  # it is the leader itself, started again
        (1, 4, 1, 3_000),  # the record names it, and it has never led that epoch
        (2, 5, None, 0),  # a new group
    ],
)
def test_a_start_counts_as_a_promise_but_for_the_leader_itself(me, last_epoch, master, left_ms):
    still = VoteAbstention(started_until_ms=TTL_MS)
    state = GroupState(
        log_id=7, epoch=5, master=master, in_sync=STATE.in_sync, mode=AckReplicas.NONE
    )
    assert left(still, 0, state, me=me, last=last_epoch) == left_ms


def test_where_copies_confirm_nobody_holds_still():
    state = GroupState(log_id=7, epoch=5, master=1, in_sync=STATE.in_sync, mode=AckReplicas.ALL)
    assert left(VoteAbstention(5_000, 5_000), 0, state) == 0
