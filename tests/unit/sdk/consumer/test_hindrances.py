"""A consumer that gets nothing says why, at once and each minute, and no more often."""

from __future__ import annotations

import logging

import pytest

from mqmesh.errors import EndpointUnreachable, NoPermission, TopicNotFound
from mqmesh.sdk.consumer.hindrances import REPORT_MS, Hindrances
from mqmesh.testing.clock import ManualClock

GONE = TopicNotFound("it does not exist")


class Case:
    def __init__(self, wait_ms=0, must_exist=False):
        self.clock = ManualClock()
        self.timers = []
        self.missing = []
        self.fatal_told = 0
        self.hindrances = Hindrances(
            "g",
            self.clock.monotonic_ms,
            lambda delay_ms, callback: self.timers.append(
                (self.clock.monotonic_ms() + delay_ms, callback)
            ),
            topic_wait_ms=wait_ms,
            topic_must_exist=must_exist,
            on_missing=self.missing.append,
            on_fatal=self._fatal,
        )

    def _fatal(self):
        self.fatal_told += 1

    def run(self, duration_ms):
        end_ms = self.clock.monotonic_ms() + duration_ms
        while due := [one for one in self.timers if one[0] <= end_ms]:
            first = min(due, key=lambda one: one[0])
            self.timers.remove(first)
            self.clock.advance(first[0] - self.clock.monotonic_ms())
            first[1]()
        self.clock.advance(end_ms - self.clock.monotonic_ms())


@pytest.fixture(autouse=True)
def all_levels(caplog):
    caplog.set_level(logging.INFO)


def test_a_missing_topic_is_reported_at_once_each_minute_and_when_it_is_there(caplog):
    case = Case()
    case.hindrances.miss("ordres", lambda: GONE)
    case.hindrances.miss("ordres", lambda: GONE)
    assert caplog.messages == ["group g: topic ordres is missing: it does not exist"]
    assert (case.missing, case.hindrances.fatal) == (["ordres"], None)
    case.run(5 * REPORT_MS - 1)
    assert len(caplog.messages) == 5
    caplog.clear()
    case.hindrances.end("ordres")
    case.run(5 * REPORT_MS)
    assert caplog.messages == ["group g: over: ordres"]
    assert (case.timers, case.missing) == ([], ["ordres"])


def test_a_topic_that_comes_in_time_is_nothing_to_report(caplog):
    case = Case(wait_ms=5_000, must_exist=True)
    case.hindrances.miss("orders", lambda: GONE)
    assert case.hindrances.waits_for_topics
    case.run(4_999)
    case.hindrances.end("orders")
    assert not case.hindrances.waits_for_topics
    case.run(REPORT_MS)
    assert caplog.messages == case.missing == []
    assert case.hindrances.fatal is None


def test_a_topic_that_must_exist_is_an_error_after_its_time_until_it_is_there():
    case = Case(wait_ms=5_000, must_exist=True)
    case.hindrances.miss("orders", lambda: GONE)
    case.run(5_000)
    assert str(case.hindrances.fatal) == "topic orders: it does not exist"
    assert isinstance(case.hindrances.fatal, TopicNotFound)
    assert (case.missing, case.fatal_told) == (["orders"], 1)
    assert not case.hindrances.waits_for_topics
    case.hindrances.end("orders")
    assert case.hindrances.fatal is None


def test_name_servers_that_do_not_answer_are_reported_later_and_are_no_missing_topic(caplog):
    case = Case(must_exist=True)
    case.hindrances.miss("orders", lambda: EndpointUnreachable("nobody answers"), REPORT_MS)
    case.run(REPORT_MS - 1)
    assert caplog.messages == []
    case.run(1)
    assert caplog.messages == ["group g: topic orders is missing: nobody answers"]
    assert (case.hindrances.fatal, case.missing) == (None, [])


def test_a_missing_right_is_fatal_and_all_else_is_reported_each_minute(caplog):
    case = Case()
    refused = NoPermission("user 'u' may not SUB group 'g'")
    for _ in range(100):
        case.hindrances.note("who the members are is unknown", EndpointUnreachable("away"))
        case.run(1_000)
    assert caplog.messages == ["group g: who the members are is unknown: away"] * 2
    assert case.fatal_told == 0
    case.hindrances.note("who the members are is unknown", refused)
    assert (case.hindrances.fatal, case.fatal_told) == (refused, 1)
    case.hindrances.note("who the members are is unknown", EndpointUnreachable("away"))
    assert case.hindrances.fatal is None
