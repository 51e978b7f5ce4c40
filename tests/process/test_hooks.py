"""Hooks of every kind of client, around what goes through a real cluster."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from mqmesh import aio
from mqmesh.message import Message, StoredMessage
from mqmesh.protocol.membership import ConsumeFromWhere
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.hooks import ConsumeContext, Hooks, SendContext
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.transactions.transaction_producer import TransactionProducer
from mqmesh.sdk.transactions.transactions import LocalTransactionState, TransactionListener
from mqmesh.testing.processes import ProcessCluster

PATIENCE_S = 20
FIRST = ConsumeFromWhere.FIRST_OFFSET


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


class Trace(Hooks):
    """Marks what is sent, and notes what is consumed."""

    def __init__(self) -> None:
        self.sent: list[SendContext] = []
        self.begun: list[ConsumeContext] = []
        self.ended: list[ConsumeContext] = []
        self.changed = threading.Condition()

    def before_send(self, batch: SendContext) -> None:
        batch.add_properties({"trace": batch.group})

    def after_send(self, batch: SendContext) -> None:
        self.sent.append(batch)

    def before_consume(self, batch: ConsumeContext) -> None:
        self.begun.append(batch)

    def after_consume(self, batch: ConsumeContext) -> None:
        with self.changed:
            self.ended.append(batch)
            self.changed.notify_all()

    def wait(self, count: int) -> None:
        """Waits until so many messages are done."""

        def are_there() -> bool:
            return sum(len(one.messages) for one in self.ended if not one.again) >= count

        with self.changed:
            assert self.changed.wait_for(are_there, PATIENCE_S)


def check(trace: Trace, bodies: set[bytes], group: str) -> None:
    assert trace.ended == trace.begun
    done = [message for one in trace.ended for message in one.messages if not one.again]
    assert {message.body for message in done} == bodies
    assert {message.property("trace") for message in done} == {"p"}
    assert {one.group for one in trace.ended} == {group}
    assert all(
        one.queue == message.message_queue for one in trace.ended for message in one.messages
    )


@pytest.mark.parametrize("orderly", [False, True])
def test_blocking_clients_call_their_hooks(cluster, orderly):
    address, topic, failed = cluster.namesrv_addr, f"blocking-{orderly}", []
    sends, calls, polls = Trace(), Trace(), Trace()
    with Producer("p", namesrv_addr=address, hooks=[sends]) as producer:
        result = producer.send(Message(topic, b"0"))
        producer.send_batch([Message(topic, b"1"), Message(topic, b"2")])
        producer.send_async(Message(topic, b"3")).result()
    assert sum(len(one.messages) for one in sends.sent) == 4
    assert sends.sent[0].message_ids == [result.message_id]

    def listen(messages: list[StoredMessage]) -> ConsumeResult:
        if not failed:
            failed.extend(messages)
            return ConsumeResult.RECONSUME_LATER
        return ConsumeResult.SUCCESS

    bodies = {b"%d" % number for number in range(4)}
    consumer = PushConsumer(
        "push",
        namesrv_addr=address,
        consume_from_where=FIRST,
        consume_orderly=orderly,
        suspend_current_queue_time_ms=10,
        hooks=[calls],
    )
    consumer.subscribe(topic, listener=listen)
    with consumer:
        calls.wait(4 if orderly else 3)
    assert sum(len(one.messages) for one in calls.ended if one.again) == 1
    check(calls, bodies - ({failed[0].body} if not orderly else set()), "push")

    with PullConsumer(
        "pull", namesrv_addr=address, consume_from_where=FIRST, hooks=[polls]
    ) as puller:
        puller.subscribe(topic)
        while sum(len(one.messages) for one in polls.begun) < 4:
            before = list(polls.begun)
            puller.poll(1_000)
            assert polls.ended == before, "the next poll says that what was polled is done"
    check(polls, bodies, "pull")


def test_asyncio_clients_call_their_hooks(cluster):
    address, topic = cluster.namesrv_addr, "asyncio"
    sends, calls, polls = Trace(), Trace(), Trace()

    async def main() -> None:
        async with aio.Producer("p", namesrv_addr=address, hooks=[sends]) as producer:
            await asyncio.gather(*(producer.send(Message(topic, b"%d" % n)) for n in range(4)))

        async def listen(messages: list[StoredMessage]) -> None:
            await asyncio.sleep(0)

        consumer = aio.PushConsumer(
            "push", namesrv_addr=address, consume_from_where=FIRST, hooks=[calls]
        )
        await consumer.subscribe(topic, listener=listen)
        async with consumer:
            await asyncio.to_thread(calls.wait, 4)
        async with aio.PullConsumer(
            "pull", namesrv_addr=address, consume_from_where=FIRST, hooks=[polls]
        ) as puller:
            await puller.subscribe(topic)
            count = 0
            async for _ in puller:
                count += 1
                if count == 4:
                    break

    asyncio.run(asyncio.wait_for(main(), 50))
    assert sum(len(one.messages) for one in sends.sent) == 4
    bodies = {b"%d" % number for number in range(4)}
    check(calls, bodies, "push")
    assert polls.ended == polls.begun
    assert {one.body for batch in polls.ended for one in batch.messages} == bodies


class Agrees(TransactionListener):
    def execute_local_transaction(self, message: StoredMessage, arg: object):
        return LocalTransactionState.COMMIT

    def check_local_transaction(self, message: StoredMessage):
        return LocalTransactionState.UNKNOWN


def test_half_messages_are_sends_too(cluster):
    sends, address = Trace(), cluster.namesrv_addr
    with TransactionProducer("p", Agrees(), namesrv_addr=address, hooks=[sends]) as producer:
        producer.send_message_in_transaction(Message("transactions", b"x"))
    (batch,) = sends.sent
    assert batch.is_half
    with PullConsumer("pull", namesrv_addr=address, consume_from_where=FIRST) as puller:
        puller.subscribe("transactions")
        found: list[StoredMessage] = []
        while not found:
            found = puller.poll(1_000)
    assert (found[0].property("trace"), found[0].message_id) == ("p", batch.message_ids[0])
