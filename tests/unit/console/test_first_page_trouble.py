"""Trouble is on the first page within 15 s, without a click: the sampler on fakes, looked at."""

from __future__ import annotations

import pytest
from harness.console import ConsoleWorld, open_console

from mqmesh.console.config import ClusterSource
from mqmesh.console.sampler import ClusterSampler
from mqmesh.metrics import MetricKind
from mqmesh.roles.exporter.families import ExportedMetric, Families, Series
from mqmesh.roles.exporter.names import COMMITTED, DELIVERIES, FAILURES
from mqmesh.testing.clock import ManualClock

REFRESH_MS = 2_000
SHOWS_MS = 15_000
BROKER = {"cluster": "c", "node_type": "broker", "node_id": "broker-a"}


def series(name, value, /, **labels):
    known = BROKER | labels
    metric = ExportedMetric(name, MetricKind.GAUGE, "", tuple(known))
    return Series(metric, tuple(known.values()), value)


def of_group(name, value, /, **labels):
    kept = {"consumer_group": "billing", "topic": "orders", "is_retry": "false"}
    return series(name, value, **(kept | labels))


WELL = [
    series("mqmesh_up", 1, node_type="namesrv", node_id="h:1"),
    series("mqmesh_up", 1),
    series("mqmesh_up", 1, node_type="schedule", node_id="schedule-a"),
    series("mqmesh_store_disk_full", 0),
    series("mqmesh_store_disk_used_ratio", 0.4),
    series("mqmesh_schedule_service_info", 1, value="on"),
    series("rocketmq_consumer_connections", 1, consumer_group="billing"),
]
WAITING = [
    of_group("rocketmq_consumer_lag_messages", 5),
    of_group("rocketmq_consumer_lag_latency_milliseconds", 20_000),
    of_group(COMMITTED, 100),
]
DEAD_SCHEDULE = [series("mqmesh_up", 0, node_type="schedule", node_id="schedule-a")]
NO_SCHEDULE = [
    series("mqmesh_schedule_service_info", 1, value="off"),
    series("rocketmq_timing_messages", 3),
]
FULL = [series("mqmesh_store_disk_full", 1), series("mqmesh_store_disk_used_ratio", 0.99)]
FAILING = [
    series(FAILURES, 20, consumer_group="billing"),
    series(DELIVERIES, 20, consumer_group="billing"),
]


class FakeCollector:
    """Collector whose looks find what a test says."""

    def __init__(self):
        self.found = WELL

    def collect(self):
        return Families(self.found)

    def close(self):
        pass


class Watch:
    """A sampler with its fakes."""

    def __init__(self):
        self.clock, self.collector = ManualClock(), FakeCollector()
        source = ClusterSource(name="c", namesrv_addr=["h:1"])
        self.sampler = ClusterSampler(source, [], REFRESH_MS, self.clock, self.collector)

    def look(self):
        self.sampler.look()
        self.clock.advance(REFRESH_MS)


@pytest.fixture
def watch():
    made = Watch()
    yield made
    made.sampler.stop()


def page_after(watch, trouble):
    """Look for 15 s at a cluster that had been well, and return the first page."""
    changed = {(one.exported.name, one.labels[1:3]) for one in trouble}
    for _ in range(5):
        watch.look()
    watch.collector.found = trouble + [
        one for one in WELL if (one.exported.name, one.labels[1:3]) not in changed
    ]
    for _ in range(0, SHOWS_MS, REFRESH_MS):
        watch.look()
    sampler = watch.sampler
    return open_console(ConsoleWorld(view=sampler.view, readings=sampler.readings)).get("/").text


@pytest.mark.parametrize(
    ("trouble", "alarm", "sentence"),
    [
        (DEAD_SCHEDULE, "process-down", "schedule schedule-a does not answer"),
        (NO_SCHEDULE, "no-schedule-service", "3 delayed messages wait at broker-a"),
        (FULL, "disk-full", "broker-a refuses messages, its disk is full"),
        (FAILING, "group-failing", "listeners of billing fail at 100%"),
        (WAITING, "group-stuck", "billing has members and gets nowhere: 5 messages wait"),
    ],
    ids=["dead schedule", "no schedule", "full disk", "failing group", "stuck queue"],
)
def test_it_is_seen_within_15_s(watch, trouble, alarm, sentence):
    page = page_after(watch, trouble)
    alarms = page.partition('data-test="alarms"')[2].partition("</section>")[0]
    assert f'data-test="alarm-{alarm}"' in alarms
    assert sentence in alarms
    assert page.index('data-test="alarms"') < page.index('data-test="card-processes"')


def test_a_cluster_that_stays_well_has_no_alarm(watch):
    assert 'data-test="alarms"' not in page_after(watch, [])
