"""The clock that tests move by hand."""

from __future__ import annotations

import pytest

from mqmesh.clock import Clock, SystemClock
from mqmesh.testing.clock import ManualClock


def test_it_stands_still_until_it_is_moved():
    clock: Clock = ManualClock(monotonic_ms=5, wall_ms=1_000)
    assert (clock.monotonic_ms(), clock.wall_ms()) == (5, 1_000)
    assert (clock.monotonic_ms(), clock.wall_ms()) == (5, 1_000)


def test_time_passes_on_both_clocks():
    clock = ManualClock(monotonic_ms=5, wall_ms=1_000)
    clock.advance(10)
    assert (clock.monotonic_ms(), clock.wall_ms()) == (15, 1_010)


def test_a_step_of_the_wall_clock_leaves_the_monotonic_one_alone():
    clock = ManualClock(monotonic_ms=5, wall_ms=1_000)
    clock.jump_wall(-600)
    assert (clock.monotonic_ms(), clock.wall_ms()) == (5, 400)


def test_time_does_not_go_back():
    with pytest.raises(AssertionError):
        ManualClock().advance(-1)


def test_the_systems_clock_goes_forward_and_knows_the_century():
    clock = SystemClock()
    assert clock.monotonic_ms() <= clock.monotonic_ms()
    assert clock.wall_ms() > 1_600_000_000_000
