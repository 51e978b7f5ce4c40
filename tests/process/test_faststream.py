"""FastStream's broker beside a real cluster."""

from __future__ import annotations

import asyncio
from typing import Annotated

import pydantic
import pytest
from faststream import BaseMiddleware, Context, FastStream
from faststream.exceptions import RejectMessage
from harness.patience import PATIENCE_S, until

from mqmesh import DeadLetterClient, Hooks, MessageSelector, StoredMessage
from mqmesh.errors import InvalidArgument, NoRoute, RequestTimeout
from mqmesh.faststream import MQMeshBroker, MQMeshMessage, MQMeshResponse
from mqmesh.message import PROPERTY_LAST_FAILURE, Message
from mqmesh.sdk.admin.group_admin import GroupAdmin


class Order(pydantic.BaseModel):
    id: int


def run(app):
    async def program():
        async with asyncio.timeout(PATIENCE_S):
            await app.run()

    asyncio.run(program())


def test_an_application_bills_orders_and_ends_in_order(mqmesh_cluster):
    orders, bills = mqmesh_cluster.topic(queues=2), mqmesh_cluster.topic(queues=2)
    group = mqmesh_cluster.group()
    broker = MQMeshBroker(mqmesh_cluster.namesrv_addr)
    app = FastStream(broker, logger=None)
    got: list[tuple[int, str | None, str, StoredMessage]] = []

    @broker.subscriber(orders, group=group, expression="new")
    @broker.publisher(bills)
    async def bill(order: Order) -> MQMeshResponse:
        return MQMeshResponse(Order(id=order.id * 2), tag="bill", keys=[f"bill-{order.id}"])

    @broker.subscriber(bills, group=group, expression=MessageSelector.by_sql("TAGS = 'bill'"))
    async def post(order: Order, message: Annotated[MQMeshMessage, Context("message")]) -> None:
        got.append((order.id, message.stored.tag, message.correlation_id, message.stored))
        if len(got) == 3:
            app.exit()

    @app.after_startup
    async def send() -> None:
        assert await broker.ping()
        for number in range(3):
            await broker.publish(Order(id=number), orders, tag="new", correlation_id=f"c{number}")
            await broker.publish(b"no order", orders, tag="old")

    run(app)
    assert sorted(one[:3] for one in got) == [
        (0, "bill", "c0"),
        (2, "bill", "c1"),
        (4, "bill", "c2"),
    ]
    assert {message.keys[0] for *_, message in got} == {"bill-0", "bill-1", "bill-2"}
    with GroupAdmin(mqmesh_cluster.namesrv_addr) as admin:
        assert admin.progress(group, bills).lag == 0, "what was done is committed"
    assert asyncio.run(broker.ping()) is False


def test_results_are_stored_with_the_progress_of_their_group(mqmesh_cluster):
    orders, bills = mqmesh_cluster.topic(queues=1), mqmesh_cluster.topic(queues=2)
    broker = MQMeshBroker(mqmesh_cluster.namesrv_addr)
    app = FastStream(broker, logger=None)
    tried: list[int] = []
    got: list[str] = []

    @broker.subscriber(
        orders, group=mqmesh_cluster.group(), exactly_once=True, suspend_current_queue_time_ms=10
    )
    @broker.publisher(bills)
    async def bill(order: Order) -> str:
        tried.append(order.id)
        await broker.publish(f"copy {order.id}", bills)
        if len(tried) == 1:
            raise LookupError
        return f"bill {order.id}"

    @broker.subscriber(bills, group=mqmesh_cluster.group(), consume_thread_count=1)
    async def post(one: str) -> None:
        got.append(one)
        if len(got) == 6:
            app.exit()

    @app.after_startup
    async def send() -> None:
        for number in range(3):
            await broker.publish(Order(id=number), orders)

    run(app)
    nowhere = MQMeshBroker(mqmesh_cluster.namesrv_addr)
    nowhere.subscriber(orders, group=mqmesh_cluster.group(), exactly_once=True)(
        nowhere.publisher("gone")(post)
    )
    with pytest.raises(NoRoute, match="gone"):
        asyncio.run(nowhere.start())
    asyncio.run(nowhere.stop())
    assert tried == [0, 0, 1, 2]
    assert sorted(got) == [f"{name} {number}" for name in ("bill", "copy") for number in range(3)]


