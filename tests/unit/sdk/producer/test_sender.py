"""Numbers, bytes and answers of batches; their fate is told in test_producer_retries."""

from __future__ import annotations

import threading

import pytest
from harness.batches import PRODUCER_ID, PRODUCER_KEY
from harness.simulated_cluster import Fault, FaultKind
from harness.waits import make_waits

from mqmesh.batch.record_batch import Attributes, check_batch, decode_messages, read_meta
from mqmesh.errors import EndpointUnreachable, InvalidArgument, RemoteProtocolError
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.command import Command
from mqmesh.protocol.messaging import BatchOutcome, encode_outcomes
from mqmesh.sdk.producer.batch_codec import BatchCodec, read_outcomes
from mqmesh.sdk.producer.lanes import PendingBatch


def batch_of(*bodies: str, queue_id: int = 3, wait_store: bool = True) -> PendingBatch:
    batch = PendingBatch(
        *make_waits(),
        MessageQueue("t", "a", queue_id),
        10**9,
        bound=False,
        explicit_count=0,
        retries=2,
        wait_store=wait_store,
    )
    batch.messages = [Message("t", body.encode()) for body in bodies]
    return batch


def test_messages_are_numbered_one_after_the_other_and_for_ever() -> None:
    codec = BatchCodec(PRODUCER_KEY, None)
    first, second = batch_of("1", "2"), batch_of("3")
    data = b"".join(codec.encode(first, 5))
    assert codec.encode(first, 99) is codec.encode(first, 5), "encoded once"
    codec.encode(second, 5)
    assert (first.first_sequence, second.first_sequence) == (0, 2)
    header = check_batch(data)
    assert (header.producer_id, header.first_sequence, header.message_count) == (PRODUCER_ID, 0, 2)
    assert (header.queue_id, header.born_timestamp) == (3, 5)
    assert [one.body for one in decode_messages(data, header)] == [b"1", b"2"]
    assert read_meta(data, header).topic == "t"


def test_a_batch_holds_its_producers_id_and_not_its_key() -> None:
    codec = BatchCodec(PRODUCER_KEY, None)
    data = b"".join(codec.encode(batch_of("1"), 5))
    assert data[80:88] == codec.producer_id.to_bytes(8, "little")
    assert PRODUCER_KEY not in data


def test_in_another_queue_a_batch_keeps_its_numbers() -> None:
    codec = BatchCodec(PRODUCER_KEY, None)
    batch = batch_of("1")
    codec.encode(batch, 5)
    codec.encode(batch_of("2"), 5)
    batch.queue, batch.encoded = MessageQueue("t", "b", 1), None
    header = check_batch(b"".join(codec.encode(batch, 99)))
    assert (header.queue_id, header.producer_id, header.first_sequence) == (1, PRODUCER_ID, 0)
    # So back in its first queue it is what it was there.
    assert header.born_timestamp == 5


