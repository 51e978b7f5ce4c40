"""What joins an open batch ends as if it had been added with care, in C and in Python."""

from __future__ import annotations

import collections
import enum
import gc
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from harness.threadless_loop import ThreadlessLoop
from hypothesis import given, settings
from hypothesis import strategies as st

from mqmesh.clock import SystemClock
from mqmesh.errors import ClientClosed, InvalidArgument, QueueFull
from mqmesh.message import (
    MAX_FLAG,
    MAX_KEY_LENGTH,
    MAX_KEYS,
    MAX_PROPERTIES_BYTES,
    MAX_TAG_LENGTH,
    NO_KEYS,
    Message,
    MessageQueue,
)
from mqmesh.message_checks import check_messages
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.sdk.producer import admission
from mqmesh.sdk.producer.admission import is_compiled
from mqmesh.sdk.producer.lanes import PlainOpenBatch, TopicLanes
from mqmesh.sdk.producer.pace import GIVE_WAY_MESSAGES
from mqmesh.sdk.producer.producer_options import ProducerOptions
from mqmesh.sdk.producer.queue_selector import queue_index
from mqmesh.sdk.producer.send_buffer import SendBuffer, message_size
from mqmesh.sdk.producer.send_result import SendFuture
from mqmesh.testing.clock import ManualClock

OPTIONS = ProducerOptions(
    max_message_size=1_000, buffer_memory_bytes=6_000, batch_size_bytes=2_000, batch_messages=12
)
ROOMY = ProducerOptions(
    max_message_size=1_000,
    buffer_memory_bytes=1 << 40,
    batch_size_bytes=8 << 20,
    batch_messages=65_536,
)


class Ways(enum.Enum):
    """How messages come into batches."""

    CAREFUL = "append only"
    PLAIN = "joined in Python"
    NATIVE = "joined in C"


FAST = Ways.NATIVE if is_compiled() else Ways.PLAIN
needs_c = pytest.mark.parametrize("way", [Ways.NATIVE] if is_compiled() else [])


class Sends:
    """A buffer, and ``send_async`` into it."""

    def __init__(
        self,
        options: ProducerOptions = OPTIONS,
        way: Ways = FAST,
        clock: ManualClock | SystemClock | None = None,
    ) -> None:
        self.options = options
        self.loop = ThreadlessLoop(in_loop_thread=True)
        self.clock: Any = clock or self.loop.clock
        self.loop.clock = self.clock
        self.gave_way: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            if way is not Ways.NATIVE:
                patch.setattr(admission, "NativeAdmission", None)
            self.buffer = SendBuffer(options, self.loop, self.gave_way.append)
        queues = tuple(MessageQueue("t", name, number) for name in "ab" for number in range(3))
        self.topics = self.buffer.topics
        self.topics["t"] = self.buffer.topic_lanes(queues, 0, lambda _: frozenset())
        self.careful_calls = 0
        self.send: Callable[..., SendFuture] = self.joining
        if way is Ways.CAREFUL:
            self.send = self.carefully

    def joining(self, message: Message) -> SendFuture:
        return self.buffer.join(message) or self.carefully(message)

    @property
    def lanes(self) -> TopicLanes:
        return self.topics["t"]

    def carefully(self, message: Message) -> SendFuture:
        self.careful_calls += 1
        (message,) = check_messages((message,), max_message_size=self.options.max_message_size)
        key = message.sharding_key
        bound = key is not None
        future, _ = self.buffer.append(
            None if key is None else self.lanes.lanes[queue_index(key, len(self.lanes.lanes))],
            self.topics[message.topic],
            message,
            message_size(message),
            self.clock.monotonic_ms() + self.options.send_msg_timeout_ms,
            None,
            self.options.retry_times_when_send_async_failed,
            bound,
        )
        return future

    def is_fast(self, message: Any) -> bool:
        """True when a message goes the fast way, although a batch had to be opened before."""
        self.send(Message("t", b"opens a batch"))
        before = self.careful_calls
        try:
            self.send(message)
        except (InvalidArgument, KeyError):
            pass
        return self.careful_calls == before

    def state(self) -> list[object]:
        """All that sends change."""
        return [self.buffer.pending_bytes, self.lanes.index] + [
            [
                *((batch.messages, batch.size, batch.bound, batch.deadline_ms) for batch in closed),
                open_state(lane.open),
            ]
            for lane in self.lanes.lanes
            for closed in [[*lane.returned, *lane.closed]]
        ]


