"""Metrics under the names that Prometheus gets: RocketMQ 5's where it has one, else our own. Pure.

RocketMQ's names are spelt as its broker 5.3.3 exposes them; all others begin with ``mqmesh_`` and
are in base units, as Prometheus wants it.
"""

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from mqmesh.message import TRANS_HALF_TOPIC, dlq_topic, is_system_topic, retry_topic
from mqmesh.metrics import Distribution, Metric, MetricKind, MetricValue, Readings
from mqmesh.protocol.groups import GroupTopics, TopicProgress
from mqmesh.roles.exporter.families import ExportedMetric, Series

OWN: Final = "mqmesh_"
COMMITTED: Final = "mqmesh_consumer_offset"
DELIVERIES: Final = "mqmesh_group_recent_deliveries"
FAILURES: Final = "mqmesh_group_recent_failures"
NODE_LABELS: Final = ("cluster", "node_type", "node_id")
SCOPE: Final = ("otel_scope_name", "broker-meter")
"""A label that RocketMQ's exporter adds; boards may ask for it."""
_CONSTANTS: Final = {
    "rocketmq_storage_": (("storage_type", "local"), ("storage_medium", "disk")),
    "rocketmq_rpc_": (("protocol_type", "zmq"), ("result", "success")),
    "rocketmq_producer_connections": (("protocol_type", "zmq"),),
    "rocketmq_consumer_connections": (("protocol_type", "zmq"),),
}
_UNITS: Final = {"ms": ("seconds", 1_000.0), "percent": ("ratio", 100.0)}
_PER_SECOND = re.compile(r"_per_s\Z")

_GAUGE, _COUNTER = MetricKind.GAUGE, MetricKind.COUNTER
_GROUP_LABELS: Final = ("topic", "consumer_group", "is_retry", "is_system")


class Node(msgspec.Struct, frozen=True):
    """A queried process.

    Attributes:
        cluster: Name of its cluster.
        node_type: ``broker``, ``namesrv``, …
        node_id: Name of the broker group, of a replica with its number; an address for others.
        endpoint: Endpoint of the process.
        is_leader: The process is the master of its group.
        broker_name: Group of a broker.
    """

    cluster: str
    node_type: str
    node_id: str
    endpoint: str
    is_leader: bool = False
    broker_name: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """Values of ``NODE_LABELS``."""
        return (self.cluster, self.node_type, self.node_id)


def exported_as_own(metric: Metric) -> tuple[ExportedMetric, float]:
    """Return a metric as exported under our own name, and the divisor of its values."""
    name, scale = metric.name, 1.0
    if metric.unit in _UNITS:
        unit, scale = _UNITS[metric.unit]
        name = re.sub(rf"_{metric.unit}(_|\Z)", rf"_{unit}\1", name)
    name = OWN + _PER_SECOND.sub("_per_second", name)
    labels = metric.labels
    if metric.kind is MetricKind.TEXT:
        name, labels = f"{name}_info", ("value",)
    if metric.kind is MetricKind.COUNTER and not name.endswith("_total"):
        name += "_total"
    kind = MetricKind.GAUGE if metric.kind is MetricKind.TEXT else metric.kind
    return ExportedMetric(name, kind, metric.help, NODE_LABELS + labels), scale


def exported_as_rocketmq(metric: Metric) -> tuple[ExportedMetric, tuple[str, ...]]:
    """Return a metric as exported under RocketMQ 5's name, with its constant labels."""
    return _rocketmq(metric.rocketmq_name, metric.kind, metric.help, metric.labels)


def _rocketmq(
    name: str, kind: MetricKind, help: str, labels: tuple[str, ...]
) -> tuple[ExportedMetric, tuple[str, ...]]:
    constants = next((pairs for start, pairs in _CONSTANTS.items() if name.startswith(start)), ())
    names = (*NODE_LABELS, SCOPE[0], *(key for key, _ in constants), *labels)
    return ExportedMetric(name, kind, help, names), (SCOPE[1], *(value for _, value in constants))


