"""Users' programs with confluent-kafka (librdkafka), and with aiokafka."""

import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from orders import TOPIC, Order


class Kafka:
    """confluent-kafka (librdkafka) with its defaults, which make batches by themselves."""

    def __init__(self, address: str, reads: bool, topics: list[str]) -> None:
        from confluent_kafka import Producer

        self.first_message_s = 0.0
        self._address = address
        self._failed = 0
        self._producer: Any = None
        self._poller: threading.Thread | None = None
        if not reads:
            settings = {
                "bootstrap.servers": address,
                "queue.buffering.max.messages": 1_000_000,
                "acks": "1",
            }
            self._producer = Producer(settings)
            for topic in topics:
                self._producer.list_topics(topic, timeout=10)

    def _acknowledged(self, error: Any, _: Any) -> None:
        self._failed += error is not None

    def send(self, order: Order) -> None:
        """See ``Client``."""
        self._produce(order, TOPIC, self._acknowledged)

    def send_soon(self, order: Order, topic: str) -> None:
        """See ``Client``."""
        self._produce(order, topic, self._acknowledged)
        self._producer.poll(0)

    def _produce(self, order: Order, topic: str, done: Callable[[Any, Any], None]) -> None:
        arguments: dict[str, Any] = {}
        if order.tag:
            headers = {"tag": order.tag, **(order.properties or {})}
            arguments = {"key": order.key, "headers": headers}
        while True:
            try:
                self._producer.produce(topic, order.body, on_delivery=done, **arguments)
                return
            except BufferError:
                self._producer.poll(0.01)

    def send_batch(self, orders: list[Order]) -> None:
        """See ``Client``; the library has no explicit batches, so messages join its own."""
        for order in orders:
            self.send(order)
        self._producer.poll(0)

    def wait_sent(self) -> None:
        """See ``Client``."""
        left = self._producer.flush(60)
        if left or self._failed:
            raise RuntimeError(f"{left} messages without an outcome, {self._failed} failed")

    def send_sync(self, order: Order) -> None:
        """See ``Client``."""
        self.send(order)
        self.wait_sent()

    def sender_of_thread(self) -> Callable[[Order], None]:
        """See ``Client``; a thread of its own waits for outcomes, since ``flush`` waits for all."""
        if self._poller is None:
            self._poller = threading.Thread(target=self._poll, daemon=True)
            self._poller.start()
        done = threading.Event()

        def acknowledged(error: Any, _: Any) -> None:
            self._acknowledged(error, _)
            done.set()

        def send(order: Order) -> None:
            done.clear()
            self._produce(order, TOPIC, acknowledged)
            if not done.wait(60):
                raise RuntimeError("no outcome for 60 s")

        return send

    def _poll(self) -> None:
        while True:
            self._producer.poll(1.0)

    def drain(self, count: int, every_field: bool) -> None:
        """See ``Client``."""
        consumer = self._consumer()
        seen, total, deadline_s = 0, 0, time.monotonic() + 300
        while seen < count and time.monotonic() < deadline_s:
            messages = consumer.consume(1_024, timeout=1.0)
            if messages and not self.first_message_s:
                self.first_message_s = time.monotonic()
            for message in messages:
                if message.error():
                    raise RuntimeError(str(message.error()))
                total += len(message.value())
                if every_field:
                    total += message.partition() + message.offset()
                    total += len(message.key() or b"") + len(message.headers() or ())
            seen += len(messages)
        consumer.close()
        if seen < count:
            raise RuntimeError(f"{seen} of {count} messages came")

    def listen(self, count: int, got: Callable[[bytes], None]) -> None:
        """See ``Client``; offsets are committed each five seconds, the library's default."""
        consumer = self._consumer()
        for _ in range(count):
            message = consumer.poll(30.0)
            if message is None or message.error():
                raise RuntimeError("no message came for 30 s" if not message else message.error())
            got(message.value())
        consumer.close()

    def _consumer(self) -> Any:
        from confluent_kafka import Consumer

        consumer = Consumer(
            {
                "bootstrap.servers": self._address,
                "group.id": "peers",
                "auto.offset.reset": "earliest",
            }
        )
        consumer.subscribe([TOPIC])
        return consumer

    def close(self) -> None:
        """Nothing is left to do: everything was flushed."""


class KafkaAsyncio:
    """aiokafka."""

    def __init__(self, address: str) -> None:
        self.first_message_s = 0.0
        self._address = address

    async def open(self, *, reads: bool) -> None:
        """See ``AsyncioClient``."""
        import aiokafka

        self._client: Any
        if reads:
            self._client = aiokafka.AIOKafkaConsumer(
                TOPIC,
                bootstrap_servers=self._address,
                group_id="peers",
                auto_offset_reset="earliest",
            )
        else:
            self._client = aiokafka.AIOKafkaProducer(bootstrap_servers=self._address, acks=1)
        await self._client.start()

    async def send(self, order: Order) -> None:
        """See ``AsyncioClient``."""
        headers = {"tag": order.tag, **(order.properties or {})}
        await self._client.send_and_wait(
            TOPIC,
            order.body,
            key=order.key.encode(),
            headers=[(name, value.encode()) for name, value in headers.items()],
        )

    async def bodies(self) -> AsyncIterator[bytes]:
        """See ``AsyncioClient``."""
        async for message in self._client:
            yield message.value

    async def close(self) -> None:
        """Leaves the cluster."""
        await self._client.stop()
