"""Simple consumers against a real cluster: leases, acknowledgements, and kills of both sides."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections import Counter

import pytest
from harness.commands import run_command
from harness.patience import until

from mqmesh import aio
from mqmesh.errors import (
    ClientClosed,
    InvalidArgument,
    MQMeshError,
    NoPermission,
    StaleReceipt,
)
from mqmesh.message import Message
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.consumer.simple_consumer import SimpleConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster

PATIENCE_S = 30.0
_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster whose broker one test kills; topics get 4 queues."""
    with ProcessCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def topic(cluster):
    """A topic with messages 0 to 99, which no other test uses."""
    topic = f"simple-{next(_numbers)}"
    send(cluster, topic, range(100))
    return topic


def send(cluster, topic, numbers):
    with Producer("producers", namesrv_addr=cluster.namesrv_addr) as producer:
        for number in numbers:
            producer.send_async(Message(topic, b"%d" % number, sharding_key=str(number)))


def consumer_of(cluster, group, topic, **options):
    consumer = SimpleConsumer(group, namesrv_addr=cluster.namesrv_addr, **options)
    consumer.subscribe(topic)
    return consumer


def receive_until(consumer, count, **options):
    found, deadline = [], time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages came"
        found += consumer.receive(count - len(found), **{"wait_ms": 1_000, **options})
    return found


def numbers_of(messages):
    return sorted(int(message.body) for message in messages)


def test_members_share_all_messages_and_what_is_acknowledged_comes_no_more(cluster, topic):
    with consumer_of(cluster, topic, topic) as one, consumer_of(cluster, topic, topic) as other:
        found = receive_until(one, 60)
        rest = receive_until(other, 40)
        assert numbers_of(found + rest) == list(range(100))
        assert {message.delivery_attempt for message in found} == {1}
        assert all(message.receipt for message in found)
        one.ack_many(found)
        for message in rest[:5]:
            other.ack(message)
        for future in [other.ack_async(message) for message in rest[5:]]:
            future.result(PATIENCE_S)
        assert one.receive(wait_ms=200) == []


def test_what_a_consumer_did_not_settle_comes_to_others_when_it_is_closed(cluster, topic):
    with consumer_of(cluster, topic, topic) as one:
        receive_until(one, 100)
    with consumer_of(cluster, topic, topic) as other:
        found = receive_until(other, 100)
        assert numbers_of(found) == list(range(100))
        assert {message.delivery_attempt for message in found} == {1}


def test_a_topic_that_is_made_later_is_read_from_its_first_message(cluster):
    topic = f"simple-{next(_numbers)}"
    with consumer_of(cluster, topic, topic, consume_from_where="LAST_OFFSET") as consumer:
        assert consumer.receive(wait_ms=500) == []
        send(cluster, topic, range(3))
        assert numbers_of(receive_until(consumer, 3)) == [0, 1, 2]


def test_refused_messages_come_again_and_rejected_ones_are_dead_letters(cluster, topic):
    with consumer_of(cluster, topic, topic) as consumer:
        found = receive_until(consumer, 100)
        consumer.ack_many(found[2:])
        consumer.nack(found[0], delay_ms=0)
        consumer.reject(found[1], "no such account")
        (again,) = receive_until(consumer, 1)
        assert (again.body, again.delivery_attempt) == (found[0].body, 2)
        consumer.ack(again)
    with PullConsumer(
        "undertaker", namesrv_addr=cluster.namesrv_addr, consume_from_where="FIRST_OFFSET"
    ) as reader:
        reader.subscribe(f"%DLQ%{topic}")
        dead = until(lambda: reader.poll(1_000), PATIENCE_S)
        assert [message.body for message in dead] == [found[1].body]


def test_a_late_acknowledgement_of_what_somebody_else_has_is_an_error(cluster, topic):
    with consumer_of(cluster, topic, topic) as slow, consumer_of(cluster, topic, topic) as quick:
        late = receive_until(slow, 100, invisible_ms=1_000)
        taken = receive_until(quick, 100)
        assert {message.delivery_attempt for message in taken} == {2}
        with pytest.raises(StaleReceipt):
            slow.ack(late[0])
        quick.ack_many(taken)


def test_an_extended_message_comes_to_nobody_else(cluster, topic):
    with consumer_of(cluster, topic, topic) as one, consumer_of(cluster, topic, topic) as other:
        found = receive_until(one, 100, invisible_ms=1_000)
        for message in {each.info.fencing_token: each for each in found}.values():
            one.extend(message, 60_000)
        assert other.receive(wait_ms=1_500) == []
        one.ack_many(found)


