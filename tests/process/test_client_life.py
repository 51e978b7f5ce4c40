"""Clients open nothing before they start, start again after close, and belong to one event loop."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from harness.patience import until

from mqmesh import App, aio
from mqmesh.errors import ClientClosed, InvalidArgument, TopicNotFound
from mqmesh.message import Message, MessageQueue
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.transactions.transaction_producer import TransactionProducer
from mqmesh.sdk.transactions.transactions import LocalTransactionState, TransactionListener
from mqmesh.testing.thread_cluster import BROKER, ThreadCluster
from mqmesh.transport.zmq.transport import ZmqTransport

FIRST = {"consume_from_where": "FIRST_OFFSET"}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[ThreadCluster]:
    with ThreadCluster(tmp_path_factory.mktemp("c")) as cluster:
        yield cluster


@pytest.fixture
def name() -> str:
    return f"life-{next(_numbers)}"


class Commits(TransactionListener):
    def execute_local_transaction(self, message, arg):
        return LocalTransactionState.COMMIT

    def check_local_transaction(self, message):
        return LocalTransactionState.COMMIT


class CommitsLater(aio.TransactionListener):
    async def execute_local_transaction(self, message, arg):
        return LocalTransactionState.COMMIT

    async def check_local_transaction(self, message):
        return LocalTransactionState.COMMIT


def send(cluster, topic, *bodies):
    with Producer("before", namesrv_addr=cluster.namesrv_addr) as producer:
        for body in bodies:
            producer.send(Message(topic, body))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "make",
    [
        Producer,
        lambda group: TransactionProducer(group, Commits()),
        PullConsumer,
        PushConsumer,
        lambda group: PushConsumer(group, consume_orderly=True),
        App,
        aio.Producer,
        lambda group: aio.TransactionProducer(group, CommitsLater()),
        aio.PullConsumer,
        aio.PushConsumer,
        aio.App,
        lambda group: AdminClient("127.0.0.1:1"),
    ],
)
def test_a_client_opens_nothing_before_it_starts(make):
    before = descriptors()
    made = [make("g") for _ in range(5)]
    assert descriptors() == before
    del made


def test_a_client_without_descriptors_says_so_and_the_process_lives_on():
    # Each child has so many descriptors left; where libzmq aborts, its status is no 0.
    program = """
import os, resource
from mqmesh import Producer, PullConsumer, PushConsumer
from mqmesh.errors import TooManyOpenFiles

def child(make, left):
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        for descriptor in taken[:left]:
            os.close(descriptor)
    options = {} if make is Producer else {"start_timeout_ms": 1}
    client = make("g", namesrv_addr="127.0.0.1:1", **options)
    try:
        client.start()
    except TooManyOpenFiles as error:
        assert "no file descriptor left; a process may have 100 (ulimit -n" in str(error), error
        client.close()
        for descriptor in taken[left:]:
            os.close(descriptor)
    else:
        assert left >= 20, left
    client.start()  # a further call, or once more
    client.close()

children = {}
for make in (Producer, PullConsumer, PushConsumer):
    for left in (0, 2, 4, 6, 9, 12, 19, 20):
        pid = os.fork()
        if not pid:
            try:
                child(make, left)
            except BaseException as error:
                os.write(2, f"{make.__name__} with {left}: {error!r}\\n".encode())
                os._exit(1)
            os._exit(0)
        children[pid] = f"{make.__name__} with {left}"
bad = [child for pid, child in children.items() if os.waitpid(pid, 0)[1]]
raise SystemExit(", ".join(bad) or 0)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=50)
    assert ended.returncode == 0, ended.stderr.decode()


def test_a_producer_may_be_started_again_and_says_so_when_it_was_given_a_transport(cluster, name):
    producer = Producer("p", namesrv_addr=cluster.namesrv_addr)
    for _ in range(3):
        with producer:
            producer.start()
            assert producer.send(Message(name, b"x")).message_id
            assert producer.send_async(Message(name, b"x")).result(10).message_id
        with pytest.raises(ClientClosed):
            producer.send(Message(name, b"x"))
        assert producer.closed
    given = Producer("p", namesrv_addr=cluster.namesrv_addr, transport=ZmqTransport())
    with given:
        given.send(Message(name, b"x"))
    with pytest.raises(ClientClosed, match="transport that it was given; make a new one"):
        given.start()


