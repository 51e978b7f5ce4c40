"""Push consumers, App and FastStream whose group acknowledges each message, on a real cluster."""

from __future__ import annotations

import asyncio
import queue
import subprocess
import sys
import threading
from collections import Counter

import msgspec
import pytest
from harness.patience import PATIENCE_S, until

import mqmesh.aio
from mqmesh import App, DeadLetterClient, Message, PushConsumer, Reject, SimpleConsumer
from mqmesh.errors import InvalidArgument, NoPermission
from mqmesh.faststream import MQMeshBroker
from mqmesh.protocol.groups import GroupConfig
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult


class Job(msgspec.Struct):
    number: int


def send(cluster, topic, numbers, keys=lambda number: None):
    producer = cluster.producer()
    messages = [Message(topic, b"%d" % one, sharding_key=keys(one)) for one in numbers]
    for future in [producer.send_async(message) for message in messages]:
        future.result(PATIENCE_S)


def make_group(cluster, group, delivery="message"):
    """Make a group whose failed messages come again soon."""
    with GroupAdmin(cluster.namesrv_addr) as admin:
        admin.put_group(GroupConfig(group, delivery=delivery, retry_delays="100ms"))


def held_by(cluster, group):
    """Return how many messages members of a group hold."""
    with GroupAdmin(cluster.namesrv_addr) as admin:
        return sum(one.count for some in admin.leases(group).values() for one in some)


def consumer_of(cluster, topic, group, listener, **options):
    options = {"delivery": "message", "consume_from_where": "FIRST_OFFSET", **options}
    consumer = PushConsumer(group, namesrv_addr=cluster.namesrv_addr, **options)
    consumer.subscribe(topic, listener=listener)
    return consumer


def test_outcomes_of_listeners_are_settled(mqmesh_cluster):
    topic, group = mqmesh_cluster.topic(queues=2), mqmesh_cluster.group()
    make_group(mqmesh_cluster, group)
    attempts: dict[int, list[int]] = {}

    def listen(messages):
        (message,) = messages
        number = int(message.body)
        attempts.setdefault(number, []).append(message.delivery_attempt)
        if number == 1 and message.delivery_attempt == 1:
            return ConsumeResult.RECONSUME_LATER
        if number == 2 and message.delivery_attempt == 1:
            raise ValueError("not yet")
        if number == 3:
            raise Reject("never")
        return None

    send(mqmesh_cluster, topic, range(20))
    with consumer_of(mqmesh_cluster, topic, group, listen) as consumer:
        until(lambda: sum(map(len, attempts.values())) == 22)
        send(mqmesh_cluster, topic, range(20, 30))
        until(lambda: len(attempts) == 30)
        assert consumer.failures == 3
        assert consumer.metrics().number("pulled_messages_total") == 32
        with DeadLetterClient(mqmesh_cluster.namesrv_addr) as letters:
            until(lambda: [one.message.body for one in letters.scan(group)] == [b"3"])
        until(lambda: consumer.metrics().number("cached_messages", topic) in (0, None))
    assert {number: one for number, one in attempts.items() if one != [1]} == {1: [1, 2], 2: [1, 2]}


def test_a_slow_message_holds_up_nobody_and_is_extended(mqmesh_cluster):
    topic, group = mqmesh_cluster.topic(queues=1), mqmesh_cluster.group()
    seen: Counter[int] = Counter()
    go_on = threading.Event()

    def listen(messages):
        for message in messages:
            seen[int(message.body)] += 1
            if message.body == b"0":
                assert go_on.wait(PATIENCE_S)

    send(mqmesh_cluster, topic, range(200))
    options = {"invisible_ms": 1_000, "consume_thread_count": 2}
    with (
        consumer_of(mqmesh_cluster, topic, group, listen, **options),
        consumer_of(mqmesh_cluster, topic, group, listen, **options),
        SimpleConsumer(group, namesrv_addr=mqmesh_cluster.namesrv_addr) as other,
    ):
        until(lambda: len(seen) == 200)
        other.subscribe(topic)
        assert other.receive(wait_ms=1_500) == [], "its lease is extended"
        go_on.set()
    assert set(seen.values()) == {1}


