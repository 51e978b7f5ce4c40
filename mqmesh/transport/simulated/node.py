"""One simulated process: its clocks, its state, and the objects that die with it."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from mqmesh.transport.simulated.simulation import START_WALL_MS, Event, Simulation
from mqmesh.units import TimestampMs

LONGEST_WAIT_MS: Final = 600_000
"""Limit of a wait that has none of its own: it would last for ever."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class NodeKilled(BaseException):
    """Raised in the waiting code of a killed process; nothing of the process runs any more."""


class SimulatedClock:
    """The clocks of one node: the simulation's monotonic one, and a wall clock of its own.

    Args:
        simulation: The simulation, which has the time.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._ahead_ms = START_WALL_MS

    def monotonic_ms(self) -> int:
        """Milliseconds of the monotonic clock."""
        return self._simulation.now_ms

    def monotonic_ns(self) -> int:
        """Nanoseconds of the monotonic clock."""
        return self._simulation.now_ms * 1_000_000

    def boot_ms(self) -> int:
        """Milliseconds of the boot clock: simulated machines never sleep."""
        return self._simulation.now_ms

    def wall_ms(self) -> TimestampMs:
        """Milliseconds of the wall clock."""
        return TimestampMs(self._simulation.now_ms + self._ahead_ms)

    def wall_ns(self) -> int:
        """Return nanoseconds of the wall clock."""
        return (self._simulation.now_ms + self._ahead_ms) * 1_000_000

    def step(self, difference_ms: int) -> None:
        """Sets the wall clock forward or back, as an administrator may."""
        self._ahead_ms += difference_ms


class SimulatedNode:
    """A process of the simulation.

    Args:
        simulation: The simulation.
        name: Name for logs and faults.

    Attributes:
        clock: Clocks of the process.
        alive: False once it was killed; nothing of it happens from then on.
        paused: It stands still, as by SIGSTOP.
        random: Source of chance for the process itself.
        on_death: Functions called when it is killed, such as one of the network.
    """

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation = simulation
        self.name = name
        self.clock = SimulatedClock(simulation)
        self.alive = True
        self.paused = False
        self.random = random.Random(simulation.random.getrandbits(64))
        self.on_death: list[Callable[[], None]] = []
        self._late: list[Callable[[], None]] = []

    def after(self, delay_ms: int, callback: Callable[[], None]) -> Event:
        """Calls later, unless the node is dead by then; a paused node calls when it resumes."""
        return self.simulation.after(delay_ms, partial(self.call, callback))

    def wait_until(self, is_done: Callable[[], bool], timeout_ms: int) -> bool:
        """Waits as a thread of the process would: the simulation goes on meanwhile.

        Returns:
            True if the condition is met, False if the time is over.

        Raises:
            NodeKilled: The process was killed meanwhile.
        """
        self.simulation.run_until(lambda: not self.alive or is_done(), timeout_ms)
        if not self.alive:
            raise NodeKilled(self.name)
        return is_done()

    def kill(self) -> None:
        """Ends the process at once, as kill -9 does."""
        self.alive = False
        self._late.clear()
        callbacks, self.on_death = self.on_death, []
        for callback in callbacks:
            callback()

    def pause(self) -> None:
        """Stop the node until ``resume``; events that are due meanwhile come late."""
        self.paused = True

    def resume(self) -> None:
        """Lets the node go on."""
        self.paused = False
        late, self._late = self._late, []
        for callback in late:
            self.after(0, callback)

    def call(self, callback: Callable[[], None]) -> None:
        """Calls now, unless the node is dead; a paused node calls when it resumes."""
        if not self.alive:
            return
        if self.paused:
            self._late.append(callback)
            return
        # A wait in the middle of its own process' death never goes on; all others do.
        with suppress(NodeKilled):
            callback()


class SimulatedEvent:
    """Simulated ``threading.Event``: a waiting thread runs the simulation."""

    def __init__(self, node: SimulatedNode) -> None:
        self._node = node
        self._set = False

    def is_set(self) -> bool:
        """Return True after ``set``."""
        return self._set

    def set(self) -> None:
        """Ends all waits."""
        self._set = True

    def clear(self) -> None:
        """Begins anew."""
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set, ``timeout`` seconds at most."""
        return self._node.wait_until(self.is_set, _in_ms(timeout))


class SimulatedCondition:
    """The twin of ``threading.Condition``; there is one thread, so its own lock does nothing.

    Args:
        node: The node that waits.
        lock: Lock shared with other code, which may take it during a wait.
    """

    def __init__(self, node: SimulatedNode, lock: "threading.Lock | None" = None) -> None:
        self._node = node
        self._lock = lock
        self._notes = 0

    def __enter__(self) -> bool:
        return True if self._lock is None else self._lock.__enter__()

    def __exit__(self, *raised: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def notify(self, n: int = 1) -> None:
        """Ends the waits."""
        self._notes += 1

    def notify_all(self) -> None:
        """Ends the waits."""
        self._notes += 1

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for a notification, ``timeout`` seconds at most."""
        before = self._notes
        return self.wait_for(lambda: self._notes != before, timeout)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until the predicate is true, ``timeout`` seconds at most."""
        if self._lock is None:
            return self._node.wait_until(predicate, _in_ms(timeout))
        self._lock.release()
        try:
            return self._node.wait_until(predicate, _in_ms(timeout))
        finally:
            self._lock.acquire()


class SimulatedFuture(Future[_T]):
    """Outcome of work in a helper thread; a thread that waits for it runs the simulation."""

    def __init__(self, node: SimulatedNode) -> None:
        super().__init__()
        self._node = node

    def result(self, timeout: float | None = None) -> _T:
        """Wait as ``concurrent.futures.Future.result``."""
        self._node.wait_until(self.done, _in_ms(timeout))
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as ``concurrent.futures.Future.exception``."""
        self._node.wait_until(self.done, _in_ms(timeout))
        return super().exception(0)


class SimulatedExecutor(Executor):
    """One helper thread of a process: its tasks are done in order, each a little later.

    Args:
        node: Node of the thread; tasks that were not begun when it is killed are never done.
        slowest_ms: Longest time of a task, which takes 1 ms at least.
    """

    def __init__(self, node: SimulatedNode, slowest_ms: int = 5) -> None:
        self._node = node
        self._slowest_ms = slowest_ms
        self._free_ms = 0
        self._open = 0

    def submit(
        self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> SimulatedFuture[_T]:
        """Queues a task."""
        future: SimulatedFuture[_T] = SimulatedFuture(self._node)

        def work() -> None:
            self._open -= 1
            try:
                outcome = fn(*args, **kwargs)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(outcome)

        now_ms = self._node.simulation.now_ms
        self._free_ms = max(self._free_ms, now_ms) + self._node.random.randint(1, self._slowest_ms)
        self._open += 1
        self._node.after(self._free_ms - now_ms, work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Waits until all tasks are done."""
        if wait:
            self._node.wait_until(lambda: self._open == 0, LONGEST_WAIT_MS)


def _in_ms(timeout: float | None) -> int:
    return LONGEST_WAIT_MS if timeout is None else int(max(timeout, 0) * 1_000)


Work = Callable[..., Any]
