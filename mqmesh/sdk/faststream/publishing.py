"""Sending for FastStream: publish commands, responses and their producer."""

import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final, Unpack

from fast_depends.library.serializer import SerializerProto
from faststream import BatchPublishCommand, PublishCommand, PublishType, Response
from faststream._internal.endpoint.utils import ParserComposition
from faststream._internal.parser import CodecProto, DefaultCodec
from faststream._internal.producer import ProducerProto
from faststream._internal.types import CustomCallable

from mqmesh.errors import ClientClosed, ClientNotOnline
from mqmesh.message import Message
from mqmesh.sdk.aio.producer import Producer
from mqmesh.sdk.app.message_maker import SendFields, own_fields
from mqmesh.sdk.consumer.outputs import Outputs
from mqmesh.sdk.faststream.message import (
    CONTENT_TYPE,
    CORRELATION_ID,
    REPLY_TO,
    Delivery,
    decode,
    parse,
)
from mqmesh.sdk.producer.send_result import SendResult

_JSON = "application/json"
outputs: Final[ContextVar[tuple[ProducerProto[Any], Outputs] | None]] = ContextVar(
    "outputs", default=None
)
"""Producer of the broker whose messages are at work, and their outputs, which are stored with the
progress of their group."""
_log = logging.getLogger(__name__)


class MQMeshPublishCommand(BatchPublishCommand):
    """Publish command; middlewares see it in ``publish_scope``.

    Args:
        body: First value.
        bodies: Further ones, of a batch.
        fields: Fields of the messages beside bodies and headers.
        timeout_ms: Until it is sent, or answered.
        request: Message that this is the reply to.
        options: ``destination`` is the topic; else as for FastStream's ``PublishCommand``.
    """

    def __init__(
        self,
        body: Any,
        /,
        *bodies: Any,
        fields: SendFields | None = None,
        timeout_ms: int | None = None,
        request: Message | None = None,
        **options: Any,
    ) -> None:
        super().__init__(body, *bodies, **options)
        self.fields: SendFields = fields or {}
        self.timeout_ms = timeout_ms
        self.request = request

    @property
    def batch_bodies(self) -> tuple[Any, ...]:
        """Its values, at least one: None is one, too."""
        return (self.body, *self.extra_bodies)

    @batch_bodies.setter
    def batch_bodies(self, value: Sequence[Any]) -> None:
        self.body, *others = value or (None,)
        self.extra_bodies = tuple(others)

    @classmethod
    def from_cmd(cls, cmd: PublishCommand, *, batch: bool = False) -> "MQMeshPublishCommand":
        """Return the same command as one of this class."""
        if isinstance(cmd, MQMeshPublishCommand):
            return cmd
        body, others = cls._parse_bodies(cmd.body, batch=batch)
        return cls(
            body,
            *others,
            _publish_type=cmd.publish_type,
            reply_to=cmd.reply_to,
            destination=cmd.destination,
            correlation_id=cmd.correlation_id,
            headers=cmd.headers,
        )


class MQMeshResponse(Response):
    """Response of a handler: its result, to be sent with a tag, keys, a delay …

    Args:
        body: The result.
        headers: Properties of the message.
        correlation_id: Correlation id, by default of the message at hand.
        fields: As for ``Message``.
    """

    def __init__(
        self,
        body: Any,
        *,
        headers: dict[str, Any] | None = None,
        correlation_id: str | None = None,
        **fields: Unpack[SendFields],
    ) -> None:
        super().__init__(body, headers=headers, correlation_id=correlation_id)
        self.fields = fields

    def as_publish_command(self) -> MQMeshPublishCommand:
        """Return the publish command of the result."""
        return MQMeshPublishCommand(
            self.body,
            fields=self.fields,
            headers=self.headers,
            correlation_id=self.correlation_id,
            _publish_type=PublishType.PUBLISH,
        )


