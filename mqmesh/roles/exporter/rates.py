"""Rates of totals, and totals at midnight. Pure."""

from collections.abc import Hashable
from typing import Final

import msgspec

WINDOW_MS: Final = 10_000
"""A rate is that of the last 10 to 20 s."""
DAY_MS: Final = 86_400_000


class _Growth(msgspec.Struct):
    old_ms: int
    old_total: float
    new_ms: int
    new_total: float
    round: int


class Rates:
    """Rates of totals that are looked at now and then.

    A total that is not looked at in a whole round is forgotten.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, _Growth] = {}
        self._round = 0

    def __len__(self) -> int:
        return len(self._seen)

    def rate(self, key: Hashable, total: float, now_ms: int) -> float:
        """Return the growth of a total a second; 0 when it is seen for the first time.

        Args:
            key: Which total.
            total: Present value; less than before when its process was started again.
            now_ms: Monotonic clock.
        """
        seen = self._seen.get(key)
        if seen is None or total < seen.new_total:
            self._seen[key] = _Growth(now_ms, total, now_ms, total, self._round)
            return 0.0
        seen.round = self._round
        if now_ms - seen.new_ms >= WINDOW_MS:
            seen.old_ms, seen.old_total = seen.new_ms, seen.new_total
            seen.new_ms, seen.new_total = now_ms, total
        return (total - seen.old_total) * 1_000 / max(now_ms - seen.old_ms, 1)

    def end_round(self) -> None:
        """Ends a round: everything was looked at."""
        self._seen = {key: seen for key, seen in self._seen.items() if seen.round == self._round}
        self._round += 1


class DayTotals:
    """Totals at the beginning of a day, as far as they were read.

    Before the first midnight, the day began when the total was seen for the first time.
    """

    def __init__(self) -> None:
        self._marks: dict[Hashable, tuple[int, float, float]] = {}

    def mornings(self, key: Hashable, total: float, now_ms: int) -> tuple[float, float]:
        """Return a total at the last midnight (UTC), and at the one before.

        Args:
            key: Which total.
            total: Present value; less than before when its process was started again.
            now_ms: Wall clock.
        """
        day = now_ms // DAY_MS
        marked, today, yesterday = self._marks.get(key, (day, total, total))
        if marked != day:
            marked, today, yesterday = day, total, today
        if total < today:
            today = yesterday = 0.0
        self._marks[key] = (marked, today, yesterday)
        return today, yesterday
