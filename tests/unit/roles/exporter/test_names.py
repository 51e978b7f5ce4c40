"""Metrics under the names that Prometheus gets."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mqmesh.metrics import Distribution, Metric, MetricKind, MetricReading, MetricSample, Readings
from mqmesh.protocol.groups import ConsumerConnection, GroupFailures, GroupTopics, TopicProgress
from mqmesh.protocol.membership import ConsumerData, TopicConsumption
from mqmesh.roles.exporter.families import Families
from mqmesh.roles.exporter.names import (
    Node,
    broker_series,
    exported_as_own,
    group_series,
    metric_series,
)
from mqmesh.roles.exporter.page import text_of
from mqmesh.roles.exporter.rates import DayTotals, Rates
from mqmesh.roles.exporter.rocketmq4 import RocketMQ4Names, put_times

NODE = Node("c", "broker", "broker-a", "127.0.0.1:10911", True, "broker-a")


def reading(name, value, kind=MetricKind.GAUGE, unit="", labels=(), exported=""):
    samples = value if isinstance(value, list) else [MetricSample((), value)]
    return MetricReading(Metric(name, kind, unit, "what it is", labels, exported), samples)


def values_of(series):
    """What a parser reads of the text: values by name and labels, without those that all have."""
    common = {"cluster", "node_type", "node_id", "otel_scope_name"}
    return {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k not in common)): (
            sample.value
        )
        for family in text_string_to_metric_families(text_of(Families(series)).decode())
        for sample in family.samples
    }


@pytest.mark.parametrize(
    ("metric", "name", "scale"),
    [
        (Metric("topics", MetricKind.GAUGE, "", ""), "mqmesh_topics", 1),
        (Metric("uptime_ms", MetricKind.GAUGE, "ms", ""), "mqmesh_uptime_seconds", 1_000),
        (
            Metric("command_spent_ms_total", MetricKind.COUNTER, "ms", ""),
            "mqmesh_command_spent_seconds_total",
            1_000,
        ),
        (Metric("used_percent", MetricKind.GAUGE, "percent", ""), "mqmesh_used_ratio", 100),
        (Metric("put_bytes_per_s", MetricKind.GAUGE, "", ""), "mqmesh_put_bytes_per_second", 1),
        (
            Metric("store_duplicates", MetricKind.COUNTER, "", ""),
            "mqmesh_store_duplicates_total",
            1,
        ),
        (Metric("ha_role", MetricKind.TEXT, "", ""), "mqmesh_ha_role_info", 1),
    ],
)
def test_our_own_names_are_in_base_units(metric, name, scale):
    exported, divisor = exported_as_own(metric)
    assert (exported.name, divisor) == (name, scale)


def test_values_come_out_as_prometheus_reads_them():
    latency = Distribution((1.0, 5.0), (2, 3, 1), 40.0)
    found = values_of(
        metric_series(
            NODE,
            Readings(
                [
                    reading("uptime_ms", 2_500, unit="ms"),
                    reading("ha_role", 'MA"STER\n', MetricKind.TEXT),
                    reading("wait_ms", latency, MetricKind.HISTOGRAM, "ms"),
                    reading(
                        "topic_put_messages_total",
                        [MetricSample(("orders", "normal", "false"), 7)],
                        MetricKind.COUNTER,
                        labels=("topic", "message_type", "is_system"),
                        exported="rocketmq_messages_in_total",
                    ),
                ]
            ),
        )
    )
    assert found == {
        ("mqmesh_uptime_seconds",): 2.5,
        ("mqmesh_ha_role_info", 'MA"STER\n'): 1,
        ("mqmesh_wait_seconds_bucket", "0.001"): 2,
        ("mqmesh_wait_seconds_bucket", "0.005"): 5,
        ("mqmesh_wait_seconds_bucket", "+Inf"): 6,
        ("mqmesh_wait_seconds_count",): 6,
        ("mqmesh_wait_seconds_sum",): 0.04,
        ("rocketmq_messages_in_total", "false", "normal", "orders"): 7,
    }


def test_what_rocketmq_tells_of_a_broker():
    decided = [MetricSample(("commit", "orders"), 4), MetricSample(("rollback", "orders"), 1)]
    found = values_of(
        broker_series(
            NODE,
            Readings(
                [
                    reading("held_pulls", 9),
                    reading("wiped_write_perm", True),
                    reading("half_messages_ended_total", decided, labels=("decision", "topic")),
                    reading("store_oldest_timestamp", 4_000),
                ]
            ),
            9_500,
        )
    )
    assert found["rocketmq_storage_message_reserve_time_milliseconds", "disk", "local"] == 5_500
    assert found["rocketmq_processor_watermark", "pull"] == 9
    assert found["rocketmq_broker_permission",] == 4
    assert found["rocketmq_commit_messages_total", "orders"] == 4
    assert found["rocketmq_rollback_messages_total", "orders"] == 1


MEMBER = ConsumerConnection(
    "client-1",
    "PYTHON",
    "0.1",
    True,
    5,
    ConsumerData("billing", "CLUSTERING", "LAST", []),
    stats=[TopicConsumption("billing", "orders", 5.0, 1.0, 7, 2.5, 9.0, 40.0)],
)
BILLING = GroupTopics(
    "billing",
    [
        TopicProgress("%RETRY%billing", 3, 1, 7, 0, 1_000, 1_000, 5),
        TopicProgress("orders", 150, 140, 10, 5, 300, 900),
    ],
    [MEMBER],
    "CLUSTERING",
    2,
    3,
    GroupFailures(60, 45, 0.075),
)


def test_a_group_by_the_names_of_rocketmq_5():
    found = values_of(group_series(NODE, BILLING, 1_000))
    orders = ("billing", "false", "false", "orders")
    assert found[("rocketmq_consumer_lag_messages", *orders)] == 10
    assert found[("rocketmq_consumer_inflight_messages", *orders)] == 5
    assert found[("rocketmq_consumer_ready_messages", *orders)] == 5
    assert found[("rocketmq_consumer_lag_latency_milliseconds", *orders)] == 700
    assert found[("rocketmq_consumer_queueing_latency_milliseconds", *orders)] == 100
    assert found[("mqmesh_consumer_offset", *orders)] == 140
    retry = ("billing", "true", "true", "%RETRY%billing")
    assert found[("rocketmq_consumer_lag_messages", *retry)] == 7
    assert found[("rocketmq_consumer_ready_messages", *retry)] == 2
    assert found["mqmesh_group_waiting_retries", "billing"] == 5
    assert found["mqmesh_group_dead_messages", "billing"] == 2
    assert found["mqmesh_group_recent_deliveries", "billing"] == 60
    assert found["mqmesh_group_recent_failures", "billing"] == 45
    assert found["mqmesh_group_failures_per_second", "billing"] == 0.075
    dead = ("billing", "false", "%DLQ%billing")
    assert found[("rocketmq_send_to_dlq_messages_total", *dead)] == 3
    assert found["mqmesh_group_differing_members", "billing"] == 0
    other = msgspec.structs.replace(MEMBER, difference="topic orders: 'a' instead of '*'")
    mixed = msgspec.structs.replace(BILLING, members=[MEMBER, other])
    told = values_of(group_series(NODE, mixed, 1_000))
    assert told["mqmesh_group_differing_members", "billing"] == 1
    kind = ("clustering", "billing", "false", "python", "zmq", "0.1")
    assert found[("rocketmq_consumer_connections", *kind)] == 1


def test_a_group_by_the_names_of_rocketmq_4():
    names = RocketMQ4Names(Rates(), DayTotals())
    found = values_of(names.group(NODE, BILLING, 1_000))
    assert found["rocketmq_group_diff", "1", "billing", "CLUSTERING", "orders"] == 10
    assert found["rocketmq_group_retrydiff", "1", "billing", "CLUSTERING", "%RETRY%billing"] == 7
    assert found["rocketmq_group_dlqdiff", "1", "billing", "CLUSTERING", "%DLQ%billing"] == 2
    assert found["rocketmq_consumer_offset", "broker-a", "billing", "orders"] == 140
    assert found["rocketmq_producer_offset", "broker-a", "orders"] == 150
    assert found["rocketmq_group_count", "client-1", "billing", "client-1"] == 1
    told = ("client-1", "client-1", "billing", "orders")
    of_client = {name: value for (name, *labels), value in found.items() if (*labels,) == told}
    assert of_client == {
        "rocketmq_client_consume_ok_msg_tps": 5.0,
        "rocketmq_client_consume_fail_msg_tps": 1.0,
        "rocketmq_client_consume_fail_msg_count": 7,
        "rocketmq_client_consume_rt": 2.5,
        "rocketmq_client_consumer_pull_tps": 9.0,
        "rocketmq_client_consumer_pull_rt": 40.0,
    }


def test_a_broker_by_the_names_of_rocketmq_4():
    names = RocketMQ4Names(Rates(), DayTotals())

    def told(total, now_ms):
        put = reading("topic_put_messages_total", [MetricSample(("orders", "normal", "f"), total)])
        readings = Readings([put, reading("put_messages_total", total)])
        return values_of(names.broker(NODE, readings, now_ms, wall_ms=now_ms))

    told(100, 0)
    found = told(300, 2_000)
    assert found["rocketmq_producer_tps", "broker-a", "orders"] == 100
    start, now = "msg_puttotal_todaymorning", "msg_put_total_today_now"
    by_name = {key[0].removeprefix("rocketmq_brokeruntime_"): value for key, value in found.items()}
    assert (by_name[start], by_name[now]) == (100, 300)


def test_times_of_sends_go_into_the_steps_that_rocketmq_4_has():
    took = Distribution((0.25, 5.0, 100.0), (4, 3, 2, 1), 0.0)
    told = [MetricSample(("send_message", "false"), took), MetricSample(("ping", "false"), took)]
    counts = dict(put_times(Readings([reading("command_latency_ms", told)])))
    assert {name: count for name, count in counts.items() if count} == {
        "0ms": 4,
        "0to10ms": 3,
        "50to100ms": 2,
        "10stomore": 1,
    }
