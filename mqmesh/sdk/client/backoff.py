"""Growing delays for requests that a client repeats because of an answer. Pure.

A broker or name server that answers at once, again and again, with nothing that brings the client
further must not make it ask as fast as the network allows.
"""

from collections.abc import Callable
from typing import Final

FIRST_MS: Final = 10
"""Delay of the second repetition; it doubles with each further one."""
FORGET_FACTOR: Final = 10
"""Pause, in longest delays, after which counting begins anew."""


class Backoff:
    """Delays of one thing that is repeated.

    Args:
        now_ms: Monotonic clock.
        most_ms: Longest delay, ms, from ``FIRST_MS``.
    """

    __slots__ = ("_delay_ms", "_last_ms", "_most_ms", "_now_ms")

    def __init__(self, now_ms: Callable[[], int], most_ms: int) -> None:
        self._now_ms = now_ms
        self._most_ms = most_ms
        self._delay_ms = 0
        self._last_ms = 0

    def next_delay_ms(self) -> int:
        """Return how long to wait before it is done once more: nothing at first, then longer."""
        now_ms = self._now_ms()
        if self._delay_ms and now_ms - self._last_ms > FORGET_FACTOR * self._most_ms:
            self._delay_ms = 0
        delay_ms, self._last_ms = self._delay_ms, now_ms
        self._delay_ms = min(max(2 * delay_ms, FIRST_MS), self._most_ms)
        return delay_ms

    def reset(self) -> None:
        """Begin anew: there was progress."""
        self._delay_ms = 0