def is_started(producer: Producer) -> bool:
    """Start a producer, unless it is still being closed."""
    try:
        producer.start()
    except ClientClosed:
        return False
    return True


def test_a_producer_that_is_closed_in_a_callback_may_be_started_again(cluster, name):
    closed, refused = threading.Event(), []
    producer = Producer("p", namesrv_addr=cluster.namesrv_addr)

    def close(_sent):
        producer.close()
        try:
            producer.start()
        except ClientClosed as error:
            refused.append(str(error))
        closed.set()

    with producer:
        producer.send_async(Message(name, b"x"), close)
        assert closed.wait(20)
    assert refused == ["the producer is still being closed; start it again later"]
    until(lambda: is_started(producer))
    with producer:
        producer.send(Message(name, b"x"))


def test_transactions_go_on_after_a_second_start(cluster, name):
    producer = TransactionProducer("p", Commits(), namesrv_addr=cluster.namesrv_addr)
    for number in range(2):
        with producer:
            sent = producer.send_message_in_transaction(Message(name, b"%d" % number))
            assert sent.local_transaction_state is LocalTransactionState.COMMIT
            with producer.transaction(Message(name, b"block")):
                pass


def test_a_pull_consumer_that_is_started_again_has_its_topics_and_goes_on(cluster, name):
    consumer = PullConsumer(name, namesrv_addr=cluster.namesrv_addr, **FIRST)
    consumer.subscribe(name)
    for body in (b"1", b"2"):
        send(cluster, name, body)
        with consumer:
            assert [message.body for message in consumer.poll(20_000)] == [body]
        with pytest.raises(ClientClosed):
            consumer.poll(0)
    with consumer:
        with pytest.raises(InvalidArgument, match="subscribed already"):
            consumer.subscribe(name)
        consumer.unsubscribe(name)
        consumer.subscribe(name)


def test_assigned_queues_are_read_again_after_a_second_start(cluster, name):
    send(cluster, name, b"1")
    consumer = PullConsumer(name, namesrv_addr=cluster.namesrv_addr, **FIRST)
    consumer.assign([MessageQueue(name, BROKER, number) for number in range(4)])
    for wanted in ([b"1"], []):
        with consumer:
            assert [message.body for message in consumer.poll(20_000 * len(wanted))] == wanted


@pytest.mark.parametrize(
    "options", [{}, {"consume_orderly": True}, {"message_model": "BROADCASTING"}], ids=str
)
def test_a_push_consumer_that_is_started_again_has_its_listeners_and_goes_on(
    cluster, name, options, tmp_path
):
    got = []
    consumer = PushConsumer(
        name, namesrv_addr=cluster.namesrv_addr, offsets_dir=str(tmp_path), **FIRST, **options
    )
    consumer.subscribe(name, listener=lambda messages: got.extend(one.body for one in messages))
    for count in (1, 2):
        send(cluster, name, b"%d" % count)
        with consumer:
            until(lambda: len(got) >= count)  # noqa: B023
        assert consumer.closed
    assert got == [b"1", b"2"]


def test_an_application_may_be_started_again(cluster, name):
    got = []
    app = App(name, namesrv_addr=cluster.namesrv_addr)
    orders = app.publisher(name, int)

    @app.subscriber(name, group=name, **FIRST)
    def handle(order: int) -> None:
        got.append(order)

    for number in (1, 2):
        with app:
            app.start()  # does nothing
            orders.send(number)
            until(lambda: number in got)  # noqa: B023
        assert app.closed
    assert got == [1, 2]


def test_asyncio_clients_may_be_started_again_each_time_in_another_event_loop(cluster, name):
    where = {"namesrv_addr": cluster.namesrv_addr}
    producer = aio.Producer("p", **where)
    transactions = aio.TransactionProducer("tp", CommitsLater(), **where)
    puller = aio.PullConsumer(f"{name}-pull", **where, **FIRST)
    pusher = aio.PushConsumer(f"{name}-push", **where, **FIRST)
    app = aio.App(f"{name}-app", **where)
    got, handled = [], []

    async def listen(messages):
        got.extend(one.body for one in messages)

    @app.subscriber(name, group=f"{name}-app", **FIRST)
    async def handle(order: bytes) -> None:
        handled.append(order)

    async def prepare():
        await puller.subscribe(name)
        await pusher.subscribe(name, listener=listen)

    async def run(body):
        async with producer, transactions, puller, pusher, app:
            await producer.start()
            await producer.send(Message(name, body))
            await transactions.send_message_in_transaction(Message(name + "-t", body))
            assert [one.body for one in await puller.poll(20_000)] == [body]
            await asyncio.to_thread(until, lambda: body in got and body in handled)

    asyncio.run(prepare())
    for body in (b"1", b"2", b"3"):
        asyncio.run(run(body))
    assert got == handled == [b"1", b"2", b"3"]


