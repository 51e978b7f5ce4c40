"""Metrics: declared once, read when somebody asks, told with bounds."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.metrics import (
    FOLDED,
    LABEL_SETS_PER_PAGE,
    OTHER,
    Distribution,
    Histogram,
    Labelled,
    Metric,
    MetricBoard,
    MetricKind,
    MetricReading,
    MetricSample,
    Readings,
    counter,
    gauge,
    histogram,
    text,
)


class Desk:
    """A part with numbers of its own."""

    def __init__(self) -> None:
        self.made = 0
        self.by_topic: dict[tuple[str, ...], int] = {}
        self.looks = 0

    def look(self) -> Desk:
        self.looks += 1
        return self


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_what_is_declared_once_is_read_with_its_values_of_now(desk):
    board = MetricBoard()
    board.add(
        (
            counter("made_total", "what was made", lambda desk: desk.made, unit="messages"),
            text("state", "how it is", lambda desk: "on"),
            gauge("free", "room", lambda desk: 0.5, rocketmq_name="rocketmq_free"),
        ),
        desk.look,
    )
    desk.made = 3
    first, state, free, folded = board.read()
    metric = Metric("made_total", MetricKind.COUNTER, "messages", "what was made")
    assert first == MetricReading(metric, [MetricSample((), 3)])
    assert (state.metric.kind, state.samples) == (MetricKind.TEXT, [MetricSample((), "on")])
    assert (free.metric.rocketmq_name, free.samples[0].value) == ("rocketmq_free", 0.5)
    assert (folded.metric.name, folded.samples[0].value) == (FOLDED, 0)
    assert desk.looks == 1, "a part is looked at once for all of its metrics"


def test_labels_beyond_the_limit_are_added_up_and_counted(desk):
    board = MetricBoard(most=2)
    board.add((counter("n", "", lambda desk: desk.by_topic, labels=("topic",)),), desk.look)
    desk.by_topic = {(name,): number for number, name in enumerate("abcd", 1)}
    told = Readings(board.read())
    assert [one.labels for one in next(iter(told)).samples] == [("a",), ("b",), (OTHER,)]
    assert [told.number("n", name) for name in ("a", "b", "c", OTHER)] == [1, 2, 0, 3 + 4]
    assert told[FOLDED] == 2


def test_distributions_beyond_the_limit_are_added_up_too():
    one, two = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    one.observe(1.0)
    two.observe(1.5)
    two.observe(9.0)
    board = MetricBoard(most=0)
    both = {("a",): one, ("b",): two}
    board.add(
        (
            histogram(
                "took",
                "",
                lambda owner: {labels: meter.read() for labels, meter in owner.items()},
                unit="ms",
                labels=("topic",),
            ),
        ),
        lambda: both,
    )
    (sample,) = board.read()[0].samples
    assert sample == MetricSample((OTHER,), Distribution((1.0, 2.0), (1, 1, 1), 11.5))


@pytest.mark.parametrize("kind", ["number", "histogram"])
def test_what_has_very_many_owners_is_told_as_their_mapping_is(kind):
    meters = []
    for number in range(7):
        meters.append(Histogram((1.0, 5.0)))
        for value in range(number + 1):
            meters[-1].observe(value)
    value = (lambda at: meters[at]) if kind == "histogram" else (lambda at: at * 10)
    whole = {(f"n{at}",): meters[at].read() if kind == "histogram" else at * 10 for at in range(7)}
    for most in 3, 7, 9:
        board = MetricBoard(most)
        lazy = Labelled(range(7), lambda at: (f"n{at}",), value)
        board.add([counter("lazy", "", lambda _, lazy=lazy: lazy, labels=("n",))], lambda: None)
        board.add([counter("whole", "", lambda _: whole, labels=("n",))], lambda: None)
        found = {one.metric.name: one.samples for one in board.read()}
        assert found["lazy"] == found["whole"]
        assert found["folded_label_sets"][0].value == 2 * max(7 - most, 0)


def test_a_reading_in_pages_says_the_same_and_no_page_looks_at_much():
    looked = []

    def value(at):
        looked.append(at)
        return at

    def lazy():
        return Labelled(iter(range(4_500)), lambda at: (f"n{at}",), value)

    board = MetricBoard(most=1_200)
    board.add([counter("first", "", lambda _: lazy(), labels=("n",))], lambda: None)
    board.add([gauge("plain", "", lambda _: 7)], lambda: None)
    board.add([counter("second", "", lambda _: lazy(), labels=("n",))], lambda: None)
    whole = board.read()
    assert len(looked) == 9_000
    pages, sizes, more = [], [], True
    told = board.pages()
    while more:
        looked.clear()
        page, more = next(told)
        pages += page
        sizes.append(len(looked))
    assert list(Readings(pages)) == whole
    assert len(pages) > len(whole)  # a metric goes on in the next page
    assert len(sizes) > 5
    assert max(sizes) < 2 * LABEL_SETS_PER_PAGE
    first, _, second, folded = whole
    assert first.samples == second.samples
    assert first.samples[-1] == MetricSample((OTHER,), sum(range(1_200, 4_500)))
    assert folded.samples[0].value == 2 * (4_500 - 1_200)


def test_two_metrics_of_a_process_cannot_have_one_name(desk):
    board = MetricBoard()
    declared = (gauge("n", "", lambda desk: 1),)
    board.add(declared, desk.look)
    with pytest.raises(AssertionError, match="two metrics are n"):
        board.add(declared, desk.look)


@given(st.lists(st.floats(0, 100)))
def test_an_observation_is_counted_where_its_bound_is_the_first_that_is_not_below(values):
    bounds = (1.0, 3.0, 10.0)
    meter = Histogram(bounds)
    for value in values:
        meter.observe(value)
    edges = (-math.inf, *bounds, math.inf)
    counts = tuple(sum(low < value <= high for value in values) for low, high in pairwise(edges))
    told = meter.read()
    assert (told.counts, told.count) == (counts, len(values))
    assert told.total == pytest.approx(sum(values))


def test_a_quantile_is_the_bound_that_so_many_lie_within():
    meter = Histogram((1.0, 3.0))
    assert meter.read().quantile(0.99) == 0.0
    for value in (0.5, 0.5, 2.0, 9.0):
        meter.observe(value)
    assert [meter.read().quantile(share) for share in (0, 0.5, 0.75, 0.99)] == [
        1.0,
        1.0,
        3.0,
        math.inf,
    ]


def test_readings_come_over_the_wire_with_their_types():
    readings = [
        MetricReading(Metric("a", MetricKind.GAUGE, "", ""), [MetricSample((), value)])
        for value in (1, 0.5, True, "on", Distribution((1.0,), (2, 3), 4.5))
    ]
    data = msgspec.msgpack.encode(readings)
    told = msgspec.msgpack.decode(data, type=list[MetricReading])
    assert told == readings
    kinds = [type(one.samples[0].value) for one in told]
    assert kinds == [int, float, bool, str, Distribution]


def test_readings_are_asked_by_name():
    labelled = Metric("refusals", MetricKind.COUNTER, "", "", ("code",))
    told = Readings(
        [
            MetricReading(Metric("state", MetricKind.TEXT, "", ""), [MetricSample((), "on")]),
            MetricReading(labelled, [MetricSample(("busy",), 2)]),
        ]
    )
    assert (len(told), "state" in told, "else" in told) == (2, True, False)
    assert told["state"] == "on"
    assert [told.number("refusals", code) for code in ("busy", "full")] == [2, 0]
    with pytest.raises(KeyError, match="there is no metric 'else'"):
        told.number("else")
    assert told.number("else", default=3) == 3
    for labels in (), ("busy", "full"):
        with pytest.raises(KeyError, match=r"refusals has other labels than .*; it has code"):
            told.number("refusals", *labels)
    with pytest.raises(KeyError, match=r"state has other labels than .*; it has none"):
        told.number("state", "busy")
    with pytest.raises(KeyError, match="refusals has labels: code"):
        told["refusals"]
    with pytest.raises(TypeError, match="state is no number: 'on'"):
        told.number("state")
