"""Spans and metrics of OpenTelemetry: of sends in a simulated cluster, and of listeners' calls."""

from __future__ import annotations

import asyncio
import builtins
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from harness.open_telemetry import IntrospectionService, telling
from harness.simulated_cluster import Fault, FaultKind
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from mqmesh.clock import SystemClock
from mqmesh.errors import InvalidArgument, MessageIllegal, Reject
from mqmesh.message import BatchInfo, Message, MessageQueue, StoredMessage
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.transactions import Decision
from mqmesh.sdk import otel_names as names
from mqmesh.sdk.consumer.consumer_options import PushConsumerOptions
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult, hooked, hooked_coroutine
from mqmesh.sdk.hooks import TransactionContext, make_hook_calls
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.producer.send_result import SendResult
from mqmesh.sdk.tracing.otel import MAX_LINKS, Otel
from mqmesh.sdk.tracing.tracing_options import TracingOptions
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
AT = TimestampMs(0)
INFO = BatchInfo("t", 2, "a", QueueOffset(0), CommitLogOffset(0), 9, AT, AT, "h", "h", 1, 1, 0)


@pytest.fixture
def told() -> Iterator[IntrospectionService]:
    with telling() as told:
        yield told


def context_of(message: Message) -> str:
    text = message.property(names.TRACEPARENT)
    assert text is not None
    return text.split("-")[2]


def test_a_send_is_a_span_of_the_callers_trace(told, world):
    producer = world.producer(telemetry="otel")

    def order() -> tuple[int, SendResult]:
        with trace.get_tracer("test").start_as_current_span("order") as caller:
            sent = producer.send(Message("t", b"x", "new", ["k"]))
            return caller.get_span_context().span_id, sent

    caller_id, result = world.call(order)
    (span,) = told.spans("send t")
    assert span.kind is SpanKind.PRODUCER
    assert span.parent.span_id == caller_id
    attributes = dict(span.attributes)
    assert "@DEFAULT#" in attributes.pop(names.CLIENT_ID)
    assert attributes == {
        names.MESSAGING_SYSTEM: "mqmesh",
        names.OPERATION_NAME: "send",
        names.OPERATION_TYPE: "send",
        names.DESTINATION_NAME: "t",
        names.MESSAGE_TYPE: "normal",
        names.MESSAGE_TAG: "new",
        names.MESSAGE_KEYS: ("k",),
        names.MESSAGE_ID: result.message_id,
        names.PARTITION_ID: str(result.message_queue.queue_id),
        **server(world),
    }
    (stored,) = world.cluster.messages("t")
    assert context_of(stored) == f"{span.context.span_id:016x}"
    labels = {names.MESSAGING_SYSTEM: "mqmesh", names.OPERATION_NAME: "send"}
    labels |= {names.OPERATION_TYPE: "send", names.DESTINATION_NAME: "t"}
    assert told.metric(names.SENT_MESSAGES) == [(labels, 1)]
    assert [one for one, _ in told.metric(names.OPERATION_DURATION)] == [labels]


def server(world) -> dict[str, object]:
    host, _, port = world.broker.endpoint.removeprefix("tcp://").rpartition(":")
    return {names.SERVER_ADDRESS: host, names.SERVER_PORT: int(port)}


def test_sends_that_share_a_batch_are_spans_of_their_own(told, world):
    producer = world.producer(telemetry="otel")
    tracer = trace.get_tracer("test")
    parents = []
    for number in range(3):
        with tracer.start_as_current_span("caller") as caller:
            producer.send_async(Message("t", b"%d" % number))
            parents.append(caller.get_span_context().span_id)
    world.run()
    assert len(world.broker.sends) == 1, "one batch"
    spans = told.spans("send t")
    assert [one.parent.span_id for one in spans] == parents
    stored = sorted(world.cluster.messages("t"), key=lambda one: one.body)
    assert [context_of(one) for one in stored] == [f"{one.context.span_id:016x}" for one in spans]


def test_a_batch_is_one_span(told, world):
    producer = world.producer(telemetry="otel")
    producer.send_batch_async([Message("t", b"%d" % n) for n in range(4)])
    world.run()
    (span,) = told.spans()
    assert (span.kind, span.attributes[names.BATCH_COUNT]) == (SpanKind.PRODUCER, 4)
    assert {context_of(one) for one in world.cluster.messages("t")} == {
        f"{span.context.span_id:016x}"
    }
    ((_, count),) = told.metric(names.SENT_MESSAGES)
    assert count == 4


def test_each_message_of_a_batch_may_have_a_span(told, world):
    producer = world.producer(telemetry="otel", otel_create_spans=True)
    producer.send_batch_async([Message("t", b"%d" % n) for n in range(3)])
    world.run()
    created, (sent,) = told.spans("create t"), told.spans("send t")
    assert [one.kind for one in created] == [SpanKind.PRODUCER] * 3
    assert sent.kind is SpanKind.CLIENT
    ids = [one.context.span_id for one in created]
    assert [one.context.span_id for one in sent.links] == ids
    assert [context_of(one) for one in world.cluster.messages("t")] == [f"{i:016x}" for i in ids]


