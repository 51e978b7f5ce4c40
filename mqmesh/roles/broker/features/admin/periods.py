"""How much totals grew: of late, today and yesterday, in 24 hours. Pure; from the broker's start.

Totals are looked at once a minute, and at midnight (UTC).
"""

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Final

MINUTE_MS: Final = 60_000
DAY_MS: Final = 24 * 60 * MINUTE_MS
HOURS: Final = 24

Totals = Mapping[Hashable, int]
"""What has never been counted is left out."""


class Periods:
    """Remembers totals of before, by keys.

    Args:
        now_ms: When all totals were 0, monotonic clock.
    """

    def __init__(self, now_ms: int) -> None:
        self._minutes: deque[tuple[int, Totals]] = deque([(now_ms, {})], maxlen=2)
        self._hours: deque[tuple[int, Totals]] = deque([(now_ms, {})], maxlen=HOURS + 1)
        self._day: int | None = None
        self._morning: Totals = {}
        self._morning_before: Totals = {}

    def sample(
        self, now_ms: int, day: int, look: Callable[[], Totals], main: Callable[[], Totals]
    ) -> None:
        """Time went on.

        Args:
            now_ms: Monotonic clock.
            day: Number of the day.
            look: Tells all totals; called once a minute.
            main: Tells those that are wanted by the hour.
        """
        if now_ms - self._minutes[-1][0] >= MINUTE_MS:
            self._minutes.append((now_ms, look()))
        if now_ms - self._hours[-1][0] >= MINUTE_MS * 60:
            self._hours.append((now_ms, main()))
        if self._day is None:
            self._day = day
        elif day != self._day:
            self._day = day
            self._morning_before, self._morning = self._morning, look()

    def per_s(self, key: Hashable, total: int, now_ms: int) -> float:
        """Growth a second over the last one or two minutes."""
        return _per_s(self._minutes[0], key, total, now_ms)

    def per_s_of_day(self, key: Hashable, total: int, now_ms: int) -> float:
        """Growth a second over the last 24 hours, of a main total."""
        return _per_s(self._hours[0], key, total, now_ms)

    def today(self, key: Hashable, total: int) -> int:
        """Growth since midnight."""
        return total - self._morning.get(key, 0)

    def yesterday(self, key: Hashable) -> int:
        """Growth of the day before."""
        return self._morning.get(key, 0) - self._morning_before.get(key, 0)


def _per_s(before: tuple[int, Totals], key: Hashable, total: int, now_ms: int) -> float:
    then_ms, totals = before
    return (total - totals.get(key, 0)) * 1_000 / max(now_ms - then_ms, 1_000)