def metric_series(node: Node, readings: Readings) -> Iterator[Series]:
    """Yield all metrics of a process."""
    for reading in readings:
        metric = reading.metric
        if metric.rocketmq_name:
            exported, constants = exported_as_rocketmq(metric)
            scale = 1.0
        else:
            (exported, scale), constants = exported_as_own(metric), ()
        for sample in reading.samples:
            labels, value = sample.labels, sample.value
            if isinstance(value, str):
                labels, value = (value,), 1
            yield Series(exported, (*node.labels, *constants, *labels), _scaled(value, scale))


def _scaled(value: MetricValue, scale: float) -> float | Distribution:
    assert not isinstance(value, str)
    if not isinstance(value, Distribution):
        return value / scale
    if scale == 1.0:
        return value
    bounds = tuple(bound / scale for bound in value.bounds)
    return Distribution(bounds, value.counts, value.total / scale)


def broker_series(node: Node, readings: Readings, wall_ms: int) -> Iterator[Series]:
    """Yield the series that RocketMQ 5 has of a broker beside single metrics.

    Args:
        node: A master.
        readings: Metrics of the process.
        wall_ms: Wall clock.
    """

    def series(
        name: str, kind: MetricKind, help: str, value: float, **labels: str
    ) -> Iterator[Series]:
        exported, constants = _rocketmq(name, kind, help, tuple(labels))
        yield Series(exported, (*node.labels, *constants, *labels.values()), value)

    drained = readings.number("wiped_write_perm", default=0)
    yield from series("rocketmq_broker_permission", _GAUGE, "4 read, 2 write", 4 if drained else 6)
    waits = {
        "pull": "held_pulls",
        "send": "sync_flush_waits",
        "transaction": "half_messages_parked",
    }
    for processor, name in waits.items():
        help = "requests that wait"
        value = readings.number(name, default=0)
        yield from series("rocketmq_processor_watermark", _GAUGE, help, value, processor=processor)
    age_ms = waits_ms(readings.number("store_oldest_timestamp", default=0), wall_ms)
    kept = "rocketmq_storage_message_reserve_time_milliseconds"
    yield from series(kept, _GAUGE, "age of the oldest message", age_ms)
    pending = readings.number("half_messages_pending", default=0)
    yield from series(
        "rocketmq_half_messages", _GAUGE, "undecided", pending, topic=TRANS_HALF_TOPIC
    )
    for (decision, topic), value in numbers(readings, "half_messages_ended_total"):
        name = f"rocketmq_{decision}_messages_total"
        yield from series(name, _COUNTER, "half messages by end", value, topic=topic)


