"""Random faults on a simulated cluster, and what must hold in spite of them.

Every seed is a course of events of its own: sends of all kinds, crashes, lost and late
answers, refusals, brokers that move, topics that grow, name servers that forget.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from harness.simulated_cluster import Fault, FaultKind, SimulatedCluster
from harness.simulated_network import SimulatedNetwork

from mqmesh.errors import InvalidArgument, MQMeshError, QueueFull
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.codes import ResponseCode
from mqmesh.sdk.producer import admission
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.producer.send_result import SendFuture

SEEDS = range(60)
STEPS = 150
REFUSALS = [
    ResponseCode.SYSTEM_ERROR,
    ResponseCode.SYSTEM_BUSY,
    ResponseCode.SERVICE_NOT_AVAILABLE,
    ResponseCode.NO_PERMISSION,
    ResponseCode.TOPIC_NOT_EXIST,
    ResponseCode.MESSAGE_ILLEGAL,
]


class Course:
    """One course of events.

    Attributes:
        sends: Future, bodies, and the queue it was sent to, or None if any would do.
        told: How often each future's callback was called.
    """

    def __init__(self, seed: int, network: SimulatedNetwork) -> None:
        self.random = random.Random(seed)
        self.network = network
        names = ("a", "b", "c")[: self.random.randint(1, 3)]
        self.cluster = SimulatedCluster(network, brokers=names, namesrvs=2)
        self.sends: list[tuple[SendFuture, list[bytes], MessageQueue | None]] = []
        self.told: dict[int, int] = {}
        self.count = 0
        self.producer = Producer(
            "g",
            namesrv_addr=self.cluster.namesrv_addr,
            transport=network.transport(watches=seed % 2 == 0),
            send_msg_timeout_ms=self.random.choice([300, 1_000, 3_000]),
            buffer_memory_bytes=self.random.choice([2_000, 1_000_000]),
            batch_messages=self.random.choice([1, 5, 2_000]),
            send_latency_fault_enable=self.random.random() < 0.5,
            retry_another_broker_when_not_store_ok=self.random.random() < 0.3,
            close_timeout_ms=1,
        )
        self.producer.start()
        network.call(lambda: self.producer.fetch_publish_queues("t"))

    def body(self) -> bytes:
        self.count += 1
        return b"%d" % self.count

    def step(self) -> None:
        dice = self.random.random()
        if dice < 0.6:
            self.send()
        elif dice < 0.9:
            self.network.run(self.random.choice([0, 1, 2, 5, 20, 120, 400]))
        else:
            self.harm()

    def send(self) -> None:
        queues = self.producer.fetch_publish_queues("t")
        queue = self.random.choice(queues) if self.random.random() < 0.5 else None
        number = self.random.choice([0, 0, 0, 1, 3])  # 0 is no explicit batch
        bodies = [self.body() for _ in range(max(number, 1))]
        messages = [Message("t", body) for body in bodies]
        # In the loop's thread nobody waits for room.
        self.producer._engine.loop._thread = None
        if not number and self.random.random() < 0.5:
            self.send_plainly(messages[0])
            return
        timeout_ms = self.random.choice([None, None, 100, 2_000])
        try:
            if number:
                future = self.producer.send_batch_async(
                    messages, self.note, queue=queue, timeout_ms=timeout_ms
                )
            else:
                future = self.producer.send_async(
                    messages[0], self.note, queue=queue, timeout_ms=timeout_ms
                )
        except (InvalidArgument, QueueFull):
            return
        self.sends.append((future, bodies, queue))

    def send_plainly(self, message: Message) -> None:
        # As most programs do: such messages join open batches by the fast path.
        try:
            future = self.producer.send_async(message)
        except (InvalidArgument, QueueFull):
            return
        future.add_done_callback(self.note)
        self.sends.append((future, [message.body], None))

    def note(self, future: SendFuture) -> None:
        self.told[id(future)] = self.told.get(id(future), 0) + 1
        assert future.done()
        if self.random.random() < 0.05:
            raise ValueError("a callback of the test")

    def harm(self) -> None:
        broker = self.random.choice(list(self.cluster.brokers.values()))
        dice = self.random.random()
        if dice < 0.55:
            kind = self.random.choice(list(FaultKind))
            value = self.random.choice([50, 800])
            if kind in (FaultKind.REFUSE, FaultKind.REFUSE_REQUEST):
                value = self.random.choice(REFUSALS)
            elif kind is FaultKind.STATUS:
                value = self.random.randint(1, 3)
            broker.faults.append(Fault(kind, value))
        elif dice < 0.65:
            broker.crash()
        elif dice < 0.85:
            broker.start()
        elif dice < 0.90:
            broker.move(f"tcp://127.0.0.1:{self.random.randint(20_000, 60_000)}")
        elif dice < 0.95:
            broker.add_topic("t", queues=self.random.randint(2, 6))
        else:
            self.random.choice(self.cluster.namesrvs).forget()

    def finish(self) -> None:
        for broker in self.cluster.brokers.values():
            broker.faults.clear()
            broker.start()
        self.network.run(10_000)


@pytest.fixture
def network():
    network = SimulatedNetwork()
    yield network
    network.close()


@pytest.mark.parametrize("closing", [False, True], ids=["goes on", "closes"])
@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens(network, monkeypatch, seed, closing):
    chance = random.Random(seed)
    if seed % 2:
        monkeypatch.setattr(admission, "NativeAdmission", None)  # as on machines without a compiler
    network.random = chance
    course = Course(seed, network)
    loop = SimpleNamespace(clock=course.producer._engine.loop.clock, in_loop_thread=True)
    course.producer._buffer._loop = loop  # nobody waits for room
    for _ in range(STEPS):
        course.step()
    if not closing:
        course.finish()
    course.producer.close()
    check_ends(course)
    check_log(course)
    check_order(course)


def check_ends(course: Course) -> None:
    """Every send has ended, once, and left nothing behind."""
    assert all(future.done() for future, _, _ in course.sends)
    assert course.told == {id(future): 1 for future, _, _ in course.sends}
    producer = course.producer
    assert producer._buffer.pending_bytes == 0
    assert not producer._sender._outbox._flying
    assert not producer._buffer.ready_brokers()
    assert all(lane.idle for lane in producer._buffer._lanes.values())
    assert producer._engine.loop.callback_failures == 0


def check_log(course: Course) -> None:
    """What was promised is there, once a broker, and nothing else is."""
    stored = course.cluster.messages("t")
    places = {(one.message_queue, one.queue_offset): one for one in stored}
    for future, bodies, queue in course.sends:
        if isinstance(future.exception(), MQMeshError):
            continue
        result = future.result()
        assert queue in (None, result.message_queue)
        assert result.message_count == len(bodies)
        for number, body in enumerate(bodies):
            one = places[result.message_queue, result.queue_offset + number]
            assert one.body == body
            assert one.message_id == result.message_ids[number]
    sent = {body for _, bodies, _ in course.sends for body in bodies}
    assert {one.body for one in stored} <= sent
    twins = [(one.broker_name, one.message_id) for one in stored]
    assert len(set(twins)) == len(twins), "a broker stored a message twice"


def check_order(course: Course) -> None:
    """In each queue, messages that were sent to it stand in the order of their sends."""
    bound = {body for _, bodies, queue in course.sends if queue is not None for body in bodies}
    queues: dict[MessageQueue, list[int]] = {}
    for one in course.cluster.messages("t"):
        if one.body in bound:
            queues.setdefault(one.message_queue, []).append(int(one.body))
    for numbers in queues.values():
        assert numbers == sorted(numbers)
