"""Producers while brokers and name servers come, go and change."""

from __future__ import annotations

import threading

import pytest
from harness.simulated_cluster import Fault, FaultKind

from mqmesh.errors import InvalidArgument, MessageIllegal, NoRoute
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.route import Perm


def message(body: bytes | str = b"x", **fields) -> Message:
    return Message("t", body.encode() if isinstance(body, str) else body, **fields)


def queue(number: int = 0, broker: str = "a") -> MessageQueue:
    return MessageQueue("t", broker, number)


# ---- Routes -------------------------------------------------------------------------------


def test_a_broker_at_a_new_address_gets_what_waited_for_the_old_one(world):
    producer = world.producer()
    world.broker.faults.append(Fault(FaultKind.LOSE))
    under_way = producer.send_async(message("1"), queue=queue())
    world.run(5)
    behind = producer.send_async(message("2"), queue=queue())
    world.broker.move("tcp://127.0.0.1:20911")
    world.run(1_500)
    assert (under_way.result().queue_offset, behind.result().queue_offset) == (0, 1)
    result = world.call(lambda: producer.send(message("3"), queue=queue()))
    assert result.queue_offset == 2


def test_a_broker_that_moves_without_dying_is_followed_too(world):
    # The old process still listens, but the routes lead elsewhere.
    producer = world.producer()
    world.call(lambda: producer.send(message("0")))
    broker = world.broker
    old = broker.endpoint
    broker.faults.append(Fault(FaultKind.LOSE))
    future = producer.send_async(message("1"), queue=queue())
    world.run(5)
    world.network.servers["tcp://127.0.0.1:20911"] = broker
    broker.endpoint = "tcp://127.0.0.1:20911"
    world.cluster.announce("a")
    world.run(200)
    assert future.result().queue_offset >= 0
    del world.network.servers[old]
    assert world.call(lambda: producer.send(message("2"))).status is SendStatus.SEND_OK


def test_a_first_message_creates_its_topic_by_the_pattern(world):
    world.build(brokers=("a", "b"), auto_create=True)
    producer = world.producer(topic=None)
    result = world.call(lambda: producer.send(Message("fresh", b"1")))
    assert result.message_queue.topic == "fresh"
    world.run(2_000)
    # Only one broker has it by now, and the routes say so.
    queues = producer.fetch_publish_queues("fresh")
    assert {one.broker_name for one in queues} == {result.message_queue.broker_name}
    assert len(queues) == 4


def test_a_topic_that_does_not_exist_is_no_route_after_the_timeout(world):
    producer = world.producer()
    error = world.call(lambda: producer.send(Message("nowhere", b"1"), timeout_ms=300))
    assert isinstance(error, NoRoute)
    assert "nowhere" in str(error)
    world.run(20)
    before = len(world.cluster.namesrvs[0].requests)
    world.run(10_000)
    asked = len(world.cluster.namesrvs[0].requests) - before
    assert asked <= 2, "nobody asks for it any more"


def test_a_topic_that_appears_while_a_send_waits_is_found(world):
    producer = world.producer()
    done = []
    thread = threading.Thread(
        target=lambda: done.append(producer.send(Message("late", b"1"), timeout_ms=5_000))
    )
    thread.start()
    world.run(200)
    world.broker.add_topic("late")
    while thread.is_alive():
        world.run(1)
        thread.join(0.001)
    assert done[0].status is SendStatus.SEND_OK


def test_a_queue_that_was_shrunk_away_is_left_by_those_who_may_go_elsewhere(world):
    world.broker.add_topic("t", queues=8)
    producer = world.producer()
    free = [producer.send_batch_async([message(str(n))]) for n in range(8)]
    bound = producer.send_async(message("b"), queue=queue(7))
    world.broker.add_topic("t", queues=2)
    world.run(1_000)
    assert {future.result().message_queue.queue_id for future in free} <= {0, 1}
    assert sorted(world.stored()) == sorted(str(n).encode() for n in range(8))
    assert isinstance(bound.exception(), MessageIllegal)
    with pytest.raises(InvalidArgument, match="no writable queue"):
        producer.send_async(message(), queue=queue(7))


def test_a_queue_that_was_added_is_used(world):
    producer = world.producer()
    world.broker.add_topic("t", queues=8)
    world.run()
    assert len(producer.fetch_publish_queues("t")) == 8
    future = producer.send_async(message(), queue=queue(7))
    world.run()
    assert future.result().queue_offset == 0


def test_a_topic_without_write_permission_is_no_route(world):
    world.broker.add_topic("t", perm=Perm.READ.value)
    producer = world.producer(topic=None)
    began_ms = world.network.clock.monotonic_ms()
    error = world.call(lambda: producer.send(message(), timeout_ms=3_000))
    assert isinstance(error, NoRoute)
    assert "may not be written to, its permission is r; `mqmesh topic update t --perm rw`" in str(
        error
    )
    assert world.network.clock.monotonic_ms() - began_ms < 1_000, "waiting is in vain"
    done = []
    thread = threading.Thread(target=lambda: done.append(producer.send(message())))
    world.broker.add_topic("t")
    thread.start()
    world.run(200)
    while thread.is_alive():
        world.run(1)
        thread.join(0.001)
    assert done[0].status is SendStatus.SEND_OK


def test_name_servers_may_all_be_down_while_routes_are_known(world):
    world.build(namesrvs=2)
    producer = world.producer()
    for namesrv in world.cluster.namesrvs:
        namesrv.crash()
    world.run(60_000)
    assert world.call(lambda: producer.send(message("1"))).status is SendStatus.SEND_OK
    error = world.call(lambda: producer.send(Message("other", b"1"), timeout_ms=3_000))
    assert isinstance(error, NoRoute)
    for namesrv in world.cluster.namesrvs:
        namesrv.forget()
    world.run(2_000)
    assert world.call(lambda: producer.send(message("2"))).status is SendStatus.SEND_OK
    world.broker.add_topic("other")
    other = world.call(lambda: producer.send(Message("other", b"1")))
    assert other.status is SendStatus.SEND_OK


def test_the_second_name_server_serves_when_the_first_one_is_down(world):
    world.build(namesrvs=2)
    for down in (0, 1):
        world.cluster.namesrvs[down].crash()
        producer = world.producer()
        assert world.call(lambda: producer.send(message())).status is SendStatus.SEND_OK  # noqa: B023
        world.cluster.namesrvs[down].start()


# ---- Faults and latency --------------------------------------------------------------------


def test_a_slow_broker_is_avoided_for_a_while_if_wanted(world):
    world.build(brokers=("a", "b"))
    producer = world.producer(send_latency_fault_enable=True)
    for broker in world.cluster.brokers.values():
        broker.faults.append(Fault(FaultKind.NONE))
    world.cluster.brokers["a"].faults.append(Fault(FaultKind.LATE, 600))
    slow = None
    for _ in range(12):
        future = producer.send_async(message())
        world.run(1_000)
        if (
            future.result().message_queue.broker_name == "a"
            and not world.cluster.brokers["a"].faults
        ):
            slow = slow or future
            if slow is not future:
                pytest.fail("the slow broker was used again")
        if slow is not None and future is not slow:
            assert future.result().message_queue.broker_name == "b"
    assert slow is not None
    world.run(30_000)
    names = set()
    for _ in range(8):
        future = producer.send_async(message())
        world.run(20)
        names.add(future.result().message_queue.broker_name)
    assert names == {"a", "b"}
