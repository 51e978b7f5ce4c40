"""The consumers of a FastStream broker: one for each group, with all topics of the group."""

from collections.abc import Callable, Mapping
from functools import partial

from faststream.message import AckStatus

from mqmesh.errors import InvalidArgument
from mqmesh.message import StoredMessage
from mqmesh.sdk.aio.consumer import PullConsumer, PushConsumer
from mqmesh.sdk.app.subscriptions import Subscriptions, TypedSubscription
from mqmesh.sdk.consumer.consumer_options import PushConsumerKeywords
from mqmesh.sdk.consumer.fetching.message_selector import Wanted
from mqmesh.sdk.faststream.message import Delivery

MakeConsumer = Callable[[str, PushConsumerKeywords], PushConsumer]
MakePuller = Callable[[str, PushConsumerKeywords], PullConsumer]


class Puller:
    """The messages of a subscriber without a function, one at a time.

    A message is done when the program gets the next one. The last one is done if the program has
    acknowledged it; else it is redelivered, because it may have been in work when the broker was
    stopped. Without ``auto_commit`` only acknowledged messages are done.

    Args:
        consumer: Consumer of this subscriber alone.
        auto_commit: Option ``auto_commit`` of the consumer.
    """

    def __init__(self, consumer: PullConsumer, *, auto_commit: bool) -> None:
        self._consumer = consumer
        self._auto_commit = auto_commit
        self._last: Delivery | None = None

    async def next(self) -> Delivery | None:
        """Awaits a message; None when the consumer was closed."""
        message = await anext(self._consumer, None)
        if message is None:
            self._last = None
        else:
            on_ack = None if self._auto_commit else partial(self._commit, message)
            self._last = Delivery(message, is_requested=True, on_ack=on_ack)
        return self._last

    async def _commit(self, message: StoredMessage) -> None:
        await self._consumer.commit({message.message_queue: message.queue_offset + 1})

    async def close(self) -> None:
        """Commits and disconnects."""
        is_done = self._last is None or self._last.decision is AckStatus.ACKED
        await self._consumer.close(unfinished=not is_done)


class GroupConsumers:
    """Consumers of the groups that subscribers name.

    Subscribers join before ``start``, so that a group's consumer has all of its topics from the
    beginning: all members of a group must have the same. One that joins later, since a program
    started it by itself, is added.

    Args:
        make: Makes the consumer of a group.
        make_puller: Makes that of a subscriber without a function.
    """

    def __init__(self, make: MakeConsumer, make_puller: MakePuller) -> None:
        self._make = make
        self._make_puller = make_puller
        self._pullers: dict[str, Puller] = {}
        self._wanted = Subscriptions()
        self._consumers: dict[str, PushConsumer] = {}
        self._is_started = False

    async def join(self, subscription: TypedSubscription) -> None:
        """Add a subscriber.

        Raises:
            InvalidArgument: As ``Subscriptions.add``, or the group's is one without a function.
        """
        self._check_group(subscription.group, self._pullers)
        self._wanted.add(subscription)
        if not self._is_started:
            return
        consumer = self._consumers.get(subscription.group)
        if consumer is None:
            await self._open(subscription.group, [subscription])
        else:
            await self._subscribe(consumer, subscription)

    async def pull(
        self, group: str, topic: str, expression: Wanted, options: PushConsumerKeywords
    ) -> Puller:
        """Connects a subscriber without a function.

        Raises:
            InvalidArgument: A name or an option is out of bounds, or none of ``PullConsumer``, or
                the group has another subscriber.
            MQMeshError: As for ``PullConsumer.start``; nothing is left running.
        """
        self._check_group(group, {**self._pullers, **self._wanted.by_group()})
        consumer = self._make_puller(group, options)
        await consumer.subscribe(topic, expression)
        made = self._pullers[group] = Puller(
            consumer, auto_commit=dict(options).get("auto_commit", True) is True
        )
        try:
            await consumer.start()
        except BaseException:
            await self.leave(group, topic)
            raise
        return made

    async def leave(self, group: str, topic: str) -> None:
        """Remove a subscriber; the last one of a group takes its consumer along."""
        if group in self._pullers:
            await self._pullers.pop(group).close()
            return
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
        while self._pullers:
            await self._pullers.popitem()[1].close()
        while self._consumers:
            await self._consumers.popitem()[1].close()

    def _check_group(self, group: str, others: Mapping[str, object]) -> None:
        if group in others:
            raise InvalidArgument(
                f"group {group!r} has a subscriber without a function, which must be its only one, "
                "for all members of a group have the same topics: name another group"
            )

    async def _open(self, group: str, subscriptions: list[TypedSubscription]) -> None:
        consumer = self._consumers[group] = self._make(group, subscriptions[0].options)
        for one in subscriptions:
            await self._subscribe(consumer, one)
        await consumer.start()
        for one in subscriptions:
            await consumer.check_outputs(*one.outputs)

    async def _subscribe(self, consumer: PushConsumer, one: TypedSubscription) -> None:
        listener = one.listener_of(consumer)
        await consumer.subscribe(one.topic, one.expression, listener=listener)
