"""What becomes of sends that fail."""

from __future__ import annotations

import pytest
from harness.simulated_cluster import Fault, FaultKind

from mqmesh.errors import (
    BrokerError,
    BrokerNotAvailable,
    EndpointUnreachable,
    RemoteProtocolError,
    SystemBusy,
)
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.codes import RequestCode, ResponseCode
from mqmesh.protocol.messaging import SendStatus

TIMEOUT_MS = 3_000


def message(body: bytes | str = b"x", **fields) -> Message:
    return Message("t", body.encode() if isinstance(body, str) else body, **fields)


def queue(number: int = 0, broker: str = "a") -> MessageQueue:
    return MessageQueue("t", broker, number)


# ---- Retries ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        FaultKind.CRASH_BEFORE,
        FaultKind.CRASH_AFTER,
        FaultKind.TWICE,
        FaultKind.LATE,
        FaultKind.NONE,
    ],
)
def test_whatever_happens_to_a_request_its_message_is_stored_once_and_in_order(world, kind):
    producer = world.producer()
    world.broker.faults.append(Fault(kind, 500))
    first = producer.send_async(message("1"), queue=queue())
    world.run(5)
    second = producer.send_async(message("2"), queue=queue())
    world.run(50)
    world.broker.start()
    world.run(1_000)
    assert (first.result().queue_offset, second.result().queue_offset) == (0, 1)
    assert world.stored() == [b"1", b"2"]


def test_a_repetition_carries_the_same_bytes(world):
    producer = world.producer()
    world.broker.faults.append(Fault(FaultKind.CRASH_AFTER))
    future = producer.send_async(message("1"))
    world.run(50)
    world.broker.start()
    world.run(500)
    assert future.result().queue_offset == 0
    (first,), (second,) = world.broker.sends
    assert first == second


def test_a_message_that_may_go_anywhere_goes_to_another_broker_at_once(world):
    world.build(brokers=("a", "b"))
    producer = world.producer()
    world.cluster.notices_deaths = False
    for broker in world.cluster.brokers.values():
        broker.faults.append(Fault(FaultKind.CRASH_AFTER))
    future = producer.send_async(message("1"))
    world.run(300)
    alive = [one for one in world.cluster.brokers.values() if one.up]
    assert alive == [], "the second one crashed as well"
    for broker in world.cluster.brokers.values():
        broker.start()
    world.run(500)
    result = future.result()
    stored = world.cluster.messages("t")
    assert {one.message_id for one in stored} == {result.message_id}, "its id stays"
    per_broker = [one.broker_name for one in stored]
    assert sorted(per_broker) == ["a", "b"], "each of them has it once"


def test_a_message_bound_to_a_queue_waits_for_its_broker(world):
    world.build(brokers=("a", "b"))
    producer = world.producer()
    world.cluster.brokers["a"].crash()
    futures = [
        producer.send_async(message("q"), queue=queue(0, "a")),
        producer.send_async(message("k", sharding_key="key"), queue=queue(1, "a")),
    ]
    free = producer.send_async(message("f"))
    world.run(1_000)
    assert free.result().message_queue.broker_name == "b"
    assert not any(future.done() for future in futures)
    world.cluster.brokers["a"].start()
    world.run(200)
    assert [future.result().message_queue.broker_name for future in futures] == ["a", "a"]


def test_what_waits_for_a_broker_that_never_answers_moves_on(world):
    # The broker is in the routes, but nobody listens at its address.
    world.build(brokers=("a", "b"))
    world.cluster.notices_deaths = False
    world.cluster.brokers["a"].crash()
    producer = world.producer()
    futures = [producer.send_async(message(str(n))) for n in range(3)]
    sync = world.call(lambda: producer.send(message("sync")))
    world.run(500)
    assert sync.message_queue.broker_name == "b"
    assert {future.result().message_queue.broker_name for future in futures} == {"b"}
    assert world.cluster.brokers["a"].sends == []


