"""What programs leave behind that end without closing anything, or are asked to end."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from mqmesh.message import Message
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster

PATIENCE_S = 40
_numbers = itertools.count()

HEAD = """
import concurrent.futures, logging, multiprocessing, os, sys, threading
import mqmesh
logging.basicConfig(level=logging.WARNING)
namesrv, topic = sys.argv[1:3]

def message(n=0):
    return mqmesh.Message(topic, b"%d" % n)

def make(**options):
    return mqmesh.Producer("p", namesrv_addr=namesrv, **options)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def topic(cluster) -> str:
    name = f"ends.{next(_numbers)}"
    with AdminClient(cluster.namesrv_addr) as admin:
        admin.create_topic(name)
    return name


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    programs = []

    def start(source: str, cluster: ProcessCluster, topic: str) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            [sys.executable, "-c", HEAD + source, cluster.namesrv_addr, topic],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        programs.append(program)
        return program

    yield start
    for program in programs:
        program.kill()
        program.communicate()


def stored(cluster: ProcessCluster, topic: str) -> int:
    with AdminClient(cluster.namesrv_addr) as admin:
        queues = [q for one in admin.topic_stats(topic).values() for q in one.queues]
    return sum(queue.max_queue_offset for queue in queues)


NEVER_CLOSED = {
    "the end of the script": """
producer = make(); producer.start()
for n in range(5000):
    producer.send_async(message(n))
""",
    "an exception": """
producer = make(); producer.start()
for n in range(5000):
    producer.send_async(message(n))
raise SystemExit(0)
""",
    "nobody holds the producer": """
def send():
    producer = make(); producer.start()
    for n in range(5000):
        producer.send_async(message(n))
send()
""",
    "threads go on after the script": """
producer = make(); producer.start()
def send(count):
    for n in range(count):
        producer.send_async(message(n))
def send_later():
    threading.main_thread().join()
    send(2500)
threading.Thread(target=send_later).start()
pool = concurrent.futures.ThreadPoolExecutor(2)
for _ in range(50):
    pool.submit(send, 50)
""",
    "transactions": """
class Listener(mqmesh.TransactionListener):
    def execute_local_transaction(self, message, arg): return mqmesh.LocalTransactionState.COMMIT
    def check_local_transaction(self, message): return mqmesh.LocalTransactionState.COMMIT
producer = mqmesh.TransactionProducer("t", Listener(), namesrv_addr=namesrv); producer.start()
for n in range(5000):
    producer.send_async(message(n))
""",
    "children of multiprocessing": """
def send(count):
    producer = make(); producer.start()
    for n in range(count):
        producer.send_async(message(n))
fork = multiprocessing.get_context("fork")
children = [fork.Process(target=send, args=(2500,)) for _ in range(2)]
for child in children: child.start()
for child in children: child.join()
""",
    "a child of a parent that had one open": """
outer = make(); outer.start()
for n in range(1000):
    outer.send_async(message(n))
def send():
    producer = make(); producer.start()
    for n in range(4000):
        producer.send_async(message(n))
child = multiprocessing.get_context("fork").Process(target=send)
child.start(); child.join()
""",
    "a producer made before its forks": """
producer = make()
for _ in range(2):
    if os.fork() == 0:
        producer.start()
        for n in range(1500):
            producer.send_async(message(n))
        sys.exit()
producer.start()
for n in range(2000):
    producer.send_async(message(n))
for _ in range(2): os.wait()
""",
    "a pool whose workers inherit a producer": """
producer = make()
def send(n):
    producer.start()
    return producer.send(message(n)).message_id
with multiprocessing.get_context("fork").Pool(3) as pool:
    ids = pool.map(send, range(600), chunksize=10)
assert len(set(ids)) == 600
producer.start()
for n in range(4400):
    producer.send_async(message(n))
""",
}


@pytest.mark.parametrize("source", NEVER_CLOSED.values(), ids=NEVER_CLOSED)
def test_a_producer_that_nobody_closes_sends_what_it_has(start, cluster, topic, source):
    program = start(source, cluster, topic)
    out, err = program.communicate(timeout=PATIENCE_S)
    assert (program.returncode, out, err) == (0, "", "")
    assert stored(cluster, topic) == 5_000


