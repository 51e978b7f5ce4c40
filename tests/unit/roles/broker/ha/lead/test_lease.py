"""How long nobody takes a replica for gone, and what a leader without copies does after it."""

from __future__ import annotations

import pytest

from mqmesh.coordination.interface import AckReplicas, GroupState, MemberIncarnation, StateRecord
from mqmesh.errors import NotMaster
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.environment import commit_point_of
from mqmesh.roles.broker.ha.confirm import AckPolicy
from mqmesh.roles.broker.ha.lead.lease import ISOLATED_MS, RETRY_MS, SessionLease
from mqmesh.roles.broker.ha.leadership import Leadership

TTL_MS = 3_000


def begun(at_ms: int = 1_000) -> SessionLease:
    lease = SessionLease(TTL_MS)
    assert lease.must_ask(at_ms)
    lease.on_begun()
    return lease


def test_it_counts_from_when_it_was_asked_for_and_ends_a_little_early():
    lease = begun(1_000)
    assert lease.holds(1_000 + TTL_MS - ISOLATED_MS - 1)
    assert not lease.holds(1_000 + TTL_MS - ISOLATED_MS)


def test_asking_alone_gives_nothing():
    lease = SessionLease(TTL_MS)
    assert not lease.holds(0)
    assert lease.must_ask(0)
    assert not lease.holds(0)
    lease.on_not_begun(10)
    assert not lease.must_ask(10 + RETRY_MS - 1)
    assert lease.must_ask(10 + RETRY_MS)
    assert not lease.holds(10 + RETRY_MS)


def test_it_is_renewed_each_quarter_one_at_a_time():
    lease = begun(0)
    assert not lease.must_ask(TTL_MS // 4 - 1)
    assert lease.must_ask(TTL_MS // 4)
    assert not lease.must_ask(TTL_MS // 2)
    lease.on_renewed(TTL_MS // 4 + TTL_MS)
    assert lease.must_ask(TTL_MS // 2)
    assert lease.holds(TTL_MS)


def test_without_an_answer_it_holds_for_as_long_as_it_did():
    lease = begun(0)
    assert lease.must_ask(TTL_MS - ISOLATED_MS - 1)
    lease.on_not_renewed()
    assert lease.holds(TTL_MS - ISOLATED_MS - 1)
    assert not lease.holds(TTL_MS - ISOLATED_MS)


def test_what_is_known_does_not_become_less():
    lease = begun(1_000)
    lease.on_renewed(TTL_MS)
    assert lease.deadline_ms == 1_000 + TTL_MS


def test_a_lost_session_holds_nothing_and_another_is_asked_for_at_once():
    lease = begun(0)
    lease.on_lost()
    assert not lease.holds(1)
    assert lease.must_ask(1)


def test_who_gives_way_stays_away():
    lease = begun(0)
    lease.give_up(2_000)
    assert not lease.holds(1)
    assert not lease.must_ask(1_999)
    assert lease.must_ask(2_000)


class Store:
    """A store that ends at 100."""

    @staticmethod
    def log_end() -> int:
        return 100


def leading(mode: AckReplicas, clock: list[int]) -> Leadership:
    me, lease = MemberIncarnation(1, 1), begun(0)
    state = GroupState(log_id=1, epoch=4, master=1, in_sync=(me,), mode=mode)
    made = Leadership(
        StateRecord(7, state),
        me,
        AckPolicy(mode),
        marker_end=0,
        log_end=Store.log_end,
        lag_max_ms=3_000,
        counts_synced=False,
    )
    made.lease_holds = lambda: lease.holds(clock[0])
    made.on_own(100)
    return made


def test_a_leader_without_copies_answers_nothing_once_its_lease_may_be_over():
    clock = [0]
    leadership = leading(AckReplicas.NONE, clock)
    point = commit_point_of(BrokerConfig(), Store, None, leadership)
    leadership.check()
    assert point.is_safe(100)
    clock[0] = TTL_MS
    with pytest.raises(NotMaster, match="lease_ttl_ms"):
        leadership.check()
    assert not point.is_safe(100)  # written before, and not answered yet
    point.wait("a put", 100, clock[0])
    assert point.confirmed(now_ms=0) == []


def test_with_copies_the_lease_decides_nothing():
    clock = [TTL_MS]
    leadership = leading(AckReplicas.ALL, clock)
    leadership.check()
    assert commit_point_of(BrokerConfig(), Store, None, leadership).is_safe(100)


def test_another_time_counts_from_when_a_session_is_asked_for_and_the_shorter_one_at_once():
    lease = SessionLease(10_000)
    assert lease.must_ask(0)
    lease.on_begun()
    assert lease.must_ask(2_500)
    lease.change_ttl(3_000)
    lease.on_renewed(12_500)
    assert lease.must_ask(2_600), "at once"
    lease.on_beginning()
    assert lease.deadline_ms == 5_600, "the new session may have begun"
    lease.on_begun()
    assert lease.deadline_ms == 5_600
    lease.change_ttl(8_000)
    assert lease.must_ask(2_700)
    lease.on_beginning()
    assert lease.deadline_ms == 5_600, "the old session may go on"
    lease.on_begun()
    assert lease.deadline_ms == 10_700
