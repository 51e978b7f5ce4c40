"""Retention by topic: what readers see of queues whose topic lives shorter than the log.

Nothing is removed by it: whole segments go, by the broker's own retention. The first offset that
readers see is computed, by each replica for itself, from its log, the topic's settings and the
time. In topics without a retention nothing is computed.
"""

from typing import Final

from mqmesh.clock import Clock
from mqmesh.roles.broker.topic_state.topic_table import Topic, TopicTable
from mqmesh.storage.interface import MessageStore
from mqmesh.units import QueueOffset, TimestampMs

LOOK_MS: Final = 10_000
"""A topic's age is looked at so often: messages are seen so much longer at most."""


def shown_bounds(
    store: MessageStore, topics: TopicTable, clock: Clock, name: str, queue_id: int
) -> tuple[QueueOffset, QueueOffset]:
    """Return where a queue begins for readers, and where it ends.

    Args:
        store: Holds the queue.
        topics: Settings of topics.
        clock: Source of time.
        name: Physical topic; one that is not known has no retention.
        queue_id: Message queue.
    """
    low, high = store.queue_bounds(name, queue_id)
    topic = topics.get(name)
    if topic is None or not topic.retains:
        return low, high
    first = _first_shown(store, topic, queue_id, high, clock.wall_ms())
    return QueueOffset(max(low, min(first, high))), high


def _first_shown(store: MessageStore, topic: Topic, queue_id: int, high: int, now_ms: int) -> int:
    config = topic.config
    first = high - config.retention_messages if config.retention_messages else 0
    if not config.retention_ms:
        return first
    looked_ms, by_age = topic.shown.get(queue_id, (0, 0))
    # The wall clock may be set back.
    if not looked_ms <= now_ms < looked_ms + LOOK_MS:
        oldest_ms = TimestampMs(max(now_ms - config.retention_ms, 0))
        by_age = store.offset_by_time(config.topic, queue_id, oldest_ms)
        topic.shown[queue_id] = now_ms, by_age
    return max(first, by_age)
