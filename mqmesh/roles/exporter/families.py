"""Metrics, as Prometheus has them: families of series with labels, and the text of them.

The text is made by Prometheus' own library, the extra ``metrics``.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final

import msgspec

from mqmesh.errors import ConfigError
from mqmesh.figures import Distribution, FigureKind

try:
    from prometheus_client import core
    from prometheus_client.exposition import generate_latest
except ImportError as error:
    raise ConfigError("an exporter needs the extra: pip install 'mqmesh[metrics]'") from error

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Metric(msgspec.Struct, frozen=True):
    """What all series of a family have in common.

    Attributes:
        name: As it is exposed; of a histogram without ``_bucket``, ``_sum`` and ``_count``.
        kind: ``COUNTER``, ``GAUGE`` or ``HISTOGRAM``.
        help: One line.
        labels: Their names.
    """

    name: str
    kind: FigureKind
    help: str
    labels: tuple[str, ...]


class Series(msgspec.Struct, frozen=True):
    """One value of a metric.

    Attributes:
        metric: Which one.
        labels: Values of its labels, in their order.
        value: A distribution for a histogram, else a number.
    """

    metric: Metric
    labels: tuple[str, ...]
    value: float | Distribution


class Families:
    """Series by metric, in the order in which metrics came; of equal ones the first stays.

    Args:
        series: All of them.
    """

    def __init__(self, series: Iterable[Series]) -> None:
        self._by_name: dict[str, tuple[Metric, dict[tuple[str, ...], float | Distribution]]] = {}
        for one in series:
            metric, values = self._by_name.setdefault(one.metric.name, (one.metric, {}))
            if (metric.labels, metric.kind) == (one.metric.labels, one.metric.kind):
                values.setdefault(one.labels, one.value)

    def __len__(self) -> int:
        return sum(len(values) for _, values in self._by_name.values())

    def text(self) -> bytes:
        """What Prometheus reads."""
        return generate_latest(self)

    def collect(self) -> Iterator[core.Metric]:
        """Asked by the library, in place of a registry of its own."""
        for metric, series in self._by_name.values():
            name, help, labels = metric.name, metric.help, metric.labels
            if metric.kind is FigureKind.HISTOGRAM:
                histogram = core.HistogramMetricFamily(name, help, labels=labels)
                for values, told in series.items():
                    if isinstance(told, Distribution):
                        bounds = (*(repr(bound) for bound in told.bounds), "+Inf")
                        buckets = list(zip(bounds, accumulate(told.counts), strict=True))
                        histogram.add_metric(values, buckets, told.total)
                yield histogram
                continue
            is_counter = metric.kind is FigureKind.COUNTER
            kind = core.CounterMetricFamily if is_counter else core.GaugeMetricFamily
            family = kind(name, help, labels=labels)
            for values, told in series.items():
                if not isinstance(told, Distribution):
                    family.add_metric(values, told)
            yield family
