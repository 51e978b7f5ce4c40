"""Handing messages to listeners: once each, side by side, and never after a revocation."""

from __future__ import annotations

import threading
import time

import pytest
from harness.pulled import FakeBatch

from mqmesh.clock import SystemClock
from mqmesh.errors import CorruptBatch
from mqmesh.sdk.consumer.fetching.process_queue import DONE, OPEN, PARKED, StateSpan
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.listening.consume_service import ConcurrentService
from mqmesh.sdk.consumer.listening.consume_work import QueueWork
from mqmesh.sdk.consumer.listening.worker_threads import SparingThreads
from mqmesh.testing.clock import ManualClock

PATIENCE_S = 10.0


class Case:
    """A service whose timer the test turns."""

    def __init__(self, threads=4, batch_size=1, listener=None, clock=None):
        self.changed = threading.Condition()
        self.seen: list[list[int]] = []
        self.failed: list[tuple[list[int], object]] = []
        self.timers = []
        self.progress = 0
        clock = clock or SystemClock()
        self.service = ConcurrentService(threading.Condition(), clock.monotonic_ns, self._on_failed)
        self.workers = SparingThreads(self.service, "test", threads, clock, self._call_later)
        self.broken = []
        self.work = self.new_work(batch_size, listener)
        self.span = StateSpan(0, bytearray(10_000), 0)

    def listen(self, found):
        with self.changed:
            self.seen.append([message.queue_offset for message in found])
            self.changed.notify_all()
        return ConsumeResult.SUCCESS

    def new_work(self, batch_size=1, listener=None):
        return QueueWork(listener or self.listen, batch_size, self._progress, self._broken)

    def submit(self, start, *counts, work=None, **batch):
        batches = []
        for count in counts:
            batches.append(FakeBatch(start, count, **batch))
            start += count
        self.service.submit(work or self.work, batches, self.span)

    def tick(self):
        """Run the watch that was planned."""
        self.timers.pop(0)()

    def close(self, timeout_s):
        self.service.close()
        return self.workers.close(timeout_s)

    def until(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_S)

    def until_done(self, count):
        # Marks tell nobody, so it looks again and again.
        deadline = time.monotonic() + PATIENCE_S
        with self.changed:
            while self.span.states.count(DONE) < count:
                assert time.monotonic() < deadline
                self.changed.wait(0.001)

    def until_idle(self, count):
        deadline = time.monotonic() + PATIENCE_S
        with self.changed:
            while self.workers._idle < count:
                assert time.monotonic() < deadline
                self.changed.wait(0.001)

    def _call_later(self, delay_ms, callback):
        self.timers.append(callback)

    def _on_failed(self, portion, found, cause):
        with self.changed:
            self.failed.append(([m.queue_offset for m in found], cause))
            self.changed.notify_all()

    def _broken(self, batch, span, error):
        assert span is self.span
        self.broken.append((batch.first, batch.end, error))

    def _progress(self):
        with self.changed:
            self.progress += 1
            self.changed.notify_all()


@pytest.fixture
def make_case():
    cases = []

    def make(**options):
        cases.append(Case(**options))
        return cases[-1]

    yield make
    for case in cases:
        case.close(PATIENCE_S)


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_every_message_is_handed_out_once_and_marked(make_case, batch_size):
    case = make_case(batch_size=batch_size)
    case.submit(0, 100)
    case.submit(100, 50)
    case.until(lambda: case.progress >= 2)
    assert sorted(offset for call in case.seen for offset in call) == list(range(150))
    assert max(map(len, case.seen)) == min(batch_size, 100)
    assert case.span.states.count(DONE) == 150
    assert case.service.calls == len(case.seen)
    assert case.close(PATIENCE_S)
    assert case.service.busy_ns > 0


def test_a_fast_listener_needs_one_thread(make_case):
    case = make_case(threads=20, clock=ManualClock())  # a busy machine is no slow listener
    case.submit(0, 500)
    case.until_idle(1)  # the service knows only then that the listener is fast
    for start in range(500, 5_000, 500):
        case.submit(start, 500)
    case.until(lambda: case.progress >= 10)
    assert case.workers.thread_count == 1


