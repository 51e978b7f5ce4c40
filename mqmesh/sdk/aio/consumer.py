"""The consumers for asyncio programs."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, cast

from mqmesh.errors import ClientClosed, InvalidArgument, MQMeshError
from mqmesh.message import MessageQueue, StoredMessage
from mqmesh.metrics import Readings
from mqmesh.sdk.aio.completions import check_loop
from mqmesh.sdk.aio.processing import Processing
from mqmesh.sdk.aio.signatures import signed_as
from mqmesh.sdk.aio.worker_tasks import AsyncListener, WorkerTasks
from mqmesh.sdk.client.run import run_async
from mqmesh.sdk.consumer.fetching.message_selector import Wanted
from mqmesh.sdk.consumer.fetching.pull_loop import PullCounters
from mqmesh.sdk.consumer.listening.consume_result import hooked_coroutine, is_coroutine_function
from mqmesh.sdk.consumer.listening.consume_service import ConsumeService, Workers
from mqmesh.sdk.consumer.listening.consume_work import AnyListener
from mqmesh.sdk.consumer.pull_consumer import PullConsumer as BlockingPullConsumer
from mqmesh.sdk.consumer.push_consumer import PushConsumer as BlockingPushConsumer
from mqmesh.sdk.hooks import HookCalls


class _Consumer(ABC):
    """The part that both consumers have, each around one of the blocking ones."""

    _inner: BlockingPullConsumer | BlockingPushConsumer
    _loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Start as the blocking consumer does, in the running event loop until ``close``.

        Raises:
            InvalidArgument: It runs in another event loop.
            MQMeshError: As there.
        """
        check_loop(self._loop)
        if self._loop is None:
            loop = asyncio.get_running_loop()
            self._attach(loop)
            self._loop = loop
        try:
            await asyncio.to_thread(self._inner.start)
        except Exception:
            self._loop = None
            raise

    @abstractmethod
    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make it ready to be started in an event loop."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def unsubscribe(self, topic: str) -> None:
        """Unsubscribe as the blocking consumer does."""
        check_loop(self._loop)
        self._inner.unsubscribe(topic)

    @property
    def filter_errors(self) -> dict[str, MQMeshError]:
        """Errors of filters, from the blocking consumer's ``filter_errors``."""
        return self._inner.filter_errors

    @property
    def client_id(self) -> str:
        """Id of this member at brokers."""
        return self._inner.client_id

    @property
    def counters(self) -> PullCounters:
        """Counters of the pulls so far."""
        return self._inner.counters

    def metrics(self) -> Readings:
        """Return the metrics, as the blocking consumer does."""
        return self._inner.metrics()

    def assignment(self) -> list[MessageQueue]:
        """Return the assigned queues, as the blocking consumer does."""
        return self._inner.assignment()


class _InnerPullConsumer(BlockingPullConsumer):
    """A pull consumer that wakes an asyncio loop."""

    def attach(self, loop: asyncio.AbstractEventLoop, on_arrival: Callable[[], None]) -> None:
        """Make it ready to be started in an event loop, before ``start``.

        Raises:
            ClientClosed: As for ``start``.
        """
        self._renew()
        self.on_arrival = on_arrival
        self.introspection.loop = loop


