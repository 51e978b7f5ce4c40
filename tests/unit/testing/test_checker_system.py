"""C8 and C10 to C12 find what is planted, and nothing else."""

from __future__ import annotations

import pytest
from harness.checker import check
from harness.history import (
    ACKED,
    Attempt,
    Degradation,
    Delivery,
    History,
    Lookup,
    Outage,
    Resources,
    Return,
)


def broken(history):
    return check(history).broken


@pytest.fixture
def history():
    """Three messages, two of which have the same key."""
    messages = [
        Delivery("p", n, "h", "b/0", n, f"id{n}", 1.0, "c", keys)
        for n, keys in enumerate([("even", "zero"), ("odd",), ("even",)])
    ]
    return History(
        attempts=[Attempt("p", n, "h", ACKED, "sync", "b/0", n, f"id{n}") for n in range(3)],
        deliveries=messages,
        stored=messages,
        lookups=[
            Lookup("key", "even", (("b/0", 2), ("b/0", 0))),
            Lookup("key", "even", (("b/0", 2),), limit=1),
            Lookup("key", "nobody", ()),
            Lookup("id", "id1", (("b/0", 1),)),
        ],
    )


def test_lookups_that_equal_a_scan_are_good(history):
    assert check(history).good


@pytest.mark.parametrize(
    "lookup",
    [
        pytest.param(Lookup("key", "even", (("b/0", 0),)), id="one is missing"),
        pytest.param(Lookup("key", "odd", (("b/0", 1), ("b/0", 2))), id="one too many"),
        pytest.param(Lookup("key", "odd", (("b/0", 1), ("b/0", 1))), id="one twice"),
        pytest.param(Lookup("key", "even", (), limit=1), id="fewer than wanted"),
        pytest.param(Lookup("key", "nobody", (("b/0", 0),)), id="something for nothing"),
        pytest.param(Lookup("id", "id1", ()), id="an id is missing"),
        pytest.param(Lookup("id", "id1", (("b/0", 2),)), id="another message"),
        pytest.param(Lookup("key", "id1", (("b/0", 1),)), id="an id is no key"),
    ],
)
def test_c8_a_wrong_lookup(history, lookup):
    history.lookups.append(lookup)
    assert broken(history) == ["C8"]


BEFORE = Resources("broker", 1_000, 50, 5, 10_000)
GROWTH = Resources("broker", 100, 2, 0, 5_000)


def test_what_comes_back_is_good():
    after = Resources("broker", 1_100, 52, 5, 15_000)
    assert check(History(returns=[Return(BEFORE, after, GROWTH)])).good


@pytest.mark.parametrize(
    ("metric", "value"),
    [("rss_bytes", 1_101), ("descriptors", 53), ("threads", 6), ("disk_bytes", 15_001)],
)
def test_c10_a_metric_that_does_not_come_back(metric, value):
    metrics = {"rss_bytes": 1, "descriptors": 1, "threads": 1, "disk_bytes": 1, metric: value}
    report = check(History(returns=[Return(BEFORE, Resources("broker", **metrics), GROWTH)]))
    assert report.broken == ["C10"]
    assert metric in report.text()


@pytest.mark.parametrize(
    ("lasted_ms", "verdict"), [(99.0, []), (100.0, []), (101.0, ["C11"]), (None, ["C11"])]
)
def test_c11_an_outage_that_is_too_long(lasted_ms, verdict):
    assert broken(History(outages=[Outage("a kill", lasted_ms, 100.0)])) == verdict


@pytest.mark.parametrize(
    ("happened", "error_codes", "log_lines", "counted", "verdict"),
    [
        (0, 0, 0, 0, []),
        (5, 5, 1, 5, []),
        (5, 7, 1, 6, []),
        (5, None, 1, 5, []),
        (5, 4, 1, 5, ["C12"]),
        (5, 5, 0, 5, ["C12"]),
        (5, 5, 1, 4, ["C12"]),
    ],
)
def test_c12_what_is_silent(happened, error_codes, log_lines, counted, verdict):
    one = Degradation("refusal", happened, error_codes, log_lines, counted)
    assert broken(History(degradations=[one])) == verdict
