"""A client of `mqmesh bench` in a process of its own: sends, or reads.

Run as ``python -m mqmesh.cli.bench.worker``, with a task on standard input; see ``words``.
"""

import random
import secrets
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from mqmesh.errors import MQMeshError
from mqmesh.message import Message
from mqmesh.protocol.groups import LOOK_GROUP_PREFIX
from mqmesh.protocol.membership import ConsumeFromWhere, MessageModel
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.producer.send_result import SendFuture
from mqmesh.units import MIB

from ..streams import json_line
from .words import (
    GO,
    BenchTask,
    ClientFailure,
    ClientProgress,
    ClientReady,
    ClientReport,
    Word,
    Work,
    age_us,
    stamp,
)

GROUP: Final = "mqmesh-bench"
TOPIC_TIMEOUT_MS: Final = 10_000
WARM_UP_SENDS: Final = 20
"""Before single sends are timed: connections and codes are loaded then."""
BODIES: Final = 256
BODIES_BYTES: Final = 4 * MIB
"""Different bodies, which come again and again: so many, or fewer if they are large."""
CHUNK_MESSAGES: Final = 1_000
"""Messages handed over before outcomes are looked at."""
LOOK_EVERY_MESSAGES: Final = 64
"""Clocks are not free, where nothing but the end is waited for."""
MAX_CHUNKS: Final = 10
"""Chunks without all their outcomes; the next one waits."""
OUTCOME_TIMEOUT_S: Final = 30.0
POLL_MS: Final = 50
POLL_MESSAGES: Final = 1_000
PROGRESS_INTERVAL_S: Final = 0.1


