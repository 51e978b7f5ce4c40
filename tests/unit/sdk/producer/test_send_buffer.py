"""Batches as they grow, wait, leave and come back."""

from __future__ import annotations

import threading

import pytest
from harness.threadless_loop import ThreadlessLoop
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from mqmesh.batch.payload import encode_payload
from mqmesh.errors import ClientClosed, QueueFull
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.sdk.producer.lanes import Lane, PendingBatch, TopicLanes, next_lane
from mqmesh.sdk.producer.producer_options import ProducerOptions
from mqmesh.sdk.producer.send_buffer import (
    BATCHES_A_FLIGHT,
    DEADLINE_SPREAD_MS,
    MESSAGE_OVERHEAD_BYTES,
    SendBuffer,
    message_size,
)

MANY = 10**9
NOBODY: frozenset[str] = frozenset()


class Buffer(SendBuffer):
    """A buffer with a topic of four queues on each of two brokers, moved by hand."""

    def __init__(self, *, max_bytes=MANY, max_batch_bytes=1_000, max_batch_messages=10) -> None:
        self.loop = ThreadlessLoop(in_loop_thread=True)
        self.clock = self.loop.clock
        self.avoided = NOBODY
        options = ProducerOptions(
            buffer_memory_bytes=max_bytes,
            batch_size_bytes=max_batch_bytes,
            batch_messages=max_batch_messages,
        )
        super().__init__(options, self.loop, len)
        queues = tuple(MessageQueue("t", name, n) for name in "ab" for n in range(4))
        self.topic: TopicLanes = self.topic_lanes(queues, 0, lambda _: self.avoided)
        self.topics["t"] = self.topic

    def put(
        self,
        body: str = "x",
        lane: Lane | int | None = None,
        *,
        timeout_ms: int = 3_000,
        retries: int = 2,
        wait_store: bool = True,
        on_done=None,
    ):
        one = Message("t", body.encode())
        if isinstance(lane, int):
            lane = self.topic.lanes[lane]
        return self.append(
            lane,
            self.topic,
            one,
            message_size(one),
            self.clock.monotonic_ms() + timeout_ms,
            on_done,
            retries,
            lane is not None,
            wait_store,
        )

    def put_batch(self, lane: int | None, *bodies: str, on_done=None):
        payload = encode_payload([Message("t", body.encode()) for body in bodies])
        deadline_ms = self.clock.monotonic_ms() + 3_000
        place = None if lane is None else self.topic.lanes[lane]
        future, _ = self.append_batch(place, self.topic, payload, deadline_ms, on_done, 2)
        return future

    def take_all(self, broker: str = "a"):
        return self.take(broker, MANY, 4_096)

    def store(self, batch) -> bool:
        with self.lock:
            return self.end(batch, BatchOutcome(0, 0))


def bodies(taken) -> list[list[str]]:
    return [[one.body.decode() for one in batch.messages] for batch in taken]


# ---- Growing ------------------------------------------------------------------------------


def test_what_comes_while_a_batch_is_in_flight_gathers_in_the_next_one():
    buffer = Buffer()
    buffer.put("1", 0)
    (flight,) = buffer.take_all()
    buffer.put("2", 0)
    buffer.put("3", 0)
    assert buffer.ready_brokers() == [], "the queue is in flight"
    assert buffer.take_all() == []
    assert buffer.store(flight)
    assert bodies(buffer.take_all()) == [["2", "3"]]


def join(buffer: Buffer, body: str):
    return buffer.join(Message("t", body.encode()))


def test_a_plain_message_joins_an_open_batch_and_opens_none():
    buffer = Buffer(max_batch_messages=3)
    assert join(buffer, "nothing open") is None
    first, lane = buffer.put("0")
    second = join(buffer, "1")
    assert (second.batch, second.index) == (first.batch, 1)
    assert join(buffer, "the last one of a batch closes it") is None
    (batch,) = buffer.take_all(lane.queue.broker_name)
    assert batch.lane is lane
    assert bodies([batch]) == [["0", "1"]]
    assert buffer.pending_bytes == batch.size


def test_a_plain_message_joins_no_batch_of_other_wishes():
    buffer = Buffer()
    buffer.put("first")
    buffer.clock.advance(5_000)
    assert join(buffer, "much later") is None
    buffer.put("opens another", timeout_ms=3_001)
    assert join(buffer, "sooner than those before") is None
    buffer.put("bound", buffer.topic.sticky)
    assert join(buffer, "free") is None
    buffer.put("no retry", retries=0)
    assert join(buffer, "as usual") is None