def test_a_synchronous_send_leaves_a_broker_that_dies_under_it(world):
    world.build(brokers=("a", "b"))
    world.cluster.notices_deaths = False
    producer = world.producer()
    for _ in range(4):
        world.call(lambda: producer.send(message("0")))
    world.run()
    world.cluster.brokers["a"].faults.append(Fault(FaultKind.CRASH_BEFORE))
    began_ms = world.network.clock.monotonic_ms()
    results = [world.call(lambda: producer.send(message("1"))) for _ in range(8)]
    assert {one.message_queue.broker_name for one in results[1:]} == {"b"}
    assert world.network.clock.monotonic_ms() - began_ms < TIMEOUT_MS


def test_a_retry_is_never_overtaken(world):
    producer = world.producer()
    world.broker.faults.extend([Fault(FaultKind.REFUSE, ResponseCode.SYSTEM_ERROR)] * 2)
    futures = []
    for n in range(20):
        futures.append(producer.send_async(message(str(n)), queue=queue()))
        world.run(25)
    world.run(1_000)
    assert [future.result().queue_offset for future in futures] == list(range(20))
    assert world.stored() == [str(n).encode() for n in range(20)]


def test_a_synchronous_send_behind_an_asynchronous_one_waits_its_turn(world):
    producer = world.producer()
    world.broker.faults.append(Fault(FaultKind.LATE, 300))
    first = producer.send_async(message("1"), queue=queue())
    world.run(5)
    second = world.call(lambda: producer.send(message("2"), queue=queue()))
    assert first.result().queue_offset == 0
    assert second.queue_offset == 1


def test_tries_are_counted(world):
    producer = world.producer(retry_times_when_send_async_failed=1)
    world.broker.faults.extend([Fault(FaultKind.REFUSE, ResponseCode.SYSTEM_ERROR)] * 5)
    future = producer.send_async(message())
    world.run(1_000)
    assert type(future.exception()) is BrokerError
    assert len(world.broker.sends) == 2


def test_oneway_is_tried_once(world):
    producer = world.producer()
    world.broker.faults.extend([Fault(FaultKind.REFUSE, ResponseCode.SYSTEM_ERROR)] * 5)
    producer.send_oneway(message())
    world.run(1_000)
    assert len(world.broker.sends) == 1
    assert producer._buffer.pending_bytes == 0


@pytest.mark.parametrize("kind", [FaultKind.REFUSE, FaultKind.REFUSE_REQUEST])
@pytest.mark.parametrize("sync", [True, False])
def test_a_refusal_for_flow_control_is_not_retried(world, kind, sync):
    producer = world.producer()
    world.call(lambda: producer.send(message("0")))
    world.broker.faults.append(Fault(kind, ResponseCode.SYSTEM_BUSY, retry_after_ms=250))
    before = world.broker.requests.count(RequestCode.SEND_MESSAGE)
    if sync:
        error = world.call(lambda: producer.send(message("1")))
    else:
        future = producer.send_async(message("1"))
        world.run(1_000)
        error = future.exception()
    assert isinstance(error, SystemBusy)
    assert error.retry_after_ms == 250
    assert error.retriable
    assert world.broker.requests.count(RequestCode.SEND_MESSAGE) == before + 1
    world.call(lambda: producer.send(message("2")))
    assert sorted(world.stored()) == [b"0", b"2"]


def test_a_refusal_after_an_unknown_outcome_is_told_as_unknown(world):
    producer = world.producer()
    world.broker.faults.extend(
        [Fault(FaultKind.CRASH_AFTER), Fault(FaultKind.REFUSE, ResponseCode.SYSTEM_BUSY)]
    )
    future = producer.send_async(message("1"))
    world.run(50)
    world.broker.start()
    world.run(1_000)
    assert isinstance(future.exception(), EndpointUnreachable)
    assert isinstance(future.exception().__cause__, SystemBusy)
    assert world.stored() == [b"1"]


def test_a_broker_that_is_starting_is_waited_for_without_counting(world):
    producer = world.producer()
    busy = Fault(FaultKind.REFUSE, ResponseCode.SERVICE_NOT_AVAILABLE)
    world.broker.faults.extend([busy] * 10)
    future = producer.send_async(message())
    world.run(2_000)
    assert future.result().queue_offset == 0


