"""Histories of readings for charts, bounded in memory. Pure."""

from array import array
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from mqmesh.units import MIB

SeriesKey = tuple[str, ...]
"""Exporter's name of a metric, and the values of its labels: ``("rocketmq_messages_in_total",
"orders")``."""

SHORT_S: Final = 3_600
LONG_S: Final = 86_400
LONG_STEP_S: Final = 60
MAX_BYTES: Final = 12 * MIB
BYTES_PER_POINT: Final = 8
BYTES_PER_SERIES: Final = 1_000
"""Bytes that a series takes beside its points, about."""
MAX_POINTS: Final = 600
"""Points of one chart: more than a screen shows apart."""


class _Ring:
    """Points of a time, oldest first: s since 1970, and values."""

    def __init__(self, keep_s: int) -> None:
        self.keep_s = keep_s
        self.times = array("I")
        self.values = array("f")

    def add(self, at_s: int, value: float) -> None:
        self.times.append(at_s)
        self.values.append(value)
        if at_s - self.times[0] > self.keep_s * 5 // 4:  # now and then, many at once
            begin = next(n for n, t in enumerate(self.times) if at_s - t <= self.keep_s)
            del self.times[:begin], self.values[:begin]


class _History:
    def __init__(self) -> None:
        self.short = _Ring(SHORT_S)
        self.long = _Ring(LONG_S)

    def size(self) -> int:
        points = len(self.short.times) + len(self.long.times)
        return BYTES_PER_SERIES + BYTES_PER_POINT * points


class SeriesData(msgspec.Struct, frozen=True):
    """Points of a chart.

    Attributes:
        labels: Names of the lines.
        times: s since 1970.
        values: Of each line, as many as times; None where nothing is known.
    """

    labels: list[str]
    times: list[int]
    values: list[list[float | None]]


class SeriesBook:
    """Histories of the last hour, point by point, and of the last day, one point a minute.

    If there is no room, the histories that were read least recently are removed first.

    Args:
        max_bytes: Room for all points.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        # Those that were looked at last are last; a new one comes first.
        self._looked: dict[SeriesKey, _History] = {}
        self._unlooked: dict[SeriesKey, _History] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._looked) + len(self._unlooked)

    def note(self, at_ms: int, values: Mapping[SeriesKey, float]) -> None:
        """Adds a point to each series.

        Args:
            at_ms: Wall clock.
            values: By series; those that are known and stand not here are 0.
        """
        at_s = at_ms // 1_000
        self._bytes = sum(
            one.size() for kept in (self._looked, self._unlooked) for one in kept.values()
        )
        for key in values:
            if key not in self._looked and key not in self._unlooked:
                if self._bytes >= self._max_bytes:
                    break
                self._unlooked[key] = _History()
                self._bytes += BYTES_PER_SERIES
        for key, history in (*self._looked.items(), *self._unlooked.items()):
            value = values.get(key, 0.0)
            history.short.add(at_s, value)
            self._bytes += BYTES_PER_POINT
            if not history.long.times or at_s - history.long.times[-1] >= LONG_STEP_S:
                history.long.add(at_s, value)
        while self._bytes > self._max_bytes and len(self) > 1:
            kept = self._unlooked or self._looked
            self._bytes -= kept.pop(next(iter(kept))).size()

    def data(self, lines: Iterable[tuple[str, SeriesKey]], *, day: bool = False) -> SeriesData:
        """Return the points of a chart, and count its series as looked at.

        Args:
            lines: Name and series of each line.
            day: Of the last day, not of the last hour.
        """
        found: list[tuple[str, _Ring]] = []
        for label, key in lines:
            history = self._looked.pop(key, None) or self._unlooked.pop(key, None) or _History()
            self._looked[key] = history
            found.append((label, history.long if day else history.short))
        # The sampler adds meanwhile, times first: as many values as are there count.
        points = [dict(zip(ring.times[:], ring.values[:], strict=False)) for _, ring in found]
        times = sorted(set().union(*points))
        times = times[:: max(1, -(-len(times) // MAX_POINTS))]
        return SeriesData(
            [label for label, _ in found],
            times,
            [[of_line.get(at) for at in times] for of_line in points],
        )
