"""Interface between the measured loops and a system, and the clients of all systems.

A system has a blocking client, one for asyncio, or both. Rows for which it has none are left
out. Libraries of a system are loaded when its client is made.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, Protocol

from beanstalkd_client import Beanstalkd
from kafka_clients import Kafka, KafkaAsyncio
from mqmesh_clients import Mqmesh, MqmeshAsyncio
from nats_client import Nats
from orders import Order
from redis_clients import Redis, RedisAsyncio


class Client(Protocol):
    """A blocking client.

    Attributes:
        first_message_s: When a reader got its first message (monotonic clock), 0.0 before.
    """

    first_message_s: float

    def send_batch(self, orders: list[Order]) -> None:
        """Sends an explicit batch; may wait while ``WINDOW`` of them are on their way."""

    def send(self, order: Order) -> None:
        """Sends one message as for throughput; does not wait for its outcome."""

    def send_soon(self, order: Order, topic: str) -> None:
        """Sends one message now; without waiting for its outcome, where the library can."""

    def wait_sent(self) -> None:
        """Returns when everything was acknowledged.

        Raises:
            RuntimeError: Something was not.
        """

    def send_sync(self, order: Order) -> None:
        """Sends one message and waits for its acknowledgement."""

    def sender_of_thread(self) -> Callable[[Order], None]:
        """Returns ``send_sync`` for one of many threads."""

    def drain(self, count: int, every_field: bool) -> None:
        """Reads so many messages from the beginning of the topic."""

    def listen(self, count: int, got: Callable[[bytes], None]) -> None:
        """Hands over the bodies of so many messages when they come, each acknowledged."""

    def close(self) -> None:
        """Leaves the system."""


class AsyncioClient(Protocol):
    """A client for coroutines; as ``Client``.

    Those with a blocking twin have ``send`` and ``bodies`` only.
    """

    first_message_s: float

    async def open(self, *, reads: bool) -> None:
        """Connects."""

    async def send(self, order: Order) -> None:
        """Sends one message and waits for its acknowledgement."""

    async def send_soon(self, order: Order, topic: str) -> None:
        """Sends one message; waits only while too many are on their way."""

    async def wait_sent(self) -> None:
        """Returns when everything was acknowledged."""

    async def drain(self, count: int, every_field: bool) -> None:
        """Reads so many messages from the beginning of the topic."""

    def bodies(self) -> AsyncIterator[bytes]:
        """Yields the bodies of messages when they come; each is acknowledged behind it."""

    async def close(self) -> None:
        """Leaves the system."""


BLOCKING: Final[Mapping[str, Callable[[str, bool, list[str]], Client]]] = {
    "mqmesh": Mqmesh,
    "redis": Redis,
    "kafka": Kafka,
    "beanstalkd": Beanstalkd,
}
ASYNCIO: Final[Mapping[str, Callable[[str], Any]]] = {
    "mqmesh": MqmeshAsyncio,
    "redis": RedisAsyncio,
    "kafka": KafkaAsyncio,
    "nats": Nats,
}
