"""Publishers, by which FastStream sends results and other values to one topic."""

from collections.abc import Iterable
from typing import Any, Unpack

from faststream import PublishCommand, PublishType
from faststream._internal.endpoint.publisher import PublisherSpecification, PublisherUsecase
from faststream._internal.types import PublisherMiddleware
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message as MessageSchema
from faststream.specification.schema import Operation, PublisherSpec

from mqmesh.errors import InvalidArgument
from mqmesh.sdk.app.message_maker import SendFields
from mqmesh.sdk.faststream.config import (
    MQMeshBrokerConfig,
    PublisherSettings,
    PublisherTitles,
    message_payloads,
)
from mqmesh.sdk.faststream.message import MQMeshMessage
from mqmesh.sdk.faststream.publishing import MQMeshPublishCommand
from mqmesh.sdk.producer.send_result import SendResult


class MQMeshPublisher(PublisherUsecase):
    """Publisher to a topic; made by ``MQMeshBroker.publisher``.

    As a decorator of a handler it sends the handler's results.

    Args:
        config: To which topic, with which headers.
        specification: For AsyncAPI's document.
    """

    _outer_config: MQMeshBrokerConfig

    def __init__(
        self, config: PublisherSettings, specification: PublisherSpecification[Any, Any]
    ) -> None:
        super().__init__(config, specification)
        self.settings = config

    @property
    def topic(self) -> str:
        """Topic with the routers' prefixes."""
        return self._outer_config.prefix + self.settings.topic

    async def publish(
        self,
        *messages: Any,
        headers: dict[str, str] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
        timeout_ms: int | None = None,
        **fields: Unpack[SendFields],
    ) -> SendResult:
        """Publish to its topic as ``MQMeshBroker.publish``; ``publish_batch`` with ``batch=True``.

        Raises:
            InvalidArgument: There is no value, or several without ``batch=True``.
            MQMeshError: As there.
        """
        if not messages:
            raise InvalidArgument("publish needs a value to send")
        if len(messages) > 1 and not self.settings.batch:
            raise InvalidArgument("a publisher sends one value at a time; several with batch=True")
        command = MQMeshPublishCommand(
            *messages,
            destination=self.topic,
            headers={**self.settings.headers, **(headers or {})},
            correlation_id=correlation_id or self._outer_config.id_generator(),
            reply_to=reply_to,
            timeout_ms=timeout_ms,
            fields={**self.settings.fields, **fields},
            _publish_type=PublishType.PUBLISH,
        )
        return await self._send(command, ())

    async def request(
        self,
        message: Any,
        /,
        *,
        headers: dict[str, str] | None = None,
        correlation_id: str | None = None,
        timeout_ms: int | None = None,
        **fields: Unpack[SendFields],
    ) -> MQMeshMessage:
        """Send a request to its topic, as ``MQMeshBroker.request``."""
        command = MQMeshPublishCommand(
            message,
            destination=self.topic,
            headers={**self.settings.headers, **(headers or {})},
            correlation_id=correlation_id or self._outer_config.id_generator(),
            timeout_ms=timeout_ms,
            fields={**self.settings.fields, **fields},
            _publish_type=PublishType.REQUEST,
        )
        reply: MQMeshMessage = await self._basic_request(
            command, producer=self._outer_config.producer
        )
        return reply

    async def _publish(
        self, cmd: PublishCommand, *, _extra_middlewares: Iterable[PublisherMiddleware]
    ) -> None:
        # A handler's result; FastStream calls it.
        command = MQMeshPublishCommand.from_cmd(cmd)
        command.destination = self.topic
        command.add_headers(self.settings.headers, override=False)
        command.fields = {**self.settings.fields, **command.fields}
        if self.settings.batch and isinstance(command.body, list | tuple):
            if not command.body:
                return
            command.batch_bodies = tuple(command.body)
        await self._send(command, _extra_middlewares)

    async def _send(
        self, command: MQMeshPublishCommand, middlewares: Iterable[PublisherMiddleware]
    ) -> SendResult:
        publish = self._basic_publish_batch if self.settings.batch else self._basic_publish
        sent: SendResult = await publish(
            command, producer=self._outer_config.producer, _extra_middlewares=middlewares
        )
        return sent


class PublisherPage(PublisherSpecification[MQMeshBrokerConfig, PublisherTitles]):
    """A publisher in AsyncAPI's document."""

    @property
    def topic(self) -> str:
        """Topic with the routers' prefixes."""
        return self._outer_config.prefix + self.config.topic

    @property
    def name(self) -> str:
        """Its title."""
        return self.config.title_ or f"{self.topic}:Publisher"

    def get_schema(self) -> dict[str, PublisherSpec]:
        """Return the schema of its messages."""
        payloads = message_payloads(self.get_payloads(), batch=self.config.batch)
        payload = resolve_payloads(payloads, "Publisher")
        message = MessageSchema(title=f"{self.name}:Message", payload=payload)
        return {
            self.name: PublisherSpec(
                address=self.topic,
                description=self.config.description_,
                operation=Operation(message=message, bindings=None),
                bindings=None,
            )
        }