def test_what_fails_is_sent_back_and_what_no_retry_mends_is_a_dead_letter(mqmesh_cluster):
    topic, group = mqmesh_cluster.topic(queues=1), mqmesh_cluster.group()
    again: list[bytes] = []

    class Again(Hooks):
        def after_consume(self, batch):
            if batch.again and batch.error is None:
                again.append(batch.messages[0].body)

    broker = MQMeshBroker(mqmesh_cluster.namesrv_addr, logger=None, hooks=[Again()])

    @broker.subscriber(
        topic, group=group, dead_letter_on=(LookupError,), persist_consumer_offset_interval_ms=100
    )
    async def handle(body: Order | str, message: Annotated[MQMeshMessage, Context("message")]):
        if body == "later":
            await message.nack()
        if body == "unknown":
            raise KeyError(body)
        if body == "forbidden":
            raise RejectMessage

    async def program() -> None:
        async with broker, asyncio.timeout(PATIENCE_S):
            await broker.start()
            for body in "unknown", "forbidden", [1], "later", "done":
                await broker.publish(body, topic)
            with GroupAdmin(mqmesh_cluster.namesrv_addr) as admin:
                await asyncio.to_thread(until, lambda: admin.progress(group).lag == 0)

    asyncio.run(program())
    with DeadLetterClient(mqmesh_cluster.namesrv_addr) as letters:
        reasons = until(lambda: _reasons(letters, group))
    told = sorted(reason.partition(": ")[2].partition("\n")[0] for reason in reasons)
    assert told == [
        "KeyError: 'unknown'",
        "ValidationError: 2 validation errors for handle",
        "the handler rejected the message",
    ]
    assert again == [b"later"]


def test_requests_are_answered_and_hooks_are_called(mqmesh_cluster):
    topic, group = mqmesh_cluster.topic(queues=1), mqmesh_cluster.group()
    seen: list[str] = []

    class Seen(Hooks):
        def after_send(self, batch):
            seen.append(f"sent {batch.topic == topic}")

        def after_consume(self, batch):
            seen.append(f"consumed {batch.error}")

    broker = MQMeshBroker(mqmesh_cluster.namesrv_addr, hooks=[Seen()])

    @broker.subscriber(topic, group=group)
    async def price(item: str) -> dict[str, str]:
        return {item: "3 eur"}

    async def program() -> object:
        async with broker, asyncio.timeout(PATIENCE_S):
            await broker.start()
            reply = await broker.request("apple", topic, timeout_ms=30_000)
            with pytest.raises(RequestTimeout):
                await broker.publisher(mqmesh_cluster.topic()).request("apple", timeout_ms=1)
            return await reply.decode()

    assert asyncio.run(program()) == {"apple": "3 eur"}
    assert {"sent True", "consumed None"} <= set(seen)


def test_a_subscriber_may_come_and_go_while_the_broker_runs(mqmesh_cluster):
    topics, group = [mqmesh_cluster.topic(queues=1) for _ in range(2)], mqmesh_cluster.group()
    broker = MQMeshBroker(mqmesh_cluster.namesrv_addr, logger=None)

    async def program() -> None:
        got: asyncio.Queue[str] = asyncio.Queue()
        async with broker, asyncio.timeout(PATIENCE_S):
            await broker.start()
            subscribers = [broker.subscriber(topic, group=group) for topic in topics]
            for subscriber in subscribers:
                subscriber(got.put)
                await subscriber.start()
            for topic in topics:
                await broker.publish(topic, topic)
            assert {await got.get(), await got.get()} == set(topics)
            await subscribers[0].stop()
            with GroupAdmin(mqmesh_cluster.namesrv_addr) as admin:
                await asyncio.to_thread(until, lambda: _topics(admin, group) == {topics[1]})
            twin = broker.subscriber(topics[1], group=group)
            twin(got.put)
            with pytest.raises(InvalidArgument, match="two handlers"):
                await twin.start()
            await subscribers[1].stop()

    asyncio.run(program())


