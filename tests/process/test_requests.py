"""Requests and replies through real brokers that are killed in between."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator

import pytest
from harness.patience import until
from harness.stopwatch import Stopwatch

import mqmesh.aio
from mqmesh.errors import ClientNotOnline, RequestTimeout
from mqmesh.message import Message, StoredMessage
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.producer.replies import is_request
from mqmesh.testing.processes import ProcessCluster

PATIENCE_S = 20.0
_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def topic() -> str:
    return f"questions-{next(_numbers)}"


@pytest.fixture
def producer(cluster) -> Iterator[Producer]:
    with Producer("askers", namesrv_addr=cluster.namesrv_addr) as producer:
        yield producer


class Service:
    """A consumer that replies to everything in upper case, by a producer of its own."""

    def __init__(self, cluster: ProcessCluster, topic: str) -> None:
        self.producer = Producer("replier", namesrv_addr=cluster.namesrv_addr)
        self.consumer = PushConsumer(
            f"{topic}-service",
            namesrv_addr=cluster.namesrv_addr,
            consume_from_where="FIRST_OFFSET",
        )
        self.consumer.subscribe(topic, listener=self.listen)
        self.arrived = threading.Semaphore(0)
        self.may_reply = threading.Event()
        self.may_reply.set()
        self.told: list[object] = []

    def listen(self, messages: list[StoredMessage]) -> ConsumeResult:
        for message in messages:
            assert is_request(message)
            self.arrived.release()
            assert self.may_reply.wait(PATIENCE_S)
            try:
                self.told.append(
                    self.producer.reply(message, message.body.upper(), tag="R", timeout_ms=15_000)
                )
            except ClientNotOnline as error:
                self.told.append(error)
        return ConsumeResult.SUCCESS

    def __enter__(self) -> Service:
        self.producer.start()
        self.consumer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.may_reply.set()
        self.consumer.close()
        self.producer.close()


def test_a_request_gets_its_reply_and_leaves_no_topic_behind(cluster, topic, producer):
    with Service(cluster, topic) as service:
        reply = producer.request(Message(topic, b"hello", tag="Q"), 15_000)
        assert (reply.body, reply.tag, reply.topic) == (b"HELLO", "R", topic)
        until(lambda: service.told == [True])
        # With everybody connected, the way there and back takes milliseconds.
        watch = Stopwatch()
        for n in range(20):
            assert producer.request(Message(topic, b"q%d" % n), 15_000).body == b"Q%d" % n
        assert watch.seconds / 20 < 0.2
    assert producer.pending_requests == 0
    with AdminClient(cluster.namesrv_addr) as admin:
        assert not [name for name in admin.topics() if "REPLY" in name.upper()]


def test_requests_survive_the_death_of_the_broker(short_tmp_path, topic):
    with (
        ProcessCluster(short_tmp_path) as cluster,
        Producer("askers", namesrv_addr=cluster.namesrv_addr) as producer,
        Service(cluster, topic) as service,
    ):
        producer.request(Message(topic, b"first"), 15_000)
        service.may_reply.clear()
        future = producer.request_async(Message(topic, b"second"), timeout_ms=30_000)
        for _ in range(2):
            assert service.arrived.acquire(timeout=PATIENCE_S)
        cluster.brokers["broker-a"].kill()
        service.may_reply.set()  # the reply meets a broker that is not there
        cluster.start_broker()
        assert future.result(25).body == b"SECOND"


def test_under_kills_every_request_ends_once_with_its_own_reply_or_an_error(short_tmp_path, topic):
    with (
        ProcessCluster(short_tmp_path) as cluster,
        Producer("askers", namesrv_addr=cluster.namesrv_addr) as producer,
        Service(cluster, topic),
    ):
        producer.request(Message(topic, b"warm"), 15_000)
        told: list[tuple[int, bytes | None]] = []
        for n in range(300):
            if n in (100, 200):
                cluster.brokers["broker-a"].kill()
                cluster.start_broker()

            def note(future, number=n):
                told.append((number, None if future.exception() else future.result().body))

            producer.request_async(Message(topic, b"n%d" % n), note, timeout_ms=12_000)
        until(lambda: len(told) == 300, 40)
        assert sorted(number for number, _ in told) == list(range(300))
        assert all(body in (None, b"N%d" % number) for number, body in told)
        answered = sum(body is not None for _, body in told)
        assert answered >= 100, "at least those behind the last kill"
        assert producer.pending_requests == 0


def test_coroutines_ask_and_reply(cluster, topic):
    async def serve(ready: asyncio.Event) -> None:
        async with (
            mqmesh.aio.Producer("replier", namesrv_addr=cluster.namesrv_addr) as producer,
            mqmesh.aio.PullConsumer(
                "service", namesrv_addr=cluster.namesrv_addr, consume_from_where="FIRST_OFFSET"
            ) as consumer,
        ):
            await consumer.subscribe(topic)
            ready.set()
            async for message in consumer:
                assert await producer.reply(message, message.body[::-1])
                break

    async def ask() -> bytes:
        ready = asyncio.Event()
        service = asyncio.create_task(serve(ready))
        async with mqmesh.aio.Producer("asker", namesrv_addr=cluster.namesrv_addr) as producer:
            await ready.wait()
            reply = await producer.request(Message(topic, b"abc"), 15_000)
            with pytest.raises(RequestTimeout):
                await producer.request(Message(topic, b"nobody replies any more"), 300)
        await service
        return reply.body

    assert asyncio.run(ask()) == b"cba"
