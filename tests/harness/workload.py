"""Producers and consumers in processes of their own that write down all they see.

A worker is started with its plan as an argument and works until its standard input ends,
so that it also ends with its parent. It appends a line to its file *before* it sends,
and another one when it knows the outcome, each with one write: what a killed worker knew
is in its file.
"""

import hashlib
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from harness.checker import ACKED, REFUSED, UNKNOWN, Attempt, Delivery
from harness.receives import receive
from mqmesh.errors import (
    ClientClosed,
    EndpointUnreachable,
    MQMeshError,
    ProtocolError,
    RequestTimeout,
)
from mqmesh.logs import configure_logging
from mqmesh.message import Message, StoredMessage
from mqmesh.protocol.membership import ConsumeFromWhere
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.consumer.simple_consumer import SimpleConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.producer.send_result import SendFuture, SendResult

_log = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 90.0
MAX_PADDING: Final = 3_000
MAX_BATCH: Final = 40
SHARDING_KEYS: Final = 32
_COMPRESSIBLE: Final = 6
"""One body in so many is long and compressible."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Plan of a worker.

    Attributes:
        name: Name of the worker.
        kind: ``sync``, ``async`` or ``batch`` for producers, ``consume`` or ``receive``.
        namesrv_addr: Name servers.
        topic: Topic.
        file: File for the lines that it writes.
        seed: Seed of the bodies and their sizes.
        group: Group of a consumer.
        rate: Messages a second, at most.
        timeout_ms: Timeout of a send, in ms.
    """

    name: str
    kind: str
    namesrv_addr: str
    topic: str
    file: str
    seed: int = 0
    group: str = "chaos"
    rate: int = 500
    timeout_ms: int = 60_000


class Line(msgspec.Struct, omit_defaults=True):
    """A line of a worker's file.

    Attributes:
        event: ``send``, ``acked``, ``refused``, ``unknown``, ``got``, ``queues``, or one of
            ``harness.receives``.
        number: Number of the message, or of the first one of a batch.
        count: Messages of a batch.
        hashes: Hashes of the bodies.
        producer: Producer of a message that was got.
        queue: ``broker/queue_id``.
        queue_offset: Queue offset of the first message.
        message_ids: Ids.
        time_ms: Time on the machine's monotonic clock.
        why: The error.
        queues: Queues of a consumer, when they changed.
    """

    event: str
    number: int = 0
    count: int = 1
    hashes: list[str] = []
    producer: str = ""
    queue: str = ""
    queue_offset: int = -1
    message_ids: list[str] = []
    time_ms: float = 0.0
    why: str = ""
    queues: list[str] = []


_DECODER: Final = msgspec.json.Decoder(Line)


class Worker:
    """A worker's process.

    Args:
        plan: Plan of the worker.

    Attributes:
        pid: Id of the process.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._lines: list[Line] = []
        self._counts: Counter[str] = Counter()
        self._position = 0
        argument = msgspec.json.encode(plan).decode()
        path = Path(plan.file)
        with path.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "harness.workload", argument],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        self.pid = self._process.pid

    def lines(self) -> list[Line]:
        """Returns the lines written so far; a last line that is not whole is left out."""
        try:
            with open(self.plan.file, "rb") as file:
                file.seek(self._position)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._position += len(whole) + len(newline)
        new = [_DECODER.decode(line) for line in whole.splitlines()]
        self._lines += new
        self._counts.update(line.event for line in new)
        return self._lines

    def count(self, event: str) -> int:
        """Returns the number of lines of an event written so far."""
        self.lines()
        return self._counts[event]

    def kill(self) -> None:
        """Ends it as a crash would."""
        self._process.kill()
        self._wait()

    def stop(self) -> None:
        """Asks it to end what it does, and waits.

        Raises:
            RuntimeError: The worker failed or did not end; the text holds the end of its log.
        """
        if self._process.stdin is not None:
            self._process.stdin.close()
        code = self._wait()
        if code:
            log = Path(self.plan.file).with_suffix(".log").read_text(errors="replace")
            raise RuntimeError(f"worker {self.plan.name} ended with {code}:\n{log[-2_000:]}")

    def close(self) -> None:
        """Makes sure that it is gone."""
        if self._process.poll() is None:
            self._process.kill()
        self._wait()

    def _wait(self) -> int:
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        return code


def read_attempts(name: str, lines: Sequence[Line]) -> Iterator[Attempt]:
    """Yields a producer's attempts, in the order of its calls, with their outcomes."""
    outcomes = {line.number: line for line in lines if line.event != "send"}
    for sent in lines:
        if sent.event != "send":
            continue
        end = outcomes.get(sent.number, Line(UNKNOWN))
        for index, body_hash in enumerate(sent.hashes):
            is_acked = end.event == ACKED
            yield Attempt(
                name,
                sent.number + index,
                body_hash,
                end.event,
                "batch" if len(sent.hashes) > 1 else "single",
                end.queue,
                end.queue_offset + index if is_acked else -1,
                end.message_ids[index] if is_acked else "",
                sent.time_ms,
                end.time_ms if is_acked else float("inf"),
            )


