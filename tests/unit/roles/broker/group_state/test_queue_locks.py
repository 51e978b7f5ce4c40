"""The lock table: one holder a queue, whatever breaks, expires or starts again."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from hypothesis.strategies import integers, sampled_from

from mqmesh.errors import SystemBusy
from mqmesh.protocol.membership import LOCK_HELD_BY_OTHER, LOCK_PENDING
from mqmesh.roles.broker.group_state.queue_locks import QueueLocks

LEASE_MS, GRACE_MS = 60_000, 3_000
Q = ("t", 0)


def make(settled_ms=0, free_ms=0, **options):
    locks = QueueLocks(**{"lease_ms": LEASE_MS, "lost_grace_ms": GRACE_MS, "most": 100, **options})
    if settled_ms:
        locks.wait(settled_ms, free_ms)
    return locks


def ask(locks, client, now_ms=0, *, queue=Q, token=0, group="g", peer=None):
    return locks.lock(group, client, (peer or client).encode(), queue, token, now_ms)


def test_a_queue_is_locked_by_one_member():
    locks = make()
    assert ask(locks, "a") > 0
    assert ask(locks, "b") == LOCK_HELD_BY_OTHER
    assert locks.holder("g", Q, 0) == "a"


def test_a_renewed_lock_keeps_its_token():
    locks = make()
    token = ask(locks, "a")
    for now_ms in range(20_000, 200_000, 20_000):
        assert ask(locks, "a", now_ms, token=token) == token
        assert ask(locks, "b", now_ms) == LOCK_HELD_BY_OTHER


def test_a_lock_that_is_not_renewed_ends_with_its_lease():
    locks = make()
    token = ask(locks, "a")
    assert ask(locks, "b", LEASE_MS - 1) == LOCK_HELD_BY_OTHER
    assert ask(locks, "b", LEASE_MS) > token
    assert ask(locks, "a", LEASE_MS, token=token) == LOCK_HELD_BY_OTHER


def test_a_late_holder_that_nobody_replaced_goes_on():
    locks = make()
    token = ask(locks, "a")
    assert ask(locks, "a", LEASE_MS + 5, token=token) == token


def test_a_returning_holder_that_was_replaced_gets_another_token():
    locks = make()
    token = ask(locks, "a")
    assert ask(locks, "b", LEASE_MS) > 0
    assert locks.unlock("g", "b", Q)
    assert ask(locks, "a", LEASE_MS, token=token) > token


def test_only_the_holder_gives_a_lock_back():
    locks = make()
    ask(locks, "a")
    assert not locks.unlock("g", "b", Q)
    assert not locks.unlock("h", "a", Q)
    assert locks.unlock("g", "a", Q)
    assert not locks.unlock("g", "a", Q)
    assert len(locks) == 0
    assert ask(locks, "b") > 0


def test_a_lock_ends_soon_after_its_connection_broke():
    locks = make()
    ask(locks, "a")
    locks.on_disconnect(b"a", 10_000)
    assert ask(locks, "b", 10_000 + GRACE_MS - 1) == LOCK_HELD_BY_OTHER
    assert ask(locks, "b", 10_000 + GRACE_MS) > 0


def test_a_holder_that_comes_back_in_time_keeps_its_lock():
    locks = make()
    token = ask(locks, "a")
    locks.on_disconnect(b"a", 10_000)
    assert ask(locks, "a", 11_000, token=token, peer="a2") == token
    assert ask(locks, "b", 60_000) == LOCK_HELD_BY_OTHER
    locks.on_disconnect(b"a", 61_000)  # the old connection says nothing any more
    assert ask(locks, "b", 70_999) == LOCK_HELD_BY_OTHER


def test_what_a_leaver_did_not_give_back_stays_its_own_until_the_lease_ends():
    locks = make()
    ask(locks, "a")
    locks.on_leave("a", b"a")
    locks.on_disconnect(b"a", 0)
    assert ask(locks, "b", GRACE_MS + 1) == LOCK_HELD_BY_OTHER
    assert ask(locks, "b", LEASE_MS) > 0


def test_nothing_is_granted_until_former_holders_had_time_to_come_back():
    locks = make(settled_ms=3_000, first_token=1_000)
    assert ask(locks, "b", 0) == LOCK_PENDING
    assert ask(locks, "a", 2_999, token=7) == LOCK_PENDING
    assert ask(locks, "b", 3_000) == LOCK_HELD_BY_OTHER
    assert ask(locks, "a", 3_000, token=7) == 1_000
    assert ask(locks, "b", 3_000, queue=("t", 1)) >= 1_000


def test_who_alone_comes_back_may_have_been_replaced_before_the_restart():
    # It stood still, the other had the queue, and gave it up before it could say so.
    locks = make(settled_ms=3_000, first_token=1_000)
    assert ask(locks, "stopped for long", 100, token=5) == LOCK_PENDING
    token = ask(locks, "stopped for long", 3_000, token=5)
    assert token == 1_000
    assert ask(locks, "stopped for long", 3_100, token=token) == token


def test_of_former_holders_the_last_one_counts():
    locks = make(settled_ms=3_000, first_token=1_000)
    for client, token in [("zombie", 5), ("owner", 9), ("zombie", 5)]:
        assert ask(locks, client, 100, token=token) == LOCK_PENDING
    assert ask(locks, "zombie", 3_000, token=5) == LOCK_HELD_BY_OTHER
    assert ask(locks, "owner", 3_000, token=9) == 1_000


def test_a_token_that_no_former_life_gave_counts_for_nothing():
    locks = make(settled_ms=10, first_token=1_000)
    for token in (1_000, 2**63 - 1):
        assert ask(locks, "liar", 0, token=token) == LOCK_PENDING
    assert ask(locks, "a", 10) == 1_000
    assert ask(locks, "b", 10, queue=("t", 1)) == 1_001


def test_after_an_election_who_never_held_a_queue_waits_longer_than_who_did():
    locks = make(settled_ms=3_000, free_ms=6_000, first_token=1_000)
    assert ask(locks, "early", 100, token=7) == LOCK_PENDING
    assert ask(locks, "early", 3_000, token=7) == 1_000
    assert ask(locks, "late", 3_000, queue=("t", 1), token=8) == 1_001
    for token in (0, 1_000):
        assert ask(locks, "new", 5_999, queue=("t", 2), token=token) == LOCK_PENDING
    assert ask(locks, "new", 6_000, queue=("t", 2)) == 1_002


def test_a_former_holder_whose_connection_breaks_again_has_its_while():
    locks = make(settled_ms=3_000, first_token=1_000)
    ask(locks, "a", 100, token=5)
    locks.on_disconnect(b"a", 200)
    assert ask(locks, "b", 3_000) == LOCK_HELD_BY_OTHER
    assert ask(locks, "b", 3_000 + GRACE_MS) > 0


def test_a_former_holder_may_give_up_at_once():
    locks = make(settled_ms=3_000, first_token=1_000)
    ask(locks, "a", 100, token=5)
    assert locks.unlock("g", "a", Q)
    assert ask(locks, "b", 3_000) > 5


def test_a_restored_holder_goes_on_at_once_and_others_wait_until_its_time_is_over():
    locks = make(first_token=1_000)
    for queue_id in (0, 1):
        locks.restore("g", ("t", queue_id), "a", 7 + queue_id, GRACE_MS)
    assert ask(locks, "a", 0, token=7) == 7
    assert ask(locks, "b", 0, queue=("t", 2)) == 1_000  # it was nobody's
    assert ask(locks, "b", GRACE_MS - 1, queue=("t", 1)) == LOCK_HELD_BY_OTHER
    assert ask(locks, "b", GRACE_MS, queue=("t", 1)) == 1_001
    assert ask(locks, "a", GRACE_MS, queue=("t", 1), token=8) == LOCK_HELD_BY_OTHER
    assert ask(locks, "b", GRACE_MS) == LOCK_HELD_BY_OTHER


def test_a_restored_holder_that_was_replaced_before_gets_the_token_of_the_log():
    locks = make(first_token=1_000)
    locks.restore("g", Q, "a", 9, GRACE_MS)
    assert ask(locks, "a", 0, token=7) == 9


def test_restored_locks_count_beyond_the_limit():
    locks = make(most=1)
    for queue_id in (0, 1):
        locks.restore("g", ("t", queue_id), "a", 7, GRACE_MS)
    assert len(locks) == 2
    with pytest.raises(SystemBusy):
        ask(locks, "b", queue=("t", 2))
    locks.tick(GRACE_MS + LEASE_MS)
    assert len(locks) == 0


def test_owners_are_noted_when_they_change_and_not_when_they_renew():
    locks, noted = make(), []
    locks.on_owner = lambda *owner: noted.append(owner)
    token = ask(locks, "a")
    ask(locks, "a", 1, token=token)
    ask(locks, "b", LEASE_MS + 1)
    locks.unlock("g", "b", Q)
    assert noted == [("g", "t", 0)] * 3


def test_locks_are_bounded():
    locks = make(most=2)
    ask(locks, "a", queue=("t", 0))
    ask(locks, "a", queue=("t", 1))
    with pytest.raises(SystemBusy, match="2 locks"):
        ask(locks, "a", queue=("t", 2))
    assert ask(locks, "a", queue=("t", 1)) > 0


def test_old_locks_are_forgotten():
    locks = make()
    ask(locks, "a")
    locks.tick(LEASE_MS * 2 - 1)
    assert len(locks) == 1
    locks.tick(LEASE_MS * 3)
    assert len(locks) == 0
    assert not locks._of_peer


class Machine(RuleBasedStateMachine):
    """Clients that obey their leases: never do two of them believe in a lock at once."""

    def __init__(self):
        super().__init__()
        self.locks = make()
        self.now_ms = 0
        self.believes: dict[str, tuple[int, int]] = {}  # token, end of the lease
        self.tokens: dict[str, int] = {}

    @rule(client=sampled_from("abc"))
    def ask(self, client):
        token = ask(self.locks, client, self.now_ms, token=self.tokens.get(client, 0))
        self.believes.pop(client, None)
        if token > 0:
            self.believes[client] = (token, self.now_ms + LEASE_MS)
            self.tokens[client] = token

    @rule(client=sampled_from("abc"))
    def unlock(self, client):
        self.believes.pop(client, None)
        self.locks.unlock("g", client, Q)

    @rule(client=sampled_from("abc"))
    def disconnect(self, client):
        # The client sees it within the time of grace; here, at once.
        self.believes.pop(client, None)
        self.locks.on_disconnect(client.encode(), self.now_ms)

    @rule(step_ms=integers(0, 90_000))
    def wait(self, step_ms):
        self.now_ms += step_ms
        self.believes = {c: b for c, b in self.believes.items() if b[1] > self.now_ms}
        self.locks.tick(self.now_ms)

    @invariant()
    def one_holder(self):
        assert len(self.believes) <= 1
        for client in self.believes:
            assert self.locks.holder("g", Q, self.now_ms) == client


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_no_two_clients_believe_in_one_lock = Machine.TestCase
