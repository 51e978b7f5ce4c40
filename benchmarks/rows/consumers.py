"""The programs of a benchmark that consume through mqmesh, as a user would write them.

Run as ``python -m rows.consumers TASK``.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Final

from mqmesh.message import StoredMessage
from mqmesh.protocol.membership import ConsumeFromWhere
from mqmesh.sdk.client.options import ClientOptions
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from rows.workload import (
    GROUP,
    Report,
    SequenceCheck,
    Stopwatch,
    Task,
    age_us,
    hand_in,
    read_task,
    topic_names,
    wait_go,
)

LISTENER_MESSAGES: Final = 1_024
"""Most messages that a listener gets in one call."""
WARM_UP_TIMEOUT_S: Final = 60.0


def drain(task: Task) -> Report:
    """A push consumer with a listener, until it has every message."""
    return consume(task)


def drain_paced(task: Task) -> Report:
    """The same, and how old each message was."""
    return consume(task, take_ages=True)


def consume(
    task: Task,
    *,
    take_ages: bool = False,
    read: Callable[[Sequence[StoredMessage]], None] | None = None,
) -> Report:
    """A push consumer, until it has every message.

    Args:
        task: Says how many.
        take_ages: Report how old each message was.
        read: Reads each message; raises ValueError for what is wrong with one.
    """
    seen = SequenceCheck()
    latencies_us: list[float] = []
    lock = threading.Lock()
    warm, done = threading.Event(), threading.Event()
    total = task.ready_count + task.message_count
    watch: Stopwatch | None = None
    last: Report | None = None
    broken: list[str] = []

    def listen(messages: Sequence[StoredMessage]) -> ConsumeResult:
        nonlocal watch, last
        with lock:
            if watch is None and seen.count >= task.ready_count:
                watch = Stopwatch()
            try:
                seen.add_messages(messages)
                if read is not None and watch is not None:
                    read(messages)  # those of the warm-up are plain
            except ValueError as error:
                broken.append(str(error))
            if take_ages and watch is not None:
                latencies_us.extend([age_us(message.body) for message in messages])
            if seen.count >= task.ready_count:
                warm.set()
            if seen.count >= total and watch is not None and last is None:
                last = watch.report(seen.count - task.ready_count)
                done.set()
        return ConsumeResult.SUCCESS

    consumer = PushConsumer(
        GROUP,
        namesrv_addr=task.address,
        client=ClientOptions(use_ipc=task.use_ipc),
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        consume_message_batch_max_size=LISTENER_MESSAGES,
        msg_trace=task.msg_trace,
    )
    for topic in topic_names(task.topic_count):
        consumer.subscribe(topic, listener=listen)
    if task.ready_count == 0:
        wait_go()
        consumer.start()
    else:
        # It must hold its queues before the producer begins.
        consumer.start()
        if not warm.wait(WARM_UP_TIMEOUT_S):
            sys.exit("the messages of the warm-up did not come")
        wait_go()
    done.wait()
    with lock:
        assert last is not None
        last.latencies_us = latencies_us[-task.message_count :]
        last.faults = broken + seen.faults(total)
    consumer.close()
    return last


PROGRAMS: Final = {"drain": drain, "drain_paced": drain_paced}


def main() -> None:
    """Runs the program that the task names."""
    task = read_task()
    hand_in(PROGRAMS[task.kind](task))


if __name__ == "__main__":
    main()
