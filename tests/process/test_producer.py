"""The producer against real brokers that are killed, hang and come back."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from harness.patience import until
from harness.stopwatch import Stopwatch

from mqmesh.batch.record_batch import decode_messages, read_header
from mqmesh.errors import MQMeshError, NoRoute, TransportError
from mqmesh.message import Message, MessageQueue, StoredMessage
from mqmesh.protocol.command import decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.pulling import PullRequest, PullResponse, PullStatus
from mqmesh.protocol.route import TopicConfig
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.producer.send_result import SendFuture
from mqmesh.testing.processes import ProcessCluster
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.channel import BlockingChannel

TOPIC = "orders"
QUEUES = 4


def read_queue(channel: BlockingChannel, broker_name: str, queue_id: int) -> list[StoredMessage]:
    """Everything a broker has in a queue, asked for without any consumer."""
    found: list[StoredMessage] = []
    offset = 0
    while True:
        request = PullRequest("reader", TOPIC, queue_id, offset)
        answer = channel.request(
            RequestCode.PULL_MESSAGE, header=encode_header(request), timeout_ms=5_000
        )
        response = decode_header(PullResponse, answer.header)
        if response.status != PullStatus.FOUND:
            return found
        position = 0
        while position < len(answer.body):
            header = read_header(answer.body, position)
            found += decode_messages(
                answer.body, header, position=position, broker_name=broker_name
            )
            position += header.total_size
        offset = response.next_queue_offset


def read_all(cluster: ProcessCluster) -> list[StoredMessage]:
    context = sockets.new_context()
    try:
        found = []
        for name, process in cluster.brokers.items():
            channel = BlockingChannel(context, f"tcp://{process.endpoint}")
            for queue_id in range(QUEUES):
                found += read_queue(channel, name, queue_id)
            channel.close()
        return found
    finally:
        context.destroy(linger=0)


def message(body: str, **fields) -> Message:
    return Message(TOPIC, body.encode(), **fields)


@pytest.fixture
def cluster(short_tmp_path) -> Iterator[ProcessCluster]:
    with ProcessCluster(short_tmp_path) as cluster:
        yield cluster


@pytest.fixture
def pair(short_tmp_path) -> Iterator[ProcessCluster]:
    with ProcessCluster(short_tmp_path, namesrvs=2, brokers=("broker-a", "broker-b")) as cluster:
        with AdminClient(cluster.namesrv_addr) as admin:
            until(lambda: len(admin.cluster().brokers) == 2)
            admin.put_topic(TopicConfig(TOPIC, QUEUES, QUEUES))
        yield cluster


def check(cluster: ProcessCluster, sends: list[tuple[SendFuture | None, str]]) -> None:
    """What was acknowledged is there, once; what is there was sent; order holds."""
    stored = read_all(cluster)
    twins = Counter((one.broker_name, one.message_id) for one in stored)
    assert max(twins.values(), default=1) == 1, "stored twice"
    places = {(one.message_queue, one.queue_offset): one for one in stored}
    for future, body in sends:
        if future is not None and future.exception() is None:
            result = future.result()
            one = places[result.message_queue, result.queue_offset]
            assert (one.body.decode(), one.message_id) == (body, result.message_id)
    assert {one.body.decode() for one in stored} <= {body for _, body in sends} | {"0"}
    by_queue: dict[MessageQueue, list[int]] = {}
    for one in stored:
        if one.sharding_key is not None:
            by_queue.setdefault(one.message_queue, []).append(int(one.body))
    for numbers in by_queue.values():
        assert numbers == sorted(numbers)


@pytest.mark.timeout(180)
def test_a_broker_that_is_killed_under_load_loses_nothing_and_stores_nothing_twice(cluster):
    """Rounds of kill -9 at odd moments, under a stream of asynchronous and synchronous sends.

    How many of them fail depends on how long the broker takes to come back; that the producer goes
    on by itself when it is back does not.
    """
    sends: list[tuple[SendFuture | None, str]] = []
    stop = threading.Event()
    sync_results: list[str] = []
    with Producer("g", namesrv_addr=cluster.namesrv_addr) as producer:
        producer.send(message("0"))

        def stream() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                one = message(str(number), sharding_key=str(number % 7))
                try:
                    sends.append((producer.send_async(one), str(number)))
                except TransportError:
                    number -= 1
                if number % 200 == 0:
                    stop.wait(0.005)

        def ask() -> None:
            number = 10**9
            while not stop.is_set():
                number += 1
                try:
                    result = producer.send(message(str(number)))
                except MQMeshError:
                    continue
                finally:
                    sync_results.append(str(number))
                assert result.status is SendStatus.SEND_OK

        def goes_on() -> bool:
            before = len(sends)
            until(lambda: len(sends) > before)
            newest = sends[-1][0]
            until(newest.done)
            return newest.exception() is None

        threads = [threading.Thread(target=one) for one in (stream, ask, ask)]
        for thread in threads:
            thread.start()
        try:
            # Without a wait the broker is killed before its clients are connected again.
            for wait_s in (0.31, 0.53, 0.0, 0.71):
                if wait_s:
                    until(goes_on)
                    stop.wait(wait_s)
                cluster.brokers["broker-a"].kill()
                stop.wait(0.2)
                cluster.start_broker()
            until(goes_on)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        until(lambda: all(future.done() for future, _ in sends))
        assert producer._buffer.pending_bytes == 0
        sends += [(None, body) for body in sync_results]
        check(cluster, sends)


@pytest.mark.timeout(120)
def test_another_broker_takes_over_while_one_hangs(pair):
    with Producer("g", namesrv_addr=pair.namesrv_addr) as producer:
        for number in range(16):
            producer.send(message(str(number)))
        hanging = pair.brokers["broker-a"]
        hanging.suspend()
        try:
            watch = Stopwatch()
            results = [producer.send(message(str(n))) for n in range(100, 116)]
            assert {one.message_queue.broker_name for one in results} == {"broker-b"}
            assert watch.seconds < 4.0, "heartbeats tell within two seconds"
        finally:
            hanging.resume()
        until(lambda: producer.send(message("300")).message_queue.broker_name == "broker-a")


@pytest.mark.timeout(120)
def test_sends_wait_for_a_broker_that_is_restarted(cluster):
    with Producer("g", namesrv_addr=cluster.namesrv_addr, send_msg_timeout_ms=15_000) as producer:
        producer.send(message("0"))
        cluster.brokers["broker-a"].kill()
        future = producer.send_async(message("1"))
        done = []
        thread = threading.Thread(target=lambda: done.append(producer.send(message("2"))))
        thread.start()
        cluster.start_broker()
        assert future.result().status is SendStatus.SEND_OK
        thread.join(15)
        assert done[0].status is SendStatus.SEND_OK
        # The short way is open again.
        until(lambda: producer._engine.brokers.live_endpoint("broker-a") is not None)
        assert producer.send(message("3")).status is SendStatus.SEND_OK


@pytest.mark.timeout(120)
def test_name_servers_may_die_one_after_the_other(pair):
    with Producer("g", namesrv_addr=pair.namesrv_addr) as producer:
        producer.send(message("1"))
        pair.namesrvs[0].kill()
        with Producer("g", namesrv_addr=pair.namesrv_addr) as late:
            assert late.send(message("2")).status is SendStatus.SEND_OK
        pair.namesrvs[1].kill()
        assert producer.send(message("3")).status is SendStatus.SEND_OK
        with (
            Producer("g", namesrv_addr=pair.namesrv_addr) as late,
            pytest.raises(NoRoute),
        ):
            late.send(message("4"), timeout_ms=1_500)
        with Producer("g", namesrv_addr=pair.namesrv_addr) as waiting:
            done = []
            thread = threading.Thread(
                target=lambda: done.append(waiting.send(message("5"), timeout_ms=20_000))
            )
            thread.start()
            pair.restart_namesrv(0)
            thread.join(20)
            assert done[0].status is SendStatus.SEND_OK


FORGETFUL = """
import os, sys
from mqmesh import Message, Producer
producer = Producer("g", namesrv_addr=sys.argv[1])
producer.start()
print("ready", flush=True)
print(producer.send(Message("orders", b"1")).status.name)
child = os.fork()
if child == 0:
    try:
        producer.send_async(Message("orders", b"2"))
    except Exception as error:
        print(type(error).__name__, flush=True)
    producer.close()
    other = Producer("g", namesrv_addr=sys.argv[1])
    with other:
        print(other.send(Message("orders", b"3")).status.name, flush=True)
    sys.exit(0)
