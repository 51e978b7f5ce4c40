"""Messages in the order of their queues: one call at a time, failures in place, no zombies."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from harness.pulled import FakeBatch

from mqmesh.clock import SystemClock
from mqmesh.errors import CorruptBatch, Reject
from mqmesh.sdk.aio import worker_tasks
from mqmesh.sdk.aio.worker_tasks import WorkerTasks
from mqmesh.sdk.consumer.fetching.process_queue import DONE, StateSpan
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.listening.orderly_queue import NO_LIMIT, Always, OrderlyQueue
from mqmesh.sdk.consumer.listening.orderly_service import CALLS_PER_TURN, OrderlyService
from mqmesh.sdk.consumer.listening.worker_threads import WorkerThreads

PATIENCE_S = 10.0


class NamedQueue(OrderlyQueue):
    """A queue that the test knows by a name."""

    name = ""


class Permit:
    """A lease that the test gives and takes."""

    token = 0

    def __init__(self):
        self.given = True

    def holds(self):
        return self.given


class Case:
    """A service whose timers and dead letters are the test's."""

    def __init__(self, threads=4):
        self.changed = threading.Condition()
        self.seen: list[tuple[str, list[int]]] = []
        self.failing: dict[int, object] = {}
        self.timers: list[tuple[int, object]] = []
        self.letters: list[tuple[list[int], object, object]] = []
        self.broken: list[CorruptBatch] = []
        self.gate = threading.Event()
        self.gate.set()
        self.running = 0
        self.most_running = 0
        self.tokens: set[int] = set()
        self.spans: dict[str, StateSpan] = {}
        self.service = OrderlyService(
            threading.Condition(), time.monotonic_ns, 1_000, self._later, self._letter
        )
        self.workers = WorkerThreads(self.service, "test", threads, SystemClock())

    def close(self, timeout_s):
        self.service.close()
        return self.workers.close(timeout_s)

    def _later(self, delay_ms, callback):
        with self.changed:
            self.timers.append((delay_ms, callback))
            self.changed.notify_all()

    def _letter(self, messages, cause, on_done):
        with self.changed:
            self.letters.append(([m.queue_offset for m in messages], cause, on_done))
            self.changed.notify_all()

    def queue(self, name="q", *, batch_size=1, lease=None, limit=NO_LIMIT):
        self.spans[name] = StateSpan(0, bytearray(100_000), 0)

        def listen(messages):
            offsets = [message.queue_offset for message in messages]
            with self.changed:
                self.running += 1
                self.most_running = max(self.most_running, self.running)
                self.seen.append((name, offsets))
                self.tokens |= {message.fencing_token for message in messages}
                self.changed.notify_all()
            self.gate.wait(PATIENCE_S)
            with self.changed:
                self.running -= 1
                bad = [at for at in offsets if at in self.failing]
                result = self.failing[bad[0]] if bad else ConsumeResult.SUCCESS
                self.changed.notify_all()
            if isinstance(result, BaseException):
                raise result
            return result

        work = NamedQueue(
            listen,
            batch_size,
            lambda: None,
            lambda batch, span, error: self.broken.append(error),
            lease or Always(),
            limit,
        )
        work.name = name
        return work

    def submit(self, work, first, count, error=None):
        self.service.submit(work, [FakeBatch(first, count, error=error)], self.spans[work.name])

    def until(self, condition):
        # Not all that is waited for tells, so it looks again and again.
        deadline = time.monotonic() + PATIENCE_S
        with self.changed:
            while not condition():
                assert time.monotonic() < deadline, "waited in vain"
                self.changed.wait(0.002)

    def offsets(self, name="q"):
        return [at for queue, some in self.seen if queue == name for at in some]

    def run_timer(self):
        self.until(lambda: self.timers)
        delay_ms, callback = self.timers.pop(0)
        callback()
        return delay_ms

    def done(self, name="q"):
        return self.spans[name].states.count(DONE)


@pytest.fixture
def case():
    """A service, closed at the end."""
    case = Case()
    yield case
    case.gate.set()
    assert case.close(PATIENCE_S)


# ---- Order ----------------------------------------------------------------------------


def test_each_queue_is_called_in_order_and_by_one_worker(case):
    works = [case.queue(name) for name in "abc"]
    for first in range(0, 1_000, 50):
        for work in works:
            case.submit(work, first, 50)
    case.until(lambda: len(case.seen) == 3_000)
    for name in "abc":
        assert case.offsets(name) == list(range(1_000))