def open_state(batch: PlainOpenBatch | None) -> object:
    if batch is None:
        return None
    facts = (batch.messages, batch.size, batch.usual, batch.bound)
    return (*facts, batch.deadline_ms, batch.deadline_max_ms)


TEXTS = st.sampled_from(["k", "a" * 30, "é", "x y", "", " x", "x\t", "a|b", "|", "a||b", "\ud800"])
MESSAGES = st.builds(
    Message,
    topic=st.sampled_from(["t"] * 9 + ["other"]),
    body=st.binary(min_size=0, max_size=1_001),
    tag=st.none() | TEXTS,
    keys=st.just(NO_KEYS) | st.lists(TEXTS, max_size=3) | st.tuples(TEXTS),
    properties=st.sampled_from([None] * 5) | st.dictionaries(TEXTS, TEXTS, max_size=2),
    flag=st.sampled_from([0] * 5 + [1, -1, 1 << 70]),
    sharding_key=st.sampled_from([None] * 5 + ["s", "s", "é", "a" * 255, "", "a" * 256]),
    delay_level=st.sampled_from([0] * 5 + [3]),
    deliver_at_ms=st.sampled_from([0] * 5 + [1_000]),
)
PLAIN = st.builds(Message, topic=st.just("t"), body=st.binary(min_size=1, max_size=300))
STEPS = st.lists(
    st.one_of(
        MESSAGES,
        PLAIN,
        PLAIN,
        PLAIN,
        st.tuples(st.just("wait"), st.integers(0, 300)),
        st.just(("take", 0)),
        st.just(("end", 0)),
    ),
    max_size=60,
)


class Walk:
    """Carries out steps, and says what came of each."""

    def __init__(self, way: Ways) -> None:
        self.sends = Sends(way=way)
        self.taken: list[Any] = []

    def step(self, step: Any) -> object:
        buffer = self.sends.buffer
        if isinstance(step, Message):
            try:
                future = self.sends.send(step)
            except (InvalidArgument, QueueFull, KeyError) as error:
                return type(error), str(error)
            assert future.batch.messages[future.index] == step
            return future.index, future.batch.queue
        kind, number = step
        if kind == "wait":
            self.sends.clock.advance(number)
        elif kind == "take":
            for name in buffer.ready_brokers():
                self.taken += buffer.take(name, 1 << 20, 100)
        else:
            with buffer.lock:
                for batch in self.taken:
                    buffer.end(batch, BatchOutcome(0, 0))
            self.taken.clear()
        return None


@given(STEPS)
@settings(max_examples=300)
def test_whatever_is_sent_all_ways_end_the_same(steps):
    careful, *others = (Walk(way) for way in Ways)
    for step in steps:
        expected = careful.step(step)
        for other in others:
            assert other.step(step) == expected
            assert other.sends.state() == careful.sends.state()


@pytest.mark.parametrize(
    "message",
    [
        Message("t", b"x"),
        Message("t", b"x" * 1_000),
        Message("t", b"x", "tag"),
        Message("t", b"x", "t" * MAX_TAG_LENGTH),
        Message("t", b"x", "two words"),
        Message("t", b"x", None, ["key"]),
        Message("t", b"x", "tag", ("k" * MAX_KEY_LENGTH,) * MAX_KEYS),
        Message("t", b"x", None, []),
        Message("t", b"x", "é", ["é"]),
        Message("t", b"x", properties={}),
        Message("t", b"x", properties={"origin": "JFK", "é": ""}),
        Message("t", b"x", properties={"a": "b" * (MAX_PROPERTIES_BYTES - 1)}),
        Message("t", b"x", flag=MAX_FLAG),
    ],
)
@needs_c
def test_what_wants_nothing_special_joins_in_c(message, way):
    assert Sends(ROOMY, way).is_fast(message)


