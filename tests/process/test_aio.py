"""What mqmesh.aio has of everything else: order, filters, transactions, administration."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import pkgutil
import time
import typing
from collections.abc import Iterator

import pytest

import mqmesh
import mqmesh.sdk
from mqmesh import aio
from mqmesh.errors import InvalidArgument, MQMeshError, TopicNotFound
from mqmesh.message import Message, StoredMessage
from mqmesh.protocol.groups import ResetWhere
from mqmesh.protocol.route import TopicConfig
from mqmesh.sdk.admin.admin import AdminClient as BlockingAdminClient
from mqmesh.sdk.connector.patient_client import PatientClient
from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.transactions.transactions import LocalTransactionState
from mqmesh.testing.processes import ProcessCluster

PATIENCE_S = 20
_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[ProcessCluster]:
    settings = {"transaction_timeout_ms": "200", "transaction_check_interval_ms": "200"}
    folder = tmp_path_factory.mktemp("cluster")
    with ProcessCluster(folder, broker_settings=settings) as cluster:
        cluster.start_schedule()
        yield cluster


@pytest.fixture
def topic() -> str:
    return f"topic-{next(_numbers)}"


def run(main) -> None:
    asyncio.run(asyncio.wait_for(main, 50))


def push_consumer(cluster, group, **options) -> aio.PushConsumer:
    return aio.PushConsumer(
        group, namesrv_addr=cluster.namesrv_addr, consume_from_where="FIRST_OFFSET", **options
    )


async def bodies_of(cluster, topic, group, count) -> list[bytes]:
    """The first messages that a new group gets, waiting for them."""
    found: list[bytes] = []
    async with aio.PullConsumer(
        group, namesrv_addr=cluster.namesrv_addr, consume_from_where="FIRST_OFFSET"
    ) as consumer:
        await consumer.subscribe(topic)
        while len(found) < count:
            found += [message.body for message in await consumer.poll(timeout_ms=1_000)]
    return found


def test_coroutine_listeners_keep_the_order_of_each_key(cluster, topic):
    async def main() -> None:
        got: dict[str, list[int]] = {}
        failed = False
        done = asyncio.Event()

        async def listen(messages: list[StoredMessage]) -> ConsumeResult:
            nonlocal failed
            await asyncio.sleep(0)
            if not failed:
                failed = True
                return ConsumeResult.RECONSUME_LATER
            for message in messages:
                got.setdefault(message.sharding_key or "", []).append(int(message.body))
            if sum(map(len, got.values())) == 200:
                done.set()
            return ConsumeResult.SUCCESS

        async with aio.Producer("p", namesrv_addr=cluster.namesrv_addr) as producer:
            await asyncio.gather(
                *(
                    producer.send(Message(topic, b"%d" % n, sharding_key=f"k{n % 8}"))
                    for n in range(200)
                )
            )
        options = {"consume_orderly": True, "suspend_current_queue_time_ms": 50}
        consumer = push_consumer(cluster, f"{topic}-g", **options)
        await consumer.subscribe(topic, listener=listen)
        async with consumer:
            await asyncio.wait_for(done.wait(), PATIENCE_S)
        assert {key: sorted(numbers) for key, numbers in got.items()} == got

    run(main())


def test_sql_and_tags_choose_what_coroutines_get(cluster, topic):
    async def main() -> None:
        got: list[bytes] = []
        arrived = asyncio.Semaphore(0)

        async def listen(messages: list[StoredMessage]) -> ConsumeResult:
            got.extend(message.body for message in messages)
            arrived.release()
            return ConsumeResult.SUCCESS

        async with aio.Producer("p", namesrv_addr=cluster.namesrv_addr) as producer:
            for n in range(10):
                await producer.send(Message(topic, b"%d" % n, tag="T", properties={"n": str(n)}))
        consumer = push_consumer(cluster, f"{topic}-g")
        sql = MessageSelector.by_sql("n > 6 AND TAGS = 'T'")
        await consumer.subscribe(topic, sql, listener=listen)
        async with consumer:
            for _ in range(3):
                await asyncio.wait_for(arrived.acquire(), PATIENCE_S)
        assert sorted(got) == [b"7", b"8", b"9"]
        with pytest.raises(InvalidArgument):
            await consumer.subscribe(topic, MessageSelector.by_sql("n >"), listener=listen)

    run(main())


def test_coroutines_send_for_later_and_cancel(cluster, topic):
    async def main() -> None:
        address = cluster.namesrv_addr
        async with (
            aio.Producer("p", namesrv_addr=address) as producer,
            aio.DelayClient(address) as delays,
        ):
            due_ms = int(time.time() * 1_000) + 1_500
            sent = [
                await producer.send(Message(topic, body, deliver_at_ms=due_ms))
                for body in (b"stays", b"cancelled", b"cancelled by id")
            ]
            await producer.cancel_delayed(sent[1])
            await delays.cancel(sent[2].message_id)
            with pytest.raises(MQMeshError):
                await producer.cancel_delayed(sent[1])
            await producer.send(Message(topic, b"last", deliver_at_ms=due_ms + 300))
            got = await bodies_of(cluster, topic, f"{topic}-g", 2)
        assert got == [b"stays", b"last"]
        assert time.time() * 1_000 >= due_ms

    run(main())


class Bank(aio.TransactionListener):
    """Decides by the message's body; says UNKNOWN first to what is to be asked about."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    async def execute_local_transaction(self, message, arg) -> LocalTransactionState:
        await asyncio.sleep(0)
        if message.body == b"fail":
            raise RuntimeError("the bank is closed")
        return {
            b"good": LocalTransactionState.COMMIT,
            b"bad": LocalTransactionState.ROLLBACK,
        }.get(message.body, LocalTransactionState.UNKNOWN)

    async def check_local_transaction(self, message) -> LocalTransactionState:
        await asyncio.sleep(0)
        self.asked.append(message.body)
        return LocalTransactionState.COMMIT


