"""Rates of a consumer, from totals."""

from __future__ import annotations

from mqmesh.sdk.consumer.introspection.consumption import SAMPLE_MS, Consumption, TopicTotals


class Case:
    def __init__(self):
        self.totals = {}
        self.held = {}
        self.consumption = Consumption("g", lambda: dict(self.totals), lambda: self.held)
        self.consumption.sample(0)

    def told(self, now_ms):
        (one,) = self.consumption.stats(now_ms)
        return one


def test_rates_are_of_what_came_since_the_first_sample():
    case = Case()
    case.totals["t"] = TopicTotals(
        calls=10, ok=20, failed=4, busy_ns=50_000_000, pulled=40, pulls=2, waited_ms=30
    )
    case.held["t"] = (16, 1_600)
    told = case.told(2_000)
    assert (told.group, told.topic) == ("g", "t")
    assert (told.ok_per_s, told.failed_per_s, told.pulled_per_s) == (10.0, 2.0, 20.0)
    assert (told.handling_ms, told.pull_wait_ms, told.failed_last_hour) == (5.0, 15.0, 4)
    assert (told.cached_messages, told.cached_bytes) == (16, 1_600)


def test_what_is_older_than_half_a_minute_does_not_count_but_failures_of_an_hour_do():
    case = Case()
    case.totals["t"] = TopicTotals(calls=10, ok=10, failed=3)
    for at_ms in range(SAMPLE_MS, 60 * 60_000, SAMPLE_MS):
        case.consumption.sample(at_ms)
    told = case.told(at_ms)
    assert (told.ok_per_s, told.failed_per_s, told.failed_last_hour) == (0.0, 0.0, 3)
    for later_ms in range(at_ms, at_ms + 120_000, SAMPLE_MS):
        case.consumption.sample(later_ms)
    assert case.told(later_ms).failed_last_hour == 0


def test_deliveries_of_ten_minutes_are_counted_apart():
    case = Case()
    for at_ms in range(0, 20 * 60_000, SAMPLE_MS):
        failed = 30 if at_ms >= 12 * 60_000 else 20
        case.totals["t"] = TopicTotals(ok=at_ms // 60_000, failed=failed)
        case.consumption.sample(at_ms)
    told = case.told(at_ms)
    assert told.failed_per_s == 0
    assert told.recent_failed == 10
    assert 10 <= told.recent_ok <= 11
    assert 600_000 <= told.recent_ms <= 660_000


def test_a_call_that_hangs_shows_as_a_handling_time_that_grows():
    case = Case()
    case.totals["t"] = TopicTotals(calls=1, busy_ns=1_000_000_000)
    case.consumption.sample(1_000)
    first = case.told(1_000).handling_ms
    case.totals["t"] = TopicTotals(calls=1, busy_ns=9_000_000_000)
    assert (first, case.told(9_000).handling_ms) == (1_000.0, 9_000.0)


def test_a_queue_that_was_given_up_makes_no_rate_negative():
    case = Case()
    case.totals["t"] = TopicTotals(ok=10)
    case.consumption.sample(1_000)
    case.totals["t"] = TopicTotals(ok=5)
    for at_ms in range(2_000, 10_000, 1_000):
        case.consumption.sample(at_ms)
    assert case.told(10_000).ok_per_s == 0
