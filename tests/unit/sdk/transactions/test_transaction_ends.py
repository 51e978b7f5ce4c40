"""Decisions on their way to brokers, without a network."""

from __future__ import annotations

import pytest
from harness.hand_network import HandNetwork

from mqmesh.errors import (
    BrokerNotAvailable,
    ClientClosed,
    EndpointUnreachable,
    MessageIllegal,
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
from mqmesh.sdk.client.outbox import WATCH_MS
from mqmesh.sdk.transactions.transaction_ends import PAUSE_MS, EndSender, HalfPlace

COMMIT, ROLLBACK = Decision.COMMIT, Decision.ROLLBACK
PLACE = HalfPlace("broker-a", 100, 7, 50, b"proof of senders")


class Engine(HandNetwork):
    """Plays the client's engine; answers as brokers do."""

    def outcomes(self, *outcomes: EndOutcome, status: int = 0) -> None:
        assert len(decode_ends(self.asked[0].body)) == len(outcomes)
        header = memoryview(encode_header(EndTransactionResponse(status)))
        self.answer(Command(0, 1, 1, header, memoryview(encode_end_outcomes(outcomes))))


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
        for end in decode_ends(engine.asked[-1].body)
    ]


def test_what_is_decided_together_goes_together(engine, add, told):
    for ordinal in (2, 0, 1, 7):
        add(ordinal)
    add(5, ROLLBACK)
    engine.run()
    assert sorted(sent(engine)) == [(100, 0, 3, 1), (100, 5, 1, 2), (100, 7, 1, 1)]
    engine.outcomes(EndOutcome.ENDED, EndOutcome.ENDED, EndOutcome.ENDED)
    assert told == dict.fromkeys((0, 1, 2, 5, 7), EndOutcome.ENDED)


def test_what_comes_meanwhile_shares_the_next_request(engine, add, told):
    add(0)
    engine.run()
    add(1)
    add(2)
    engine.run()
    assert len(engine.asked) == 1
    engine.outcomes(EndOutcome.ENDED)
    assert sent(engine) == [(100, 1, 2, 1)]


def test_one_that_is_different_does_not_decide_for_its_neighbours(engine, add, told):
    for ordinal in range(3):
        add(ordinal)
    engine.run()
    engine.outcomes(EndOutcome.DECIDED_OTHERWISE)
    assert told == {}
    assert sent(engine) == [(100, 0, 1, 1), (100, 1, 1, 1), (100, 2, 1, 1)]
    engine.outcomes(EndOutcome.ENDED_BEFORE, EndOutcome.DECIDED_OTHERWISE, EndOutcome.ENDED_BEFORE)
    assert told[1] is EndOutcome.DECIDED_OTHERWISE
    assert told[0] is told[2] is EndOutcome.ENDED_BEFORE


@pytest.mark.parametrize(
    "error", [RequestTimeout("late"), EndpointUnreachable("gone"), BrokerNotAvailable("starting")]
)
def test_what_may_go_away_is_tried_again_until_the_time_is_over(engine, add, told, error):
    add(0, wait_ms=1_000)
    engine.run()
    engine.answer(error)
    engine.run(PAUSE_MS)
    engine.outcomes(EndOutcome.ENDED)
    assert told == {0: EndOutcome.ENDED}
    add(1, wait_ms=1_000)
    engine.run()
    engine.clock.advance(1_000)
    engine.answer(error)
    assert told[1] is error


def test_a_refusal_is_final(engine, add, told):
    add(0)
    engine.run()
    error = MessageIllegal("no")
    engine.answer(error)
    assert told == {0: error}


def test_a_decision_that_is_not_on_the_disk_in_time_is_told(engine, add, told):
    add(0)
    engine.run()
    engine.outcomes(EndOutcome.ENDED, status=1)
    assert "FLUSH_DISK_TIMEOUT" in str(told[0])


def test_again_means_again(engine, add, told):
    add(0)
    engine.run()
    engine.outcomes(EndOutcome.AGAIN)
    assert told == {}
    engine.run(PAUSE_MS)
    engine.outcomes(EndOutcome.ENDED_BEFORE)
    assert told == {0: EndOutcome.ENDED_BEFORE}


def test_what_nobody_remembers_after_a_lost_answer_is_told_as_unknown(engine, add, told):
    add(0)
    engine.run()
    engine.answer(RequestTimeout("lost"))
    engine.run(PAUSE_MS)
    engine.outcomes(EndOutcome.NOT_PENDING)
    assert isinstance(told[0], RequestTimeout)
    add(1)
    engine.run()
    engine.outcomes(EndOutcome.NOT_PENDING)
    assert told[1] is EndOutcome.NOT_PENDING


def test_without_a_connection_it_waits_no_longer_than_it_may(engine, add, told):
    engine.away.add("broker-a")
    add(0, wait_ms=PAUSE_MS)
    engine.run()
    assert not engine.asked
    add(1, wait_ms=10_000)
    for _ in range(3):
        engine.run(WATCH_MS)
    assert isinstance(told[0], EndpointUnreachable)
    engine.away.clear()
    engine.run(WATCH_MS)
    engine.outcomes(EndOutcome.ENDED)
    assert told[1] is EndOutcome.ENDED


def test_closing_ends_all_of_it_and_nothing_new_comes_in(engine, add, told):
    add(0)
    engine.run()
    sender = add(1)
    error = ClientClosed("closed")
    sender.end_all(error)
    assert told == {0: error, 1: error}
    engine.answer(RequestTimeout("late"))
    assert told == {0: error, 1: error}
    with pytest.raises(ClientClosed):
        add(2)