class PullConsumer(_Consumer):
    """Pull consumer for coroutines; names and meaning as in ``mqmesh.PullConsumer``.

    Besides polling it can be iterated, and a message is done when the loop gets the next one,
    unless ``auto_commit`` is off::

        async with PullConsumer("audit") as consumer:
            await consumer.subscribe("orders")
            async for message in consumer:
                print(message.body)

    Args:
        group, namesrv_addr, credentials, namespace, strategy, client, transport, hooks, options:
            As for ``mqmesh.PullConsumer``.
    """

    @signed_as(BlockingPullConsumer.__init__)
    def __init__(self, group: str, **options: Any) -> None:
        self._inner: _InnerPullConsumer = _InnerPullConsumer(group, **options)
        self._begin()

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._inner.attach(loop, self._wake)
        self._begin()

    def _begin(self) -> None:
        self._arrived = asyncio.Event()
        # Messages of the iteration: those polled and not yet given out, and those that are done.
        self._polled: deque[StoredMessage] = deque()
        self._current: StoredMessage | None = None
        self._done: list[StoredMessage] = []

    async def close(self, *, unfinished: bool = False) -> None:
        """Commits, if ``auto_commit`` is on, and leaves; from any event loop.

        Args:
            unfinished: Messages of the last poll, or the message at hand, was not worked on
                and shall come again.
        """
        await asyncio.to_thread(self._close, unfinished)
        self._loop = None

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close(unfinished=error is not None)

    # ---- Which queues ----------------------------------------------------------------

    async def subscribe(self, topic: str, expression: Wanted = "*") -> None:
        """Subscribe as ``mqmesh.PullConsumer.subscribe`` does."""
        check_loop(self._loop)
        self._inner.subscribe(topic, expression)

    async def assign(self, queues: Iterable[MessageQueue]) -> None:
        """Assign queues as ``mqmesh.PullConsumer.assign`` does."""
        check_loop(self._loop)
        await asyncio.to_thread(self._inner.assign, queues)

    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return a topic's queues as ``mqmesh.PullConsumer.queues`` does."""
        check_loop(self._loop)
        return await asyncio.to_thread(self._inner.queues, topic)

    # ---- Messages --------------------------------------------------------------------

    async def poll(
        self, timeout_ms: int = 1_000, max_messages: int | None = None
    ) -> list[StoredMessage]:
        """Poll as ``mqmesh.PullConsumer.poll`` does; do not mix it with iteration."""
        check_loop(self._loop)
        try:
            async with asyncio.timeout(timeout_ms / 1_000):
                return await self._next(max_messages)
        except TimeoutError:
            return []

    async def __aiter__(self) -> AsyncIterator[StoredMessage]:
        # A generator: it costs half as much a message as an object with __anext__.
        while True:
            try:
                first = await self.__anext__()
            except StopAsyncIteration:
                return
            yield first
            while self._polled:
                if self._current is not None:
                    self._done.append(self._current)
                self._current = self._polled.popleft()
                yield self._current

    async def __anext__(self) -> StoredMessage:
        if asyncio.get_running_loop() is not self._loop:
            check_loop(self._loop)
        if self._current is not None:
            self._done.append(self._current)
        if not self._polled:
            self._current = None
            try:
                self._polled.extend(await self._next(None))
            except ClientClosed:
                raise StopAsyncIteration from None
            self._done.clear()  # that poll has marked all before it done
        self._current = self._polled.popleft()
        return self._current

    def pause(self, *queues: MessageQueue) -> None:
        """Pause queues as ``mqmesh.PullConsumer.pause`` does."""
        self._inner.pause(*queues)

    def resume(self, *queues: MessageQueue) -> None:
        """Resume queues as ``mqmesh.PullConsumer.resume`` does."""
        self._inner.resume(*queues)

    # ---- Places in a queue -----------------------------------------------------------

    def position(self, queue: MessageQueue) -> int:
        """Return a queue's position as ``mqmesh.PullConsumer.position`` does."""
        return self._inner.position(queue)

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Seek as ``mqmesh.PullConsumer.seek`` does."""
        check_loop(self._loop)
        with self._forgetting([queue]):
            await asyncio.to_thread(self._inner.seek, queue, offset)

    async def seek_to_begin(self, *queues: MessageQueue) -> None:
        """Seek as ``mqmesh.PullConsumer.seek_to_begin`` does."""
        check_loop(self._loop)
        with self._forgetting(queues):
            await asyncio.to_thread(self._inner.seek_to_begin, *queues)

    async def seek_to_end(self, *queues: MessageQueue) -> None:
        """Seek as ``mqmesh.PullConsumer.seek_to_end`` does."""
        check_loop(self._loop)
        with self._forgetting(queues):
            await asyncio.to_thread(self._inner.seek_to_end, *queues)

    async def seek_to_time(self, timestamp_ms: int, *queues: MessageQueue) -> None:
        """Seek as ``mqmesh.PullConsumer.seek_to_time`` does."""
        check_loop(self._loop)
        with self._forgetting(queues):
            await asyncio.to_thread(self._inner.seek_to_time, timestamp_ms, *queues)

    async def offset_of_time(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Return an offset as ``mqmesh.PullConsumer.offset_of_time`` does."""
        check_loop(self._loop)
        return await asyncio.to_thread(self._inner.offset_of_time, queue, timestamp_ms)

    async def lag(self, *queues: MessageQueue) -> dict[MessageQueue, int]:
        """Return the lag as ``mqmesh.PullConsumer.lag`` does."""
        check_loop(self._loop)
        return await asyncio.to_thread(self._inner.lag, *queues)

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Commit as ``mqmesh.PullConsumer.commit``; in an iteration the message at hand is done."""
        check_loop(self._loop)
        if offsets is None and self._polled:
            self._finish_current()
            offsets = self._done_here()
        await asyncio.to_thread(self._inner.commit, offsets)

    async def committed(self, queue: MessageQueue) -> int | None:
        """Return the committed offset as ``mqmesh.PullConsumer.committed`` does."""
        check_loop(self._loop)
        return await asyncio.to_thread(self._inner.committed, queue)

    # ---- Helpers ---------------------------------------------------------------------

    async def _next(self, max_messages: int | None) -> list[StoredMessage]:
        while True:
            self._arrived.clear()
            found = self._inner.poll(0, max_messages)
            if found:
                return found
            await self._arrived.wait()

    def _wake(self) -> None:
        loop = self._loop
        if loop is None:
            return  # it is closed, or about to begin: no task waits
        try:
            loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:
            return  # the event loop was closed: no task waits any more

    def _finish_current(self) -> None:
        if self._current is not None:
            self._done.append(self._current)
            self._current = None

    def _done_here(self) -> dict[MessageQueue, int]:
        own = set(self._inner.assignment())
        done = {one.message_queue: one.queue_offset + 1 for one in self._done}
        return {queue: offset for queue, offset in done.items() if queue in own}

    @contextmanager
    def _forgetting(self, queues: Iterable[MessageQueue]) -> Iterator[None]:
        """Drops polled messages of queues, all by default, unless they cannot be moved."""
        chosen = set(queues)
        current, self._current = self._current, None
        given_up = [m for m in self._polled if not chosen or m.message_queue in chosen]
        self._polled = deque(m for m in self._polled if chosen and m.message_queue not in chosen)
        try:
            yield
        except MQMeshError:
            self._current = self._current or current
            self._polled.extendleft(reversed(given_up))
            raise

    def _close(self, unfinished: bool) -> None:
        if not unfinished:
            self._finish_current()
        iterated = bool(self._polled or self._current or self._done)
        if iterated and self._inner.options.auto_commit:
            self._inner.acknowledge(self._done_here())
            self._inner.close(unfinished=bool(self._polled or self._current))
        else:
            self._inner.close(unfinished=unfinished)
        # Closed a second time it has nothing to mark; polled messages come again.
        self._current = None
        self._polled.clear()
        self._done.clear()


class _InnerPushConsumer(BlockingPushConsumer):
    """A push consumer whose listeners are coroutine functions of an asyncio loop."""

    def __init__(self, group: str, **options: Any) -> None:
        self.closer: asyncio.Task[Any] | None = None
        super().__init__(group, **options)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make it ready to be started in an event loop, where its listeners run, before ``start``.

        Raises:
            ClientClosed: As for ``start``.
        """
        self._renew()
        assert isinstance(self._workers, WorkerTasks)
        self._workers.attach(loop)
        self.introspection.loop = loop

    def subscribe_coroutine(self, topic: str, expression: Wanted, listener: AsyncListener) -> None:
        """Subscribe with a coroutine function as listener."""
        if not is_coroutine_function(listener):
            raise InvalidArgument("listener must be a coroutine function (async def)")
        self._subscribe(topic, expression, listener)

    def _hooked(
        self, listener: AnyListener, hooks: HookCalls, wall_ms: Callable[[], int]
    ) -> AnyListener:
        awaited = cast("Callable[[list[StoredMessage]], Awaitable[Any]]", listener)
        return hooked_coroutine(awaited, hooks, wall_ms)

    def _make_workers(self, service: ConsumeService) -> Workers:
        most, finished = self.options.consume_thread_count, self._engine.client.transport.flag()
        return WorkerTasks(service, most, finished, lambda: self.closer)


