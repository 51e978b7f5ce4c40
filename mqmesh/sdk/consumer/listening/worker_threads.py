"""Threads that take turns of a service and call listeners."""

import threading
from collections.abc import Callable
from typing import Final

from mqmesh.clock import Clock
from mqmesh.sdk.consumer.listening.consume_service import (
    ConcurrentService,
    ConsumeService,
    Turn,
    Workers,
)

WATCH_MS: Final = 2
QUICK_TURN_NS: Final = 2_000_000
"""Time of a quick turn: its worker will be back soon, and no other need be woken."""
CALLS_PER_WATCH: Final = 2
"""A worker that begins fewer calls than this between two looks is slow: others would help."""


class WorkerThreads(Workers):
    """The worker threads of one consumer.

    Args:
        service: Service whose turns they take.
        name: For the threads' names.
        most: Most threads.
        clock: Of the client.
    """

    def __init__(self, service: ConsumeService, name: str, most: int, clock: Clock) -> None:
        self._changed = service.changed
        self._service = service
        self._name = name
        self._most = most
        self._now_ns = clock.monotonic_ns
        self._threads: list[threading.Thread] = []
        self._idle = 0  # that were not notified
        self._quick = False
        service.attach(self)

    @property
    def thread_count(self) -> int:
        """Threads started so far."""
        return len(self._threads)

    def wake(self, count: int) -> None:
        woken = min(count, self._idle)
        self._idle -= woken
        self._changed.notify(woken)
        for _ in range(min(count - woken, self._most - len(self._threads))):
            # Daemons, so that a listener that hangs cannot keep the program from ending.
            thread = threading.Thread(
                target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def close(self, timeout_s: float) -> bool:
        until_ns = self._now_ns() + int(timeout_s * 1e9)
        others = [one for one in self._threads if one is not threading.current_thread()]
        for thread in others:
            thread.join(max(until_ns - self._now_ns(), 0) / 1e9)
        return not any(thread.is_alive() for thread in others)

    def _work(self) -> None:
        turn: Turn | None = None
        while (turn := self._next(turn)) is not None:
            run_turn(turn)

    def _next(self, done: Turn | None) -> Turn | None:
        with self._changed:
            if done is not None:
                self._quick = self._service.end(done) < QUICK_TURN_NS
            while (turn := self._service.take()) is None and not self._service.closed:
                self._idle += 1
                self._changed.wait()
            return turn


class SparingThreads(WorkerThreads):
    """Threads that share queues; a fast listener is served best by one, for they share Python.

    Work wakes one thread, unless one is awake that was quick until now. As long as work waits
    and hardly moves, as many again are woken as are at work: 20 are reached in 10 ms. A lone call
    that woke its thread is not watched, which would be a turn of the loop for each message.

    Args:
        service, name, most, clock: As for ``WorkerThreads``.
        call_later: Calls in the client loop after so many milliseconds.
    """

    def __init__(
        self,
        service: ConcurrentService,
        name: str,
        most: int,
        clock: Clock,
        call_later: Callable[[int, Callable[[], None]], object],
    ) -> None:
        super().__init__(service, name, most, clock)
        self._progress = service.progress
        self._call_later = call_later
        self._watching = False
        self._calls_seen = 0

    def wake(self, count: int) -> None:
        waits, begun = self._progress()
        someone_comes = self._quick and self._idle < len(self._threads)
        if not waits and not someone_comes:
            super().wake(1)
            if count == 1:
                return
        if not self._watching:
            self._watching = True
            self._calls_seen = begun
            self._call_later(WATCH_MS, self._watch)

    def _watch(self) -> None:
        with self._changed:
            waits, begun = self._progress()
            if not waits or self._service.closed:
                self._watching = False
                return
            awake = max(len(self._threads) - self._idle, 1)
            if begun - self._calls_seen < awake * CALLS_PER_WATCH:
                super().wake(awake)
            self._calls_seen = begun
        self._call_later(WATCH_MS, self._watch)


def run_turn(turn: Turn) -> None:
    """Calls a listener with the messages that a turn yields, to the turn's end."""
    listener, send = turn.work.listener, turn.calls.send
    result: object
    try:
        messages = send(None)
        while True:
            try:
                result = listener(messages)
            except BaseException as error:
                result = error
            messages = send(result)
    except StopIteration:
        return
