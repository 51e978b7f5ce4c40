"""FastStream's Prometheus metrics of an mqmesh broker (``pip install 'faststream[prometheus]'``).

::

    from prometheus_client import CollectorRegistry
    from mqmesh.faststream.prometheus import MQMeshPrometheusMiddleware

    registry = CollectorRegistry()
    broker = MQMeshBroker(middlewares=[MQMeshPrometheusMiddleware(registry=registry)])
"""

from collections.abc import Callable, Sequence
from typing import Any

from faststream import StreamMessage
from faststream._internal.constants import EMPTY
from faststream.prometheus import ConsumeAttrs, MetricsSettingsProvider, PrometheusMiddleware
from prometheus_client import CollectorRegistry

from mqmesh.sdk import otel_names as names
from mqmesh.sdk.faststream.message import Delivery
from mqmesh.sdk.faststream.publishing import MQMeshPublishCommand


class MQMeshPrometheusMiddleware(PrometheusMiddleware[Delivery, MQMeshPublishCommand]):
    """Middleware that counts and times messages to handlers and published messages.

    The names are FastStream's; label ``broker`` is ``mqmesh``, ``handler`` and ``destination`` are
    topics. Of a list each message is counted, and its size is that of all of them.

    Args:
        registry, app_name, metrics_prefix, received_messages_size_buckets, custom_labels: As for
            FastStream's other middlewares.
    """

    def __init__(
        self,
        *,
        registry: CollectorRegistry,
        app_name: str = EMPTY,
        metrics_prefix: str = "faststream",
        received_messages_size_buckets: Sequence[float] | None = None,
        custom_labels: dict[str, str | Callable[[Any], str]] | None = None,
    ) -> None:
        super().__init__(
            settings_provider_factory=lambda _: DeliveryMetrics(),
            registry=registry,
            app_name=app_name,
            metrics_prefix=metrics_prefix,
            received_messages_size_buckets=received_messages_size_buckets,
            custom_labels=custom_labels,
        )


class DeliveryMetrics(MetricsSettingsProvider[Delivery, MQMeshPublishCommand]):
    """Labels and sizes of deliveries and commands for metrics."""

    messaging_system = names.SYSTEM

    def get_consume_attrs_from_message(self, msg: StreamMessage[Delivery]) -> ConsumeAttrs:
        """Return labels and sizes of a message that a handler gets."""
        messages = msg.raw_message.messages
        return {
            "destination_name": messages[0].topic,
            "message_size": sum(len(one.body) for one in messages),
            "messages_count": len(messages),
        }

    def get_publish_destination_name_from_cmd(self, cmd: MQMeshPublishCommand) -> str:
        """Return the topic."""
        return cmd.destination