class PushConsumer(_Consumer):
    """Push consumer with a coroutine function as listener; else as ``mqmesh.PushConsumer``.

    Up to ``consume_thread_count`` calls run side by side, as tasks of the asyncio loop that
    ``start`` was called in. A listener that computes for long holds up the whole loop.

    Args:
        group, namesrv_addr, credentials, namespace, strategy, client, transport, hooks, options:
            As for ``mqmesh.PushConsumer``.
    """

    @signed_as(BlockingPushConsumer.__init__)
    def __init__(self, group: str, **options: Any) -> None:
        self._inner: _InnerPushConsumer = _InnerPushConsumer(group, **options)

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._inner.attach(loop)

    async def close(self) -> None:
        """Close as ``mqmesh.PushConsumer.close``; also from a listener, or another event loop."""
        self._inner.closer = asyncio.current_task()
        await asyncio.to_thread(self._inner.close)
        self._loop = None

    @property
    def closed(self) -> bool:
        """True once closed, from ``mqmesh.PushConsumer.closed``."""
        return self._inner.closed

    async def run(self) -> None:
        """Run as ``mqmesh.PushConsumer.run`` does."""
        await run_async(self)

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def subscribe(
        self, topic: str, expression: Wanted = "*", *, listener: AsyncListener
    ) -> None:
        """Subscribe as ``mqmesh.PushConsumer.subscribe``, with a coroutine function as listener.

        Raises:
            InvalidArgument: As there, or the listener is not a coroutine function, or this is
                another event loop.
        """
        check_loop(self._loop)
        self._inner.subscribe_coroutine(topic, expression, listener)

    def processing(self, messages: Sequence[StoredMessage]) -> Processing:
        """Return a block, for ``async with``, as ``mqmesh.PushConsumer.processing`` does."""
        return Processing(self._inner.processing(messages))

    async def check_outputs(self, *topics: str) -> None:
        """Check outputs as ``mqmesh.PushConsumer.check_outputs`` does."""
        check_loop(self._loop)
        await asyncio.to_thread(self._inner.check_outputs, *topics)

    def generation(self, queue: MessageQueue) -> int | None:
        """Return a queue's generation as ``mqmesh.PushConsumer.generation`` does."""
        return self._inner.generation(queue)

    @property
    def failures(self) -> int:
        """Failed calls of listeners, from ``mqmesh.PushConsumer.failures``."""
        return self._inner.failures