class Text(str):
    __slots__ = ()


class OutgoingRequest(Message, array_like=True, gc=False):
    pass


@pytest.mark.parametrize(
    "message",
    [
        "no message",
        None,
        OutgoingRequest("t", b"x"),
        Message(Text("t"), b"x"),
        Message("other", b"x"),
        Message(["t"], b"x"),  # type: ignore[arg-type]
        Message("t", b""),
        Message("t", b"x" * 1_001),
        Message("t", bytearray(b"x")),  # type: ignore[arg-type]
        Message("t", "x"),  # type: ignore[arg-type]
        Message("t", b"x", ""),
        Message("t", b"x", "t" * (MAX_TAG_LENGTH + 1)),
        Message("t", b"x", Text("tag")),
        Message("t", b"x", b"tag"),  # type: ignore[arg-type]
        Message("t", b"x", " tag"),
        Message("t", b"x", "tag\x1f"),
        Message("t", b"x", "a|b"),
        Message("t", b"x", None, "keys"),
        Message("t", b"x", None, {"key"}),  # type: ignore[arg-type]
        Message("t", b"x", None, [""]),
        Message("t", b"x", None, [1]),  # type: ignore[list-item]
        Message("t", b"x", None, ["k" * (MAX_KEY_LENGTH + 1)]),
        Message("t", b"x", None, ["k"] * (MAX_KEYS + 1)),
        Message("t", b"x", sharding_key="s"),
        Message("t", b"x", flag=False),
        Message("t", b"x", flag=-1),
        Message("t", b"x", properties={"": "b"}),
        Message("t", b"x", properties={"TTL": "5"}),
        Message("t", b"x", properties={"a": 1}),  # type: ignore[dict-item]
        Message("t", b"x", properties={"a": "b" * MAX_PROPERTIES_BYTES}),
        Message("t", b"x", sharding_key=""),
        Message("t", b"x", sharding_key="\ud800"),
        Message("t", b"x", flag=1 << 70),
        Message("t", b"x", delay_level=1),
        Message("t", b"x", deliver_at_ms=1),
        Message("t", b"x", deliver_at_ms=False),
    ],
)
@pytest.mark.parametrize("way", [Ways.PLAIN, FAST])
def test_what_needs_a_closer_look_does_not_join(message, way):
    assert not Sends(ROOMY, way).is_fast(message)


@pytest.mark.parametrize("key", ["s", "é", "another", "k" * 255])
@needs_c
def test_a_sharding_key_joins_the_batch_of_its_queue(key, way):
    sends = Sends(ROOMY, way)
    first, second = (sends.send(Message("t", body, sharding_key=key)) for body in (b"1", b"2"))
    assert second.batch is first.batch
    assert first.batch.queue == sends.lanes.queues[queue_index(key, 6)]
    assert sends.careful_calls == 1


@needs_c
def test_what_may_go_anywhere_stays_apart_from_what_may_not(way):
    sends = Sends(ROOMY, way)
    one_key = [sends.send(Message("t", b"bound", sharding_key="s")) for _ in range(50)]
    loose = [sends.send(Message("t", b"anywhere")) for _ in range(50)]
    more = sends.send(Message("t", b"bound", sharding_key="s"))
    assert {one.batch for one in one_key} == {more.batch}
    assert len({one.batch for one in loose}) == 1
    opened = [lane.open for lane in sends.lanes.lanes if lane.open is not None]
    assert {one.pending: one.bound for one in opened} == {more.batch: True, loose[0].batch: False}
    assert sends.careful_calls == 2