def test_a_plain_message_joins_nothing_without_room_and_after_closing():
    buffer = Buffer(max_bytes=100)
    buffer.put("x" * 200)
    assert join(buffer, "y") is None
    buffer.close()
    assert join(buffer, "z") is None


def test_batches_close_by_number_and_by_size():
    buffer = Buffer(max_batch_messages=3)
    for n in range(7):
        buffer.put(str(n), 0)
    assert bodies(buffer.take_all()) == [["0", "1", "2"], ["3", "4", "5"], ["6"]]
    buffer = Buffer(max_batch_bytes=300)
    for _ in range(5):
        buffer.put("x" * 50, 0)
    assert [len(one) for one in bodies(buffer.take_all())] == [2, 2, 1]
    buffer.put("x" * 10, 1)
    buffer.put("x" * 5_000, 1)
    buffer.put("x" * 10, 1)
    assert [len(one) for one in bodies(buffer.take_all())] == [1, 1, 1], "a large one goes alone"


def test_a_batch_is_never_larger_than_allowed_unless_it_is_one_message():
    buffer = Buffer(max_batch_bytes=1_000, max_batch_messages=50)
    for n in range(100):
        buffer.put("x" * (n * 37 % 1_500 + 1), 0)
    while taken := buffer.take_all():
        for batch in taken:
            assert batch.size <= 1_000 or len(batch.messages) == 1
            buffer.store(batch)


def test_messages_of_different_kinds_do_not_share_a_batch():
    buffer = Buffer()
    buffer.put("1", 0)
    buffer.put("2", 0, retries=0)
    buffer.put("3", 0, wait_store=False)
    buffer.put("4", 0, wait_store=False)
    buffer.put_batch(0, "5", "6")
    buffer.put("7", 0)
    taken = buffer.take_all()
    assert bodies(taken) == [["1"], ["2"], ["3", "4"], []]
    assert [batch.retries for batch in taken] == [2, 0, 2, 2]
    assert [batch.wait_store for batch in taken] == [True, True, False, True]
    assert taken[3].explicit_count == 2


def test_messages_share_a_batch_only_when_their_deadlines_are_near():
    buffer = Buffer()
    buffer.put("1", 0, timeout_ms=1_000)
    buffer.put("2", 0, timeout_ms=1_000 + DEADLINE_SPREAD_MS)
    buffer.put("3", 0, timeout_ms=1_000 - DEADLINE_SPREAD_MS)
    buffer.put("4", 0, timeout_ms=5_000)
    buffer.put("5", 0, timeout_ms=1_000)
    taken = buffer.take_all()
    assert bodies(taken) == [["1", "2", "3"], ["4"], ["5"]]
    now_ms = buffer.clock.monotonic_ms()
    assert [batch.deadline_ms - now_ms for batch in taken] == [1_250, 5_000, 1_000]


def test_keyless_messages_stick_to_a_queue_until_its_batch_is_taken():
    buffer = Buffer()
    lanes = [buffer.put()[1] for _ in range(5)]
    assert len(set(map(id, lanes))) == 1
    buffer.take_all(lanes[0].queue.broker_name)
    _, other = buffer.put()
    assert other is not lanes[0]


def test_keyless_messages_keep_away_from_bound_ones_and_from_brokers_to_avoid():
    buffer = Buffer()
    for number in range(7):
        buffer.put("bound", number)
    free = [buffer.put()[1] for _ in range(3)]
    assert {lane.queue.queue_id for lane in free} == {3}
    assert {lane.queue.broker_name for lane in free} == {"b"}
    buffer = Buffer()
    buffer.avoided = frozenset("a")
    for _ in range(20):
        _, lane = buffer.put()
        assert lane.queue.broker_name == "b"
        (batch,) = buffer.take_all("b")
        buffer.store(batch)


def test_one_of_ten_thousand_queues_is_found_quickly_and_fairly():
    buffer = Buffer()
    queues = tuple(MessageQueue("t", "a", n) for n in range(10_000))
    topic = buffer.topic_lanes(queues, 5, lambda _: NOBODY)
    chosen = [next_lane(topic, NOBODY).queue.queue_id for _ in range(20)]
    assert chosen == list(range(6, 26))
    for lane in topic.lanes[26:33]:
        lane.in_flight = 1
    assert next_lane(topic, NOBODY).queue.queue_id == 33, "an idle one first"
    both = tuple(MessageQueue("t", name, n) for name in "ab" for n in range(100))
    topic = buffer.topic_lanes(both, 0, lambda _: NOBODY)
    assert next_lane(topic, frozenset("a")).queue == MessageQueue("t", "b", 0)
    assert next_lane(topic, frozenset("ab")).queue.broker_name == "b", "any, if none is good"


