"""Medians, ratios, goals, JSON and the table."""

import pytest

from rows.report import summarize
from rows.rows import Row
from rows.sides import Conditions, Sample


def never(conditions: Conditions) -> Sample:
    raise AssertionError


def row(**goals: float) -> Row:
    return Row(name="produce_128", unit="msg/s", what="it", product=never, limit=never, **goals)


def samples(*values: float) -> list[Sample]:
    return [Sample(value=value, message_count=10) for value in values]


def test_value_and_limit_are_medians():
    line = summarize(row(), samples(70, 10, 90), samples(100, 90, 300))
    assert (line.value, line.limit, line.ratio) == (70.0, 100.0, 0.7)
    assert line.values == [70.0, 10.0, 90.0]
    assert line.limits == [100.0, 90.0, 300.0]


@pytest.mark.parametrize(
    ("goals", "value", "met"),
    [
        ({"least_ratio": 0.7}, 70, True),
        ({"least_ratio": 0.7}, 69, False),
        ({"most_ratio": 1.5}, 150, True),
        ({"most_ratio": 1.5}, 151, False),
        ({"least": 60}, 60, True),
        ({"least": 60}, 59, False),
        ({"most": 60}, 60, True),
        ({"most": 60}, 61, False),
        ({}, 1, None),
    ],
)
def test_goals_are_judged(goals, value, met):
    assert summarize(row(**goals), samples(value), samples(100)).met is met


@pytest.mark.parametrize(
    ("value", "ratio", "growth", "met"),
    [(80, 0.9, 64, True), (79, 0.9, 64, False), (80, 0.89, 64, False), (80, 0.9, 65, False)],
)
def test_a_row_with_several_goals_meets_all_of_them_or_none(value, ratio, growth, met):
    several = Row(
        name="r",
        unit="u",
        what="w",
        product=never,
        least=80,
        least_extra={"ratio": 0.9},
        most_extra={"growth": 64},
    )
    sample = Sample(value=value, message_count=1, extra={"ratio": ratio, "growth": growth})
    line = summarize(several, [sample], [])
    assert (line.met, line.goal) == (met, ">= 80, ratio >= 0.9, growth <= 64")
