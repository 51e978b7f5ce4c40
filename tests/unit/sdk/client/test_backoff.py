"""What is repeated because of an answer is repeated slower and slower."""

from __future__ import annotations

from mqmesh.sdk.client.backoff import FIRST_MS, FORGET_FACTOR, Backoff
from mqmesh.testing.clock import ManualClock


def test_the_first_time_is_free_and_each_further_one_waits_twice_as_long():
    backoff = Backoff(ManualClock().monotonic_ms, 100)
    delays = [backoff.next_delay_ms() for _ in range(7)]
    assert delays == [0, FIRST_MS, 20, 40, 80, 100, 100]


def test_progress_or_a_long_pause_begins_anew():
    clock = ManualClock()
    backoff = Backoff(clock.monotonic_ms, 100)
    for _ in range(5):
        backoff.next_delay_ms()
    clock.advance(FORGET_FACTOR * 100)
    assert backoff.next_delay_ms() == 100, "it is still the same trouble"
    clock.advance(FORGET_FACTOR * 100 + 1)
    assert backoff.next_delay_ms() == 0
    assert backoff.next_delay_ms() == FIRST_MS
    backoff.reset()
    assert backoff.next_delay_ms() == 0
