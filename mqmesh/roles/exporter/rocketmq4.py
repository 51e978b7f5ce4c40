"""The names of RocketMQ 4's exporter, which its boards query. Pure, except for remembered rates.

Its values are gauges, totals as well. Values that mqmesh does not have, such as those of thread
pools, are 0: a board shows that nothing waits there.
"""

from collections.abc import Hashable, Iterator
from functools import cache
from typing import Final

from mqmesh.message import DLQ_PREFIX, retry_topic
from mqmesh.metrics import Distribution, MetricKind, Readings
from mqmesh.protocol.groups import ConsumerConnection, GroupTopics
from mqmesh.roles.exporter.families import ExportedMetric, Series
from mqmesh.roles.exporter.names import Node, numbers, topics_of, waits_ms
from mqmesh.roles.exporter.rates import DayTotals, Rates

_SEND: Final = "send_message"
_GROUP: Final = ("group", "topic", "countOfOnlineConsumers", "msgModel")
_TOPIC_AND_GROUP: Final = ("cluster", "broker", "topic", "group")
_RUNTIME_LABELS: Final = ("cluster", "brokerIP", "brokerHost", "des", "boottime", "broker_version")
_PUT_TIMES: Final = (
    ("0ms", 1.0),
    ("0to10ms", 10.0),
    ("10to50ms", 50.0),
    ("50to100ms", 100.0),
    ("100to200ms", 200.0),
    ("200to500ms", 500.0),
    ("500to1s", 1_000.0),
    ("1to2s", 2_000.0),
    ("2to3s", 3_000.0),
    ("3to4s", 4_000.0),
    ("4to5s", 5_000.0),
    ("5to10s", 10_000.0),
    ("10stomore", float("inf")),
)
"""Suffixes of ``rocketmq_brokeruntime_pmdt_``, and up to how many ms each counts."""
_ABSENT: Final = (
    "pull_threadpoolqueue_headwait_timemills",
    "query_threadpoolqueue_headwait_timemills",
    "send_threadpoolqueue_headwait_timemills",
    "pull_threadpoolqueue_size",
    "query_threadpoolqueue_size",
    "send_threadpool_queue_size",
    "pagecache_lock_time_mills",
    "remain_transientstore_buffer_numbs",
)


class RocketMQ4Names:
    """Series of brokers and groups under the names of RocketMQ 4's exporter.

    Args:
        rates: Rates of totals.
        days: Totals at midnight.
    """

    def __init__(self, rates: Rates, days: DayTotals) -> None:
        self._rates = rates
        self._days = days

    def broker(self, node: Node, readings: Readings, now_ms: int, wall_ms: int) -> Iterator[Series]:
        """Yield the series of a master.

        Args:
            node: The master.
            readings: Metrics of the process.
            now_ms: Monotonic clock.
            wall_ms: Wall clock.
        """
        yield from self._totals(node, readings)
        yield from self._topics(node, readings, now_ms)
        yield from self._groups(node, readings, now_ms)
        yield from self._runtime(node, readings, wall_ms)

    def _totals(self, node: Node, readings: Readings) -> Iterator[Series]:
        labels = {"cluster": node.cluster, "brokerIP": node.endpoint, "broker": node.broker_name}
        for name, metric in (
            ("rocketmq_broker_tps", "put_messages_per_s"),
            ("rocketmq_broker_qps", "get_messages_per_s"),
        ):
            yield _series(name, "messages a second", readings.number(metric, default=0), labels)

    def _topics(self, node: Node, readings: Readings, now_ms: int) -> Iterator[Series]:
        for name, metric in (
            ("rocketmq_producer_tps", "topic_put_messages_total"),
            ("rocketmq_producer_message_size", "topic_put_bytes_total"),
        ):
            for (topic, *_), total in numbers(readings, metric):
                rate = self._rates.rate((node.endpoint, metric, topic), total, now_ms)
                yield _series(name, "stored a second", rate, _of_topic(node, topic))

    def _groups(self, node: Node, readings: Readings, now_ms: int) -> Iterator[Series]:
        for name, metric in (
            ("rocketmq_consumer_tps", "group_get_messages_total"),
            ("rocketmq_consumer_message_size", "group_get_bytes_total"),
        ):
            for (topic, group, *_), total in numbers(readings, metric):
                rate = self._rates.rate((node.endpoint, metric, topic, group), total, now_ms)
                labels = _of_topic(node, topic) | {"group": group}
                yield _series(name, "handed out a second", rate, labels)

    def _runtime(self, node: Node, readings: Readings, wall_ms: int) -> Iterator[Series]:
        boot_ms = wall_ms - readings.number("uptime_ms", default=0)
        values = (node.cluster, node.endpoint, node.endpoint, node.broker_name)
        labels = dict(
            zip(_RUNTIME_LABELS, (*values, str(int(boot_ms / 1_000)), "mqmesh"), strict=True)
        )

        def series(name: str, value: float) -> Series:
            return _series(f"rocketmq_brokeruntime_{name}", "of a broker", value, labels)

        low = readings.number("store_min_commitlog_offset", default=0)
        high = readings.number("store_max_commitlog_offset", default=0)
        put = readings.number("put_messages_total", default=0)
        put_bytes = readings.number("put_bytes_total", default=0)
        got = readings.number("get_messages_total", default=0)
        put_today, put_yesterday = self._mornings(node, "put", put, wall_ms)
        got_today, got_yesterday = self._mornings(node, "get", got, wall_ms)
        used = readings.number("store_disk_used_percent", default=0) / 100
        put_rate = readings.number("put_messages_per_s", default=0)
        get_rate = readings.number("get_messages_per_s", default=0)
        yield from (
            series("msg_put_total_today_now", put),
            series("msg_puttotal_todaymorning", put_today),
            series("msg_puttotal_yesterdaymorning", put_yesterday),
            series("msg_gettotal_today_now", got),
            series("msg_gettotal_todaymorning", got_today),
            series("msg_gettotal_yesterdaymorning", got_yesterday),
            series("commitlog_minoffset", low),
            series(
                "earliest_message_timestamp", readings.number("store_oldest_timestamp", default=0)
            ),
            series("commitlog_maxoffset", high),
            series("commitlog_disk_ratio", used),
            series("consumequeue_disk_ratio", used),
            series("dispatch_behind_bytes", readings.number("index_lag_bytes", default=0)),
            series(
                "remain_howmanydata_toflush", readings.number("store_flush_behind_bytes", default=0)
            ),
            series("put_message_size_total", put_bytes),
            series("put_message_average_size", put_bytes / max(put, 1)),
            series("putmessage_times_total", readings.number("put_batches_total", default=0)),
            series("put_tps10", put_rate),
            series("getfound_tps10", get_rate),
            series("gettotal_tps10", get_rate),
            series("gettransfered_tps10", get_rate),
        )
        yield from (series(name, 0) for name in _ABSENT)
        yield from (series(f"pmdt_{name}", count) for name, count in put_times(readings))

    def _mornings(
        self, node: Node, what: Hashable, total: float, wall_ms: int
    ) -> tuple[float, float]:
        return self._days.mornings((node.endpoint, what), total, wall_ms)

    def group(self, node: Node, group: GroupTopics, now_ms: int) -> Iterator[Series]:
        """Yield the series of a consumer group on one master.

        Args:
            node: The master.
            group: The master's answer about the group.
            now_ms: Wall clock of the process.
        """
        name = group.group
        own = retry_topic(name)
        of_members = (str(len(group.members)), group.message_model)
        for one in topics_of(group):
            topic = one.topic
            of_group, of_topic = (name, topic, *of_members), _of_topic(node, topic)
            if topic == own:
                yield _gauge("rocketmq_group_retrydiff", _GROUP, of_group, one.lag)
                end = one.max_queue_offset
                yield _series("rocketmq_topic_retry_offset", "end of its queues", end, of_topic)
                continue
            late_ms = waits_ms(one.oldest_timestamp, now_ms)
            with_group = (node.cluster, node.broker_name, topic, name)
            yield _gauge("rocketmq_group_diff", _GROUP, of_group, one.lag)
            yield _series(
                "rocketmq_producer_offset", "end of its queues", one.max_queue_offset, of_topic
            )
            for exported, value in (
                ("rocketmq_consumer_offset", one.consumer_offset),
                ("rocketmq_group_get_latency_by_storetime", late_ms),
            ):
                yield _gauge(exported, _TOPIC_AND_GROUP, with_group, value)
        of_group = (name, DLQ_PREFIX + name, *of_members)
        yield _gauge("rocketmq_group_dlqdiff", _GROUP, of_group, group.dead)
        by_group = (node.cluster, node.broker_name, name)
        labels = ("cluster", "broker", "group")
        yield _gauge("rocketmq_topic_dlq_offset", labels, by_group, group.dead)
        for member in group.members:
            address = (member.client_id, member.client_id, name)
            yield _gauge("rocketmq_group_count", ("caddr", "localaddr", "group"), address, 1)
            yield from _of_member(name, member)


