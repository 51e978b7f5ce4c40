"""Applications of typed handlers beside a real cluster."""

from __future__ import annotations

import asyncio
import queue

import msgspec
from harness.patience import PATIENCE_S, until

import mqmesh.aio
from mqmesh import App, DeadLetterClient, Message, Reject, StoredMessage
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


def _reasons(letters: DeadLetterClient, group: str) -> list[str]:
    found = [letter.message.properties for letter in letters.scan(group)]
    return [properties[PROPERTY_LAST_FAILURE] for properties in found]