os.waitpid(child, 0)
print(producer.send(Message("orders", b"4")).status.name, flush=True)
future = producer.send_async(Message("orders", b"5"))
sys.exit(7)  # without closing anything
"""


@pytest.mark.timeout(60)
def test_a_forked_child_needs_a_producer_of_its_own_and_nobody_must_close(cluster):
    found = subprocess.run(
        [sys.executable, "-c", FORGETFUL, cluster.namesrv_addr],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert found.stdout.split() == ["ready", "SEND_OK", "ClientClosed", "SEND_OK", "SEND_OK"], (
        found.stderr
    )
    assert found.returncode == 7


INTERRUPTED = """
import signal, sys, threading, time
from mqmesh import Message, MessageQueue, Producer
queue = MessageQueue("orders", "broker-a", 0)
with Producer("g", namesrv_addr=sys.argv[1], send_msg_timeout_ms=30_000) as producer:
    for _ in range(3):
        producer.send(Message("orders", b"1"), queue=queue)
    print("ready", flush=True)
    sys.stdin.readline()  # the broker hangs by now
    threading.Timer(0.3, lambda: signal.raise_signal(signal.SIGINT)).start()
    try:
        producer.send(Message("orders", b"2"), queue=queue)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    sys.stdin.readline()  # it goes on
    print(producer.send(Message("orders", b"3"), queue=queue).status.name, flush=True)
"""


@pytest.mark.timeout(60)
def test_ctrl_c_in_a_send_leaves_the_producer_usable(cluster):
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, cluster.namesrv_addr],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            assert process.stdout.readline() == "ready\n"
            cluster.brokers["broker-a"].suspend()
            print(file=process.stdin, flush=True)
            assert process.stdout.readline() == "interrupted\n"
            cluster.brokers["broker-a"].resume()
            print(file=process.stdin, flush=True)
            assert process.stdout.readline() == "SEND_OK\n"
            assert process.wait(10) == 0
        finally:
            process.kill()
