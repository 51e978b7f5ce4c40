"""Metrics of a process, each declared once, with name, kind, unit and help.

A declaration stands beside the part whose state it reads, as a row of a tuple; a ``MetricBoard``
reads all rows of a process on request. So to count an event costs a part one addition to a number
of its own, and an unread metric costs nothing.

    METRICS: Final[tuple[Measured[Desk], ...]] = (
        counter("snapshots_made_total", "snapshots that became whole", lambda desk: desk.made),
    )
"""

import enum
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import islice
from typing import Any, Final, Generic, TypedDict, TypeVar, Unpack

import msgspec

_O = TypeVar("_O")
_T = TypeVar("_T")

MAX_LABEL_SETS: Final = 1_000
"""Sets of labels that one metric keeps apart, unless a board says otherwise; samples beyond them
are added up as ``OTHER``."""
LABEL_SETS_PER_PAGE: Final = 1_000
"""A page of a reading ends when so many were looked at, each at up to 2 µs."""
OTHER: Final = "(other)"
"""Label value of all sets that are not kept apart; no topic has such a name."""
LATENCY_BOUNDS_MS: Final = (0.25, 1.0, 3.0, 5.0, 7.0, 10.0, 100.0, 1_000.0, 2_000.0, 3_000.0)
"""RocketMQ's buckets of command latencies, with one more in front."""
SIZE_BOUNDS_BYTES: Final = (1_024.0, 4_096.0, 524_288.0, 1_048_576.0, 2_097_152.0, 4_194_304.0)
"""RocketMQ's buckets of message sizes."""
UNITS_OF_NAMES: Final = ("bytes", "ms")
"""Units that follow from the last word of a metric's name; others are given."""
FOLDED: Final = "folded_label_sets"
"""Name of the metric that every board has: label sets that went into ``OTHER``."""


class MetricKind(enum.StrEnum):
    """Kind of a metric."""

    COUNTER = "counter"
    """Only grows while the process lives."""
    GAUGE = "gauge"
    """Goes up and down."""
    HISTOGRAM = "histogram"
    """Counts of observations by size."""
    TEXT = "text"
    """A state or an identity; nothing to count with."""


