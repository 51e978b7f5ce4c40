"""A wait is spent awake only where that was measured to help."""

import os

import pytest

from mqmesh.testing.clock import ManualClock
from mqmesh.transport.zmq.busy_poll import TRIAL_EVERY, BusyPoll, Poller
from mqmesh.transport.zmq.loop import EventLoop

WINDOW_US = 200
LOOK_NS = 10_000
READY = [(7, 1)]


class Kernel:
    """A poller that has something after so long; a look takes 10 µs, waking up takes its time.

    Attributes:
        arrives_ns: After the beginning of the wait; None for never.
        wake_ns: What it takes to wake up who sleeps.
        crowded_ns: What arrives comes so much later while somebody looks again and again.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.looks = 0
        self.arrives_ns: int | None = None
        self.wake_ns = 50_000
        self.crowded_ns = 0
        self._begin_ns = 0

    def clock_ns(self) -> int:
        return self.now_ns

    def poll(self, timeout: float | None = None, /) -> list[tuple[int, int]]:
        assert timeout is not None
        waited_ns = self.now_ns - self._begin_ns
        if timeout == 0:
            self.looks += 1
            self.now_ns += LOOK_NS
            late_ns = self.crowded_ns
        else:
            late_ns = self.crowded_ns if waited_ns else 0
        if self.arrives_ns is None:
            self.now_ns += int(timeout * 1e9)
            return []
        if timeout == 0:
            return list(READY) if waited_ns + LOOK_NS >= self.arrives_ns + late_ns else []
        self.now_ns += max(self.arrives_ns + late_ns - waited_ns, 0) + self.wake_ns
        return list(READY)

    def wait(self, busy: BusyPoll, arrives_ns: int | None) -> tuple[list[tuple[int, int]], int]:
        """One wait of a second at most: what came of it, and how often was looked."""
        self.looks, self.arrives_ns, self._begin_ns = 0, arrives_ns, self.now_ns
        return busy.wait(self, 1.0), self.looks

    def waits_awake(self, busy: BusyPoll, arrives_ns: int | None, count: int) -> float:
        """The share of so many waits that were spent awake."""
        return sum(self.wait(busy, arrives_ns)[1] > 0 for _ in range(count)) / count


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def make(kernel: Kernel, window_us: int = WINDOW_US, processors: int = 2) -> BusyPoll:
    return BusyPoll(window_us, processors=processors, clock_ns=kernel.clock_ns)


def test_what_comes_within_the_window_is_awaited_awake(kernel):
    busy = make(kernel)
    kernel.waits_awake(busy, 80_000, 100)
    assert kernel.waits_awake(busy, 80_000, 320) == 1 - 1 / TRIAL_EVERY


def test_whatever_comes_is_found_either_way(kernel):
    busy = make(kernel)
    for arrives_ns in (1_000, 80_000, 300_000, 5_000) * 50:
        assert kernel.wait(busy, arrives_ns)[0] == READY
    assert kernel.wait(busy, None)[0] == []


def test_what_comes_behind_the_window_is_slept_for(kernel):
    busy = make(kernel)
    kernel.waits_awake(busy, 230_000, 100)
    assert kernel.waits_awake(busy, 230_000, 320) == 1 / TRIAL_EVERY


def test_a_wait_awake_ends_with_the_window(kernel):
    busy = make(kernel)
    looks = {kernel.wait(busy, None)[1] for _ in range(100)}
    assert looks == {0, WINDOW_US * 1_000 // LOOK_NS}


def test_who_has_nothing_to_do_sleeps(kernel):
    busy = make(kernel)
    kernel.waits_awake(busy, None, 100)
    assert kernel.waits_awake(busy, None, 320) == 1 / TRIAL_EVERY


def test_where_no_processor_is_idle_it_sleeps(kernel):
    busy = make(kernel)
    kernel.crowded_ns = 60_000
    kernel.waits_awake(busy, 80_000, 100)
    assert kernel.waits_awake(busy, 80_000, 320) == 1 / TRIAL_EVERY


def test_it_changes_its_mind_when_the_machine_does(kernel):
    busy = make(kernel)
    for crowded_ns, share in ((0, 1 - 1 / TRIAL_EVERY), (60_000, 1 / TRIAL_EVERY)) * 2:
        kernel.crowded_ns = crowded_ns
        kernel.waits_awake(busy, 80_000, 640)
        assert kernel.waits_awake(busy, 80_000, 320) == share


@pytest.mark.parametrize(("window_us", "processors"), [(0, 8), (WINDOW_US, 1)])
def test_it_can_be_turned_off_and_is_off_on_a_single_processor(kernel, window_us, processors):
    busy = make(kernel, window_us, processors)
    assert [kernel.wait(busy, 1) for _ in range(50)] == [(READY, 0)] * 50


def test_by_default_the_processors_of_this_process_count(kernel, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert kernel.waits_awake(BusyPoll(WINDOW_US), 1, 50) == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4})
    assert kernel.waits_awake(BusyPoll(WINDOW_US), 1, 50) > 0


class Counting(BusyPoll):
    """Counts the waits."""

    def __init__(self, window_us: int) -> None:
        super().__init__(window_us, processors=2)
        self.waits = 0

    def wait(self, poller: Poller, timeout_s: float) -> list[tuple[int, int]]:
        self.waits += 1
        return super().wait(poller, timeout_s)


@pytest.fixture
def loop():
    loop = EventLoop(ManualClock())
    yield loop
    loop.close()


def test_a_loop_waits_awake_first_and_serves_what_it_finds(loop):
    loop.busy_poll = Counting(1_000_000)
    served = []
    loop.call_soon_threadsafe(lambda: served.append(1))
    loop.tick(1_000)
    assert served == [1]
    assert loop.busy_poll.waits == 1


def test_a_loop_that_has_work_does_not_wait_awake(loop):
    loop.busy_poll = Counting(1_000_000)
    loop.tick(0)
    assert loop.busy_poll.waits == 0
