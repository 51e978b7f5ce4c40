"""Spans and metrics that a client reports to OpenTelemetry, kept in memory by its SDK."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class IntrospectionService:
    """Spans and metrics reported since a test began."""

    def __init__(self, exporter: InMemorySpanExporter, reader: InMemoryMetricReader) -> None:
        self._exporter = exporter
        self._reader = reader
        self._before = self._all()

    def spans(self, name: str = "", scope: str = "mqmesh") -> list[ReadableSpan]:
        """Spans that have ended, in the order in which they began.

        Args:
            name: Only those of this name.
            scope: Name of the instrumentation scope.
        """
        found = [
            one
            for one in self._exporter.get_finished_spans()
            if one.instrumentation_scope is not None
            and one.instrumentation_scope.name == scope
            and (not name or one.name == name)
        ]
        return sorted(found, key=lambda one: one.start_time or 0)

    def metric(self, name: str) -> list[tuple[dict[str, Any], float]]:
        """Returns counts of a metric by attributes; of a histogram, the number of values."""
        grown = {key: count - self._before.get(key, 0) for key, count in self._all().items()}
        return [
            (dict(labels), count) for (one, labels), count in grown.items() if one == name and count
        ]

    def _all(self) -> dict[tuple[str, tuple[tuple[str, Any], ...]], float]:
        data = self._reader.get_metrics_data()
        found = {}
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        labels = tuple((point.attributes or {}).items())
                        count = getattr(point, "count", None)
                        value = point.value if count is None else count  # type: ignore[union-attr]
                        found[metric.name, labels] = value
        return found


@contextmanager
def telling() -> Iterator[IntrospectionService]:
    """Forgets the spans of before, and gives those of from now on."""
    exporter, reader = _set_up()
    exporter.clear()
    yield IntrospectionService(exporter, reader)


@cache
def _set_up() -> tuple[InMemorySpanExporter, InMemoryMetricReader]:
    # Once a process: OpenTelemetry refuses others.
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    spans = TracerProvider(shutdown_on_exit=False)
    spans.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(spans)
    metrics.set_meter_provider(MeterProvider([reader], shutdown_on_exit=False))
    return exporter, reader
