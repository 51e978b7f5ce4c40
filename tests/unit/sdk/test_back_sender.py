"""Failed messages travel back together, once, and nothing is done before the broker says so."""

from __future__ import annotations

import pytest

from mqmesh.errors import DiskFull, EndpointUnreachable, MQMeshError, RequestTimeout, SystemBusy
from mqmesh.message import MessageQueue
from mqmesh.protocol.codes import RequestCode, ResponseCode
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.retries import (
    MAX_BATCH_MESSAGES,
    MAX_REASON_CHARACTERS,
    SendBackRequest,
    SendBackResponse,
    SendBackResult,
)
from mqmesh.sdk.consumer.listening.back_sender import MAX_ENTRIES, TRIES, BackSender, SentBack, join

NOTHING = memoryview(b"")


class Case:
    def __init__(self):
        self.requests = []
        self.timers = []
        self.posted = []
        self.outcomes = []
        self.down = set()
        self.sender = BackSender(
            "g", self, self.posted.append, 16, lambda broker_name: broker_name in self.down
        )

    def request(self, broker_name, code, on_done, *, header, timeout_ms):
        assert code == RequestCode.CONSUMER_SEND_MSG_BACK
        self.requests.append((broker_name, memoryview(header), on_done))

    def call_later(self, delay_ms, callback):
        self.timers.append(callback)

    def back(self, first, count=1, reason="E: no", queue=0, broker="a", level=0):
        queue = MessageQueue("t", broker, queue)
        done = self.outcomes.append
        return SentBack(queue, first, count, reason, lambda o: done((first, o)), level)

    def send(self, *messages):
        for one in messages:
            self.sender.send(one)
        self.turn()

    def turn(self):
        while self.posted:
            self.posted.pop(0)()

    def asked(self):
        return decode_header(SendBackRequest, self.requests[0][1])

    def answer(self, *results):
        _, _, on_done = self.requests.pop(0)
        if isinstance(results[0], MQMeshError):
            on_done(results[0])
            return
        header = encode_header(SendBackResponse(list(results)))
        on_done(Command(0, 0, 1, memoryview(header), NOTHING))


OK = SendBackResult(0)


def test_what_failed_alike_side_by_side_is_one_entry():
    case = Case()
    case.send(case.back(3), case.back(1), case.back(2), case.back(5), case.back(4, reason="other"))
    entries = case.asked().entries
    assert [(e.queue_offset, e.count, e.reason) for e in entries] == [
        (1, 3, "E: no"),
        (4, 1, "other"),
        (5, 1, "E: no"),
    ]
    assert case.asked().max_reconsume_times == 16
    case.answer(OK, SendBackResult(ResponseCode.DISK_FULL, "full"), SendBackResult(0, "", 1))
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
    assert sorted(request[0] for request in case.requests) == ["a", "b"]
    case.answer(OK)
    assert [request[0] for request in case.requests] == ["b", "a"]


def test_a_request_has_so_many_entries_at_most():
    case = Case()
    case.send(*(case.back(2 * at) for at in range(MAX_ENTRIES + 5)))
    assert len(case.asked().entries) == MAX_ENTRIES
    case.answer(*[OK] * MAX_ENTRIES)
    assert len(case.asked().entries) == 5


def test_without_an_answer_it_asks_the_same_again():
    case = Case()
    case.send(case.back(1))
    asked = case.asked()
    for _ in range(TRIES - 1):
        case.answer(RequestTimeout("late"))
        assert case.outcomes == []
        case.timers.pop()()
        assert case.asked() == asked
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
    case.answer(OK, OK)
    case.send(case.back(2))
    case.requests.pop(0)[2](Command(0, 0, 1, memoryview(b"\xc1"), NOTHING))
    assert all(isinstance(outcome, MQMeshError) for _, outcome in case.outcomes)


def test_a_long_reason_is_cut():
    case = Case()
    case.send(case.back(1, reason="x" * 5_000))
    assert len(case.asked().entries[0].reason) == MAX_REASON_CHARACTERS


def test_one_can_wait_for_what_is_under_way():
    case = Case()
    assert case.sender.wait(0)
    case.send(case.back(1))
    assert not case.sender.wait(0)
    case.answer(OK)
    assert case.sender.wait(0)


def test_a_broker_that_is_down_is_not_waited_for():
    case = Case()
    case.down.add("a")
    case.send(case.back(1), case.back(1, broker="b"))
    assert [request[0] for request in case.requests] == ["b"]
    assert isinstance(case.outcomes[0][1], EndpointUnreachable)


def test_nor_asked_again_when_it_went_down():
    case = Case()
    case.send(case.back(1))
    case.down.add("a")
    case.answer(EndpointUnreachable("broke"))
    assert case.timers == []
    assert isinstance(case.outcomes[0][1], EndpointUnreachable)