def test_a_field_that_was_deleted_is_no_crash():
    for name in Message.__struct_fields__:
        message = Message("t", b"x")
        delattr(message, name)
        sends = Sends()
        sends.send(Message("t", b"opens a batch"))
        with pytest.raises(AttributeError):
            sends.send(message)


@needs_c
def test_a_locked_buffer_is_left_alone(way):
    sends = Sends(way=way)
    sends.send(Message("t", b"opens a batch"))
    state = sends.state()
    with sends.buffer.lock:
        assert sends.buffer.join(Message("t", b"x")) is None
        assert sends.state() == state
    assert sends.buffer.join(Message("t", b"x")) is not None
    assert not sends.buffer.lock.locked()


@needs_c
def test_nothing_of_python_runs_while_messages_join(way):
    # It looks at the lock and does not take it: a finalizer could let another thread do so.
    sends = Sends(ROOMY, way, SystemClock())
    sends.send(Message("t", b"opens a batch"))
    texts = {"tag": "é", "keys": ["a key"], "properties": {"origin": "JFK"}}
    messages = [Message("t", b"x", **texts) for _ in range(GIVE_WAY_MESSAGES - 2)]
    joined = collections.deque()
    joining = map(sends.buffer.join, messages)
    collections_begun: list[str] = []
    thresholds = gc.get_threshold()
    gc.callbacks.append(lambda phase, _: collections_begun.append(phase))
    try:
        gc.set_threshold(1)
        before = len(collections_begun)
        joined.extend(joining)
        after = len(collections_begun)
        # What is tracked does have it run, once no freed list can be used again.
        made = [[number] for number in range(1_000)]
        assert len(made) == 1_000
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.pop()
    assert None not in joined
    assert len(joined) == len(messages)
    assert before == after < len(collections_begun)


@needs_c
def test_what_could_run_python_meanwhile_is_refused(way, monkeypatch):
    args = ({}, len, len, OPTIONS)
    other = threading.RLock()
    with monkeypatch.context() as patch, pytest.raises(TypeError, match="lock"):
        patch.setattr(admission, "LOCK_TYPE", type(other))
        admission.make_admission(args[0], other, *args[1:])  # type: ignore[arg-type]
    monkeypatch.setattr(admission, "SendFuture", Sends)
    with pytest.raises(TypeError, match="make_future"):
        admission.make_admission(args[0], threading.Lock(), *args[1:])  # type: ignore[arg-type]


def test_a_closed_buffer_takes_nothing():
    sends = Sends()
    sends.send(Message("t", b"opens a batch"))
    sends.buffer.close()
    with pytest.raises(ClientClosed):
        sends.send(Message("t", b"x"))


@pytest.mark.parametrize("way", [Ways.PLAIN, FAST])
def test_it_gives_way_each_so_many_messages(way):
    sends = Sends(ROOMY, way)
    for _ in range(3 * GIVE_WAY_MESSAGES - 1):
        sends.send(Message("t", b"x" * 36))
    assert sends.gave_way == [100 * GIVE_WAY_MESSAGES] * 2


@pytest.mark.parametrize("way", [Ways.PLAIN, FAST])
@pytest.mark.parametrize("broken", ["clock", "give_way"])
def test_an_error_of_those_it_calls_is_told_and_the_lock_is_free(broken, way):
    def fail(*_: object) -> int:
        raise RuntimeError(broken)

    sends = Sends(ROOMY, way)
    loop = ThreadlessLoop(in_loop_thread=True)
    with pytest.MonkeyPatch.context() as patch:
        if way is Ways.PLAIN:
            patch.setattr(admission, "NativeAdmission", None)
        if broken == "clock":
            patch.setattr(loop.clock, "monotonic_ns", fail)
        buffer = SendBuffer(ROOMY, loop, fail if broken == "give_way" else len)
    buffer.topics.update(sends.topics)
    sends.carefully(Message("t", b"opens a batch"))
    with pytest.raises(RuntimeError, match=broken):
        for _ in range(GIVE_WAY_MESSAGES + 1):
            buffer.join(Message("t", b"x"))
    assert not buffer.lock.locked()


