"""Handing messages to listeners: once each, side by side, and never after a revocation."""

from __future__ import annotations

import threading

import pytest

from mqmesh.message import StoredMessage
from mqmesh.sdk.consume_result import ConsumeResult
from mqmesh.sdk.consume_service import ConsumeService, QueueWork
from mqmesh.sdk.process_queue import DONE, OPEN, PARKED, Span
from mqmesh.units import QueueOffset

PATIENCE_S = 10.0


def messages(start: int, count: int) -> list[StoredMessage]:
    return [StoredMessage("t", b"x", queue_offset=QueueOffset(start + i)) for i in range(count)]


class Case:
    """A service whose timer the test turns."""

    def __init__(self, threads=4, batch_size=1, portion_size=1_024, listener=None):
        self.changed = threading.Condition()
        self.seen: list[list[int]] = []
        self.failed: list[tuple[list[int], object]] = []
        self.timers = []
        self.progress = 0
        self.service = ConsumeService("test", threads, self._call_later, self._on_failed)
        self.work = QueueWork(listener or self.listen, batch_size, self._progress, portion_size)
        self.span = Span(0, bytearray(10_000), 0)

    def listen(self, found):
        with self.changed:
            self.seen.append([message.queue_offset for message in found])
            self.changed.notify_all()
        return ConsumeResult.SUCCESS

    def submit(self, start, count, attempt=0):
        self.service.submit(self.work, messages(start, count), self.span, attempt)

    def tick(self):
        """Run the watch that was planned."""
        self.timers.pop(0)()

    def until(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_S)

    def until_done(self, count):
        self.until(lambda: self.span.states.count(DONE) >= count)

    def _call_later(self, delay_ms, callback):
        self.timers.append(callback)

    def _on_failed(self, portion, found, cause):
        with self.changed:
            self.failed.append(([m.queue_offset for m in found], cause))
            self.changed.notify_all()

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
        case.service.close(PATIENCE_S)


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_every_message_is_handed_out_once_and_marked(make_case, batch_size):
    case = make_case(batch_size=batch_size)
    case.submit(0, 100)
    case.submit(100, 50)
    case.until(lambda: case.progress >= 2)
    assert sorted(offset for call in case.seen for offset in call) == list(range(150))
    assert max(map(len, case.seen)) == min(batch_size, 100)
    assert case.span.states.count(DONE) == 150


def test_a_fast_listener_needs_one_thread(make_case):
    case = make_case(threads=20)
    for start in range(0, 5_000, 500):
        case.submit(start, 500)
    case.until(lambda: case.progress >= 10)
    assert case.service.thread_count <= 2


def test_a_hanging_call_holds_up_nobody(make_case):
    release = threading.Event()
    case = make_case(threads=2)

    def listen(found):
        if found[0].queue_offset == 0:
            release.wait(PATIENCE_S)
        return case.listen(found)

    case.work.listener = listen
    case.submit(0, 100)
    case.until(lambda: case.service.thread_count == 1)
    case.tick()  # nothing moves: another thread is woken
    case.until(lambda: len(case.seen) == 99)
    assert case.service.thread_count == 2
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
        for _ in range(case.service.thread_count - counts[-1]):
            assert inside.acquire(timeout=PATIENCE_S)
        counts.append(case.service.thread_count)
    assert counts == [1, 2, 4, 6, 6]
    release.set()
    case.until(lambda: case.span.states.count(DONE) == 100 or case.changed.wait(0.01))


def test_the_watch_ends_when_nothing_waits(make_case):
    case = make_case()
    case.submit(0, 10)
    case.until(lambda: len(case.seen) == 10)
    case.tick()
    assert case.timers == []
    case.submit(10, 10)
    assert len(case.timers) == 1


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


def test_any_other_answer_is_a_failure(make_case):
    case = make_case(listener=lambda found: None)
    case.submit(0, 1)
    case.until(lambda: case.failed)
    assert case.failed == [([0], None)]


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

    case = make_case(threads=1, listener=listen, portion_size=10)
    case.submit(0, 100)
    assert begun.wait(PATIENCE_S)
    case.service.revoke(case.work)
    release.set()
    case.until(lambda: case.progress)
    assert case.seen == [[0]]
    case.submit(100, 10)
    assert case.service.close(PATIENCE_S)
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
    other = QueueWork(case.listen, 1, case._progress)
    case.service.revoke(case.work)
    case.submit(0, 10)
    case.service.submit(other, messages(500, 5), case.span, 0)
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
    assert not case.service.close(0.01)
    release.set()
    assert case.service.close(PATIENCE_S)
    assert case.seen == [[0]]


def test_progress_is_told_behind_each_portion(make_case):
    case = make_case(portion_size=10)
    case.submit(0, 35)
    case.until(lambda: case.progress >= 4)
    case.until_done(35)
