"""The programs of a benchmark that send through mqmesh, as a user would write them.

Run as ``python -m rows.producers TASK``.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from typing import Any, Final

from mqmesh.message import Message, StoredMessage
from mqmesh.protocol.messaging import SendStatus
from mqmesh.sdk.client.options import ClientOptions
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.producer.send_result import SendFuture
from mqmesh.sdk.transactions.transaction_producer import TransactionProducer
from mqmesh.sdk.transactions.transactions import (
    LocalTransactionState,
    TransactionFuture,
    TransactionListener,
)
from rows.workload import (
    TOPIC,
    WARM_UP_SENDS,
    Report,
    Stopwatch,
    Task,
    hand_in,
    is_enough,
    make_bodies,
    make_keys,
    read_task,
    say_ready,
    stamp_body,
    topic_names,
    wait_go,
)

FUTURES_A_CHUNK: Final = 10_000
CHUNKS_UNCHECKED: Final = 5
OUTCOME_TIMEOUT_S: Final = 60.0
ROUTES_AT_ONCE: Final = 64
STEADY_PAUSE_S: Final = 0.001


def produce_batches(task: Task) -> Report:
    """Explicit batches, a window of them without an outcome."""
    bodies = make_bodies(task.batch_messages, task.body_bytes)
    # Made before, like the bodies: what is measured is not the making of strings.
    pool = [make_keys(number, task.key_count) for number in range(task.key_pool)]
    topics = cycle(topic_names(task.topic_count))
    waiting: deque[SendFuture] = deque()
    acknowledged = 0
    with bench_producer(task) as producer:
        wait_go()
        watch = Stopwatch()
        for first in range(0, task.message_count, task.batch_messages):
            if len(waiting) >= task.window:
                acknowledged += stored(waiting.popleft())
            topic = next(topics)
            if task.key_count:
                keys = _keys(task, pool, first)
                pairs = zip(bodies, keys, strict=True)
                messages = [Message(topic, body, None, own) for body, own in pairs]
            else:
                messages = [Message(topic, body) for body in bodies]
            waiting.append(producer.send_batch_async(messages))
        acknowledged += sum(map(stored, waiting))
        return watch.report(acknowledged, faults=missing(acknowledged, task.message_count))


def produce_async(task: Task) -> Report:
    """One ``send_async`` a message; the futures are looked at in chunks, every one of them."""
    bodies = make_bodies(FUTURES_A_CHUNK, task.body_bytes)
    chunks: deque[list[SendFuture]] = deque()
    acknowledged = 0
    with bench_producer(task) as producer:
        send = producer.send_async
        wait_go()
        watch = Stopwatch()
        for _ in range(task.message_count // FUTURES_A_CHUNK):
            chunks.append([send(Message(TOPIC, body)) for body in bodies])
            if len(chunks) > CHUNKS_UNCHECKED:
                acknowledged += stored_of(chunks.popleft())
        acknowledged += sum(map(stored_of, chunks))
        return watch.report(acknowledged, faults=missing(acknowledged, task.message_count))


def produce_rounds(task: Task) -> Report:
    """``window`` single sends to the topics in turn, then all outcomes, and so on."""
    body = make_bodies(1, task.body_bytes)[0]
    topics = topic_names(task.topic_count)
    turn = cycle(topics)
    rounds = task.message_count // task.window
    acknowledged = 0
    with bench_producer(task) as producer:
        _know_queues(producer, topics)
        send = producer.send_async
        wait_go()
        watch = Stopwatch()
        for _ in range(rounds):
            acknowledged += stored_of([send(Message(next(turn), body)) for _ in range(task.window)])
        return watch.report(acknowledged, faults=missing(acknowledged, rounds * task.window))


def create_topics(task: Task) -> Report:
    """A first message to each topic, one after the other."""
    body = make_bodies(1, task.body_bytes)[0]
    acknowledged = 0
    with bench_producer(task) as producer:
        wait_go()
        watch = Stopwatch()
        for topic in topic_names(task.topic_count):
            acknowledged += producer.send(Message(topic, body)).status is SendStatus.SEND_OK
        return watch.report(acknowledged, faults=missing(acknowledged, task.topic_count))


def _know_queues(producer: Producer, topics: list[str]) -> None:
    # In threads, since those that wait at the same time share requests.
    with ThreadPoolExecutor(ROUTES_AT_ONCE) as threads:
        for _ in threads.map(producer.fetch_publish_queues, topics):
            pass


def produce_singles(task: Task) -> Report:
    """Single sends, so many in flight: each outcome lets the next one go."""
    bodies = make_bodies(task.batch_messages, task.body_bytes)
    waiting: deque[SendFuture] = deque()
    acknowledged = 0
    with bench_producer(task) as producer:
        wait_go()
        watch = Stopwatch()
        for number in range(task.message_count):
            if len(waiting) >= task.window:
                acknowledged += stored(waiting.popleft())
            waiting.append(producer.send_async(Message(TOPIC, bodies[number % len(bodies)])))
        acknowledged += sum(map(stored, waiting))
        return watch.report(acknowledged, faults=missing(acknowledged, task.message_count))


def produce_singles_threads(task: Task) -> Report:
    """The same with a thread for each message in flight, and synchronous sends."""
    body = make_bodies(1, task.body_bytes)[0]
    each = task.message_count // task.window
    acknowledged: list[int] = []
    with bench_producer(task) as producer:
        begin = threading.Barrier(task.window + 1)

        def work() -> None:
            begin.wait()
            done = 0
            for _ in range(each):
                done += producer.send(Message(TOPIC, body)).status is SendStatus.SEND_OK
            acknowledged.append(done)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(task.window)]
        for thread in threads:
            thread.start()
        wait_go()
        watch = Stopwatch()
        begin.wait()
        for thread in threads:
            thread.join()
        count = sum(acknowledged)
        return watch.report(count, faults=missing(count, each * task.window))


class _Agrees(TransactionListener):
    """Local transactions that take no time and go well."""

    def execute_local_transaction(self, message: StoredMessage, arg: Any) -> LocalTransactionState:
        return LocalTransactionState.COMMIT

    def check_local_transaction(self, message: StoredMessage) -> LocalTransactionState:
        return LocalTransactionState.COMMIT


def produce_transactions(task: Task) -> Report:
    """Messages in transactions, so many in flight: half message, local transaction, commit."""
    bodies = make_bodies(task.batch_messages, task.body_bytes)
    waiting: deque[TransactionFuture] = deque()
    committed = 0
    client = ClientOptions(use_ipc=task.use_ipc)
    with TransactionProducer(
        "bench-producer", _Agrees(), namesrv_addr=task.address, client=client
    ) as producer:
        producer.fetch_publish_queues(TOPIC, timeout_ms=10_000)
        send = producer.send_message_in_transaction_async
        wait_go()
        watch = Stopwatch()
        for number in range(task.message_count):
            if len(waiting) >= task.window:
                committed += waiting.popleft().result(OUTCOME_TIMEOUT_S).is_ended
            waiting.append(send(Message(TOPIC, bodies[number % len(bodies)])))
        committed += sum(one.result(OUTCOME_TIMEOUT_S).is_ended for one in waiting)
        return watch.report(committed, faults=missing(committed, task.message_count))


def send_sync(task: Task) -> Report:
    """One synchronous send after the other."""
    body = make_bodies(1, task.body_bytes)[0]
    latencies_us = []
    with bench_producer(task) as producer:
        for _ in range(WARM_UP_SENDS):
            producer.send(Message(TOPIC, body))
        wait_go()
        watch = Stopwatch()
        acknowledged = 0
        for number in range(task.message_count):
            keys = make_keys(number, task.key_count)
            begin_ns = time.perf_counter_ns()
            result = producer.send(Message(TOPIC, body, None, keys))
            latencies_us.append((time.perf_counter_ns() - begin_ns) / 1_000)
            acknowledged += result.status is SendStatus.SEND_OK
        faults = missing(acknowledged, task.message_count)
        return watch.report(acknowledged, latencies_us=latencies_us, faults=faults)


def produce_paced(task: Task) -> Report:
    """A message at a time, at a steady rate, each with the time it was made at."""
    filler = make_bodies(1, task.body_bytes)[0]
    topics = topic_names(task.topic_count)
    waiting: list[SendFuture] = []
    with bench_producer(task) as producer:
        _know_queues(producer, topics)
        wait_go()
        watch = Stopwatch()
        for number in range(task.message_count):
            wait_s = watch.begin_s + number / task.rate - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            keys = make_keys(number, task.key_count)
            topic = topics[number % len(topics)]
            waiting.append(producer.send_async(Message(topic, stamp_body(filler), None, keys)))
        acknowledged = sum(map(stored, waiting))
        return watch.report(acknowledged, faults=missing(acknowledged, task.message_count))


def produce_steady(task: Task) -> Report:
    """Messages at a steady rate until the parent says that it is enough.

    Of those that are due at once, the first one's latency is taken: from when it was due.
    """
    bodies = make_bodies(task.batch_messages, task.body_bytes)
    waiting: deque[SendFuture] = deque()
    latencies_us: list[float] = []
    sent = acknowledged = 0
    with bench_producer(task) as producer:
        wait_go()
        watch = Stopwatch()

        def note_latency(future: SendFuture, due_s: float) -> None:
            future.add_done_callback(
                lambda _: latencies_us.append((time.monotonic() - due_s) * 1e6)
            )

        while not is_enough():
            due = int((time.monotonic() - watch.begin_s) * task.rate)
            for number in range(sent, due):
                future = producer.send_async(Message(TOPIC, bodies[number % len(bodies)]))
                waiting.append(future)
                if number == sent:
                    note_latency(future, watch.begin_s + number / task.rate)
            sent = max(sent, due)
            while waiting and waiting[0].done():
                acknowledged += stored(waiting.popleft())
            time.sleep(STEADY_PAUSE_S)
        acknowledged += sum(map(stored, waiting))
        faults = missing(acknowledged, sent)
        return watch.report(acknowledged, latencies_us=latencies_us, faults=faults)


def warm_up(task: Task) -> Report:
    """A message into each queue, so that a waiting consumer can tell that it has them all."""
    body = make_bodies(1, task.body_bytes)[0]
    with bench_producer(task) as producer:
        queues = producer.fetch_publish_queues(TOPIC)
        watch = Stopwatch()
        say_ready()
        stored = [producer.send(Message(TOPIC, body), queue=queue) for queue in queues]
        return watch.report(len(stored))


@contextmanager
def bench_producer(task: Task) -> Iterator[Producer]:
    """A producer as the task wants it, which knows the topic's queues."""
    client = ClientOptions(use_ipc=task.use_ipc)
    with Producer(
        "bench-producer", namesrv_addr=task.address, client=client, msg_trace=task.msg_trace
    ) as producer:
        producer.fetch_publish_queues(TOPIC, timeout_ms=10_000)
        yield producer


