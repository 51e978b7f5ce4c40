"""The producer on a simulated network: what becomes of each send when things go wrong."""

from __future__ import annotations

import threading

import pytest

from mqmesh.errors import (
    BrokerError,
    BrokerNotAvailable,
    ClientClosed,
    EndpointUnreachable,
    InvalidArgument,
    MessageIllegal,
    NoRoute,
    QueueFull,
    RemoteProtocolError,
    RequestTimeout,
    SystemBusy,
    TopicNotFound,
)
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.codes import RequestCode, ResponseCode
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.route import Perm
from mqmesh.record_batch import MAX_MESSAGES
from mqmesh.sdk.producer import Producer
from mqmesh.testing.simulated_cluster import Fault, FaultKind, SimulatedCluster
from mqmesh.testing.simulated_network import SimulatedNetwork

TIMEOUT_MS = 3_000


class World:
    """A simulated cluster and producers in it."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self.network = network
        self.cluster = SimulatedCluster(network)
        self.producers: list[Producer] = []

    def build(self, **settings) -> None:
        self.cluster = SimulatedCluster(self.network, **settings)

    @property
    def broker(self):
        return next(iter(self.cluster.brokers.values()))

    def producer(self, *, topic: str | None = "t", **options) -> Producer:
        """A started producer that knows the route of a topic and has met its brokers."""
        producer = Producer("g", namesrv_addr=self.cluster.namesrv_addr, **options)
        self.producers.append(producer)
        producer.start()
        if topic is not None:
            assert self.call(lambda: producer.fetch_publish_queues(topic))
        return producer

    def run(self, duration_ms: int = 20) -> None:
        self.network.run(duration_ms)

    def call(self, function):
        return self.network.call(function)

    def stored(self, topic: str = "t") -> list[bytes]:
        return [message.body for message in self.cluster.messages(topic)]


@pytest.fixture
def world(monkeypatch):
    network = SimulatedNetwork()
    network.install(monkeypatch.setattr)
    monkeypatch.setattr("mqmesh.sdk.producer.CLOSE_FLUSH_S", 0.001)
    world = World(network)
    yield world
    for producer in world.producers:
        producer.close()
        assert producer._buffer.pending_bytes == 0, "room was given back to the byte"
        assert not producer._sender._held
        assert all(not lane.in_flight for lane in producer._buffer._lanes.values())
    network.close()


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
    error = world.call(lambda: producer.send(message(), timeout_ms=200))
    assert isinstance(error, NoRoute)
    assert "written" in str(error)
    done = []
    thread = threading.Thread(target=lambda: done.append(producer.send(message())))
    thread.start()
    world.run(200)
    world.broker.add_topic("t")
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


# ---- Bounds -------------------------------------------------------------------------------


def test_a_full_buffer_waits_and_then_refuses(world):
    producer = world.producer(buffer_memory_bytes=1_000)
    world.broker.crash()
    for _ in range(100):
        if producer._buffer.pending_bytes >= 1_000:
            break
        producer.send_async(message(b"x" * 100))
    assert producer._buffer.pending_bytes < 1_000 + 164 + 1
    assert not producer.can_send_at_once("t")
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
    future = producer.send_batch_async([spoilt], queue=queue())
    spoilt.tag = ["unhashable"]
    other = producer.send_async(message("other"), queue=queue())
    world.run()
    assert isinstance(future.exception(), InvalidArgument)
    assert other.result().queue_offset == 0


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


def test_a_batch_that_only_just_does_not_fit_is_told_by_the_future(world):
    producer = world.producer(max_message_size=15 << 20)
    future = producer.send_batch_async([message(b"x" * (8 << 20))] * 2)
    world.run()
    assert isinstance(future.exception(), InvalidArgument)


@pytest.mark.parametrize("timeout_ms", [0, -1, 1.5, "1", True, None.__class__, 10**10])
def test_an_impossible_timeout_is_refused(world, timeout_ms):
    producer = world.producer()
    with pytest.raises(InvalidArgument):
        producer.send_async(message(), timeout_ms=timeout_ms)


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
        producer.wait_until_can_send(topic)


def test_a_selector_that_fails_or_chooses_nonsense_is_the_callers_concern(world):
    producer = world.producer()

    def fail(queues, one, arg):
        raise KeyError("selector")

    with pytest.raises(KeyError):
        producer.send_async(message(), selector=fail)
    with pytest.raises(InvalidArgument):
        producer.send_async(message(), selector=lambda *_: queue(99))
    assert producer._buffer.pending_bytes == 0


# ---- Callbacks ----------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_fails_hurts_nobody_else(world, failure, caplog):
    producer = world.producer()
    told = []

    def bad(future):
        raise failure("in a callback")

    futures = [
        producer.send_async(message(str(n)), bad if n % 2 else told.append) for n in range(10)
    ]
    world.run()
    assert len(told) == 5
    assert all(future.result() for future in futures)
    assert "a callback of a send failed" in caplog.text
    assert world.call(lambda: producer.send(message("on"))).status is SendStatus.SEND_OK


def test_a_callback_may_send_but_not_wait(world):
    producer = world.producer()
    found = []

    def again(future):
        found.append(producer.send_async(message("again")))
        try:
            producer.send(message("never"))
        except InvalidArgument as error:
            found.append(error)
        try:
            producer.send_async(Message("unknown", b"x"))
        except NoRoute as error:
            found.append(error)
        future.add_done_callback(found.append)

    future = producer.send_async(message("first"), again)
    world.run()
    assert found[0].result().status is SendStatus.SEND_OK
    assert isinstance(found[1], InvalidArgument)
    assert isinstance(found[2], NoRoute)
    assert found[3] is future
    assert sorted(world.stored()) == [b"again", b"first"]


def test_a_callback_that_waits_for_another_send_gets_an_error_and_no_deadlock(world):
    producer = world.producer()
    second = []
    found = []

    def wait(_):
        try:
            second[0].result(0)
        except RequestTimeout as error:
            found.append(error)

    world.broker.faults.append(Fault(FaultKind.NONE))
    producer.send_async(message("1"), wait, queue=queue(0))
    world.broker.faults.append(Fault(FaultKind.LATE, 100))
    second.append(producer.send_async(message("2"), queue=queue(0)))
    producer.send_async(message("3"), queue=queue(1))
    world.run(500)
    assert second[0].result().status is SendStatus.SEND_OK


# ---- Life ---------------------------------------------------------------------------------


def test_nothing_can_be_sent_before_start_or_after_close(world):
    producer = Producer("g", namesrv_addr=world.cluster.namesrv_addr)
    calls = [
        lambda: producer.send(message()),
        lambda: producer.send_async(message()),
        lambda: producer.send_oneway(message()),
        lambda: producer.send_batch([message()]),
        lambda: producer.send_batch_async([message()]),
        lambda: producer.fetch_publish_queues("t"),
        lambda: producer.can_send_at_once("t"),
        lambda: producer.wait_until_can_send("t"),
    ]
    for call in calls:
        with pytest.raises(ClientClosed, match="start"):
            call()
    producer.start()
    producer.start()
    producer.close()
    producer.close()
    for call in calls:
        with pytest.raises(ClientClosed, match="closed"):
            call()
    with pytest.raises(ClientClosed):
        producer.start()


def test_a_producer_that_was_never_started_can_be_closed(world):
    producer = Producer("g", namesrv_addr=world.cluster.namesrv_addr)
    producer.close()
    producer.close()


@pytest.mark.parametrize(
    "faults",
    [
        [],
        [Fault(FaultKind.LOSE)],
        [Fault(FaultKind.REFUSE, ResponseCode.SYSTEM_ERROR)],
        [Fault(FaultKind.REFUSE, ResponseCode.SERVICE_NOT_AVAILABLE)],
        [Fault(FaultKind.REFUSE, ResponseCode.MESSAGE_ILLEGAL)],
        [Fault(FaultKind.CRASH_AFTER)],
        [Fault(FaultKind.LATE, 1_000)],
    ],
    ids=lambda faults: faults[0].kind.name if faults else "none",
)
@pytest.mark.parametrize("after_ms", [0, 1, 2, 3, 50, 150])
def test_closing_ends_every_send(world, faults, after_ms):
    producer = world.producer()
    told = []
    world.broker.faults.extend(faults)
    futures = [producer.send_async(message(), told.append, queue=queue(n % 4)) for n in range(8)]
    futures.append(producer.send_batch_async([message()] * 3, told.append))
    world.run(after_ms)
    futures.append(producer.send_async(message("last"), told.append))
    producer.close()
    assert all(future.done() for future in futures)
    assert sorted(map(id, told)) == sorted(map(id, futures))
    assert {type(future.exception()) for future in futures} <= {
        type(None),
        ClientClosed,
        MessageIllegal,
    }


def test_close_waits_for_what_is_under_way(world, monkeypatch):
    monkeypatch.setattr("mqmesh.sdk.producer.CLOSE_FLUSH_S", 10.0)
    producer = world.producer()
    future = producer.send_async(message())
    closer = threading.Thread(target=producer.close)
    closer.start()
    while closer.is_alive():
        world.run(1)
        closer.join(0.001)
    assert future.result().status is SendStatus.SEND_OK


def test_a_callback_may_close_the_producer(world):
    producer = world.producer()
    told = []

    def close(future):
        told.append(future)
        producer.close()

    first = producer.send_async(message("1"), close, queue=queue(0))
    second = producer.send_async(message("2"), told.append, queue=queue(1))
    third = producer.send_batch_async([message("3")], told.append, queue=queue(0))
    world.run()
    assert first.result().status is SendStatus.SEND_OK
    assert all(one.done() for one in (first, second, third))
    assert len(told) == 3
    with pytest.raises(ClientClosed):
        producer.send_async(message())


def test_the_death_of_the_engine_ends_every_send(world, monkeypatch, caplog):
    producer = world.producer()
    futures = [producer.send_async(message(str(n))) for n in range(5)]
    world.run(0)

    def die(_):
        raise MemoryError

    monkeypatch.setattr(producer._engine.loop, "tick", die)
    producer._engine._thread.join()
    assert {type(future.exception()) for future in futures} == {ClientClosed}
    with pytest.raises(ClientClosed, match="died"):
        producer.send_async(message())
    with pytest.raises(ClientClosed, match="died"):
        producer.send(message())
    assert "died" in caplog.text


def test_a_fork_closes_the_producer_in_the_child(world):
    producer = world.producer()
    producer.on_fork()
    with pytest.raises(ClientClosed, match="fork"):
        producer.send_async(message())
    producer.close()
    producer._state = "running"  # back in the parent


def test_ctrl_c_in_a_synchronous_send_leaves_the_queue_usable(world, monkeypatch):
    producer = world.producer()
    world.call(lambda: producer.send(message("0"), queue=queue()))
    waiting = []

    def interrupt(command, answer):
        waiting.append(producer.send_async(message("2"), queue=queue()))
        raise KeyboardInterrupt

    monkeypatch.setattr(world.broker, "serve", interrupt)
    with pytest.raises(KeyboardInterrupt):
        producer.send(message("1"), queue=queue())
    monkeypatch.undo()
    world.network.install(monkeypatch.setattr)
    world.run()
    assert waiting[0].result().queue_offset == 1
    assert producer.send(message("3"), queue=queue()).queue_offset == 2


def test_what_waits_behind_a_failed_direct_send_is_sent(world, monkeypatch):
    producer = world.producer()
    world.call(lambda: producer.send(message("0"), queue=queue()))
    behind = []
    serve = world.broker.serve

    def overtake(command, answer):
        behind.append(producer.send_async(message("2"), queue=queue()))
        monkeypatch.setattr(world.broker, "serve", serve)
        serve(command, answer)

    world.broker.faults.append(Fault(FaultKind.REFUSE, ResponseCode.SYSTEM_BUSY))
    monkeypatch.setattr(world.broker, "serve", overtake)
    assert isinstance(world.call(lambda: producer.send(message("1"), queue=queue())), SystemBusy)
    world.run(100)
    assert behind[0].result().queue_offset == 1


def test_options_are_checked(world):
    for options in (
        {"send_msg_timeout_ms": 0},
        {"unknown": 1},
        {"batch_messages": 10**9},
        {"retry_times_when_send_failed": -1},
    ):
        with pytest.raises(InvalidArgument):
            Producer("g", **options)
    with pytest.raises(InvalidArgument):
        Producer("a b")
    with pytest.raises(InvalidArgument):
        Producer("g", namesrv_addr="nonsense")


def test_a_deleted_topic_is_told(world):
    producer = world.producer()
    world.run()
    del world.broker.topics["t"]
    future = producer.send_async(message())
    world.run(1_000)
    assert isinstance(future.exception(), TopicNotFound)
