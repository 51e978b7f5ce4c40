"""A client loop whose thread is the test."""

import threading
from collections.abc import Callable

from mqmesh.testing.clock import ManualClock


class ThreadlessLoop:
    """Loop as senders see it; nothing happens by itself.

    Attributes:
        clock: Moved by the test.
        in_loop_thread: True if the caller must not wait.
        news: Result of ``has_news``.
    """

    def __init__(self, *, in_loop_thread: bool = False) -> None:
        self.clock = ManualClock()
        self.in_loop_thread = in_loop_thread
        self.news = False
        self._tick_ends: list[Callable[[], None]] = []
        self.flag = threading.Event
        self.condition = threading.Condition

    @property
    def loop(self) -> "ThreadlessLoop":
        """This object: it is a transport, too, whose threads are real."""
        return self

    def at_tick_end(self, callback: Callable[[], None]) -> None:
        """Adds a callback for the end of each turn."""
        self._tick_ends.append(callback)

    def has_news(self) -> bool:
        """Returns True if a turn would find an event."""
        return self.news

    def end_turn(self) -> None:
        """Ends a turn: calls the callbacks."""
        for callback in self._tick_ends:
            callback()