class Orders:
    """Orders of the parent, read by a thread: GO, then STOP, or end of input when it is gone."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def wait_go(self) -> bool:
        """Waits for ``GO``; False if another line came."""
        began = sys.stdin.readline().strip() == GO
        threading.Thread(target=self._listen, daemon=True).start()
        return began

    def wait(self, seconds: float) -> bool:
        """Waits; ends early, with True, when the client is to stop."""
        return self._stopped.wait(max(seconds, 0.0))

    def __bool__(self) -> bool:
        """Returns True when the client is to stop."""
        return self._stopped.is_set()

    def _listen(self) -> None:
        sys.stdin.readline()
        self._stopped.set()


class BenchRun:
    """One task's count, end and report.

    Args:
        task: Task of the client.
        orders: Orders of the parent.
    """

    def __init__(self, task: BenchTask, orders: Orders) -> None:
        self.report = ClientReport()
        self._task = task
        self._orders = orders
        self._cpu_s = time.process_time()
        self._began = self._progress_sent = time.monotonic()
        self.report.begin_s = self.report.end_s = self._began

    @property
    def is_over(self) -> bool:
        """True when the time is up, or the parent says so."""
        limit = self._task.duration_s
        return bool(self._orders) or bool(limit and time.monotonic() - self._began >= limit)

    def numbers(self) -> Iterator[int]:
        """Yields numbers of messages to be sent, not faster than the rate, until the end."""
        count, rate = self._task.message_count, self._task.rate
        for number in range(count or sys.maxsize):
            if rate:
                if self._orders.wait(self._left_s(number / rate)) or self.is_over:
                    return
            elif number % LOOK_EVERY_MESSAGES == 0 and self.is_over:
                return
            yield number

    def _left_s(self, due_s: float) -> float:
        """Returns seconds until something is due, or until the end if that comes first."""
        limit = self._task.duration_s
        return self._began + (min(due_s, limit) if limit else due_s) - time.monotonic()

    def did(self, count: int, body_bytes: int) -> None:
        """Notes messages that were acknowledged, or read."""
        self.report.done += count
        self.report.body_bytes += body_bytes
        self.report.end_s = time.monotonic()
        self.send_progress()

    def fail(self, count: int, error: Exception) -> None:
        """Notes messages that could not be sent."""
        self.report.failed += count
        self.report.error = self.report.error or str(error)

    def send_progress(self) -> None:
        """Reports progress to the parent, every 0.1 s at most."""
        now = time.monotonic()
        if now - self._progress_sent >= PROGRESS_INTERVAL_S:
            self._progress_sent = now
            say(ClientProgress(self.report.done))

    def end(self) -> ClientReport:
        """Ends the run, and returns its report."""
        self.report.cpu_s = time.process_time() - self._cpu_s
        return self.report


class MessageSource:
    """Makes the messages of a task."""

    def __init__(self, task: BenchTask) -> None:
        chance = random.Random(task.client)
        count = max(min(BODIES, BODIES_BYTES // max(task.body_bytes, 1)), 1)
        self._bodies = [chance.randbytes(task.body_bytes) for _ in range(count)]
        self._task = task
        self._stem = f"{task.run:x}-{task.client}"

    def message(self, number: int, body: bytes | None = None) -> Message:
        """Makes the message of a number, with one of the usual bodies or another."""
        task = self._task
        keys = (f"{self._stem}-{number}",) if task.has_keys else ()
        return Message(
            task.topic,
            self._bodies[number % len(self._bodies)] if body is None else body,
            task.tag,
            keys,
            task.properties or None,
        )

    def stamped(self, number: int) -> Message:
        """Makes the message of a number with the time in its body."""
        return self.message(number, stamp(self._task.run, self._bodies[number % len(self._bodies)]))


def send(task: BenchTask, orders: Orders) -> ClientReport:
    """Sends as fast as it goes, or at a rate; every outcome is looked at."""
    maker = MessageSource(task)
    # At a low rate outcomes are to be seen at once.
    full = max(min(CHUNK_MESSAGES, int(task.rate / 10)), 1) if task.rate else CHUNK_MESSAGES
    with _producer(task) as producer:
        producer.fetch_publish_queues(task.topic, timeout_ms=TOPIC_TIMEOUT_MS)
        say(ClientReady())
        if not orders.wait_go():
            return ClientReport()
        run = BenchRun(task, orders)
        window = Window(task, run, full)
        held: list[Message] = []
        for number in run.numbers():
            held.append(maker.message(number))
            if len(held) == task.batch_messages:
                whole, held = held, []
                if not window.add(producer, whole):
                    break
        if held:
            window.add(producer, held)
        window.close()
        return run.end()


class Window:
    """Sends without an outcome, in chunks: looking at each by itself would be what is measured.

    Args:
        task: Task of the client.
        run: Run that counts the outcomes.
        full: Messages in a chunk.
    """

    def __init__(self, task: BenchTask, run: BenchRun, full: int) -> None:
        self._body_bytes = task.body_bytes
        self._run = run
        self._full = full
        self._chunks: deque[list[tuple[SendFuture, int]]] = deque([[]])
        self._room = full

    def add(self, producer: Producer, messages: list[Message]) -> bool:
        """Hands messages over; False if the next ones need not be tried either."""
        try:
            if len(messages) == 1:
                future = producer.send_async(messages[0])
            else:
                future = producer.send_batch_async(messages)
        except MQMeshError as error:
            self._run.fail(len(messages), error)
            return False
        self._chunks[-1].append((future, len(messages)))
        self._room -= len(messages)
        if self._room > 0:
            return True
        self._chunks.append([])
        self._room = self._full
        while len(self._chunks) > 1 and self._is_due():
            if self._settle(self._chunks.popleft()) == 0:
                return False
        return True

    def close(self) -> None:
        """Waits for sends without an outcome."""
        while self._chunks:
            self._settle(self._chunks.popleft())

    def _is_due(self) -> bool:
        return len(self._chunks) > MAX_CHUNKS or self._chunks[0][-1][0].done()

    def _settle(self, chunk: list[tuple[SendFuture, int]]) -> int:
        """Waits for outcomes; returns how many messages were acknowledged."""
        stored = 0
        for future, count in chunk:
            try:
                future.result(OUTCOME_TIMEOUT_S)
            except MQMeshError as error:
                self._run.fail(count, error)
            else:
                stored += count
        if stored:
            self._run.did(stored, stored * self._body_bytes)
        return stored


def send_each(task: BenchTask, orders: Orders) -> ClientReport:
    """Sends one message after the other synchronously; times each, with the time in its body."""
    maker = MessageSource(task)
    with _producer(task) as producer:
        producer.fetch_publish_queues(task.topic, timeout_ms=TOPIC_TIMEOUT_MS)
        for number in range(WARM_UP_SENDS):
            producer.send(maker.message(number))  # not stamped, so no client counts it
        say(ClientReady())
        if not orders.wait_go():
            return ClientReport()
        run = BenchRun(task, orders)
        for number in run.numbers():
            began_ns = time.monotonic_ns()
            try:
                producer.send(maker.stamped(number))
            except MQMeshError as error:
                run.fail(1, error)
                if run.report.done == 0:
                    break
                continue
            run.report.send.add((time.monotonic_ns() - began_ns) / 1_000)
            run.did(1, task.body_bytes)
        return run.end()


@contextmanager
def _reader(task: BenchTask, where: ConsumeFromWhere) -> Iterator[PullConsumer]:
    """A consumer in a group that brokers keep nothing of, and that commits nothing to them.

    Clients divide the queues themselves, so no member waits for another.
    """
    with (
        tempfile.TemporaryDirectory(prefix="mqmesh-") as folder,
        PullConsumer(
            f"{LOOK_GROUP_PREFIX}bench-{secrets.token_hex(8)}",
            namesrv_addr=task.namesrv,
            auto_commit=False,
            consume_from_where=where,
            message_model=MessageModel.BROADCASTING,
            offsets_dir=folder,
        ) as consumer,
    ):
        yield consumer


def read(task: BenchTask, orders: Orders) -> ClientReport:
    """Reads this client's share of the queues, every body of it, until it gets ``STOP``."""
    with _reader(task, ConsumeFromWhere.FIRST_OFFSET) as consumer:
        queues = consumer.queues(task.topic)[task.client :: task.clients]
        say(ClientReady())
        if not orders.wait_go():
            return ClientReport()
        run = BenchRun(task, orders)
        consumer.assign(queues)  # not before: messages are counted from the first request on
        while not run.is_over:
            messages = consumer.poll(POLL_MS, POLL_MESSAGES)
            if messages:
                run.did(len(messages), sum([len(message.body) for message in messages]))
            run.send_progress()
        return run.end()


