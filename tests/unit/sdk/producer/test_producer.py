"""The producer on a simulated network: sends, and their bounds."""

from __future__ import annotations

import pytest

from mqmesh.batch.payload import MAX_MESSAGES
from mqmesh.errors import EndpointUnreachable, InvalidArgument, QueueFull
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.messaging import SendStatus
from mqmesh.sdk.producer.producer import Producer

TIMEOUT_MS = 3_000


def message(body: bytes | str = b"x", **fields) -> Message:
    return Message("t", body.encode() if isinstance(body, str) else body, **fields)


def queue(number: int = 0, broker: str = "a") -> MessageQueue:
    return MessageQueue("t", broker, number)


# ---- The usual way ------------------------------------------------------------------------


def test_an_asynchronous_send_is_stored_and_says_where(world):
    producer = world.producer()
    told = []
    future = producer.send_async(message("hello"), told.append)
    assert not future.done()
    assert future.exception() is None
    world.run()
    assert future.done()
    assert told == [future]
    result = future.result()
    assert result.status is SendStatus.SEND_OK
    assert result.queue_offset == 0
    (stored,) = world.cluster.messages("t")
    assert stored.message_id == result.message_id
    assert stored.message_queue == result.message_queue
    assert stored.body == b"hello"


def test_a_synchronous_send_needs_the_engine_only_for_the_first_time(world):
    producer = world.producer()
    first = world.call(lambda: producer.send(message("1")))
    assert first.status is SendStatus.SEND_OK
    before = len(world.broker.requests)
    second = producer.send(message("2"))  # nobody turns the engine's loop meanwhile
    assert second.status is SendStatus.SEND_OK
    assert len(world.broker.requests) == before + 1
    assert sorted(world.stored()) == [b"1", b"2"]


def test_a_producer_is_known_to_its_brokers(world):
    producer = world.producer()
    world.call(lambda: producer.send(message()))
    world.run(40_000)
    assert len(world.broker.heartbeats) >= 2
    assert world.broker.heartbeats[0].producer_groups == ["g"]


def test_sends_that_come_together_travel_together(world):
    producer = world.producer()
    futures = [producer.send_async(message(str(n))) for n in range(100)]
    world.run()
    assert len(world.broker.sends) == 1
    results = [future.result() for future in futures]
    assert [result.queue_offset for result in results] == list(range(100))
    assert len({result.message_id for result in results}) == 100


@pytest.mark.parametrize("options", [{}, {"retry_times_when_send_failed": 0}])
def test_a_synchronous_send_shares_the_request_of_what_waits(world, options):
    producer = world.producer(**options)
    first = producer.send_async(message("1"))
    result = world.call(lambda: producer.send(message("2")))
    assert first.result().message_queue == result.message_queue
    assert len(world.broker.sends) == 1


def test_a_synchronous_send_that_is_interrupted_leaves_its_queue_free(world, monkeypatch):
    producer = world.producer()
    serve = world.broker.serve

    def interrupt(command, answer):
        serve(command, answer)
        raise KeyboardInterrupt

    world.call(lambda: producer.send(message("1")))
    monkeypatch.setattr(world.broker, "serve", interrupt)
    with pytest.raises(KeyboardInterrupt):
        producer.send(message("2"), queue=queue())
    monkeypatch.setattr(world.broker, "serve", serve)
    assert producer._buffer.pending_bytes == 0
    assert producer.send(message("3"), queue=queue()).status is SendStatus.SEND_OK
    assert producer.metrics().number("sends_total", "t", "RequestTimeout") == 1


def test_keyless_messages_move_on_to_the_next_queue_with_each_batch(world):
    producer = world.producer()
    for _ in range(8):
        producer.send_async(message())
        world.run()
    counts = [len(world.broker.messages("t", number)) for number in range(4)]
    assert counts == [2, 2, 2, 2]


def test_a_sharding_key_a_selector_or_a_queue_decides(world):
    producer = world.producer()
    for n in range(5):
        producer.send_async(message(f"k{n}", sharding_key="key"))
        producer.send_async(message(f"q{n}"), queue=queue(2))
        producer.send_async(message(f"s{n}"), selector=lambda queues, _, arg: queues[arg], arg=3)
        producer.send_oneway(message(f"o{n}"), queue=queue(1))
    world.run()
    by_first = {}
    for one in world.cluster.messages("t"):
        by_first.setdefault(one.body[:1], []).append((one.queue_id, one.body[1:]))
    order = [b"0", b"1", b"2", b"3", b"4"]
    for first, numbers in ((b"q", {2}), (b"s", {3}), (b"o", {1})):
        assert {number for number, _ in by_first[first]} == numbers
        assert [body for _, body in by_first[first]] == order
    assert len({number for number, _ in by_first[b"k"]}) == 1
    assert [body for _, body in by_first[b"k"]] == order


