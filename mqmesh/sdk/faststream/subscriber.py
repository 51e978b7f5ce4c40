"""Subscribers: functions that FastStream calls with the messages of a topic."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, cast

from faststream import PublishCommand, StreamMessage
from faststream._internal.endpoint.publisher import PublisherProto
from faststream._internal.endpoint.publisher.fake import FakePublisher
from faststream._internal.endpoint.subscriber import SubscriberSpecification, SubscriberUsecase
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream._internal.endpoint.utils import process_msg
from faststream._internal.producer import ProducerProto
from faststream.exceptions import FeatureNotSupportedException
from faststream.message import AckStatus
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message as MessageSchema
from faststream.specification.schema import Operation, SubscriberSpec

from mqmesh.errors import ClientClosed
from mqmesh.message import Message, StoredMessage
from mqmesh.sdk.aio.consumer import PushConsumer
from mqmesh.sdk.app.subscriptions import TypedSubscription
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.faststream.config import (
    MQMeshBrokerConfig,
    SubscriberSettings,
    SubscriberTitles,
    message_payloads,
)
from mqmesh.sdk.faststream.group_consumers import Puller
from mqmesh.sdk.faststream.message import Delivery, MQMeshMessage, dead_letter_on, is_of_body
from mqmesh.sdk.faststream.publisher import MQMeshPublisher
from mqmesh.sdk.faststream.publishing import MQMeshPublishCommand, outputs
from mqmesh.sdk.producer.replies import is_request

_ENDS_TASKS: Final = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt)


class _NotDone(Exception):
    """Raised where a handler wants its messages again: its published messages are dropped."""


class ResultPublisher(FakePublisher):
    """Publisher of a handler's result to the topic that waits for it.

    Args:
        producer: The broker's.
        topic: Topic where it is awaited.
        request: The message whose sender awaits it, if one does.
    """

    def __init__(self, producer: ProducerProto[Any], topic: str, request: Message | None) -> None:
        super().__init__(producer=producer)
        self._topic = topic
        self._request = request

    def patch_command(self, cmd: PublishCommand) -> MQMeshPublishCommand:
        """Addresses the result."""
        command = MQMeshPublishCommand.from_cmd(super().patch_command(cmd))
        command.destination, command.request = self._topic, self._request
        return command


class MQMeshSubscriber(SubscriberUsecase[Delivery]):
    """Handler of a topic's messages for a group; made by ``MQMeshBroker.subscriber``.

    Args:
        config: Of which topic, for which group.
        specification: For AsyncAPI's document.
        calls: The functions.
    """

    _outer_config: MQMeshBrokerConfig

    def __init__(
        self,
        config: SubscriberSettings,
        specification: SubscriberSpecification[Any, Any],
        calls: CallsCollection[Delivery],
    ) -> None:
        super().__init__(config, specification, calls)
        self.settings = config
        self._puller: Puller | None = None

    @property
    def topic(self) -> str:
        """Topic with the routers' prefixes."""
        return self._outer_config.prefix + self.settings.topic

    async def start(self) -> None:
        """Joins the group; called by the broker, or by a program for one that it adds later."""
        await super().start()
        self._post_start()
        settings, consumers = self.settings, self._outer_config.consumers
        assert consumers is not None, "it belongs to a broker"
        if self.calls:
            await consumers.join(
                TypedSubscription(
                    self.topic,
                    settings.group,
                    settings.expression,
                    self._listen,
                    settings.options,
                    settings.batch,
                    bind=self._processing if settings.exactly_once else None,
                    outputs=self._published() if settings.exactly_once else (),
                )
            )
        elif settings.batch:
            raise FeatureNotSupportedException(
                "get_one and iteration give one message at a time: a subscriber with batch=True "
                "needs a function"
            )
        else:
            self._puller = await consumers.pull(
                settings.group, self.topic, settings.expression, settings.options
            )

    async def stop(self) -> None:
        """Leaves the group, when the calls that run have ended."""
        await super().stop()
        if self._outer_config.consumers is not None:
            await self._outer_config.consumers.leave(self.settings.group, self.topic)

    async def process_message(self, msg: Delivery) -> Any:
        """Has middlewares and the function work on a message."""
        token = dead_letter_on.set(self.settings.dead_letter_on)
        try:
            return await super().process_message(msg)
        except Exception as error:
            msg.error = error
            is_hopeless = isinstance(error, self.settings.dead_letter_on) or is_of_body(error)
            if is_hopeless and msg.decision is not AckStatus.ACKED:
                msg.decision = AckStatus.REJECTED
            raise
        finally:
            dead_letter_on.reset(token)

    async def get_one(self, *, timeout: float = 5) -> MQMeshMessage | None:
        """Awaits a message of a subscriber without a function; the one before it is done now.

        Args:
            timeout: For so many seconds.

        Returns:
            None when there was none, or the subscriber was stopped.

        Raises:
            FeatureNotSupportedException: It has a function, which gets the messages.
            ClientClosed: It was not started.
            MQMeshError: As for ``PullConsumer.poll``.
        """
        try:
            async with asyncio.timeout(timeout):
                delivery = await self._requested_puller().next()
        except TimeoutError:
            return None
        return None if delivery is None else await self._seen(delivery)

    async def __aiter__(self) -> AsyncIterator[MQMeshMessage]:
        """Gives the messages of a subscriber without a function, until it is stopped.

        Raises:
            FeatureNotSupportedException, ClientClosed, MQMeshError: As for ``get_one``.
        """
        puller = self._requested_puller()
        while (delivery := await puller.next()) is not None:
            yield await self._seen(delivery)

    def get_log_context(self, message: StreamMessage[Delivery] | None) -> dict[str, str]:
        """Return the prefix of its log lines."""
        own = {"topic": self.topic, "group": self.settings.group}
        return {**own, **super().get_log_context(message)}

    def _make_response_publisher(
        self, message: StreamMessage[Delivery]
    ) -> Sequence[PublisherProto]:
        raw = message.raw_message.message
        request = raw if is_request(raw) else None
        topic = message.reply_to if request is None else raw.topic
        return (ResultPublisher(self._outer_config.producer, topic, request),)

    def _requested_puller(self) -> Puller:
        if self.calls:
            raise FeatureNotSupportedException(
                "this subscriber has a function, which gets its messages: make another one, of a "
                "group of its own and without a function"
            )
        if self._puller is None:
            raise ClientClosed("the subscriber was not started: start it, or its broker")
        return self._puller

    async def _seen(self, delivery: Delivery) -> MQMeshMessage:
        """Return the message as the broker's middlewares, parser and decoder make it."""
        context, (parser, decoder) = self._outer_config.context, self._get_parser_and_decoder()
        middlewares = [make(delivery, context=context) for make in self._broker_middlewares]
        seen = await process_msg(delivery, middlewares=middlewares, parser=parser, decoder=decoder)
        return cast(MQMeshMessage, seen)

    def _published(self) -> list[str]:
        """Return the topics of the publishers that decorate its functions."""
        made = [one for call in self.calls for one in call.handler._publishers]
        return [one.topic for one in made if isinstance(one, MQMeshPublisher)]

    def _processing(
        self, consumer: PushConsumer
    ) -> Callable[[list[StoredMessage]], Awaitable[ConsumeResult]]:
        """Return the listener that stores published messages with the progress of the group."""

        async def listen(messages: list[StoredMessage]) -> ConsumeResult:
            try:
                async with consumer.processing(messages) as out:
                    token = outputs.set((self._outer_config.producer, out))
                    try:
                        result = await self._listen(messages)
                    finally:
                        outputs.reset(token)
                    if result is not ConsumeResult.SUCCESS:
                        raise _NotDone
            except _NotDone:
                return result
            return result

        return listen

    async def _listen(self, messages: list[StoredMessage]) -> ConsumeResult:
        delivery = Delivery(*messages)
        try:
            await self.consume(delivery)
        except _ENDS_TASKS:
            raise
        except BaseException as error:  # FastStream itself handles no other than an Exception
            delivery.error = error
        return delivery.result()


class SubscriberPage(SubscriberSpecification[MQMeshBrokerConfig, SubscriberTitles]):
    """A subscriber in AsyncAPI's document."""

    @property
    def channel_labels(self) -> list[str]:
        """Its topic."""
        return [self._outer_config.prefix + self.config.topic]

    def get_schema(self) -> dict[str, SubscriberSpec]:
        """Return the schema of the messages that it takes."""
        payloads = message_payloads(self.get_payloads(), batch=self.config.batch)
        payload = resolve_payloads(payloads)
        message = MessageSchema(title=f"{self.name}:Message", payload=payload)
        return {
            self.name: SubscriberSpec(
                address=self.channel_labels[0],
                description=self.description,
                operation=Operation(message=message, bindings=None),
                bindings=None,
            )
        }
