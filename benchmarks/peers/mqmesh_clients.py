"""Users' programs with mqmesh's SDK."""

import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from orders import BATCH, TOPIC, WINDOW, Order


class Mqmesh:
    """mqmesh's SDK."""

    def __init__(self, address: str, reads: bool, topics: list[str]) -> None:
        from mqmesh import Message, Producer

        self.first_message_s = 0.0
        self._address = address
        self._message = Message
        self._waiting: deque[Any] = deque()
        self._producer: Any = None if reads else Producer("peers", namesrv_addr=address)
        if self._producer is not None:
            self._producer.start()
            for topic in topics:
                self._producer.fetch_publish_queues(topic, timeout_ms=10_000)

    def _make(self, order: Order, topic: str = TOPIC) -> Any:
        if not order.tag:
            return self._message(topic, order.body)
        return self._message(topic, order.body, order.tag, (order.key,), order.properties)

    def send_batch(self, orders: list[Order]) -> None:
        """See ``Client``."""
        if len(self._waiting) >= WINDOW:
            self._waiting.popleft().result(60)
        make = self._make
        self._waiting.append(self._producer.send_batch_async([make(one) for one in orders]))

    def send(self, order: Order) -> None:
        """See ``Client``."""
        self.send_soon(order, TOPIC)

    def send_soon(self, order: Order, topic: str) -> None:
        """See ``Client``."""
        if len(self._waiting) >= WINDOW * BATCH:
            for _ in range(BATCH):
                self._waiting.popleft().result(60)
        self._waiting.append(self._producer.send_async(self._make(order, topic)))

    def wait_sent(self) -> None:
        """See ``Client``."""
        while self._waiting:
            self._waiting.popleft().result(60)

    def send_sync(self, order: Order) -> None:
        """See ``Client``."""
        self._producer.send(self._make(order))

    def sender_of_thread(self) -> Callable[[Order], None]:
        """See ``Client``; threads share a producer."""
        return self.send_sync

    def drain(self, count: int, every_field: bool) -> None:
        """See ``Client``."""
        from mqmesh import ConsumeResult

        done, lock, seen, read_bytes = threading.Event(), threading.Lock(), 0, 0

        def listen(messages: Any) -> Any:
            nonlocal seen, read_bytes
            if not self.first_message_s:
                self.first_message_s = time.monotonic()
            total = 0
            if every_field:
                for message in messages:
                    total += len(message.body) + len(message.message_id)
                    if message.tag is not None:
                        total += len(message.tag) + len(message.keys[0])
                        total += len(message.properties or ())
            else:
                for message in messages:
                    total += len(message.body)
            with lock:
                seen += len(messages)
                read_bytes += total
                if seen >= count:
                    done.set()
            return ConsumeResult.SUCCESS

        with self._consumer(listen, 1_024):
            if not done.wait(300):
                raise RuntimeError(f"{seen} of {count} messages came")

    def listen(self, count: int, got: Callable[[bytes], None]) -> None:
        """See ``Client``."""
        from mqmesh import ConsumeResult

        done, lock, seen = threading.Event(), threading.Lock(), 0

        def listen(messages: Any) -> Any:
            nonlocal seen
            with lock:
                for message in messages:
                    got(message.body)
                seen += len(messages)
                if seen >= count:
                    done.set()
            return ConsumeResult.SUCCESS

        with self._consumer(listen, 1):
            if not done.wait(300):
                raise RuntimeError(f"{seen} of {count} messages came")

    def _consumer(self, listen: Callable[[Any], Any], most: int) -> Any:
        from mqmesh import ConsumeFromWhere, PushConsumer

        consumer = PushConsumer(
            "peers",
            namesrv_addr=self._address,
            consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
            consume_message_batch_max_size=most,
        )
        consumer.subscribe(TOPIC, listener=listen)
        return consumer

    def close(self) -> None:
        """Leaves the cluster."""
        if self._producer is not None:
            self._producer.close()


class MqmeshAsyncio:
    """mqmesh's SDK for asyncio."""

    def __init__(self, address: str) -> None:
        self.first_message_s = 0.0
        self._address = address

    async def open(self, *, reads: bool) -> None:
        """See ``AsyncioClient``."""
        from mqmesh import ConsumeFromWhere, Message
        from mqmesh.aio import Producer, PullConsumer

        self._message = Message
        self._client: Any
        if reads:
            self._client = PullConsumer(
                "peers",
                namesrv_addr=self._address,
                consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
            )
            await self._client.subscribe(TOPIC)
        else:
            self._client = Producer("peers", namesrv_addr=self._address)
        await self._client.start()

    async def send(self, order: Order) -> None:
        """See ``AsyncioClient``."""
        message = self._message(TOPIC, order.body, order.tag, (order.key,), order.properties)
        await self._client.send(message)

    async def bodies(self) -> AsyncIterator[bytes]:
        """See ``AsyncioClient``."""
        async for message in self._client:
            yield message.body

    async def close(self) -> None:
        """Leaves the cluster."""
        await self._client.close()