def test_an_explicit_batch_is_stored_side_by_side(world):
    producer = world.producer()
    producer.send_async(message("before"), queue=queue(1))
    future = producer.send_batch_async([message(str(n)) for n in range(50)], queue=queue(1))
    producer.send_async(message("behind"), queue=queue(1))
    world.run()
    result = future.result()
    assert result.message_count == 50
    assert len(result.message_ids) == 50
    stored = world.broker.messages("t", 1)
    assert [one.body for one in stored[1:51]] == [str(n).encode() for n in range(50)]
    assert [one.message_id for one in stored[1:51]] == result.message_ids
    assert (stored[0].body, stored[51].body) == (b"before", b"behind")


def test_the_oldest_message_of_the_buffer_does_not_wait_for_the_youngest(world):
    producer = world.producer()
    world.run()
    world.broker.crash()
    first = producer.send_async(message("first"))
    world.run(1_500)
    producer.send_async(message("second"))
    world.run(TIMEOUT_MS - 1_500 + 200)
    assert isinstance(first.exception(), EndpointUnreachable)


# ---- Lingering ----------------------------------------------------------------------------


def test_a_batch_that_lingers_takes_what_comes_until_its_time_is_over(world):
    producer = world.producer(linger_ms=20)
    futures = []
    for n in range(4):
        futures.append(producer.send_async(message(str(n))))
        world.run(4)
    assert not world.broker.sends
    world.run(10)
    assert len(world.broker.sends) == 1
    assert [future.result().queue_offset for future in futures] == [0, 1, 2, 3]
    late = producer.send_async(message("late"))
    world.run(15)
    assert not late.done()
    world.run(10)
    assert late.done()


def test_a_synchronous_send_lingers_too(world):
    producer = world.producer(linger_ms=20)
    first = producer.send_async(message("1"))
    began_ms = world.network.clock.monotonic_ms()
    result = world.call(lambda: producer.send(message("2")))
    assert world.network.clock.monotonic_ms() - began_ms >= 20
    assert result.queue_offset == first.result().queue_offset + 1


def test_a_full_batch_an_explicit_one_and_one_of_little_time_do_not_linger(world):
    producer = world.producer(linger_ms=1_000, batch_messages=3)
    full = [producer.send_async(message(str(n)), queue=queue(0)) for n in range(3)]
    explicit = producer.send_batch_async([message("a"), message("b")], queue=queue(1))
    hurried = producer.send_async(message("c"), queue=queue(2), timeout_ms=1_100)
    lingering = producer.send_async(message("d"), queue=queue(3))
    world.run(10)
    assert all(future.done() for future in [*full, explicit, hurried])
    assert not lingering.done()
    producer.send_async(message("e"), queue=queue(3))
    behind = producer.send_batch_async([message("f")], queue=queue(3))
    world.run(10)
    assert lingering.done()
    assert behind.result().queue_offset == 2


def test_closing_sends_what_lingers(world):
    producer = world.producer(linger_ms=1_000, close_timeout_ms=500)
    future = producer.send_async(message())
    began_ms = world.network.clock.monotonic_ms()
    world.call(producer.close)
    assert future.result().queue_offset == 0
    assert world.network.clock.monotonic_ms() - began_ms < 100


def test_a_linger_as_long_as_the_timeout_is_refused():
    with pytest.raises(InvalidArgument, match="linger_ms"):
        Producer("g", linger_ms=500, send_msg_timeout_ms=500)


# ---- Bounds -------------------------------------------------------------------------------


def test_a_full_buffer_waits_and_then_refuses(world):
    producer = world.producer(buffer_memory_bytes=1_000)
    world.broker.crash()
    for _ in range(100):
        if producer._buffer.pending_bytes >= 1_000:
            break
        producer.send_async(message(b"x" * 100))
    assert producer._buffer.pending_bytes < 1_000 + 164 + 1
    assert not producer.can_send("t")
    error = world.call(lambda: producer.send_async(message(), timeout_ms=200))
    assert isinstance(error, QueueFull)
    assert isinstance(world.call(lambda: producer.send(message(), timeout_ms=200)), QueueFull)
    world.broker.start()
    future = world.call(lambda: producer.send_async(message("room"), timeout_ms=2_000))
    world.run(500)
    assert future.result().status is SendStatus.SEND_OK
    assert producer._buffer.pending_bytes == 0


def test_large_properties_do_not_make_batches_that_cannot_be_encoded(world):
    producer = world.producer()
    properties = {"p": "v" * 32_000}
    futures = [
        producer.send_async(message(b"x", properties=properties), queue=queue())
        for _ in range(1_000)
    ]
    world.run(1_000)
    assert all(future.exception() is None for future in futures)
    assert len(world.stored()) == 1_000