def test_what_is_kept_for_the_next_call_is_extended(cluster, topic):
    with consumer_of(cluster, topic, topic) as one, consumer_of(cluster, topic, topic) as other:
        (first,) = one.receive(1, 1_000, wait_ms=10_000)
        one.ack(first)
        taken = receive_until(other, 99)
        other.ack_many(taken)


def test_a_receive_that_does_not_wait_asks_the_brokers(cluster, topic):
    with consumer_of(cluster, topic, topic) as consumer:
        consumer.ack_many(receive_until(consumer, 40))
        found = until(lambda: consumer.receive(100, wait_ms=0), PATIENCE_S)
        found += receive_until(consumer, 60 - len(found), wait_ms=0)
        consumer.ack_many(found)
        began = time.monotonic()
        assert consumer.receive(wait_ms=0) == []
        assert time.monotonic() - began < PATIENCE_S


def test_a_member_of_another_mode_is_told_so(cluster, topic):
    with consumer_of(cluster, topic, topic) as consumer:
        consumer.ack_many(receive_until(consumer, 100))
        reader = PullConsumer(topic, namesrv_addr=cluster.namesrv_addr)
        reader.subscribe(topic)
        with pytest.raises(NoPermission, match="delivery = message"), reader:
            reader.poll(5_000)


def test_arguments_and_states_are_checked(cluster, topic):
    consumer = consumer_of(cluster, topic, topic)
    with pytest.raises(ClientClosed, match="start"):
        consumer.receive()
    with consumer:
        with pytest.raises(InvalidArgument):
            consumer.receive(0)
        with pytest.raises(InvalidArgument):
            consumer.receive(invisible_ms=10)
        with pytest.raises(InvalidArgument, match="already"):
            consumer.subscribe(topic)
    with pytest.raises(ClientClosed):
        consumer.receive()


def test_coroutines_receive_and_acknowledge(cluster, topic):
    async def work():
        async with aio.SimpleConsumer(topic, namesrv_addr=cluster.namesrv_addr) as consumer:
            await consumer.subscribe(topic)
            found = []
            async with asyncio.timeout(PATIENCE_S):
                while len(found) < 100:
                    found += await consumer.receive(100)
            await consumer.nack(found[0], delay_ms=0)
            await consumer.extend(found[1], 60_000)
            await consumer.reject(found[2], "no")
            await asyncio.gather(*(consumer.ack(message) for message in found[3:]))
            (again,) = await consumer.receive()
            await consumer.ack_many([again, found[1]])
            return numbers_of(found), again.delivery_attempt, await consumer.receive(wait_ms=100)

    assert asyncio.run(work()) == (list(range(100)), 2, [])


def test_the_command_line_receives_and_shows_who_holds_what(cluster, topic):
    def run(*words):
        done = run_command(*words, "--json", "--namesrv", cluster.namesrv_addr)
        return [json.loads(line) for line in done.out], done.code

    (created,), _ = run(
        "group", "create", topic, "--delivery", "message", "--invisible", "90s",
        "--max-unsettled", "500", "--lost-grace", "5s",
    )  # fmt: skip
    (broker,) = created["brokers"]
    names = ("delivery", "invisible_ms", "max_unsettled", "lost_grace_ms")
    assert [broker[name] for name in names] == ["message", 90_000, 500, 5_000]
    looked, code = run("receive", topic, "--group", topic, "--max", "3")
    assert (len(looked), code) == (3, 0)
    acked, _ = run("receive", topic, "--group", topic, "--max", "100", "--ack", "--timeout", "1")
    assert {one["delivery_attempt"] for one in acked} == {1}
    assert len({one["body"] for one in acked}) == 100
    assert run("receive", topic, "--group", topic, "--timeout", "0.2") == ([], 1)
    send(cluster, topic, range(10))
    with consumer_of(cluster, topic, topic) as consumer:
        receive_until(consumer, 4)
        leases, _ = run("group", "leases", topic)
        held = leases[0] if isinstance(leases[0], list) else leases
        assert {one["member"] for one in held} == {consumer.client_id}
        assert {one["state"] for one in held} == {"leased"}
        (progress,), _ = run("group", "progress", topic, "--topic", topic)
        assert progress["lag"] == 10
        assert sum(one["ready"] + one["in_flight"] for one in progress["queues"]) == 10
        assert sum(one["in_flight"] for one in progress["queues"]) >= 4
        (released,), _ = run("group", "release", topic, "--member", consumer.client_id)
        assert released["messages"] == sum(one["count"] for one in held)
        (progress,), _ = run("group", "progress", topic, "--topic", topic)
        assert sum(one["in_flight"] for one in progress["queues"]) == 0