def numbers(readings: Readings, name: str) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the values of a metric with labels, if there is such a metric."""
    for reading in readings:
        if reading.metric.name == name:
            for sample in reading.samples:
                if not isinstance(sample.value, str | Distribution):
                    yield sample.labels, sample.value


def group_series(node: Node, group: GroupTopics, now_ms: int) -> Iterator[Series]:
    """Yield the series of a consumer group on one broker: RocketMQ 5's, and differing members.

    Args:
        node: The broker.
        group: The broker's answer about the group.
        now_ms: Wall clock of the process.
    """
    for one in topics_of(group):
        is_retry = one.topic == retry_topic(group.group)
        labels = (
            one.topic,
            group.group,
            _bool_text(is_retry),
            _bool_text(is_system_topic(one.topic)),
        )
        values = (
            one.lag,
            one.in_flight,
            one.lag - one.in_flight - one.waiting,
            waits_ms(one.oldest_timestamp, now_ms),
            waits_ms(one.ready_timestamp, now_ms),
        )
        for (exported, constants), value in zip(_OF_GROUPS, values, strict=True):
            yield Series(exported, (*node.labels, *constants, *labels), value)
        yield Series(_COMMITTED, (*node.labels, *labels), one.consumer_offset)
        if is_retry:
            yield Series(_WAITING, (*node.labels, group.group), one.waiting)
    if group.dead_letters:
        exported, constants = _DEAD_LETTERS
        of_group = (group.group, dlq_topic(group.group), "false")
        yield Series(exported, (*node.labels, *constants, *of_group), group.dead_letters)
    if group.members:
        differing = sum(bool(one.difference) for one in group.members)
        yield Series(_DIFFERING, (*node.labels, group.group), differing)
        for of_failures, number in zip(
            _OF_FAILURES, msgspec.structs.astuple(group.failures), strict=True
        ):
            yield Series(of_failures, (*node.labels, group.group), number)
    yield Series(_DEAD, (*node.labels, group.group), group.dead)
    kinds: dict[tuple[str, ...], int] = {}
    is_system = _bool_text(is_system_topic(group.group))
    for member in group.members:
        model = member.data.message_model.lower()
        own = (group.group, member.language.lower(), member.version, model, is_system)
        kinds[own] = kinds.get(own, 0) + 1
    exported, constants = _CONNECTIONS
    for kind, count in kinds.items():
        yield Series(exported, (*node.labels, *constants, *kind), count)


def topics_of(group: GroupTopics) -> list[TopicProgress]:
    """Return the topics of a group; nothing waits in a retry topic that was not needed yet."""
    own = retry_topic(group.group)
    if any(one.topic == own for one in group.topics):
        return group.topics
    return [TopicProgress(own, 0, 0, 0), *group.topics]


def waits_ms(timestamp: float, now_ms: int) -> float:
    """Return how long something has been waiting, ms; 0 where nothing waits."""
    return max(now_ms - timestamp, 0) if timestamp else 0


def _bool_text(truth: bool) -> str:
    return "true" if truth else "false"


_OF_GROUPS: Final = tuple(
    _rocketmq(f"rocketmq_consumer_{name}", _GAUGE, help, _GROUP_LABELS)
    for name, help in (
        ("lag_messages", "messages that are not done"),
        ("inflight_messages", "of them, handed out"),
        ("ready_messages", "of them, not handed out"),
        ("lag_latency_milliseconds", "how long the oldest has been waiting"),
        ("queueing_latency_milliseconds", "the same of the oldest that was not handed out"),
    )
)
_WAITING: Final = ExportedMetric(
    "mqmesh_group_waiting_retries",
    _GAUGE,
    "messages that failed and wait for their retry",
    (*NODE_LABELS, "consumer_group"),
)
_DEAD: Final = ExportedMetric(
    "mqmesh_group_dead_messages",
    _GAUGE,
    "messages in the dead letters",
    (*NODE_LABELS, "consumer_group"),
)
_OF_FAILURES: Final = tuple(
    ExportedMetric(name, _GAUGE, help, (*NODE_LABELS, "consumer_group"))
    for name, help in (
        (DELIVERIES, "messages that came to listeners in the last ten minutes, each time"),
        (FAILURES, "of them, messages whose listener failed"),
        ("mqmesh_group_failures_per_second", "the same, a second"),
    )
)
_COMMITTED: Final = ExportedMetric(
    COMMITTED, _GAUGE, "sum of the committed offsets", NODE_LABELS + _GROUP_LABELS
)
_DEAD_LETTERS: Final = _rocketmq(
    "rocketmq_send_to_dlq_messages_total",
    _COUNTER,
    "messages that became dead letters",
    ("consumer_group", "topic", "is_system"),
)
_DIFFERING: Final = ExportedMetric(
    "mqmesh_group_differing_members",
    _GAUGE,
    "members that subscribe differently from their group",
    (*NODE_LABELS, "consumer_group"),
)
_CONNECTIONS: Final = _rocketmq(
    "rocketmq_consumer_connections",
    _GAUGE,
    "members of a consumer group",
    ("consumer_group", "language", "version", "consume_mode", "is_system"),
)