@given(
    st.builds(
        Message,
        topic=st.just("t"),
        body=st.binary(min_size=1, max_size=300),
        tag=st.none() | st.text(min_size=1, max_size=50),
        keys=st.lists(st.text(min_size=1, max_size=30), max_size=10),
        properties=st.none() | st.dictionaries(st.text(min_size=1, max_size=20), st.text()),
        sharding_key=st.none() | st.text(min_size=1, max_size=50),
    )
)
def test_the_size_of_a_message_is_about_what_travels(message):
    encoded = encode_payload([message]).raw_size
    assert encoded <= message_size(message)
    assert message_size(message) <= encoded + 18 * (
        3 + len(message.keys) + 2 * len(message.properties or ()) + 4
    )


# ---- Leaving ------------------------------------------------------------------------------


def test_a_flight_has_a_few_batches_of_each_queue():
    buffer = Buffer(max_batch_messages=1)
    for n in range(BATCHES_A_FLIGHT + 2):
        buffer.put(f"0-{n}", 0)
        buffer.put(f"1-{n}", 1)
    taken = buffer.take_all()
    assert len(taken) == 2 * BATCHES_A_FLIGHT
    for batch in taken[:-1]:
        buffer.store(batch)
    assert len(buffer.take_all()) == 2, "the other queue's flight is not over"
    buffer.store(taken[-1])
    assert bodies(buffer.take_all()) == [[f"1-{n}"] for n in (4, 5)]


def test_a_request_that_is_full_leaves_the_rest_for_the_next_one():
    buffer = Buffer(max_batch_messages=1)
    for lane in range(4):
        buffer.put("x" * 400, lane)
    first = buffer.take("a", 1_000, 4_096)
    second = buffer.take("a", 1_000, 4_096)
    assert [batch.queue.queue_id for batch in first + second] == [0, 1, 2, 3]
    buffer.put("x" * 5_000, 0)
    buffer.store(first[0])
    assert len(buffer.take("a", 1_000, 4_096)) == 1, "one batch goes in any case"
    for lane in range(4):
        buffer.put("x", lane)
    for batch in first[1:] + second:
        buffer.store(batch)
    assert len(buffer.take("a", MANY, 2)) == 2
    assert buffer.take("b", MANY, 2) == []


def test_what_returns_is_first_in_the_order_of_its_first_try():
    buffer = Buffer(max_batch_messages=1)
    for n in range(3):
        buffer.put(f"old {n}", 0)
    taken = buffer.take_all()
    for number, batch in enumerate(taken):
        batch.first_sequence = number
    buffer.put("new", 0)
    lane = taken[0].lane
    for number in (1, 0, 2):
        assert buffer.ready_brokers() == []
        buffer.put_back(taken[number])
    moved = Buffer()
    moved.put("moved", 1)
    (batch,) = moved.take_all()
    batch.first_sequence = 0
    buffer.move(lane, batch)
    assert bodies(buffer.take_all()) == [["old 0"], ["old 1"], ["old 2"], ["new"]]


def test_a_batch_that_moves_gets_the_bytes_of_its_new_queue():
    buffer = Buffer()
    buffer.put("1")
    batch, *_ = buffer.take_all("a") or buffer.take_all("b")
    batch.encoded = (b"old",)
    batch.first_sequence = 9
    other = buffer.topic.lanes[7]
    buffer.move(other, batch)
    assert batch.queue == other.queue
    assert batch.encoded is None
    assert batch.first_sequence == 9
    assert buffer.take_all("b") == [batch]
    assert batch.lane is other


def test_what_is_late_is_taken_from_the_front_of_each_queue():
    buffer = Buffer(max_batch_messages=1)
    buffer.put("1", 0, timeout_ms=100)
    buffer.put("2", 0, timeout_ms=5_000)
    buffer.put("3", 1, timeout_ms=200)
    buffer.put("4", 4, timeout_ms=100)
    buffer.clock.advance(150)
    now_ms = buffer.clock.monotonic_ms()
    assert bodies(buffer.take_late("a", now_ms)) == [["1"]]
    assert bodies(buffer.take_late("a", now_ms + 100)) == [["3"]]
    assert bodies(buffer.take_all("a")) == [["2"]]
    assert buffer.take_late("c", now_ms) == []


