"""Waiting awake for what will come in a moment."""

import os
import time
from collections.abc import Callable
from typing import Final, Protocol

MAX_SLEPT: Final = 64
"""So many waits at most are slept through after one that was spent awake in vain."""


class Poller(Protocol):
    """Asks the kernel; ``select.poll`` and ``select.epoll`` make one."""

    def poll(self, timeout: float | None = None, /) -> list[tuple[int, int]]:
        """What is ready now, if ``timeout`` is 0."""


class BusyPoll:
    """Looks again and again, for a moment, before somebody goes to sleep in the kernel.

    A processor that fell asleep takes about as long to wake up as a broker needs for a small
    request, on virtual machines above all. So where one request follows the other, as from a
    program that sends synchronously, each of them is a third quicker if both sides stay awake
    meanwhile. After each look in vain, other threads of the process and of the processor go first.

    It costs a processor's time, so it is done only as long as it helps: when nothing came within
    the window, the next wait is slept through, and twice as many each time that happens again.

    Args:
        window_us: How long to wait awake, in microseconds; 0 for never.
        processors: Of this process. With a single one it is never done: it would keep away
            what it waits for.
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
        self._to_sleep = 0
        self._next_sleep = 1

    def poll(self, poller: Poller) -> list[tuple[int, int]]:
        """What a poller finds within the window; nothing also if this wait is to be slept."""
        if not self._window_ns:
            return []
        if self._to_sleep:
            self._to_sleep -= 1
            return []
        end_ns = self._clock_ns() + self._window_ns
        while not (found := poller.poll(0)):
            if self._clock_ns() >= end_ns:
                self._to_sleep = self._next_sleep
                self._next_sleep = min(2 * self._next_sleep, MAX_SLEPT)
                return []
            os.sched_yield()
        self._next_sleep = 1
        return found
