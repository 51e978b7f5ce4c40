"""A user's program with nats-py: JetStream. There is no blocking client in Python."""

import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

from orders import BATCH, TOPIC, WINDOW, Order

SUBJECTS: Final = [f"{TOPIC}.>"]


class Nats:
    """nats-py on a stream with all subjects."""

    def __init__(self, address: str) -> None:
        self.first_message_s = 0.0
        self._address = address
        self._waiting: deque[Any] = deque()

    async def open(self, *, reads: bool) -> None:
        """See ``AsyncioClient``."""
        import nats

        self._nats = await nats.connect(self._address)
        self._stream = self._nats.jetstream(publish_async_max_pending=2 * WINDOW * BATCH)
        await self._stream.add_stream(name=TOPIC, subjects=SUBJECTS)

    async def send(self, order: Order) -> None:
        """See ``AsyncioClient``."""
        await self._stream.publish(_subject(TOPIC), order.body, headers=_headers(order))

    async def send_soon(self, order: Order, topic: str) -> None:
        """See ``AsyncioClient``."""
        if len(self._waiting) >= WINDOW * BATCH:
            for _ in range(BATCH):
                await self._waiting.popleft()
        self._waiting.append(
            await self._stream.publish_async(_subject(topic), order.body, headers=_headers(order))
        )

    async def wait_sent(self) -> None:
        """See ``AsyncioClient``."""
        while self._waiting:
            await self._waiting.popleft()

    async def drain(self, count: int, every_field: bool) -> None:
        """See ``AsyncioClient``."""
        from nats.js.api import AckPolicy, ConsumerConfig

        config = ConsumerConfig(ack_policy=AckPolicy.ALL)
        found = await self._stream.pull_subscribe(_subject(TOPIC), "peers", config=config)
        seen = total = 0
        while seen < count:
            messages = await found.fetch(BATCH, timeout=10)
            self.first_message_s = self.first_message_s or time.monotonic()
            for message in messages:
                total += len(message.data)
                if every_field:
                    total += message.metadata.sequence.stream + len(message.headers or ())
            await messages[-1].ack()
            seen += len(messages)

    async def bodies(self) -> AsyncIterator[bytes]:
        """See ``AsyncioClient``."""
        found = await self._stream.subscribe(_subject(TOPIC), durable="peers", manual_ack=True)
        async for message in found.messages:
            yield message.data
            await message.ack()

    async def close(self) -> None:
        """Closes the connection."""
        await self._nats.close()


def _headers(order: Order) -> dict[str, str] | None:
    if not order.tag:
        return None
    return {"tag": order.tag, "key": order.key, **(order.properties or {})}


def _subject(topic: str) -> str:
    return f"{TOPIC}.{topic}"
