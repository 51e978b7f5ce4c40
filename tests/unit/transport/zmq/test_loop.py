"""The event loop, with a clock moved by hand and pipes in place of sockets."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator

import pytest
import zmq

from mqmesh.errors import ClientClosed
from mqmesh.testing.clock import ManualClock
from mqmesh.transport.zmq import loop as loop_module
from mqmesh.transport.zmq.loop import LOOK_ROUND_MS, EventLoop


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def loop(clock) -> Iterator[EventLoop]:
    loop = EventLoop(clock)
    yield loop
    loop.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_the_longest_turn_counts_work_and_no_waiting(loop, clock, pipe):
    read, write = pipe

    def work() -> None:
        os.read(read, 1)
        clock.advance(5)

    loop.add(read, work)
    os.write(write, b"1")
    loop.tick(0)
    loop.call_later(0, lambda: clock.advance(3))
    loop.tick(0)
    assert loop.longest_turn_ns == 5_000_000
    loop.longest_turn_ns = 0
    clock.advance(1_000)
    loop.tick(0)
    assert loop.longest_turn_ns == 0


# ---- Timers --------------------------------------------------------------------------------


def test_a_timer_fires_once_when_it_is_due_and_not_before(loop, clock):
    calls = []
    loop.call_later(100, lambda: calls.append(1))
    loop.tick(0)
    clock.advance(99)
    loop.tick(0)
    assert calls == []
    clock.advance(1)
    loop.tick(0)
    loop.tick(0)
    assert calls == [1]


def test_timers_fire_in_the_order_of_their_times_and_equal_ones_as_planned(loop, clock):
    calls = []
    for name, delay_ms in (("late", 30), ("a", 10), ("b", 10), ("first", 5)):
        loop.call_later(delay_ms, lambda name=name: calls.append(name))
    clock.advance(50)
    loop.tick(0)
    assert calls == ["first", "a", "b", "late"]


def test_a_cancelled_timer_does_not_fire(loop, clock):
    calls = []
    timer = loop.call_later(10, lambda: calls.append(1))
    timer.cancel()
    timer.cancel()
    clock.advance(20)
    loop.tick(0)
    assert calls == []


def test_a_timer_may_cancel_another_that_is_due_too(loop, clock):
    calls = []
    loop.call_later(10, lambda: other.cancel())
    other = loop.call_later(11, lambda: calls.append(1))
    clock.advance(20)
    loop.tick(0)
    assert calls == []


def test_a_repeating_timer_does_not_make_up_for_missed_turns(loop, clock):
    calls = []
    timer = loop.call_every(10, lambda: calls.append(clock.monotonic_ms()))
    begin = clock.monotonic_ms()
    clock.advance(1_000)
    loop.tick(0)
    assert calls == [begin + 1_000]
    clock.advance(9)
    loop.tick(0)
    assert len(calls) == 1
    clock.advance(1)
    loop.tick(0)
    assert len(calls) == 2
    timer.cancel()
    clock.advance(100)
    loop.tick(0)
    assert len(calls) == 2


def test_a_repeating_timer_may_cancel_itself(loop, clock):
    calls = []

    def once():
        calls.append(1)
        timer.cancel()

    timer = loop.call_every(10, once)
    for _ in range(3):
        clock.advance(10)
        loop.tick(0)
    assert calls == [1]


def test_a_timer_planned_by_a_timer_for_now_fires_in_the_same_turn(loop):
    calls = []
    loop.call_later(0, lambda: loop.call_later(0, lambda: calls.append(1)))
    loop.tick(0)
    assert calls == [1]


def test_the_loop_waits_until_the_next_timer_and_never_longer_than_a_second(loop, clock):
    assert loop._wait_ms() == loop_module.MAX_WAIT_MS
    loop.call_later(5_000, lambda: None)
    assert loop._wait_ms() == loop_module.MAX_WAIT_MS
    timer = loop.call_later(70, lambda: None)
    assert loop._wait_ms() == 70
    clock.advance(100)
    assert loop._wait_ms() == 0
    timer.cancel()
    assert loop._wait_ms() == loop_module.MAX_WAIT_MS


def test_a_step_of_the_wall_clock_fires_nothing(loop, clock):
    calls = []
    loop.call_later(100, lambda: calls.append(1))
    clock.jump_wall(24 * 3_600_000)
    loop.tick(0)
    assert calls == []


# ---- Descriptors ---------------------------------------------------------------------------


def test_a_readable_descriptor_is_reported_until_it_is_read(loop, pipe):
    calls = []
    loop.add(pipe[0], lambda: calls.append(1))
    loop.tick(0)
    assert calls == []
    os.write(pipe[1], b"x")
    loop.tick(0)
    loop.tick(0)
    assert calls == [1, 1]
    os.read(pipe[0], 1)
    loop.tick(0)
    assert calls == [1, 1]
    os.write(pipe[1], b"x")
    loop.remove(pipe[0])
    loop.tick(0)
    assert calls == [1, 1]


def test_a_descriptor_that_is_watched_once_is_reported_once(loop, pipe):
    read, write = pipe
    seen = []
    loop.tick(0)
    loop.watch_once(read, lambda: seen.append(1))
    loop.tick(0)
    os.write(write, b"x")
    loop.tick(100)
    loop.tick(0)
    assert seen == [1]
    loop.watch_once(read, lambda: seen.append(2))
    loop.tick(100)
    assert seen == [1, 2]
    other = EventLoop()
    other.tick(0)
    other.close()
    with pytest.raises(ClientClosed):
        other.watch_once(read, lambda: seen.append(3))


def test_a_source_removed_by_another_handler_in_the_same_turn_is_left_alone(loop, pipe):
    calls = []
    second = os.dup(pipe[0])
    os.write(pipe[1], b"x")

    def handler():
        calls.append(1)
        loop.remove(pipe[0])
        loop.remove(second)

    loop.add(pipe[0], handler)
    loop.add(second, handler)
    loop.tick(0)
    os.close(second)
    assert calls == [1]
    assert loop.callback_failures == 0


def test_a_failure_ends_the_run_with_its_error(loop):
    loop.call_later(0, lambda: loop.fail(RuntimeError("no disk")))
    with pytest.raises(RuntimeError, match="no disk"):
        loop.run()
    assert loop.stopping


# ---- ZeroMQ sockets ------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket, zmq.Socket]]:
    context = zmq.Context()
    ends = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ends[0].bind("inproc://pair")
    ends[1].connect("inproc://pair")
    yield ends
    context.destroy(0)


def test_a_readable_socket_is_reported_until_everything_is_read(loop, pair):
    ours, theirs = pair
    got = []
    loop.add(ours, lambda: got.append(ours.recv(zmq.NOBLOCK)))
    loop.tick(0)
    assert got == []
    for number in range(3):
        theirs.send(b"%d" % number)
    for _ in range(3):
        loop.tick(1_000)
    assert got == [b"0", b"1", b"2"]
    loop.tick(0)
    assert got == [b"0", b"1", b"2"]


def test_what_was_readable_before_it_was_added_is_reported(loop, pair):
    ours, theirs = pair
    theirs.send(b"x")
    assert ours.get(zmq.EVENTS) & zmq.POLLIN  # the descriptor has nothing more to tell
    got = []
    loop.add(ours, lambda: got.append(ours.recv(zmq.NOBLOCK)))
    loop.tick(0)
    assert got == [b"x"]


def test_a_touched_socket_is_asked_before_the_next_wait(loop, pair):
    ours, theirs = pair
    got = []
    loop.add(ours, lambda: got.append(ours.recv(zmq.NOBLOCK)))
    loop.tick(0)
    theirs.send(b"x")
    assert ours.get(zmq.EVENTS) & zmq.POLLIN  # as any use of the socket may do
    loop.touch(ours)
    loop.tick(60_000)
    assert got == [b"x"]


def test_a_socket_that_its_handler_emptied_is_found_by_its_descriptor(loop, pair):
    ours, theirs = pair
    got = []

    def take():
        got.append(ours.recv(zmq.NOBLOCK))
        if not ours.get(zmq.EVENTS) & zmq.POLLIN:
            loop.untouch(ours)

    loop.add(ours, take)
    loop.tick(0)
    for number in range(20):
        theirs.send(b"%d" % number)
        loop.tick(60_000)
        assert got[number:] == [b"%d" % number]


def test_a_socket_that_nobody_touched_is_found_after_a_wait_in_vain(loop, clock, pair):
    ours, theirs = pair
    got = []
    loop.add(ours, lambda: got.append(ours.recv(zmq.NOBLOCK)))
    loop.tick(0)
    theirs.send(b"x")
    assert ours.get(zmq.EVENTS) & zmq.POLLIN
    clock.advance(LOOK_ROUND_MS - 1)
    loop.tick(0)
    assert got == [], "all sockets are not asked all the time"
    clock.advance(1)
    loop.tick(0)
    assert got == [b"x"]


def test_a_socket_that_nobody_touched_is_found_while_others_are_busy(loop, pair, pipe):
    ours, theirs = pair
    got = []
    loop.add(ours, lambda: got.append(ours.recv(zmq.NOBLOCK)))
    loop.add(pipe[0], lambda: None)
    os.write(pipe[1], b"x")
    loop.tick(0)
    theirs.send(b"x")
    assert ours.get(zmq.EVENTS) & zmq.POLLIN
    for _ in range(loop_module.TICKS_PER_LOOK_ROUND):
        loop.tick(0)
    assert got == [b"x"]


def test_a_socket_is_told_when_it_can_take_more(loop, pair):
    ours, theirs = pair
    calls = []
    loop.add(ours, lambda: calls.append(ours.get(zmq.EVENTS) & zmq.POLLOUT))
    ours.set(zmq.SNDHWM, 1)
    loop.tick(0)
    assert calls == []
    loop.want_write(ours, True)
    loop.tick(0)
    loop.tick(0)
    assert calls == [zmq.POLLOUT, zmq.POLLOUT]
    loop.want_write(ours, False)
    loop.tick(0)
    assert len(calls) == 2
    assert theirs.get(zmq.EVENTS) & zmq.POLLIN == 0


def test_other_threads_can_tell_whether_there_is_news(loop, pipe):
    read_end, write_end = pipe
    loop.add(read_end, lambda: os.read(read_end, 1) and None)
    assert not loop.has_news()
    os.write(write_end, b"x")
    assert loop.has_news()
    loop.tick(0)
    assert not loop.has_news()


def test_the_descriptor_of_a_file_is_refused_and_nothing_is_left_behind(loop, tmp_path):
    with (tmp_path / "file").open("wb") as file:
        with pytest.raises(PermissionError):
            loop.add(file.fileno(), lambda: None)
        assert file.fileno() not in loop._sources


def test_a_loop_that_is_closed_meanwhile_has_no_news(loop, monkeypatch):
    class Closing:
        def poll(self, timeout: float) -> list[tuple[int, int]]:
            raise OSError(errno.EBADF, "closed by another thread")

    loop.tick(0)  # which opens it
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_poll", Closing())
        assert not loop.has_news()


def test_a_loop_opens_nothing_before_it_is_used_and_a_wake_up_until_then_is_not_lost(clock):
    before = open_descriptors()
    loop, called = EventLoop(clock), []
    loop.call_soon_threadsafe(lambda: called.append(loop.clock.monotonic_ms()))
    loop.call_later(1, lambda: None)
    assert loop.has_news()
    assert open_descriptors() == before
    loop.tick(60_000)  # which returns at once
    assert called
    assert len(open_descriptors() - before) == 3
    loop.close()
    assert open_descriptors() == before
    never_used = EventLoop(clock)
    never_used.wake()
    never_used.close()
    assert not never_used.has_news()


def test_a_closed_loop_has_no_news_and_says_so_without_an_error(clock):
    loop = EventLoop(clock)
    loop.wake()
    assert loop.has_news()
    loop.close()
    assert not loop.has_news()


def test_a_removed_socket_is_forgotten(loop, pair):
    ours, theirs = pair
    calls = []
    loop.add(ours, lambda: calls.append(1))
    loop.touch(ours)
    loop.remove(ours)
    loop.touch(ours)
    theirs.send(b"x")
    loop.tick(0)
    assert calls == []


# ---- Order, failures, ends -----------------------------------------------------------------


def test_a_turn_serves_sockets_then_calls_then_timers_then_its_end(loop, clock, pipe):
    calls = []
    loop.at_tick_end(lambda: calls.append("end"))
    loop.call_later(0, lambda: calls.append("timer"))
    loop.call_soon_threadsafe(lambda: calls.append("call"))
    loop.add(pipe[0], lambda: calls.append("socket"))
    os.write(pipe[1], b"x")
    loop.tick(0)
    assert calls == ["socket", "call", "timer", "end"]


def test_a_call_made_by_a_call_waits_for_the_next_turn_which_does_not_wait(loop):
    calls = []
    loop.call_soon_threadsafe(lambda: loop.call_soon_threadsafe(lambda: calls.append(1)))
    loop.tick(0)
    assert calls == []
    assert loop._wait_ms() == 0
    loop.tick(0)
    assert calls == [1]


def test_a_failing_callback_is_logged_and_counted_and_the_others_run(loop, caplog):
    calls = []

    def fail():
        raise RuntimeError("planted")

    loop.at_tick_end(fail)
    loop.at_tick_end(lambda: calls.append("end"))
    loop.call_soon_threadsafe(fail)
    loop.call_soon_threadsafe(lambda: calls.append("call"))
    loop.call_later(0, fail)
    loop.call_later(0, lambda: calls.append("timer"))
    loop.tick(0)
    assert calls == ["call", "timer", "end"]
    assert loop.callback_failures == 3
    assert caplog.text.count("RuntimeError: planted") == 3


def test_waiting_calls_are_bounded(loop, monkeypatch):
    monkeypatch.setattr(loop_module, "MAX_CALLS_WAITING", 3)
    for _ in range(3):
        loop.call_soon_threadsafe(lambda: None)
    with pytest.raises(BufferError):
        loop.call_soon_threadsafe(lambda: None)
    loop.tick(0)
    loop.call_soon_threadsafe(lambda: None)


def test_a_closed_loop_writes_into_nobodys_descriptor(clock):
    loop = EventLoop(clock)
    loop.close()
    ends = os.pipe()  # very likely the descriptors that the loop had
    loop.wake()
    loop.stop()
    os.set_blocking(ends[0], False)
    with pytest.raises(BlockingIOError):
        os.read(ends[0], 1)
    for end in ends:
        os.close(end)


def test_who_asks_to_be_called_again_is_called_in_each_turn_also_of_a_look_round():
    end, other = os.pipe()
    loop = EventLoop()
    calls: list[None] = []
    loop.add(end, lambda: calls.append(None))
    for turn in range(2 * loop_module.TICKS_PER_LOOK_ROUND):
        loop.again(end)
        loop.tick(0)
        assert len(calls) == turn + 1
    loop.close()
    os.close(end)
    os.close(other)


# ---- Threads -------------------------------------------------------------------------------


@pytest.fixture
def running() -> Iterator[EventLoop]:
    """A loop that runs in its own thread, by the system's clock."""
    loop = EventLoop()
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield loop
    loop.stop()
    thread.join(5)
    assert not thread.is_alive()
    loop.close()


def test_calls_from_other_threads_are_made_once_each_in_order_in_the_loops_thread(running):
    calls: list[tuple[int, int]] = []
    threads: set[bool] = set()
    done = threading.Event()
    count, writers = 2_000, 3

    def call(writer, number):
        threads.add(running.in_loop_thread)
        calls.append((writer, number))
        if len(calls) == count * writers:
            done.set()

    def write(writer):
        for number in range(count):
            running.call_soon_threadsafe(lambda number=number: call(writer, number))

    workers = [threading.Thread(target=write, args=(writer,)) for writer in range(writers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert done.wait(10)
    assert threads == {True}
    for writer in range(writers):
        assert [number for one, number in calls if one == writer] == list(range(count))
    assert not running.in_loop_thread


def test_a_call_from_another_thread_ends_the_wait_at_once(running):
    for _ in range(50):
        called = threading.Event()
        running.call_soon_threadsafe(called.set)
        assert called.wait(loop_module.MAX_WAIT_MS / 1_000 / 2)


def test_a_loop_can_be_stopped_before_it_runs():
    loop = EventLoop()
    loop.stop()
    loop.run()
    loop.close()
