"""One event loop per process or client: sockets, timers, and calls from other threads."""

import heapq
import itertools
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import zmq

from mqmesh.clock import Clock, SystemClock
from mqmesh.errors import ClientClosed
from mqmesh.transport.interface import Timer
from mqmesh.transport.zmq.busy_poll import BusyPoll
from mqmesh.transport.zmq.descriptors import descriptors_for
from mqmesh.transport.zmq.sockets import Socket

MAX_WAIT_MS: Final = 1_000
MAX_CALLS_WAITING: Final = 1_000_000
TICKS_PER_LOOK_ROUND: Final = 256
"""Number of turns after which all sockets are checked, as a safety net."""
LOOK_ROUND_MS: Final = 250
"""Interval of this check after a wait in vain: it is much of an idle broker's work."""

_NS_PER_MS: Final = 1_000_000
_IN: Final = int(zmq.POLLIN)
_OUT: Final = int(zmq.POLLOUT)
_EVENTS: Final = int(zmq.EVENTS)

_log = logging.getLogger(__name__)


class _WatchedSource:
    """A watched source: a ZeroMQ socket, or a descriptor when there is no socket."""

    __slots__ = ("descriptor", "handler", "socket", "wanted")

    def __init__(self, socket: Socket | None, descriptor: int, handler: Callable[[], None]) -> None:
        self.socket = socket
        self.descriptor = descriptor
        self.handler = handler
        self.wanted = _IN

    def is_ready(self) -> bool:
        assert self.socket is not None
        return bool(int(self.socket.get(_EVENTS)) & self.wanted)