def _of_member(group: str, member: ConsumerConnection) -> Iterator[Series]:
    """Yield the series of a member's last heartbeat; each broker gets the same one."""
    for one in member.stats:
        client = {"clientAddr": member.client_id, "clientId": member.client_id}
        labels = client | {"group": group, "topic": one.topic}
        for name, help, value in (
            ("consume_ok_msg_tps", "messages done a second", one.ok_per_s),
            ("consume_fail_msg_tps", "messages that failed a second", one.failed_per_s),
            ("consume_fail_msg_count", "messages that failed in an hour", one.failed_last_hour),
            ("consume_rt", "ms of a call of the listener", one.handling_ms),
            ("consumer_pull_tps", "messages pulled a second", one.pulled_per_s),
            ("consumer_pull_rt", "ms of a pull that brought some", one.pull_wait_ms),
        ):
            yield _series(f"rocketmq_client_{name}", help, value, labels)


def put_times(readings: Readings) -> Iterator[tuple[str, int]]:
    """Yield the counts of sends by RocketMQ 4's steps of time; mqmesh has fewer steps."""
    counts = dict.fromkeys((name for name, _ in _PUT_TIMES), 0)
    for reading in readings:
        if reading.metric.name != "command_latency_ms":
            continue
        for sample in reading.samples:
            if sample.labels[0] == _SEND and isinstance(sample.value, Distribution):
                bounds = (*sample.value.bounds, float("inf"))
                for bound, count in zip(bounds, sample.value.counts, strict=True):
                    counts[next(name for name, most in _PUT_TIMES if bound <= most)] += count
    yield from counts.items()


def _of_topic(node: Node, topic: str) -> dict[str, str]:
    return {"cluster": node.cluster, "broker": node.broker_name, "topic": topic}


@cache
def _exported(name: str, labels: tuple[str, ...]) -> ExportedMetric:
    return ExportedMetric(name, MetricKind.GAUGE, "of a consumer group", labels)


def _gauge(name: str, labels: tuple[str, ...], values: tuple[str, ...], value: float) -> Series:
    return Series(_exported(name, labels), values, value)


def _series(name: str, help: str, value: float, labels: dict[str, str]) -> Series:
    exported = ExportedMetric(name, MetricKind.GAUGE, help, tuple(labels))
    return Series(exported, tuple(labels.values()), value)
