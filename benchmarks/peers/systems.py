"""A user's program for each system: mqmesh, Redis Streams (redis-py), Kafka (confluent-kafka).

All of them acknowledge from the page cache and sync once in a while, which is the default of mqmesh
and of Kafka, and ``appendfsync everysec`` of Redis.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from orders import BATCH, QUEUES, TOPIC, Order

WINDOW = 32
"""Batches on their way."""


class Client(Protocol):
    """What the measured loops ask of a system.

    Attributes:
        first_message_s: When a reader got its first message (monotonic clock), 0.0 before.
    """

    first_message_s: float

    def send_batch(self, orders: list[Order]) -> None:
        """Sends an explicit batch; may wait while ``WINDOW`` of them are on their way."""

    def send(self, order: Order) -> None:
        """Sends one message; does not wait for its outcome."""

    def wait_sent(self) -> None:
        """Returns when everything was acknowledged.

        Raises:
            RuntimeError: Something was not.
        """

    def send_sync(self, order: Order) -> None:
        """Sends one message and waits for its acknowledgement."""

    def drain(self, count: int, every_field: bool) -> None:
        """Reads so many messages from the beginning of the topic."""


class Mqmesh:
    """mqmesh's SDK."""

    def __init__(self, address: str, reads: bool) -> None:
        from mqmesh import Message, Producer

        self.first_message_s = 0.0
        self._address = address
        self._message = Message
        self._waiting: deque[Any] = deque()
        self._producer = None if reads else Producer("peers", namesrv_addr=address)
        if self._producer is not None:
            self._producer.start()
            self._producer.fetch_publish_queues(TOPIC, timeout_ms=10_000)

    def _make(self, order: Order) -> Any:
        if not order.tag:
            return self._message(TOPIC, order.body)
        return self._message(TOPIC, order.body, order.tag, (order.key,), order.properties)

    def send_batch(self, orders: list[Order]) -> None:
        """See ``Client``."""
        if len(self._waiting) >= WINDOW:
            self._waiting.popleft().result(60)
        make = self._make
        self._waiting.append(self._producer.send_batch_async([make(one) for one in orders]))

    def send(self, order: Order) -> None:
        """See ``Client``."""
        if len(self._waiting) >= WINDOW * BATCH:
            for _ in range(BATCH):
                self._waiting.popleft().result(60)
        self._waiting.append(self._producer.send_async(self._make(order)))

    def wait_sent(self) -> None:
        """See ``Client``."""
        while self._waiting:
            self._waiting.popleft().result(60)

    def send_sync(self, order: Order) -> None:
        """See ``Client``."""
        self._producer.send(self._make(order))

    def drain(self, count: int, every_field: bool) -> None:
        """See ``Client``."""
        from mqmesh import ConsumeFromWhere, ConsumeResult, PushConsumer

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

        consumer = PushConsumer(
            "peers",
            namesrv_addr=self._address,
            consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
            consume_message_batch_max_size=1_024,
        )
        consumer.subscribe(TOPIC, listener=listen)
        with consumer:
            if not done.wait(300):
                raise RuntimeError(f"{seen} of {count} messages came")

    def close(self) -> None:
        """Leaves the cluster."""
        if self._producer is not None:
            self._producer.close()


class Redis:
    """A Redis stream, written by pipelines of XADD and read by XREAD."""

    def __init__(self, address: str, reads: bool) -> None:
        import redis

        self.first_message_s = 0.0
        self._redis = redis.Redis(unix_socket_path=address)
        self._batch: list[Order] = []

    @staticmethod
    def _fields(order: Order) -> dict[Any, Any]:
        fields: dict[Any, Any] = {"body": order.body}
        if order.tag:
            fields["tag"] = order.tag
            fields["key"] = order.key
            fields.update(order.properties or {})
        return fields

    def send_batch(self, orders: list[Order]) -> None:
        """See ``Client``; redis-py waits for a pipeline's answers."""
        pipeline = self._redis.pipeline(transaction=False)
        for order in orders:
            pipeline.xadd(TOPIC, self._fields(order))
        if len(pipeline.execute()) != len(orders):
            raise RuntimeError("an XADD got no answer")

    def send(self, order: Order) -> None:
        """See ``Client``; without a client that makes batches by itself, users do."""
        self._batch.append(order)
        if len(self._batch) >= BATCH:
            self.wait_sent()

    def wait_sent(self) -> None:
        """See ``Client``."""
        batch, self._batch = self._batch, []
        if batch:
            self.send_batch(batch)

    def send_sync(self, order: Order) -> None:
        """See ``Client``."""
        self._redis.xadd(TOPIC, self._fields(order))

    def drain(self, count: int, every_field: bool) -> None:
        """See ``Client``."""
        last, seen, total = b"0", 0, 0
        while seen < count:
            answer = self._redis.xread({TOPIC: last}, count=BATCH, block=10_000)
            if not answer:
                raise RuntimeError(f"{seen} of {count} messages came")
            self.first_message_s = self.first_message_s or time.monotonic()
            entries = next(iter(answer.values()))[0] if isinstance(answer, dict) else answer[0][1]
            for entry_id, fields in entries:
                total += len(fields[b"body"])
                if every_field:
                    total += len(entry_id) + sum(map(len, fields.values()))
            seen += len(entries)
            last = entries[-1][0]

    def close(self) -> None:
        """Closes the connection."""
        self._redis.close()


class Kafka:
    """confluent-kafka (librdkafka) with its defaults, which make batches by themselves."""

    def __init__(self, address: str, reads: bool) -> None:
        from confluent_kafka import Producer

        self.first_message_s = 0.0
        self._address = address
        self._failed = 0
        self._producer = None
        if not reads:
            settings = {"bootstrap.servers": address, "queue.buffering.max.messages": 1_000_000}
            self._producer = Producer(settings)
            self._producer.list_topics(TOPIC, timeout=10)

    def _acknowledged(self, error: Any, _: Any) -> None:
        self._failed += error is not None

    def send(self, order: Order) -> None:
        """See ``Client``."""
        if order.tag:
            headers = {"tag": order.tag, **(order.properties or {})}
            arguments: dict[str, Any] = {"key": order.key, "headers": headers}
        else:
            arguments = {}
        while True:
            try:
                self._producer.produce(
                    TOPIC, order.body, on_delivery=self._acknowledged, **arguments
                )
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

    def drain(self, count: int, every_field: bool) -> None:
        """See ``Client``."""
        from confluent_kafka import Consumer

        settings = {
            "bootstrap.servers": self._address,
            "group.id": "peers",
            "auto.offset.reset": "earliest",
        }
        consumer = Consumer(settings)
        consumer.subscribe([TOPIC])
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

    def close(self) -> None:
        """Nothing is left to do: everything was flushed."""


SYSTEMS: dict[str, type[Mqmesh] | type[Redis] | type[Kafka]] = {
    "mqmesh": Mqmesh,
    "redis": Redis,
    "kafka": Kafka,
}


@contextmanager
def open_client(system: str, address: str, *, reads: bool) -> Iterator[Client]:
    """A connected client of a system, closed at the end."""
    client = SYSTEMS[system](address, reads)
    try:
        yield client
    finally:
        client.close()


__all__ = ["QUEUES", "SYSTEMS", "WINDOW", "Client", "open_client"]