def test_a_message_of_the_largest_size_travels_alone(world):
    producer = world.producer(
        max_message_size=15 << 20, batch_size_bytes=8 << 20, buffer_memory_bytes=64 << 20
    )
    small = [producer.send_async(message(b"s" * 1_000_000), queue=queue()) for _ in range(7)]
    large = producer.send_async(message(b"l" * (15 << 20)), queue=queue())
    world.run(200)
    assert all(future.exception() is None for future in [*small, large])
    assert large.result().queue_offset == 7


def test_messages_changed_after_their_check_hurt_nobody_else(world):
    producer = world.producer()
    spoilt = message("spoilt")
    future = producer.send_async(spoilt, queue=queue())
    spoilt.tag = ["unhashable"]
    other = producer.send_batch_async([message("other")], queue=queue())
    world.run()
    assert isinstance(future.exception(), InvalidArgument)
    assert other.result().queue_offset == 0


def test_messages_that_lost_a_field_after_their_check_have_an_outcome(world):
    producer = world.producer()
    messages = [message(str(n)) for n in range(20)]
    futures = [producer.send_async(one) for one in messages]
    del messages[0].tag
    later = producer.send_batch_async([message("later")], queue=futures[0].batch.queue)
    world.run()
    assert all(isinstance(future.exception(), InvalidArgument) for future in futures)
    assert later.result().queue_offset == 0


@pytest.mark.parametrize("where", ["has_room", "schedule"])
def test_what_joins_a_batch_whose_opener_was_interrupted_is_sent(world, monkeypatch, where):
    producer = world.producer()

    def interrupt(*_: object) -> bool:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(producer._sender, where, interrupt)
        patch.setattr(monkeypatch, "undo", patch.undo)
        with pytest.raises(KeyboardInterrupt):
            producer.send_async(message("interrupted"))
    futures = [producer.send_async(message(str(n))) for n in range(100)]
    world.run()
    assert all(future.result() for future in futures)


@pytest.mark.parametrize(
    "arguments",
    [
        {"messages": []},
        {"messages": [Message("t", b"")]},
        {"messages": [Message("t", b"x"), Message("other", b"x")]},
        {"messages": [message(sharding_key="1"), message(sharding_key="2")]},
        {"messages": [message(), message(sharding_key="2")]},
        {"messages": [message()] * (MAX_MESSAGES + 1)},
        {"messages": [message(b"x" * (4 << 20))] * 5},
        {"messages": [message()], "queue": MessageQueue("t", "a", 99)},
        {"messages": [message()], "timeout_ms": 0},
        {"messages": message()},
    ],
)
def test_an_impossible_batch_is_refused_at_once(world, arguments):
    producer = world.producer()
    with pytest.raises(InvalidArgument):
        producer.send_batch_async(**arguments)
    assert producer._buffer.pending_bytes == 0


def test_a_batch_that_only_just_does_not_fit_is_refused_at_once(world):
    producer = world.producer(max_message_size=15 << 20)
    with pytest.raises(InvalidArgument, match="one batch"):
        producer.send_batch_async([message(b"x" * (8 << 20))] * 2)


@pytest.mark.parametrize("timeout_ms", [0, -1, 1.5, "1", True, None.__class__, 10**10])
def test_an_impossible_timeout_is_refused(world, timeout_ms):
    producer = world.producer()
    with pytest.raises(InvalidArgument):
        producer.send_async(message(), timeout_ms=timeout_ms)


@pytest.mark.parametrize("name", ["send", "send_async", "send_oneway"])
def test_an_unknown_choice_is_refused(world, name):
    producer = world.producer()
    with pytest.raises(TypeError, match="time_out_ms"):
        getattr(producer, name)(message(), time_out_ms=5)


@pytest.mark.parametrize(
    "topic", ["%RETRY%g", "%DLQ%g", "TBW102", "SCHEDULE_TOPIC_XXXX", "", "a b"]
)
def test_reserved_and_illegal_topics_are_refused(world, topic):
    world.build(topics=("t", topic))
    producer = world.producer()
    for send in (producer.send, producer.send_async, producer.send_oneway):
        with pytest.raises(InvalidArgument):
            send(Message(topic, b"x"))
    with pytest.raises(InvalidArgument):
        producer.fetch_publish_queues(topic)
    with pytest.raises(InvalidArgument):
        producer.can_send(topic, wait=True)


def test_a_selector_that_fails_or_chooses_nonsense_is_the_callers_concern(world):
    producer = world.producer()

    def fail(queues, one, arg):
        raise KeyError("selector")

    with pytest.raises(KeyError):
        producer.send_async(message(), selector=fail)
    with pytest.raises(InvalidArgument):
        producer.send_async(message(), selector=lambda *_: queue(99))
    assert producer._buffer.pending_bytes == 0
