"""Simulated time: one clock, one source of chance and one queue of events for all nodes.

Everything happens in the thread that calls ``run`` or ``run_until``. The seed decides the order of
events that are due in the same millisecond, so that one seed is one course of events and another
seed another one.

A call that has to wait, such as ``BlockingChannel.request``, runs the simulation itself until its
answer has arrived. So such calls nest: the one that began last ends first.
"""

import heapq
import random
from collections.abc import Callable
from typing import Final

START_MONOTONIC_MS: Final = 1_000_000
START_WALL_MS: Final = 1_700_000_000_000
MAX_EVENTS_WAITING: Final = 1_000_000


class Event:
    """A planned call; ``cancel`` it if it is not wanted any more."""

    __slots__ = ("callback", "cancelled")

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        """Cancel the event; calling twice does no harm."""
        self.cancelled = True


class Simulation:
    """Time, chance and the planned events.

    Args:
        seed: Seed of all chance.

    Attributes:
        now_ms: Simulated milliseconds; the monotonic clock of all nodes.
        random: The one source of chance.
        event_count: Events that have happened.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now_ms = START_MONOTONIC_MS
        self.event_count = 0
        self._events: list[tuple[int, float, int, Event]] = []
        self._order = 0

    def at(self, due_ms: int, callback: Callable[[], None]) -> Event:
        """Calls once at a time; if it has passed, at once, but after the present event."""
        assert len(self._events) < MAX_EVENTS_WAITING, "more events wait than a simulation may have"
        event = Event(callback)
        self._order += 1
        if due_ms < self.now_ms:
            due_ms = self.now_ms
        heapq.heappush(self._events, (due_ms, self.random.random(), self._order, event))
        return event

    def after(self, delay_ms: int, callback: Callable[[], None]) -> Event:
        """Calls once, ``delay_ms`` from now."""
        return self.at(self.now_ms + delay_ms, callback)

    def below(self, count: int) -> int:
        """Draw a number from 0 to below ``count``, in less time than ``random.randrange`` takes."""
        return int(self.random.random() * count)

    def run(self, duration_ms: int) -> None:
        """Lets time pass."""
        self.run_until(_never, duration_ms)

    def run_until(self, is_done: Callable[[], bool], limit_ms: int) -> bool:
        """Lets time pass until a condition is met.

        Args:
            is_done: Condition, called after each event.
            limit_ms: Longest time to wait, ms.

        Returns:
            True if the condition is met.
        """
        end_ms = self.now_ms + limit_ms
        events = self._events
        while not is_done():
            if not events or events[0][0] > end_ms:
                self.now_ms = max(self.now_ms, end_ms)
                return is_done()
            due_ms, _, _, event = heapq.heappop(events)
            if event.cancelled:
                continue
            if due_ms > self.now_ms:  # a call that waits in an event may have let time pass
                self.now_ms = due_ms
            self.event_count += 1
            event.callback()
        return True


def _never() -> bool:
    return False