def test_a_broker_that_does_not_become_available_is_the_reason(world):
    producer = world.producer()
    full = Fault(FaultKind.REFUSE, ResponseCode.DISK_FULL)
    world.broker.faults.extend([full] * 100)
    future = producer.send_async(message())
    world.run(TIMEOUT_MS + 200)
    assert isinstance(future.exception(), BrokerNotAvailable)
    assert len(world.broker.sends) <= TIMEOUT_MS / 100 + 2, "with a pause between the tries"


def test_two_brokers_that_are_not_available_are_not_asked_in_a_tight_loop(world):
    world.build(brokers=("a", "b"))
    producer = world.producer()
    for broker in world.cluster.brokers.values():
        broker.faults.extend([Fault(FaultKind.REFUSE, ResponseCode.SERVICE_NOT_AVAILABLE)] * 999)
    future = producer.send_async(message())
    world.run(TIMEOUT_MS + 200)
    assert isinstance(future.exception(), BrokerNotAvailable)
    tries = sum(len(broker.sends) for broker in world.cluster.brokers.values())
    assert 5 < tries <= TIMEOUT_MS / 100 + 2


def test_an_answer_that_cannot_be_read_is_told_as_that(world):
    producer = world.producer()
    world.broker.faults.append(Fault(FaultKind.GARBAGE))
    future = producer.send_async(message("1"))
    world.run()
    assert isinstance(future.exception(), RemoteProtocolError)
    world.call(lambda: producer.send(message("2")))
    world.broker.faults.append(Fault(FaultKind.GARBAGE))
    assert isinstance(world.call(lambda: producer.send(message("3"))), RemoteProtocolError)
    world.broker.faults.append(Fault(FaultKind.STATUS, 77))
    future = producer.send_async(message("4"))
    world.run()
    assert isinstance(future.exception(), RemoteProtocolError)


# ---- Not stored safely --------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_what_was_not_stored_safely_is_told_by_the_status(world, sync):
    producer = world.producer()
    world.call(lambda: producer.send(message("0")))
    world.broker.faults.append(Fault(FaultKind.STATUS, SendStatus.FLUSH_DISK_TIMEOUT))
    if sync:
        result = producer.send(message("1"))
    else:
        future = producer.send_async(message("1"))
        world.run()
        result = future.result()
    assert result.status is SendStatus.FLUSH_DISK_TIMEOUT


@pytest.mark.parametrize("sync", [True, False])
def test_what_was_not_stored_safely_goes_to_another_broker_if_wanted(world, sync):
    world.build(brokers=("a", "b"))
    producer = world.producer(retry_another_broker_when_not_store_ok=True)
    for _ in range(2):
        world.call(lambda: producer.send(message("0")))
    unsafe = Fault(FaultKind.STATUS, SendStatus.SLAVE_NOT_AVAILABLE)
    for broker in world.cluster.brokers.values():
        broker.faults.append(unsafe)
    future = producer.send_async(message("1")) if not sync else None
    if future is None:
        result = world.call(lambda: producer.send(message("1")))
    else:
        world.run(100)
        result = future.result()
    # Neither is safe, and nobody goes back to a broker that has it.
    assert result.status is SendStatus.SLAVE_NOT_AVAILABLE
    assert world.stored().count(b"1") == 2
    world.cluster.brokers["a"].faults.extend([unsafe] * 8)
    for n in range(8):
        result = world.call(lambda: producer.send(message(str(n))))  # noqa: B023
        assert result.status is SendStatus.SEND_OK
        assert result.message_queue.broker_name == "b"


def test_what_another_broker_does_not_take_is_where_it_was(world):
    world.build(brokers=("a", "b"))
    producer = world.producer(retry_another_broker_when_not_store_ok=True)
    for name, fault in (
        ("a", Fault(FaultKind.STATUS, SendStatus.FLUSH_SLAVE_TIMEOUT)),
        ("b", Fault(FaultKind.REFUSE, ResponseCode.SYSTEM_BUSY)),
    ):
        world.cluster.brokers[name].faults.extend([fault] * 20)
    while True:
        future = producer.send_async(message("1"))
        world.run(100)
        if not isinstance(future.exception(), SystemBusy):
            break  # this one went to a first
    result = future.result()
    assert result.status is SendStatus.FLUSH_SLAVE_TIMEOUT
    assert result.message_queue.broker_name == "a"
