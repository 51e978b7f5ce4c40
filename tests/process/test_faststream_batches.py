"""FastStream's lists of messages beside a real cluster."""

from __future__ import annotations

import asyncio

import pydantic
import pytest
from faststream import FastStream
from faststream.exceptions import NackMessage
from harness.patience import PATIENCE_S, until

from mqmesh import DeadLetterClient
from mqmesh.faststream import MQMeshBroker
from mqmesh.message import PROPERTY_LAST_FAILURE
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.testing.cluster_for_tests import THREADS, SharedCluster


class Order(pydantic.BaseModel):
    id: int


@pytest.fixture(scope="module")
def mqmesh_shared_cluster():
    """Every retry comes after a second."""
    cluster = SharedCluster(THREADS, {"message_delay_level": "1s 1s 1s"})
    yield cluster
    cluster.close()


def run(app):
    async def program():
        async with asyncio.timeout(PATIENCE_S):
            await app.run()

    asyncio.run(program())


def letters_of(cluster, group):
    with DeadLetterClient(cluster.namesrv_addr) as letters:
        return [
            (one.message.body, one.message.properties[PROPERTY_LAST_FAILURE].split(":")[1].strip())
            for one in letters.scan(group)
        ]


def lag_of(cluster, group):
    with GroupAdmin(cluster.namesrv_addr) as admin:
        return admin.progress(group).lag


def test_lists_are_handled_committed_and_sent_on(mqmesh_cluster):
    orders, bills = mqmesh_cluster.topic(queues=1), mqmesh_cluster.topic(queues=1)
    group = mqmesh_cluster.group()
    broker = MQMeshBroker(mqmesh_cluster.namesrv_addr)
    app = FastStream(broker, logger=None)
    lists: list[list[int]] = []

    @broker.subscriber(orders, group=group, batch=True, consume_message_batch_max_size=4)
    @broker.publisher(bills, batch=True)
    async def bill(batch: list[Order]) -> list[Order]:
        lists.append([order.id for order in batch])
        if sum(map(len, lists)) == 10:
            app.exit()
        return [Order(id=order.id * 2) for order in batch]

    @app.after_startup
    async def send() -> None:
        await broker.publish_batch(*[Order(id=number) for number in range(10)], topic=orders)

    run(app)
    assert sorted(lists) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    sent = [Order.model_validate_json(one.body).id for one in mqmesh_cluster.messages(bills)]
    assert sorted(sent) == list(range(0, 20, 2))
    assert lag_of(mqmesh_cluster, group) == 0


def test_a_list_that_fails_comes_again_one_by_one_and_only_the_poison_is_a_dead_letter(
    mqmesh_cluster,
):
    topic, group = mqmesh_cluster.topic(queues=1), mqmesh_cluster.group()
    broker = MQMeshBroker(mqmesh_cluster.namesrv_addr, logger=None)
    tried: list[list[str]] = []
    done: list[str] = []

    @broker.subscriber(topic, group=group, batch=True, dead_letter_on=(LookupError,))
    async def handle(texts: list[str]) -> None:
        tried.append(texts)
        if "unknown" in texts:
            raise KeyError("unknown")
        if texts == ["later"] and tried.count(texts) == 1:
            raise NackMessage
        done.extend(texts)

    async def program() -> None:
        async with broker, asyncio.timeout(PATIENCE_S):
            await broker.start()
            await broker.publish_batch("a", 7, "b", topic=topic)  # 7 is no text
            await broker.publish_batch("later", "unknown", topic=topic)
            await asyncio.to_thread(
                until, lambda: len(done) == 3 and len(letters_of(mqmesh_cluster, group)) == 2
            )

    asyncio.run(program())
    assert sorted(done) == ["a", "b", "later"]
    told = [(b"7", "ValidationError"), (b"unknown", "KeyError")]
    assert sorted(letters_of(mqmesh_cluster, group)) == told


def test_in_order_a_list_that_fails_waits_and_of_a_rejected_one_only_the_poison_leaves(
    mqmesh_cluster,
):
    topic, group = mqmesh_cluster.topic(queues=1), mqmesh_cluster.group()
    broker = MQMeshBroker(mqmesh_cluster.namesrv_addr)
    app = FastStream(broker, logger=None)
    tried: list[list[int]] = []

    @broker.subscriber(
        topic,
        group=group,
        batch=True,
        consume_message_batch_max_size=2,
        consume_orderly=True,
        suspend_current_queue_time_ms=10,
    )
    async def handle(numbers: list[int]) -> None:
        tried.append(numbers)
        if len(tried) == 1:
            raise OSError("no connection")
        if numbers[-1] == 5:
            app.exit()

    @app.after_startup
    async def send() -> None:
        await broker.publish_batch(0, 1, topic=topic)
        await broker.publish_batch(2, "three", 4, 5, topic=topic)

    run(app)
    assert tried == [[0, 1], [0, 1], [2], [4, 5]]
    # A broker that has it may not have indexed it yet.
    assert until(lambda: letters_of(mqmesh_cluster, group)) == [(b"three", "ValidationError")]
