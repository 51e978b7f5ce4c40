"""One event loop per process or client: sockets, timers, and calls from other threads."""

import heapq
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import zmq

from mqmesh.clock import Clock, SystemClock
from mqmesh.transport.sockets import Socket

MAX_WAIT_MS: Final = 1_000
MAX_CALLS_WAITING: Final = 1_000_000

_log = logging.getLogger(__name__)


class Timer:
    """A call planned for later; ``cancel`` it if it is not wanted any more."""

    __slots__ = ("callback", "cancelled", "interval_ms")

    def __init__(self, callback: Callable[[], None], interval_ms: int) -> None:
        self.callback = callback
        self.interval_ms = interval_ms
        self.cancelled = False

    def cancel(self) -> None:
        """The call will not be made; calling twice does no harm."""
        self.cancelled = True


class EventLoop:
    """Polls sockets and runs timers in one thread.

    Only ``call_soon_threadsafe``, ``wake`` and ``stop`` may be used from other threads or
    signal handlers. An exception in a callback is a bug: it is logged and counted, and
    the loop goes on, because one bad frame must not take a broker down.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self.callback_failures = 0
        self._poller = zmq.Poller()
        self._handlers: dict[object, Callable[[], None]] = {}
        self._timers: list[tuple[int, int, Timer]] = []
        self._order = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._tick_end: list[Callable[[], None]] = []
        self._stopping = False
        self._woken = False
        self._thread: int | None = None
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._handlers[self._wake_read] = self._drain_wake

    def add(self, source: Socket | int, handler: Callable[[], None]) -> None:
        """Calls ``handler`` in each tick in which a socket or descriptor can be read.

        The handler need not read everything: it is called again as long as more is there.
        """
        self._poller.register(source, zmq.POLLIN)
        self._handlers[source] = handler

    def want_write(self, source: Socket | int, wanted: bool) -> None:
        """Also calls the source's handler when it can take more."""
        self._poller.modify(source, zmq.POLLIN | zmq.POLLOUT if wanted else zmq.POLLIN)

    def remove(self, source: Socket | int) -> None:
        """Stops watching a source; do it before closing it."""
        self._poller.unregister(source)
        del self._handlers[source]

    def at_tick_end(self, callback: Callable[[], None]) -> None:
        """Calls back after the sockets of every tick were served, before waiting again."""
        self._tick_end.append(callback)

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> Timer:
        """Calls once, not before ``delay_ms``."""
        timer = Timer(callback, 0)
        self._push(timer, delay_ms)
        return timer

    def call_every(self, interval_ms: int, callback: Callable[[], None]) -> Timer:
        """Calls each ``interval_ms`` from now on; missed turns are not made up for."""
        timer = Timer(callback, interval_ms)
        self._push(timer, interval_ms)
        return timer

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        """Calls in the loop's thread, soon; from any thread.

        Raises:
            BufferError: More than a million calls are waiting.
        """
        if len(self._calls) >= MAX_CALLS_WAITING:
            raise BufferError(f"more than {MAX_CALLS_WAITING} calls wait for the event loop")
        self._calls.append(callback)
        self.wake()

    def wake(self) -> None:
        """Ends the loop's wait; from any thread or signal handler."""
        if self._woken:
            return
        self._woken = True
        try:
            os.write(self._wake_write, b"w")
        except BlockingIOError:
            return  # the pipe is full of wake-ups already
        except OSError:
            if not self._stopping:
                raise

    def stop(self) -> None:
        """Makes ``run`` return after the current tick; from any thread or signal handler."""
        self._stopping = True
        self.wake()

    @property
    def stopping(self) -> bool:
        """True once ``stop`` was called."""
        return self._stopping

    @property
    def in_loop_thread(self) -> bool:
        """True in the thread that is inside ``run``."""
        return self._thread == threading.get_ident()

    def run(self) -> None:
        """Serves until ``stop``; runs in the thread that owns the sockets."""
        self._thread = threading.get_ident()
        try:
            while not self._stopping:
                self.tick(self._wait_ms())
        finally:
            self._thread = None

    def tick(self, wait_ms: int) -> None:
        """One turn: wait for at most ``wait_ms``, then sockets, calls, timers, tick ends."""
        for source, _ in self._poller.poll(wait_ms):
            handler = self._handlers.get(source)
            if handler is not None:
                self._guard(handler)
        for _ in range(len(self._calls)):
            self._guard(self._calls.popleft())
        self._run_timers()
        for callback in self._tick_end:
            self._guard(callback)

    def close(self) -> None:
        """Releases the loop's descriptors; the sockets stay their owners' concern."""
        self._stopping = True
        # Whoever wakes a closed loop must not write into a descriptor that is another's by then.
        self._woken = True
        for descriptor in (self._wake_read, self._wake_write):
            os.close(descriptor)

    def _guard(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            self.callback_failures += 1
            _log.exception("a callback of the event loop failed; the loop goes on")

    def _push(self, timer: Timer, delay_ms: int) -> None:
        due = self.clock.monotonic_ms() + delay_ms
        heapq.heappush(self._timers, (due, next(self._order), timer))

    def _wait_ms(self) -> int:
        if self._calls:
            return 0
        while self._timers and self._timers[0][2].cancelled:
            heapq.heappop(self._timers)
        if not self._timers:
            return MAX_WAIT_MS
        return min(max(self._timers[0][0] - self.clock.monotonic_ms(), 0), MAX_WAIT_MS)

    def _run_timers(self) -> None:
        if not self._timers:
            return
        now_ms = self.clock.monotonic_ms()
        while self._timers and self._timers[0][0] <= now_ms:
            timer = heapq.heappop(self._timers)[2]
            if timer.cancelled:
                continue
            if timer.interval_ms:
                self._push(timer, timer.interval_ms)
            self._guard(timer.callback)

    def _drain_wake(self) -> None:
        # First the pipe, then the flag. The other way round, a wake-up in between would have its
        # byte read here and leave the flag up with an empty pipe: every later one would be lost.
        # A wake-up that finds the flag still up is not lost, since calls and tick ends are
        # looked at after this, in the same tick.
        try:
            while len(os.read(self._wake_read, 4_096)) == 4_096:
                continue
        except BlockingIOError:
            pass
        self._woken = False
