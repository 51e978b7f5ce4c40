"""Receives of one topic at one broker: damage, dropping, and what no caller comes for."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from random import Random
from types import SimpleNamespace

import pytest
from harness.batches import encode_flights, stored_batch

from mqmesh.errors import CorruptBatch, EndpointUnreachable, StaleReceipt
from mqmesh.message import Message
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.delivery import (
    MessageLease,
    ReceiveRequest,
    ReceiveResponse,
    SettleAction,
    SettleRequest,
    SettleResponse,
)
from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector
from mqmesh.sdk.consumer.receiving.held_leases import HeldLease
from mqmesh.sdk.consumer.receiving.receive_source import Demand, ReceiveSource
from mqmesh.sdk.consumer.receiving.settler import Settling
from mqmesh.testing.clock import ManualClock

LENGTH_MS = 30_000


def answer_of(struct, *bodies: bytes) -> Command:
    data = memoryview(b"".join(bodies))
    return Command(0, 0, 0, memoryview(encode_header(struct)), data)


def outcomes_of(settlements):
    return [
        (one.lease, SettleAction(one.action), int.from_bytes(one.bits, "little"))
        for one in settlements
    ]


class Case:
    """A source, the requests that it made, and a caller that waits for a minute."""

    client_id = "member"
    namespace = ""
    transport = SimpleNamespace(random=Random(7))

    def __init__(self):
        self.wanted = Demand(10, LENGTH_MS, 61_000)
        self.prefetched = None
        self.loop = SimpleNamespace(clock=ManualClock(monotonic_ms=1_000))
        self.later: deque = deque()
        self.requests: list = []
        self.received, self.hindered, self.buffer, self.lost = [], [], [], []
        self.source = ReceiveSource(
            self,
            "broker-a",
            "group",
            "flights",
            MessageSelector(),
            demand=lambda _: self.wanted,
            prefetch=lambda source: self.prefetched,
            on_received=lambda _, found: self.received.append(found),
            on_hindered=lambda _, error: self.hindered.append(error),
            on_lost=self.lost.append,
            unbuffer=self.unbuffer,
            turn=nullcontext(),
        )

    def call_later(self, _delay_ms, callback):
        self.later.append(callback)

    def post(self, callback):
        self.later.append(callback)

    def request(self, _broker, code, on_answer, *, header, timeout_ms):
        kind = ReceiveRequest if code == RequestCode.RECEIVE_MESSAGE else SettleRequest
        self.requests.append((decode_header(kind, header), on_answer))

    def unbuffer(self, held):
        some, held.buffered = held.buffered, 0
        return held.bits & -(1 << held.bits.bit_length() - some)

    def turn(self):
        for _ in range(len(self.later)):
            self.later.popleft()()

    def asked(self, kind):
        """The first request of a kind that is not answered, and its callback."""
        found = next(one for one in self.requests if isinstance(one[0], kind))
        self.requests.remove(found)
        return found

    def settled(self):
        """The settlements of the next request that has some, which is answered."""
        self.turn()
        for request, _ in self.requests:
            if isinstance(request, ReceiveRequest) and request.settle:
                self.answer(codes=[0] * len(request.settle))
                return outcomes_of(request.settle)
        request, on_answer = self.asked(SettleRequest)
        on_answer(answer_of(SettleResponse([0] * len(request.settlements))))
        return outcomes_of(request.settlements)

    def answer(self, *sizes, damage=None, codes=()):
        """Answers the receive with leases of so many messages; damages the last byte of one."""
        _, on_answer = self.asked(ReceiveRequest)
        on_answer(self.answer_with(*sizes, damage=damage, codes=codes))

    def answer_with(self, *sizes, damage=None, codes=(), lease=1):
        leases, bodies, first = [], [], 0
        for number, size in enumerate(sizes):
            messages = [Message("flights", b"body") for _ in range(size)]
            batch = bytearray(stored_batch(encode_flights(*messages), base_queue_offset=first))
            if number == damage:
                batch[-1] ^= 1
            bodies.append(bytes(batch))
            leases.append(MessageLease(lease + number, 3, first, first + size, size, 1, LENGTH_MS))
            first += size
        return answer_of(ReceiveResponse(leases, list(codes)), *bodies)


@pytest.fixture
def case():
    case = Case()
    assert case.source.receive()
    return case


def test_damage_costs_nothing_before_it_and_what_is_behind_is_given_back(case):
    case.answer(2, 3, 4, damage=1)
    (found,) = case.received
    assert [message.queue_offset for _, some in found.messages for message in some] == [0, 1]
    assert isinstance(case.hindered[-1], CorruptBatch)
    assert case.settled() == [
        (2, SettleAction.RETURN, 0b111),
        (3, SettleAction.RETURN, 0b1111),
    ]


def test_after_damage_the_broker_checks_what_it_reads_until_all_is_well(case):
    case.answer(1, damage=0)
    case.turn()
    request, _ = case.requests[-1]
    assert request.verify
    case.answer(1, codes=[0])
    request, _ = case.asked(ReceiveRequest)
    assert not request.verify


def test_what_comes_after_a_source_was_dropped_is_given_back(case):
    outcomes = []
    case.source.drop(outcomes.append)
    case.answer(2)
    assert case.settled() == [(1, SettleAction.RETURN, 0b11)]
    assert (case.received, outcomes) == ([], [None])
    assert not case.source.receive()


def test_messages_that_no_caller_comes_for_are_given_back(case):
    case.answer(3)
    held = case.source.leases[1]
    held.buffered = 2  # a caller has got the first one
    case.source.tick(2_900, used_ms=1_000)
    assert held.buffered
    case.source.tick(3_000, used_ms=1_000)
    assert case.settled() == [(1, SettleAction.RETURN, 0b110)]
    assert held.bits == 0b001


def test_messages_that_a_caller_comes_for_are_kept(case):
    case.answer(3)
    case.source.tick(12_000, used_ms=11_000)
    assert case.settled() == [(1, SettleAction.EXTEND, 0b111)]


def test_a_report_travels_with_the_receive_of_a_caller_that_will_ask_soon(case):
    case.wanted = None
    case.answer(2)
    held, outcomes = case.source.leases[1], []
    case.prefetched = Demand(10, LENGTH_MS, 0)
    case.source.settler.gather(SettleAction.ACK, [(held, 0b11)], 9_000, outcomes.append)
    case.turn()
    request, _ = case.requests[0]
    assert isinstance(request, ReceiveRequest)
    assert [one.lease for one in request.settle] == [1]
    case.answer(3, codes=[0])
    assert (len(case.received), outcomes) == (2, [None])
    assert not case.requests


def test_a_report_counts_although_the_messages_that_came_with_its_answer_are_damaged(case):
    case.wanted = None
    case.answer(2)
    held, outcomes = case.source.leases[1], []
    case.prefetched = Demand(10, LENGTH_MS, 0)
    case.source.settler.gather(SettleAction.ACK, [(held, 0b11)], 9_000, outcomes.append)
    case.turn()
    case.answer(3, damage=0, codes=[0])
    assert outcomes == [None]


def test_a_source_does_not_take_up_the_receives_of_one_before_it(case):
    (first, _), *_ = case.requests
    other = Case()
    other.source.receive()
    (second, _), *_ = other.requests
    assert first.attempt_id != second.attempt_id


def test_a_report_does_not_wait_for_a_receive_that_waits(case):
    held = HeldLease("broker-a", "flights", MessageLease(7, 0, 0, 1, 1, 1, LENGTH_MS), 1, 60_000)
    case.source.settler.gather(SettleAction.ACK, [(held, 1)], 9_000, lambda error: None)
    assert case.settled() == [(7, SettleAction.ACK, 1)]


def test_a_report_whose_answer_was_lost_is_sent_again(case):
    case.wanted = None
    case.answer(1)
    held, outcomes = case.source.leases[1], []
    case.prefetched = Demand(10, LENGTH_MS, 0)
    case.source.settler.gather(SettleAction.ACK, [(held, 1)], 9_000, outcomes.append)
    for _ in range(2):
        case.turn()
        request, on_answer = case.asked(ReceiveRequest)
        assert len(request.settle) == 1
        on_answer(EndpointUnreachable("broke"))
        case.loop.clock.advance(200)
    assert outcomes == []


def test_a_receive_whose_answer_was_lost_is_repeated_with_its_number(case):
    (first, on_answer), *_ = case.requests
    case.requests.clear()
    on_answer(EndpointUnreachable("broke"))
    case.turn()
    assert case.requests[0][0].attempt_id == first.attempt_id
    case.answer(1)
    assert case.requests[0][0].attempt_id == first.attempt_id + 1


def test_a_report_that_is_refused_for_now_does_not_travel_with_the_next_receives(case):
    case.wanted = None
    case.answer(2)
    held, outcomes = case.source.leases[1], []
    case.prefetched = Demand(10, LENGTH_MS, 0)
    case.source.settler.gather(SettleAction.NACK, [(held, 0b11)], 9_000, outcomes.append)
    case.turn()
    case.wanted = Demand(10, LENGTH_MS, 61_000)
    case.answer(codes=[int(ResponseCode.SYSTEM_BUSY)])
    request, on_answer = case.asked(ReceiveRequest)
    assert (request.settle, outcomes) == ([], [])
    case.loop.clock.advance(200)
    on_answer(answer_of(ReceiveResponse()))
    request, _ = case.asked(ReceiveRequest)
    assert len(request.settle) == 1


def test_a_message_that_somebody_else_has_costs_no_other_of_its_lease(case):
    case.answer(3)
    held, outcomes = case.source.leases[1], []
    for bits in (0b111, 0b010):
        case.source.extend(held, bits, LENGTH_MS, outcomes.append)
    case.turn()
    _, on_answer = case.asked(SettleRequest)
    on_answer(answer_of(SettleResponse([0, int(ResponseCode.STALE_RECEIPT)])))
    assert [type(one) for one in outcomes] == [type(None), StaleReceipt]
    assert (held.bits, case.lost) == (0b101, [])
    case.source.extend(held, held.bits, LENGTH_MS)
    case.turn()
    _, on_answer = case.asked(SettleRequest)
    on_answer(answer_of(SettleResponse([int(ResponseCode.STALE_RECEIPT)])))
    assert case.lost == [held]


# ---- Reports from their callers' threads ----------------------------------------------


def begin_alone(case, bits, wanted=None):
    """A lone report on messages of the first lease, and the outcomes of it."""
    outcomes = []
    held = next(iter(case.source.leases.values()))
    some = [Settling(held, bits, SettleAction.ACK, 60_000, outcomes.append)]
    return case.source.begin_alone(some, wanted), outcomes


@pytest.fixture
def quiet(case):
    """A case with a lease of two messages, where nobody waits for more."""
    case.wanted = None
    case.answer(2)
    return case


def test_a_lone_report_takes_the_next_messages_along(quiet):
    lone, outcomes = begin_alone(quiet, 0b11, Demand(5, 0, 0))
    request = decode_header(ReceiveRequest, lone.header)
    assert (request.max_messages, request.suspend_timeout_ms) == (5, 0)
    assert outcomes_of(request.settle) == [(1, SettleAction.ACK, 0b11)]
    assert quiet.source.receive(Demand(5, 0, 0)) is False, "one receive at a time"
    assert quiet.source.end_alone(lone, quiet.answer_with(3, codes=[0], lease=2))
    assert (outcomes, len(quiet.received), quiet.later) == ([None], 2, deque())
    assert [one.bits for one in quiet.source.leases.values()] == [0b111]


def test_a_lone_report_without_a_demand_only_settles(quiet):
    lone, outcomes = begin_alone(quiet, 0b01)
    assert lone.code == RequestCode.SETTLE_MESSAGES
    assert quiet.source.end_alone(lone, answer_of(SettleResponse([0])))
    assert (outcomes, quiet.source.leases[1].bits, quiet.later) == ([None], 0b10, deque())


def test_who_waits_is_asked_for_after_a_lone_report(quiet):
    lone, _ = begin_alone(quiet, 0b11)
    quiet.wanted = Demand(10, LENGTH_MS, 61_000)
    assert quiet.source.end_alone(lone, answer_of(SettleResponse([0])))
    assert not quiet.requests
    quiet.turn()
    assert isinstance(quiet.requests[0][0], ReceiveRequest)


@pytest.mark.parametrize("demand", [None, Demand(5, 0, 0)])
def test_a_lone_report_that_failed_goes_on_in_the_client_loop(quiet, demand):
    lone, outcomes = begin_alone(quiet, 0b11, demand)
    error = EndpointUnreachable("it broke")
    assert not quiet.source.end_alone(lone, error)
    assert (outcomes, quiet.later) == ([], deque())
    quiet.source.answered(lone, error)
    quiet.loop.clock.advance(200)
    assert quiet.settled() == [(1, SettleAction.ACK, 0b11)]
    assert outcomes == [None]


def test_a_refusal_in_the_answer_to_a_lone_report_is_left_to_the_client_loop(quiet):
    lone, outcomes = begin_alone(quiet, 0b11)
    answer = answer_of(SettleResponse([int(ResponseCode.STALE_RECEIPT)]))
    assert not quiet.source.end_alone(lone, answer)
    quiet.source.answered(lone, answer)
    (error,) = outcomes
    assert isinstance(error, StaleReceipt)


def test_damage_in_the_answer_to_a_lone_report_is_left_to_the_client_loop(quiet):
    lone, outcomes = begin_alone(quiet, 0b11, Demand(5, 0, 0))
    answer = quiet.answer_with(2, damage=0, codes=[0], lease=2)
    assert not quiet.source.end_alone(lone, answer)
    quiet.source.answered(lone, answer)
    assert (outcomes, isinstance(quiet.hindered[-1], CorruptBatch)) == ([None], True)


def test_a_report_is_not_alone_while_others_are_under_way(quiet):
    quiet.source.settler.add(
        Settling(quiet.source.leases[1], 0b01, SettleAction.ACK, 60_000, lambda error: None)
    )
    assert begin_alone(quiet, 0b10)[0] is None
    assert quiet.settled() == [(1, SettleAction.ACK, 0b01)], "the report of before alone"
    quiet.source.dropped = True
    assert begin_alone(quiet, 0b10)[0] is None
