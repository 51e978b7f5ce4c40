"""Explicit batches in the send buffer: where they go, and how they end together."""

from __future__ import annotations

from harness.batches import PRODUCER_KEY
from harness.threadless_loop import ThreadlessLoop

from mqmesh.batch.native_encode import encode_at_once
from mqmesh.batch.payload import encode_payload
from mqmesh.errors import ClientClosed
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.sdk.producer import batch_codec
from mqmesh.sdk.producer.batch_codec import BatchCodec
from mqmesh.sdk.producer.explicit_batch import explicit_batch
from mqmesh.sdk.producer.producer_options import ProducerOptions
from mqmesh.sdk.producer.send_buffer import SendBuffer


class Buffer(SendBuffer):
    """A buffer with a topic of four queues on each of two brokers."""

    def __init__(self) -> None:
        self.avoided: frozenset[str] = frozenset()
        options = ProducerOptions(batch_size_bytes=1_000, batch_messages=10)
        super().__init__(options, ThreadlessLoop(in_loop_thread=True), len)
        queues = tuple(MessageQueue("t", name, n) for name in "ab" for n in range(4))
        self.topic = self.topic_lanes(queues, 0, lambda _: self.avoided)

    def put_batch(self, lane: int | None, *bodies: str, on_done=None):
        payload = encode_payload([Message("t", body.encode()) for body in bodies])
        deadline_ms = self._loop.clock.monotonic_ms() + 3_000
        place = None if lane is None else self.topic.lanes[lane]
        future, _ = self.append_batch(place, self.topic, payload, deadline_ms, on_done, 2)
        return future

    def take_all(self):
        return self.take("a", 1 << 30, 4_096)


def test_batches_go_round_the_queues_and_keep_away_from_brokers_to_avoid():
    buffer = Buffer()
    queues = [buffer.put_batch(None, "x").batch.queue for _ in range(8)]
    assert sorted(queues) == sorted(buffer.topic.queues)
    buffer.avoided = frozenset("a")
    batches = [buffer.put_batch(None, "x").batch for _ in range(4)]
    assert {batch.queue.broker_name for batch in batches} == {"b"}
    assert not any(batch.bound for batch in batches)


def test_a_batch_for_a_queue_stays_there():
    batch = Buffer().put_batch(3, "x", "y").batch
    assert batch.bound
    assert (batch.queue.queue_id, batch.explicit_count) == (3, 2)


# ---- All outcomes of a request at once -----------------------------------------------------


def test_what_is_stored_together_ends_together():
    buffer = Buffer()
    told = []
    futures = [buffer.put_batch(lane, "x", on_done=told.append) for lane in (0, 1)]
    later = buffer.put_batch(0, "later")
    flight = [batch for batch in buffer.take_all() if batch is not later.batch]
    outcomes = [BatchOutcome(0, 0, 0, 5, 6, 7), BatchOutcome(0, 0, 0, 8, 9, 10)]
    with buffer.lock:
        assert all(map(buffer.end, flight, outcomes))
    for batch in flight:
        batch.notify()
    assert told == futures
    assert [future.result().queue_offset for future in futures] == [5, 8]
    assert all(future.batch.payload is None for future in futures), "nothing stays with a future"
    assert not later.done()
    assert buffer.pending_bytes == later.batch.size


def test_a_batch_that_has_an_outcome_keeps_it_and_nobody_is_told_again():
    buffer = Buffer()
    told = []
    future = buffer.put_batch(0, "x", on_done=told.append)
    (batch,) = buffer.take_all()
    with buffer.lock:
        assert buffer.end(batch, ClientClosed("closed meanwhile"))
        assert not buffer.end(batch, BatchOutcome(0, 0, 0, 5, 6, 7))
    batch.notify()
    batch.notify()
    assert isinstance(future.exception(), ClientClosed)
    assert told == [future]
    assert buffer.pending_bytes == 0


def test_a_list_that_another_thread_changes_makes_no_batch_of_this_and_that(monkeypatch):
    message = Message("t", b"x", "a")
    sent = [message] * 8

    def meddle(messages, *rest, **options):
        sent.append(Message("t", b"y", "b"))
        return encode_at_once(messages, *rest, **options)

    monkeypatch.setattr(batch_codec, "encode_at_once", meddle)
    payload = explicit_batch(sent, BatchCodec(PRODUCER_KEY, None), 1_000).payload
    assert payload == encode_payload([message] * 8)
