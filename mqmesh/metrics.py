"""Figures: what a process counts and measures, each declared once, with name, kind, unit and help.

A declaration stands beside the part whose state it reads, as a row of a tuple; a ``FigureBoard``
reads all rows of a process when somebody asks. So counting costs a part an addition to a number
of its own, and a figure that nobody reads costs nothing.

    FIGURES: Final[tuple[Measured[Desk], ...]] = (
        counter("snapshots_made_total", "snapshots that became whole", lambda desk: desk.made),
    )
"""

import enum
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import islice
from typing import Any, Final, Generic, TypeVar

import msgspec

_O = TypeVar("_O")
_T = TypeVar("_T")

MAX_LABEL_SETS: Final = 1_000
"""Sets of labels that one figure tells apart, unless a board says otherwise; what is beyond them
is added up as ``OTHER``."""
LABEL_SETS_PER_PAGE: Final = 1_000
"""A page of a reading ends when so many were looked at, each at up to 2 µs."""
OTHER: Final = "(other)"
"""Stands for the labels of all sets that are not told apart; no topic has such a name."""
LATENCY_BOUNDS_MS: Final = (0.25, 1.0, 3.0, 5.0, 7.0, 10.0, 100.0, 1_000.0, 2_000.0, 3_000.0)
"""RocketMQ's buckets of command latencies, with one more in front."""
SIZE_BOUNDS_BYTES: Final = (1_024.0, 4_096.0, 524_288.0, 1_048_576.0, 2_097_152.0, 4_194_304.0)
"""RocketMQ's buckets of message sizes."""
FOLDED: Final = "folded_label_sets"
"""Name of the figure that every board has: label sets that went into ``OTHER``."""


class FigureKind(enum.StrEnum):
    """What may be done with a figure."""

    COUNTER = "counter"
    """Only grows while the process lives."""
    GAUGE = "gauge"
    """Goes up and down."""
    HISTOGRAM = "histogram"
    """Counts of observations by size."""
    TEXT = "text"
    """A state or an identity; nothing to count with."""


