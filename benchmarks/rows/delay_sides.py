"""Sides of the rows about delayed messages: how late they come, how quickly a backlog goes."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

from mqmesh.message import Message
from mqmesh.metrics import Readings
from mqmesh.protocol.membership import ConsumeFromWhere
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.client.options import ClientOptions
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.units import MIB
from rows.processes import BenchError, Child, Crew
from rows.sides import RUN_TIMEOUT_S, Cluster, Conditions, Load, Sample, new_crew
from rows.workload import TOPIC, percentile

RATE: Final = 1_000
"""Messages that are due in a second."""
PENDING_TOPIC: Final = "bench-pending"
HOUR_MS: Final = 3_600_000
HEAD_START_MS: Final = 2_000
"""For sending what is due, before the first of it is."""
_LOOK_S: Final = 0.02
_WINDOW: Final = 16


def product_delay_drain(load: Load, conditions: Conditions) -> Sample:
    """Starts the schedule service with everything overdue; the value is messages a second.

    The timetable is made in that time, too: the service sees all of it for the first time.
    """
    with new_crew(conditions) as crew:
        cluster = Cluster(crew, load, conditions)
        count = conditions.count(load.messages, load.batch_messages)
        _send(cluster, load, conditions, TOPIC, iter([_wall_ms()] * count))
        before = cluster.child.usage()
        service, began_s = _start_service(crew, cluster, conditions), time.monotonic()
        _wait(lambda: _stored(cluster) >= count, "the backlog is not drained")
        seconds = time.monotonic() - began_s
        cluster.check_stored(count)
        cpu_s = cluster.child.usage().cpu_s - before.cpu_s
        sample = Sample(value=count / seconds, message_count=count)
        sample.cpu_s_per_million = {
            "broker": cpu_s * 1e6 / count,
            "schedule": service.usage().cpu_s * 1e6 / count,
        }
        sample.extra["service_rss_peak_mib"] = service.usage().peak_rss_bytes / MIB
        return cluster.memory(sample)


def product_delay_accuracy(load: Load, seconds: int, conditions: Conditions) -> Sample:
    """Messages that are due one a millisecond, beside many that are due much later.

    Each batch holds messages of many times. The value is the 99th percentile of how late
    they reach a consumer, in ms; ``load.messages`` is how many wait all the while.
    """
    with new_crew(conditions) as crew:
        cluster = Cluster(crew, load, conditions)
        chance = random.Random(load.messages)
        pending = conditions.count(load.messages, load.batch_messages)
        far_ms = _wall_ms() + HOUR_MS
        times = (far_ms + chance.randrange(HOUR_MS) for _ in range(pending))
        _send(cluster, load, conditions, PENDING_TOPIC, times)
        service = _start_service(crew, cluster, conditions)
        _wait(lambda: _pending(cluster) >= pending, "the service does not get ready")
        count = conditions.count(RATE * seconds, load.batch_messages)
        first_ms = _wall_ms() + HEAD_START_MS
        due = [first_ms + number * 1_000 // RATE for number in range(count)]
        chance.shuffle(due)
        options = ClientOptions(use_ipc=conditions.transport == "ipc")
        with PullConsumer(
            "bench-group",
            namesrv_addr=cluster.namesrv,
            client=options,
            consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        ) as consumer:
            consumer.subscribe(TOPIC)
            consumer.poll(100)
            _send(cluster, load, conditions, TOPIC, iter(due))
            if _wall_ms() >= first_ms:
                raise BenchError("the messages were due before they were sent")
            before, service_before = cluster.child.usage(), service.usage()
            lateness_ms = _take_lateness(consumer, count)
            after, service_after = cluster.child.usage(), service.usage()
        sample = Sample(value=percentile(lateness_ms, 99.0), message_count=count)
        sample.cpu_s_per_million = {
            "broker": (after.cpu_s - before.cpu_s) * 1e6 / count,
            "schedule": (service_after.cpu_s - service_before.cpu_s) * 1e6 / count,
        }
        for percent in (0.0, 50.0, 99.0, 100.0):
            sample.extra[f"late_p{percent:g}_ms"] = percentile(lateness_ms, percent)
        sample.extra["service_rss_peak_mib"] = service_after.peak_rss_bytes / MIB
        sample.extra["service_restart_ms"] = _restart_ms(
            crew, cluster, conditions, service, pending
        )
        return cluster.memory(sample)


def _start_service(crew: Crew, cluster: Cluster, conditions: Conditions) -> Child:
    ipc = conditions.transport == "ipc"
    settings = [
        f'namesrv_addr=["{cluster.namesrv}"]',
        f"store_path_root_dir={crew.folder}/schedule",
        f"use_ipc={str(ipc).lower()}",
    ]
    return crew.role("schedule", settings)[0]


def _restart_ms(
    crew: Crew, cluster: Cluster, conditions: Conditions, service: Child, pending: int
) -> float:
    """Kills the service; the time until another one serves all that waits."""
    sessions = _figures(cluster).number("schedule_sessions")
    service.kill()
    began_s = time.monotonic()
    _start_service(crew, cluster, conditions)
    _wait(
        lambda: (
            _figures(cluster).number("schedule_sessions") > sessions
            and _pending(cluster) >= pending
        ),
        "the service does not come back",
    )
    return (time.monotonic() - began_s) * 1_000


def _send(
    cluster: Cluster, load: Load, conditions: Conditions, topic: str, due_ms: Iterator[int]
) -> None:
    body = bytes(load.body_bytes)
    options = ClientOptions(use_ipc=conditions.transport == "ipc")
    with Producer("bench-producers", namesrv_addr=cluster.namesrv, client=options) as producer:
        futures = []
        while batch := [
            Message(topic, body, deliver_at_ms=at) for at in islice(due_ms, load.batch_messages)
        ]:
            futures.append(producer.send_batch_async(batch))
            if len(futures) >= _WINDOW:
                futures.pop(0).result()
        for future in futures:
            future.result()


def _take_lateness(consumer: PullConsumer, count: int) -> Sequence[float]:
    """How late so many messages came, in ms.

    Raises:
        BenchError: One came early, or they do not come.
    """
    lateness_ms: list[float] = []
    deadline_s = time.monotonic() + RUN_TIMEOUT_S
    while len(lateness_ms) < count:
        if time.monotonic() > deadline_s:
            raise BenchError(f"only {len(lateness_ms)} of {count} delayed messages came")
        messages = consumer.poll(100, 1_024)
        now_ms = time.time_ns() / 1e6
        lateness_ms += [now_ms - message.deliver_at_ms for message in messages]
    if min(lateness_ms) < 0:
        raise BenchError(f"a message came {-min(lateness_ms):.0f} ms early")
    return lateness_ms


def _stored(cluster: Cluster) -> int:
    with AdminClient(cluster.namesrv) as admin:
        (stats,) = admin.topic_stats(TOPIC).values()
    return sum(queue.max_queue_offset - queue.min_queue_offset for queue in stats.queues)


def _pending(cluster: Cluster) -> int:
    return int(_figures(cluster).number("schedule_pending"))


def _figures(cluster: Cluster) -> Readings:
    with AdminClient(cluster.namesrv) as admin:
        (figures,) = admin.runtime_info().values()
    return figures


def _wait(condition: Callable[[], bool], complaint: str) -> None:
    deadline_s = time.monotonic() + RUN_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise BenchError(f"{complaint} after {RUN_TIMEOUT_S:.0f} s")
        time.sleep(_LOOK_S)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