class MessageEncoder:
    """Encoder of commands as messages.

    Args:
        serializer: Of values that are neither bytes nor text.
        codec: The user's, instead of it.
    """

    def __init__(self, serializer: SerializerProto | None, codec: CodecProto | None) -> None:
        self._serializer = serializer
        self.codec: CodecProto = codec or DefaultCodec()

    async def messages(self, command: MQMeshPublishCommand) -> list[Message]:
        """Return a command's messages, in order.

        Raises:
            InvalidArgument: A value cannot be sent.
        """
        return [await self._message(command, body) for body in command.batch_bodies]

    async def _message(self, command: MQMeshPublishCommand, value: Any) -> Message:
        # A body has at least one byte here, so nothing is sent as JSON's word for it.
        body, kind = (b"null", _JSON) if value is None else await self._encode(value)
        properties = {name: str(text) for name, text in command.headers.items()}
        own = {
            CONTENT_TYPE: kind,
            CORRELATION_ID: command.correlation_id,
            REPLY_TO: command.reply_to,
        }
        properties |= {name: text for name, text in own.items() if text}
        fields = own_fields(command.fields)
        return Message(command.destination, body, properties=properties, **fields)

    async def _encode(self, value: Any) -> tuple[bytes, str | None]:
        return await self.codec.encode(value, self._serializer)


class MQMeshProducer(ProducerProto[MQMeshPublishCommand]):
    """Producer of messages that FastStream publishes.

    Args:
        make: Makes the producer, which belongs to the event loop that it is started in.
        encoder: Makes the messages.
        parser, decoder: The user's, for replies.
    """

    def __init__(
        self,
        make: Callable[[], Producer],
        encoder: MessageEncoder,
        parser: CustomCallable | None = None,
        decoder: CustomCallable | None = None,
    ) -> None:
        self._make = make
        self._producer: Producer | None = None
        self._encoder = encoder
        self.codec = encoder.codec
        self._parser = ParserComposition(parser, parse)
        self._decoder = ParserComposition(decoder, decode)

    async def start(self) -> Producer:
        """Connects."""
        self._producer = self._make()
        await self._producer.start()
        return self._producer

    async def publish(self, cmd: MQMeshPublishCommand) -> SendResult | bool:
        """Sends a message, or the reply to one.

        Returns:
            The result of the send; of a reply whether the requester took it; True for a message
            that is stored later, with the progress of the group whose message is in work.
        """
        (message,) = await self._encoder.messages(cmd)
        if cmd.request is None and (out := self._outputs()) is not None:
            self._add(out, [message], cmd)
            return True
        if cmd.request is None:
            return await self._client.send(
                message,
                priority=cmd.fields.get("priority"),
                ttl_ms=cmd.fields.get("ttl_ms"),
                timeout_ms=cmd.timeout_ms,
            )
        return await self._reply(cmd.request, message)

    async def publish_batch(self, cmd: MQMeshPublishCommand) -> SendResult | bool:
        """Sends messages as one batch to one queue; returns as ``publish``."""
        messages: Sequence[Message] = await self._encoder.messages(cmd)
        if (out := self._outputs()) is not None:
            self._add(out, messages, cmd)
            return True
        return await self._client.send_batch(
            messages,
            priority=cmd.fields.get("priority"),
            ttl_ms=cmd.fields.get("ttl_ms"),
            timeout_ms=cmd.timeout_ms,
        )

    async def request(self, cmd: MQMeshPublishCommand) -> Delivery:
        """Sends a message and awaits its reply."""
        (message,) = await self._encoder.messages(cmd)
        own = cmd.fields
        reply = await self._client.request(
            message, cmd.timeout_ms, priority=own.get("priority"), ttl_ms=own.get("ttl_ms")
        )
        return Delivery(reply)

    def _outputs(self) -> Outputs | None:
        """Return where messages are added to; None where another broker's are at work, or none."""
        found = outputs.get()
        return found[1] if found is not None and found[0] is self else None

    def _add(self, out: Outputs, messages: Sequence[Message], cmd: MQMeshPublishCommand) -> None:
        for message in messages:
            out.send(message, priority=cmd.fields.get("priority"), ttl_ms=cmd.fields.get("ttl_ms"))

    @property
    def _client(self) -> Producer:
        if self._producer is None:
            raise ClientClosed("the broker was not started")
        return self._producer

    async def _reply(self, request: Message, reply: Message) -> bool:
        try:
            return await self._client.reply(
                request, reply.body, tag=reply.tag, keys=reply.keys, properties=reply.properties
            )
        except ClientNotOnline as error:
            # The work is done; to repeat it would find no waiting requester, either.
            _log.warning("a reply was not sent: %s", error)
            return False
