"""Users' programs with redis-py: streams."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Final

from orders import BATCH, TOPIC, Order

GROUP: Final = "peers"
READ_MOST: Final = 100
CONNECTIONS: Final = 16


class Redis:
    """A Redis stream, written by pipelines of XADD and read by XREAD."""

    def __init__(self, address: str, reads: bool, topics: list[str]) -> None:
        import redis

        self.first_message_s = 0.0
        self._redis = redis.Redis(unix_socket_path=address)
        self._batch: list[Order] = []

    def send_batch(self, orders: list[Order]) -> None:
        """See ``Client``; redis-py waits for a pipeline's answers."""
        pipeline = self._redis.pipeline(transaction=False)
        for order in orders:
            pipeline.xadd(TOPIC, _fields(order))
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
        self._redis.xadd(TOPIC, _fields(order))

    def send_soon(self, order: Order, topic: str) -> None:
        """See ``Client``; redis-py has nothing that does not wait, but pipelines."""
        self._redis.xadd(topic, _fields(order))

    def sender_of_thread(self) -> Callable[[Order], None]:
        """See ``Client``; each thread has a connection of the pool."""
        return self.send_sync

    def drain(self, count: int, every_field: bool) -> None:
        """See ``Client``."""
        last, seen, total = b"0", 0, 0
        while seen < count:
            answer = self._redis.xread({TOPIC: last}, count=BATCH, block=10_000)
            entries = _entries(answer)
            self.first_message_s = self.first_message_s or time.monotonic()
            for entry_id, fields in entries:
                total += len(fields[b"body"])
                if every_field:
                    total += len(entry_id) + sum(map(len, fields.values()))
            seen += len(entries)
            last = entries[-1][0]

    def listen(self, count: int, got: Callable[[bytes], None]) -> None:
        """See ``Client``."""
        import redis

        with suppress(redis.ResponseError):  # it is there
            self._redis.xgroup_create(TOPIC, GROUP, "0", mkstream=True)
        seen = 0
        while seen < count:
            answer = self._redis.xreadgroup(GROUP, "one", {TOPIC: ">"}, READ_MOST, block=10_000)
            entries = _entries(answer)
            for entry_id, fields in entries:
                got(fields[b"body"])
                self._redis.xack(TOPIC, GROUP, entry_id)
            seen += len(entries)

    def close(self) -> None:
        """Closes the connection."""
        self._redis.close()


class RedisAsyncio:
    """redis-py for asyncio."""

    def __init__(self, address: str) -> None:
        self.first_message_s = 0.0
        self._address = address

    async def open(self, *, reads: bool) -> None:
        """See ``AsyncioClient``."""
        from redis import asyncio as redis

        # Without a limit a gather of 1,000 would open 1,000 connections.
        self._redis = redis.Redis(
            connection_pool=redis.BlockingConnectionPool(
                CONNECTIONS, connection_class=redis.UnixDomainSocketConnection, path=self._address
            )
        )
        if reads:
            with suppress(redis.ResponseError):  # it is there
                await self._redis.xgroup_create(TOPIC, GROUP, "0", mkstream=True)

    async def send(self, order: Order) -> None:
        """See ``AsyncioClient``."""
        await self._redis.xadd(TOPIC, _fields(order))

    async def bodies(self) -> AsyncIterator[bytes]:
        """See ``AsyncioClient``."""
        while True:
            answer = await self._redis.xreadgroup(
                GROUP, "one", {TOPIC: ">"}, READ_MOST, block=10_000
            )
            for entry_id, fields in _entries(answer):
                yield fields[b"body"]
                await self._redis.xack(TOPIC, GROUP, entry_id)

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.aclose()


def _entries(answer: Any) -> Any:
    """Returns the entries of the one stream in an answer."""
    if not answer:
        raise RuntimeError("no message came for ten seconds")
    found = next(iter(answer.values())) if isinstance(answer, dict) else answer[0][1]
    return found[0] if isinstance(answer, dict) else found


def _fields(order: Order) -> dict[Any, Any]:
    fields: dict[Any, Any] = {"body": order.body}
    if order.tag:
        fields["tag"] = order.tag
        fields["key"] = order.key
        fields.update(order.properties or {})
    return fields
