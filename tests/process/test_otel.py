"""OpenTelemetry's spans of every kind of client, through a real cluster."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from harness.open_telemetry import IntrospectionService, telling
from harness.patience import until
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan

from mqmesh import aio
from mqmesh.message import Message, StoredMessage
from mqmesh.protocol.membership import ConsumeFromWhere
from mqmesh.sdk import otel_names as names
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster

FIRST = ConsumeFromWhere.FIRST_OFFSET
PATIENCE_S = 40


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def told() -> Iterator[IntrospectionService]:
    with telling() as told:
        yield told


def ids(spans: list[ReadableSpan]) -> list[int]:
    return [one.context.span_id for one in spans]


def linked(span: ReadableSpan) -> list[int]:
    return [one.context.span_id for one in span.links]


def one_span(told: IntrospectionService, name: str) -> ReadableSpan:
    """The one span of a name, once it has ended."""
    until(lambda: told.spans(name))
    (span,) = told.spans(name)
    return span


def test_a_message_that_fails_once_is_processed_twice(cluster, told):
    address, failed = cluster.namesrv_addr, threading.Event()

    def listen(messages: list[StoredMessage]) -> None:
        if not failed.is_set():
            failed.set()
            raise ValueError("the first time")

    consumer = PushConsumer(
        "billing",
        namesrv_addr=address,
        consume_from_where=FIRST,
        consume_orderly=True,
        suspend_current_queue_time_ms=10,
        telemetry="otel",
    )
    consumer.subscribe("orders", listener=listen)
    with Producer("shop", namesrv_addr=address, telemetry="otel") as producer:
        producer.send(Message("orders", b"x"))
    with consumer:
        until(lambda: len(told.spans("process orders")) == 2)
    (sent,) = told.spans("send orders")
    first, second = told.spans("process orders")
    assert [linked(first), linked(second)] == [ids([sent])] * 2
    assert [one.name for one in first.events] == ["exception", names.EVENT_BACK]
    assert first.attributes[names.ERROR_TYPE] == "ValueError"
    assert names.ERROR_TYPE not in second.attributes
    assert first.context.trace_id != sent.context.trace_id, "linked, no child"


def test_coroutines_are_traced_where_they_run(cluster, told):
    address = cluster.namesrv_addr
    tracer = trace.get_tracer("test")

    async def run() -> tuple[int, int]:
        done, inner = asyncio.Event(), []

        async def listen(messages: list[StoredMessage]) -> None:
            await asyncio.sleep(0)
            inner.append(trace.get_current_span().get_span_context().span_id)
            done.set()

        consumer = aio.PushConsumer(
            "audit", namesrv_addr=address, consume_from_where=FIRST, telemetry="otel"
        )
        await consumer.subscribe("coroutines", listener=listen)
        async with aio.Producer("shop", namesrv_addr=address, telemetry="otel") as producer:
            with tracer.start_as_current_span("caller") as caller:
                await producer.send(Message("coroutines", b"x"))
        with tracer.start_as_current_span("whoever starts it"):
            await consumer.start()
        await asyncio.wait_for(done.wait(), PATIENCE_S)
        await consumer.close()
        async with aio.PullConsumer(
            "puller", namesrv_addr=address, consume_from_where=FIRST, telemetry="otel"
        ) as puller:
            await puller.subscribe("coroutines")
            while not await puller.poll(1_000):
                pass
        return caller.get_span_context().span_id, inner[0]

    caller, inner = asyncio.run(run())
    (sent,), (processed,) = told.spans("send coroutines"), told.spans("process coroutines")
    assert sent.parent.span_id == caller
    assert (ids([processed]), processed.parent) == ([inner], None)
    assert linked(processed) == linked(one_span(told, "receive coroutines")) == ids([sent])


def test_a_request_and_its_reply_are_linked(cluster, told):
    address = cluster.namesrv_addr
    with (
        Producer("asks", namesrv_addr=address, telemetry="otel") as asks,
        Producer("answers", namesrv_addr=address, telemetry="otel") as answers,
    ):

        def listen(messages: list[StoredMessage]) -> None:
            assert answers.reply(messages[0], b"yes", properties={"mine": "1"})

        consumer = PushConsumer(
            "desk", namesrv_addr=address, consume_from_where=FIRST, telemetry="otel"
        )
        consumer.subscribe("questions", listener=listen)
        with consumer:
            reply = asks.request(Message("questions", b"?"), timeout_ms=PATIENCE_S * 1_000)
    sent, processed = one_span(told, "send questions"), one_span(told, "process questions")
    replied = one_span(told, "reply questions")
    assert linked(processed) == ids([sent])
    assert replied.parent.span_id == processed.context.span_id
    assert reply.property("mine") == "1"
    assert f"{replied.context.span_id:016x}" in reply.property(names.TRACEPARENT)