def read_deliveries(name: str, lines: Sequence[Line]) -> Iterator[Delivery]:
    """Yields the deliveries of a consumer."""
    for line in lines:
        if line.event == "got":
            yield Delivery(
                line.producer,
                line.number,
                line.hashes[0],
                line.queue,
                line.queue_offset,
                line.message_ids[0],
                line.time_ms,
                name,
            )


# ---- Bodies --------------------------------------------------------------------------


def make_body(producer: str, number: int, chance: random.Random) -> bytes:
    """Makes a body that no other message has: producer, number, and padding of any length."""
    if chance.randrange(_COMPRESSIBLE) == 0:
        padding = b"mqmesh" * chance.randrange(MAX_PADDING)
    else:
        padding = chance.randbytes(chance.randrange(MAX_PADDING) >> chance.randrange(8))
    return b"%s|%d|%s" % (producer.encode(), number, padding)


def hash_body(body: bytes) -> str:
    """Returns a short hash."""
    return hashlib.blake2b(body, digest_size=8).hexdigest()


def describe(message: StoredMessage, time_ms: float = 0.0) -> Delivery:
    """Describes a message that came, in the form of the checker."""
    producer, number = split_body(message.body)
    return Delivery(
        producer,
        number,
        hash_body(message.body),
        f"{message.broker_name}/{message.queue_id}",
        message.queue_offset,
        message.message_id,
        time_ms,
        keys=tuple(message.keys),
    )


def make_keys(producer: str, number: int) -> tuple[str, ...]:
    """Business keys of a message: none, or one of its own and one that it shares."""
    return (f"{producer}-{number}", f"tens-{number // 10}") if number % 4 == 0 else ()


def split_body(body: bytes) -> tuple[str, int]:
    """Returns the producer and number of a body; "" and -1 if it is none of ours."""
    parts = body.split(b"|", 2)
    if len(parts) == 3 and parts[1].isdigit():
        return parts[0].decode(errors="replace"), int(parts[1])
    return "", -1


# ---- In the worker's process ---------------------------------------------------------