def test_more_members_than_queues_all_work(cluster, topic):
    done: Counter[int] = Counter()
    lock = threading.Lock()
    enough = threading.Event()

    def work(number):
        with consumer_of(cluster, topic, topic) as consumer:
            while not enough.is_set():
                for message in consumer.receive(2, wait_ms=500):
                    consumer.ack(message)
                    with lock:
                        done[int(message.body)] += 1
                        if len(done) == 100:
                            enough.set()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    assert enough.wait(PATIENCE_S)
    for thread in threads:
        thread.join()
    assert set(done) == set(range(100))
    assert set(done.values()) == {1}


def test_leases_of_several_brokers_with_the_same_number_are_settled_each(tmp_path):
    with ProcessCluster(tmp_path, brokers=("broker-a", "broker-b")) as cluster:
        send(cluster, "both", range(100))
        with consumer_of(cluster, "settles", "both") as consumer:
            found = receive_until(consumer, 100)
            leases = Counter((one.info.broker_name, one.info.fencing_token) for one in found)
            assert len({number for _, number in leases}) < len(leases), "brokers number alike"
            consumer.ack_many(found)
        with consumer_of(cluster, "settles", "both") as consumer:
            send(cluster, "both", range(100, 104))
            assert numbers_of(receive_until(consumer, 4)) == list(range(100, 104))


def test_nothing_acknowledged_comes_again_after_kills_of_the_broker(cluster):
    """Broker killed by SIGKILL while two members work: all is done, what was acknowledged once."""
    topic = f"simple-{next(_numbers)}"
    send(cluster, topic, range(2_000))
    acked: set[int] = set()
    again: list[int] = []
    lock = threading.Lock()
    enough = threading.Event()

    def work():
        with consumer_of(cluster, topic, topic, settle_timeout_ms=60_000) as consumer:
            while not enough.is_set():
                found = consumer.receive(20, wait_ms=500)
                with lock:
                    again.extend(n for n in numbers_of(found) if n in acked)
                if not found:
                    continue
                try:
                    consumer.ack_many(found)
                except StaleReceipt:
                    continue  # after a kill somebody else may have got a part of them
                with lock:
                    acked.update(numbers_of(found))
                    if len(acked) == 2_000:
                        enough.set()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for share in (400, 1_000):
        until(lambda share=share: len(acked) >= share, PATIENCE_S)
        cluster.brokers["broker-a"].kill()
        cluster.start_broker()
    assert enough.wait(60)
    for thread in threads:
        thread.join()
    assert again == []
    assert acked == set(range(2_000))


def test_priorities_from_the_command_line_to_the_consumer(cluster, caplog):
    topic = f"simple-{next(_numbers)}"

    def run(*words):
        done = run_command(*words, "--json", "--namesrv", cluster.namesrv_addr)
        assert not done.code, done.err
        return [json.loads(line) for line in done.out]

    (made,) = run("topic", "create", topic, "--priorities", "4")
    assert {one["priorities"] for one in made["brokers"]} == {4}
    with Producer("producers", namesrv_addr=cluster.namesrv_addr) as producer:
        for number in range(40):
            producer.send_async(Message(topic, b"%d" % (number % 4)), priority=number % 4)
        producer.send(Message(topic, b"0"))
        producer.send_batch([Message(topic, b"2"), Message(topic, b"2")], priority=2)
        producer.send_oneway(Message(topic, b"3"), priority=3)
        with pytest.raises(InvalidArgument, match="0 to 3"):
            producer.send(Message(topic, b"x"), priority=4)
    run("send", topic, "1", "--priority", "1")

    async def also_from_coroutines():
        async with aio.Producer("producers", namesrv_addr=cluster.namesrv_addr) as producer:
            await producer.send(Message(topic, b"3"), priority=3)

    asyncio.run(also_from_coroutines())
    run("group", "create", topic, "--delivery", "message", "--priority-fairness", "0")
    with consumer_of(cluster, topic, topic) as consumer:
        found = receive_until(consumer, 46)
        order = [message.priority for message in found]
        assert order == sorted(order, reverse=True)
        assert order == [int(message.body) for message in found]
        consumer.nack(found[0], delay_ms=31_000)  # a retry of its own priority
        consumer.ack_many(found[1:])
    with PullConsumer(f"{topic}-queued", namesrv_addr=cluster.namesrv_addr) as reader:
        reader.subscribe(topic)
        until(lambda: "promise" in caplog.text, PATIENCE_S)