def test_an_asyncio_client_says_so_in_another_event_loop_and_may_be_closed_there(cluster, name):
    where = {"namesrv_addr": cluster.namesrv_addr}
    producer = aio.Producer("p", **where)
    puller, pusher = aio.PullConsumer(name, **where), aio.PushConsumer(name + "-push", **where)

    async def listen(messages):
        pass

    async def begin():
        await producer.start()
        await puller.start()
        await puller.subscribe(name)
        await puller.poll(0)
        await pusher.start()

    async def again():
        for call in (
            producer.start,
            lambda: producer.send(Message(name, b"x")),
            puller.start,
            puller.poll,
            puller.commit,
            puller.__anext__,
            lambda: puller.subscribe("other"),
            pusher.start,
            lambda: pusher.subscribe(name, listener=listen),
        ):
            with pytest.raises(InvalidArgument, match="only in the event loop it was started in"):
                await call()

    async def close():
        for client in (producer, puller, pusher):
            await client.close()

    asyncio.run(begin())
    asyncio.run(again())
    asyncio.run(close())


def test_the_log_says_that_a_listeners_event_loop_is_closed(cluster, name, caplog):
    pusher = aio.PushConsumer(name, namesrv_addr=cluster.namesrv_addr, **FIRST)

    async def listen(messages):
        pass

    async def begin():
        await pusher.subscribe(name, listener=listen)
        await pusher.start()

    asyncio.run(begin())
    send(cluster, name, b"1", b"2")
    until(lambda: "the event loop that the consumer was started in is closed" in caplog.text)
    asyncio.run(pusher.close())


@pytest.mark.parametrize("make", [PullConsumer, PushConsumer])
def test_a_consumer_says_that_its_topic_is_missing_and_gets_it_when_it_is_made(
    cluster, name, make, caplog
):
    got = []
    consumer = make(name, namesrv_addr=cluster.namesrv_addr)
    if make is PushConsumer:
        consumer.subscribe(name, listener=lambda messages: got.extend(messages))
    else:
        consumer.subscribe(name)
    with consumer:
        (line,) = [text for text in caplog.messages if "missing" in text]
        assert line.startswith(f"group {name}: topic {name} is missing: it does not exist, or this")
        send(cluster, name, b"1")
        until(lambda: got or (make is PullConsumer and consumer.poll(20_000)))


@pytest.mark.parametrize("make", [PullConsumer, PushConsumer])
def test_a_topic_that_must_exist_is_waited_for_and_then_an_error(cluster, name, make):
    options = {"topic_must_exist": True, "namesrv_addr": cluster.namesrv_addr}
    listener = {"listener": print} if make is PushConsumer else {}
    consumer = make(name, topic_wait_ms=50, **options)
    consumer.subscribe(name, **listener)
    with pytest.raises(TopicNotFound, match="it does not exist, or this client may not see it"):
        consumer.start()
    patient = make(name, topic_wait_ms=600_000, **options)
    patient.subscribe(name, **listener)
    starting = threading.Thread(target=patient.start)
    starting.start()
    send(cluster, name, b"1")
    starting.join(40)
    assert not starting.is_alive()
    assert patient.assignment()
    patient.close()


def test_a_poll_says_that_a_topic_that_must_exist_is_missing(cluster, name):
    options = {"topic_must_exist": True, "namesrv_addr": cluster.namesrv_addr}
    with PullConsumer(name, **options) as consumer:
        consumer.subscribe(name)
        with pytest.raises(TopicNotFound):
            consumer.poll(20_000)
        send(cluster, name, b"1")
        until(lambda: [one.body for one in consumer.poll(20_000)] == [b"1"])