def read_stamped(task: BenchTask, orders: Orders) -> ClientReport:
    """Reads from now on, and takes the age of each message that carries this run's stamp."""
    with _reader(task, ConsumeFromWhere.LAST_OFFSET) as consumer:
        consumer.assign(consumer.queues(task.topic)[task.client :: task.clients])
        say(ClientReady())
        if not orders.wait_go():
            return ClientReport()
        run = BenchRun(task, orders)
        while not run.is_over:
            messages = consumer.poll(POLL_MS, POLL_MESSAGES)
            now_ns = time.monotonic_ns()
            ages = [age_us(task.run, message.body, now_ns) for message in messages]
            mine = [age for age in ages if age is not None]
            for age in mine:
                run.report.delivery.add(age)
            if mine:
                run.did(len(mine), len(mine) * task.body_bytes)
            run.send_progress()
        return run.end()


WORKS: Final = {
    Work.SEND: send,
    Work.SEND_EACH: send_each,
    Work.READ: read,
    Work.READ_STAMPED: read_stamped,
}


def say(word: Word) -> None:
    """Writes a message to the parent, a line of JSON on standard output."""
    sys.stdout.buffer.write(json_line(word))
    sys.stdout.buffer.flush()


def main() -> None:
    """Does the task that stands on standard input."""
    task = msgspec.json.decode(sys.stdin.readline(), type=BenchTask)
    try:
        say(WORKS[task.work](task, Orders()))
    except MQMeshError as error:
        say(ClientFailure(str(error)))


def _producer(task: BenchTask) -> Producer:
    return Producer(GROUP, namesrv_addr=task.namesrv)


if __name__ == "__main__":
    main()
