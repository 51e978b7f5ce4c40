"""How quickly totals grow, and what they were at midnight."""

from __future__ import annotations

from mqmesh.roles.exporter.rates import DAY_MS, WINDOW_MS, DayTotals, Rates


def test_a_rate_is_that_of_the_last_seconds():
    rates = Rates()
    assert rates.rate("a", 100, 0) == 0
    assert rates.rate("a", 150, 1_000) == 50
    assert rates.rate("a", 100 + 50 * 10, WINDOW_MS) == 50
    assert rates.rate("a", 600, 2 * WINDOW_MS) == 0, "nothing came for a whole window"


def test_who_is_started_again_counts_anew():
    rates = Rates()
    rates.rate("a", 1_000, 0)
    assert rates.rate("a", 5, 1_000) == 0
    assert rates.rate("a", 7, 2_000) == 2


def test_who_is_not_looked_at_is_forgotten():
    rates = Rates()
    rates.rate("a", 1, 0)
    rates.rate("b", 1, 0)
    rates.end_round()
    rates.rate("b", 1, 1)
    rates.end_round()
    assert len(rates) == 1


def test_a_day_begins_with_what_there_was_at_midnight():
    days = DayTotals()
    assert days.mornings("a", 10, 5 * DAY_MS - 2) == (10, 10)
    assert days.mornings("a", 30, 5 * DAY_MS - 1) == (10, 10)
    assert days.mornings("a", 35, 5 * DAY_MS) == (35, 10)
    assert days.mornings("a", 50, 6 * DAY_MS - 1) == (35, 10)
    assert days.mornings("a", 60, 6 * DAY_MS) == (60, 35)
    assert days.mornings("a", 3, 6 * DAY_MS + 1) == (0, 0), "it was started again"