def test_twice_the_workers_are_held_and_what_is_not_begun_goes_back_at_once(mqmesh_cluster):
    topic, group = mqmesh_cluster.topic(queues=2), mqmesh_cluster.group()
    begun: queue.SimpleQueue[int] = queue.SimpleQueue()
    go_on = threading.Event()

    def listen(messages):
        begun.put(int(messages[0].body))
        assert go_on.wait(PATIENCE_S)

    send(mqmesh_cluster, topic, range(20))
    first = consumer_of(
        mqmesh_cluster, topic, group, listen, consume_thread_count=3, close_timeout_ms=30_000
    )
    with first:
        at_work = {begun.get(timeout=PATIENCE_S) for _ in range(3)}
        until(lambda: held_by(mqmesh_cluster, group) == 6)
        with SimpleConsumer(group, namesrv_addr=mqmesh_cluster.namesrv_addr) as other:
            other.subscribe(topic)
            found = []
            until(lambda: found.extend(other.receive(wait_ms=200)) or len(found) == 14)
            closing = threading.Thread(target=first.close)
            closing.start()
            until(lambda: found.extend(other.receive(wait_ms=200)) or len(found) == 17)
            go_on.set()
            closing.join()
            assert {int(one.body) for one in found} | at_work == set(range(20))
            assert {one.delivery_attempt for one in found} == {1}
            other.ack_many(found)
            assert held_by(mqmesh_cluster, group) == 0, "what was at work is acknowledged"
    assert begun.empty()


def test_a_message_that_is_with_its_listener_for_too_long_comes_again(mqmesh_cluster):
    topic, group = mqmesh_cluster.topic(queues=1), mqmesh_cluster.group()
    make_group(mqmesh_cluster, group)
    attempts: queue.SimpleQueue[int] = queue.SimpleQueue()
    go_on = threading.Event()

    def listen(messages):
        attempts.put(messages[0].delivery_attempt)
        if messages[0].delivery_attempt == 1:
            assert go_on.wait(PATIENCE_S)

    send(mqmesh_cluster, topic, [1])
    with consumer_of(mqmesh_cluster, topic, group, listen, consume_timeout_ms=1_000):
        assert [attempts.get(timeout=PATIENCE_S) for _ in range(2)] == [1, 2]
        go_on.set()
    assert attempts.empty()


def test_batches_that_fail_come_again_one_by_one(mqmesh_cluster):
    topic, group = mqmesh_cluster.topic(queues=1), mqmesh_cluster.group()
    make_group(mqmesh_cluster, group)
    calls: list[list[int]] = []

    def listen(messages):
        calls.append([int(message.body) for message in messages])
        if b"3" in [message.body for message in messages]:
            raise Reject("never") if len(messages) == 1 else ValueError("one is bad")

    mqmesh_cluster.producer().send_batch([Message(topic, b"%d" % n) for n in range(8)])
    with consumer_of(
        mqmesh_cluster, topic, group, listen, consume_message_batch_max_size=10,
        consume_thread_count=1,
    ):  # fmt: skip
        with DeadLetterClient(mqmesh_cluster.namesrv_addr) as letters:
            until(lambda: [one.message.body for one in letters.scan(group)] == [b"3"])
        until(lambda: sorted(n for one in calls[2:] for n in one) == list(range(1, 8)))
    assert calls[:2] == [[0], list(range(1, 8))], "the first receive is for one message"


def test_options_and_modes_that_do_not_fit_are_refused(mqmesh_cluster):
    topic, group = mqmesh_cluster.topic(queues=1), mqmesh_cluster.group()
    for unfit in (
        {"consume_orderly": True},
        {"message_model": "BROADCASTING"},
        {"max_reconsume_times": 3},
        {"invisible_ms": 10},
    ):
        with pytest.raises(InvalidArgument, match="delivery = message does not go with"):
            PushConsumer(group, delivery="message", **unfit)
    with consumer_of(mqmesh_cluster, topic, group, print):
        divided = consumer_of(mqmesh_cluster, topic, group, print, delivery="queue")
        with pytest.raises(NoPermission, match="delivery = message"):
            divided.start()


def test_coroutines_and_typed_handlers_take_messages_one_by_one(mqmesh_cluster):
    topic, groups = mqmesh_cluster.topic(queues=1), [mqmesh_cluster.group() for _ in range(4)]
    address = mqmesh_cluster.namesrv_addr
    seen: dict[str, list[int]] = {group: [] for group in groups}
    by_app, by_aio, by_faststream, by_listener = groups
    options = {"delivery": "message", "consume_from_where": "FIRST_OFFSET"}
    app, aio_app = App("jobs", namesrv_addr=address), mqmesh.aio.App("jobs", namesrv_addr=address)
    broker = MQMeshBroker(address)

    @app.subscriber(topic, group=by_app, **options)
    def work(job: Job) -> None:
        seen[by_app].append(job.number)

    @aio_app.subscriber(topic, group=by_aio, **options)
    async def work_async(job: Job) -> None:
        seen[by_aio].append(job.number)

    @broker.subscriber(topic, group=by_faststream, **options)
    async def work_faststream(job: dict[str, int]) -> None:
        seen[by_faststream].append(job["number"])

    async def listen(messages):
        seen[by_listener] += [msgspec.json.decode(one.body)["number"] for one in messages]

    async def program() -> None:
        consumer = mqmesh.aio.PushConsumer(by_listener, namesrv_addr=address, **options)
        await consumer.subscribe(topic, listener=listen)
        async with broker, aio_app, consumer, asyncio.timeout(PATIENCE_S):
            await broker.start()
            await asyncio.to_thread(
                until, lambda: all(sorted(one) == list(range(50)) for one in seen.values())
            )

    jobs = app.publisher(topic, Job)
    with app:
        for number in range(50):
            jobs.send(Job(number))
        asyncio.run(program())
        assert [held_by(mqmesh_cluster, group) for group in groups[1:]] == [0, 0, 0]


