"""The broker's wall clock, as far as it is known from its answers."""

from typing import Final

STEP_MS: Final = 200
"""Answers that are further behind than this show a clock that was set back."""


class BrokerClock:
    """Estimate of a broker's wall clock.

    An answer's time is past when it arrives, so what is known is behind by the time of its
    way, and never ahead: nothing is taken for due that is not. The answer that was quickest
    says most; the service's own wall clock says nothing.
    """

    def __init__(self) -> None:
        self._ahead_ms: int | None = None

    def note(self, broker_ms: int, now_ms: int, *, exact: bool = False) -> None:
        """Takes note of the time in an answer.

        Args:
            broker_ms: The broker's wall clock, when it answered.
            now_ms: Monotonic clock, now.
            exact: Believe it whatever was known before: the broker found us ahead.
        """
        ahead_ms = broker_ms - now_ms
        known = self._ahead_ms
        if exact or known is None or ahead_ms > known or ahead_ms < known - STEP_MS:
            self._ahead_ms = ahead_ms

    def wall_ms(self, now_ms: int) -> int:
        """Return the broker's wall clock now; 0 while it is not known."""
        return 0 if self._ahead_ms is None else now_ms + self._ahead_ms
