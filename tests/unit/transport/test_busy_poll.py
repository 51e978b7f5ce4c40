"""A wait is spent awake only as long as that helps."""

import os

import pytest

from mqmesh.testing.clock import ManualClock
from mqmesh.transport.busy_poll import MAX_SLEPT, BusyPoll, Poller
from mqmesh.transport.loop import EventLoop

WINDOW_US = 200
LOOK_NS = 10_000
READY = [(7, 1)]


class Kernel:
    """A poller that has something after so many looks; each of them takes 10 µs."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.looks = 0
        self.ready_after: int | None = None

    def clock_ns(self) -> int:
        return self.now_ns

    def poll(self, timeout: float | None = None, /) -> list[tuple[int, int]]:
        assert timeout == 0, "it must not sleep"
        self.now_ns += LOOK_NS
        self.looks += 1
        if self.ready_after is not None and self.looks >= self.ready_after:
            return list(READY)
        return []

    def wait(self, busy: BusyPoll, ready_after: int | None) -> tuple[list[tuple[int, int]], int]:
        """One wait: what came of it, and how often was looked."""
        self.looks, self.ready_after = 0, ready_after
        return busy.poll(self), self.looks


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def make(kernel: Kernel, window_us: int = WINDOW_US, processors: int = 2) -> BusyPoll:
    return BusyPoll(window_us, processors=processors, clock_ns=kernel.clock_ns)


def test_what_comes_within_the_window_is_found_awake_each_time(kernel):
    busy = make(kernel)
    for looks in (1, 5, 20, 3) * 10:
        assert kernel.wait(busy, looks) == (READY, looks)


def test_a_wait_in_vain_ends_with_the_window(kernel):
    found, looks = kernel.wait(make(kernel), None)
    assert not found
    assert looks == WINDOW_US * 1_000 // LOOK_NS


def test_after_waits_in_vain_ever_more_are_slept_through_but_never_all(kernel):
    busy = make(kernel)
    slept, streaks = 0, []
    for _ in range(1_000):
        _, looks = kernel.wait(busy, None)
        if looks:
            streaks.append(slept)
            slept = 0
        else:
            slept += 1
    assert streaks[:8] == [0, 1, 2, 4, 8, 16, 32, 64]
    assert set(streaks[8:]) == {MAX_SLEPT}


def test_one_success_makes_it_start_anew(kernel):
    busy = make(kernel)
    for _ in range(200):
        kernel.wait(busy, None)
    while not kernel.wait(busy, 1)[1]:
        continue
    assert kernel.wait(busy, None)[1] > 0
    assert kernel.wait(busy, 1)[1] == 0, "one wait is slept through"
    assert kernel.wait(busy, 1) == (READY, 1)


@pytest.mark.parametrize(("window_us", "processors"), [(0, 8), (WINDOW_US, 1)])
def test_it_can_be_turned_off_and_is_off_on_a_single_processor(kernel, window_us, processors):
    busy = make(kernel, window_us, processors)
    assert [kernel.wait(busy, 1) for _ in range(5)] == [([], 0)] * 5


def test_by_default_the_processors_of_this_process_count(kernel, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert kernel.wait(BusyPoll(WINDOW_US), 1) == ([], 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4})
    assert kernel.wait(BusyPoll(WINDOW_US), 1) == (READY, 1)


class Counting(BusyPoll):
    """Counts the waits."""

    def __init__(self, window_us: int) -> None:
        super().__init__(window_us, processors=2)
        self.waits = 0

    def poll(self, poller: Poller) -> list[tuple[int, int]]:
        self.waits += 1
        return super().poll(poller)


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


def test_a_loop_sleeps_after_it_was_awake_in_vain(loop):
    loop.busy_poll = Counting(1)
    loop.tick(1)
    loop.tick(1)
    assert loop.busy_poll.waits == 2