class Recorder:
    """Appends lines to a file; from any thread."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *lines: Line) -> None:
        """Appends lines with one write."""
        data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        written = os.write(self._file, data)
        assert written == len(data), "the disk of the history is full"


def judge(error: MQMeshError) -> str:
    """Returns the outcome of a message whose send failed: unknown, or refused."""
    in_doubt = RequestTimeout | EndpointUnreachable | ProtocolError | ClientClosed
    return UNKNOWN if isinstance(error, in_doubt) else REFUSED


class _Producing:
    """A producer at work."""

    def __init__(self, plan: Plan, record: Recorder, stopping: threading.Event) -> None:
        self._plan = plan
        self._record = record
        self._stopping = stopping
        self._chance = random.Random(plan.seed)
        self._number = 0
        self._sent = 0

    def run(self) -> None:
        with Producer(
            f"{self._plan.group}-producers",
            namesrv_addr=self._plan.namesrv_addr,
            retry_times_when_send_failed=100,
            retry_times_when_send_async_failed=100,
            send_msg_timeout_ms=self._plan.timeout_ms,
        ) as producer:
            step = {"sync": self._send, "async": self._send_async, "batch": self._send_batch}[
                self._plan.kind
            ]
            began = time.monotonic()
            futures: list[SendFuture] = []
            while not self._stopping.is_set():
                futures = [one for one in futures if not one.done()] + step(producer)
                ahead_s = self._sent / self._plan.rate - (time.monotonic() - began)
                if ahead_s > 0:
                    self._stopping.wait(ahead_s)
                elif ahead_s < -1:
                    began = time.monotonic() - self._sent / self._plan.rate
            for future in futures:
                self._wait(future)

    def _wait(self, future: SendFuture) -> None:
        try:
            future.result()
        except MQMeshError as error:
            # Its callback has written it down.
            _log.debug("%s: %s", self._plan.name, error)

    def _next(self, count: int) -> tuple[int, list[Message]]:
        first = self._number
        self._number += count
        self._sent += count
        key = (
            f"key-{self._chance.randrange(SHARDING_KEYS)}" if self._chance.random() < 0.5 else None
        )
        messages = [
            Message(
                self._plan.topic,
                make_body(self._plan.name, number, self._chance),
                keys=make_keys(self._plan.name, number),
                sharding_key=key,
            )
            for number in range(first, self._number)
        ]
        hashes = [hash_body(message.body) for message in messages]
        self._record.write(Line("send", first, count, hashes, time_ms=now_ms()))
        return first, messages

    def _send(self, producer: Producer) -> list[SendFuture]:
        number, (message,) = self._next(1)
        self._finish(number, lambda: producer.send(message))
        return []

    def _send_batch(self, producer: Producer) -> list[SendFuture]:
        number, messages = self._next(self._chance.randint(1, MAX_BATCH))
        self._finish(number, lambda: producer.send_batch(messages))
        return []

    def _send_async(self, producer: Producer) -> list[SendFuture]:
        number, (message,) = self._next(1)
        try:
            future = producer.send_async(message)
        except MQMeshError as error:
            self._failed(number, error)
            return []
        future.add_done_callback(lambda one: self._finish(number, one.result))
        return [future]

    def _finish(self, number: int, result: Callable[[], SendResult]) -> None:
        try:
            one = result()
        except MQMeshError as error:
            self._failed(number, error)
            return
        queue = f"{one.message_queue.broker_name}/{one.message_queue.queue_id}"
        line = Line(ACKED, number, one.message_count, queue=queue, queue_offset=one.queue_offset)
        line.message_ids = one.message_ids
        line.time_ms = now_ms()
        self._record.write(line)

    def _failed(self, number: int, error: MQMeshError) -> None:
        why = f"{type(error).__name__}: {error}"
        self._record.write(Line(judge(error), number, why=why, time_ms=now_ms()))


def consume(plan: Plan, record: Recorder, stopping: threading.Event) -> None:
    """Takes part in a group and writes down all that comes, before it is acknowledged."""

    def listen(messages: list[StoredMessage]) -> ConsumeResult:
        record.write(*_lines("got", messages))
        return ConsumeResult.SUCCESS

    # One thread, since several would not keep the order of a queue.
    consumer = PushConsumer(
        plan.group,
        namesrv_addr=plan.namesrv_addr,
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        consume_thread_count=1,
        consume_message_batch_max_size=64,
        persist_consumer_offset_interval_ms=500,
    )
    consumer.subscribe(plan.topic, listener=listen)
    with consumer:
        had: list[str] | None = None
        while not stopping.wait(0.05):
            has = [f"{queue.broker_name}/{queue.queue_id}" for queue in consumer.assignment()]
            if has != had:
                record.write(Line("queues", queues=has, time_ms=now_ms()))
                had = has


def receive_each(plan: Plan, record: Recorder, stopping: threading.Event) -> None:
    """Takes part in a group that acknowledges each message, and writes down all that it does."""

    def note(event: str, messages: list[StoredMessage]) -> None:
        record.write(*_lines(event, messages))

    consumer = SimpleConsumer(
        plan.group, namesrv_addr=plan.namesrv_addr, settle_timeout_ms=plan.timeout_ms
    )
    consumer.subscribe(plan.topic)
    with consumer:
        receive(consumer, random.Random(plan.seed), stopping, note)


def _lines(event: str, messages: list[StoredMessage]) -> list[Line]:
    time_ms = now_ms()
    lines = []
    for message in messages:
        one = describe(message)
        line = Line(event, one.number, hashes=[one.body_hash], producer=one.producer)
        line.queue, line.queue_offset = one.queue, one.queue_offset
        line.message_ids, line.time_ms = [one.message_id], time_ms
        lines.append(line)
    return lines


def now_ms() -> float:
    """Returns the machine's monotonic time, which all its processes share, in ms."""
    return time.monotonic() * 1_000


def work(plan: Plan) -> None:
    """Does what a plan says until standard input ends."""
    stopping = threading.Event()

    def watch() -> None:
        sys.stdin.buffer.read()
        stopping.set()

    threading.Thread(target=watch, daemon=True).start()
    record = Recorder(Path(plan.file))
    if plan.kind == "consume":
        consume(plan, record, stopping)
    elif plan.kind == "receive":
        receive_each(plan, record, stopping)
    else:
        _Producing(plan, record, stopping).run()


if __name__ == "__main__":
    configure_logging("worker", "INFO", None)
    work(msgspec.json.decode(sys.argv[1], type=Plan))
