"""Messages with a tag and properties, and consumers that want some of them or all.

Run as ``python -m rows.labelled TASK``. The labels are those of flights: a carrier
as tag, and airports, delay and distance as properties.
"""

import random
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

from mqmesh.message import Message, StoredMessage
from mqmesh.protocol.membership import ConsumeFromWhere
from mqmesh.sdk.client.options import ClientOptions
from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.producer.send_result import SendFuture
from rows.workload import (
    GROUP,
    TOPIC,
    Report,
    Stopwatch,
    Task,
    hand_in,
    make_bodies,
    read_task,
    wait_go,
)

TAGS: Final = "UA || DL"
SQL: Final = "dep_delay > 60 AND origin IN ('JFK', 'EWR')"
OUTCOME_TIMEOUT_S: Final = 60.0
LISTENER_MESSAGES: Final = 1_024

_CARRIERS: Final = ("UA", "B6", "EV", "DL", "AA", "MQ")
_ORIGINS: Final = ("EWR", "JFK", "LGA")
_DESTINATIONS: Final = ("ATL", "BOS", "FLL", "LAX", "MCO", "ORD", "SFO")


def make_labelled(count: int, body_bytes: int) -> list[Message]:
    """Messages that differ in everything, the same in every run."""
    chance = random.Random(count)
    return [
        Message(
            TOPIC,
            body,
            chance.choice(_CARRIERS),
            (),
            {
                "origin": chance.choice(_ORIGINS),
                "dest": chance.choice(_DESTINATIONS),
                "dep_delay": str(int(chance.expovariate(1 / 25)) - 10),
                "distance": str(chance.randrange(80, 2_600)),
            },
        )
        for body in make_bodies(count, body_bytes)
    ]


def fits(message: Message, expression: str) -> bool:
    """Return whether a message matches an expression of this module; in plain Python."""
    if expression == TAGS:
        return message.tag in ("UA", "DL")
    if expression == SQL:
        delay, origin = message.property("dep_delay"), message.property("origin")
        return delay is not None and int(delay) > 60 and origin in ("JFK", "EWR")
    return True


def produce_labelled(task: Task) -> Report:
    """Explicit batches, a window of them without an outcome."""
    messages = make_labelled(task.batch_messages, task.body_bytes)
    waiting: deque[SendFuture] = deque()
    acknowledged = 0
    client = ClientOptions(use_ipc=task.use_ipc)
    with Producer("bench-producer", namesrv_addr=task.address, client=client) as producer:
        producer.fetch_publish_queues(TOPIC, timeout_ms=10_000)
        wait_go()
        watch = Stopwatch()
        for _ in range(0, task.message_count, task.batch_messages):
            if len(waiting) >= task.window:
                acknowledged += waiting.popleft().result(OUTCOME_TIMEOUT_S).message_count
            waiting.append(producer.send_batch_async(messages))
        acknowledged += sum(one.result(OUTCOME_TIMEOUT_S).message_count for one in waiting)
        faults = [] if acknowledged == task.message_count else [f"{acknowledged} acknowledged"]
        return watch.report(acknowledged, faults=faults)


def drain_labelled(task: Task) -> Report:
    """A push consumer with the task's expression, until it has every message that fits.

    The report counts the messages that were scanned, whether they fit or not.
    """
    messages = make_labelled(task.batch_messages, task.body_bytes)
    each = sum(fits(message, task.expression) for message in messages)
    expected = each * (task.message_count // task.batch_messages)
    lock, done = threading.Lock(), threading.Event()
    watch: Stopwatch | None = None
    report: Report | None = None
    count = wrong = 0

    def listen(messages: Sequence[StoredMessage]) -> ConsumeResult:
        nonlocal watch, report, count, wrong
        with lock:
            if watch is None:
                watch = Stopwatch()
            count += len(messages)
            wrong += not (
                fits(messages[0], task.expression) and fits(messages[-1], task.expression)
            )
            if count >= expected and report is None:
                report = watch.report(task.message_count)
                done.set()
        return ConsumeResult.SUCCESS

    consumer = PushConsumer(
        GROUP,
        namesrv_addr=task.address,
        client=ClientOptions(use_ipc=task.use_ipc),
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        consume_message_batch_max_size=LISTENER_MESSAGES,
    )
    consumer.subscribe(
        TOPIC,
        MessageSelector(expression=task.expression, expression_type=task.expression_type),
        listener=listen,
    )
    wait_go()
    consumer.start()
    done.wait()
    consumer.close()
    assert report is not None
    if count != expected or wrong:
        report.faults = [f"{count} messages instead of {expected}, {wrong} lists with wrong ones"]
    return report


PROGRAMS: Final = {"produce_labelled": produce_labelled, "drain_labelled": drain_labelled}


def main() -> None:
    """Runs the program that the task names."""
    task = read_task()
    hand_in(PROGRAMS[task.kind](task))


if __name__ == "__main__":
    main()
