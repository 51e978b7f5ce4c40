"""Failed messages travel back together, once, and nothing is done before the broker says so."""

from __future__ import annotations

import threading

import pytest
from harness.hand_network import HandNetwork

from mqmesh.errors import (
    ClientClosed,
    DiskFull,
    EndpointUnreachable,
    MQMeshError,
    RequestTimeout,
    SystemBusy,
)
from mqmesh.message import MessageQueue
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.retries import (
    MAX_BATCH_MESSAGES,
    MAX_REASON_CHARACTERS,
    SendBackRequest,
    SendBackResponse,
    SendBackResult,
)
from mqmesh.sdk.client.outbox import WATCH_MS
from mqmesh.sdk.consumer.listening.send_back_queue import (
    AGAIN_MS,
    MAX_ENTRIES,
    TRIES,
    SendBackQueue,
    SentBack,
    join,
)

NOTHING = memoryview(b"")


class Case(HandNetwork):
    def __init__(self):
        super().__init__()
        self.outcomes = []
        self.sender = SendBackQueue("g", self, self.may_come, 16, threading.Condition())

    def back(self, first, count=1, reason="E: no", queue=0, broker="a", level=0):
        queue = MessageQueue("t", broker, queue)
        done = self.outcomes.append
        return SentBack(queue, first, count, reason, lambda o: done((first, o)), level)

    def send(self, *messages):
        for one in messages:
            self.sender.send(one)
        self.run()

    def entries(self):
        (asked,) = [one for one in self.asked if one.broker_name == "a"]
        assert asked.code == RequestCode.CONSUMER_SEND_MSG_BACK
        return decode_header(SendBackRequest, memoryview(asked.header))

    def results(self, *results):
        header = encode_header(SendBackResponse(list(results)))
        self.answer(Command(0, 0, 1, memoryview(header), NOTHING))


OK = SendBackResult(0)


def test_what_failed_alike_side_by_side_is_one_entry():
    case = Case()
    case.send(case.back(3), case.back(1), case.back(2), case.back(5), case.back(4, reason="other"))
    entries = case.entries().entries
    assert [(e.queue_offset, e.count, e.reason) for e in entries] == [
        (1, 3, "E: no"),
        (4, 1, "other"),
        (5, 1, "E: no"),
    ]
    assert case.entries().max_reconsume_times == 16
    case.results(OK, SendBackResult(ResponseCode.DISK_FULL, "full"), SendBackResult(0, "", 1))
    told = dict(case.outcomes)
    assert (told[1], told[2], told[3], told[5]) == (0, 0, 0, 1)
    assert told[4].code == ResponseCode.DISK_FULL


@pytest.mark.parametrize(
    "other",
    [{"queue": 1}, {"broker": "b"}, {"reason": "x"}, {"level": 5}],
    ids=["queue", "broker", "reason", "level"],
)
def test_what_differs_is_an_entry_of_its_own(other):
    case = Case()
    assert len(join([case.back(1), case.back(2, **other)])) == 2


def test_an_entry_has_so_many_messages_at_most():
    case = Case()
    half = MAX_BATCH_MESSAGES // 2
    groups = join([case.back(0, half), case.back(half, half), case.back(2 * half, 1)])
    assert [len(group) for group in groups] == [2, 1]


def test_one_request_at_a_time_to_each_broker():
    case = Case()
    case.send(case.back(1), case.back(7, broker="b"))
    case.send(case.back(3))
    assert sorted(one.broker_name for one in case.asked) == ["a", "b"]
    case.results(OK)
    assert [one.broker_name for one in case.asked] == ["b", "a"]


def test_a_request_has_so_many_entries_at_most():
    case = Case()
    case.send(*(case.back(2 * at) for at in range(MAX_ENTRIES + 5)))
    assert len(case.entries().entries) == MAX_ENTRIES
    case.results(*[OK] * MAX_ENTRIES)
    assert len(case.entries().entries) == 5


