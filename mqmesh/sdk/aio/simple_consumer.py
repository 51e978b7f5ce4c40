"""The simple consumer for asyncio programs."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from mqmesh.errors import MQMeshError
from mqmesh.message import StoredMessage
from mqmesh.protocol.delivery import BY_SCHEDULE, SettleAction
from mqmesh.sdk.aio.completions import check_loop
from mqmesh.sdk.aio.processing import Processing
from mqmesh.sdk.aio.signatures import signed_as
from mqmesh.sdk.consumer.fetching.message_selector import Wanted
from mqmesh.sdk.consumer.receiving.receive_source import Demand
from mqmesh.sdk.consumer.simple_consumer import SimpleConsumer as BlockingSimpleConsumer
from mqmesh.sdk.consumer.simple_consumer import check_delay, check_invisible, refusal_of

_log = logging.getLogger(__name__)


class _InnerSimpleConsumer(BlockingSimpleConsumer):
    """A simple consumer that wakes an asyncio loop."""

    def attach(self, on_arrival: Callable[[], None]) -> None:
        """Start, and call back in the client loop whenever something came."""
        super().start()
        self._engine.on_arrival = on_arrival

    def demand(self, max_messages: int, invisible_ms: int | None, wait_ms: int) -> Demand:
        """Check the arguments of a receive."""
        return self._demand(max_messages, invisible_ms, wait_ms)

    def look(self, caller: object, demand: Demand) -> list[StoredMessage] | None:
        """Return messages; none once the time is over; None to look again after a pause."""
        return self._look(caller, demand)

    def pause_s(self, demand: Demand) -> float:
        """Return how long to wait at most before the next look."""
        return self._pause_ms(demand) / 1_000

    def done(self, caller: object) -> None:
        """Note that a caller waits no more."""
        self._engine.done(caller)

    def settle_later(
        self,
        messages: list[StoredMessage],
        action: SettleAction,
        delay_ms: int = BY_SCHEDULE,
        reason: str = "",
    ) -> "Future[None]":
        """Report on messages, without waiting."""
        return self._settle_later(messages, action, delay_ms, reason)


class SimpleConsumer:
    """Simple consumer for coroutines; names and meaning as in ``mqmesh.SimpleConsumer``::

        async with SimpleConsumer("billing") as consumer:
            await consumer.subscribe("orders")
            for message in await consumer.receive():
                await bill(message)
                await consumer.ack(message)

    Args:
        group, namesrv_addr, credentials, namespace, client, transport, options: As for
            ``mqmesh.SimpleConsumer``.
    """

    @signed_as(BlockingSimpleConsumer.__init__)
    def __init__(self, group: str, **options: Any) -> None:
        self._inner: _InnerSimpleConsumer = _InnerSimpleConsumer(group, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived = asyncio.Event()

    async def start(self) -> None:
        """Start as ``mqmesh.SimpleConsumer.start`` does, in the running event loop until ``close``.

        Raises:
            InvalidArgument: It runs in another event loop.
            ClientClosed, TooManyOpenFiles: As there.
        """
        check_loop(self._loop)
        if self._loop is None:
            self._arrived = asyncio.Event()
            self._loop = asyncio.get_running_loop()
            try:
                self._inner.attach(self._wake)
            except Exception:
                self._loop = None
                raise

    async def close(self) -> None:
        """Returns messages that are not settled; from any event loop."""
        loop, self._loop = self._loop, None
        await asyncio.to_thread(self._inner.close)
        if loop is not None and loop is asyncio.get_running_loop():
            self._arrived.set()  # waiting receives find the consumer closed

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def client_id(self) -> str:
        """Id of this member at brokers."""
        return self._inner.client_id

    async def subscribe(self, topic: str, expression: Wanted = "*") -> None:
        """Subscribe as ``mqmesh.SimpleConsumer.subscribe`` does."""
        check_loop(self._loop)
        self._inner.subscribe(topic, expression)

    async def unsubscribe(self, topic: str) -> None:
        """Unsubscribe as ``mqmesh.SimpleConsumer.unsubscribe`` does."""
        check_loop(self._loop)
        self._inner.unsubscribe(topic)

    async def receive(
        self,
        max_messages: int = 32,
        invisible_ms: int | None = None,
        wait_ms: int = 15_000,
    ) -> list[StoredMessage]:
        """Receive as ``mqmesh.SimpleConsumer.receive`` does."""
        check_loop(self._loop)
        demand, caller = self._inner.demand(max_messages, invisible_ms, wait_ms), object()
        try:
            self._arrived.clear()
            while (found := self._inner.look(caller, demand)) is None:
                try:
                    async with asyncio.timeout(self._inner.pause_s(demand)):
                        await self._arrived.wait()
                except TimeoutError:
                    pass
                self._arrived.clear()
            return found
        finally:
            self._inner.done(caller)

    async def ack(self, message: StoredMessage) -> None:
        """Acknowledge as ``mqmesh.SimpleConsumer.ack`` does; many at once go together."""
        await self._settle([message], SettleAction.ACK)

    async def ack_many(self, messages: Iterable[StoredMessage]) -> None:
        """Acknowledge as ``mqmesh.SimpleConsumer.ack_many`` does."""
        await self._settle(list(messages), SettleAction.ACK)

    async def nack(
        self, message: StoredMessage, delay_ms: int | None = None, reason: str = ""
    ) -> None:
        """Refuse as ``mqmesh.SimpleConsumer.nack`` does."""
        await self._settle([message], SettleAction.NACK, check_delay(delay_ms), reason)

    async def reject(self, message: StoredMessage, reason: str = "") -> None:
        """Reject as ``mqmesh.SimpleConsumer.reject`` does."""
        await self._settle([message], SettleAction.REJECT, reason=reason)

    async def extend(self, message: StoredMessage, invisible_ms: int) -> None:
        """Extend as ``mqmesh.SimpleConsumer.extend`` does."""
        check_invisible(invisible_ms)
        await self._settle([message], SettleAction.EXTEND, invisible_ms)

    def processing(self, messages: Sequence[StoredMessage]) -> Processing:
        """Return a block, for ``async with``, as ``mqmesh.SimpleConsumer.processing`` does."""
        check_loop(self._loop)
        received = list(messages)

        async def refuse(error: Exception) -> None:
            action, reason = refusal_of(received, error)
            try:
                await self._settle(received, action, reason=reason)
            except MQMeshError as problem:
                _log.info("messages that were not processed come again later: %s", problem)

        return Processing(self._inner.processing(received), refuse)

    async def _settle(
        self,
        messages: list[StoredMessage],
        action: SettleAction,
        delay_ms: int = BY_SCHEDULE,
        reason: str = "",
    ) -> None:
        check_loop(self._loop)
        await asyncio.wrap_future(self._inner.settle_later(messages, action, delay_ms, reason))

    def _wake(self) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._arrived.set)
