"""Metrics of consumers: their pulls, and the calls of their listeners."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

from mqmesh.metrics import LabelValues, Measured, counter, gauge
from mqmesh.sdk.consumer.consumer_engine import ConsumerEngine
from mqmesh.sdk.consumer.fetching.pull_loop import PullLoop, QueueSink
from mqmesh.sdk.consumer.listening.consume_service import ConsumeService


def _by_topic(
    engine: ConsumerEngine[Any], count: Callable[[QueueSink, PullLoop], int]
) -> dict[LabelValues, int]:
    found: dict[LabelValues, int] = defaultdict(int)
    for queue, one in engine.assigned.copy().items():
        if one.sink is not None and one.loop is not None:
            found[queue.topic,] += count(one.sink, one.loop)
    return found


def _unpulled(sink: QueueSink, loop: PullLoop) -> int:
    return max(loop.max_offset - sink.next_offset, 0)


PULL_METRICS: Final[tuple[Measured[ConsumerEngine[Any]], ...]] = (
    counter("pulls_total", "answers to pulls", lambda engine: engine.counters.pulls),
    counter(
        "pulled_messages_total",
        "messages received",
        lambda engine: engine.counters.messages,
        unit="messages",
    ),
    counter(
        "pull_failures_total",
        "pulls without a usable answer",
        lambda engine: engine.counters.failures,
    ),
    counter(
        "corrupt_batches_total",
        "batches that failed their checks",
        lambda engine: engine.counters.corrupt_batches,
    ),
    counter(
        "offsets_moved_total",
        "times that a broker did not hold the offset that was due",
        lambda engine: engine.counters.offsets_moved,
    ),
    counter(
        "replica_pulls_total",
        "answers of followers, to which their masters had sent this consumer",
        lambda engine: engine.counters.replica_pulls,
    ),
    gauge("assigned_queues", "queues that this member has", lambda engine: len(engine.assigned)),
    gauge(
        "cached_messages",
        "messages pulled and not done; of a pull consumer, not polled",
        lambda engine: {(topic,): one[0] for topic, one in engine.held().items()},
        unit="messages",
        labels=("topic",),
        rocketmq_name="rocketmq_consumer_cached_messages",
    ),
    gauge(
        "cached_bytes",
        "about how many bytes these have, as stored",
        lambda engine: {(topic,): one[1] for topic, one in engine.held().items()},
        labels=("topic",),
        rocketmq_name="rocketmq_consumer_cached_bytes",
    ),
    gauge(
        "unpulled_messages",
        "messages behind what was pulled, as of the last answers",
        lambda engine: _by_topic(engine, _unpulled),
        unit="messages",
        labels=("topic",),
    ),
)
LISTENER_METRICS: Final[tuple[Measured[ConsumeService], ...]] = (
    counter(
        "listener_calls_total",
        "calls of listeners that were begun",
        lambda service: service.calls,
    ),
    counter(
        "listener_failures_total",
        "calls of listeners that failed",
        lambda service: service.failures,
    ),
    counter(
        "listener_time_ms_total",
        "time that workers were with listeners, all together, up to their last turns' ends",
        lambda service: service.busy_ns / 1_000_000,
    ),
)