def test_listeners_are_told_the_token_of_the_lock(case):
    permit = Permit()
    permit.token = 7
    case.submit(case.queue(lease=permit), 0, 2)
    case.until(lambda: len(case.seen) == 2)
    assert case.tokens == {7}


def test_one_queue_never_has_two_calls_at_once(case):
    case.gate.clear()
    work = case.queue()
    case.submit(work, 0, 10)
    case.until(lambda: case.running == 1)
    case.submit(work, 10, 10)
    case.gate.set()
    case.until(lambda: len(case.seen) == 20)
    assert case.most_running == 1
    assert case.offsets() == list(range(20))


def test_queues_are_called_side_by_side(case):
    case.gate.clear()
    for name in "abcd":
        case.submit(case.queue(name), 0, 1)
    case.until(lambda: case.running == 4)
    case.gate.set()


def test_more_queues_than_threads_get_their_turns(case):
    for number in range(20):
        case.submit(case.queue(f"q{number}"), 0, CALLS_PER_TURN + 5)
    case.until(lambda: len(case.seen) == 20 * (CALLS_PER_TURN + 5))
    assert case.workers.thread_count <= 4


def test_a_call_gets_several_messages_in_order(case):
    case.submit(case.queue(batch_size=4), 0, 10)
    case.until(lambda: len(case.seen) == 3)
    assert [some for _, some in case.seen] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


# ---- Failures -------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [ValueError("no"), ConsumeResult.RECONSUME_LATER])
def test_a_failed_message_holds_up_its_queue_and_is_tried_again(case, failure):
    case.failing[3] = failure
    case.submit(case.queue(), 0, 6)
    case.submit(case.queue("other"), 10, 5)
    assert case.run_timer() == 1_000
    case.until(lambda: case.offsets().count(3) == 2)
    assert case.offsets() == [0, 1, 2, 3, 3]
    assert case.offsets("other") == [10, 11, 12, 13, 14]
    del case.failing[3]
    case.run_timer()
    case.until(lambda: case.done() == 6)
    assert case.offsets() == [0, 1, 2, 3, 3, 3, 4, 5]
    assert case.service.failures == 2


def test_a_listener_that_returns_nothing_has_done_its_messages(case):
    case.failing[3] = None
    case.submit(case.queue(), 0, 6)
    case.until(lambda: case.done() == 6)
    assert case.offsets() == [0, 1, 2, 3, 4, 5]
    assert case.service.failures == 0


@pytest.mark.parametrize(("cause", "letters"), [(ValueError("late"), 0), (Reject("late"), 1)])
def test_what_was_committed_before_its_listener_failed_is_done(case, cause, letters):
    calls = []

    def listen(messages):
        calls.append([message.queue_offset for message in messages])
        if len(calls) <= 2:
            # As a block of processing does, of a part and of all.
            case.spans["q"].mark(*((0, 1) if len(calls) == 1 else (2, 2)), DONE)
            raise cause

    work = case.queue(batch_size=3, limit=0 if letters else NO_LIMIT)
    work.listener = listen
    case.submit(work, 0, 4)
    if letters:
        case.until(lambda: case.letters)
        assert case.letters[0][0] == [2], "the others are done"
        calls.append(None)
        case.letters[0][2](True)
    else:
        case.run_timer()
    case.until(lambda: case.done() == 4)
    assert [one for one in calls if one] == [[0, 1, 2], *[[2]][letters:], [3]]


def test_a_message_knows_how_often_it_failed(case):
    times = []

    def listen(messages):
        times.append(messages[0].reconsume_times)
        return ConsumeResult.SUCCESS if len(times) == 3 else ConsumeResult.RECONSUME_LATER

    work = case.queue()
    work.listener = listen
    case.submit(work, 0, 1)
    case.run_timer()
    case.run_timer()
    case.until(lambda: case.done() == 1 or len(times) == 3)
    assert times == [0, 1, 2]


def test_a_message_that_failed_too_often_becomes_a_dead_letter_and_its_queue_goes_on(case):
    case.failing[1] = cause = ValueError("poison")
    case.submit(case.queue(limit=2), 0, 3)
    case.run_timer()
    case.run_timer()
    case.until(lambda: case.letters)
    assert case.offsets() == [0, 1, 1, 1]
    messages, told, on_done = case.letters.pop()
    assert (messages, told) == ([1], cause)
    on_done(True)
    case.until(lambda: case.done() == 3)
    assert case.offsets()[-1] == 2


