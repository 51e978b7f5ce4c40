"""What failed goes back to its broker; what cannot go stays here."""

from __future__ import annotations

import logging

import pytest
from harness.pulled import INFO, pulled

from mqmesh.errors import CorruptBatch, Reject, RequestTimeout
from mqmesh.message import MessageQueue, StoredMessage
from mqmesh.protocol.retries import MAX_REASON_CHARACTERS, TO_DEAD_LETTERS
from mqmesh.sdk.consumer.fetching.process_queue import DONE, OPEN, PARKED, StateSpan
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.listening.consume_work import Portion, QueueWork
from mqmesh.sdk.consumer.listening.group_retry import (
    SEND_AGAIN_MS,
    GroupRetry,
    consecutive,
    reason_of,
)
from mqmesh.sdk.consumer.listening.orderly_retry import OrderlyRetry, to_dead_letters
from mqmesh.units import QueueOffset

QUEUE = MessageQueue("t", "broker-a", 2)


class Case:
    """Plays the sender."""

    def __init__(self):
        self.sent = []
        self.kept = []
        self.timers = []
        self.progress = 0
        self.retry = GroupRetry(
            "g",
            self,
            lambda delay_ms, callback: self.timers.append((delay_ms, callback)),
            lambda *failed: self.kept.append(failed),
        )
        self.work = QueueWork(lambda _: ConsumeResult.SUCCESS, 1, self._progress, lambda *_: None)
        self.span = StateSpan(0, bytearray([PARKED] * 8), 0)

    def send(self, messages):
        self.sent.append(messages)

    def wait(self, timeout_s):
        return True

    def fail(self, *offsets, cause=ConsumeResult.RECONSUME_LATER):
        messages = [pulled(o) for o in offsets]
        portion = Portion(self.work, messages, self.span)
        self.retry.on_failed(portion, messages, cause)
        return portion, messages

    def _progress(self):
        self.progress += 1


def test_it_is_sent_back_and_done_when_the_broker_has_it():
    case = Case()
    case.fail(3, cause=ValueError("bad amount"))
    (back,) = case.sent
    assert (back.queue, back.first, back.count) == (QUEUE, 3, 1)
    assert (back.reason, back.delay_level) == ("ValueError: bad amount", 0)
    assert case.span.states[3] == PARKED
    back.on_done(0)
    assert case.span.states[3] == DONE
    assert (case.progress, case.kept) == (1, [])


def test_a_call_of_several_messages_goes_back_as_a_whole():
    case = Case()
    case.fail(1, 2, 3, 6)
    assert [(back.first, back.count) for back in case.sent] == [(1, 3), (6, 1)]
    case.sent[0].on_done(0)
    assert list(case.span.states) == [PARKED, DONE, DONE, DONE] + [PARKED] * 4


def test_a_rejected_message_is_a_dead_letter_at_once():
    case = Case()
    case.fail(3, cause=Reject("unknown customer"))
    (back,) = case.sent
    assert back.delay_level == TO_DEAD_LETTERS
    assert back.reason.endswith("Reject: unknown customer")


def test_the_log_has_one_line_of_a_rejected_message_and_one_of_a_dead_letter(caplog):
    case = Case()
    with caplog.at_level(logging.WARNING):
        case.fail(3, cause=Reject("unknown customer"))
        case.sent.pop().on_done(1)
        (line,) = caplog.messages
        assert "it goes to the dead letters" in line
        caplog.clear()
        case.fail(4, cause=ValueError("bad\namount"))
        case.sent.pop().on_done(1)
    _, last = caplog.messages
    assert last.endswith("is a dead letter now: ValueError: bad amount")


def test_a_reason_is_as_long_as_a_property_may_be_and_says_that_it_was_cut():
    case = Case()
    case.fail(3, cause=ValueError("x" * 10_000_000))
    reason = case.sent[0].reason
    assert len(reason) <= MAX_REASON_CHARACTERS
    assert reason.endswith("… (cut)")


def test_of_several_messages_nobody_knows_which_is_rejected():
    case = Case()
    case.fail(1, 2, cause=Reject("unknown customer"))
    (back,) = case.sent
    assert (back.count, back.delay_level) == (2, 0)


def test_what_cannot_be_sent_back_is_kept_and_not_done():
    case = Case()
    portion, messages = case.fail(3)
    case.sent[0].on_done(RequestTimeout("late"))
    assert case.kept == [(portion, messages, ConsumeResult.RECONSUME_LATER)]
    assert case.span.states[3] == PARKED


def test_a_dead_letter_is_reported(caplog):
    case = Case()
    case.fail(3, cause=ValueError("bad amount"))
    with caplog.at_level(logging.WARNING):
        case.sent[0].on_done(1)
    assert "dead letter" in caplog.text
    assert "bad amount" in caplog.text


def test_what_cannot_be_decoded_is_sent_back_until_the_broker_takes_it(caplog):
    case = Case()
    case.span.mark(0, 7, OPEN)
    with caplog.at_level(logging.ERROR):
        case.retry.on_undecodable(QUEUE, 2, 5, case.span, CorruptBatch("no messages"))
    assert "%DLQ%g" in caplog.text
    assert list(case.span.states[1:6]) == [OPEN, PARKED, PARKED, PARKED, OPEN]
    (back,) = case.sent
    assert (back.first, back.count) == (2, 3)
    assert "CorruptBatch: no messages" in back.reason
    back.on_done(RequestTimeout("late"))
    delay_ms, again = case.timers.pop()
    assert delay_ms == SEND_AGAIN_MS
    again()
    case.sent[1].on_done(3)
    assert list(case.span.states[1:6]) == [OPEN, DONE, DONE, DONE, OPEN]