def test_a_hanging_call_holds_up_nobody(make_case):
    release = threading.Event()
    case = make_case(threads=2)

    def listen(found):
        if found[0].queue_offset == 0:
            release.wait(PATIENCE_S)
        return case.listen(found)

    case.work.listener = listen
    case.submit(0, 100)
    case.until(lambda: case.workers.thread_count == 1)
    case.tick()  # nothing moves: another thread is woken
    case.until(lambda: len(case.seen) == 99)
    assert case.workers.thread_count == 2
    release.set()
    case.until(lambda: len(case.seen) == 100)


def test_waiting_work_wakes_more_and_more_threads_up_to_the_limit(make_case):
    release, inside = threading.Event(), threading.Semaphore(0)

    def listen(_found):
        inside.release()
        release.wait(PATIENCE_S)
        return ConsumeResult.SUCCESS

    case = make_case(threads=6, listener=listen)
    case.submit(0, 100)
    counts = [1]
    assert inside.acquire(timeout=PATIENCE_S)
    for _ in range(4):
        case.tick()
        for _ in range(case.workers.thread_count - counts[-1]):
            assert inside.acquire(timeout=PATIENCE_S)
        counts.append(case.workers.thread_count)
    assert counts == [1, 2, 4, 6, 6]
    release.set()
    case.until_done(100)


def test_the_watch_ends_when_nothing_waits(make_case):
    case = make_case()
    case.submit(0, 10)
    case.until(lambda: len(case.seen) == 10)
    case.tick()
    assert case.timers == []
    case.submit(10, 10)
    assert len(case.timers) == 1


def test_a_lone_call_that_wakes_a_thread_is_not_watched(make_case):
    """A watch is a turn of the client loop."""
    release = threading.Event()

    def listen(found):
        case.listen(found)
        if found[0].queue_offset == 1:
            release.wait(PATIENCE_S)
        return ConsumeResult.SUCCESS

    case = make_case(listener=listen, clock=ManualClock())  # a busy machine is no slow listener
    case.submit(0, 1)
    case.until_idle(1)
    case.submit(1, 1)
    case.until(lambda: [1] in case.seen)
    assert case.timers == []
    case.submit(2, 1)  # behind a call that was quick until now
    case.tick()
    case.tick()
    case.until(lambda: [2] in case.seen)
    release.set()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_what_fails_is_parked_and_reported(make_case, batch_size):
    error = ValueError("no")

    def listen(found):
        if found[0].queue_offset == 3:
            raise error
        if found[0].queue_offset == 6:
            return ConsumeResult.RECONSUME_LATER
        return ConsumeResult.SUCCESS

    case = make_case(batch_size=batch_size, listener=listen)
    case.submit(0, 9)
    case.until(lambda: case.progress)
    width = list(range(batch_size))
    assert case.service.failures == 2
    assert case.failed == [
        ([3 + i for i in width], error),
        ([6 + i for i in width], ConsumeResult.RECONSUME_LATER),
    ]
    states = case.span.states[:9]
    assert [at for at, state in enumerate(states) if state == PARKED] == [
        at + i for at in (3, 6) for i in width
    ]


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()])
def test_a_listener_cannot_end_its_thread(make_case, error):
    def listen(found):
        if found[0].queue_offset == 0:
            raise error
        return ConsumeResult.SUCCESS

    case = make_case(threads=1, listener=listen)
    case.submit(0, 5)
    case.until(lambda: case.progress)
    assert case.span.states.count(DONE) == 4
    assert case.failed == [([0], error)]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("answer", [None, ConsumeResult.SUCCESS, True, "done"])
def test_whatever_a_listener_returns_but_a_later_try_is_success(make_case, batch_size, answer):
    case = make_case(batch_size=batch_size, listener=lambda found: answer)
    case.submit(0, 9)
    case.until_done(9)
    assert case.failed == []


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_coroutine_that_nobody_awaits_is_no_success(make_case, batch_size):
    async def listen(found):
        raise AssertionError("nobody awaits it")

    case = make_case(batch_size=batch_size, listener=lambda found: listen(found))
    case.submit(0, batch_size)
    case.until(lambda: case.failed)
    (failed,) = case.failed
    assert failed[0] == list(range(batch_size))
    assert isinstance(failed[1], TypeError)


