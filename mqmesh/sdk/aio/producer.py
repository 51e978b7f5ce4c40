"""The producer for asyncio programs."""

import asyncio
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Self, Unpack

from mqmesh.errors import MQMeshError
from mqmesh.message import Message, MessageQueue
from mqmesh.metrics import Readings
from mqmesh.sdk.aio.completions import AnswerReader, Completions
from mqmesh.sdk.aio.signatures import signed_as
from mqmesh.sdk.producer.producer import Producer as BlockingProducer
from mqmesh.sdk.producer.queue_selector import QueueChoice, SendChoice
from mqmesh.sdk.producer.send_result import SendResult


class Producer:
    """Producer for coroutines; names and meaning as in ``mqmesh.Producer``.

    Sends that are awaited side by side share batches by themselves. Cancelling a send does
    not take its message back: it may be stored all the same. A producer belongs to the event
    loop that it was started in.

    Args:
        group, namesrv_addr, credentials, namespace, client, transport, hooks, options: As for
            ``mqmesh.Producer``.
    """

    @signed_as(BlockingProducer.__init__)
    def __init__(self, group: str, **options: Any) -> None:
        self._inner = self._make(group, **options)
        self._completions: Completions | None = None
        self._reader: AnswerReader | None = None
        # Senders that wait, by topic, and the tasks that serve them.
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}

    def _make(self, group: str, **options: Any) -> BlockingProducer:
        return BlockingProducer(group, **options)

    async def start(self) -> None:
        """Connects, also once more after ``close``; further calls do nothing.

        Raises:
            ClientClosed, TooManyOpenFiles: As for ``mqmesh.Producer.start``.
            InvalidArgument: It runs in another event loop.
        """
        if self._completions is not None:
            self._completions.check_loop()
        loop = asyncio.get_running_loop()
        self._attach(loop)
        self._inner.start()
        if self._completions is None:
            self._lines, self._serving = {}, {}
            self._completions = Completions(loop)
            self._reader = AnswerReader(loop)
            self._inner.take_answers_by(self._reader.watch)

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Attach to an event loop, before the start in it."""

    async def close(self) -> None:
        """Waits a moment for sends without an outcome, then closes; from any event loop."""
        await asyncio.to_thread(self._inner.close)
        if self._reader is not None:
            self._reader.close()
        self._completions = self._reader = None

    @property
    def closed(self) -> bool:
        """True once closed, from ``mqmesh.Producer.closed``."""
        return self._inner.closed

    def metrics(self) -> Readings:
        """Return the metrics of ``mqmesh.Producer.metrics``."""
        return self._inner.metrics()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    def send(
        self, message: Message, **choice: Unpack[SendChoice]
    ) -> Coroutine[Any, Any, SendResult]:
        """Sends a message; arguments, result and errors as of ``mqmesh.Producer.send``.

        It is on its way once this is called, unless it must wait for a route or for room: then it
        is once the result is awaited, or a task.

        Returns:
            Its outcome, to be awaited, gathered, or made a task.
        """
        completions = self._completions
        if completions is None or asyncio.get_running_loop() is not completions.loop:
            completions = self._here()
        try:
            if self._must_wait(message):
                return self._send_in_line(message, **choice)
            sent = self._inner.send_async(message, **choice)
        except MQMeshError as error:
            return completions.failed(error)
        return completions.wait_for(sent)

    async def _send_in_line(self, message: Message, **choice: Unpack[SendChoice]) -> SendResult:
        await self._stand_in_line(message.topic, choice.get("timeout_ms"))
        return await self._here().wait_for(self._inner.send_async(message, **choice))

    async def send_batch(
        self,
        messages: Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        priority: int | None = None,
        ttl_ms: int | None = None,
        timeout_ms: int | None = None,
    ) -> SendResult:
        """Sends messages as one batch; as ``mqmesh.Producer.send_batch``."""
        first = messages[0] if isinstance(messages, Sequence) and messages else None
        await self._ready(first, timeout_ms)
        future = self._inner.send_batch_async(
            messages, queue=queue, priority=priority, ttl_ms=ttl_ms, timeout_ms=timeout_ms
        )
        return await self._here().wait_for(future)

    async def send_oneway(self, message: Message, **choice: Unpack[QueueChoice]) -> None:
        """Sends a message and never reports its outcome."""
        await self._ready(message)
        self._inner.send_oneway(message, **choice)

    async def cancel_delayed(self, sent: SendResult, *, timeout_ms: int | None = None) -> None:
        """Cancels a delayed message; arguments and errors as of ``mqmesh``'s."""
        await asyncio.to_thread(self._inner.cancel_delayed, sent, timeout_ms=timeout_ms)

    async def request(
        self, message: Message, timeout_ms: int | None = None, **choice: Unpack[QueueChoice]
    ) -> Message:
        """Sends a request and awaits the reply; arguments, result and errors as of ``mqmesh``'s."""
        await self._ready(message, timeout_ms)
        future = self._inner.request_async(message, timeout_ms=timeout_ms, **choice)
        return await asyncio.wrap_future(future)

    async def reply(
        self,
        request: Message,
        body: bytes | bytearray | memoryview,
        *,
        tag: str | None = None,
        keys: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        timeout_ms: int | None = None,
    ) -> bool:
        """Replies to a consumed request; arguments, result and errors as of ``mqmesh``'s."""
        future = self._inner.reply_async(
            request, body, tag=tag, keys=keys, properties=properties, timeout_ms=timeout_ms
        )
        return await asyncio.wrap_future(future)

    @property
    def pending_requests(self) -> int:
        """Requests that wait for their replies, from ``mqmesh.Producer.pending_requests``."""
        return self._inner.pending_requests

    @property
    def late_replies(self) -> int:
        """Replies that came too late, from ``mqmesh.Producer.late_replies``."""
        return self._inner.late_replies

    async def fetch_publish_queues(
        self, topic: str, *, timeout_ms: int | None = None
    ) -> list[MessageQueue]:
        """Return queues as ``mqmesh.Producer.fetch_publish_queues`` does."""
        work = self._inner.fetch_publish_queues
        return await asyncio.to_thread(work, topic, timeout_ms=timeout_ms)

    async def _ready(self, message: Message | None, timeout_ms: int | None = None) -> None:
        """Waits until a message can be sent at once."""
        if message is not None and self._must_wait(message):
            await self._stand_in_line(message.topic, timeout_ms)
        self._here()

    def _must_wait(self, message: Message) -> bool:
        # A send that may wait, for a first route or for room, must not hold up the event loop. An
        # object that is no message is left to the send, which raises the error.
        if not isinstance(message, Message) or not isinstance(message.topic, str):
            return False
        return message.topic in self._lines or not self._inner.can_send(message.topic)

    async def _stand_in_line(self, topic: str, timeout_ms: int | None) -> None:
        """Waits for a topic's route and for room; first come, first served.

        Raises:
            NoRoute, QueueFull: There was none in time; by default ``send_msg_timeout_ms``.
        """
        if timeout_ms is not None and (type(timeout_ms) is not int or timeout_ms < 1):
            return  # the send itself refuses what is no time
        line = self._lines.get(topic)
        if line is None:
            line = self._lines[topic] = deque()
            self._serving[topic] = asyncio.create_task(self._serve_line(topic, line))
        turn = asyncio.get_running_loop().create_future()
        line.append(turn)
        if timeout_ms is None:
            await turn
            return
        try:
            async with asyncio.timeout(timeout_ms / 1_000):
                await turn
        except TimeoutError:
            # It says what is missing, if there is still something.
            await asyncio.to_thread(self._inner.can_send, topic, wait=True, timeout_ms=1)

    async def _serve_line(self, topic: str, line: deque[asyncio.Future[None]]) -> None:
        try:
            while line:
                if line[0].done():  # its sender was cancelled
                    line.popleft()
                elif not self._inner.can_send(topic):
                    await asyncio.to_thread(self._inner.can_send, topic, wait=True)
                else:
                    line[0].set_result(None)
                    # It sends now; only afterwards no other sender can overtake it.
                    await asyncio.sleep(0)
                    line.popleft()
        except Exception as error:
            # The error is the same for all that wait.
            for turn in line:
                if not turn.done():
                    turn.set_exception(error)
        finally:
            if self._lines.get(topic) is line:
                del self._lines[topic], self._serving[topic]

    def _here(self) -> Completions:
        """Return the reporter of outcomes, if this is the event loop of ``start``.

        Raises:
            ClientClosed: It was not started.
            InvalidArgument: This is another event loop.
        """
        if self._completions is None:
            self._inner.can_send("")  # says that the producer is not started
        assert self._completions is not None, "nothing is sent before start"
        self._completions.check_loop()
        return self._completions