def test_what_cannot_be_sent_at_the_end_is_told(start, tmp_path_factory):
    with ProcessCluster(tmp_path_factory.mktemp("down")) as cluster:
        with AdminClient(cluster.namesrv_addr) as admin:
            admin.create_topic("orders")
        program = start(
            """
producer = make(close_timeout_ms=200, send_msg_timeout_ms=60_000); producer.start()
producer.send(message())
print("ready", flush=True)
sys.stdin.readline()
for n in range(7):
    producer.send_async(message(n))
""",
            cluster,
            "orders",
        )
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        cluster.brokers["broker-a"].kill()
        _, err = program.communicate("go\n", timeout=PATIENCE_S)
    assert program.returncode == 0, err
    assert "producer group p: messages that may not be stored: 7 to orders" in err


RUN = {
    "the consumer": """
consumer = mqmesh.PushConsumer("{group}", namesrv_addr=namesrv, **first)
consumer.subscribe(topic, listener=listen)
consumer.run()
""",
    "several clients": """
consumer = mqmesh.PushConsumer("{group}", namesrv_addr=namesrv, **first)
consumer.subscribe(topic, listener=listen)
mqmesh.run(make(), consumer)
""",
    "in order": """
consumer = mqmesh.PushConsumer("{group}", namesrv_addr=namesrv, consume_orderly=True, **first)
consumer.subscribe(topic, listener=listen)
consumer.run()
""",
    "asyncio": """
import asyncio, mqmesh.aio
async def listen_async(messages): listen(messages)
async def main():
    consumer = mqmesh.aio.PushConsumer("{group}", namesrv_addr=namesrv, **first)
    await consumer.subscribe(topic, listener=listen_async)
    await consumer.run()
asyncio.run(main())
""",
}
LISTENER = """
first = dict(consume_from_where=mqmesh.ConsumeFromWhere.FIRST_OFFSET)
lock, count = threading.Lock(), 0
def listen(messages):
    global count
    with lock:
        count += len(messages)
        if count == 500:
            print("consumed", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("source", RUN.values(), ids=RUN)
def test_a_consumer_that_is_asked_to_end_commits_and_leaves(start, cluster, topic, source, number):
    group = f"{topic}-group"
    with Producer("load", namesrv_addr=cluster.namesrv_addr) as producer:
        producer.send_batch([Message(topic, b"%d" % n) for n in range(500)])
    program = start(LISTENER + source.replace("{group}", group), cluster, topic)
    assert program.stdout is not None
    assert program.stdout.readline() == "consumed\n"
    program.send_signal(number)
    out, err = program.communicate(timeout=PATIENCE_S)
    assert (program.returncode, out, err) == (0, "", "")  # and no warning
    with GroupAdmin(cluster.namesrv_addr) as admin:
        assert admin.progress(group).lag == 0
        assert admin.connections(group) == []


def test_running_ends_when_somebody_else_closes(start, cluster, topic):
    source = """
consumer = mqmesh.PushConsumer("{group}", namesrv_addr=namesrv)
consumer.subscribe(topic, listener=print)
closer = threading.Timer(0.1, consumer.close); closer.start()
consumer.run()
print("over")
"""
    program = start(source.replace("{group}", f"{topic}-group"), cluster, topic)
    assert program.communicate(timeout=PATIENCE_S) == ("over\n", "")


def test_members_that_close_one_after_the_other_warn_of_nothing(start, cluster, topic):
    source = """
with make() as producer:
    for n in range(1000):
        producer.send_async(message(n))
group = topic + "-members"
for orderly in (False, True):
    members = [
        mqmesh.PushConsumer(f"{group}-{orderly}", namesrv_addr=namesrv, consume_orderly=orderly,
                            consume_from_where=mqmesh.ConsumeFromWhere.FIRST_OFFSET)
        for _ in range(3)
    ]
    done = threading.Semaphore(0)
    for member in members:
        member.subscribe(topic, listener=lambda messages: done.release())
        member.start()
    for _ in range(1000):
        done.acquire()
    for member in members:
        member.close()
with mqmesh.PullConsumer(group, namesrv_addr=namesrv) as consumer:
    consumer.subscribe(topic)
    consumer.poll(10)
"""
    program = start(source, cluster, topic)
    out, err = program.communicate(timeout=PATIENCE_S)
    assert (program.returncode, out, err) == (0, "", "")
