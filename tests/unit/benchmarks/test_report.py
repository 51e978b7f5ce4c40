"""Medians, ratios, goals, JSON and the table."""

import json

import pytest

from rows.report import encode_line, format_table, summarize
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


def test_a_row_without_limit_has_no_ratio():
    line = summarize(row(), samples(70), [])
    assert (line.limit, line.ratio) == (None, None)


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


def test_figures_of_processes_are_medians_too():
    products = [
        Sample(value=1, message_count=1, cpu_s_per_million={"broker": cpu}, extra={"p99_us": cpu})
        for cpu in (3.0, 1.0, 2.0)
    ]
    line = summarize(row(), products, [])
    assert line.cpu_s_per_million == {"broker": 2.0}
    assert line.extra == {"p99_us": 2.0}


def test_a_line_is_one_line_of_json_with_the_names_that_readers_expect():
    text = encode_line(summarize(row(least_ratio=0.7), samples(80), samples(100)))
    assert "\n" not in text
    values = json.loads(text)
    expected = {"row": "produce_128", "value": 80, "unit": "msg/s", "limit": 100, "ratio": 0.8}
    assert expected.items() <= values.items()
    assert values["met"] is True


def test_the_table_shows_rows_with_and_without_limit_and_what_was_missed():
    missed = summarize(row(least_ratio=0.7), samples(1_234_567), samples(10_000_000))
    alone = summarize(row(least=5), samples(9), [])
    text = format_table([missed, alone]).splitlines()
    assert len(text) == 3
    assert "1,234,567" in text[1]
    assert "MISSED" in text[1]
    assert " ok" in text[2]
    assert len({line.index("msg/s") for line in text[1:]}) == 1
