"""The page that Prometheus reads, made by its own library, the extra ``metrics``."""

import threading
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from mqmesh.clock import Clock
from mqmesh.errors import ConfigError
from mqmesh.figures import Distribution, FigureKind
from mqmesh.roles.exporter.collector import Collector
from mqmesh.roles.exporter.families import Families

try:
    from prometheus_client import core
    from prometheus_client.exposition import generate_latest
except ImportError as error:
    raise ConfigError("an exporter needs the extra: pip install 'mqmesh[metrics]'") from error

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Page:
    """The newest page; threads may ask at the same time.

    Args:
        collector: Makes the next one.
        clock: Source of time.
        min_interval_ms: How long a page is given again.
    """

    def __init__(self, collector: Collector, clock: Clock, min_interval_ms: int) -> None:
        self._collector = collector
        self._clock = clock
        self._min_interval_ms = min_interval_ms
        self._lock = threading.Lock()
        self._made_ms: int | None = None
        self._text = b""

    def text(self) -> bytes:
        """A page that is not too old; who comes while one is made waits for it."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            if self._made_ms is None or now_ms - self._made_ms >= self._min_interval_ms:
                self._text = text_of(self._collector.collect())
                self._made_ms = self._clock.monotonic_ms()
            return self._text


def text_of(families: Families) -> bytes:
    """What Prometheus reads."""
    return generate_latest(_Registry(families))


class _Registry:
    """Asked by the library, in place of a registry of its own."""

    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterator[core.Metric]:
        """All families, as the library has them."""
        for metric, series in self._families:
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
