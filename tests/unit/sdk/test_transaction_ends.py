"""Decisions on their way to brokers, without a network."""

from __future__ import annotations

import pytest

from mqmesh.errors import (
    BrokerNotAvailable,
    ClientClosed,
    EndpointUnreachable,
    MessageIllegal,
    MQMeshError,
    RequestTimeout,
)
from mqmesh.protocol.command import Command, encode_header
from mqmesh.protocol.transactions import (
    Decision,
    EndOutcome,
    EndTransactionResponse,
    decode_ends,
    encode_end_outcomes,
)
from mqmesh.sdk.transactions.transaction_ends import PAUSE_MS, EndSender, HalfPlace
from mqmesh.testing.clock import ManualClock

COMMIT, ROLLBACK = Decision.COMMIT, Decision.ROLLBACK
PLACE = HalfPlace("broker-a", 100, 7, 50, b"proof of senders")


class Engine:
    """Plays the client's engine: one thread, a network that the test answers for."""

    def __init__(self) -> None:
        self.closed = False
        self.connected = True
        self.asked: list[tuple[object, bytes]] = []
        self.posted: list = []
        self.timers: list[tuple[int, object]] = []
        self.clock = ManualClock()
        self.loop = self

    def post(self, callback) -> None:
        self.posted.append(callback)

    def call_later(self, delay_ms, callback) -> None:
        self.timers.append((self.clock.monotonic_ms() + delay_ms, callback))

    def is_connected(self, broker_name) -> bool:
        return self.connected

    def broker(self, broker_name) -> None:
        raise EndpointUnreachable("not there")

    def request(self, broker_name, code, on_done, *parts, header, timeout_ms) -> None:
        self.asked.append((on_done, b"".join(parts)))

    def run(self, ms: int = 0) -> None:
        self.clock.advance(ms)
        while self.posted:
            self.posted.pop(0)()
        now = self.clock.monotonic_ms()
        due, self.timers = (
            [one for one in self.timers if one[0] <= now],
            [one for one in self.timers if one[0] > now],
        )
        for _, callback in due:
            callback()

    def answer(self, *outcomes: EndOutcome, status: int = 0) -> None:
        on_done, body = self.asked.pop(0)
        assert len(decode_ends(body)) == len(outcomes)
        header = memoryview(encode_header(EndTransactionResponse(status)))
        on_done(Command(0, 1, 1, header, memoryview(encode_end_outcomes(outcomes))))

    def fail(self, error: MQMeshError) -> None:
        self.asked.pop(0)[0](error)


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def told():
    """What became of each message."""
    return {}


@pytest.fixture
def add(engine, told):
    sender = EndSender(engine, "g")

    def add(ordinal: int, decision=COMMIT, place=PLACE, wait_ms: int = 3_000) -> EndSender:
        deadline_ms = engine.clock.monotonic_ms() + wait_ms
        sender.add(place, ordinal, decision, deadline_ms, lambda one: told.update({ordinal: one}))
        return sender

    return add


def sent(engine) -> list[tuple[int, int, int, int]]:
    return [
        (end.base_queue_offset, end.first, end.count, end.decision)
        for end in decode_ends(engine.asked[-1][1])
    ]


def test_what_is_decided_together_goes_together(engine, add, told):
    for ordinal in (2, 0, 1, 7):
        add(ordinal)
    add(5, ROLLBACK)
    engine.run()
    assert sorted(sent(engine)) == [(100, 0, 3, 1), (100, 5, 1, 2), (100, 7, 1, 1)]
    engine.answer(EndOutcome.ENDED, EndOutcome.ENDED, EndOutcome.ENDED)
    assert told == dict.fromkeys((0, 1, 2, 5, 7), EndOutcome.ENDED)


def test_what_comes_meanwhile_shares_the_next_request(engine, add, told):
    add(0)
    engine.run()
    add(1)
    add(2)
    engine.run()
    assert len(engine.asked) == 1
    engine.answer(EndOutcome.ENDED)
    assert sent(engine) == [(100, 1, 2, 1)]


def test_one_that_is_different_does_not_decide_for_its_neighbours(engine, add, told):
    for ordinal in range(3):
        add(ordinal)
    engine.run()
    engine.answer(EndOutcome.DECIDED_OTHERWISE)
    assert told == {}
    assert sent(engine) == [(100, 0, 1, 1), (100, 1, 1, 1), (100, 2, 1, 1)]
    engine.answer(EndOutcome.ENDED_BEFORE, EndOutcome.DECIDED_OTHERWISE, EndOutcome.ENDED_BEFORE)
    assert told[1] is EndOutcome.DECIDED_OTHERWISE
    assert told[0] is told[2] is EndOutcome.ENDED_BEFORE


@pytest.mark.parametrize(
    "error", [RequestTimeout("late"), EndpointUnreachable("gone"), BrokerNotAvailable("starting")]
)
def test_what_may_go_away_is_tried_again_until_the_time_is_over(engine, add, told, error):
    add(0, wait_ms=1_000)
    engine.run()
    engine.fail(error)
    engine.run(PAUSE_MS)
    engine.answer(EndOutcome.ENDED)
    assert told == {0: EndOutcome.ENDED}
    add(1, wait_ms=1_000)
    engine.run()
    engine.clock.advance(1_000)
    engine.fail(error)
    assert told[1] is error


def test_a_refusal_is_final(engine, add, told):
    add(0)
    engine.run()
    error = MessageIllegal("no")
    engine.fail(error)
    assert told == {0: error}


def test_a_decision_that_is_not_on_the_disk_in_time_is_told(engine, add, told):
    add(0)
    engine.run()
    engine.answer(EndOutcome.ENDED, status=1)
    assert "FLUSH_DISK_TIMEOUT" in str(told[0])


def test_again_means_again(engine, add, told):
    add(0)
    engine.run()
    engine.answer(EndOutcome.AGAIN)
    assert told == {}
    engine.run(PAUSE_MS)
    engine.answer(EndOutcome.ENDED_BEFORE)
    assert told == {0: EndOutcome.ENDED_BEFORE}


def test_what_nobody_remembers_after_a_lost_answer_is_told_as_unknown(engine, add, told):
    add(0)
    engine.run()
    engine.fail(RequestTimeout("lost"))
    engine.run(PAUSE_MS)
    engine.answer(EndOutcome.NOT_PENDING)
    assert isinstance(told[0], RequestTimeout)
    add(1)
    engine.run()
    engine.answer(EndOutcome.NOT_PENDING)
    assert told[1] is EndOutcome.NOT_PENDING


def test_without_a_connection_it_waits_no_longer_than_it_may(engine, add, told):
    engine.connected = False
    add(0, wait_ms=PAUSE_MS)
    engine.run()
    assert not engine.asked
    add(1, wait_ms=10_000)
    for _ in range(3):
        engine.run(PAUSE_MS)
    assert isinstance(told[0], EndpointUnreachable)
    engine.connected = True
    engine.run(PAUSE_MS)
    engine.answer(EndOutcome.ENDED)
    assert told[1] is EndOutcome.ENDED


def test_closing_ends_all_of_it_and_nothing_new_comes_in(engine, add, told):
    add(0)
    engine.run()
    sender = add(1)
    error = ClientClosed("closed")
    sender.end_all(error)
    assert told == {0: error, 1: error}
    engine.fail(RequestTimeout("late"))
    assert told == {0: error, 1: error}
    with pytest.raises(ClientClosed):
        add(2)
