"""Ordinary messages: bodies of differing sizes, a tag, a key and two properties each.

Run as ``python -m rows.orders TASK``. The parts of the messages are made before, as bodies are in
the other rows: the row measures mqmesh, not the making of strings.
"""

import asyncio
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from mqmesh import aio
from mqmesh.message import Message, StoredMessage
from mqmesh.protocol.messaging import SendStatus
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.client.options import ClientOptions
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.consumer.simple_consumer import SimpleConsumer
from mqmesh.sdk.producer.send_result import SendFuture
from rows.consumers import LISTENER_MESSAGES, consume
from rows.producers import (
    CHUNKS_UNCHECKED,
    FUTURES_A_CHUNK,
    bench_producer,
    missing,
    stored,
    stored_of,
)
from rows.workload import GROUP, TOPIC, Report, Stopwatch, Task, hand_in, read_task, wait_go

LEAST_BODY_BYTES: Final = 32
MOST_BODY_BYTES: Final = 224
MAX_HELD_MS: Final = 600_000
"""Length of leases that last over a whole run."""
BILLS: Final = "bench-bills"
SHORT_LEASE_MS: Final = 5_000
"""Length of leases that end in a run."""
POOL_ORDERS: Final = 1_000
"""After so many messages the same come again: few enough to be in the processor's cache, as what a
program has just made is."""

_TAGS: Final = ("created", "paid", "sent", "returned")
_CURRENCIES: Final = ("EUR", "USD", "JPY", "CHF")


_Order = tuple[bytes, str, tuple[str, ...], dict[str, str]]


def make_orders(count: int) -> list[_Order]:
    """Body, tag, keys and properties of messages, the same in every run.

    Args:
        count: How many, all different.
    """
    chance = random.Random(count)
    return [
        (
            chance.randbytes(chance.randint(LEAST_BODY_BYTES, MOST_BODY_BYTES)),
            chance.choice(_TAGS),
            (f"order-{number:010d}",),
            {"currency": chance.choice(_CURRENCIES), "customer": str(chance.randrange(10**6))},
        )
        for number in range(count)
    ]


def produce_orders(task: Task, ttl_ms: int | None = None) -> Report:
    """Explicit batches, a window of them without an outcome.

    Args:
        task: Says how many messages.
        ttl_ms: They live so long, in a topic that allows it; None for ever.
    """
    if ttl_ms is not None:
        with AdminClient(task.address) as admin:
            found = admin.topic_configs(TOPIC).items()
            admin.put_topic(
                {name: msgspec.structs.replace(one, message_ttl=True) for name, (one,) in found}
            )
    pool = make_orders(POOL_ORDERS)
    waiting: deque[SendFuture] = deque()
    acknowledged = 0
    with bench_producer(task) as producer:
        wait_go()
        watch = Stopwatch()
        for first in range(0, task.message_count, task.batch_messages):
            if len(waiting) >= task.window:
                acknowledged += stored(waiting.popleft())
            begin = first % (POOL_ORDERS - task.batch_messages + 1)
            messages = _messages(pool[begin : begin + task.batch_messages])
            waiting.append(producer.send_batch_async(messages, ttl_ms=ttl_ms))
        acknowledged += sum(map(stored, waiting))
        return watch.report(acknowledged, faults=missing(acknowledged, task.message_count))