def _keys(task: Task, pool: list[tuple[str, ...]], first: int) -> list[tuple[str, ...]]:
    if not pool:
        return [make_keys(first + number, task.key_count) for number in range(task.batch_messages)]
    begin = first % (len(pool) - task.batch_messages + 1)
    return pool[begin : begin + task.batch_messages]


def stored(future: SendFuture) -> int:
    """How many messages of a send are stored; waits for its outcome."""
    result = future.result(OUTCOME_TIMEOUT_S)
    return result.message_count if result.status is SendStatus.SEND_OK else 0


def stored_of(futures: list[SendFuture]) -> int:
    """How many of single sends are stored; waits for all."""
    # Waiting for the last one leaves little waiting for the others.
    futures[-1].result(OUTCOME_TIMEOUT_S)
    late = [future for future in futures if not future.done()]
    for future in late:
        future.result(OUTCOME_TIMEOUT_S)
    return sum([future.exception() is None for future in futures])


def missing(count: int, expected: int) -> list[str]:
    """The fault to be reported if not all messages were acknowledged."""
    return [] if count == expected else [f"{count} of {expected} messages were acknowledged"]


PROGRAMS: Final = {
    "produce_batches": produce_batches,
    "produce_async": produce_async,
    "produce_rounds": produce_rounds,
    "create_topics": create_topics,
    "produce_singles": produce_singles,
    "produce_singles_threads": produce_singles_threads,
    "produce_transactions": produce_transactions,
    "send_sync": send_sync,
    "produce_paced": produce_paced,
    "produce_steady": produce_steady,
    "warm_up": warm_up,
}


def main() -> None:
    """Runs the program that the task names."""
    task = read_task()
    hand_in(PROGRAMS[task.kind](task))


if __name__ == "__main__":
    main()
