"""Timer of rebalances: soon after a change, but not amid a broker's return."""

from collections.abc import Callable
from typing import Final

from mqmesh.clock import Clock

REJOIN_MS: Final = 1_500
"""Time for a broker's other clients to come back, after it came back."""
MOST_QUIET_MS: Final = 5_000
"""Queues are divided again after this however often brokers come and go."""


class RebalanceTimer:
    """Timer that makes one rebalance of many requests; in the client loop.

    Args:
        clock: Source of time.
        call_later: Calls once, not before so many ms.
        run: Divides the queues.
    """

    def __init__(
        self,
        clock: Clock,
        call_later: Callable[[int, Callable[[], None]], None],
        run: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._call_later = call_later
        self._run = run
        self._quiet_until_ms = 0
        self._quiet_since_ms: int | None = None
        self._planned_ms: int | None = None

    def plan(self, delay_ms: int = 0) -> None:
        """Divides the queues anew in a moment; many calls make one rebalance."""
        now_ms = self._clock.monotonic_ms()
        due_ms = max(now_ms + delay_ms, self._quiet_until_ms)
        if self._planned_ms is not None and self._planned_ms <= due_ms:
            return
        self._planned_ms = due_ms

        def run() -> None:
            if self._planned_ms != due_ms:
                return
            self._planned_ms = None
            if self._quiet_until_ms > due_ms:
                self.plan()
            else:
                self._run()

        self._call_later(due_ms - now_ms, run)

    def keep_quiet(self) -> None:
        """Waits a while: a broker's list of members is not complete before all came back to it.

        One that keeps dying must not keep its queues undivided for ever, though.
        """
        now_ms = self._clock.monotonic_ms()
        if self._quiet_since_ms is None:
            self._quiet_since_ms = now_ms
        self._quiet_until_ms = min(now_ms + REJOIN_MS, self._quiet_since_ms + MOST_QUIET_MS)

    def divided(self) -> None:
        """Note that the queues were assigned: the next quiet time begins anew."""
        self._quiet_since_ms = None
