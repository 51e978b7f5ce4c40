"""The producer for asyncio programs."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from mqmesh.message import Message, MessageQueue
from mqmesh.sdk.completions import Completions
from mqmesh.sdk.options import DEFAULT_NAMESRV, ClientOptions
from mqmesh.sdk.producer import Producer as BlockingProducer
from mqmesh.sdk.queue_selector import QueueSelector
from mqmesh.sdk.send_result import SendFuture, SendResult


class Producer:
    """Sends messages from coroutines; names and meaning as in ``mqmesh.Producer``.

    Sends that are awaited side by side share batches by themselves. Who cancels a send does
    not take its message back: it may be stored all the same. A producer belongs to the event
    loop that it was started in.

    Args:
        group, namesrv_addr, client, options: As for ``mqmesh.Producer``.
    """

    def __init__(
        self,
        group: str,
        *,
        namesrv_addr: str = DEFAULT_NAMESRV,
        client: ClientOptions | None = None,
        **options: Any,
    ) -> None:
        self._inner = BlockingProducer(group, namesrv_addr=namesrv_addr, client=client, **options)
        self._completions: Completions | None = None

    async def start(self) -> None:
        """Connects; further calls do nothing.

        Raises:
            ClientClosed: After ``close``.
        """
        self._inner.start()
        if self._completions is None:
            self._completions = Completions(asyncio.get_running_loop())

    async def close(self) -> None:
        """Waits a moment for sends without an outcome, then closes."""
        await asyncio.to_thread(self._inner.close)

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

    async def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        arg: Any = None,
        timeout_ms: int | None = None,
    ) -> SendResult:
        """Sends a message; arguments, result and errors as of ``mqmesh.Producer.send``."""
        waiting = await self._ready(message)
        future = self._inner.send_async(
            message, queue=queue, selector=selector, arg=arg, timeout_ms=timeout_ms
        )
        return await self._outcome(future, waiting)

    async def send_batch(
        self,
        messages: Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
    ) -> SendResult:
        """Sends messages as one batch; as ``mqmesh.Producer.send_batch``."""
        first = messages[0] if isinstance(messages, Sequence) and messages else None
        waiting = await self._ready(first)
        future = self._inner.send_batch_async(messages, queue=queue, timeout_ms=timeout_ms)
        return await self._outcome(future, waiting)

    async def send_oneway(self, message: Message, **choice: Any) -> None:
        """Sends a message and never tells what became of it."""
        await self._ready(message)
        self._inner.send_oneway(message, **choice)

    async def request(
        self, message: Message, timeout_ms: int | None = None, **choice: Any
    ) -> Message:
        """Asks and awaits the reply; arguments, result and errors as of ``mqmesh``'s."""
        await self._ready(message)
        future = self._inner.request_async(message, timeout_ms=timeout_ms, **choice)
        return await asyncio.wrap_future(future)

    async def reply(
        self, request: Message, body: bytes, *, timeout_ms: int | None = None, **fields: Any
    ) -> bool:
        """Replies to a consumed request; arguments, result and errors as of ``mqmesh``'s."""
        future = self._inner.reply_async(request, body, timeout_ms=timeout_ms, **fields)
        return await asyncio.wrap_future(future)

    async def fetch_publish_queues(self, topic: str) -> list[MessageQueue]:
        """The queues that messages of a topic may be sent to."""
        return await asyncio.to_thread(self._inner.fetch_publish_queues, topic)

    async def _ready(self, message: Message | None) -> asyncio.Future[None]:
        """Waits until a message can be sent at once; the future is for its outcome."""
        inner = self._inner
        # What is no message is left to the sender, who says what is wrong with it.
        if isinstance(message, Message) and isinstance(message.topic, str):
            # What may wait, for a first route or for room, must not hold up the event loop.
            while not inner.can_send_at_once(message.topic):
                await asyncio.to_thread(inner.wait_until_can_send, message.topic)
        elif self._completions is None:
            inner.can_send_at_once("")  # says that the producer is not started
        assert self._completions is not None, "nothing is sent before start"
        return self._completions.new_future()

    async def _outcome(self, future: SendFuture, waiting: asyncio.Future[None]) -> SendResult:
        completions = self._completions
        assert completions is not None
        future.add_done_callback(lambda _: completions.add(waiting))
        await waiting
        return future.result()