def test_messages_are_asked_for_one_by_one_and_what_was_not_done_comes_again(mqmesh_cluster):
    topic, group = mqmesh_cluster.topic(queues=1), mqmesh_cluster.group()
    address = mqmesh_cluster.namesrv_addr

    def program(work, seen: list[bytes]):
        class Sees(BaseMiddleware):
            async def consume_scope(self, call_next, msg):
                seen.append(msg.body)
                return await call_next(msg)

        async def life() -> list[int]:
            broker = MQMeshBroker(address, logger=None, middlewares=[Sees])
            subscriber = broker.subscriber(
                topic, group=group, expression="new", consume_from_where="FIRST_OFFSET"
            )
            async with broker, asyncio.timeout(PATIENCE_S):
                await broker.start()
                return await work(broker, subscriber)

        return asyncio.run(life())

    async def first(broker, subscriber) -> list[int]:
        for number in range(4):
            await broker.publish(Order(id=number), topic, tag="new")
            await broker.publish(b"no order", topic, tag="old")
        twin = broker.subscriber(topic, group=group)
        with pytest.raises(InvalidArgument, match="another group"):
            await twin.start()
        twin(print)
        with pytest.raises(InvalidArgument, match="another group"):
            await twin.start()
        got = [(await (await subscriber.get_one(timeout=PATIENCE_S)).decode())["id"]]
        async for message in subscriber:
            got.append((await message.decode())["id"])
            if len(got) == 3:
                return got
        raise AssertionError("nobody has stopped it")

    async def second(broker, subscriber) -> list[int]:
        got = []
        async for message in subscriber:
            got.append((await message.decode())["id"])
            if len(got) == 2:
                await message.ack()
                return got
        raise AssertionError("nobody has stopped it")

    async def third(broker, subscriber) -> list[int]:
        await broker.publish(Order(id=4), topic, tag="new")
        got = [(await (await subscriber.get_one(timeout=PATIENCE_S)).decode())["id"]]
        assert await subscriber.get_one(timeout=0.01) is None
        waiting = asyncio.create_task(subscriber.get_one(timeout=PATIENCE_S))
        await asyncio.sleep(0)
        await subscriber.stop()
        assert await waiting is None
        return got

    seen: list[bytes] = []
    assert program(first, seen) == [0, 1, 2]
    assert program(second, seen) == [2, 3], "the last one was not said to be done"
    assert program(third, seen) == [4], "the last one was said to be done"
    assert [Order.model_validate_json(body).id for body in seen] == [0, 1, 2, 2, 3, 4]
    with GroupAdmin(address) as admin:
        assert admin.progress(group, topic).lag == 0


def test_what_was_gathered_and_not_acknowledged_comes_again_without_auto_commit(mqmesh_cluster):
    topic, group = mqmesh_cluster.topic(queues=1), mqmesh_cluster.group()

    async def gather(ack: int) -> list[bytes]:
        """Gathers three messages, fails, and has acknowledged some of them."""
        broker = MQMeshBroker(mqmesh_cluster.namesrv_addr, logger=None)
        subscriber = broker.subscriber(
            topic, group=group, auto_commit=False, consume_from_where="FIRST_OFFSET"
        )
        gathered = []
        async with broker, asyncio.timeout(PATIENCE_S):
            await broker.start()
            async for message in subscriber:
                gathered.append(message)
                if len(gathered) == 3:
                    break
            if ack:
                await gathered[ack - 1].ack()
        return [message.body for message in gathered]

    producer = mqmesh_cluster.producer()
    for number in range(6):
        producer.send(Message(topic, b"%d" % number))
    assert asyncio.run(gather(ack=0)) == [b"0", b"1", b"2"]
    assert asyncio.run(gather(ack=2)) == [b"0", b"1", b"2"]
    assert asyncio.run(gather(ack=0)) == [b"2", b"3", b"4"]


def _topics(admin: GroupAdmin, group: str) -> set[str]:
    found = [one.topic for member in admin.connections(group) for one in member.data.subscriptions]
    return set(found) - {f"%RETRY%{group}"}


def _reasons(letters: DeadLetterClient, group: str) -> list[str]:
    found = [one.message.properties[PROPERTY_LAST_FAILURE] for one in letters.scan(group)]
    return found if len(found) == 3 else []
