"""Applications of typed handlers beside a real cluster."""

from __future__ import annotations

import asyncio
import queue

import msgspec
import pytest
from harness.patience import PATIENCE_S, until

import mqmesh.aio
from mqmesh import App, DeadLetterClient, Message, Reject, StoredMessage
from mqmesh.errors import MQMeshError
from mqmesh.message import PROPERTY_LAST_FAILURE


class Order(msgspec.Struct):
    id: int
    item: str


def test_orders_are_billed_and_what_no_retry_mends_is_a_dead_letter_at_once(mqmesh_cluster):
    topic, group = mqmesh_cluster.topic(queues=2), mqmesh_cluster.group()
    app = App("shop", namesrv_addr=mqmesh_cluster.namesrv_addr)
    orders = app.publisher(topic, Order)
    billed: queue.SimpleQueue[tuple[Order, str]] = queue.SimpleQueue()

    @app.subscriber(topic, group=group, dead_letter_on=(LookupError,))
    def bill(order: Order, message: StoredMessage) -> None:
        if order.item == "unknown":
            raise KeyError(order.item)
        if order.item == "forbidden":
            raise Reject("nobody may buy that")
        billed.put((order, message.keys[0]))

    with app, DeadLetterClient(mqmesh_cluster.namesrv_addr) as letters:
        for number, item in enumerate(("apple", "unknown", "forbidden")):
            orders.send(Order(number, item), keys=[f"order-{number}"])
        mqmesh_cluster.producer().send(Message(topic, b"no order"))
        assert billed.get(timeout=PATIENCE_S) == (Order(0, "apple"), "order-0")
        until(lambda: len(_reasons(letters, group)) == 3)
        reasons = _reasons(letters, group)
    assert [reason.partition(": ")[2][:23] for reason in sorted(reasons)] == [
        "KeyError: 'unknown'",
        "nobody may buy that",
        "the body is no Order: J",
    ]


def test_coroutines_handle_what_coroutines_send(mqmesh_cluster):
    topic, group = mqmesh_cluster.topic(queues=1), mqmesh_cluster.group()

    async def program() -> Order:
        app = mqmesh.aio.App("shop", namesrv_addr=mqmesh_cluster.namesrv_addr)
        orders = app.publisher(topic, Order)
        billed: asyncio.Future[Order] = asyncio.get_running_loop().create_future()

        @app.subscriber(topic, group=group)
        async def bill(order: Order) -> None:
            billed.set_result(order)

        async with app, asyncio.timeout(PATIENCE_S):
            await orders.send(Order(1, "pear"))
            return await billed

    assert asyncio.run(program()) == Order(1, "pear")


def test_results_are_stored_with_the_progress_of_their_group_or_sent(mqmesh_cluster):
    topics = [mqmesh_cluster.topic(queues=2) for _ in range(3)]
    orders, bills, copies = topics
    names = {"namesrv_addr": mqmesh_cluster.namesrv_addr}
    app, tried = App("shop", **names), set()
    billed: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    from_start = {"consume_from_where": "FIRST_OFFSET", "suspend_current_queue_time_ms": 10}

    @app.subscriber(orders, group=mqmesh_cluster.group(), exactly_once=True, **from_start)
    @app.publisher(bills)
    @app.publisher(copies)
    def bill(order: Order) -> list[Order] | None:
        if order.id not in tried:
            tried.add(order.id)
            raise LookupError
        return None if order.item == "free" else [Order(order.id, "bill")] * 2

    @app.subscriber(copies, group=mqmesh_cluster.group(), **from_start)
    @app.publisher(bills)
    def forward(copy: Order) -> Message:
        return Message(bills, msgspec.json.encode(Order(copy.id, "copy")), tag="copy")

    @app.subscriber(bills, group=mqmesh_cluster.group(), **from_start)
    def post(one: Order, message: StoredMessage) -> None:
        billed.put((message.tag or one.item, one.id))

    for number, item in enumerate(("apple", "free", "pear")):
        mqmesh_cluster.producer().send(Message(orders, msgspec.json.encode(Order(number, item))))
    with app:
        found = sorted(billed.get(timeout=PATIENCE_S) for _ in range(8))
    assert found == [(name, number) for name in ("bill", "copy") for number in (0, 0, 2, 2)]
    assert billed.empty()
    nowhere = App("shop", **names)
    nowhere.subscriber(orders, group=mqmesh_cluster.group(), exactly_once=True)(
        nowhere.publisher("gone")(bill)
    )
    with pytest.raises(MQMeshError, match="gone"):
        nowhere.start()


def test_coroutines_results_are_stored_with_the_progress_of_their_group(mqmesh_cluster):
    orders, bills = mqmesh_cluster.topic(queues=1), mqmesh_cluster.topic(queues=1)
    group = mqmesh_cluster.group()

    async def program() -> bytes:
        app = mqmesh.aio.App("shop", namesrv_addr=mqmesh_cluster.namesrv_addr)
        sender = app.publisher(orders, Order)
        billed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        @app.subscriber(orders, group=group, exactly_once=True)
        @app.publisher(bills)
        async def bill(order: Order) -> str:
            return f"{order.item}: 3"

        @app.subscriber(bills, group=group, consume_orderly=True)
        async def post(one: bytes) -> None:
            billed.set_result(one)

        async with app, asyncio.timeout(PATIENCE_S):
            await sender.send(Order(1, "pear"))
            return await billed

    assert asyncio.run(program()) == b"pear: 3"


def _reasons(letters: DeadLetterClient, group: str) -> list[str]:
    found = [letter.message.properties for letter in letters.scan(group)]
    return [properties[PROPERTY_LAST_FAILURE] for properties in found]
