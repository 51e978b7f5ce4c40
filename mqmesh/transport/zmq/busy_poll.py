"""Waiting awake for an answer that comes in a moment, if measurements show that it pays."""

import os
import time
from collections.abc import Callable
from typing import Final, Protocol

TRIAL_EVERY: Final = 32
"""One wait in so many is spent the other way, to see if that has become the better one."""
TRIALS_FIRST: Final = 4
"""Waits of either way before the first choice."""
WORTH: Final = 0.8
"""Limit of a wait awake, as a share of a sleep's time: it costs a processor's time."""
LONG_WAITS: Final = 4
"""Limit of a wait's weight, in windows: a long silence of a peer says nothing about the way."""

_SHARE: Final = 1 / 8


class Poller(Protocol):
    """Interface to the kernel's poll; ``select.epoll`` makes one."""

    def poll(self, timeout: float | None = None, /) -> list[tuple[int, int]]:
        """Return the ready descriptors, within ``timeout`` seconds; 0 does not wait."""


class BusyPoll:
    """Waits for descriptors, awake for a moment first if that makes waits shorter.

    A processor that fell asleep takes about as long to wake up as a broker needs for a small
    request, on virtual machines above all. So if one request follows the other, as from a
    program that sends synchronously, each of them is a third quicker if both sides stay awake
    meanwhile. Without an idle processor the opposite is true: a thread that polls again and
    again keeps the awaited work from running. So both ways are tried now and then, and the one
    with the shorter waits is chosen. After each poll in vain, other threads of the process and of
    the processor go first.

    Args:
        window_us: Longest time to wait awake, in microseconds; 0 for never.
        processors: Number of processors of this process. With one it never waits awake.
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
            poller: The poller.
            timeout_s: Longest time to wait, in seconds.
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
