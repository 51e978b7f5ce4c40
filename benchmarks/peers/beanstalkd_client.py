"""A user's program with greenstalk. A job of beanstalkd is bytes, with nothing beside them."""

import json
import time
from collections.abc import Callable
from typing import Any

from orders import TOPIC, Order


class Beanstalkd:
    """greenstalk on one tube a topic."""

    def __init__(self, address: str, reads: bool, topics: list[str]) -> None:
        self.first_message_s = 0.0
        self._address = address
        self._tube = TOPIC
        self._client = self._connect()

    def _connect(self) -> Any:
        import greenstalk

        return greenstalk.Client(self._address, encoding=None, use=TOPIC, watch=TOPIC)

    def send_sync(self, order: Order) -> None:
        """See ``Client``."""
        self._client.put(job_of(order))

    def send_soon(self, order: Order, topic: str) -> None:
        """See ``Client``; each call waits, and another tube is a request more."""
        if topic != self._tube:
            self._client.use(topic)
            self._tube = topic
        self._client.put(job_of(order))

    def send(self, order: Order) -> None:
        """See ``Client``; each call waits."""
        self._client.put(job_of(order))

    def send_batch(self, orders: list[Order]) -> None:
        """See ``Client``; there are no batches."""
        for order in orders:
            self._client.put(job_of(order))

    def wait_sent(self) -> None:
        """See ``Client``; nothing is on its way."""

    def sender_of_thread(self) -> Callable[[Order], None]:
        """See ``Client``; each thread has a connection of its own."""
        client = self._connect()
        return lambda order: client.put(job_of(order))

    def drain(self, count: int, every_field: bool) -> None:
        """See ``Client``."""
        total = 0
        for _ in range(count):
            job = self._client.reserve(10)
            self.first_message_s = self.first_message_s or time.monotonic()
            fields, body = parts_of(job.body)
            total += len(body)
            if every_field and fields:
                total += job.id + len(json.loads(fields))
            self._client.delete(job)

    def listen(self, count: int, got: Callable[[bytes], None]) -> None:
        """See ``Client``."""
        for _ in range(count):
            job = self._client.reserve(30)
            got(parts_of(job.body)[1])
            self._client.delete(job)

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()


def job_of(order: Order) -> bytes:
    """Returns fields as a line of JSON, and the body behind it."""
    if not order.tag:
        return b"\n" + order.body
    fields = {"tag": order.tag, "key": order.key, **(order.properties or {})}
    return json.dumps(fields).encode() + b"\n" + order.body


def parts_of(job: bytes) -> tuple[bytes, bytes]:
    """Returns the line of fields, and the body."""
    fields, _, body = job.partition(b"\n")
    return fields, body
