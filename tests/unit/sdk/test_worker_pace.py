"""Busy workers and waiting ones."""

from __future__ import annotations

from mqmesh.sdk.consumer.listening.worker_pace import BUSY_S, WAITING_FACTOR, WINDOW_S, WorkerPace


def test_a_worker_waits_until_it_has_shown_that_it_is_busy():
    pace = WorkerPace()
    assert pace.waits
    pace.note(BUSY_S / 2, BUSY_S / 2)
    assert pace.waits
    pace.note(BUSY_S / 2, BUSY_S / 2)
    assert not pace.waits


def test_short_waits_add_up():
    pace = WorkerPace()
    pace.note(BUSY_S, BUSY_S)
    for _ in range(round(WINDOW_S / 0.001) - 1):
        pace.note(0.001, 0.00005)
        assert not pace.waits
    pace.note(0.0011, 0.00005)
    assert pace.waits


def test_waiting_for_a_processor_now_and_then_is_no_waiting():
    pace = WorkerPace()
    pace.note((WAITING_FACTOR - 0.5) * BUSY_S, BUSY_S)
    assert not pace.waits
    pace.note((WAITING_FACTOR + 0.5) * BUSY_S, BUSY_S)
    assert pace.waits


def test_each_stretch_counts_for_itself():
    pace = WorkerPace()
    pace.note(1.0, 0.0)
    assert pace.waits
    pace.note(BUSY_S, BUSY_S)
    assert not pace.waits