def test_transactions_of_coroutines(cluster, topic):
    async def main() -> None:
        bank = Bank()
        address = cluster.namesrv_addr
        async with aio.TransactionProducer("tellers", bank, namesrv_addr=address) as producer:
            results = [
                await producer.send_message_in_transaction(Message(topic, body))
                for body in (b"good", b"bad", b"later", b"fail")
            ]
            assert [one.local_transaction_state.name for one in results] == [
                "COMMIT",
                "ROLLBACK",
                "UNKNOWN",
                "UNKNOWN",
            ]
            async with producer.transaction(Message(topic, b"block")) as tx:
                assert tx.message_id
            with pytest.raises(LookupError):
                async with producer.transaction(Message(topic, b"broken block")):
                    raise LookupError
            async with producer.transaction(Message(topic, b"by hand")) as tx:
                await tx.rollback()
                assert tx.is_ended
            await producer.send(Message(topic, b"plain"))
            got = await bodies_of(cluster, topic, f"{topic}-g", 5)
        assert sorted(got) == [b"block", b"fail", b"good", b"later", b"plain"]
        assert {b"later", b"fail"} <= set(bank.asked)

    run(main())


def test_a_listener_of_plain_functions_is_refused():
    class Plain:
        def execute_local_transaction(self, message, arg):
            raise AssertionError

        check_local_transaction = execute_local_transaction

    with pytest.raises(InvalidArgument, match="coroutine"):
        aio.TransactionProducer("g", Plain())


def test_administration_from_coroutines(cluster, topic):
    async def main() -> None:
        address = cluster.namesrv_addr
        async with (
            aio.GroupAdmin(address) as admin,
            aio.TrackClient(address, timeout_ms=10_000) as query,
            aio.DeadLetterClient(address) as dead_letters,
            aio.Producer("p", namesrv_addr=address) as producer,
        ):
            await admin.create_topic(TopicConfig(topic, 2, 2))
            assert topic in await admin.topics()
            with pytest.raises(TopicNotFound):
                await query.by_key("no-such-topic", "k")
            sent = [await producer.send(Message(topic, b"x", keys=["k"])) for _ in range(4)]
            group = f"{topic}-g"
            await bodies_of(cluster, topic, group, 4)
            progress, names = await asyncio.gather(admin.progress(group), admin.topics())
            assert (progress.lag, topic in names) == (0, True)
            moves = await admin.reset_offset(group, topic, ResetWhere.FIRST)
            assert moves.reread == 4
            found = (await query.by_id(sent[0].message_id)).messages
            assert [one.message_id for one in found] == [sent[0].message_id]
            assert await query.track(sent[0].message_id)
            assert await dead_letters.groups() == {}
            assert [letter async for letter in dead_letters.scan(group)] == []
        await admin.close()
        with pytest.raises((RuntimeError, MQMeshError)):
            await admin.topics()

    run(main())


ADMINS = [
    kind
    for kind in vars(aio).values()
    # A table's blocking client is none that administers.
    if isinstance(kind, type) and issubclass(kind, aio.AdminClient) and kind is not aio.KeyValue
]


def public(kind: type) -> set[str]:
    """Methods and properties."""
    return {
        name
        for name, value in inspect.getmembers(kind)
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }


@pytest.mark.parametrize("kind", ADMINS, ids=lambda kind: kind.__name__)
def test_every_method_of_an_admin_client_can_be_awaited_or_iterated(kind):
    assert public(kind._kind) - public(kind) == set()
    for name in public(kind):
        method = getattr(kind, name)
        returned = inspect.signature(getattr(kind._kind, name)).return_annotation
        is_iterated = typing.get_origin(returned) is Iterator
        is_right = inspect.isasyncgenfunction if is_iterated else inspect.iscoroutinefunction
        assert is_right(method), name


def test_every_admin_client_is_there():
    for info in pkgutil.walk_packages(mqmesh.sdk.__path__, "mqmesh.sdk."):
        importlib.import_module(info.name)
    blocking = {BlockingAdminClient}
    for _ in range(3):
        blocking |= {sub for one in blocking for sub in one.__subclasses__()}
    # Those of Spark's tasks, which nobody awaits, are left out.
    ours = {
        one
        for one in blocking
        if one.__module__.startswith("mqmesh.sdk.") and not issubclass(one, PatientClient)
    }
    assert ours == {kind._kind for kind in ADMINS}


def test_the_names_are_those_of_the_blocking_clients():
    blocking_only = {
        # A future where coroutines await, and what the blocking ones need among themselves.
        aio.Producer: {"send_async", "send_batch_async", "request_async", "reply_async"}
        | {"can_send", "take_answers_by"},
        aio.TransactionProducer: {"send_message_in_transaction_async", "end", "running"},
        aio.PullConsumer: {"acknowledge", "on_arrival"},
        aio.PushConsumer: set(),
    }
    common = blocking_only[aio.Producer]
    for kind, missing in blocking_only.items():
        blocking = getattr(mqmesh, kind.__name__)
        assert public(blocking) - public(kind) - common - missing == set(), kind
