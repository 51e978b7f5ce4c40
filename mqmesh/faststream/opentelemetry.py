"""FastStream's OpenTelemetry spans of an mqmesh broker (``pip install 'faststream[otel]'``).

::

    from mqmesh.faststream.opentelemetry import MQMeshTelemetryMiddleware

    broker = MQMeshBroker(middlewares=[MQMeshTelemetryMiddleware()])
"""

from typing import Any

from faststream import StreamMessage
from faststream.opentelemetry import TelemetryMiddleware, TelemetrySettingsProvider
from opentelemetry.metrics import Meter, MeterProvider
from opentelemetry.trace import TracerProvider

from mqmesh.message import Message, StoredMessage
from mqmesh.sdk import otel_names as names
from mqmesh.sdk.app.message_maker import own_fields
from mqmesh.sdk.faststream.message import Delivery
from mqmesh.sdk.faststream.publishing import MQMeshPublishCommand
from mqmesh.sdk.tracing.otel import facts_of


class MQMeshTelemetryMiddleware(TelemetryMiddleware[MQMeshPublishCommand]):
    """Middleware with spans around handlers and publishing; headers carry their context.

    It takes the place of ``tracing={"telemetry": "otel"}``; see docs/faststream.md.

    Args:
        tracer_provider, meter_provider, meter, include_messages_counters: As for FastStream's
            other middlewares.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        meter: Meter | None = None,
        include_messages_counters: bool = True,
    ) -> None:
        super().__init__(
            settings_provider_factory=lambda _: DeliveryAttributes(),
            tracer_provider=tracer_provider,
            meter_provider=meter_provider,
            meter=meter,
            include_messages_counters=include_messages_counters,
        )


class DeliveryAttributes(TelemetrySettingsProvider[Delivery, MQMeshPublishCommand]):
    """Attributes of spans of deliveries and commands, named as in mqmesh's own spans."""

    messaging_system = names.SYSTEM

    def get_consume_attrs_from_message(self, msg: StreamMessage[Delivery]) -> dict[str, Any]:
        """Return the attributes of a message that a handler gets."""
        messages = msg.raw_message.messages
        attributes = {
            **_common(messages[0].topic, msg.correlation_id),
            **facts_of(messages),
            names.BODY_SIZE: sum(len(one.body) for one in messages),
        }
        first = messages[0]
        if isinstance(first, StoredMessage):  # a reply is not
            attributes[names.PARTITION_ID] = str(first.queue_id)
            if len(messages) == 1:
                attributes[names.MESSAGE_ID] = first.message_id
        return attributes

    def get_consume_destination_name(self, msg: StreamMessage[Delivery]) -> str:
        """Return the topic."""
        return msg.raw_message.message.topic

    def get_publish_attrs_from_cmd(self, cmd: MQMeshPublishCommand) -> dict[str, Any]:
        """Return the attributes of a message that is published."""
        alike = Message(cmd.destination, b"", **own_fields(cmd.fields))
        return {**_common(cmd.destination, cmd.correlation_id), **facts_of((alike,))}

    def get_publish_destination_name(self, cmd: MQMeshPublishCommand) -> str:
        """Return the topic."""
        return cmd.destination


def _common(topic: str, correlation_id: str | None) -> dict[str, Any]:
    attributes = {names.MESSAGING_SYSTEM: names.SYSTEM, names.DESTINATION_NAME: topic}
    if correlation_id is not None:
        attributes[names.CONVERSATION_ID] = correlation_id
    return attributes
