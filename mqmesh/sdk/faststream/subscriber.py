"""Subscribers: functions that FastStream calls with the messages of a topic."""

import traceback
from collections.abc import AsyncIterator, Sequence
from typing import Any

from faststream import PublishCommand, StreamMessage
from faststream._internal.endpoint.publisher import PublisherProto
from faststream._internal.endpoint.publisher.fake import FakePublisher
from faststream._internal.endpoint.subscriber import SubscriberSpecification, SubscriberUsecase
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream._internal.producer import ProducerProto
from faststream.exceptions import FeatureNotSupportedException
from faststream.message import AckStatus
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message as MessageSchema
from faststream.specification.schema import Operation, SubscriberSpec

from mqmesh.message import Message, StoredMessage
from mqmesh.sdk.app.subscriptions import TypedSubscription
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.faststream.config import MQMeshBrokerConfig, SubscriberSettings, SubscriberTitles
from mqmesh.sdk.faststream.message import Delivery
from mqmesh.sdk.faststream.publishing import MQMeshPublishCommand
from mqmesh.sdk.producer.replies import is_request

_PULL = "mqmesh's subscribers call their functions; to ask for messages there is PullConsumer"


class ResultPublisher(FakePublisher):
    """Sends a handler's result to whoever waits for it.

    Args:
        producer: The broker's.
        topic: Where it is awaited.
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
    """Handles the messages of a topic for a group; made by ``MQMeshBroker.subscriber``.

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

    @property
    def topic(self) -> str:
        """With the routers' prefixes."""
        return self._outer_config.prefix + self.settings.topic

    async def start(self) -> None:
        """Joins the group; called by the broker, or by a program for one that it adds later."""
        await super().start()
        self._post_start()
        settings, consumers = self.settings, self._outer_config.consumers
        assert consumers is not None, "it belongs to a broker"
        if self.calls:
            options = settings.options
            await consumers.join(
                TypedSubscription(
                    self.topic, settings.group, settings.expression, self._listen, options
                )
            )

    async def stop(self) -> None:
        """Leaves the group, when the calls that run have ended."""
        await super().stop()
        if self._outer_config.consumers is not None:
            await self._outer_config.consumers.leave(self.settings.group, self.topic)

    async def process_message(self, msg: Delivery) -> Any:
        """Has middlewares and the function work on a message."""
        try:
            return await super().process_message(msg)
        except Exception as error:
            msg.error = error
            is_hopeless = isinstance(error, self.settings.dead_letter_on) or _is_of_types(error)
            if is_hopeless and msg.decision is not AckStatus.ACKED:
                msg.decision = AckStatus.REJECTED
            raise

    async def get_one(self, *, timeout: float = 5) -> None:
        """Not here.

        Raises:
            FeatureNotSupportedException: Always.
        """
        raise FeatureNotSupportedException(_PULL)

    def __aiter__(self) -> AsyncIterator[StreamMessage[Delivery]]:
        """Not here.

        Raises:
            FeatureNotSupportedException: Always.
        """
        raise FeatureNotSupportedException(_PULL)

    def get_log_context(self, message: StreamMessage[Delivery] | None) -> dict[str, str]:
        """What stands in front of its lines in the log."""
        own = {"topic": self.topic, "group": self.settings.group}
        return {**own, **super().get_log_context(message)}

    def _make_response_publisher(
        self, message: StreamMessage[Delivery]
    ) -> Sequence[PublisherProto]:
        raw = message.raw_message.message
        request = raw if is_request(raw) else None
        topic = message.reply_to if request is None else raw.topic
        return (ResultPublisher(self._outer_config.producer, topic, request),)

    async def _listen(self, messages: list[StoredMessage]) -> ConsumeResult:
        (message,) = messages
        delivery = Delivery(message)
        await self.consume(delivery)
        return delivery.result()


def _is_of_types(error: Exception) -> bool:
    """True when values are not of the types that the function's parameters have.

    FastDepends finds that out, by pydantic or msgspec. What handlers validate by themselves,
    answers of other services perhaps, may be better next time.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [frame.f_globals.get("__name__", "").partition(".")[0] for frame in frames]
    callers = [module for module in modules if module != "pydantic"]
    return isinstance(error, ValueError) and callers[-1:] == ["fast_depends"]


class SubscriberPage(SubscriberSpecification[MQMeshBrokerConfig, SubscriberTitles]):
    """A subscriber in AsyncAPI's document."""

    @property
    def channel_labels(self) -> list[str]:
        """Its topic."""
        return [self._outer_config.prefix + self.config.topic]

    def get_schema(self) -> dict[str, SubscriberSpec]:
        """What it takes."""
        payload = resolve_payloads(self.get_payloads())
        message = MessageSchema(title=f"{self.name}:Message", payload=payload)
        return {
            self.name: SubscriberSpec(
                address=self.channel_labels[0],
                description=self.description,
                operation=Operation(message=message, bindings=None),
                bindings=None,
            )
        }