def test_a_context_that_the_user_put_there_stays(told, world):
    producer = world.producer(telemetry="otel")
    own = {names.TRACEPARENT: PARENT, "mine": "1"}
    producer.send_async(Message("t", b"x", properties=own))
    world.run()
    (span,) = told.spans()
    assert span.kind is SpanKind.CLIENT
    assert [f"{one.context.span_id:016x}" for one in span.links] == [PARENT.split("-")[2]]
    assert world.cluster.messages("t")[0].properties == own


def test_what_was_consumed_is_sent_on_in_its_own_context(told, world):
    producer = world.producer(telemetry="otel")
    reserved = {"RECONSUME_TIMES": "1", "mine": "1"}
    consumed = StoredMessage("t", b"x", properties=reserved, batch=INFO)
    producer.send_async(consumed)
    world.run()
    (span,) = told.spans()
    (stored,) = world.cluster.messages("t")
    assert stored.properties.keys() == {names.TRACEPARENT, "mine"}
    assert context_of(stored) == f"{span.context.span_id:016x}"


def test_a_send_that_fails_says_so(told, world):
    producer = world.producer(telemetry="otel", retry_times_when_send_async_failed=0)
    world.broker.faults.append(Fault(FaultKind.REFUSE, ResponseCode.MESSAGE_ILLEGAL))
    producer.send_async(Message("t", b"x"))
    world.run(1_000)
    with pytest.raises(InvalidArgument):
        producer.send_async(Message("t", b""))
    for span, kind in zip(told.spans(), (MessageIllegal, InvalidArgument), strict=True):
        assert span.status.status_code is StatusCode.ERROR
        assert span.attributes[names.ERROR_TYPE] == kind.__name__
    assert {labels[names.ERROR_TYPE] for labels, _ in told.metric(names.SENT_MESSAGES)} == {
        "MessageIllegal",
        "InvalidArgument",
    }


@pytest.mark.parametrize("what", [b"no message", [], [b"x"], None])
def test_what_is_no_message_is_refused_as_ever(told, world, what):
    producer = world.producer(telemetry="otel")
    for send in (producer.send_async, producer.send_batch_async):
        with pytest.raises(InvalidArgument):
            send(what)
    assert told.spans() == []


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Message("t", b"x", sharding_key="s"), {names.MESSAGE_TYPE: "fifo"}),
        (
            Message("t", b"x", delay_level=3),
            {names.MESSAGE_TYPE: "delay", names.DELAY_LEVEL: 3},
        ),
        (
            Message("t", b"x", deliver_at_ms=5),
            {names.MESSAGE_TYPE: "delay", names.DELIVERY_TIMESTAMP: 5},
        ),
    ],
)
def test_a_message_says_its_kind(told, message, expected):
    sending = make_otel().begin([message])
    sending.end((SimpleNamespace(), None))
    (span,) = told.spans()
    assert expected.items() <= span.attributes.items()


# ---- Listeners ------------------------------------------------------------------------------


def make_otel(**options) -> Otel:
    most = options.pop("most_retries", 16)
    return Otel(
        "billing",
        TracingOptions(**options),
        SystemClock,
        lambda: "client",
        lambda name: f"{name}:10911",
        most_retries=most,
    )


def stored(at: int, **properties: str) -> StoredMessage:
    return StoredMessage(
        "t", b"x", properties=properties or None, queue_offset=QueueOffset(at), batch=INFO
    )


def consume(otel: Otel, messages, listener, *, is_async: bool = False) -> None:
    calls = make_hook_calls([otel], "billing")
    assert calls is not None
    try:
        if is_async:

            async def coroutine(given):
                await asyncio.sleep(0)
                return listener(given)

            asyncio.run(hooked_coroutine(coroutine, calls, lambda: 77)(messages))
        else:
            hooked(listener, calls, lambda: 77)(messages)
    except (ValueError, Reject):
        pass


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("parent", ["", "message"])
def test_a_call_is_a_span_that_the_listener_works_in(told, is_async, parent):
    inner = []

    def listen(messages) -> None:
        inner.append(trace.get_current_span().get_span_context().span_id)

    with trace.get_tracer("test").start_as_current_span("whoever started it"):
        message = stored(0, traceparent=PARENT)
        consume(make_otel(otel_parent=parent), [message], listen, is_async=is_async)
    (span,) = told.spans("process t")
    assert inner == [span.context.span_id]
    assert span.kind is SpanKind.CONSUMER
    assert [f"{one.context.span_id:016x}" for one in span.links] == [PARENT.split("-")[2]]
    found = None if span.parent is None else f"{span.parent.span_id:016x}"
    assert found == (PARENT.split("-")[2] if parent else None)
    assert dict(span.attributes) == {
        names.MESSAGING_SYSTEM: "mqmesh",
        names.OPERATION_NAME: "process",
        names.OPERATION_TYPE: "process",
        names.DESTINATION_NAME: "t",
        names.CONSUMER_GROUP: "billing",
        names.CLIENT_ID: "client",
        names.MESSAGE_TYPE: "normal",
        names.MESSAGE_ID: message.message_id,
        names.PARTITION_ID: "2",
        names.SERVER_ADDRESS: "a",
        names.SERVER_PORT: 10911,
    }
    assert [count for _, count in told.metric(names.CONSUMED_MESSAGES)] == [1]
    assert len(told.metric(names.PROCESS_DURATION)) == 1