def test_a_listener_may_change_its_list(make_case):
    def listen(found):
        found.clear()
        return ConsumeResult.RECONSUME_LATER

    case = make_case(batch_size=4, listener=listen)
    case.submit(0, 4)
    case.until(lambda: case.failed)
    assert case.failed[0][0] == [0, 1, 2, 3]


def test_a_revoked_queue_gets_no_further_call(make_case):
    begun, release = threading.Event(), threading.Event()

    def listen(found):
        begun.set()
        release.wait(PATIENCE_S)
        return case.listen(found)

    case = make_case(threads=1, listener=listen)
    case.submit(0, 300, 300)
    assert begun.wait(PATIENCE_S)
    case.service.revoke(case.work)
    release.set()
    case.until(lambda: case.progress)
    assert case.seen == [[0]]
    assert case.service.calls == 1
    case.submit(600, 10)
    assert case.close(PATIENCE_S)
    assert case.seen == [[0]]
    assert case.span.states.count(OPEN) == 9_999


def test_failures_of_a_revoked_queue_are_nobodys_concern(make_case):
    def listen(_found):
        case.service.revoke(case.work)
        raise ValueError

    case = make_case(listener=listen)
    case.submit(0, 1)
    case.until(lambda: case.progress)
    assert case.failed == []


def test_other_queues_go_on_after_a_revocation(make_case):
    case = make_case(threads=1)
    case.service.revoke(case.work)
    case.submit(0, 10)
    case.submit(500, 5, work=case.new_work())
    case.until(lambda: len(case.seen) == 5)
    assert case.seen == [[500], [501], [502], [503], [504]]


def test_closing_waits_for_calls_that_run_and_begins_no_other(make_case):
    begun, release = threading.Event(), threading.Event()

    def listen(found):
        begun.set()
        release.wait(PATIENCE_S)
        return case.listen(found)

    case = make_case(threads=1, listener=listen)
    case.submit(0, 10)
    assert begun.wait(PATIENCE_S)
    assert not case.close(0.01)
    release.set()
    assert case.close(PATIENCE_S)
    assert case.seen == [[0]]
    assert case.service.calls == 1


def test_progress_is_told_behind_each_portion(make_case):
    case = make_case()
    case.submit(0, *[100] * 7)
    case.until(lambda: case.progress >= 3)
    case.until_done(700)
    assert case.progress == 3  # 300, 300 and 100 messages


def test_small_batches_fill_the_lists_that_a_listener_gets(make_case):
    case = make_case(batch_size=300)
    case.submit(0, *[1] * 700)
    case.until_done(700)
    assert [len(call) for call in case.seen] == [300, 300, 100]


def test_messages_that_the_broker_took_for_wanted_are_left_out_and_done(make_case):
    case = make_case(batch_size=10)
    case.submit(0, 6, unwanted={0, 2, 5})
    case.until(lambda: case.progress)
    assert case.seen == [[1, 3, 4]]
    assert case.span.states[:7] == bytes([DONE] * 6 + [OPEN])


def test_a_batch_without_a_wanted_message_is_done(make_case):
    case = make_case()
    case.submit(0, 3, unwanted={0, 1, 2})
    case.until(lambda: case.progress)
    assert case.seen == []
    assert case.span.states.count(DONE) == 3


def test_a_batch_that_cannot_be_decoded_is_reported_and_stays_open(make_case):
    case, error = make_case(), CorruptBatch("undecodable")
    case.submit(0, 3, error=error)
    case.submit(3, 2)
    case.until_done(2)
    assert case.broken == [(0, 3, error)]
    assert case.seen == [[3], [4]]
    assert case.span.states.count(OPEN) == 9_998


def test_failed_messages_are_handed_out_again(make_case):
    case = make_case(batch_size=2)
    found = FakeBatch(7, 3).decode()
    case.service.submit_again(case.work, found, case.span, 4)
    case.until_done(3)
    assert sorted(case.seen) == [[7, 8], [9]]


