"""The consumers of a FastStream broker: one for each group, whatever its topics."""

from collections.abc import Callable

from mqmesh.sdk.aio.consumer import PushConsumer
from mqmesh.sdk.app.subscriptions import Subscriptions, TypedSubscription
from mqmesh.sdk.consumer.consumer_options import PushConsumerKeywords

MakeConsumer = Callable[[str, PushConsumerKeywords], PushConsumer]


class GroupConsumers:
    """Consumes what subscribers want.

    Subscribers join before ``start``, so that a group's consumer has all of its topics from the
    beginning: all members of a group must have the same. One that joins later, since a program
    started it by itself, is added.

    Args:
        make: Makes the consumer of a group.
    """

    def __init__(self, make: MakeConsumer) -> None:
        self._make = make
        self._wanted = Subscriptions()
        self._consumers: dict[str, PushConsumer] = {}
        self._is_started = False

    async def join(self, subscription: TypedSubscription) -> None:
        """A subscriber is there.

        Raises:
            InvalidArgument: As ``Subscriptions.add``.
        """
        self._wanted.add(subscription)
        if not self._is_started:
            return
        consumer = self._consumers.get(subscription.group)
        if consumer is None:
            await self._open(subscription.group, [subscription])
        else:
            await self._subscribe(consumer, subscription)

    async def leave(self, group: str, topic: str) -> None:
        """A subscriber is there no more; the last one of a group takes its consumer along."""
        self._wanted.remove(group, topic)
        consumer = self._consumers.get(group)
        if consumer is None or consumer.closed:
            return
        if group in self._wanted.by_group():
            await consumer.unsubscribe(topic)
        else:
            del self._consumers[group]
            await consumer.close()

    async def start(self) -> None:
        """Connects the consumers; handlers are called from now on.

        Raises:
            MQMeshError: As for ``PushConsumer.start``; nothing is left running.
        """
        self._is_started = True
        try:
            for group, subscriptions in list(self._wanted.by_group().items()):
                await self._open(group, subscriptions)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends the calls that run, commits and disconnects."""
        self._is_started = False
        while self._consumers:
            await self._consumers.popitem()[1].close()

    async def _open(self, group: str, subscriptions: list[TypedSubscription]) -> None:
        consumer = self._consumers[group] = self._make(group, subscriptions[0].options)
        for one in subscriptions:
            await self._subscribe(consumer, one)
        await consumer.start()

    async def _subscribe(self, consumer: PushConsumer, one: TypedSubscription) -> None:
        await consumer.subscribe(one.topic, one.expression, listener=one.listener)