class EventLoop:
    """Polls sockets and runs timers in one thread.

    ZeroMQ's own poll queries every socket twice in each turn, which takes longer than serving a
    small request. Here the kernel is queried about the sockets' descriptors, and a socket only
    if its descriptor signals a change, or if it was used since its last query:
    code that uses a socket outside of its own handler calls ``touch``. (ZeroMQ's descriptors
    signal changes only, and any use of the socket may take a change in; zmq_getsockopt(3),
    ``ZMQ_FD``.)

    Only ``call_soon_threadsafe``, ``wake``, ``has_news`` and ``stop`` may be used from other
    threads, and from signal handlers. An exception in a callback is a bug: it is logged and
    counted, and the loop goes on, because one bad frame must not take a broker down.

    Attributes:
        clock: Clock of the timers.
        callback_failures: Number of exceptions so far.
        turn_ns: Begin of the turn, by the clock's ``monotonic_ns``: after the wait.
        longest_turn_ns: Duration of the longest turn, which delayed all peers; a reader may set it
            to 0, to measure the next ones.
        before_wait: Called once, behind the tick ends of this turn: output that was gathered in it.
        busy_poll: Way to wait, for loops that answer requests; None to sleep at once.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self.before_wait: list[Callable[[], None]] = []
        self.busy_poll: BusyPoll | None = None
        self.callback_failures = 0
        self.turn_ns = 0
        self.longest_turn_ns = 0
        self._poll: select.epoll
        self._wake_read, self._wake_write = -1, -1
        self._is_open = False
        self._sources: dict[Socket | int, _WatchedSource] = {}
        self._by_descriptor: dict[int, _WatchedSource] = {}
        self._touched: dict[_WatchedSource, None] = {}
        self._again: list[_WatchedSource] = []
        self._ticks = 0
        self._look_due_ms = 0
        self._timers: list[tuple[int, int, Timer]] = []
        self._order = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._tick_end: list[Callable[[], None]] = []
        self._stopping = False
        self._woken = False
        self._thread: int | None = None
        self._failure: Exception | None = None

    def add(self, source: Socket | int, handler: Callable[[], None]) -> None:
        """Calls ``handler`` in each tick in which a socket or descriptor can be read.

        The handler need not read everything: it is called again as long as more is there.

        Raises:
            PermissionError: The descriptor is of a file, which cannot be waited for.
            TooManyOpenFiles: The process has no descriptor left.
        """
        self._open()
        socket = None if isinstance(source, int) else source
        descriptor = source if isinstance(source, int) else int(source.get(zmq.FD))
        self._poll.register(descriptor, select.EPOLLIN)
        one = self._sources[source] = _WatchedSource(socket, descriptor, handler)
        self._by_descriptor[descriptor] = one
        if socket is not None:
            self._touched[one] = None

    def watch_once(self, descriptor: int, handler: Callable[[], None]) -> None:
        """Calls ``handler`` once when a descriptor can be read; from any thread, also again.

        The loop runs; it forgets a descriptor that is closed.

        Raises:
            ClientClosed: The loop is closed.
        """
        self._by_descriptor[descriptor] = _WatchedSource(None, descriptor, handler)
        events = select.EPOLLIN | select.EPOLLONESHOT
        try:
            self._poll.modify(descriptor, events)
        except FileNotFoundError:
            self._poll.register(descriptor, events)
        except ValueError as error:
            raise ClientClosed("the event loop is closed") from error

    def touch(self, source: Socket) -> None:
        """Make the loop query a socket, used outside of its handler, before the next wait."""
        one = self._sources.get(source)
        if one is not None:
            self._touched[one] = None

    def untouch(self, source: Socket) -> None:
        """Note that a socket, at its last use, was queried and had no events."""
        self._touched.pop(self._sources[source], None)

    def again(self, descriptor: int) -> None:
        """Calls a descriptor's handler in the next turn, be it readable or not; do it once."""
        self._again.append(self._sources[descriptor])

    def want_write(self, source: Socket | int, wanted: bool) -> None:
        """Set if the source's handler is also called when the source can take more."""
        one = self._sources[source]
        one.wanted = one.wanted | _OUT if wanted else one.wanted & ~_OUT
        if one.socket is None:
            self._set_events(one)
        else:
            self._touched[one] = None

    def want_read(self, descriptor: int, wanted: bool) -> None:
        """Set if a descriptor's handler is called when it can be read."""
        one = self._sources[descriptor]
        one.wanted = one.wanted | _IN if wanted else one.wanted & ~_IN
        self._set_events(one)

    def _set_events(self, one: "_WatchedSource") -> None:
        reads = select.EPOLLIN if one.wanted & _IN else 0
        self._poll.modify(one.descriptor, reads | (select.EPOLLOUT if one.wanted & _OUT else 0))

    def remove(self, source: Socket | int) -> None:
        """Stops watching a source; do it before closing it."""
        one = self._sources.pop(source)
        del self._by_descriptor[one.descriptor]
        self._touched.pop(one, None)
        if not self._poll.closed:
            self._poll.unregister(one.descriptor)

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
        if not self._is_open:
            return  # ``_open`` sees the flag
        try:
            os.write(self._wake_write, b"w")
        except BlockingIOError:
            return  # the pipe is full of wake-ups already
        except OSError:
            if not self._stopping:
                raise

    def has_news(self) -> bool:
        """Return True when a turn would find a call or a readable descriptor; from any thread."""
        if not self._is_open:
            return self._woken and not self._stopping
        try:
            return bool(self._calls) or bool(self._poll.poll(0))
        except (ValueError, OSError):
            return False  # the loop was closed, or is being closed by another thread

    def stop(self) -> None:
        """Makes ``run`` return after the current tick; from any thread or signal handler."""
        self._stopping = True
        self.wake()

    def fail(self, error: Exception) -> None:
        """Makes ``run`` end with an error: the process cannot do its work any more."""
        self._failure = error
        self.wake()

    def disown(self) -> None:
        """Stop for good in a forked process, whose sockets and descriptors are the parent's."""
        self._stopping = True

    @property
    def stopping(self) -> bool:
        """True once ``stop`` was called."""
        return self._stopping

    @property
    def in_loop_thread(self) -> bool:
        """True in callbacks, and in all functions that they call."""
        return self._thread == threading.get_ident()

    def run(self) -> None:
        """Serves until ``stop``; runs in the thread that owns the sockets.

        Raises:
            Exception: The argument of ``fail``.
            TooManyOpenFiles: The process has no descriptor left.
        """
        self._thread = threading.get_ident()
        try:
            self._open()
            while not self._stopping:
                if self._failure is not None:
                    raise self._failure
                self.tick(min(MAX_WAIT_MS, self._wait_ms()))
        finally:
            self._stopping = True
            self._thread = None

    def tick(self, wait_ms: int) -> None:
        """Take one turn: wait for at most ``wait_ms``, then sockets, calls, timers, tick ends."""
        ready = self._wait(wait_ms)
        now_ns = self.clock.monotonic_ns
        began_ns = self.turn_ns = now_ns()
        # Every turn runs this: no function without work is called.
        for source in ready:
            # A source that an earlier handler has removed is not called any more.
            if self._by_descriptor.get(source.descriptor) is source:
                if source.socket is not None:
                    self._touched[source] = None
                try:
                    source.handler()
                except Exception:
                    self._note_failure()
        for _ in range(len(self._calls)):
            self._guard(self._calls.popleft())
        if self._timers and self._timers[0][0] <= now_ns() // _NS_PER_MS:
            self._run_timers()
        for callback in self._tick_end:
            try:
                callback()
            except Exception:
                self._note_failure()
        if self.before_wait:
            self._run_before_wait()
        spent_ns = now_ns() - began_ns
        if spent_ns > self.longest_turn_ns:
            self.longest_turn_ns = spent_ns

    def _open(self) -> None:
        """Opens the descriptors: not before a source is watched, for many loops are never run."""
        if self._is_open:
            return
        with descriptors_for("an event loop"):
            self._poll = select.epoll()
            self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._is_open = True
        self.add(self._wake_read, self._drain_wake)
        if self._woken:
            os.write(self._wake_write, b"w")

    def _wait(self, wait_ms: int) -> list[_WatchedSource]:
        """Return the sources that can be served, after waiting for the first one."""
        if not self._is_open:
            self._open()
        if self.before_wait:
            self._run_before_wait()  # of calls between two ticks
        ready, self._again = self._again, []
        if self._touched:
            ready += [source for source in self._touched if source.is_ready()]
            self._touched.clear()
        if self.busy_poll is not None and wait_ms and not ready:
            found = self.busy_poll.wait(self._poll, wait_ms / 1_000)
        else:
            found = self._poll.poll(0 if ready else wait_ms / 1_000)
        self._ticks += 1
        in_vain = not (found or ready)
        if self._ticks % TICKS_PER_LOOK_ROUND == 0 or (in_vain and self._is_look_due()):
            sockets = [one for one in self._sources.values() if one.socket is not None]
            ready += [one for one in sockets if one not in ready and one.is_ready()]
        known = set(ready)
        for descriptor, _ in found:
            source = self._by_descriptor[descriptor]
            if source not in known and (source.socket is None or source.is_ready()):
                ready.append(source)
        if len(ready) > 1:
            # The kernel names them in the same order each time; the first ones must not use up all
            # the time of each turn.
            first = self._ticks % len(ready)
            ready = ready[first:] + ready[:first]
        return ready

    def _run_before_wait(self) -> None:
        while self.before_wait:
            callbacks, self.before_wait = self.before_wait, []
            for callback in callbacks:
                try:
                    callback()
                except Exception:
                    self._note_failure()

    def _is_look_due(self) -> bool:
        now_ms = self.clock.monotonic_ms()
        if now_ms < self._look_due_ms:
            return False
        self._look_due_ms = now_ms + LOOK_ROUND_MS
        return True

    def close(self) -> None:
        """Releases the loop's descriptors; the sockets stay their owners'."""
        self._stopping = True
        # ``wake`` of a closed loop must not write into a descriptor that has a new owner by then.
        self._woken = True
        if not self._is_open:
            return
        for descriptor in (self._wake_read, self._wake_write):
            os.close(descriptor)
        self._poll.close()

    def _guard(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            self._note_failure()

    def _note_failure(self) -> None:
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
        now_ms = self.clock.monotonic_ns() // _NS_PER_MS
        return min(max(self._timers[0][0] - now_ms, 0), MAX_WAIT_MS)

    def _run_timers(self) -> None:
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
