"""What becomes of sends that fail."""

from __future__ import annotations

import pytest
from harness.simulated_cluster import Fault, FaultKind

from mqmesh.errors import (
    BrokerError,
    BrokerNotAvailable,
    EndpointUnreachable,
    NoPermission,
    NotMaster,
    RemoteProtocolError,
    RequestTimeout,
    SystemBusy,
)
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import ErrorHeader, Reply, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.route import Perm

TIMEOUT_MS = 3_000
PATIENCE_MS = 2_000


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


@pytest.mark.parametrize("brokers", [("a",), ("a", "b")])
@pytest.mark.parametrize("bound", [False, True])
def test_who_may_not_send_is_told_so_after_one_try(world, brokers, bound):
    world.build(brokers=brokers)
    for broker in world.cluster.brokers.values():
        broker.faults.extend([Fault(FaultKind.REFUSE, ResponseCode.NO_PERMISSION)] * 3)
    future = world.producer().send_async(message(), queue=queue() if bound else None)
    world.run(1_000)
    assert isinstance(future.exception(), NoPermission)
    assert sum(len(broker.sends) for broker in world.cluster.brokers.values()) == 1


def test_a_message_leaves_a_broker_that_lets_nobody_write_any_more(world):
    world.build(brokers=("a", "b"))
    first, second = world.cluster.brokers.values()
    producer = world.producer()
    for broker in (first, second):
        broker.faults.append(Fault(FaultKind.REFUSE, ResponseCode.NO_PERMISSION))
    future = producer.send_async(message())
    world.run(5)
    (refusing,) = (one for one in (first, second) if one.sends)
    for broker in (first, second):
        broker.faults.clear()
    refusing.add_topic("t", perm=Perm.READ.value)
    world.run(1_000)
    assert future.result().message_queue.broker_name == ({"a", "b"} - {refusing.name}).pop()


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


def test_a_queue_waits_for_a_send_until_its_timeout_and_no_longer(world):
    """Behind it nobody knows whether, and when, the request arrives (docs/reliability.md)."""
    producer = world.producer()
    world.broker.faults.append(Fault(FaultKind.LOSE))
    first = producer.send_async(message("1"), queue=queue())
    world.run(500)
    second = producer.send_async(message("2"), queue=queue())
    world.run(TIMEOUT_MS - 600)
    assert not first.done()
    assert world.stored() == []
    world.run(200)
    assert isinstance(first.exception(), RequestTimeout)
    assert second.result().queue_offset == 0


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


# ---- Masters that are replaced -------------------------------------------------------------


def replaced_groups(world) -> None:
    """Two broker groups whose masters are replaced."""
    world.build(brokers=("a", "b"))
    for broker in world.cluster.brokers.values():
        broker.epoch, broker.is_elected = 1, True


