"""Messages of high priority behind many of low priority.

Run as ``python -m rows.priorities TASK``. The value is how long a message of the highest priority
takes from its send until a member has it.
"""

import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from mqmesh.message import Message
from mqmesh.protocol.groups import GroupConfig
from mqmesh.protocol.route import TopicConfig
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.client.options import ClientOptions
from mqmesh.sdk.consumer.simple_consumer import SimpleConsumer
from rows.producers import bench_producer
from rows.workload import GROUP, Report, Stopwatch, Task, hand_in, read_task, wait_go

TOPIC: Final = "bench-priorities"
PRIORITIES: Final = 8
HIGHEST: Final = PRIORITIES - 1
SENDS: Final = 500
SEND_EVERY_S: Final = 0.02
MOST: Final = 32
"""Messages of one receive."""
FAIRNESS: Final = 10
FAIR_RECEIVES: Final = 1_000

_STAMP = struct.Struct("<d")


def high_priority(task: Task) -> Report:
    """Messages of the highest priority, one each 20 ms, while a member works off a backlog."""
    _make(task, fairness=0)
    _fill(task, 0, task.message_count)
    latencies: list[float] = []
    inversions = 0
    enough = threading.Event()

    def work(consumer: SimpleConsumer) -> None:
        nonlocal inversions
        while not enough.is_set():
            found = consumer.receive(MOST, wait_ms=500)
            now_s = time.monotonic()
            order = [one.priority for one in found]
            inversions += order != sorted(order, reverse=True)
            for one in found:
                if one.priority == HIGHEST:
                    latencies.append((now_s - _STAMP.unpack(one.body)[0]) * 1e6)
            consumer.ack_many(found)
            if len(latencies) >= SENDS:
                enough.set()

    with _consumer(task) as consumer, bench_producer(task) as producer:
        wait_go()
        watch = Stopwatch()
        thread = threading.Thread(target=work, args=(consumer,))
        thread.start()
        for number in range(SENDS):
            time.sleep(max(watch.begin_s + number * SEND_EVERY_S - time.monotonic(), 0))
            producer.send(Message(TOPIC, _STAMP.pack(time.monotonic())), priority=HIGHEST)
        enough.wait(60)
        enough.set()
        thread.join()
    faults = [f"{inversions} receives out of order"] if inversions else []
    return watch.report(len(latencies), latencies_us=latencies, faults=faults)


def fair_priority(task: Task) -> Report:
    """Receives with ``priority_fairness``, with a backlog of the highest and the lowest priority.

    The latencies are the share of the lowest, in percent.
    """
    _make(task, fairness=FAIRNESS)
    _fill(task, 0, FAIR_RECEIVES)
    _fill(task, HIGHEST, FAIR_RECEIVES * 2)
    met: Counter[int] = Counter()
    with _consumer(task) as consumer:
        wait_go()
        watch = Stopwatch()
        while met.total() < FAIR_RECEIVES:
            found = consumer.receive(1, wait_ms=500)
            met.update(one.priority for one in found)
            consumer.ack_many(found)
    share = 100 * met[0] / met.total()
    return watch.report(met.total(), latencies_us=[share])


def _make(task: Task, fairness: int) -> None:
    with GroupAdmin(task.address) as admin:
        admin.create_topic(TopicConfig(TOPIC, PRIORITIES, PRIORITIES, priorities=PRIORITIES))
        admin.create_group(GroupConfig(GROUP, delivery="message", priority_fairness=fairness))


def _consumer(task: Task) -> SimpleConsumer:
    client = ClientOptions(use_ipc=task.use_ipc)
    consumer = SimpleConsumer(GROUP, namesrv_addr=task.address, client=client)
    consumer.subscribe(TOPIC)
    return consumer


def _fill(task: Task, priority: int, count: int) -> None:
    bodies = [b"x" * task.body_bytes] * min(task.batch_messages, count)
    with bench_producer(task) as producer:
        producer.fetch_publish_queues(TOPIC, timeout_ms=10_000)
        for _ in range(count // len(bodies)):
            producer.send_batch([Message(TOPIC, body) for body in bodies], priority=priority)


PROGRAMS: Final[dict[str, Callable[[Task], Report]]] = {
    "high_priority": high_priority,
    "fair_priority": fair_priority,
}


def main() -> None:
    """Runs the program that the task names."""
    task = read_task()
    hand_in(PROGRAMS[task.kind](task))


if __name__ == "__main__":
    main()
