"""Coroutine listeners: no message is left lying because a task was just about to end."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from mqmesh.message import StoredMessage
from mqmesh.sdk.aio import worker_tasks
from mqmesh.sdk.aio.worker_tasks import WorkerTasks
from mqmesh.sdk.consumer.fetching.process_queue import DONE, OPEN, PARKED, StateSpan
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.listening.consume_service import ConcurrentService
from mqmesh.sdk.consumer.listening.consume_work import QueueWork
from mqmesh.units import QueueOffset


@pytest.mark.parametrize("tasks", [1, 2, 20])
def test_what_comes_while_the_last_task_ends_is_handed_out(tasks):
    async def run():
        handled, done = [], asyncio.Event()

        async def listen(messages):
            handled.extend(message.queue_offset for message in messages)
            if len(handled) < 50:
                send(len(handled))  # comes into the loop before it hears of this task's end
            else:
                done.set()
            return ConsumeResult.SUCCESS

        def send(offset):
            message = StoredMessage("t", b"x", queue_offset=QueueOffset(offset))
            service.submit_again(work, [message], span, 0)

        work = QueueWork(listen, 1, lambda: None, lambda error: None)
        span = StateSpan(0, bytearray(50), 0)
        service = ConcurrentService(
            threading.Condition(), time.monotonic_ns, lambda *arguments: None
        )
        workers = WorkerTasks(service, tasks, threading.Event())
        workers.attach(asyncio.get_running_loop())
        send(0)
        async with asyncio.timeout(10):
            await done.wait()
        assert handled == list(range(50))
        await asyncio.sleep(0)
        assert span.states == bytes([DONE]) * 50

    asyncio.run(run())


def test_a_listener_that_waits_for_something_cancelled_fails_and_the_others_go_on():
    async def run():
        handled, failed, ended = [], [], asyncio.Event()

        async def listen(messages):
            handled.append(messages[0].queue_offset)
            if handled == [0]:
                waited_for = asyncio.ensure_future(asyncio.Event().wait())
                waited_for.cancel()
                await waited_for
            return ConsumeResult.SUCCESS

        def on_failed(portion, messages, cause):
            failed.append((messages[0].queue_offset, type(cause)))

        messages = [StoredMessage("t", b"x", queue_offset=QueueOffset(n)) for n in range(3)]
        work = QueueWork(listen, 1, ended.set, lambda error: None)
        span = StateSpan(0, bytearray(3), 0)
        service = ConcurrentService(threading.Condition(), time.monotonic_ns, on_failed)
        workers = WorkerTasks(service, 1, threading.Event())
        workers.attach(asyncio.get_running_loop())
        service.submit_again(work, messages, span, 0)
        async with asyncio.timeout(10):
            await ended.wait()
        assert span.states == bytes([PARKED, DONE, DONE])
        assert handled == [0, 1, 2]
        assert failed == [(0, asyncio.CancelledError)]

    asyncio.run(run())


class Stop(BaseException):
    """No Exception, as those that a program ends its own work with."""


@pytest.mark.parametrize("raised", [Stop, GeneratorExit])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_any_exception_of_a_listener_is_a_failure_and_the_worker_goes_on(raised, batch_size):
    async def run():
        handled, failed, ended = [], [], asyncio.Event()

        async def listen(messages):
            await asyncio.sleep(0)
            handled.append(messages[0].queue_offset)
            if handled == [0]:
                raise raised

        def on_failed(portion, messages, cause):
            failed.append(([message.queue_offset for message in messages], type(cause)))

        messages = [StoredMessage("t", b"x", queue_offset=QueueOffset(n)) for n in range(4)]
        work = QueueWork(listen, batch_size, ended.set, lambda error: None)
        span = StateSpan(0, bytearray(4), 0)
        service = ConcurrentService(threading.Condition(), time.monotonic_ns, on_failed)
        workers = WorkerTasks(service, 1, threading.Event())
        workers.attach(asyncio.get_running_loop())
        if batch_size == 1:
            service.submit_again(work, messages, span, 0)
        else:
            for first in (0, 2):
                service.submit_again(work, messages[first : first + 2], span, 0)
        async with asyncio.timeout(10):
            while len(handled) < 4 / batch_size:
                ended.clear()
                await ended.wait()
        assert failed == [(list(range(batch_size)), raised)]
        assert span.states == bytes([PARKED] * batch_size + [DONE] * (4 - batch_size))
        assert handled == list(range(0, 4, batch_size))

    asyncio.run(run())


def test_the_messages_of_a_cancelled_worker_fail_and_another_worker_goes_on(monkeypatch):
    monkeypatch.setattr(worker_tasks, "GO_ON_S", 0)

    async def run():
        handled, failed, ended = [], [], asyncio.Event()

        async def listen(messages):
            handled.append((messages[0].queue_offset, asyncio.current_task()))
            if len(handled) == 1:
                asyncio.current_task().cancel()
                await asyncio.Event().wait()

        def on_failed(portion, messages, cause):
            failed.append((messages[0].queue_offset, type(cause)))

        messages = [StoredMessage("t", b"x", queue_offset=QueueOffset(n)) for n in range(3)]
        work = QueueWork(listen, 1, ended.set, lambda error: None)
        span = StateSpan(0, bytearray(3), 0)
        service = ConcurrentService(threading.Condition(), time.monotonic_ns, on_failed)
        workers = WorkerTasks(service, 1, threading.Event())
        workers.attach(asyncio.get_running_loop())
        service.submit_again(work, messages, span, 0)
        async with asyncio.timeout(10):
            await ended.wait()
        assert failed == [(0, asyncio.CancelledError)]
        assert span.states == bytes([PARKED, DONE, DONE])
        assert [offset for offset, _ in handled] == [0, 1, 2]
        assert handled[0][1] is not handled[1][1]

    asyncio.run(run())


def test_a_listener_that_ends_the_program_leaves_its_message_for_a_later_try():
    failed = []

    async def listen(messages):
        raise SystemExit(3)

    async def run():
        work = QueueWork(listen, 1, lambda: None, lambda error: None)
        span = StateSpan(0, bytearray(1), 0)
        service = ConcurrentService(
            threading.Condition(), time.monotonic_ns, lambda *arguments: failed.append(span.states)
        )
        workers = WorkerTasks(service, 1, threading.Event())
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *arguments: None)  # it reports the task that ended
        workers.attach(loop)
        service.submit_again(work, [StoredMessage("t", b"x", queue_offset=QueueOffset(0))], span, 0)
        await asyncio.Event().wait()

    with pytest.raises(SystemExit):
        asyncio.run(run())
    assert failed == [bytes([PARKED])]


def test_a_worker_that_is_thrown_away_with_its_event_loop_says_nothing():
    begun, failed = asyncio.Event(), []

    async def listen(messages):
        begun.set()
        await asyncio.Event().wait()

    work = QueueWork(listen, 1, lambda: None, lambda error: None)
    span = StateSpan(0, bytearray(1), 0)
    service = ConcurrentService(
        threading.Condition(), time.monotonic_ns, lambda *arguments: failed.append(1)
    )
    workers = WorkerTasks(service, 1, threading.Event())
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *arguments: None)  # it reports a task that did not end
    workers.attach(loop)
    service.submit_again(work, [StoredMessage("t", b"x", queue_offset=QueueOffset(0))], span, 0)
    loop.run_until_complete(begun.wait())
    (worker,) = asyncio.all_tasks(loop)
    loop.close()
    worker.get_coro().close()
    assert not failed
    assert span.states == bytes([OPEN])


def test_a_listener_that_returns_nothing_has_done_its_messages():
    async def run():
        ended, failed = asyncio.Event(), []

        async def listen(messages):
            await asyncio.sleep(0)

        work = QueueWork(listen, 1, ended.set, lambda error: None)
        span = StateSpan(0, bytearray(3), 0)
        service = ConcurrentService(
            threading.Condition(), time.monotonic_ns, lambda *arguments: failed.append(1)
        )
        workers = WorkerTasks(service, 2, threading.Event())
        workers.attach(asyncio.get_running_loop())
        messages = [StoredMessage("t", b"x", queue_offset=at) for at in range(3)]
        service.submit_again(work, messages, span, 0)
        async with asyncio.timeout(10):
            while span.states != bytes([DONE, DONE, DONE]):
                ended.clear()
                await ended.wait()
        assert not failed
        service.close()
        assert await asyncio.to_thread(workers.close, 10)

    asyncio.run(run())


def test_a_task_that_is_cancelled_itself_ends():
    async def run():
        begun, failed = asyncio.Event(), []

        async def listen(messages):
            begun.set()
            await asyncio.Event().wait()

        work = QueueWork(listen, 1, lambda: None, lambda error: None)
        span = StateSpan(0, bytearray(1), 0)
        service = ConcurrentService(
            threading.Condition(), time.monotonic_ns, lambda *arguments: failed.append(1)
        )
        workers = WorkerTasks(service, 1, threading.Event())
        workers.attach(asyncio.get_running_loop())
        service.submit_again(work, [StoredMessage("t", b"x")], span, 0)
        async with asyncio.timeout(10):
            await begun.wait()
            service.close()
            assert not await asyncio.to_thread(workers.close, 0)  # which cancels it
            assert await asyncio.to_thread(workers.close, 10)
        assert not failed
        assert span.states == bytes([OPEN])

    asyncio.run(run())
