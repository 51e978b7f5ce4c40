"""Hands messages to coroutine listeners, many side by side in one asyncio loop."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

from mqmesh.message import StoredMessage
from mqmesh.sdk.consumer.fetching.process_queue import DONE, Span
from mqmesh.sdk.consumer.fetching.pulled_batch import PulledBatch
from mqmesh.sdk.consumer.listening.consume_result import Cause, ConsumeResult, why_again
from mqmesh.sdk.consumer.listening.consume_work import (
    OnFailed,
    Portion,
    QueueWork,
    Waiting,
    Workers,
    find_waiting,
    make_portions,
    park,
)

CALLS_PER_TURN: Final = 64
"""A task whose listener never really waits lets others run after so many calls."""

AsyncListener = Callable[[list[StoredMessage]], Awaitable[ConsumeResult | None]]

_SUCCESS: Final = ConsumeResult.SUCCESS
_log = logging.getLogger(__name__)


class AioConsumeService(Workers):
    """Tasks that call coroutine listeners; the twin of ``ConsumeService``.

    Everything but ``submit``, ``revoke`` and ``close`` happens in the asyncio loop that it was
    attached to.

    Args:
        tasks: Most calls side by side.
        listener_of: The coroutine function behind a queue's listener.
        on_failed: Takes over the messages of a failed call.
        closer: The task that closes the consumer; it may be one of ours, and is not waited for.
    """

    def __init__(
        self,
        tasks: int,
        listener_of: Callable[[QueueWork], AsyncListener],
        on_failed: OnFailed,
        closer: Callable[[], asyncio.Task[Any] | None] = lambda: None,
    ) -> None:
        self._closer = closer
        self._most_tasks = tasks
        self._listener_of = listener_of
        self._on_failed = on_failed
        self._ready: deque[Portion] = deque()
        self._tasks: set[asyncio.Task[None] | None] = set()
        self._closed = False
        self._finished = threading.Event()
        self._attached: asyncio.AbstractEventLoop | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Says where the listeners run, before the first message comes."""
        self._attached = loop

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        assert self._attached is not None, "messages come after the start only"
        return self._attached

    def submit(self, work: QueueWork, batches: list[PulledBatch], span: Span) -> None:
        self._send(list(make_portions(work, batches, span)))

    def submit_again(
        self, work: QueueWork, messages: list[StoredMessage], span: Span, attempt: int
    ) -> None:
        self._send([Portion(work, messages, span, attempt)])

    def _send(self, portions: list[Portion]) -> None:
        if self._closed:
            return
        try:
            self._loop.call_soon_threadsafe(self._add, portions)
        except RuntimeError:
            _log.debug("the event loop is closed; its messages will come again")

    def revoke(self, work: QueueWork) -> None:
        work.revoked = True
        for portion in list(self._ready):
            if portion.work is work:
                portion.revoke()

    def waiting(self) -> dict[QueueWork, Waiting]:
        return find_waiting(list(self._ready))

    def close(self, timeout_s: float) -> bool:
        self._closed = True
        if self._attached is None:
            return True
        try:
            self._loop.call_soon_threadsafe(self._stop)
        except RuntimeError:
            return not self._tasks
        if self._finished.wait(timeout_s):
            return True
        self._loop.call_soon_threadsafe(self._cancel)
        return False

    def _add(self, portions: list[Portion]) -> None:
        self._ready.extend(portion for portion in portions if not portion.work.revoked)
        waiting = sum(portion.call_count for portion in portions)
        # Tasks that ended in this turn of the loop are only forgotten in the next one.
        at_work = sum(task is not None and not task.done() for task in self._tasks)
        for _ in range(min(waiting, self._most_tasks - at_work)):
            task = self._loop.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._closed:
            self._check_finished()

    def _stop(self) -> None:
        for portion in self._ready:
            portion.revoke()
        self._ready.clear()
        self._check_finished()

    def _check_finished(self) -> None:
        if not self._tasks - {self._closer()}:
            self._finished.set()

    def _cancel(self) -> None:
        for task in self._tasks - {self._closer()}:
            if task is not None:
                task.cancel()

    async def _work(self) -> None:
        while self._ready:
            portion = self._ready[0]
            await self._consume(portion)
            if self._ready and self._ready[0] is portion:
                self._ready.popleft()
            portion.work.on_progress()

    async def _consume(self, portion: Portion) -> None:
        listener = self._listener_of(portion.work)
        result: BaseException | object
        if portion.work.revoked:
            portion.revoke()
        portion.open()
        for calls, item in enumerate(portion.calls, 1):
            messages = item if isinstance(item, list) else [item]
            first, last = messages[0].queue_offset, messages[-1].queue_offset
            try:
                result = await listener(messages.copy())
            except (Exception, asyncio.CancelledError) as error:
                if is_ending(error):
                    raise
                result = error
            if result is None or result is _SUCCESS or (cause := why_again(result)) is None:
                portion.span.mark(first, last, DONE)
            else:
                self._fail(portion, messages, cause)
            if calls % CALLS_PER_TURN == 0:
                await asyncio.sleep(0)

    def _fail(self, portion: Portion, messages: list[StoredMessage], cause: Cause) -> None:
        messages = park(portion.span, messages)
        if messages and not portion.work.revoked:
            self._on_failed(portion, messages, cause)


def is_ending(error: BaseException) -> bool:
    """True when the task that runs is cancelled, and not only what its listener waited for."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
