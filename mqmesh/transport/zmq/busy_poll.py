"""Waiting awake for what will come in a moment, where measurements say that it pays."""

import os
import time
from collections.abc import Callable
from typing import Final, Protocol

TRIAL_EVERY: Final = 32
"""One wait in so many is spent the other way, to see whether it has become the better one."""
TRIALS_FIRST: Final = 4
"""Waits of either way before the first choice."""
WORTH: Final = 0.8
"""Awake must take less than this share of what a sleep takes: it costs a processor's time."""
LONG_WAITS: Final = 4
"""Limit of a wait's weight, in windows: the length of a peer's silence says nothing."""

_SHARE: Final = 1 / 8


class Poller(Protocol):
    """Asks the kernel; ``select.epoll`` makes one."""

    def poll(self, timeout: float | None = None, /) -> list[tuple[int, int]]:
        """Return what is ready within ``timeout`` seconds; 0 looks and does not wait."""


class BusyPoll:
    """Waits for descriptors, awake for a moment first where that makes waits shorter.

    A processor that fell asleep takes about as long to wake up as a broker needs for a small
    request, on virtual machines above all. So where one request follows the other, as from a
    program that sends synchronously, each of them is a third quicker if both sides stay awake
    meanwhile. Where no processor is idle it is the other way round: a thread that looks again and
    again keeps away what it waits for. So both ways are tried now and then, and the one is taken
    whose waits were shorter. After each look in vain, other threads of the process and of the
    processor go first.

    Args:
        window_us: How long to wait awake at most, in microseconds; 0 for never.
        processors: Of this process. With a single one it is never done.
        clock_ns: Nanoseconds of a clock that does not go back.
    """

    def __init__(
        self,
        window_us: int,
        *,
        processors: int | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        if processors is None:
            processors = len(os.sched_getaffinity(0))
        self._window_ns = window_us * 1_000 if processors > 1 else 0
        self._clock_ns = clock_ns
        self._waits = 0
        self._asleep_ns = self._awake_ns = 0.0
        self._stay_awake = False

    def wait(self, poller: Poller, timeout_s: float) -> list[tuple[int, int]]:
        """Wait, busily or asleep, and return the poller's events.

        Args:
            poller: Is asked.
            timeout_s: How long to wait at most, in seconds.
        """
        if not self._window_ns:
            return poller.poll(timeout_s)
        begin_ns = self._clock_ns()
        waits = self._waits = self._waits + 1
        if waits <= 2 * TRIALS_FIRST:
            awake = waits > TRIALS_FIRST
        else:
            awake = self._stay_awake != (waits % TRIAL_EVERY == 0)
        found = self._look(poller, begin_ns + self._window_ns) if awake else []
        if not found:
            found = poller.poll(timeout_s)
        waited_ns = min(self._clock_ns() - begin_ns, LONG_WAITS * self._window_ns)
        if awake:
            self._awake_ns += (waited_ns - self._awake_ns) * _SHARE
        else:
            self._asleep_ns += (waited_ns - self._asleep_ns) * _SHARE
        if waits >= 2 * TRIALS_FIRST:
            self._stay_awake = self._awake_ns < WORTH * self._asleep_ns
        return found

    def _look(self, poller: Poller, end_ns: int) -> list[tuple[int, int]]:
        while not (found := poller.poll(0)):
            if self._clock_ns() >= end_ns:
                break
            os.sched_yield()
        return found