def async_orders(task: Task) -> Report:
    """One ``send_async`` a message; every future is looked at."""
    pool = make_orders(POOL_ORDERS) * (FUTURES_A_CHUNK // POOL_ORDERS)
    chunks: deque[list[SendFuture]] = deque()
    acknowledged = 0
    with bench_producer(task) as producer:
        send = producer.send_async
        wait_go()
        watch = Stopwatch()
        for _ in range(task.message_count // FUTURES_A_CHUNK):
            chunks.append(
                [
                    send(Message(TOPIC, body, tag, keys, properties))
                    for body, tag, keys, properties in pool
                ]
            )
            if len(chunks) > CHUNKS_UNCHECKED:
                acknowledged += stored_of(chunks.popleft())
        acknowledged += sum(map(stored_of, chunks))
        return watch.report(acknowledged, faults=missing(acknowledged, task.message_count))


def aio_orders(task: Task) -> Report:
    """Sends from coroutines that are gathered, so many at a time."""
    return asyncio.run(_aio_orders(task))


async def _aio_orders(task: Task) -> Report:
    pool = make_orders(POOL_ORDERS)
    acknowledged = 0
    client = ClientOptions(use_ipc=task.use_ipc)
    async with aio.Producer("bench-producer", namesrv_addr=task.address, client=client) as producer:
        await producer.fetch_publish_queues(TOPIC)
        wait_go()
        watch = Stopwatch()
        for first in range(0, task.message_count, POOL_ORDERS):
            messages = _messages(pool[: task.message_count - first])
            results = await asyncio.gather(*[producer.send(one) for one in messages])
            acknowledged += sum(one.status is SendStatus.SEND_OK for one in results)
        return watch.report(acknowledged, faults=missing(acknowledged, task.message_count))


def drain_orders(task: Task) -> Report:
    """A push consumer that reads id, body, tag and a property of each message."""
    return consume(task, read=_read_orders)


def receive_orders(
    task: Task,
    *,
    most: int,
    members: int,
    held: int = 0,
    pause_s: float = 0.0,
    evenly: bool = False,
) -> Report:
    """Simple consumers that receive, read and acknowledge messages.

    Args:
        task: Says how many messages.
        most: Messages of one receive.
        members: Consumers, each in a thread.
        held: Messages of each queue that one more member holds all the time.
        pause_s: Work of a member on each message.
        evenly: It is a fault if a member gets more than twice as much as another one.
    """
    seen: set[str] = set()
    shares: Counter[str] = Counter()
    twice = 0
    lock, done = threading.Lock(), threading.Event()

    def work(consumer: SimpleConsumer) -> None:
        nonlocal twice
        while not done.is_set():
            found = consumer.receive(most, wait_ms=500)
            if not found:
                continue
            _read_orders(found)
            if pause_s:
                time.sleep(pause_s * len(found))
            consumer.ack_many(found)
            ids = [one.message_id for one in found]
            with lock:
                before = len(seen)
                seen.update(ids)
                shares[consumer.client_id] += len(ids)
                twice += before + len(ids) - len(seen)
                if len(seen) >= wanted:
                    done.set()

    consumers = [_simple_consumer(task) for _ in range(members)]
    holder = _simple_consumer(task)
    wanted = task.message_count
    if held:
        holder.start()
        wanted -= _hold(holder, held, task.queue_count)
    # Of 64 members the start takes longer than the messages: their rate is what is asked for.
    for consumer in consumers:
        consumer.start()
    wait_go()
    watch = Stopwatch()
    threads = [threading.Thread(target=work, args=(consumer,)) for consumer in consumers]
    for thread in threads:
        thread.start()
    done.wait()
    faults = [f"{twice} messages came twice"] if twice else []
    idlest, busiest = min(shares.values()), max(shares.values())
    if len(shares) < members or (evenly and busiest > 2 * idlest):
        faults.append(f"{len(shares)} of {members} members got {idlest} to {busiest} messages")
    report = watch.report(wanted, faults=faults)
    for thread in threads:
        thread.join()
    for consumer in (*consumers, holder):
        consumer.close()
    return report


def process_queue_orders(task: Task) -> Report:
    """A consumer in order that makes a message of each, stored together with its progress."""
    with AdminClient(task.address) as admin:
        admin.create_topic(BILLS, queues=task.queue_count)
    made: list[int] = []
    reports: list[Report] = []
    lock, done = threading.Lock(), threading.Event()

    def bill(messages: list[StoredMessage]) -> None:
        _read_orders(messages)
        with consumer.processing(messages) as out:
            for one in messages:
                out.send(Message(BILLS, one.body, one.tag, one.keys))
        with lock:
            made.append(len(messages))
            count = sum(made)
            if count >= task.message_count and not reports:
                reports.append(watch.report(count, faults=missing(count, task.message_count)))
                done.set()

    consumer = PushConsumer(
        GROUP,
        namesrv_addr=task.address,
        client=ClientOptions(use_ipc=task.use_ipc),
        consume_from_where="FIRST_OFFSET",
        consume_orderly=True,
        consume_message_batch_max_size=LISTENER_MESSAGES,
        pull_threshold_for_queue=4 * LISTENER_MESSAGES,
        consume_concurrently_max_span=8 * LISTENER_MESSAGES,
    )
    consumer.subscribe(TOPIC, listener=bill)
    wait_go()
    watch = Stopwatch()
    consumer.start()
    done.wait()
    consumer.close()
    return reports[0]


def process_orders(task: Task) -> Report:
    """Two simple consumers that make a message of each, stored together with their progress."""
    with AdminClient(task.address) as admin:
        admin.create_topic(BILLS, queues=task.queue_count)
    made: list[int] = []
    done = threading.Event()

    def work(consumer: SimpleConsumer) -> None:
        while not done.is_set():
            found = consumer.receive(500, wait_ms=500)
            if not found:
                continue
            _read_orders(found)
            with consumer.processing(found) as out:
                for one in found:
                    out.send(Message(BILLS, one.body, one.tag, one.keys))
            made.append(len(found))
            if sum(made) >= task.message_count:
                done.set()

    consumers = [_simple_consumer(task) for _ in range(2)]
    for consumer in consumers:
        consumer.start()
    wait_go()
    watch = Stopwatch()
    threads = [threading.Thread(target=work, args=(consumer,)) for consumer in consumers]
    for thread in threads:
        thread.start()
    done.wait()
    report = watch.report(sum(made), faults=missing(sum(made), task.message_count))
    for thread in threads:
        thread.join()
    for consumer in consumers:
        consumer.close()
    return report


def redeliver_orders(task: Task) -> Report:
    """Leases that end: the latency is the time until another member has the messages."""
    slow, quick = _simple_consumer(task), _simple_consumer(task)
    slow.start()
    quick.start()
    wait_go()
    watch = Stopwatch()
    ends: dict[str, float] = {}
    while len(ends) < task.message_count:
        began_s = time.monotonic()
        for message in slow.receive(10, SHORT_LEASE_MS, 10_000):
            ends[message.message_id] = began_s + SHORT_LEASE_MS / 1_000
    latencies_us: list[float] = []
    while ends:
        found = quick.receive(100, wait_ms=10_000)
        now_s = time.monotonic()
        latencies_us += [(now_s - ends.pop(one.message_id)) * 1e6 for one in found]
        quick.ack_many(found)
    report = watch.report(len(latencies_us), latencies_us=latencies_us)
    slow.close()
    quick.close()
    return report


def _simple_consumer(task: Task) -> SimpleConsumer:
    client = ClientOptions(use_ipc=task.use_ipc)
    consumer = SimpleConsumer(GROUP, namesrv_addr=task.address, client=client)
    consumer.subscribe(TOPIC)
    return consumer


def _hold(consumer: SimpleConsumer, count: int, queues: int) -> int:
    """Receive so many messages of each queue at least, and settle none; return how many."""
    got: Counter[int] = Counter()
    while len(got) < queues or min(got.values()) < count:
        for message in consumer.receive(count, MAX_HELD_MS):
            got[message.queue_id] += 1
    return got.total()


def _messages(orders: list[_Order]) -> list[Message]:
    return [Message(TOPIC, body, tag, keys, properties) for body, tag, keys, properties in orders]


def _read_orders(messages: Sequence[StoredMessage]) -> None:
    for one in messages:
        message_id = one.message_id
        body = one.body
        tag = one.tag
        currency = one.property("currency")
        if not (message_id and body and tag and currency):
            raise ValueError(f"message {message_id} came without its fields")


PROGRAMS: Final[dict[str, Callable[[Task], Report]]] = {
    "produce_orders": produce_orders,
    "produce_expiring_orders": partial(produce_orders, ttl_ms=3_600_000),
    "async_orders": async_orders,
    "aio_orders": aio_orders,
    "drain_orders": drain_orders,
    "receive_500_orders": partial(receive_orders, most=500, members=2),
    "receive_100_orders": partial(receive_orders, most=100, members=2),
    "receive_32_orders": partial(receive_orders, most=32, members=4),
    "receive_1_orders": partial(receive_orders, most=1, members=64),
    "receive_held_orders": partial(receive_orders, most=500, members=2, held=1),
    "receive_crowd_orders": partial(
        receive_orders, most=10, members=200, pause_s=0.02, evenly=True
    ),
    "process_orders": process_orders,
    "process_queue_orders": process_queue_orders,
    "redeliver_orders": redeliver_orders,
}


def main() -> None:
    """Runs the program that the task names."""
    task = read_task()
    hand_in(PROGRAMS[task.kind](task))


if __name__ == "__main__":
    main()