def test_threads_lose_nothing_and_no_place_is_given_twice():
    sends = Sends(ROOMY)
    futures: list[list[SendFuture]] = [[] for _ in range(4)]
    messages = [[Message("t", b"%d %d" % (who, n)) for n in range(5_000)] for who in range(4)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [
            threading.Thread(
                target=lambda who=who: futures[who].extend(map(sends.send, messages[who]))
            )
            for who in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    for sent, own in zip(messages, futures, strict=True):
        for message, future in zip(sent, own, strict=True):
            assert future.batch.messages[future.index] is message
    places = {(id(one.batch), one.index) for own in futures for one in own}
    assert len(places) == 20_000
    assert sends.buffer.pending_bytes == sum(message_size(m) for own in messages for m in own)
    assert sends.careful_calls < 20_000


def test_no_reference_is_lost_or_kept():
    sends = Sends(ROOMY)
    message, texts = Message("t", b"x" * 300, "a tag", ["a key"]), Message("t", b"y" * 300)
    sends.send(message)
    batch = sends.lanes.sticky.open
    shared = [message, texts, batch, message.body, message.tag, message.keys]
    before = [sys.getrefcount(one) for one in shared]
    futures = [sends.send(one) for _ in range(1_000) for one in (message, texts)]
    with pytest.raises(InvalidArgument):
        sends.send(Message("t", b""))
    assert batch is not None
    assert (len(batch.messages), sends.careful_calls) == (2_001, 2)
    del batch.messages[1:], futures
    assert [sys.getrefcount(one) for one in shared] == before


def test_it_goes_with_the_last_who_knows_it():
    sends = Sends()
    sends.send(Message("t", b"x"))
    gc.collect()
    kind = type(sends.buffer.join.__self__)
    count = sum(type(one) is kind for one in gc.get_objects())
    del sends  # a cycle: it has send, which has its method carefully
    gc.collect()
    assert sum(type(one) is kind for one in gc.get_objects()) == count - 1


@needs_c
def test_what_is_no_open_batch_is_left_alone(way):
    sends = Sends(way=way)
    for nothing in (None, "a text", PlainOpenBatch):
        sends.lanes.sticky.open = nothing
        assert sends.buffer.join(Message("t", b"x")) is None
    sends.topics["t"] = SimpleNamespace()
    with pytest.raises(AttributeError, match="sticky"):
        sends.buffer.join(Message("t", b"x"))
    assert not sends.buffer.lock.locked()


# ---- At a producer ---------------------------------------------------------------------------


def test_a_producer_that_ended_lets_nothing_join(world):
    producer = world.producer()
    futures = [producer.send_async(Message("t", b"%d" % n, "tag")) for n in range(100)]
    world.run()
    assert [future.result().message_count for future in futures] == [1] * 100
    producer.send_async(Message("t", b"opens a batch"))
    kept = producer.send_async
    producer.close()
    with pytest.raises(ClientClosed):
        kept(Message("t", b"x"))


def test_a_forked_producer_lets_nothing_join(world):
    producer = world.producer()
    producer.send_async(Message("t", b"opens a batch"))
    producer._forked()
    with pytest.raises(ClientClosed, match="fork"):
        producer.send_async(Message("t", b"x"))
    producer._state = "running"  # so that it is closed after a "fork", too


def test_wishes_are_named(world):
    producer = world.producer()
    with pytest.raises(TypeError, match="timeout"):
        producer.send_async(Message("t", b"x"), timeout=5)
    with pytest.raises(TypeError):
        producer.send_async()


def test_a_topic_of_a_class_of_the_users_is_kept_as_a_plain_one(world):
    producer = world.producer(topic=None)
    assert world.call(lambda: producer.fetch_publish_queues(Text("t")))
    assert {type(topic) for topic in producer._buffer.topics} == {str}
