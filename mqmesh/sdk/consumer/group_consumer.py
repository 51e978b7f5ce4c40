"""The base of push and pull consumers: subscriptions, life, and reports."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Self

from mqmesh.errors import ClientClosed, MQMeshError
from mqmesh.message import check_consumer_group
from mqmesh.metrics import MetricBoard, Readings
from mqmesh.sdk.client.options import ClientOptions
from mqmesh.sdk.consumer.assigned import S
from mqmesh.sdk.consumer.consumer_engine import ConsumerEngine
from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector
from mqmesh.sdk.consumer.fetching.pull_loop import PullCounters
from mqmesh.sdk.consumer.rebalance import AllocateStrategy, allocate_strategy
from mqmesh.sdk.producer.producer import Producer, trace_producer
from mqmesh.transport.interface import Transport


class GroupConsumer(ABC, Generic[S]):
    """Member of a consumer group.

    Args:
        group: Consumer group.
        client: Settings of the connection.
        strategy: Divides queues among members, itself or by its name.
        transport: The world; None for ZeroMQ.

    Raises:
        InvalidArgument: The group's name is illegal, or there is no such strategy.
    """

    _engine: ConsumerEngine[S]
    _metrics: MetricBoard

    def __init__(
        self,
        group: str,
        client: ClientOptions,
        strategy: AllocateStrategy | str,
        transport: Transport | None,
    ) -> None:
        self.group = check_consumer_group(group)
        self._client = client
        self._strategy = allocate_strategy(strategy)
        self._transport = transport
        self._subscribed: dict[str, MessageSelector] = {}
        self._state = "new"

    @abstractmethod
    def _make_parts(self) -> None:
        """Makes all that a start uses up."""

    @abstractmethod
    def start(self) -> None:
        """Connects, and waits until the first queues are there."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def unsubscribe(self, topic: str) -> None:
        """Takes no part in a topic any more.

        Raises:
            ClientClosed: After ``close``.
        """
        self._do(lambda: self._engine.unsubscribe(topic))
        self._subscribed.pop(topic, None)

    @property
    def client_id(self) -> str:
        """Id of this member at brokers."""
        return self._engine.client.client_id

    @property
    def filter_errors(self) -> dict[str, MQMeshError]:
        """Errors of filters in Python that do not work at present, by topic; their queues wait."""
        return self._engine.filters.errors(self._engine.assigned.copy())

    @property
    def counters(self) -> PullCounters:
        """Counters of the pulls so far."""
        return self._engine.counters

    def metrics(self) -> Readings:
        """Return the metrics of this consumer; from any thread.

        ``consumer.metrics().number("cached_messages", "orders")``; all are in
        docs/reference/metrics.md.
        """
        return Readings(self._metrics.read())

    def _renew(self) -> None:
        """Makes a closed consumer a new one."""
        if self._state == "closing":
            raise ClientClosed("the consumer is still being closed; start it again later")
        if self._state == "closed":
            self._engine.client.check_replaceable("consumer")
            self._make_parts()
            self._state = "new"

    def _check_not_closed(self) -> None:
        if self._state in ("closing", "closed"):
            raise ClientClosed("the consumer was closed")

    def _do(self, action: Callable[[], None]) -> None:
        self._check_not_closed()
        if self._state == "new":
            action()
        else:
            self._engine.client.post(action)

    def _make_trace_producer(self, group: str) -> Producer:
        return trace_producer(group, self._client)