def test_messages_of_a_key_are_consumed_in_order_whatever_fails(mqmesh_cluster):
    topic, group = mqmesh_cluster.topic(queues=1), mqmesh_cluster.group()
    make_group(mqmesh_cluster, group, delivery="fifo")
    done: dict[str, list[int]] = {}
    at_work: Counter[str] = Counter()
    overlaps: list[str] = []
    lock = threading.Lock()

    def listen(messages):
        for message in messages:
            number, key = int(message.body), message.sharding_key
            with lock:
                at_work[key] += 1
                if at_work[key] > 1:
                    overlaps.append(key)
            fails = number % 50 == 0 and message.delivery_attempt == 1
            with lock:
                at_work[key] -= 1
                if not fails:
                    done.setdefault(key, []).append(number)
            if number % 77 == 1:
                raise Reject("never")
            if fails:
                raise ValueError("not yet")

    send(mqmesh_cluster, topic, range(500), lambda number: str(number * number % 23))
    options = {"delivery": "fifo", "consume_thread_count": 4}
    with (
        consumer_of(mqmesh_cluster, topic, group, listen, **options),
        consumer_of(mqmesh_cluster, topic, group, listen, **options),
        consumer_of(mqmesh_cluster, topic, group, listen, **options),
    ):
        until(lambda: sum(map(len, done.values())) >= 500)
        until(lambda: held_by(mqmesh_cluster, group) == 0)
    assert overlaps == []
    assert sum(map(len, done.values())) == 500
    assert all(numbers == sorted(numbers) for numbers in done.values())


def test_a_simple_consumer_gets_the_next_of_a_key_after_an_acknowledgement(mqmesh_cluster):
    topic, group = mqmesh_cluster.topic(queues=1), mqmesh_cluster.group()
    send(mqmesh_cluster, topic, range(6), lambda number: "ab"[number % 2])
    address = mqmesh_cluster.namesrv_addr
    with (
        SimpleConsumer(group, namesrv_addr=address, delivery="fifo") as one,
        SimpleConsumer(group, namesrv_addr=address, delivery="fifo") as other,
    ):
        one.subscribe(topic)
        other.subscribe(topic)
        (first,) = one.receive(1, wait_ms=10_000)
        (second,) = other.receive(1, wait_ms=10_000)
        assert (first.body, second.body) == (b"0", b"1")
        assert one.receive(wait_ms=300) == []
        one.nack(first, delay_ms=0)
        other.ack(second)
        found = [second]
        while len(found) < 6:
            more = other.receive(wait_ms=1_000)
            other.ack_many(more)
            found += more
        assert [one.body for one in found if one.sharding_key == "b"] == [b"1", b"3", b"5"]
        assert [one.body for one in found if one.sharding_key == "a"] == [b"0", b"2", b"4"]
    with PushConsumer(group, namesrv_addr=address, delivery="fifo") as consumer:
        assert consumer.assignment() == []
    plain = SimpleConsumer(group, namesrv_addr=address)
    plain.subscribe(topic)
    with pytest.raises(NoPermission, match="delivery = fifo"), plain:
        plain.receive(wait_ms=5_000)


def test_the_example_of_a_job_queue_does_its_jobs(mqmesh_cluster, project_root):
    done = subprocess.run(
        [
            *(sys.executable, str(project_root / "examples" / "job_queue.py")),
            *("--namesrv", mqmesh_cluster.namesrv_addr),
            *("--jobs", "60", "--workers", "20", "--longest-ms", "200"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = done.stdout.splitlines()
    assert counts[0].startswith("59 jobs done in ")
    assert counts[1:] == [
        "done more than once: 0",
        "rejected: 1",
        "dead: mqmesh.errors.Reject: this is no picture",
    ]