class Metric(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Description of one metric.

    Attributes:
        name: Name, unique in its process, lower case with underscores.
        kind: Kind of the metric: counter, gauge, histogram or text.
        unit: ``bytes``, ``ms``, ``percent``, ``messages``, …; empty for a metric without a unit.
        help: Description, one line.
        labels: Names of its labels; none for most.
        rocketmq_name: Name of the same metric in RocketMQ 5, empty if RocketMQ has none.
    """

    name: str
    kind: MetricKind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    rocketmq_name: str = ""


class Distribution(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Content of a histogram at one moment.

    Attributes:
        bounds: Upper bounds of the buckets, each included, growing.
        counts: Observations by bucket; one more than bounds, the last for those above all.
        total: Sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Observations altogether."""
        return sum(self.counts)

    def __add__(self, other: "Distribution") -> "Distribution":
        """Add two distributions; their bounds are the same."""
        counts = map(int.__add__, self.counts, other.counts)
        return Distribution(self.bounds, tuple(counts), self.total + other.total)

    def quantile(self, share: float) -> float:
        """Return the upper bound of the bucket that a share of all observations lies within.

        Args:
            share: 0 to 1.

        Returns:
            The bound; infinite above all bounds, 0 if nothing was observed.
        """
        wanted, seen = share * self.count, 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            seen += count
            if count and seen >= wanted:
                return bound
        return 0.0


MetricValue = int | float | bool | str | Distribution
"""A number where there is something to count or measure, else a text."""
LabelValues = tuple[str, ...]


class MetricSample(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One value of a metric.

    Attributes:
        labels: Values of its labels, in their order.
        value: The value.
    """

    labels: LabelValues
    value: MetricValue


class MetricReading(msgspec.Struct, array_like=True, frozen=True):
    """A metric with its values at one moment.

    Attributes:
        metric: Which one.
        samples: One for a metric without labels, else one for each set of them, ``max_label_sets``
            at most, and one whose labels are all ``(other)``: the sum of the rest.
    """

    metric: Metric
    samples: list[MetricSample]


class Histogram:
    """Counts observations by size; 0.2 µs each.

    Args:
        bounds: Upper bounds of the buckets, growing.
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts an observation, or several of the same size."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def read(self) -> Distribution:
        """Return the distribution observed so far."""
        return Distribution(self._bounds, tuple(self._counts), self._total)

    @staticmethod
    def added_up(histograms: "Sequence[Histogram]") -> Distribution:
        """Add up the distributions of histograms with the same bounds, at least one."""
        counts = tuple(map(sum, zip(*(one._counts for one in histograms), strict=True)))
        return Distribution(histograms[0]._bounds, counts, sum(one._total for one in histograms))


class Labelled(Generic[_T]):
    """The values of a metric with very many sets of labels. They are read in parts; those beyond
    the limit are only added up.

    Args:
        owners: Objects with one value each. They may come and go while they are walked.
        labels: Returns an owner's label values.
        value: Returns an owner's number, or its histogram.
    """

    def __init__(
        self,
        owners: Iterable[_T],
        labels: Callable[[_T], LabelValues],
        value: Callable[[_T], int | float | Histogram],
    ) -> None:
        self._owners = owners
        self._labels = labels
        self._value = value

    def parts(self, most: int) -> Iterator[tuple[int, list[MetricSample]]]:
        """Yield samples of so many owners, then one for the others if there are more.

        Args:
            most: Owners that are kept apart.

        Returns:
            How many owners each part looked at, and their samples; none of it takes long.
        """
        owners = iter(self._owners)
        first = islice(owners, most)
        while samples := [
            MetricSample(self._labels(one), _read(self._value(one)))
            for one in islice(first, LABEL_SETS_PER_PAGE)
        ]:
            yield len(samples), samples
        labels: LabelValues = ()
        sums: list[MetricValue] = []
        while others := list(islice(owners, LABEL_SETS_PER_PAGE)):
            labels = labels or (OTHER,) * len(self._labels(others[0]))
            sums.append(_sum([self._value(one) for one in others]))
            yield len(others), []
        if sums:
            yield 0, [MetricSample(labels, _added_up(sums))]


Measurement = MetricValue | Mapping[LabelValues, MetricValue] | Labelled[Any]
"""A value, or values by label values for a metric that has labels."""


class Measured(msgspec.Struct, Generic[_O], frozen=True):
    """A declared metric.

    Attributes:
        metric: Description of the metric.
        read: Reads its value from the part that keeps it.
    """

    metric: Metric
    read: Callable[[_O], Measurement]


class MetricFields(TypedDict, total=False):
    """Fields of ``Metric`` that need not be said of every one."""

    unit: str
    labels: tuple[str, ...]
    rocketmq_name: str


def counter(
    name: str, help: str, read: Callable[[_O], Measurement], **more: Unpack[MetricFields]
) -> Measured[_O]:
    """Declares a metric that only grows; see ``Metric``. Names that end in ms or bytes have it as
    their unit."""
    return Measured(_metric(name, MetricKind.COUNTER, help, more), read)


def gauge(
    name: str, help: str, read: Callable[[_O], Measurement], **more: Unpack[MetricFields]
) -> Measured[_O]:
    """Declares a metric that goes up and down; else as ``counter``."""
    return Measured(_metric(name, MetricKind.GAUGE, help, more), read)


def histogram(
    name: str, help: str, read: Callable[[_O], Measurement], **more: Unpack[MetricFields]
) -> Measured[_O]:
    """Declares a metric of ``Distribution`` values; else as ``counter``."""
    return Measured(_metric(name, MetricKind.HISTOGRAM, help, more), read)


def _metric(name: str, kind: MetricKind, help: str, more: MetricFields) -> Metric:
    last = name.removesuffix("_total").rpartition("_")[2]
    fields: MetricFields = {"unit": last if last in UNITS_OF_NAMES else "", **more}
    return Metric(name, kind, help=help, **fields)


def text(name: str, help: str, read: Callable[[_O], str]) -> Measured[_O]:
    """Declares a state or an identity; see ``Metric``."""
    return Measured(Metric(name, MetricKind.TEXT, "", help), read)


class MetricBoard:
    """All metrics of a process.

    Args:
        most: Sets of labels that one metric may have in a reading.
    """

    def __init__(self, most: int = MAX_LABEL_SETS) -> None:
        self._most = most
        self._names = {FOLDED}
        self._readers: list[Callable[[], list[tuple[Metric, Measurement]]]] = []

    def add(self, declared: Iterable[Measured[_O]], look: Callable[[], _O]) -> None:
        """Reads these too from now on.

        Args:
            declared: Metrics.
            look: Called once for each reading; returns the part that the metrics are read from.
        """
        rows = tuple(declared)
        for row in rows:
            assert row.metric.name not in self._names, f"two metrics are {row.metric.name}"
            self._names.add(row.metric.name)

        def read() -> list[tuple[Metric, Measurement]]:
            owner = look()
            return [(row.metric, row.read(owner)) for row in rows]

        self._readers.append(read)

    def read(self) -> list[MetricReading]:
        """Return all metrics with their values now, in the order in which they were added."""
        return list(Readings(one for page, _ in self.pages() for one in page))

    def pages(self) -> Iterator[tuple[list[MetricReading], bool]]:
        """Yield all metrics in pages, each made in a short time, with the values of that time.

        Returns:
            Metrics, and whether more follow. One with very many sets of labels goes on in the next
            page.
        """
        page: list[MetricReading] = []
        looked = folded = 0
        for read in self._readers:
            for metric, measured in read():
                samples: list[MetricSample] = []
                seen = 0
                for count, part in _parts(measured, self._most):
                    samples += part
                    seen += count
                    looked += count
                    if looked >= LABEL_SETS_PER_PAGE:
                        if samples:
                            page.append(MetricReading(metric, samples))
                        yield page, True
                        page, samples, looked = [], [], 0
                folded += max(seen - self._most, 0)
                page.append(MetricReading(metric, samples))
        help_text = "sets of labels that this reading adds up as (other)"
        page.append(
            MetricReading(
                Metric(FOLDED, MetricKind.GAUGE, "", help_text), [MetricSample((), folded)]
            )
        )
        yield page, False


class Readings:
    """Metrics of a process as it reported them, by name.

    Args:
        readings: As they came; one that went on in another page comes several times.
    """

    def __init__(self, readings: Iterable[MetricReading]) -> None:
        self._readings: dict[str, MetricReading] = {}
        for one in readings:
            known = self._readings.get(one.metric.name)
            samples = [*known.samples, *one.samples] if known else one.samples
            self._readings[one.metric.name] = MetricReading(one.metric, samples)

    def __iter__(self) -> Iterator[MetricReading]:
        return iter(self._readings.values())

    def __len__(self) -> int:
        return len(self._readings)

    def __contains__(self, name: object) -> bool:
        return name in self._readings

    def __getitem__(self, name: str) -> MetricValue:
        """Return the value of a metric that has no labels.

        Raises:
            KeyError: There is none of that name, or it has labels.
        """
        reading = self._readings[name]
        if reading.metric.labels:
            raise KeyError(f"{name} has labels: {', '.join(reading.metric.labels)}")
        return reading.samples[0].value

    def number(self, name: str, *labels: str, default: float | None = None) -> float:
        """Return the value of a metric as a number.

        Args:
            name: Of a metric.
            labels: Values of its labels, in their order.
            default: In place of a metric that is not there; processes of other roles, stores and
                versions have others. None to raise.

        Returns:
            Its value; 0 if nothing with these labels has been counted yet.

        Raises:
            KeyError: There is no such metric, or it has more labels, or fewer.
            TypeError: It is a text, or a distribution.
        """
        reading = self._readings.get(name)
        if reading is None:
            if default is not None:
                return default
            raise KeyError(f"there is no metric {name!r}")
        if len(labels) != len(reading.metric.labels):
            wanted = ", ".join(reading.metric.labels) or "none"
            raise KeyError(f"{name} has other labels than {labels}; it has {wanted}")
        for sample in reading.samples:
            if sample.labels == labels:
                if isinstance(sample.value, str | Distribution):
                    raise TypeError(f"{name} is no number: {sample.value!r}")
                return sample.value
        return 0


def _read(value: int | float | Histogram) -> MetricValue:
    return value.read() if isinstance(value, Histogram) else value


def _sum(values: list[int | float | Histogram]) -> int | float | Distribution:
    meters = [value for value in values if isinstance(value, Histogram)]
    if meters:
        return Histogram.added_up(meters)
    return sum(value for value in values if not isinstance(value, Histogram))


def _parts(measured: Measurement, most: int) -> Iterator[tuple[int, list[MetricSample]]]:
    if isinstance(measured, Labelled):
        yield from measured.parts(most)
    elif isinstance(measured, Mapping):
        yield len(measured), _samples(measured, most)
    else:
        yield 0, [MetricSample((), measured)]


def _samples(measured: Mapping[LabelValues, MetricValue], most: int) -> list[MetricSample]:
    samples = [MetricSample(*item) for item in islice(measured.items(), most)]
    rest = list(islice(measured.items(), most, None))
    if rest:
        labels = (OTHER,) * len(rest[0][0])
        samples.append(MetricSample(labels, _added_up([value for _, value in rest])))
    return samples


def _added_up(values: list[MetricValue]) -> MetricValue:
    parts = [value for value in values if isinstance(value, Distribution)]
    if parts:
        return reduce(Distribution.__add__, parts)
    return sum(value for value in values if not isinstance(value, str | Distribution))