@pytest.mark.parametrize("kind", [FaultKind.CRASH_AFTER, FaultKind.DEPOSE])
@pytest.mark.parametrize("sync", [False, True])
def test_what_a_master_that_is_replaced_may_have_goes_to_its_successor(world, kind, sync):
    replaced_groups(world)
    producer, clock = world.producer(), world.network.new_loop()
    for broker in world.cluster.brokers.values():
        broker.faults.append(Fault(kind))
        clock.call_later(PATIENCE_MS // 2, broker.start)
    if sync:
        result = world.call(lambda: producer.send(message("1")))
    else:
        future = producer.send_async(message("1"))
        world.run(PATIENCE_MS)
        result = future.result()
    assert world.stored() == [b"1"]
    assert result.message_id == world.cluster.messages("t")[0].message_id


def test_what_may_be_stored_waits_for_a_new_master_only_so_long(world):
    replaced_groups(world)
    producer = world.producer(failover_patience_ms=PATIENCE_MS)
    for broker in world.cluster.brokers.values():
        broker.faults.append(Fault(FaultKind.CRASH_AFTER))
    future = producer.send_async(message("1"))
    world.run(PATIENCE_MS - 200)
    down = [broker for broker in world.cluster.brokers.values() if not broker.up]
    assert len(down) == 1
    (other,) = [broker for broker in world.cluster.brokers.values() if broker.up]
    other.faults.clear()
    assert other.sends == []
    world.run(600)
    assert future.result().message_queue.broker_name == other.name


def test_where_an_administrator_promotes_nobody_waits_for_a_new_master(world):
    replaced_groups(world)
    for broker in world.cluster.brokers.values():
        broker.is_elected = False
    producer = world.producer(failover_patience_ms=PATIENCE_MS)
    broker, other = world.cluster.brokers.values()
    broker.faults.append(Fault(FaultKind.CRASH_AFTER))
    while broker.up:
        future = producer.send_async(message("1"))
        world.run(20)
    world.run(PATIENCE_MS - 200)
    assert future.result().message_queue.broker_name == other.name


def test_what_was_not_sent_yet_does_not_wait_for_a_new_master(world):
    replaced_groups(world)
    producer = world.producer()
    world.cluster.notices_deaths = False
    world.cluster.brokers["a"].crash()
    futures = [producer.send_async(message(str(n))) for n in range(3)]
    world.run(500)
    assert {future.result().message_queue.broker_name for future in futures} == {"b"}


def test_to_follow_the_master_is_no_try(world):
    producer = world.producer(retry_times_when_send_async_failed=0)
    refusal = Fault(FaultKind.REFUSE_REQUEST, ResponseCode.NOT_MASTER)
    world.broker.faults.extend([refusal] * 10)
    future = producer.send_async(message("1"))
    world.run(2_000)
    assert future.result().queue_offset == 0


def test_a_master_that_is_replaced_is_not_avoided(world):
    replaced_groups(world)
    producer = world.producer(send_latency_fault_enable=True)
    broker, faults = world.cluster.brokers["a"], producer._routes._faults

    def is_available() -> bool:
        return faults.is_available("a", world.network.clock.monotonic_ms())

    broker.faults.append(Fault(FaultKind.REFUSE_REQUEST, ResponseCode.NOT_MASTER))
    future = producer.send_async(message("1"), queue=queue(0, "a"))
    world.run(50)
    assert is_available() and not future.done()
    world.run(100)
    assert future.result().queue_offset == 0
    broker.faults.append(Fault(FaultKind.CRASH_BEFORE))
    oneway = world.call(lambda: producer.send_oneway(message("2"), queue=queue(0, "a")))
    world.run(100)
    assert oneway is None and not is_available()
    broker.epoch = 2
    broker.start()
    world.run(100)
    assert is_available(), "nothing bad is known of the new one"


def test_what_is_refused_again_and_again_does_not_wait_longer_for_it(world):
    replaced_groups(world)
    producer = world.producer(failover_patience_ms=PATIENCE_MS, batch_messages=1)
    refusal = Fault(FaultKind.REFUSE_REQUEST, ResponseCode.NOT_MASTER)
    world.cluster.brokers["a"].faults.extend([refusal] * 999)
    futures = [producer.send_async(message(str(n))) for n in range(8)]
    world.run(PATIENCE_MS - 200)
    assert not all(future.done() for future in futures), "some went to the first group"
    world.run(600)
    assert {future.result().message_queue.broker_name for future in futures} == {"b"}


@pytest.mark.parametrize("refusals", [1, 99])
def test_that_nobody_became_the_master_is_the_reason(world, refusals):
    replaced_groups(world)
    producer = world.producer()
    refusal = Fault(FaultKind.REFUSE_REQUEST, ResponseCode.NOT_MASTER)
    world.broker.faults.extend([refusal] * refusals)
    future = producer.send_async(message("1"), queue=queue())
    world.run(50)
    if refusals == 1:
        world.broker.crash()
    world.run(TIMEOUT_MS + 200)
    error = future.exception()
    assert isinstance(error, NotMaster)
    assert error.__cause__ is not error


def test_masters_that_are_named_one_after_the_other_are_not_asked_as_fast_as_they_answer(world):
    producer = world.producer()
    asked = []

    def serve(command, answer):
        asked.append(command.code)
        reason = ErrorHeader("not me", 0, len(asked), world.broker.address.tcp)
        answer(Reply(encode_header(reason), code=ResponseCode.NOT_MASTER), 0)

    world.broker.serve = serve
    future = producer.send_async(message("1"), queue=queue(), timeout_ms=TIMEOUT_MS)
    world.run(TIMEOUT_MS + 200)
    assert isinstance(future.exception(), NotMaster)
    assert 20 <= asked.count(RequestCode.SEND_MESSAGE) <= 40