def test_a_call_with_many_messages_has_a_bound_of_links(told):
    consume(make_otel(), [stored(n, traceparent=PARENT) for n in range(200)], lambda _: None)
    (span,) = told.spans()
    assert (len(span.links), span.attributes[names.BATCH_COUNT]) == (MAX_LINKS, 200)


def test_a_context_that_makes_no_sense_is_no_link(told):
    consume(make_otel(otel_parent="message"), [stored(0, traceparent="nonsense")], lambda _: None)
    (span,) = told.spans()
    assert (span.links, span.parent) == ((), None)


def fail(_messages) -> None:
    raise ValueError("no")


def reject(_messages) -> None:
    raise Reject("never")


@pytest.mark.parametrize(
    ("listener", "times", "error", "events"),
    [
        (lambda _: None, "2", None, [names.EVENT_RETRY]),
        (fail, "", "ValueError", ["exception", names.EVENT_BACK]),
        (
            lambda _: ConsumeResult.RECONSUME_LATER,
            "1",
            "RECONSUME_LATER",
            [names.EVENT_RETRY, names.EVENT_BACK],
        ),
        (fail, "16", "ValueError", [names.EVENT_RETRY, "exception", names.EVENT_DEAD]),
        (reject, "", "Reject", ["exception", names.EVENT_DEAD]),
    ],
)
def test_what_becomes_of_a_message_that_fails_is_an_event(told, listener, times, error, events):
    properties = {"RECONSUME_TIMES": times} if times else {}
    consume(make_otel(), [stored(0, **properties)], listener)
    (span,) = told.spans()
    assert [one.name for one in span.events] == events
    assert span.attributes.get(names.ERROR_TYPE) == error
    told_times = [
        one.attributes[names.RECONSUME_TIMES] for one in span.events if one.name != "exception"
    ]
    assert set(told_times) == {int(times or 0)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 16),
        ({"max_reconsume_times": 3}, 3),
        ({"consume_orderly": True}, None),
        ({"consume_orderly": True, "max_reconsume_times": 3}, 3),
        ({"message_model": "BROADCASTING"}, None),
    ],
)
def test_when_a_message_is_a_dead_letter(options, expected):
    assert PushConsumerOptions(**options).dead_letters_after() == expected


@pytest.mark.parametrize("decision", list(Decision))
def test_the_end_of_a_transaction_is_a_span(told, decision):
    message = stored(0, traceparent=PARENT)
    context = TransactionContext("bank", message, decision, from_check=True, began_ms=77)
    make_otel().after_transaction(context)
    (span,) = told.spans(f"{decision.name.lower()} t")
    assert [f"{one.context.span_id:016x}" for one in span.links] == [PARENT.split("-")[2]]
    assert span.attributes[names.MESSAGE_ID] == message.message_id
    assert span.start_time == 77_000_000


# ---- Without -------------------------------------------------------------------------------


def test_without_it_nothing_is_in_front_of_a_producer(world):
    producer = world.producer()
    assert producer.send_async.__func__ is Producer.send_async
    world.call(lambda: producer.send(Message("t", b"x")))
    assert world.cluster.messages("t")[0].properties is None


def test_a_package_that_is_missing_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("mqmesh.sdk.tracing.otel")]:
        monkeypatch.delitem(sys.modules, name)
    found = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError("No module named 'opentelemetry'", name=name)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InvalidArgument, match=r"pip install 'mqmesh\[otel\]'"):
        Producer("g", telemetry="otel")


def test_what_makes_no_sense_is_refused():
    for options in ({"telemetry": "zipkin"}, {"otel_parent": "me"}, {"otel_create_spans": 1}):
        with pytest.raises(InvalidArgument, match=next(iter(options))):
            Producer("g", **options)


def test_sends_to_a_chosen_queue_say_which(told, world):
    producer = world.producer(telemetry="otel")
    queue = MessageQueue("t", world.broker.name, 1)
    world.call(lambda: producer.send(Message("t", b"x"), queue=queue))
    assert told.spans()[0].attributes[names.PARTITION_ID] == "1"
