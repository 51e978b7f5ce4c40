"""The text of a page: line by line what the library of Prometheus writes."""

from __future__ import annotations

import math

from prometheus_client import core
from prometheus_client.exposition import generate_latest

from mqmesh.metrics import Distribution, MetricKind
from mqmesh.roles.exporter.families import ExportedMetric, Families, Series
from mqmesh.roles.exporter.page import text_of

GAUGE = ExportedMetric("free_bytes", MetricKind.GAUGE, 'a "help" of \\ and\nmore', ("disk", "node"))
COUNTER = ExportedMetric("sent_total", MetricKind.COUNTER, "sent", ("topic",))
HISTOGRAM = ExportedMetric("took_seconds", MetricKind.HISTOGRAM, "took", ("code",))
PLAIN = ExportedMetric("up", MetricKind.GAUGE, "up", ())
VALUES = [0, 1, True, 2.5, -3, 1e300, 123456789012345678, 1e-9, math.inf, -math.inf, math.nan]
NAMES = ["plain", 'with "quotes"', "a\\b", "two\nlines", "ä", ""]


class Library:
    """The same, as the library is told it."""

    def collect(self):
        gauge = core.GaugeMetricFamily(GAUGE.name, GAUGE.help, labels=GAUGE.labels)
        for number, value in enumerate(VALUES):
            gauge.add_metric(("d", f"n{number}"), value)
        for name in NAMES:
            gauge.add_metric((name, name), 1)
        yield gauge
        counter = core.CounterMetricFamily(COUNTER.name, COUNTER.help, labels=COUNTER.labels)
        counter.add_metric(("t",), 7)
        yield counter
        histogram = core.HistogramMetricFamily(
            HISTOGRAM.name, HISTOGRAM.help, labels=HISTOGRAM.labels
        )
        histogram.add_metric(('a"b',), [("0.25", 3), ("100.0", 5), ("+Inf", 6)], 123.5)
        yield histogram
        plain = core.GaugeMetricFamily(PLAIN.name, PLAIN.help)
        plain.add_metric((), 1)
        yield plain


def test_each_line_is_as_the_library_writes_it():
    series = [Series(GAUGE, ("d", f"n{number}"), value) for number, value in enumerate(VALUES)]
    series += [Series(GAUGE, (name, name), 1) for name in NAMES]
    series += [
        Series(COUNTER, ("t",), 7),
        Series(HISTOGRAM, ('a"b',), Distribution((0.25, 100.0), (3, 2, 1), 123.5)),
        Series(PLAIN, (), 1),
    ]
    ours, theirs = text_of(Families(series)), generate_latest(Library())
    assert ours.decode().splitlines() == theirs.decode().splitlines()
