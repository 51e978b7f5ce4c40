"""Failed messages come again, later each time."""

from __future__ import annotations

import logging

import pytest
from harness.pulled import pulled

from mqmesh.errors import CorruptBatch, Reject
from mqmesh.message import MessageQueue
from mqmesh.sdk.consumer.fetching.process_queue import DONE, OPEN, PARKED, StateSpan
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.listening.consume_work import Portion, QueueWork
from mqmesh.sdk.consumer.listening.local_retry import RETRY_DELAYS_MS, LocalRetry, NoRetry


class Case:
    def __init__(self):
        self.timers = []
        self.submitted = []
        self.retry = LocalRetry(
            lambda delay_ms, callback: self.timers.append((delay_ms, callback)),
            lambda *portion: self.submitted.append(portion),
        )
        self.work = QueueWork(lambda _: ConsumeResult.SUCCESS, 1, lambda: None, lambda *_: None)
        self.span = StateSpan(0, bytearray([PARKED] * 4), 0)
        self.messages = [pulled(at) for at in (1, 2)]

    def fail(self, attempt=0, cause=ConsumeResult.RECONSUME_LATER):
        portion = Portion(self.work, self.messages, self.span, attempt)
        self.retry.on_failed(portion, self.messages, cause)
        return self.timers.pop()


def test_the_same_messages_are_submitted_again_as_a_further_attempt():
    case = Case()
    _, run = case.fail(attempt=2)
    run()
    assert case.submitted == [(case.work, case.messages, case.span, 3)]
    assert list(case.span.states) == [PARKED, OPEN, OPEN, PARKED]


def test_delays_grow_and_the_last_one_repeats():
    case = Case()
    delays = [case.fail(attempt)[0] for attempt in range(len(RETRY_DELAYS_MS) + 2)]
    assert delays == [1_000, 5_000, 10_000, 30_000, 60_000, 120_000, 120_000, 120_000]


def test_what_belongs_to_another_member_is_not_tried_again():
    case = Case()
    _, run = case.fail()
    case.work.revoked = True
    run()
    assert case.submitted == []


@pytest.mark.parametrize(
    ("cause", "level", "words"),
    [
        (ValueError("no"), logging.WARNING, "failed with an exception"),
        (ConsumeResult.RECONSUME_LATER, logging.DEBUG, "is to come again later"),
    ],
)
def test_the_log_says_what_and_why(caplog, cause, level, words):
    caplog.set_level(logging.DEBUG)
    Case().fail(cause=cause)
    (record,) = caplog.records
    assert record.levelno == level
    assert words in record.getMessage()
    assert "t:broker-a:2, offset 1" in record.getMessage()
    assert "and 1 more" in record.getMessage()
    assert (record.exc_info is not None) == isinstance(cause, ValueError)


def test_a_rejected_message_has_one_line_and_its_trace_at_debug(caplog):
    case = Case()
    unknown = Reject("KeyError: 7")
    unknown.__cause__ = KeyError(7)
    with caplog.at_level(logging.WARNING):
        case.fail(cause=Reject("no order:\n  $.id is missing"))
        case.fail(cause=unknown)
    plain, caused = caplog.records
    assert "was rejected: no order: $.id is missing; " in plain.getMessage()
    assert "was rejected: KeyError: 7; " in caused.getMessage()
    assert not plain.exc_info
    assert not caused.exc_info
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        case.fail(cause=unknown)
    line, trace = caplog.records
    assert not line.exc_info
    assert (trace.levelno, trace.exc_info[1]) == (logging.DEBUG, unknown)


@pytest.mark.parametrize("cause", [ValueError("x" * 10_000_000), Reject("x" * 10_000_000)])
def test_a_long_text_of_an_exception_is_cut_in_the_log(caplog, cause):
    with caplog.at_level(logging.DEBUG):
        Case().fail(cause=cause)
    assert len(caplog.text) < 8_000
    assert "… (cut)" in caplog.records[0].getMessage()


def test_broadcasting_gives_up_at_once(caplog):
    case = Case()
    retry = NoRetry()
    portion = Portion(case.work, case.messages, case.span)
    retry.on_failed(portion, case.messages, ConsumeResult.RECONSUME_LATER)
    assert list(case.span.states) == [PARKED, DONE, DONE, PARKED]
    assert "BROADCASTING" in caplog.text


def test_a_trace_is_logged_once():
    case = Case()
    error = ValueError("no")
    case.fail(0, error)
    case.fail(1, error)


def test_broadcasting_passes_over_what_cannot_be_decoded(caplog):
    retry, span = NoRetry(), StateSpan(0, bytearray(4), 0)
    with caplog.at_level(logging.ERROR):
        retry.on_undecodable(MessageQueue("t", "b", 0), 1, 3, span, CorruptBatch("no"))
    assert list(span.states) == [OPEN, DONE, DONE, OPEN]
    assert "cannot be decoded" in caplog.text


def test_broadcasting_only_reports_what_takes_too_long(caplog):
    retry, span = NoRetry(), StateSpan(0, bytearray(4), 0)
    with caplog.at_level(logging.WARNING):
        retry.on_overdue(MessageQueue("t", "b", 0), 1, span, 900_000)
    assert list(span.states) == [OPEN] * 4
    assert "consume_timeout_ms" in caplog.text
    assert retry.wait(0)