def test_without_an_answer_it_asks_the_same_again():
    case = Case()
    case.send(case.back(1))
    asked = case.entries()
    for _ in range(TRIES - 1):
        case.answer(RequestTimeout("late"))
        assert case.outcomes == []
        case.run(AGAIN_MS)
        assert case.entries() == asked
    case.answer(RequestTimeout("late"))
    assert isinstance(case.outcomes[0][1], RequestTimeout)


@pytest.mark.parametrize("error", [SystemBusy("busy"), DiskFull("full")])
def test_a_refusal_is_told_at_once(error):
    case = Case()
    case.send(case.back(1), case.back(9))
    case.answer(error)
    assert case.outcomes == [(1, error), (9, error)]


def test_an_answer_that_makes_no_sense_is_a_failure():
    case = Case()
    case.send(case.back(1))
    case.results(OK, OK)
    case.send(case.back(2))
    case.answer(Command(0, 0, 1, memoryview(b"\xc1"), NOTHING))
    assert all(isinstance(outcome, MQMeshError) for _, outcome in case.outcomes)


def test_a_long_reason_is_cut():
    case = Case()
    case.send(case.back(1, reason="x" * 5_000))
    assert len(case.entries().entries[0].reason) == MAX_REASON_CHARACTERS


def test_one_can_wait_for_what_is_under_way():
    case = Case()
    assert case.sender.wait(0)
    case.send(case.back(1))
    assert not case.sender.wait(0)
    case.results(OK)
    assert case.sender.wait(0)


def test_a_broker_that_is_down_is_not_waited_for():
    case = Case()
    case.away, case.hopeless = {"a"}, {"a"}
    case.send(case.back(1), case.back(1, broker="b"))
    assert [one.broker_name for one in case.asked] == ["b"]
    case.run(WATCH_MS)
    assert isinstance(case.outcomes[0][1], EndpointUnreachable)
    assert case.sender.wait(0) is False, "the other one"


def test_one_that_may_come_is_waited_for():
    case = Case()
    case.away = {"a"}
    case.send(case.back(1))
    case.run(WATCH_MS)
    assert case.asked == case.outcomes == []
    case.away = set()
    case.run(WATCH_MS)
    case.results(OK)
    assert case.outcomes == [(1, 0)]


def test_a_connection_that_breaks_before_it_is_asked_again_ends_it():
    case = Case()
    case.send(case.back(1), case.back(9))
    case.answer(RequestTimeout("late"))
    case.send(case.back(4))
    case.away, case.hopeless = {"a"}, {"a"}
    case.run(AGAIN_MS)
    case.run(WATCH_MS)
    assert sorted(first for first, _ in case.outcomes) == [1, 4, 9]
    assert case.sender.wait(0)


def test_nor_asked_again_when_it_went_down():
    case = Case()
    case.send(case.back(1))
    case.hopeless = {"a"}
    case.answer(EndpointUnreachable("broke"))
    assert case.planned == 0
    assert isinstance(case.outcomes[0][1], EndpointUnreachable)


def test_at_the_end_everything_has_an_outcome_wherever_it_is():
    case = Case()
    case.send(case.back(1, broker="b"))
    case.answer(RequestTimeout("late"))  # it waits to be asked again
    case.send(*(case.back(2 * at) for at in range(MAX_ENTRIES + 1)))  # one waits for the answer
    case.away.add("c")
    case.send(case.back(3, broker="c"))
    assert not case.sender.wait(0)
    closed = ClientClosed("the consumer was closed")
    case.closed = True
    case.sender.end_all(closed)
    assert {outcome for _, outcome in case.outcomes} == {closed}
    assert sorted(at for at, _ in case.outcomes) == sorted(
        [1, 3, *range(0, 2 * MAX_ENTRIES + 1, 2)]
    )
    assert case.sender.wait(0)
    case.sender.send(case.back(99))  # a worker that still runs
    assert case.outcomes[-1] == (99, closed)
    assert case.sender.wait(0)