def test_a_listener_that_was_quick_is_not_given_company(make_case):
    case = make_case(threads=4, clock=ManualClock())  # a busy machine is no slow listener
    case.submit(0, 10)
    case.until_idle(1)  # only the end of a turn tells that it was quick
    entered, release = threading.Event(), threading.Event()

    def listen(found):
        entered.set()
        release.wait(PATIENCE_S)
        return ConsumeResult.SUCCESS

    case.work.listener = listen
    case.submit(10, 1)
    assert entered.wait(PATIENCE_S)
    case.submit(11, 1)
    assert case.workers.thread_count == 1
    case.tick()
    case.tick()  # but not for long
    assert case.workers.thread_count == 2
    release.set()
    case.until_done(12)


def test_what_was_taken_from_a_late_listener_is_not_its_to_fail(make_case):
    entered, release = threading.Event(), threading.Event()

    def listen(found):
        entered.set()
        release.wait(PATIENCE_S)
        return ConsumeResult.RECONSUME_LATER

    case = make_case(batch_size=3, listener=listen)
    case.submit(0, 3)
    assert entered.wait(PATIENCE_S)
    case.span.mark(1, 1, DONE)
    case.span.mark(2, 2, PARKED)
    release.set()
    case.until(lambda: case.progress)
    assert case.failed == [([0], ConsumeResult.RECONSUME_LATER)]


def test_it_is_known_what_no_worker_has_begun(make_case):
    entered, release = threading.Event(), threading.Event()

    def listen(found):
        if found[0].queue_offset == 2:
            entered.set()
            release.wait(PATIENCE_S)
        return ConsumeResult.SUCCESS

    case = make_case(threads=1, listener=listen)
    case.submit(0, 300)
    assert entered.wait(PATIENCE_S)
    assert case.service.waiting()[case.work].first == 3
    case.submit(300, 5)
    case.service.submit_again(case.work, FakeBatch(400, 2).decode(), case.span, 1)
    left = case.service.waiting()[case.work]
    assert (left.first, left.again) == (3, {400, 401})
    release.set()
    case.until_done(307)
    assert case.service.waiting() == {}


def test_tallies_count_what_was_begun_what_failed_and_what_is_at_hand():
    go_on, entered = threading.Event(), threading.Event()

    def listen(found):
        if found[0].queue_offset == 2:
            raise ValueError
        if found[0].queue_offset == 4:
            entered.set()
            assert go_on.wait(PATIENCE_S)

    case = Case(threads=1, listener=listen)
    case.work.topic = "t"
    case.submit(0, 6)
    assert entered.wait(PATIENCE_S)
    assert [one.queue_offset for one in case.service.with_listeners] == [4]
    tally = case.service.tallies()["t"]
    assert (tally.calls, tally.messages, tally.failed) == (5, 5, 1)
    assert tally.busy_ns > 0, "though the turn is not over"
    go_on.set()
    case.until_done(5)
    case.until_idle(1)
    tally = case.service.tallies()["t"]
    assert (tally.calls, tally.messages, tally.failed) == (6, 6, 1)
    assert case.service.with_listeners == []
    assert case.close(PATIENCE_S)


def test_tallies_count_messages_of_calls_that_get_several():
    case = Case(threads=1, batch_size=4)
    case.work.topic = "t"
    case.submit(0, 10)
    case.until_done(10)
    case.until_idle(1)
    tally = case.service.tallies()["t"]
    assert (tally.calls, tally.messages) == (3, 10)
    assert case.close(PATIENCE_S)


def test_what_is_handed_over_goes_before_all_that_waits_and_can_be_taken_back():
    go_on, entered = threading.Event(), threading.Event()

    def listen(found):
        entered.set()
        assert go_on.wait(PATIENCE_S)

    case = Case(threads=1, listener=listen)
    case.submit(0, 3)
    assert entered.wait(PATIENCE_S)
    results, (handed, other) = [], FakeBatch(100, 2).decode()
    case.service.hand_over(lambda found: found[0].queue_offset, handed, results.append)
    take_back = case.service.hand_over(lambda found: 0, other, results.append)
    assert take_back()
    assert not take_back()
    assert case.span.states.count(DONE) == 0
    go_on.set()
    case.until_done(3)
    case.until_idle(1)
    assert results == [100]
    assert case.close(PATIENCE_S)