def test_what_may_leave_a_queue_leaves_it_in_order():
    buffer = Buffer(max_batch_messages=1)
    lane = buffer.topic.lanes[0]
    for n in range(6):
        buffer.put(str(n), 0)
    batches = list(lane.closed)
    for number in (0, 2, 3):
        batches[number].bound = False
    batches[3].holders = frozenset("b")
    batches[2].stays_until_ms = 10
    others = {lane.queue: frozenset("b")}
    buffer.put("of another queue", 1)

    def free(now_ms: int):
        return buffer.take_free("a", lambda queue: others.get(queue, NOBODY), now_ms)

    assert free(9) == [(lane, batches[0])]
    assert free(10) == [(lane, batches[2])]
    assert bodies(buffer.take_all())[:2] == [["1"], ["3"]]


# ---- Past the buffer ----------------------------------------------------------------------


def claim(buffer: Buffer, lane: Lane | None = None) -> PendingBatch | None:
    batch = buffer.lone_batch(Message("t", b"direct"), MANY, 2, True, True)
    found = buffer.claim(batch, lane or buffer.topic.lanes[0], buffer.topic)
    assert found is batch.lane
    return batch if found is not None else None


def test_a_message_is_put_in_flight_at_once_only_if_no_other_one_is_without_an_outcome():
    buffer = Buffer()
    lane, other = buffer.topic.lanes[:2]
    batch = claim(buffer, lane)
    assert batch is not None
    assert batch.lane is lane
    assert lane.in_flight
    assert buffer.pending_bytes == batch.size == message_size(batch.messages[0])
    assert claim(buffer, lane) is None
    assert claim(buffer, other) is None, "it shares the next request"
    buffer.put("behind", lane)
    assert buffer.take_all() == []
    assert buffer.store(batch)
    assert not buffer.store(batch), "it ends once"
    assert claim(buffer, lane) is None, "what waits is first"
    (flight,) = buffer.take_all()
    assert claim(buffer, lane) is None
    buffer.store(flight)
    assert buffer.pending_bytes == 0
    assert claim(buffer, lane) is not None


def test_a_lone_message_of_no_queue_takes_the_next_idle_one():
    buffer = Buffer()
    queues = []
    for _ in range(8):
        batch = buffer.lone_batch(Message("t", b"x"), MANY, 2, False, True)
        lane = buffer.claim(batch, None, buffer.topic)
        queues.append(batch.queue)
        assert lane is not None
        assert lane.queue == batch.queue
        buffer.store(batch)
    assert sorted(queues) == sorted(buffer.topic.queues)


def test_what_was_ended_while_its_retry_was_decided_is_not_sent_again():
    buffer = Buffer()
    lane, other = buffer.topic.lanes[:2]
    batch = claim(buffer, lane)
    buffer.store(batch)
    buffer.put_back(batch)
    buffer.move(other, batch)
    assert lane.idle
    assert other.idle
    assert buffer.take_all() == []


# ---- Room ---------------------------------------------------------------------------------


def test_without_room_a_message_is_refused_and_nothing_is_changed():
    buffer = Buffer(max_bytes=100)
    buffer.put("x" * 60, 0)
    with pytest.raises(QueueFull, match="buffer_memory_bytes"):
        buffer.put("x", 0)
    with pytest.raises(QueueFull):
        buffer.put_batch(0, "x")
    with pytest.raises(QueueFull):
        buffer.wait_room(buffer.clock.monotonic_ms() + 10)
    (batch,) = buffer.take_all()
    assert len(batch.messages) == 1
    buffer.store(batch)
    assert buffer.pending_bytes == 0
    buffer.put("x", 0)


