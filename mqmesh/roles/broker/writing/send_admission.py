"""Admission of sends: which are refused because the log is too slow for all of them.

Sends wait in two places: in the socket, while the loop is busy with a slow write, and on
the stage until the tick's end. When a frame came is not known, but when the socket was
empty last is; so the longest wait is, and frames that came evenly since then waited
between nothing and that long. Of those, the oldest that waited for longer than the
limit are refused: a share of ``1 - limit / longest wait``, which begins at nothing and
grows with the trouble.

A hiccup refuses nothing: what piled up during it is stored as soon as it is over. Only
when the waits stay above the limit for longer than ``busy_timeout_ms`` the broker cannot
keep up, and storing all would let everybody wait for ever longer.

Pure: times are given, all by the monotonic clock.
"""

from typing import Final

SLEPT_MS: Final = 5
"""A loop that took so long from a tick's end to the next frame was waiting for that frame."""


class SendAdmission:
    """Follows the waits of sends, tick by tick.

    Attributes:
        longest_wait_ms: Bound of what the sends looked at last have waited.
        readable_ms: When the loop found the socket readable last; set before sends are counted.
        wait_limit_ms: Waits up to this are never refused, from 1.
        busy_timeout_ms: Waits have to stay above the limit for longer than this.
    """

    def __init__(self, *, wait_limit_ms: int, busy_timeout_ms: int) -> None:
        """Starts with nothing waiting."""
        self.wait_limit_ms = wait_limit_ms
        self.busy_timeout_ms = busy_timeout_ms
        self._empty_ms: int | None = None
        self._ended_ms: int | None = None
        self._readable_ms = -1
        self.readable_ms = -1
        self._above_since_ms: int | None = None
        self.longest_wait_ms = 0

    def tick_ended(self, now_ms: int, drained_ms: int | None) -> None:
        """The tick is over, its sends written or refused.

        Args:
            now_ms: Now.
            drained_ms: When the socket was found empty, ``readable_ms`` or later; None if frames
                were left in it.
        """
        if self.readable_ms == self._readable_ms:
            # Not in this tick: there was nothing.
            self._empty_ms = now_ms
        elif drained_ms is not None:
            self._empty_ms = drained_ms
        self._readable_ms = self.readable_ms
        self._ended_ms = now_ms

    def count_refused(self, count: int, now_ms: int) -> int:
        """Return how many sends are to be refused, the oldest first.

        Args:
            count: Sends that are about to be written.
            now_ms: Now.
        """
        if self._ended_ms is None or self.readable_ms - self._ended_ms >= SLEPT_MS:
            self._empty_ms = self.readable_ms
        waited_ms = 0 if self._empty_ms is None else now_ms - self._empty_ms
        self.longest_wait_ms = waited_ms
        if waited_ms <= self.wait_limit_ms:
            self._above_since_ms = None
            return 0
        if self._above_since_ms is None:
            self._above_since_ms = now_ms
        if now_ms - self._above_since_ms <= self.busy_timeout_ms:
            return 0
        return count * (waited_ms - self.wait_limit_ms) // waited_ms