def test_a_rejected_message_leaves_its_queue_at_once_whatever_the_limit(case, caplog):
    case.failing[0] = cause = Reject("unknown customer")
    case.submit(case.queue(), 0, 2)
    case.until(lambda: case.letters)
    messages, told, on_done = case.letters.pop()
    assert (messages, told) == ([0], cause)
    on_done(True)
    case.until(lambda: case.done() == 2)
    assert case.offsets() == [0, 1]
    (line,) = [record for record in caplog.records if "dead letters" in record.getMessage()]
    assert (
        "was rejected: unknown customer; after try 1 it goes to the dead letters"
        in line.getMessage()
    )
    assert not line.exc_info


def test_of_a_list_that_was_rejected_each_message_is_called_alone_and_only_the_one_leaves(case):
    case.failing[1] = cause = Reject("unknown customer")
    case.submit(case.queue(batch_size=3), 0, 5)
    case.run_timer()
    case.until(lambda: case.letters)
    messages, told, on_done = case.letters.pop()
    assert (messages, told) == ([1], cause)
    on_done(True)
    case.until(lambda: case.done() == 5)
    assert [offsets for _, offsets in case.seen] == [[0, 1, 2], [0], [1], [2], [3, 4]]
    assert case.service.failures == 2


def test_a_list_that_failed_otherwise_is_tried_again_as_a_whole(case):
    case.failing[1] = ValueError("no connection")
    case.submit(case.queue(batch_size=3), 0, 3)
    case.until(lambda: case.timers)
    case.failing.clear()
    case.run_timer()
    case.until(lambda: case.done() == 3)
    assert [offsets for _, offsets in case.seen] == [[0, 1, 2], [0, 1, 2]]


def test_a_dead_letter_that_could_not_be_stored_is_not_skipped(case):
    case.failing[0] = ValueError("poison")
    case.submit(case.queue(limit=0), 0, 2)
    case.until(lambda: case.letters)
    case.letters.pop()[2](False)
    case.run_timer()
    case.until(lambda: case.letters)
    assert case.offsets() == [0, 0]
    case.letters.pop()[2](True)
    case.until(lambda: case.done() == 2)


def test_behind_a_damaged_batch_nothing_is_called(case):
    work = case.queue()
    case.submit(work, 0, 2)
    case.submit(work, 2, 2, CorruptBatch("damaged"))
    case.submit(work, 4, 2)
    case.until(lambda: case.broken)
    case.until(lambda: case.service.is_idle(work))
    assert case.offsets() == [0, 1]


def test_what_stands_before_a_damaged_batch_is_called_also_when_they_came_together(case):
    work = case.queue()
    batches = [FakeBatch(0, 3), FakeBatch(3, 2, error=CorruptBatch("damaged")), FakeBatch(5, 2)]
    case.service.submit(work, batches, case.spans[work.name])
    case.until(lambda: len(case.offsets()) == 3)
    case.until(lambda: case.service.is_idle(work))
    assert case.offsets() == [0, 1, 2]


# ---- Locks and rebalance --------------------------------------------------------------


def test_without_its_lock_a_queue_stops_before_the_next_message(case):
    permit = Permit()
    work = case.queue(lease=permit)
    case.gate.clear()
    case.submit(work, 0, 5)
    case.until(lambda: case.running == 1)
    permit.given = False
    case.gate.set()
    case.until(lambda: case.done() == 1)
    case.until(lambda: work in case.service._halted)
    case.service.look()
    assert case.offsets() == [0]
    permit.given = True
    case.service.look()
    case.until(lambda: case.done() == 5)
    assert case.offsets() == list(range(5))


def test_a_rebalance_waits_for_the_call_that_runs_and_no_other_begins(case):
    work = case.queue()
    case.gate.clear()
    case.submit(work, 0, 5)
    case.until(lambda: case.running == 1)
    case.service.revoke(work)
    left = []
    case.service.when_idle(work, lambda: left.append(case.done()))
    assert not case.service.is_idle(work)
    assert not case.timers
    case.gate.set()
    case.run_timer()
    assert left == [1]
    assert case.service.is_idle(work)
    assert case.offsets() == [0]