def test_who_waits_for_room_gets_it_when_a_batch_ends():
    buffer = Buffer(max_bytes=100)
    buffer.loop.in_loop_thread = False
    buffer.put("x" * 60, 0)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(buffer.put("y", 1, timeout_ms=60_000)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    (flight,) = buffer.take_all()
    assert found == []
    buffer.store(flight)
    # Each of them needs room, and finds it in what the others left.
    while any(thread.is_alive() for thread in threads):
        for one in buffer.take_all():
            buffer.store(one)
        threads[0].join(0.001)
    assert len(found) == 3


def test_who_waits_for_room_is_told_when_the_buffer_is_closed():
    buffer = Buffer(max_bytes=100)
    buffer.loop.in_loop_thread = False
    buffer.put("x" * 60, 0)
    found = []

    def wait() -> None:
        try:
            buffer.put("y", 0, timeout_ms=600_000)
        except ClientClosed as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    buffer.close()
    thread.join(10)
    assert len(found) == 1


def test_closing_takes_everything_that_waits_and_lets_nothing_in():
    buffer = Buffer(max_batch_messages=1)
    for lane in range(8):
        for n in range(3):
            buffer.put(str(n), lane)
    flight = buffer.take("a", MANY, 1)
    flight[0].first_sequence = 5
    found = buffer.close()
    assert len(found) == 24 - 1
    assert buffer.close() == []
    assert buffer.ready_brokers() == []
    for call in (
        lambda: buffer.put("x", 0),
        lambda: buffer.put("x"),
        lambda: buffer.put_batch(0, "x"),
        lambda: buffer.wait_room(MANY),
        lambda: claim(buffer),
    ):
        with pytest.raises(ClientClosed):
            call()
    for batch in found:
        buffer.store(batch)
    assert not buffer.wait_empty(0)
    buffer.store(flight[0])
    assert buffer.wait_empty(0)
    assert buffer.pending_bytes == 0


# ---- Everything together ------------------------------------------------------------------


class AnyCourse(RuleBasedStateMachine):
    """Whatever is done in whatever order: order, account and lists stay right."""

    flights = Bundle("flights")

    def __init__(self) -> None:
        super().__init__()
        self.buffer = Buffer(max_batch_messages=3, max_batch_bytes=400)
        self.sequence = 0
        self.number = 0
        self.sizes: dict[int, int] = {}
        self.gone: dict[int, list[int]] = {lane: [] for lane in range(8)}
        self.flying: list[PendingBatch] = []

    @rule(
        lane=st.integers(0, 7), size=st.integers(1, 200), timeout_ms=st.sampled_from([100, 3_000])
    )
    def append(self, lane, size, timeout_ms):
        self.number += 1
        body = str(self.number).rjust(size, "0")
        self.buffer.put(body, lane, timeout_ms=timeout_ms)

    @rule(broker=st.sampled_from("ab"), max_bytes=st.sampled_from([1, 500, MANY]))
    def take(self, broker, max_bytes):
        for batch in self.buffer.take(broker, max_bytes, 5):
            if batch.first_sequence < 0:
                batch.first_sequence = self.sequence
                self.sequence += len(batch.messages)
            self.flying.append(batch)

    @rule(data=st.data(), succeeds=st.booleans())
    def land(self, data, succeeds):
        if not self.flying:
            return
        lane = data.draw(st.sampled_from(self.flying)).lane
        flight = [one for one in self.flying if one.lane is lane]
        self.flying = [one for one in self.flying if one.lane is not lane]
        # As brokers do: all behind the first one refused are refused, too.
        good = len(flight) if succeeds else data.draw(st.integers(0, len(flight) - 1))
        for number, batch in enumerate(flight):
            if number < good:
                index = self.buffer.topic.lanes.index(lane)
                self.gone[index] += [int(one.body) for one in batch.messages]
                self.buffer.store(batch)
            else:
                self.buffer.put_back(batch)

    @invariant()
    def order_holds(self):
        for numbers in self.gone.values():
            assert numbers == sorted(numbers)

    @invariant()
    def the_account_is_exact(self):
        waiting = list(self.flying)
        for lane in self.buffer.topic.lanes:
            waiting += [*lane.returned, *lane.closed]
            waiting += [lane.open] if lane.open is not None else []
        assert self.buffer.pending_bytes == sum(batch.size for batch in waiting)
        for batch in waiting:
            assert batch.size == sum(
                len(one.body) + MESSAGE_OVERHEAD_BYTES for one in batch.messages
            )

    @invariant()
    def whoever_can_be_sent_is_listed(self):
        listed = [id(lane) for lanes in self.buffer._ready.values() for lane in lanes]
        assert len(listed) == len(set(listed))
        for lane in self.buffer.topic.lanes:
            assert lane.listed == (id(lane) in listed)
            if lane.waits and not lane.in_flight:
                assert lane.listed


TestAnyCourse = AnyCourse.TestCase
