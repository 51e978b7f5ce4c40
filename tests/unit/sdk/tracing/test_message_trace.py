"""What the message trace writes about sends, listeners' calls and transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import pytest
from harness.batches import PRODUCER_ID, PRODUCER_KEY
from harness.waits import finish, make_waits

from mqmesh.errors import InvalidArgument, NoRoute
from mqmesh.message import (
    TRACE_TOPIC,
    BatchInfo,
    Message,
    MessageQueue,
    StoredMessage,
    format_message_id,
)
from mqmesh.protocol.messaging import BatchOutcome, SendStatus
from mqmesh.protocol.transactions import Decision
from mqmesh.sdk.hooks import ConsumeContext, TransactionContext
from mqmesh.sdk.producer.batch_codec import BatchCodec
from mqmesh.sdk.producer.explicit_batch import explicit_batch
from mqmesh.sdk.producer.lanes import PendingBatch
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.producer.send_buffer import delay_of
from mqmesh.sdk.tracing.message_trace import MessageTrace
from mqmesh.sdk.tracing.sampling import Sampler
from mqmesh.sdk.tracing.trace_dispatcher import Traced
from mqmesh.sdk.tracing.trace_records import (
    ContextCode,
    TraceKind,
    TraceMessageType,
    TraceRecord,
    decode_records,
)
from mqmesh.sdk.transactions.half_sender import HalfCodec
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs

NOW_MS = 10_050
BEGAN_MS = 10_000
STORED = BatchOutcome(0, commitlog_offset=0xBEEF)
AT = TimestampMs(0)


class FakeDispatcher:
    def __init__(self) -> None:
        self.records: list[TraceRecord] = []
        self.keys: list[list[str]] = []

    def add(self, told: Sequence[Any], make: Callable[[Sequence[Any]], Iterable[Traced]]) -> None:
        made = list(make(told))
        assert len(made) == len(told)
        found, strange = decode_records("".join(text for text, _, _ in made))
        assert not strange
        assert [one.message_id for one in found] == [message_id for _, message_id, _ in made]
        self.records += found
        self.keys += [list(keys) for _, _, keys in made]


def make_trace(dispatcher: FakeDispatcher, rate: float = 1, **options) -> MessageTrace:
    return MessageTrace(
        "shop",
        dispatcher,  # type: ignore[arg-type]
        TRACE_TOPIC,
        Sampler(rate),
        lambda: NOW_MS,
        lambda name: f"{name}:10911",
        lambda: "REQUEST",
        **options,
    )


def send(
    trace: MessageTrace,
    messages: list[Message],
    *,
    is_half: bool = False,
    is_one: bool = False,
    compress: int | None = None,
    sequence: int = 16,
    outcome: BatchOutcome | None = STORED,
) -> None:
    """Has a batch encoded and ended: one that its sender made, or one that grew by itself."""
    codec = (HalfCodec if is_half else BatchCodec)(PRODUCER_KEY, compress, None, trace, "shop")
    codec._next_sequence = sequence
    queue = MessageQueue(messages[0].topic, "a", 3)
    batch = PendingBatch(*make_waits(), queue, 10**9, False, len(messages) * is_one, 2, True)
    batch.delay = delay_of(messages[0])
    if is_one:
        made = explicit_batch(messages, codec, 1_000_000)
        batch.payload, batch.due_times = made.payload, made.due_times
    else:
        batch.messages = messages
    for _ in range(2):  # the second time for another queue
        codec.encode(batch, BEGAN_MS)
        batch.encoded = None
    finish(batch, outcome or NoRoute("away"))


def test_a_trace_that_fails_stops_no_send(monkeypatch, caplog):
    dispatcher = FakeDispatcher()
    trace = make_trace(dispatcher)

    def fails(*_: object) -> Sequence[int]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(trace, "chosen", fails)
    send(trace, [Message("t", b"1")])
    assert dispatcher.records == []
    assert "sent without a trace" in caplog.text


@pytest.mark.parametrize("is_one", [False, True])
@pytest.mark.parametrize("compress", [None, 1])
def test_a_send_is_told_with_all_that_is_known(is_one, compress):
    dispatcher = FakeDispatcher()
    messages = [Message("t", b"1" * 300, "new", ["k1", "k 2"]), Message("t", b"1" * 70_000)]
    send(make_trace(dispatcher), messages, is_one=is_one, compress=compress)
    first = TraceRecord(
        TraceKind.PUB,
        format_message_id(PRODUCER_ID, 16),
        BEGAN_MS,
        "DefaultRegion",
        "shop",
        "t",
        "new",
        "k1 k 2",
        "a:10911",
        300,
        50,
        TraceMessageType.NORMAL,
        "a:10911#BEEF#0",
    )
    second = msgspec.structs.replace(
        first,
        message_id=format_message_id(PRODUCER_ID, 17),
        tag="null",
        keys="null",
        size=70_000,
        offset_id="a:10911#BEEF#1",
    )
    assert dispatcher.records == [first, second]
    assert dispatcher.keys == [["k1", "k 2"], []]


@pytest.mark.parametrize(
    ("message", "options", "expected"),
    [
        (Message("t", b"1"), {"is_half": True}, (TraceMessageType.HALF, True)),
        (Message("t", b"1", delay_level=3), {}, (TraceMessageType.DELAY, True)),
        (Message("t", b"1", deliver_at_ms=5), {"is_one": True}, (TraceMessageType.DELAY, True)),
        (
            Message("t", b"1"),
            {"outcome": BatchOutcome(0, SendStatus.FLUSH_DISK_TIMEOUT.value)},
            (TraceMessageType.NORMAL, False),
        ),
    ],
)
def test_a_send_has_its_kind_and_outcome(message, options, expected):
    dispatcher = FakeDispatcher()
    send(make_trace(dispatcher), [message], **options)
    (one,) = dispatcher.records
    assert (one.message_type, one.success) == expected


def test_what_failed_and_the_trace_itself_are_not_traced():
    dispatcher = FakeDispatcher()
    trace = make_trace(dispatcher)
    send(trace, [Message("t", b"1")], outcome=None)
    send(trace, [Message(TRACE_TOPIC, b"1")])
    consumed = ConsumeContext("g", [stored(0, topic=TRACE_TOPIC)], began_ms=BEGAN_MS)
    trace.before_consume(consumed)
    trace.after_consume(consumed)
    assert dispatcher.records == []


def test_nobody_forges_records_by_what_a_message_has():
    dispatcher = FakeDispatcher()
    send(make_trace(dispatcher), [Message("t", b"1", "100%s\x01", ["%d\x02Pub"])])
    (one,) = dispatcher.records
    assert (one.tag, one.keys) == ("100%s ", "%d Pub")


def stored(at: int, info: BatchInfo | None = None, *, topic: str = "t", **fields) -> StoredMessage:
    info = info or batch()
    return StoredMessage(topic, b"x", queue_offset=QueueOffset(at), batch=info, **fields)


def batch(base: int = 0, sequence: int = 0) -> BatchInfo:
    return BatchInfo(
        "t",
        0,
        "a",
        QueueOffset(base),
        CommitLogOffset(0),
        9,
        AT,
        AT,
        "h",
        "h",
        PRODUCER_ID,
        sequence,
        0,
    )


def consume(trace: MessageTrace, messages: list[StoredMessage], **outcome) -> None:
    context = ConsumeContext("billing", messages, began_ms=BEGAN_MS)
    trace.before_consume(context)
    for name, value in outcome.items():
        setattr(context, name, value)
    trace.after_consume(context)


def test_a_call_of_a_listener_is_told_when_it_begins_and_when_it_ends():
    dispatcher = FakeDispatcher()
    again = {"RECONSUME_TIMES": "2"}
    consume(make_trace(dispatcher), [stored(4, keys=("k",), properties=again), stored(6)])
    begun, ended = dispatcher.records[:2], dispatcher.records[2:]
    assert begun[0] == TraceRecord(
        TraceKind.SUB_BEFORE,
        format_message_id(PRODUCER_ID, 4),
        BEGAN_MS,
        "DefaultRegion",
        "billing",
        keys="k",
        request_id="REQUEST",
        retry_times=2,
    )
    assert ended[1] == TraceRecord(
        TraceKind.SUB_AFTER,
        format_message_id(PRODUCER_ID, 6),
        NOW_MS,
        group="billing",
        keys="null",
        cost_ms=50,
        request_id="REQUEST",
    )


@pytest.mark.parametrize(
    ("outcome", "timeout_ms", "expected"),
    [
        ({}, None, ContextCode.SUCCESS),
        ({}, 51, ContextCode.SUCCESS),
        ({}, 50, ContextCode.TIME_OUT),
        ({"again": True}, None, ContextCode.FAILED),
        ({"again": True, "error": ValueError()}, None, ContextCode.EXCEPTION),
    ],
)
def test_the_end_of_a_call_says_how_it_went(outcome, timeout_ms, expected):
    dispatcher = FakeDispatcher()
    consume(make_trace(dispatcher, timeout_ms=timeout_ms), [stored(0)], **outcome)
    assert dispatcher.records[1].context_code == expected
    assert dispatcher.records[1].success is not outcome.get("again", False)


def test_consumers_choose_the_messages_that_producers_chose():
    rate, count = 0.1, 500
    of_producer, of_consumer = FakeDispatcher(), FakeDispatcher()
    for sequence in (0, 2_000):
        messages = [Message("t", b"%d" % n) for n in range(count)]
        send(make_trace(of_producer, rate), messages, sequence=sequence, is_one=sequence > 0)
    # Each third message was filtered out, and a call gets the end of a batch with the next one's
    # beginning.
    infos = [batch(0, 0), batch(count, 2_000)]
    messages = [stored(n, infos[n // count]) for n in range(2 * count) if n % 3]
    for begin in range(0, len(messages), 150):
        consume(make_trace(of_consumer, rate), messages[begin : begin + 150])
    wanted = {one.message_id for one in of_producer.records}
    assert len(wanted) == pytest.approx(100, abs=3)
    got = [one.message_id for one in of_consumer.records if one.kind is TraceKind.SUB_BEFORE]
    assert got == [one.message_id for one in messages if one.message_id in wanted]


@pytest.mark.parametrize("from_check", [False, True])
def test_the_end_of_a_transaction_is_told(from_check):
    dispatcher = FakeDispatcher()
    message = stored(5, tag="new", keys=("k",))
    trace = make_trace(dispatcher)
    for decision in Decision:
        trace.after_transaction(
            TransactionContext("bank", message, decision, from_check=from_check, began_ms=7)
        )
    assert [one.state for one in dispatcher.records] == ["COMMIT_MESSAGE", "ROLLBACK_MESSAGE"]
    assert dispatcher.records[0] == TraceRecord(
        TraceKind.END_TRANSACTION,
        message.message_id,
        7,
        "DefaultRegion",
        "bank",
        "t",
        "new",
        "k",
        "a:10911",
        message_type=TraceMessageType.COMMIT,
        transaction_id=message.message_id,
        state="COMMIT_MESSAGE",
        from_check=from_check,
    )
    assert dispatcher.keys == [["k"], ["k"]]


@pytest.mark.parametrize(
    "options",
    [{"msg_trace": 1.5}, {"msg_trace": -1}, {"trace_topic": "%RETRY%g"}, {"trace_topic": "a b"}],
)
def test_what_makes_no_sense_is_refused(options):
    with pytest.raises(InvalidArgument, match=next(iter(options)).partition("_")[2]):
        Producer("g", **options)


def test_a_transport_that_was_given_is_for_one_loop(world):
    with pytest.raises(InvalidArgument, match="transport"):
        world.producer(msg_trace=1)