@pytest.mark.parametrize("state", ["new", "suspended", "halted"])
def test_a_queue_at_rest_is_given_up_at_once(case, state):
    permit = Permit()
    work = case.queue(lease=permit)
    if state == "halted":
        permit.given = False
    if state == "suspended":
        case.failing[0] = ValueError("no")
    if state != "new":
        case.submit(work, 0, 1)
        case.until(lambda: case.timers or work in case.service._halted)
    case.service.revoke(work)
    left = []
    case.service.when_idle(work, lambda: left.append(True))
    while case.timers:
        case.run_timer()
    assert left == [True]
    permit.given = True
    case.service.look()
    case.submit(work, 5, 1)
    assert 5 not in case.offsets()


def test_what_follows_a_revoked_queue_waits_for_it(case):
    before, after = case.queue("before"), case.queue("after")
    case.gate.clear()
    case.submit(before, 0, 5)
    case.until(lambda: case.running == 1)
    case.service.revoke(before)
    case.service.follow(after, before)
    case.submit(after, 100, 3)
    assert case.offsets("after") == []
    case.gate.set()
    case.run_timer()
    case.until(lambda: case.done("after") == 3)
    assert case.most_running == 1
    assert case.offsets("before") == [0]


def test_a_dead_letter_on_its_way_counts_as_work(case):
    case.failing[0] = ValueError("poison")
    work = case.queue(limit=0)
    case.submit(work, 0, 1)
    case.until(lambda: case.letters)
    case.service.revoke(work)
    assert not case.service.is_idle(work)
    case.letters.pop()[2](True)
    assert case.service.is_idle(work)
    assert case.done() == 1


def test_closing_waits_for_the_call_that_runs(case):
    case.gate.clear()
    work = case.queue()
    case.submit(work, 0, 5)
    case.until(lambda: case.running == 1)
    assert not case.close(0.01)
    assert not case.service.is_idle(work)
    case.gate.set()
    assert case.close(PATIENCE_S)
    assert case.service.is_idle(work)
    assert case.offsets() == [0]


# ---- The twin for asyncio -------------------------------------------------------------


def test_coroutines_are_awaited_in_order_and_one_at_a_time():
    async def run():
        loop = asyncio.get_running_loop()
        seen: dict[str, list[int]] = {"a": [], "b": []}
        running = {"a": 0, "b": 0}
        failed = set()
        done = asyncio.Event()

        def later(delay_ms, callback):
            loop.call_soon_threadsafe(callback)

        def work(name):
            async def listen(messages):
                assert not running[name]
                running[name] += 1
                await asyncio.sleep(0)
                running[name] -= 1
                at = messages[0].queue_offset
                if at % 10 == 5 and (name, at) not in failed:
                    failed.add((name, at))
                    raise ValueError(at)
                seen[name].append(at)
                if all(len(some) == 100 for some in seen.values()):
                    done.set()
                return ConsumeResult.SUCCESS if at % 2 else None

            queue = NamedQueue(listen, 1, lambda: None, lambda error: None, Always())
            queue.name = name
            return queue

        service = OrderlyService(
            threading.Condition(), time.monotonic_ns, 10, later, lambda *args: None
        )
        workers = WorkerTasks(service, 8, threading.Event())
        workers.attach(loop)
        for queue in (work("a"), work("b")):
            for first in range(0, 100, 25):
                service.submit(queue, [FakeBatch(first, 25)], StateSpan(0, bytearray(100), 0))
        await asyncio.wait_for(done.wait(), PATIENCE_S)
        assert seen == {"a": list(range(100)), "b": list(range(100))}
        assert service.failures == 20
        service.close()
        assert await asyncio.to_thread(workers.close, PATIENCE_S)

    asyncio.run(run())


class Stop(BaseException):
    """No Exception, as those that a program ends its own work with."""