def test_what_takes_too_long_is_sent_back():
    case = Case()
    case.span.mark(0, 7, OPEN)
    case.retry.on_overdue(QUEUE, 4, case.span, 900_000)
    (back,) = case.sent
    assert (back.first, back.count) == (4, 1)
    assert back.reason.startswith("ConsumeTimeout: ")
    assert case.span.states[4] == PARKED
    back.on_done(0)
    assert case.span.states[4] == DONE


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("not even this")


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (ConsumeResult.RECONSUME_LATER, "the listener answered RECONSUME_LATER"),
        (ValueError("x"), "ValueError: x"),
        (KeyError(), "KeyError"),
        (CorruptBatch("y"), "mqmesh.errors.CorruptBatch: y"),
        (ValueError("\ud800"), "ValueError: ?"),
    ],
)
def test_the_reason_names_the_exception_and_its_text(cause, reason):
    assert reason_of(cause) == reason


def test_an_exception_without_words_has_a_reason_too():
    assert reason_of(Unspeakable()).endswith("Unspeakable")


@pytest.mark.parametrize(
    ("offsets", "groups"),
    [([1], [[1]]), ([1, 2, 3], [[1, 2, 3]]), ([1, 3, 4, 9], [[1], [3, 4], [9]])],
)
def test_messages_are_divided_where_some_are_missing(offsets, groups):
    messages = [pulled(o) for o in offsets]
    assert [[m.queue_offset for m in some] for some in consecutive(messages)] == groups


# ---- In order -------------------------------------------------------------------------


class OrderlyCase(Case):
    def __init__(self):
        super().__init__()
        self.safe = []
        self.dead = to_dead_letters(self)

    def give_up(self, *offsets, times=3):
        properties = {"RECONSUME_TIMES": str(times)}
        messages = [
            StoredMessage(
                "t", b"x", properties=properties, queue_offset=QueueOffset(offset), batch=INFO
            )
            for offset in offsets
        ]
        self.dead(messages, ValueError("no"), self.safe.append)


def test_what_failed_too_often_in_order_goes_to_the_dead_letters_at_once():
    case = OrderlyCase()
    case.give_up(4)
    (back,) = case.sent
    assert (back.first, back.count, back.delay_level) == (4, 1, TO_DEAD_LETTERS)
    assert (back.reason, back.reconsume_times) == ("ValueError: no", 3)
    assert case.safe == []
    back.on_done(1)
    assert case.safe == [True]


def test_in_order_it_is_safe_when_all_of_a_call_are_stored():
    case = OrderlyCase()
    case.give_up(1, 2, 5)
    case.sent[0].on_done(2)
    assert case.safe == []
    case.sent[1].on_done(RequestTimeout("late"))
    assert case.safe == [False]


class WaitingCase(OrderlyCase):
    """A queue of an ordered consumer that came to what it cannot decode."""

    def __init__(self, *, gives_up):
        super().__init__()
        self.passed = []
        self.orderly = OrderlyRetry(self, gives_up, lambda *place: self.passed.append(place))
        self.span.mark(0, 7, OPEN)
        self.orderly.on_undecodable(QUEUE, 2, 5, self.span, CorruptBatch("no messages"))


def test_in_order_nothing_is_passed_over_and_that_is_told_each_minute(caplog):
    case = WaitingCase(gives_up=False)
    told = []
    with caplog.at_level(logging.WARNING):
        for now_ms, offset in ((0, 1), (1_000, 2), (2_000, 2), (60_999, 2), (61_000, 2)):
            caplog.clear()
            case.orderly.look(now_ms, {QUEUE: offset})
            told.append("nothing is passed over" in caplog.text)
        case.orderly.on_overdue(QUEUE, 2, case.span, 900_000)
    assert told == [False, True, False, False, True]
    assert "consume_timeout_ms" in caplog.text
    assert list(case.span.states) == [OPEN] * 8
    assert case.sent == case.passed == []
    assert case.orderly.wait(0)


@pytest.mark.parametrize("offsets", [{QUEUE: 5}, {}], ids=["moved", "given away"])
def test_an_ordered_queue_that_went_on_is_not_told_of_any_more(caplog, offsets):
    case = WaitingCase(gives_up=False)
    with caplog.at_level(logging.ERROR):
        case.orderly.look(0, offsets)
        case.orderly.look(1, {QUEUE: 2})
    assert caplog.text == ""


def test_with_a_limit_what_cannot_be_decoded_leaves_when_all_before_it_is_done():
    case = WaitingCase(gives_up=True)
    case.orderly.look(0, {QUEUE: 1})
    assert case.sent == []
    for _ in range(2):
        case.orderly.look(1_000, {QUEUE: 2})
    (back,) = case.sent
    assert (back.first, back.count, back.delay_level) == (2, 3, TO_DEAD_LETTERS)
    back.on_done(RequestTimeout("late"))
    case.orderly.look(2_000, {QUEUE: 2})
    case.sent[1].on_done(3)
    assert case.passed == [(QUEUE, 5)]
    case.orderly.look(3_000, {QUEUE: 2})
    assert len(case.sent) == 2
