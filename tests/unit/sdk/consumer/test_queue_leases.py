"""Locks of queues: when a message may be begun, and when not."""

from __future__ import annotations

import pytest

from mqmesh.errors import EndpointUnreachable, MQMeshError, StaleGeneration
from mqmesh.message import MessageQueue
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import (
    LOCK_HELD_BY_OTHER,
    LOCK_PENDING,
    LockBatchRequest,
    LockBatchResponse,
    LockEntry,
)
from mqmesh.sdk.consumer.queue_leases import ASK_AGAIN_MS, TICK_MS, TRUST_MS, QueueLeases
from mqmesh.testing.clock import ManualClock

A, B = MessageQueue("t", "broker-a", 0), MessageQueue("t", "broker-b", 0)
C = MessageQueue("t", "broker-a", 1)
LEASE_MS, RENEW_MS = 60_000, 20_000
CONFIRMED_MS = 3_000
"""Lease that copies confirm."""


class Case:
    """Leases whose broker and clock are the test."""

    def __init__(self):
        self.clock = ManualClock()
        self.requests = []
        self.lost = []
        self.regained = 0
        self.acquired = []
        self.leases = QueueLeases(
            "g",
            "me",
            self,
            self.clock,
            renew_ms=RENEW_MS,
            on_lost=self.lost.append,
            on_regained=self._on_regained,
        )

    def _on_regained(self):
        self.regained += 1

    def request(self, broker_name, code, on_done, *, header, timeout_ms):
        assert code == RequestCode.LOCK_BATCH_MQ
        self.requests.append((broker_name, decode_header(LockBatchRequest, header), on_done))

    def call_later(self, delay_ms, callback):
        raise AssertionError("no timers here")

    def answer(self, token, lease_ms=LEASE_MS):
        """Answers the first request: all its queues get the same."""
        _, request, on_done = self.requests.pop(0)
        if isinstance(token, MQMeshError):
            on_done(token)
            return request
        entries = [LockEntry(one.topic, one.queue_id, token) for one in request.queues]
        header = encode_header(LockBatchResponse(lease_ms, entries))
        on_done(Command(0, 0, 1, memoryview(header), memoryview(b"")))
        return request

    def acquire(self, queue=A, token=7, lease_ms=LEASE_MS):
        self.leases.acquire(
            queue.broker_name, [queue], lambda granted, refused: self.acquired.append(granted)
        )
        self.answer(token, lease_ms)
        return self.leases.lease(queue)

    def run(self, ms):
        """Lets time pass as it does for a client that is well."""
        for _ in range(ms // TICK_MS):
            self.clock.advance(TICK_MS)
            self.leases.tick()


@pytest.fixture
def case():
    """A consumer without queues."""
    return Case()


def test_what_is_granted_may_be_consumed(case):
    assert case.acquire().holds()
    assert case.acquired == [[A]]


def test_a_lease_tells_the_token_of_its_lock(case):
    lease = case.acquire(token=7)
    assert lease.token == 7
    case.leases.forget([A])
    assert (case.leases.lease(A).token, case.acquire(token=9).token) == (0, 9)


def test_another_token_is_another_lease(case):
    old, new = case.acquire(token=7), case.acquire(token=9)
    assert (old.token, old.holds(), new.token, new.holds()) == (7, False, 9, True)


@pytest.mark.parametrize(
    "answer", [LOCK_HELD_BY_OTHER, LOCK_PENDING, StaleGeneration("no member"), MQMeshError("bad")]
)
def test_what_is_not_granted_may_not(case, answer):
    assert not case.acquire(token=answer).holds()
    assert case.acquired == [[]]
    case.run(1_000)
    assert not case.requests


def test_a_lease_goes_on_while_the_client_is_well(case):
    lease = case.acquire()
    for _ in range(10):
        case.run(10_000)
        assert lease.holds()
        while case.requests:
            assert case.answer(7).queues == [LockEntry("t", 0, 7)]
    assert not case.lost


def test_it_is_renewed_each_20_seconds(case):
    case.acquire()
    case.run(RENEW_MS - TICK_MS)
    assert not case.requests
    case.run(TICK_MS)
    assert len(case.requests) == 1


def test_a_client_that_stood_still_asks_before_the_next_message(case):
    lease = case.acquire()
    case.clock.advance(TRUST_MS)
    assert not lease.holds()
    case.leases.tick()
    assert not lease.holds()
    case.answer(7)
    assert lease.holds()
    assert case.regained == 2


def test_a_machine_that_slept_asks_before_the_next_message(case, monkeypatch):
    lease = case.acquire()
    woken_ms = case.clock.monotonic_ms() + 3_600_000
    monkeypatch.setattr(case.clock, "boot_ms", lambda: woken_ms)
    assert not lease.holds()
    case.leases.tick()
    assert not lease.holds()
    case.answer(7)
    assert lease.holds()


def test_a_client_that_stood_still_for_less_goes_on(case):
    lease = case.acquire()
    case.clock.advance(TRUST_MS - 1)
    assert lease.holds()
    case.leases.tick()
    case.clock.advance(TRUST_MS - 1)
    assert lease.holds()
    assert not case.requests


def test_an_answer_that_waited_while_the_client_stood_still_proves_nothing(case):
    lease = case.acquire()
    case.run(RENEW_MS)
    case.clock.advance(30_000)
    case.leases.tick()
    case.answer(7)
    assert not lease.holds()
    case.run(ASK_AGAIN_MS + TICK_MS)
    case.answer(7)  # asked after the pause
    assert lease.holds()


def test_an_answer_that_is_read_first_after_the_client_stood_still_proves_nothing(case):
    lease = case.acquire()
    case.run(RENEW_MS)
    case.clock.advance(TRUST_MS)
    case.answer(7)
    assert not lease.holds()


@pytest.mark.parametrize("late_ms", [TRUST_MS, 2 * TRUST_MS, CONFIRMED_MS - TICK_MS])
def test_a_lease_that_was_lost_holds_again_however_long_copies_took_to_confirm_it(case, late_ms):
    lease = case.acquire(lease_ms=CONFIRMED_MS)
    case.run(CONFIRMED_MS)
    assert not lease.holds()
    case.answer(EndpointUnreachable("gone"))
    case.run(TICK_MS)
    case.run(late_ms)
    case.answer(7, lease_ms=CONFIRMED_MS)
    assert lease.holds()
    case.clock.advance(CONFIRMED_MS - late_ms)
    assert not lease.holds(), "it counts from when it was asked for"


def test_an_answer_that_comes_after_its_lease_proves_nothing(case):
    lease = case.acquire(lease_ms=CONFIRMED_MS)
    case.run(CONFIRMED_MS // 3)
    case.run(CONFIRMED_MS)
    case.answer(7, lease_ms=CONFIRMED_MS)
    assert not lease.holds()


def test_confirmations_of_a_second_and_more_keep_a_lease(case):
    lease = case.acquire(lease_ms=CONFIRMED_MS)
    for _ in range(10):
        case.run(CONFIRMED_MS // 3)  # asked
        case.run(1_250)
        case.answer(7, lease_ms=CONFIRMED_MS)
        assert lease.holds()
        assert not case.requests


def test_while_a_request_has_no_answer_there_is_no_other(case):
    lease = case.acquire(lease_ms=CONFIRMED_MS)
    case.acquire(C, 8, lease_ms=CONFIRMED_MS)
    case.run(10 * CONFIRMED_MS)
    assert [request.queues for _, request, _ in case.requests] == [
        [LockEntry("t", 0, 7), LockEntry("t", 1, 8)]
    ]
    case.answer(MQMeshError("no answer in time"))
    case.run(TICK_MS)
    assert len(case.requests) == 1
    case.answer(7, lease_ms=CONFIRMED_MS)
    assert lease.holds()


def test_a_new_connection_does_not_wait_for_answers_of_the_one_before(case):
    lease = case.acquire(lease_ms=CONFIRMED_MS)
    case.run(CONFIRMED_MS)
    case.leases.broker_changed("broker-a", up=False)
    case.leases.broker_changed("broker-a", up=True)
    assert len(case.requests) == 2
    case.answer(EndpointUnreachable("gone"))  # of the former one
    case.run(CONFIRMED_MS // 3)
    assert len(case.requests) == 1
    case.answer(7, lease_ms=CONFIRMED_MS)
    assert lease.holds()


def test_without_its_connection_no_message_is_begun(case):
    lease = case.acquire()
    case.leases.broker_changed("broker-b", up=False)
    assert lease.holds()
    case.leases.broker_changed("broker-a", up=False)
    assert not lease.holds()
    case.run(TICK_MS * 4)
    assert not lease.holds()


def test_a_new_connection_asks_at_once_and_goes_on_with_the_same_token(case):
    lease = case.acquire()
    case.leases.broker_changed("broker-a", up=False)
    case.leases.broker_changed("broker-a", up=True)
    assert case.requests[0][1].queues == [LockEntry("t", 0, 7)]
    case.answer(7)
    assert lease.holds()
    assert not case.lost


def test_what_an_earlier_connection_promised_does_not_count(case):
    lease = case.acquire()
    case.run(RENEW_MS)
    case.leases.broker_changed("broker-a", up=False)
    case.answer(7)
    assert not lease.holds()


@pytest.mark.parametrize("answer", [LOCK_HELD_BY_OTHER, 8])
def test_a_queue_that_another_member_had_meanwhile_is_lost(case, answer):
    lease = case.acquire()
    case.leases.broker_changed("broker-a", up=False)
    case.leases.broker_changed("broker-a", up=True)
    case.answer(answer)
    assert case.lost == [A]
    assert not lease.holds()
    assert not case.leases.lease(A).holds()
    case.run(60_000)
    assert not case.requests


def test_a_broker_that_waits_for_former_holders_is_asked_until_it_knows(case):
    lease = case.acquire()
    case.leases.broker_changed("broker-a", up=False)
    case.leases.broker_changed("broker-a", up=True)
    for _ in range(5):
        case.answer(LOCK_PENDING)
        assert not lease.holds()
        case.run(TICK_MS)
    case.answer(7)
    assert lease.holds()
    assert not case.lost


def test_a_broker_that_cannot_be_reached_ends_the_lease(case):
    lease = case.acquire()
    for _ in range(LEASE_MS // TICK_MS - 1):
        case.run(TICK_MS)
        assert lease.holds()
        while case.requests:
            case.answer(EndpointUnreachable("gone"))
    case.run(TICK_MS)
    assert not lease.holds()
    case.run(TICK_MS)
    case.answer(7)
    assert lease.holds()


def test_a_short_lease_is_obeyed(case):
    lease = case.acquire()
    case.run(RENEW_MS)
    case.answer(7, lease_ms=400)
    assert lease.holds()
    case.clock.advance(400)
    assert not lease.holds()


def test_what_was_given_up_is_asked_for_no_more(case):
    lease = case.acquire()
    other = case.acquire(B, 9)
    case.leases.forget([A, A])
    assert not lease.holds()
    case.run(RENEW_MS)
    assert [name for name, _, _ in case.requests] == ["broker-b"]
    assert other.holds()


def test_an_answer_for_a_queue_given_up_meanwhile_revives_nothing(case):
    lease = case.acquire()
    case.run(RENEW_MS)
    case.leases.forget([A])
    case.answer(7)
    assert not lease.holds()
    assert not case.lost


def test_an_answer_that_cannot_be_read_grants_nothing(case):
    case.leases.acquire("broker-a", [A], lambda granted, refused: case.acquired.append(refused))
    header = encode_header(LockBatchResponse(LEASE_MS, []))
    case.requests.pop()[2](Command(0, 0, 1, memoryview(header), memoryview(b"")))
    assert case.acquired == [[A]]
