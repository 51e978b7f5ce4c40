"""Trace records are sent beside the client's work: never waited for, and counted when lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from harness.patience import until

from mqmesh.errors import NoRoute, QueueFull
from mqmesh.message import MAX_KEYS, Message
from mqmesh.sdk.tracing.trace_dispatcher import (
    MAX_WAITING,
    MESSAGE_BYTES,
    MESSAGE_RECORDS,
    WAKE_RECORDS,
    Traced,
    TraceDispatcher,
    pack,
)
from mqmesh.sdk.tracing.trace_records import TraceKind, TraceRecord, decode_records, encode_record

PATIENCE_S = 20


def traced(number: int, *keys: str, text: str = "") -> Traced:
    record = TraceRecord(TraceKind.PUB, f"{number:032X}", topic="t", keys=text or " ".join(keys))
    return encode_record(record), record.message_id, keys


def add(dispatcher: TraceDispatcher, records: list[Traced]) -> None:
    dispatcher.add(records, list)


class Outcome:
    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def exception(self) -> Exception | None:
        return self._error


class Threads:
    """What a dispatcher needs of a transport."""

    condition = threading.Condition

    def run_loop(self, target: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread


class FakeProducer:
    """Takes messages, when it may."""

    def __init__(self, refuses: Exception | None = None, error: Exception | None = None) -> None:
        self.refuses, self.error = refuses, error
        self.may_send = threading.Event()
        self.may_send.set()
        self.asked = threading.Event()
        self.messages: list[Message] = []
        self.state = "new"

    def start(self) -> None:
        self.state = "started"

    def send_async(self, message: Message, on_done: Callable[[Any], None]) -> None:
        self.asked.set()
        assert self.may_send.wait(PATIENCE_S)
        if self.refuses is not None:
            raise self.refuses
        self.messages.append(message)
        on_done(Outcome(self.error))

    def close(self) -> None:
        self.state = "closed"
        self.may_send.set()


def start(producer: FakeProducer) -> TraceDispatcher:
    dispatcher = TraceDispatcher("trace", lambda: producer)
    dispatcher.start(Threads(), at_exit=False)  # type: ignore[arg-type]
    return dispatcher


def test_what_waits_at_the_end_is_sent_in_order():
    producer = FakeProducer()
    dispatcher = start(producer)
    for number in range(3):
        add(dispatcher, [traced(number, "k"), traced(10 + number)])
    dispatcher.close()
    records = [
        one for message in producer.messages for one in decode_records(message.body.decode())[0]
    ]
    assert [int(one.message_id, 16) for one in records] == [0, 10, 1, 11, 2, 12]
    assert {one.topic for one in producer.messages} == {"trace"}
    assert "k" in producer.messages[0].keys
    assert (dispatcher.sent, dispatcher.dropped, producer.state) == (6, 0, "closed")
    add(dispatcher, [traced(1)])
    assert dispatcher.dropped == 1, "nothing is taken after the end"
    dispatcher.close()


def test_nobody_waits_when_too_much_comes():
    producer = FakeProducer()
    producer.may_send.clear()
    dispatcher = start(producer)
    add(dispatcher, [traced(0)])
    add(dispatcher, [traced(1)] * WAKE_RECORDS)
    assert producer.asked.wait(PATIENCE_S)
    add(dispatcher, [traced(2)] * (MAX_WAITING - 1))
    assert dispatcher.dropped == 0, "what is being sent waits no more"
    add(dispatcher, [traced(3), traced(4), traced(5)])
    assert dispatcher.dropped == 2
    add(dispatcher, [traced(6)] * 2)
    assert dispatcher.dropped == 2 + 2
    producer.may_send.set()
    dispatcher.close()
    assert dispatcher.sent == MAX_WAITING + 1 + WAKE_RECORDS
    last = decode_records(producer.messages[-1].body.decode())[0][-1]
    assert int(last.message_id, 16) == 3, "the first ones of a batch are taken"


@pytest.mark.parametrize(
    "producer", [FakeProducer(refuses=NoRoute("away")), FakeProducer(error=QueueFull("full"))]
)
def test_what_cannot_be_sent_is_counted_and_told_once(producer, caplog):
    dispatcher = start(producer)
    for _ in range(3):
        add(dispatcher, [traced(1)] * MESSAGE_RECORDS)
    dispatcher.close()
    assert (dispatcher.sent, dispatcher.dropped) == (0, 3 * MESSAGE_RECORDS)
    told = [one.getMessage() for one in caplog.records]
    assert len(told) == 2
    assert "only the first are logged" in told[0]
    assert "300 of 300 trace records were lost" in told[1]


def test_the_end_does_not_wait_for_brokers_that_are_away():
    producer = FakeProducer()
    producer.may_send.clear()
    dispatcher = start(producer)
    add(dispatcher, [traced(0)])
    dispatcher.close()
    assert producer.state == "closed"


def test_what_was_never_started_makes_no_producer():
    dispatcher = TraceDispatcher("trace", pytest.fail)
    dispatcher.close()
    add(dispatcher, [traced(1)])
    assert dispatcher.dropped == 1


def test_trace_messages_have_bounds():
    many = [traced(number, "k") for number in range(1_000)]
    large = [traced(number, text="x" * 50_000) for number in range(5)]
    of_one = [traced(7, f"k{number}") for number in range(200)]
    for records in (many, large, of_one, [traced(1, *map(str, range(MAX_KEYS)))]):
        packed = list(pack(records))
        assert b"".join(body for body, _, _ in packed).decode() == "".join(
            text for text, _, _ in records
        )
        assert sum(count for _, _, count in packed) == len(records)
        for body, keys, count in packed:
            assert len(body) <= MESSAGE_BYTES
            assert len(set(keys)) == len(keys) <= MAX_KEYS
            assert count <= MESSAGE_RECORDS
    assert max(count for _, _, count in pack([traced(7, "k")] * 500)) == MESSAGE_RECORDS


def test_a_producer_that_cannot_be_made_costs_its_records_only(caplog):
    asked: list[int] = []

    def make() -> FakeProducer:
        asked.append(1)
        raise ValueError("no keys")

    dispatcher = TraceDispatcher("trace", make)
    dispatcher.start(Threads(), at_exit=False)  # type: ignore[arg-type]
    add(dispatcher, [traced(1)] * 3)
    until(lambda: dispatcher.dropped == 3)
    dispatcher.close()
    assert len(asked) == 1
    assert "no keys" in caplog.text