def test_messages_expire_for_all_kinds_of_consumers(cluster):
    topic = f"simple-{next(_numbers)}"

    def run(*words):
        done = run_command(*words, "--json", "--namesrv", cluster.namesrv_addr)
        assert not done.code, done.err
        return [json.loads(line) for line in done.out]

    run("topic", "create", topic, "--queues", "1")
    with Producer("producers", namesrv_addr=cluster.namesrv_addr) as producer:
        with pytest.raises(MQMeshError, match="message_ttl"):
            producer.send(Message(topic, b"x"), ttl_ms=1_000)
        (changed,) = run("topic", "update", topic, "--message-ttl", "allow")
        assert {(one["message_ttl"], one["on_expired"]) for one in changed["brokers"]} == {
            (True, "drop")
        }
        for number in range(30):
            producer.send_async(Message(topic, b"short"), ttl_ms=1)
            producer.send_async(Message(topic, b"%d" % number), ttl_ms=3_600_000)
        producer.send(Message(topic, b"30"))
        producer.send_batch([Message(topic, b"short")] * 2, ttl_ms=1)
        producer.send(Message(topic, b"31"))
    run("send", topic, "short", "--ttl", "1ms")
    with consumer_of(cluster, topic, topic) as consumer:
        found = receive_until(consumer, 32)
        assert numbers_of(found) == list(range(32))
        consumer.ack_many(found)
    with PullConsumer(
        f"{topic}-queued", namesrv_addr=cluster.namesrv_addr, consume_from_where="FIRST_OFFSET"
    ) as reader:
        reader.subscribe(topic)
        bodies = []
        until(lambda: len(bodies.__iadd__(reader.poll(200))) >= 32, PATIENCE_S)
        assert numbers_of(bodies) == list(range(32))


# ---- Outputs that are stored with the progress -----------------------------------------


def create_group(cluster, group, delivery):
    """Create a group whose messages come again after a second."""
    words = ("group", "create", group, "--delivery", delivery, "--retry-delays", "1s")
    assert not run_command(*words, "--namesrv", cluster.namesrv_addr).code


def bodies_of(cluster, topic, count):
    """Return the bodies of a topic, once there are so many; and no more come."""
    with PullConsumer(
        f"look-{next(_numbers)}",
        namesrv_addr=cluster.namesrv_addr,
        consume_from_where="FIRST_OFFSET",
    ) as reader:
        reader.subscribe(topic)
        found = []
        until(lambda: len(found.__iadd__(reader.poll(200))) >= count, PATIENCE_S)
    return sorted(message.body for message in found)


def test_outputs_are_stored_when_their_messages_are_done_or_not_at_all(cluster, topic):
    bills, expected = f"{topic}-bills", sorted(b"%d" % number for number in range(101))
    send(cluster, bills, [100])
    create_group(cluster, topic, "message")
    with consumer_of(cluster, topic, topic) as consumer:
        failed = receive_until(consumer, 20)
        with pytest.raises(ZeroDivisionError), consumer.processing(failed) as out:
            out.send(Message(bills, b"of a block that fails"))
            raise ZeroDivisionError
        misled = consumer.processing(receive_until(consumer, 10))
        with pytest.raises(MQMeshError, match="'gone' has no queue"), misled as out:
            out.send(Message("gone", b"x"))
        done = receive_until(consumer, 70)
        with consumer.processing(done) as out:
            for message in done:
                out.send(Message(bills, message.body, sharding_key=message.sharding_key))
        with pytest.raises(StaleReceipt), consumer.processing(done) as out:
            out.send(Message(bills, b"of messages that are done"))

    async def of_coroutines():
        async with aio.SimpleConsumer(topic, namesrv_addr=cluster.namesrv_addr) as consumer:
            await consumer.subscribe(topic)
            left = 30
            while left:
                messages = await consumer.receive(wait_ms=1_000)
                if not messages:
                    continue
                async with consumer.processing(messages) as out:
                    for message in messages:
                        out.send(Message(bills, message.body))
                left -= len(messages)

    asyncio.run(of_coroutines())
    assert bodies_of(cluster, bills, 101) == expected


def test_a_listener_stores_its_outputs_with_its_progress(cluster, topic):
    bills, expected = f"{topic}-bills", sorted(b"%d" % number for number in range(101))
    send(cluster, bills, [100])
    create_group(cluster, topic, "fifo")
    calls = itertools.count()

    def on_messages(messages):
        with consumer.processing(messages) as out:
            for message in messages:
                out.send(Message(bills, message.body))
            if next(calls) == 1:
                raise ZeroDivisionError

    consumer = PushConsumer(
        topic,
        namesrv_addr=cluster.namesrv_addr,
        consume_from_where="FIRST_OFFSET",
        consume_message_batch_max_size=8,
        delivery="fifo",
    )
    consumer.subscribe(topic, listener=on_messages)
    with consumer:
        assert bodies_of(cluster, bills, 101) == expected
        with pytest.raises(MQMeshError, match="'gone'"):
            consumer.check_outputs("gone")
    with pytest.raises(InvalidArgument, match="in order"):
        PushConsumer("g", namesrv_addr=cluster.namesrv_addr).processing([Message("t", b"x")])
