"""Threads that take the turns of a loop in place of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from mqmesh.transport import loop as loop_module
from mqmesh.transport.loop import EventLoop

PATIENCE_S = 10.0


class Running:
    """A loop that runs in a thread of its own."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def borrow(self) -> None:
        assert self.loop.borrow()
        assert self.loop.borrowed_turn(0)  # from now on the loop's thread is in no turn

    def who_is_called(self) -> int:
        """The thread that makes the next call, while this one takes no turns."""
        called = threading.Event()
        threads = []

        def call() -> None:
            threads.append(threading.get_ident())
            assert self.loop.in_loop_thread
            called.set()

        self.loop.call_soon_threadsafe(call)
        assert called.wait(PATIENCE_S)
        return threads[0]

    def stop(self) -> None:
        self.loop.stop()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        self.loop.close()


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running()
    yield running
    running.stop()


def test_who_borrows_the_turns_makes_the_calls(running):
    loop = running.loop
    calls = []
    running.borrow()
    assert loop.borrow()
    loop.call_soon_threadsafe(lambda: calls.append(threading.get_ident()))
    assert calls == []
    assert not loop.in_loop_thread
    assert loop.has_news()
    assert loop.borrowed_turn(0)
    assert calls == [threading.get_ident()]
    loop.give_back()
    assert not loop.borrowed_turn(0)
    assert running.who_is_called() == running.thread.ident


def test_only_one_thread_borrows_the_turns(running):
    loop = running.loop
    running.borrow()
    outcomes = []

    def other() -> None:
        outcomes.append((loop.borrow(), loop.borrowed_turn(0)))
        loop.give_back()

    thread = threading.Thread(target=other)
    thread.start()
    while thread.is_alive():
        assert loop.borrowed_turn(1)
    thread.join()
    assert outcomes == [(False, False)]
    assert loop.borrowed_turn(0)


def test_a_borrower_that_takes_no_turns_loses_them(running):
    loop = running.loop
    running.borrow()
    assert running.who_is_called() == running.thread.ident
    assert not loop.borrowed_turn(0)
    loop.give_back()  # has no effect any more
    assert running.who_is_called() == running.thread.ident
    running.borrow()  # and may borrow them again


def test_a_borrower_that_waits_in_its_turn_keeps_them(running):
    loop = running.loop
    running.borrow()
    threads = []

    def call_late() -> None:
        loop.call_soon_threadsafe(lambda: threads.append(threading.get_ident()))

    timer = threading.Timer(5 * loop_module.PATIENCE_S, call_late)
    timer.start()
    while not threads:
        assert loop.borrowed_turn(1_000)
    assert threads == [threading.get_ident()]


def test_a_borrowed_turn_serves_descriptors_and_timers(running):
    loop = running.loop
    ends = os.pipe()
    served = []
    running.borrow()

    def prepare() -> None:
        loop.add(ends[0], lambda: served.append(os.read(ends[0], 1)))
        loop.call_later(1, lambda: served.append(b"timer"))

    loop.call_soon_threadsafe(prepare)
    os.write(ends[1], b"x")
    while len(served) < 2:
        assert loop.borrowed_turn(1_000)
    assert sorted(served) == [b"timer", b"x"]
    loop.remove(ends[0])
    for end in ends:
        os.close(end)


def test_a_loop_that_stops_waits_for_the_borrowed_turn_under_way():
    running = Running()
    loop = running.loop
    running.borrow()
    alive = []

    def stop() -> None:
        loop.stop()
        running.thread.join(2 * loop_module.PATIENCE_S)
        alive.append(running.thread.is_alive())

    loop.call_soon_threadsafe(stop)
    assert loop.borrowed_turn(0)
    assert alive == [True]  # it may not release its sockets under a turn
    running.stop()
    assert not loop.borrowed_turn(0)
    assert not loop.borrow()


def test_who_loses_the_turns_on_the_way_into_one_does_not_wait_for_the_next():
    loop = EventLoop()
    assert loop.borrow()
    outcome = []
    in_turn, go_on = threading.Event(), threading.Event()
    me = threading.get_ident()

    def hold_turn() -> None:
        with loop._turn:  # as the loop's own thread does, which waits for news
            in_turn.set()
            go_on.wait(PATIENCE_S)

    def lose() -> None:
        with loop._loan:
            assert loop._borrower == me
            loop._borrower = None

    holder = threading.Thread(target=hold_turn)
    holder.start()
    assert in_turn.wait(PATIENCE_S)
    loser = threading.Timer(0.02, lose)
    loser.start()
    outcome.append(loop.borrowed_turn(0))
    assert outcome == [False]
    assert holder.is_alive()
    go_on.set()
    holder.join()
    loser.join()
    loop.close()


@pytest.mark.parametrize("failure", [ZeroDivisionError, SystemExit])
def test_a_borrowed_turn_that_fails_ends_the_loops_own_thread(monkeypatch, failure):
    loop = EventLoop()

    def fail(wait_ms):
        raise failure("some bug")

    assert loop.borrow()
    with monkeypatch.context() as patch:
        patch.setattr(loop, "tick", fail)
        assert not loop.borrowed_turn(0)
        assert not loop.borrowed_turn(0)
    assert not loop.in_loop_thread
    with pytest.raises(failure, match="some bug"):
        loop.run()
    assert not loop.borrow()
    loop.close()


def test_a_fork_takes_no_turns():
    loop = EventLoop()
    assert loop.borrow()
    loop._turn.acquire()  # by threads that the fork does not have
    loop._loan.acquire()
    loop._returned._cond.acquire()
    loop.disown()
    assert not loop.borrowed_turn(0)
    loop.give_back()
    assert not loop.borrow()
    loop.close()
