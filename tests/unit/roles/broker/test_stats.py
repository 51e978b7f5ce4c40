"""Totals and rates."""

from __future__ import annotations

import pytest

from mqmesh.roles.broker.stats import MINUTE_MS, WINDOW_SAMPLES, Before, BrokerStats, Periods

HOUR_MS = 60 * MINUTE_MS


def test_a_rate_is_that_of_the_last_samples():
    stats = BrokerStats()
    assert stats.rate("put_messages") == 0
    stats.sample(0)
    assert stats.rate("put_messages") == 0
    stats.total.put_messages += 500
    stats.sample(1_000)
    assert stats.rate("put_messages") == 500
    for second in range(2, WINDOW_SAMPLES + 3):
        stats.sample(second * 1_000)
    assert stats.rate("put_messages") == 0, "long ago"


class Counted:
    """Totals that a test changes, and how often they were looked at."""

    def __init__(self, now_ms=1_000):
        self.now_ms, self.day, self.total, self.looks = now_ms, 7, 0, 0
        self.before = Before()
        self.periods = Periods(now_ms)

    def look(self):
        return {"in": self.total}

    def others(self):
        self.looks += 1
        return [(self.before, self.total)]

    def go(self, duration_ms, grown, day=None):
        """A second after the other, evenly grown."""
        steps = duration_ms // 1_000
        for step in range(steps):
            self.now_ms += 1_000
            self.total += grown * (step + 1) // steps - grown * step // steps
            if day is not None:
                self.day = day
            self.periods.sample(self.now_ms, self.day, self.look, self.others)

    @property
    def rate(self):
        return self.periods.per_s(self.before, self.total, self.now_ms)

    @property
    def today(self):
        return self.total - self.before.midnight


@pytest.fixture
def counted():
    return Counted()


def test_the_rate_is_that_of_the_last_minutes(counted):
    counted.go(10_000, 100)
    assert counted.rate == pytest.approx(10)
    counted.go(300_000, 6_000)
    assert counted.rate == pytest.approx(20, rel=0.05)
    counted.go(130_000, 0)
    assert counted.rate == 0
    assert counted.looks < 10


def test_days_begin_at_midnight(counted):
    counted.go(30_000, 5)
    assert (counted.periods.today("in", counted.total), counted.today) == (5, 5)
    counted.go(1_000, 0, day=8)
    assert (counted.periods.today("in", counted.total), counted.today) == (0, 0)
    assert counted.periods.yesterday("in") == 5
    counted.go(30_000, 3)
    counted.go(1_000, 0, day=9)
    assert (counted.periods.today("in", counted.total), counted.periods.yesterday("in")) == (0, 3)
    assert counted.today == 0
    assert counted.periods.today("never", 4) == 4


def test_the_rate_of_a_day_forgets_what_is_older(counted):
    counted.go(2 * HOUR_MS, 7_200)
    rate = counted.periods.per_s_of_day("in", counted.total, counted.now_ms)
    assert rate == pytest.approx(1)
    for _ in range(26):
        counted.go(HOUR_MS, 0)
    assert counted.periods.per_s_of_day("in", counted.total, counted.now_ms) == 0
