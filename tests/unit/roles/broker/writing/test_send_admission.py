"""Sends are refused bit by bit, and only while the log cannot keep up."""

from __future__ import annotations

import pytest

from mqmesh.roles.broker.writing.send_admission import SendAdmission
from mqmesh.testing.clock import ManualClock


class Loop:
    """Plays ticks: frames that came during the tick before are taken, then written."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.admission = SendAdmission(wait_limit_ms=200, busy_timeout_ms=1_000)

    def tick(self, write_ms: int, *, sends: int = 100, slept_ms: int = 0, drained=True) -> int:
        """One tick; returns how many of the sends are refused."""
        self.clock.advance(slept_ms)
        readable_ms = self.clock.monotonic_ms()
        self.admission.readable_ms = readable_ms
        refused = self.admission.count_refused(sends, readable_ms)
        self.clock.advance(write_ms)
        now_ms = self.clock.monotonic_ms()
        self.admission.tick_ended(now_ms, readable_ms if drained else None)
        return refused


@pytest.fixture
def loop():
    return Loop()


def test_quick_writes_refuse_nothing(loop):
    assert [loop.tick(20) for _ in range(1_000)] == [0] * 1_000


def test_a_hiccup_refuses_nothing(loop):
    for hiccup_ms in (200, 500, 900, 5_000):
        assert [loop.tick(ms) for ms in (10, hiccup_ms, 10, 10, 10)] == [0] * 5


def test_hiccups_now_and_then_refuse_nothing(loop):
    assert sum(loop.tick(ms) for ms in [300, 10] * 100) == 0


def test_a_disk_that_stays_slow_refuses_those_that_waited_too_long(loop):
    refused = [loop.tick(400) for _ in range(10)]
    # The waits are over the limit from the second tick on, for more than a second from the sixth.
    assert refused == [0, 0, 0, 0, 50, 50, 50, 50, 50, 50]


@pytest.mark.parametrize(("write_ms", "share"), [(201, 0), (220, 9), (300, 33), (1_000, 80)])
def test_the_share_grows_with_the_waits(loop, write_ms, share):
    for _ in range(20):
        last = loop.tick(write_ms)
    assert last == share


def test_it_ends_as_soon_as_the_waits_are_short(loop):
    while not loop.tick(400):
        pass
    loop.tick(10)
    assert loop.tick(10) == 0
    # And has to last again before it goes on.
    assert [loop.tick(400) for _ in range(3)] == [0, 0, 0]


def test_frames_left_in_the_socket_wait_on(loop):
    waits = []
    for _ in range(5):
        loop.tick(100, drained=False)
        waits.append(loop.admission.longest_wait_ms)
    assert waits == [0, 100, 200, 300, 400]


def test_a_loop_that_sleeps_has_nobody_waiting(loop):
    for _ in range(100):
        assert loop.tick(1, slept_ms=500) == 0
        assert loop.admission.longest_wait_ms == 0


def test_ticks_without_frames_count_as_empty(loop):
    loop.tick(10)
    readable_ms = loop.clock.monotonic_ms() - 10
    for _ in range(100):
        loop.clock.advance(100)
        loop.admission.tick_ended(loop.clock.monotonic_ms(), readable_ms)
    loop.clock.advance(1)
    loop.admission.readable_ms = loop.clock.monotonic_ms()
    assert loop.admission.count_refused(10, loop.clock.monotonic_ms()) == 0
    assert loop.admission.longest_wait_ms == 1
