"""docs/operations.md lists the metrics that each role declares."""

from __future__ import annotations

import re

import pytest

from mqmesh.roles.broker.all_features import FEATURES
from mqmesh.roles.broker.ha.member.ha_metrics import MEMBER_METRICS
from mqmesh.roles.broker.replica_metrics import COUNT_METRICS, REPLICA_METRICS
from mqmesh.roles.coordinator.registry import REGISTRY_METRICS
from mqmesh.roles.filtersrv.filter_table import FILTER_METRICS
from mqmesh.roles.filtersrv.worker_places import WORKER_METRICS
from mqmesh.roles.index_metrics import INDEX_METRICS
from mqmesh.roles.indexer.queries import QUERY_METRICS
from mqmesh.roles.namesrv.route_table import ROUTE_METRICS
from mqmesh.roles.schedule.service import SCHEDULE_METRICS
from mqmesh.sdk.consumer.consume_metrics import LISTENER_METRICS, PULL_METRICS
from mqmesh.sdk.hooks import HOOK_METRICS
from mqmesh.sdk.producer.requests import REQUEST_METRICS
from mqmesh.sdk.producer.sender import SEND_METRICS
from mqmesh.sdk.tracing.trace_dispatcher import TRACE_METRICS

DECLARED = {
    "Name server": ROUTE_METRICS,
    "Schedule service": SCHEDULE_METRICS,
    "Filter server": (*FILTER_METRICS, *WORKER_METRICS),
    "Index process": (*INDEX_METRICS, *QUERY_METRICS),
    "Coordinator": REGISTRY_METRICS,
}


@pytest.mark.parametrize("role", DECLARED)
def test_the_metrics_of_a_role_are_documented(project_root, role):
    document = (project_root / "docs" / "operations.md").read_text()
    section = document.partition(f"### {role}\n")[2].partition("\n#")[0]
    assert named_in(section) == sorted(one.metric.name for one in DECLARED[role])


def test_the_metrics_of_replicas_are_documented(project_root):
    document = (project_root / "docs" / "high-availability.md").read_text()
    section = document.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    of_masters = [one for feature in FEATURES for one in feature.metrics]
    declared = (*of_masters, *REPLICA_METRICS, *COUNT_METRICS, *MEMBER_METRICS)
    names = [one.metric.name for one in declared if one.metric.name.startswith("ha_")]
    assert len(set(names)) == len(names), "all of them are of one process"
    assert named_in(section) == sorted([*names, "unsafe_answers_total"])


def test_the_metrics_of_clients_are_documented(project_root):
    document = (project_root / "docs" / "metrics.md").read_text()
    section = document.partition("\n## Metrics of clients\n")[2].partition("\n## ")[0]
    of_producers = (*SEND_METRICS, *REQUEST_METRICS)
    of_both = (*TRACE_METRICS, *HOOK_METRICS)
    declared = (*of_producers, *PULL_METRICS, *LISTENER_METRICS, *of_both)
    assert named_in(section) == sorted(one.metric.name for one in declared)


def named_in(section):
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    return sorted(name for row in rows for name in re.findall(r"`([a-z_]+)`", row))
