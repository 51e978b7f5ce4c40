"""Senders let the client loop have the interpreter when it needs it."""

from __future__ import annotations

import threading

import pytest
from harness.threadless_loop import ThreadlessLoop

from mqmesh.sdk.producer import pace as pace_module
from mqmesh.sdk.producer.pace import GIVE_WAY_BATCH_BYTES, GIVE_WAY_BYTES, SendPace


@pytest.fixture
def loop(monkeypatch) -> ThreadlessLoop:
    monkeypatch.setattr(pace_module, "GIVE_WAY_S", 60)
    return ThreadlessLoop()


def test_a_pump_is_planned_once(loop) -> None:
    pace = SendPace(loop)
    assert [pace.plan(), pace.plan()] == [True, False]
    pace.begin()
    assert pace.plan()


def waits_for_a_turn(loop: ThreadlessLoop, pace: SendPace, size: int) -> bool:
    """True when ``give_way`` waits until the loop's turn is over; it must not wait longer."""
    waiting = threading.Thread(target=pace.give_way, args=(size,))
    waiting.start()
    waiting.join(0.01)
    waits = waiting.is_alive()
    loop.end_turn()
    waiting.join(10)
    assert not waiting.is_alive()
    return waits


def test_who_is_far_ahead_of_a_planned_turn_waits_until_it_is_over(loop) -> None:
    pace = SendPace(loop)
    assert pace.plan()
    pace.give_way(GIVE_WAY_BYTES - 1)
    assert waits_for_a_turn(loop, pace, 1)


def test_batches_may_be_further_ahead(loop) -> None:
    pace = SendPace(loop)
    assert pace.plan()
    pace.give_way(GIVE_WAY_BATCH_BYTES - 1, GIVE_WAY_BATCH_BYTES)  # does not wait
    assert GIVE_WAY_BATCH_BYTES > GIVE_WAY_BYTES
    assert waits_for_a_turn(loop, pace, 1)


def test_who_is_far_ahead_waits_while_an_answer_is_looked_at(loop) -> None:
    pace = SendPace(loop)
    loop.news = True
    pace.give_way(GIVE_WAY_BYTES - 1)
    assert waits_for_a_turn(loop, pace, 1)


def test_nobody_waits_for_a_broker(loop) -> None:
    SendPace(loop).give_way(10 * GIVE_WAY_BYTES)  # no turn is planned, and no answer there


def test_a_loop_in_the_middle_of_its_turn_is_let_finish(loop) -> None:
    pace = SendPace(loop)
    pace.begin()
    assert waits_for_a_turn(loop, pace, 1)
    pace.end()
    pace.give_way(1)  # and afterwards nobody waits


def test_a_loop_that_ran_is_not_waited_for(loop) -> None:
    pace = SendPace(loop)
    assert pace.plan()
    pace.give_way(GIVE_WAY_BYTES - 1)
    pace.begin()
    pace.end()
    pace.give_way(GIVE_WAY_BYTES - 1)  # counted anew
    pace.give_way(GIVE_WAY_BYTES)  # nothing is planned, and no answer there


def test_a_turn_that_ends_while_it_is_looked_at_is_not_waited_for(loop) -> None:
    pace = SendPace(loop)

    def has_news() -> bool:
        loop.end_turn()
        return True

    loop.has_news = has_news  # type: ignore[method-assign]
    pace.give_way(GIVE_WAY_BYTES)


def test_the_loops_own_thread_never_waits_for_itself(loop) -> None:
    pace = SendPace(loop)
    loop.in_loop_thread = True
    assert pace.plan()
    pace.give_way(10 * GIVE_WAY_BYTES)


def test_a_loop_that_does_not_run_is_not_waited_for_long(loop, monkeypatch) -> None:
    monkeypatch.setattr(pace_module, "GIVE_WAY_S", 0.001)
    pace = SendPace(loop)
    assert pace.plan()
    pace.give_way(GIVE_WAY_BYTES)