@pytest.mark.parametrize("how", ["raises", "is cancelled"])
def test_a_queue_goes_on_after_a_listener_of_asyncio_ended_its_task(how, monkeypatch):
    monkeypatch.setattr(worker_tasks, "GO_ON_S", 0)

    async def run():
        loop = asyncio.get_running_loop()
        seen, done = [], asyncio.Event()

        async def listen(messages):
            seen.append((messages[0].queue_offset, messages[0].reconsume_times))
            if seen[-1] == (0, 0):
                if how == "raises":
                    raise Stop
                asyncio.current_task().cancel()
                await asyncio.Event().wait()
            if seen[-1][0] == 1:
                done.set()

        def later(delay_ms, callback):
            loop.call_soon_threadsafe(callback)

        queue = NamedQueue(listen, 1, lambda: None, lambda error: None, Always())
        service = OrderlyService(
            threading.Condition(), time.monotonic_ns, 10, later, lambda *args: None
        )
        workers = WorkerTasks(service, 8, threading.Event())
        workers.attach(loop)
        service.submit(queue, [FakeBatch(0, 2)], StateSpan(0, bytearray(2), 0))
        async with asyncio.timeout(PATIENCE_S):
            await done.wait()
        assert seen == [(0, 0), (0, 1), (1, 0)]
        assert service.failures == 1
        service.close()
        assert await asyncio.to_thread(workers.close, PATIENCE_S)

    asyncio.run(run())


def test_a_listener_of_asyncio_that_waits_for_something_cancelled_fails_like_any_other():
    async def run():
        loop = asyncio.get_running_loop()
        times, letters, suspended, buried = [], [], [], asyncio.Event()

        async def listen(messages):
            times.append(messages[0].reconsume_times)
            waited_for = asyncio.ensure_future(asyncio.Event().wait())
            waited_for.cancel()
            await waited_for
            return ConsumeResult.SUCCESS

        def later(delay_ms, callback):
            suspended.append(delay_ms)
            loop.call_soon_threadsafe(callback)

        def letter(messages, cause, on_done):
            letters.append(type(cause))
            buried.set()

        queue = NamedQueue(listen, 1, lambda: None, lambda error: None, Always(), 2)
        service = OrderlyService(threading.Condition(), time.monotonic_ns, 10, later, letter)
        workers = WorkerTasks(service, 8, threading.Event())
        workers.attach(loop)
        service.submit(queue, [FakeBatch(0, 1)], StateSpan(0, bytearray(1), 0))
        async with asyncio.timeout(PATIENCE_S):
            await buried.wait()
        assert times == [0, 1, 2]
        assert suspended == [10, 10]
        assert letters == [asyncio.CancelledError]
        assert service.failures == 3
        service.close()
        assert await asyncio.to_thread(workers.close, PATIENCE_S)

    asyncio.run(run())


def test_a_listener_of_asyncio_that_hangs_is_cancelled_at_the_end():
    async def run():
        loop = asyncio.get_running_loop()
        begun = asyncio.Event()

        async def listen(messages):
            begun.set()
            await asyncio.Event().wait()

        def later(delay_ms, callback):
            loop.call_soon_threadsafe(callback)

        queue = NamedQueue(listen, 1, lambda: None, lambda error: None, Always())
        service = OrderlyService(
            threading.Condition(), time.monotonic_ns, 10, later, lambda *args: None
        )
        workers = WorkerTasks(service, 8, threading.Event())
        assert workers.close(0)  # nothing was attached, so nothing runs
        service = OrderlyService(
            threading.Condition(), time.monotonic_ns, 10, later, lambda *args: None
        )
        workers = WorkerTasks(service, 8, threading.Event())
        workers.attach(loop)
        service.submit(queue, [FakeBatch(0, 5)], StateSpan(0, bytearray(10), 0))
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        service.close()
        assert not await asyncio.to_thread(workers.close, 0.01)
        left = asyncio.Event()
        service.revoke(queue)
        service.when_idle(queue, left.set)
        await asyncio.wait_for(left.wait(), PATIENCE_S)

    asyncio.run(run())


class NoWorkers:
    """Nobody takes turns but the test."""

    def wake(self, count):
        pass

    def close(self, timeout_s):
        return True


def test_halted_queues_go_on_in_the_order_in_which_they_halted():
    # In any other order, addresses in memory would decide what a simulated seed does.
    service = OrderlyService(
        threading.Condition(), time.monotonic_ns, 1_000, lambda *_: None, lambda *_: None
    )
    service.attach(NoWorkers())
    permit = Permit()
    halted = [
        OrderlyQueue(lambda _: None, 1, lambda: None, lambda *_: None, permit) for _ in range(64)
    ]
    for work in halted:
        service.submit(work, [FakeBatch(0, 2)], StateSpan(0, bytearray(2), 0))
    permit.given = False
    for _ in halted:
        turn = service.take()
        assert next(turn.calls, None) is None
    permit.given = True
    service.look()
    assert [service.take().work for _ in halted] == halted
