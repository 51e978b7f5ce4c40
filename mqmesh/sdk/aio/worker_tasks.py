"""Tasks of an asyncio loop that take turns of a service and call coroutine listeners."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from mqmesh.message import StoredMessage
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult, Ended
from mqmesh.sdk.consumer.listening.consume_service import ConsumeService, Turn, Workers
from mqmesh.transport.interface import Flag

CALLS_BETWEEN_PAUSES: Final = 64
"""A task whose listener never really waits lets others run after so many calls."""
GO_ON_S: Final = 1.0
"""Time after which another task replaces one that was cancelled. An event loop that is about to
be closed cancels all tasks, and must not get new ones."""

AsyncListener = Callable[[list[StoredMessage]], Awaitable[ConsumeResult | None]]

_log = logging.getLogger(__name__)


class WorkerTasks(Workers):
    """The worker tasks of one consumer; the twin of ``WorkerThreads``.

    Args:
        service: Service whose turns they take; its listeners are coroutine functions.
        most: Most calls side by side.
        finished: Set when all have ended.
        closer: The task that closes the consumer; it may be one of ours, and is not waited for.
    """

    def __init__(
        self,
        service: ConsumeService,
        most: int,
        finished: Flag,
        closer: Callable[[], asyncio.Task[Any] | None] = lambda: None,
    ) -> None:
        self._service = service
        self._most = most
        self._closer = closer
        self._tasks: set[asyncio.Task[None] | None] = set()
        self._count = 0
        self._finished = finished
        self._attached: asyncio.AbstractEventLoop | None = None
        self._is_deserted = False
        service.attach(self)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the event loop of the listeners, before the first message comes."""
        self._attached = loop

    def wake(self, count: int) -> None:
        assert self._attached is not None, "messages come after the start only"
        try:
            self._attached.call_soon_threadsafe(self._start, self._attached, count)
        except RuntimeError:
            if not self._is_deserted:
                self._is_deserted = True
                _log.error(
                    "the event loop that the consumer was started in is closed, so its listener "
                    "cannot be called; close() the consumer, and its messages come again"
                )

    def close(self, timeout_s: float) -> bool:
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

    # ---- In the asyncio loop ------------------------------------------------------------

    def _start(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        # Tasks that ended in this turn of the loop are only forgotten in the next one.
        at_work = sum(task is not None and not task.done() for task in self._tasks)
        for _ in range(min(count, self._most - at_work)):
            task = loop.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._service.closed:
            self._check_finished()

    def _check_finished(self) -> None:
        if not self._tasks - {self._closer()}:
            self._finished.set()

    def _cancel(self) -> None:
        for task in self._tasks - {self._closer()}:
            if task is not None:
                task.cancel()

    async def _work(self) -> None:
        while (turn := self._next()) is not None:
            try:
                await self._run(turn)
            except BaseException as error:
                self._stop(turn, error)
                raise
            finally:
                with self._service.changed:
                    self._service.end(turn)

    async def _run(self, turn: Turn) -> None:
        listener, calls = turn.work.listener, turn.calls
        task = asyncio.current_task()
        result: object
        try:
            messages = next(calls)
            while True:
                try:
                    result = await listener(messages)  # type: ignore[misc]
                except BaseException as error:
                    if _is_ending(task, error):
                        raise
                    result = error
                messages = calls.send(result)
                self._count += 1
                if self._count % CALLS_BETWEEN_PAUSES == 0:
                    await asyncio.sleep(0)
        except StopIteration:
            return

    def _stop(self, turn: Turn, error: BaseException) -> None:
        """End this task within a turn: the messages at hand fail, and another task goes on."""
        if (
            self._service.closed
            or isinstance(error, GeneratorExit)
            or inspect.getgeneratorstate(turn.calls) == inspect.GEN_CLOSED
        ):
            self._service.give_up(turn)
            return
        with suppress(StopIteration):
            turn.calls.send(Ended(error))
        assert self._attached is not None
        self._attached.call_later(GO_ON_S, self._start, self._attached, 1)

    def _next(self) -> Turn | None:
        with self._service.changed:
            return self._service.take()


def _is_ending(task: asyncio.Task[Any] | None, error: BaseException) -> bool:
    """Return True when a task ends with its listener's error, False when only the call failed.

    It ends when it is cancelled itself, and not only what its listener waits for, and by what ends
    the program. A coroutine that is thrown away gets a ``GeneratorExit`` that no listener raised,
    and not within its task.
    """
    if isinstance(error, asyncio.CancelledError):
        return task is not None and task.cancelling() > 0
    if isinstance(error, GeneratorExit):
        return _current_task() is not task
    return isinstance(error, KeyboardInterrupt | SystemExit)


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None  # no event loop runs