def test_threads_never_get_the_same_numbers() -> None:
    codec = BatchCodec(PRODUCER_KEY, None)
    batches = [batch_of("x", "y") for _ in range(400)]

    def encode(number: int) -> None:
        for batch in batches[number::4]:
            codec.encode(batch, 5)

    threads = [threading.Thread(target=encode, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(batch.first_sequence for batch in batches) == list(range(0, 800, 2))


def test_who_does_not_wait_for_the_store_says_so() -> None:
    codec = BatchCodec(PRODUCER_KEY, None)
    for wait_store in (True, False):
        header = check_batch(b"".join(codec.encode(batch_of("x", wait_store=wait_store), 5)))
        assert bool(header.attributes & Attributes.NO_WAIT_STORE) is not wait_store


def test_what_cannot_be_encoded_is_the_callers_concern() -> None:
    codec = BatchCodec(PRODUCER_KEY, None)
    batch = batch_of("x")
    batch.messages[0].tag = ["unhashable"]  # type: ignore[assignment]
    with pytest.raises(InvalidArgument):
        codec.encode(batch, 5)
    with pytest.raises(InvalidArgument):
        codec.encode(batch_of(*["x" * (9 << 20)] * 2), 5)


def command(header: bytes, body: bytes = b"") -> Command:
    return Command(0, 1, 1, memoryview(header), memoryview(body))


def test_answers_must_fit_their_requests() -> None:
    good = [BatchOutcome(0, 3, 0, 1, 2, 3), BatchOutcome(2, 0, 7, remark="slow down")]
    header, body = encode_outcomes(good)
    assert read_outcomes(command(header, body), 2) == good
    for count in (1, 3):
        with pytest.raises(RemoteProtocolError, match="outcomes for"):
            read_outcomes(command(header, body), count)
    header, _ = encode_outcomes([BatchOutcome(0, 4)])
    with pytest.raises(RemoteProtocolError, match="status"):
        read_outcomes(command(header), 1)
    with pytest.raises(RemoteProtocolError):
        read_outcomes(command(b"short"), 1)


def test_a_few_requests_are_in_flight_and_no_more(world) -> None:
    producer = world.producer(batch_messages=1, max_requests_in_flight=2)
    world.broker.faults.extend([Fault(FaultKind.LATE, 500)] * 2)
    futures = []
    for n in range(4):
        futures.append(producer.send_async(Message("t", b"x"), queue=MessageQueue("t", "a", n)))
        world.run(2)
    assert len(world.broker.sends) == 2
    world.run(1_000)
    assert all(future.result().queue_offset == 0 for future in futures)


def test_the_next_request_leaves_before_anybody_is_told_of_the_last(world) -> None:
    producer = world.producer(batch_messages=1, max_requests_in_flight=1)
    in_flight = []

    def on_done(future: object) -> None:
        in_flight.append(producer._sender._outbox._in_flight["a"])

    for n in range(3):
        queue = MessageQueue("t", "a", n)
        producer.send_async(Message("t", b"x" * 300_000), on_done, queue=queue)
    world.run(1_000)
    assert in_flight == [1, 1, 0]


def test_while_nothing_is_sent_nothing_turns(world, monkeypatch) -> None:
    producer = world.producer()
    world.broker.crash()
    future = producer.send_async(Message("t", b"x"), timeout_ms=500)
    world.run(1_000)
    assert future.exception() is not None
    turns = 0
    watch = producer._sender._outbox._watch

    def count() -> None:
        nonlocal turns
        turns += 1
        watch()

    monkeypatch.setattr(producer._sender._outbox, "_watch", count)
    world.run(5_000)
    assert turns <= 1


def test_a_broker_that_comes_back_after_all_was_given_up_is_used_at_once(world) -> None:
    producer = world.producer()
    world.broker.crash()
    future = producer.send_async(Message("t", b"x"), timeout_ms=300)
    world.run(1_000)
    assert future.exception() is not None
    world.broker.start()
    world.run(500)
    future = producer.send_async(Message("t", b"y"), timeout_ms=300)
    world.run(10)
    assert future.result().queue_offset == 0


def test_a_broker_that_cannot_be_connected_to_holds_up_no_other_one(world, monkeypatch) -> None:
    world.build(brokers=("a", "b"))
    producer = world.producer()
    broker = producer._engine.brokers.connection

    def fail(name: str):
        if name == "a":
            raise EndpointUnreachable("too many open files")
        return broker(name)

    monkeypatch.setattr(producer._engine.brokers, "connection", fail)
    bound = producer.send_async(Message("t", b"x"), queue=MessageQueue("t", "a", 0))
    other = producer.send_async(Message("t", b"x"), queue=MessageQueue("t", "b", 0))
    world.run(100)
    assert other.result().queue_offset == 0
    world.run(4_000)
    assert isinstance(bound.exception(), EndpointUnreachable)


def test_the_watch_goes_on_after_a_failure(world, monkeypatch) -> None:
    producer = world.producer()
    world.broker.crash()
    future = producer.send_async(Message("t", b"x"), timeout_ms=500)
    world.run(50)
    look_after = producer._sender.without

    def fail(name: str) -> None:
        monkeypatch.setattr(producer._sender, "without", look_after)
        raise RuntimeError("in a test")

    monkeypatch.setattr(producer._sender, "without", fail)
    world.run(1_000)
    assert isinstance(future.exception(), EndpointUnreachable)