class Figure(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What one figure is.

    Attributes:
        name: Unique in its process, lower case with underscores.
        kind: What may be done with it.
        unit: ``bytes``, ``ms``, ``percent``, ``messages``, …; empty where nothing has to be said.
        help: One line.
        labels: Names of its labels; none for most.
        metric: Its name in RocketMQ 5, empty for what RocketMQ has not.
    """

    name: str
    kind: FigureKind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    metric: str = ""


class Distribution(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a histogram holds at one moment.

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
        """Both together; their bounds are the same."""
        counts = map(int.__add__, self.counts, other.counts)
        return Distribution(self.bounds, tuple(counts), self.total + other.total)

    def quantile(self, share: float) -> float:
        """Upper bound of the bucket that a share of all observations lies within.

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


FigureValue = int | float | bool | str | Distribution
"""A number where there is something to count or measure, else a text."""
LabelValues = tuple[str, ...]


class FigureSample(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One value of a figure.

    Attributes:
        labels: Values of its labels, in their order.
        value: The value.
    """

    labels: LabelValues
    value: FigureValue


class FigureReading(msgspec.Struct, array_like=True, frozen=True):
    """A figure with its values at one moment.

    Attributes:
        figure: Which one.
        samples: One for a figure without labels, else one for each set of them.
    """

    figure: Figure
    samples: list[FigureSample]


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
        """What was observed so far."""
        return Distribution(self._bounds, tuple(self._counts), self._total)

    @staticmethod
    def added_up(histograms: "Sequence[Histogram]") -> Distribution:
        """What several with the same bounds, at least one, observed so far altogether."""
        counts = tuple(map(sum, zip(*(one._counts for one in histograms), strict=True)))
        return Distribution(histograms[0]._bounds, counts, sum(one._total for one in histograms))


class Labelled(Generic[_T]):
    """The values of a figure with labels that has very many: they are read little by little, and
    of those beyond the limit nothing is made but their sum.

    Args:
        owners: What has a value each; they are walked while others may come and go.
        labels: An owner's label values.
        value: Its number, or its histogram.
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

    def parts(self, most: int) -> Iterator[tuple[int, list[FigureSample]]]:
        """Samples of so many owners, then one for the others if there are more.

        Args:
            most: Owners that are told apart.

        Returns:
            How many owners each part looked at, and their samples; none of it takes long.
        """
        owners = iter(self._owners)
        told = islice(owners, most)
        while samples := [
            FigureSample(self._labels(one), _read(self._value(one)))
            for one in islice(told, LABEL_SETS_PER_PAGE)
        ]:
            yield len(samples), samples
        labels: LabelValues = ()
        sums: list[FigureValue] = []
        while others := list(islice(owners, LABEL_SETS_PER_PAGE)):
            labels = labels or (OTHER,) * len(self._labels(others[0]))
            sums.append(_sum([self._value(one) for one in others]))
            yield len(others), []
        if sums:
            yield 0, [FigureSample(labels, _added_up(sums))]


Measurement = FigureValue | Mapping[LabelValues, FigureValue] | Labelled[Any]
"""A value, or values by label values for a figure that has labels."""


class Measured(msgspec.Struct, Generic[_O], frozen=True):
    """A declared figure.

    Attributes:
        figure: What it is.
        read: Its value, from the part that knows.
    """

    figure: Figure
    read: Callable[[_O], Measurement]


def counter(
    name: str,
    help: str,
    read: Callable[[_O], Measurement],
    *,
    unit: str = "",
    labels: tuple[str, ...] = (),
    metric: str = "",
) -> Measured[_O]:
    """Declares a figure that only grows; see ``Figure``."""
    return Measured(Figure(name, FigureKind.COUNTER, unit, help, labels, metric), read)


def gauge(
    name: str,
    help: str,
    read: Callable[[_O], Measurement],
    *,
    unit: str = "",
    labels: tuple[str, ...] = (),
    metric: str = "",
) -> Measured[_O]:
    """Declares a figure that goes up and down; see ``Figure``."""
    return Measured(Figure(name, FigureKind.GAUGE, unit, help, labels, metric), read)


def histogram(
    name: str,
    help: str,
    read: Callable[[_O], Measurement],
    *,
    unit: str,
    labels: tuple[str, ...] = (),
    metric: str = "",
) -> Measured[_O]:
    """Declares a figure of ``Distribution`` values; see ``Figure``."""
    return Measured(Figure(name, FigureKind.HISTOGRAM, unit, help, labels, metric), read)


def text(name: str, help: str, read: Callable[[_O], str]) -> Measured[_O]:
    """Declares a state or an identity; see ``Figure``."""
    return Measured(Figure(name, FigureKind.TEXT, "", help), read)


class FigureBoard:
    """All figures of a process.

    Args:
        most: Sets of labels that one figure may have in a reading.
    """

    def __init__(self, most: int = MAX_LABEL_SETS) -> None:
        self._most = most
        self._names = {FOLDED}
        self._readers: list[Callable[[], list[tuple[Figure, Measurement]]]] = []

    def add(self, declared: Iterable[Measured[_O]], look: Callable[[], _O]) -> None:
        """Reads these too from now on.

        Args:
            declared: Figures.
            look: Called once a reading; what it returns is what they are read from.
        """
        rows = tuple(declared)
        for row in rows:
            assert row.figure.name not in self._names, f"two figures are {row.figure.name}"
            self._names.add(row.figure.name)

        def read() -> list[tuple[Figure, Measurement]]:
            owner = look()
            return [(row.figure, row.read(owner)) for row in rows]

        self._readers.append(read)

    def read(self) -> list[FigureReading]:
        """All figures with their values now, in the order in which they were added."""
        return list(Readings(one for page, _ in self.pages() for one in page))

    def pages(self) -> Iterator[tuple[list[FigureReading], bool]]:
        """The same in pages, none of which takes long; values are those of when it is made.

        Returns:
            Figures, and whether more follow. One with very many sets of labels goes on in the next
            page.
        """
        page: list[FigureReading] = []
        looked = folded = 0
        for read in self._readers:
            for figure, measured in read():
                samples: list[FigureSample] = []
                seen = 0
                for count, part in _parts(measured, self._most):
                    samples += part
                    seen += count
                    looked += count
                    if looked >= LABEL_SETS_PER_PAGE:
                        if samples:
                            page.append(FigureReading(figure, samples))
                        yield page, True
                        page, samples, looked = [], [], 0
                folded += max(seen - self._most, 0)
                page.append(FigureReading(figure, samples))
        told = "sets of labels that this reading adds up as (other)"
        page.append(
            FigureReading(Figure(FOLDED, FigureKind.GAUGE, "", told), [FigureSample((), folded)])
        )
        yield page, False


class Readings:
    """Figures of a process as they were told, by name.

    Args:
        readings: As they came; one that went on in another page comes several times.
    """

    def __init__(self, readings: Iterable[FigureReading]) -> None:
        self._readings: dict[str, FigureReading] = {}
        for one in readings:
            known = self._readings.get(one.figure.name)
            samples = [*known.samples, *one.samples] if known else one.samples
            self._readings[one.figure.name] = FigureReading(one.figure, samples)

    def __iter__(self) -> Iterator[FigureReading]:
        return iter(self._readings.values())

    def __len__(self) -> int:
        return len(self._readings)

    def __contains__(self, name: object) -> bool:
        return name in self._readings

    def __getitem__(self, name: str) -> FigureValue:
        """The value of a figure that has no labels.

        Raises:
            KeyError: There is none of that name, or it has labels.
        """
        reading = self._readings[name]
        if reading.figure.labels:
            raise KeyError(f"{name} has labels: {', '.join(reading.figure.labels)}")
        return reading.samples[0].value

    def number(self, name: str, *labels: str, default: float | None = None) -> float:
        """A number.

        Args:
            name: Of a figure.
            labels: Values of its labels, in their order.
            default: In place of a figure that is not there; processes of other roles, stores and
                versions have others. None to raise.

        Returns:
            Its value; 0 if nothing with these labels has been counted yet.

        Raises:
            KeyError: There is no such figure, or it has more labels, or fewer.
            TypeError: It is a text, or a distribution.
        """
        reading = self._readings.get(name)
        if reading is None:
            if default is not None:
                return default
            raise KeyError(f"there is no figure {name!r}")
        if len(labels) != len(reading.figure.labels):
            wanted = ", ".join(reading.figure.labels) or "none"
            raise KeyError(f"{name} has other labels than {labels}; it has {wanted}")
        for sample in reading.samples:
            if sample.labels == labels:
                if isinstance(sample.value, str | Distribution):
                    raise TypeError(f"{name} is no number: {sample.value!r}")
                return sample.value
        return 0


def _read(value: int | float | Histogram) -> FigureValue:
    return value.read() if isinstance(value, Histogram) else value


def _sum(values: list[int | float | Histogram]) -> int | float | Distribution:
    meters = [value for value in values if isinstance(value, Histogram)]
    if meters:
        return Histogram.added_up(meters)
    return sum(value for value in values if not isinstance(value, Histogram))


def _parts(measured: Measurement, most: int) -> Iterator[tuple[int, list[FigureSample]]]:
    if isinstance(measured, Labelled):
        yield from measured.parts(most)
    elif isinstance(measured, Mapping):
        yield len(measured), _samples(measured, most)
    else:
        yield 0, [FigureSample((), measured)]


def _samples(measured: Mapping[LabelValues, FigureValue], most: int) -> list[FigureSample]:
    samples = [FigureSample(*item) for item in islice(measured.items(), most)]
    rest = list(islice(measured.items(), most, None))
    if rest:
        labels = (OTHER,) * len(rest[0][0])
        samples.append(FigureSample(labels, _added_up([value for _, value in rest])))
    return samples


def _added_up(values: list[FigureValue]) -> FigureValue:
    parts = [value for value in values if isinstance(value, Distribution)]
    if parts:
        return reduce(Distribution.__add__, parts)
    return sum(value for value in values if not isinstance(value, str | Distribution))
