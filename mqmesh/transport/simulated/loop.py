"""The event loop's twin: turned by the simulation whenever it has work."""

import heapq
import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from mqmesh.clock import Clock
from mqmesh.transport.interface import Timer
from mqmesh.transport.simulated.node import SimulatedNode
from mqmesh.transport.simulated.simulation import Event

MOST_TURNS_A_MS: Final = 64
"""Turns in a ms beyond which the loop lets time pass, as each turn of a real one does."""
NEVER_MS: Final = 1 << 62

_log = logging.getLogger(__name__)


class SimulatedLoop:
    """The twin of ``mqmesh.transport.zmq.loop.EventLoop``; the same rules hold.

    Args:
        node: The process of the loop.

    Attributes:
        clock: Clock of the node.
        callback_failures: Exceptions in callbacks so far; each is a bug.
        longest_turn_ns: 0; turns take no time here.
        turn_count: Turns so far; an idle process takes few.
    """

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        self.clock: Clock = node.clock
        self.callback_failures = 0
        self.longest_turn_ns = 0
        self.failure: Exception | None = None
        self._inbox: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._calls: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._timers: list[tuple[int, int, Timer]] = []
        self._order = itertools.count()
        self._tick_end: list[Callable[[], None]] = []
        self._soon = False
        self._timed_ms = NEVER_MS
        self._timed: Event | None = None
        self.turn_count = 0
        self._turning = False
        self._stopping = False
        self._on_stop: list[Callable[[], None]] = []
        self._turns_ms = (0, 0)

    def deliver(self, callback: Callable[..., None], *arguments: object) -> None:
        """Queue an event from the network: the next turn begins with it."""
        self._inbox.append((callback, arguments))
        self._plan_turn(self.node.simulation.now_ms)

    def at_tick_end(self, callback: Callable[[], None]) -> None:
        """Calls back at the end of each turn."""
        self._tick_end.append(callback)

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> Timer:
        """Calls once, not before ``delay_ms``."""
        timer = Timer(callback, 0)
        self._push(timer, delay_ms)
        return timer

    def call_every(self, interval_ms: int, callback: Callable[[], None]) -> Timer:
        """Calls each ``interval_ms`` from now on."""
        timer = Timer(callback, interval_ms)
        self._push(timer, interval_ms)
        return timer

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        """Calls soon, in a turn of the loop."""
        self._calls.append((callback, ()))
        self._plan_turn(self.node.simulation.now_ms)

    def wake(self) -> None:
        """Makes the loop turn."""
        self._plan_turn(self.node.simulation.now_ms)

    def has_news(self) -> bool:
        """Return True when a turn would find work."""
        return bool(self._inbox or self._calls)

    def stop(self) -> None:
        """Ends the loop after the turn that runs."""
        if not self._stopping:
            self._stopping = True
            self.node.after(0, self._finish)

    def fail(self, error: Exception) -> None:
        """End the process, which cannot do its work any more; ``failure`` keeps the reason."""
        self.failure = error
        self.stop()

    def disown(self) -> None:
        """Stop for good; never called: no simulated process forks."""
        self._stopping = True

    @property
    def stopping(self) -> bool:
        """True once ``stop`` was called."""
        return self._stopping

    @property
    def in_loop_thread(self) -> bool:
        """True in callbacks, and in all functions that they call."""
        return self._turning

    def run(self) -> None:
        """Return at once: the simulation turns the loop; ``on_stop`` notifies of its end."""
        self._stopping = True

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Calls back when the loop has stopped, where a thread would return from ``run``."""
        self._on_stop.append(callback)

    def tick(self, wait_ms: int) -> None:
        """Lets the simulation run for one turn of this loop, ``wait_ms`` at most."""
        turns = self.turn_count
        self.node.wait_until(lambda: self.turn_count != turns, wait_ms)

    def close(self) -> None:
        """Ends the loop; no callback follows."""
        self._stopping = True
        self._inbox.clear()
        self._calls.clear()
        self._timers.clear()

    # ---- Turns -------------------------------------------------------------------------

    # At most two events are planned: a turn now, and one for the first timer. So events that
    # arrive meanwhile need not plan the timer anew.

    def _plan_turn(self, due_ms: int) -> None:
        if not self._soon:
            self._soon = True
            self.node.simulation.at(due_ms, self._soon_due)

    def _plan_timer(self, due_ms: int) -> None:
        if due_ms < self._timed_ms:
            if self._timed is not None:
                self._timed.cancel()
            self._timed_ms = due_ms
            self._timed = self.node.simulation.at(due_ms, self._timer_due)

    def _soon_due(self) -> None:
        self.node.call(self._turn_soon)

    def _timer_due(self) -> None:
        self.node.call(self._turn_for_timer)

    def _turn_soon(self) -> None:
        self._soon = False
        if not self._stopping:
            self._take_turn(self.node.simulation.now_ms)

    def _turn_for_timer(self) -> None:
        self._timed_ms, self._timed = NEVER_MS, None
        if self._stopping:
            return
        now_ms, first_ms = self.node.simulation.now_ms, self._first_timer_ms()
        if first_ms <= now_ms:
            self._take_turn(now_ms)
        else:
            self._plan_timer(first_ms)  # a turn before this one ran it, or it was cancelled

    def _take_turn(self, now_ms: int) -> None:
        if self._turning:
            self._plan_turn(now_ms + 1)  # a callback of this loop waits for the simulation
            return
        self._turn(now_ms)
        before_ms, turns = self._turns_ms
        turns = turns + 1 if before_ms == now_ms else 1
        self._turns_ms = now_ms, turns
        least_ms = now_ms if turns < MOST_TURNS_A_MS else now_ms + 1
        if self._inbox or self._calls:
            self._plan_turn(least_ms)
        elif (first_ms := self._first_timer_ms()) < NEVER_MS:
            self._plan_timer(max(first_ms, least_ms))

    def _turn(self, now_ms: int) -> None:
        self.turn_count += 1
        self._turning = True
        try:
            for queue in (self._inbox, self._calls):
                for _ in range(len(queue)):
                    if queue:
                        callback, arguments = queue.popleft()
                        self._guard(callback, *arguments)
            if self._timers and self._timers[0][0] <= now_ms:
                self._run_timers(now_ms)
            for hook in self._tick_end:
                self._guard(hook)
        finally:
            self._turning = False

    def _first_timer_ms(self) -> int:
        timers = self._timers
        while timers and timers[0][2].cancelled:
            heapq.heappop(timers)
        return timers[0][0] if timers else NEVER_MS

    def _run_timers(self, now_ms: int) -> None:
        # Timers that callbacks plan now run in the next turn.
        last = next(self._order)
        while self._timers and self._timers[0][:2] <= (now_ms, last):
            timer = heapq.heappop(self._timers)[2]
            if timer.cancelled:
                continue
            if timer.interval_ms:
                self._push(timer, timer.interval_ms)
            self._guard(timer.callback)

    def _push(self, timer: Timer, delay_ms: int) -> None:
        due_ms = self.node.simulation.now_ms + max(delay_ms, 0)
        heapq.heappush(self._timers, (due_ms, next(self._order), timer))
        if not self._turning:
            self._plan_timer(due_ms)

    def _guard(self, callback: Callable[..., None], *arguments: object) -> None:
        if not self.node.alive:
            return  # a callback before it killed the node
        try:
            callback(*arguments)
        except Exception:
            self.callback_failures += 1
            _log.exception("a callback of %s failed; the loop goes on", self.node.name)

    def _finish(self) -> None:
        callbacks, self._on_stop = self._on_stop, []
        for callback in callbacks:
            callback()
