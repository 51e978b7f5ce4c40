"""FastStream's middlewares for Prometheus and OpenTelemetry: what they say of mqmesh."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from mqmesh.faststream import MQMeshBroker, TestMQMeshBroker
from mqmesh.faststream.opentelemetry import MQMeshTelemetryMiddleware
from mqmesh.faststream.prometheus import MQMeshPrometheusMiddleware


class Told:
    """What an application told OpenTelemetry."""

    def __init__(self) -> None:
        self._exporter, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        tracers = TracerProvider(shutdown_on_exit=False)
        tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        meters = MeterProvider([self._reader], shutdown_on_exit=False)
        self.middleware = MQMeshTelemetryMiddleware(tracer_provider=tracers, meter_provider=meters)

    def span(self, name):
        """The one of this name and kind."""
        (found,) = [
            one
            for one in self._exporter.get_finished_spans()
            if f"{one.name} {one.kind.name}" == name
        ]
        return found

    def count(self, name):
        """What a counter has."""
        (resource,) = self._reader.get_metrics_data().resource_metrics
        (scope,) = resource.scope_metrics
        (metric,) = [one for one in scope.metrics if one.name == name]
        return sum(point.value for point in metric.data.data_points)


def run(middleware, program, *, fails=False):
    """Runs a program beside a handler of lists, and one of its results."""
    broker = MQMeshBroker("127.0.0.1:1", middlewares=[middleware])

    @broker.subscriber("orders", group="billing", batch=True)
    @broker.publisher("bills", batch=True, tag="bill")
    async def bill(orders: list[str]) -> list[str]:
        if fails:
            raise LookupError(orders)
        return orders * 2

    @broker.subscriber("prices", group="shop")
    async def price(item: str) -> int:
        return 3

    async def life():
        async with TestMQMeshBroker(broker) as tested:
            await program(tested)

    asyncio.run(life())


def test_each_message_of_a_list_is_counted():
    registry = CollectorRegistry()

    async def program(broker):
        await broker.publish("a", "orders")
        await broker.publish_batch("bb", "cc", topic="orders")
        await broker.publish(None, "void")
        assert await (await broker.request("apple", "prices")).decode() == 3

    run(MQMeshPrometheusMiddleware(registry=registry, app_name="shop"), program)

    def value(name, **labels):
        return registry.get_sample_value(
            f"faststream_{name}", {"app_name": "shop", "broker": "mqmesh", **labels}
        )

    assert value("received_messages_total", handler="orders") == 3
    assert value("received_messages_size_bytes_sum", handler="orders") == 5
    assert value("received_messages_size_bytes_count", handler="orders") == 2
    assert value("received_messages_in_process", handler="orders") == 0
    assert value("received_processed_messages_total", handler="orders", status="acked") == 3
    assert value("received_messages_total", handler="prices") == 1
    for topic, count in {"orders": 3, "bills": 6, "void": 1, "prices": 1}.items():
        sent = value("published_messages_total", destination=topic, status="success")
        assert sent == count, topic


def test_a_list_that_fails_is_counted_as_such():
    registry = CollectorRegistry()

    async def program(broker):
        with pytest.raises(LookupError):
            await broker.publish_batch("a", "b", topic="orders")

    run(MQMeshPrometheusMiddleware(registry=registry), program, fails=True)
    labels = {"app_name": "faststream", "broker": "mqmesh", "handler": "orders"}
    name = "faststream_received_processed_messages_total"
    assert registry.get_sample_value(name, {**labels, "status": "error"}) == 2


def test_spans_have_the_names_that_those_of_mqmesh_have():
    told = Told()

    async def program(broker):
        await broker.publish("apple", "prices", correlation_id="c-1", keys=["k"])

    run(told.middleware, program)
    created, sent = told.span("prices create PRODUCER"), told.span("prices publish PRODUCER")
    processed = told.span("prices process CONSUMER")
    assert sent.parent.span_id == processed.parent.span_id == created.context.span_id
    common = {
        "messaging.system": "mqmesh",
        "messaging.destination.name": "prices",
        "messaging.message.conversation_id": "c-1",
        "messaging.rocketmq.message.type": "normal",
        "messaging.rocketmq.message.keys": ("k",),
    }
    assert dict(sent.attributes) == {**common, "messaging.operation": "publish"}
    assert dict(processed.attributes) == {
        **common,
        "messaging.operation": "process",
        "messaging.message.id": f"{0:032}",
        "messaging.message.body.size": 5,
        "messaging.destination.partition.id": "0",
    }


def test_a_list_is_one_span_that_is_linked_to_its_messages():
    told = Told()

    async def program(broker):
        await broker.publish_batch("a", "b", topic="orders")

    run(told.middleware, program)
    (link,) = told.span("orders create CONSUMER").links
    assert link.context.span_id == told.span("orders create PRODUCER").context.span_id
    assert link.attributes == {"messaging.batch.message_count": 2}
    attributes = told.span("orders process CONSUMER").attributes
    assert attributes["messaging.batch.message_count"] == 2
    assert attributes["messaging.message.body.size"] == 2
    assert "messaging.message.id" not in attributes
    bills = told.span("bills publish PRODUCER").attributes
    assert bills["messaging.batch.message_count"] == 4
    assert bills["messaging.rocketmq.message.tag"] == "bill"
    for counter in "messaging.publish.messages", "messaging.process.messages":
        assert told.count(counter) == 2 + 4


def test_a_reply_is_told_of_too():
    told = Told()

    async def program(broker):
        await broker.request("apple", "prices")

    run(told.middleware, program)
    assert told.span("prices create CONSUMER").attributes["messaging.message.body.size"] == 1
