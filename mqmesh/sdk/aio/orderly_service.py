"""Hands messages to coroutine listeners in the order of their queues, in one asyncio loop."""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

from mqmesh.sdk.aio.consume_service import AsyncListener, is_ending
from mqmesh.sdk.consumer.listening.consume_result import Cause, why_again
from mqmesh.sdk.consumer.listening.consume_work import QueueWork
from mqmesh.sdk.consumer.listening.orderly_queue import Failure, OrderlyQueue, QueueState
from mqmesh.sdk.consumer.listening.orderly_service import (
    CALLS_PER_TURN,
    OrderlyWorkers,
    ToDeadLetters,
)

CALLS_BETWEEN_PAUSES = 64
"""A task whose listener never really waits lets others run after so many calls."""

_log = logging.getLogger(__name__)


class AioOrderlyService(OrderlyWorkers):
    """Tasks that call coroutine listeners in order; the twin of ``OrderlyService``.

    Args:
        tasks: Most calls side by side.
        listener_of: The coroutine function behind a queue's listener.
        suspend_ms, call_later, to_dead_letters: As for ``OrderlyWorkers``.
        closer: The task that closes the consumer; it may be one of ours, and is not waited for.
    """

    def __init__(
        self,
        tasks: int,
        listener_of: Callable[[QueueWork], AsyncListener],
        suspend_ms: int,
        call_later: Callable[[int, Callable[[], None]], object],
        to_dead_letters: ToDeadLetters,
        closer: Callable[[], asyncio.Task[Any] | None] = lambda: None,
    ) -> None:
        super().__init__(suspend_ms, call_later, to_dead_letters)
        self._most_tasks = tasks
        self._listener_of = listener_of
        self._closer = closer
        self._tasks: set[asyncio.Task[None] | None] = set()
        self._finished = threading.Event()
        self._attached: asyncio.AbstractEventLoop | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Says where the listeners run, before the first message comes."""
        self._attached = loop

    def close(self, timeout_s: float) -> bool:
        with self._changed:
            self._closed = True
            self._ready.clear()
        loop = self._attached
        if loop is None:
            return True
        try:
            loop.call_soon_threadsafe(self._check_finished)
        except RuntimeError:
            return not self._tasks
        if self._finished.wait(timeout_s):
            return True
        loop.call_soon_threadsafe(self._cancel)
        return False

    def _wake(self) -> None:
        assert self._attached is not None, "messages come after the start only"
        try:
            self._attached.call_soon_threadsafe(self._start_task)
        except RuntimeError:
            _log.debug("the event loop is closed; its messages will come again")

    def _start_task(self) -> None:
        assert self._attached is not None
        if self._ready and len(self._tasks) < self._most_tasks:
            task = self._attached.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._closed:
            self._check_finished()
        else:
            self._start_task()  # a queue may have become ready behind its last look

    def _check_finished(self) -> None:
        if not self._tasks - {self._closer()}:
            self._finished.set()

    def _cancel(self) -> None:
        for task in self._tasks - {self._closer()}:
            if task is not None:
                task.cancel()

    async def _work(self) -> None:
        while (work := self._take()) is not None:
            await self._consume(work)
            await asyncio.sleep(0)

    def _take(self) -> OrderlyQueue | None:
        with self._changed:
            if self._closed or not self._ready:
                return None
            work = self._ready.popleft()
            work.state = QueueState.RUNNING
            return work

    async def _consume(self, work: OrderlyQueue) -> None:
        failure: Failure | None = None
        cause: Cause | None = None
        result: object
        listener = self._listener_of(work)
        try:
            for calls in range(1, CALLS_PER_TURN + 1):
                messages = work.next_call()
                if messages is None or self._closed:
                    break
                try:
                    result = await listener(messages.copy())
                except (Exception, asyncio.CancelledError) as error:
                    if is_ending(error):
                        raise
                    result = error
                if (cause := why_again(result)) is not None:
                    self.failures += 1
                    failure = work.fail(cause)
                    break
                work.succeed()
                if calls % CALLS_BETWEEN_PAUSES == 0:
                    await asyncio.sleep(0)
        finally:
            self._settle(work, failure, cause)
