"""docs/operations.md lists the figures that each role declares."""

from __future__ import annotations

import re

import pytest

from mqmesh.roles.broker.all_features import FEATURES
from mqmesh.roles.broker.ha.member.chronicle import MEMBER_FIGURES
from mqmesh.roles.broker.replica_figures import COUNT_FIGURES, REPLICA_FIGURES
from mqmesh.roles.coordinator.registry import REGISTRY_FIGURES
from mqmesh.roles.filtersrv.filter_table import FILTER_FIGURES
from mqmesh.roles.filtersrv.worker_places import WORKER_FIGURES
from mqmesh.roles.index_figures import INDEX_FIGURES
from mqmesh.roles.indexer.queries import QUERY_FIGURES
from mqmesh.roles.namesrv.route_table import ROUTE_FIGURES
from mqmesh.roles.schedule.service import SCHEDULE_FIGURES
from mqmesh.sdk.consumer.consume_figures import LISTENER_FIGURES, PULL_FIGURES
from mqmesh.sdk.hooks import HOOK_FIGURES
from mqmesh.sdk.producer.requests import REQUEST_FIGURES
from mqmesh.sdk.producer.sender import SEND_FIGURES
from mqmesh.sdk.tracing.trace_dispatcher import TRACE_FIGURES

DECLARED = {
    "Name server": ROUTE_FIGURES,
    "Schedule service": SCHEDULE_FIGURES,
    "Filter server": (*FILTER_FIGURES, *WORKER_FIGURES),
    "Index process": (*INDEX_FIGURES, *QUERY_FIGURES),
    "Coordinator": REGISTRY_FIGURES,
}


@pytest.mark.parametrize("role", DECLARED)
def test_the_figures_of_a_role_are_documented(project_root, role):
    document = (project_root / "docs" / "operations.md").read_text()
    section = document.partition(f"### {role}\n")[2].partition("\n#")[0]
    assert named_in(section) == sorted(one.figure.name for one in DECLARED[role])


def test_the_figures_of_replicas_are_documented(project_root):
    document = (project_root / "docs" / "high-availability.md").read_text()
    section = document.partition("\n## Figures\n")[2].partition("\n## ")[0]
    of_masters = [one for feature in FEATURES for one in feature.metrics]
    declared = (*of_masters, *REPLICA_FIGURES, *COUNT_FIGURES, *MEMBER_FIGURES)
    names = [one.figure.name for one in declared if one.figure.name.startswith("ha_")]
    assert len(set(names)) == len(names), "all of them are of one process"
    assert named_in(section) == sorted([*names, "unsafe_answers_total"])


def test_the_figures_of_clients_are_documented(project_root):
    document = (project_root / "docs" / "metrics.md").read_text()
    section = document.partition("\n## Figures of clients\n")[2].partition("\n## ")[0]
    of_producers = (*SEND_FIGURES, *REQUEST_FIGURES)
    of_both = (*TRACE_FIGURES, *HOOK_FIGURES)
    declared = (*of_producers, *PULL_FIGURES, *LISTENER_FIGURES, *of_both)
    assert named_in(section) == sorted(one.figure.name for one in declared)


def named_in(section):
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    return sorted(name for row in rows for name in re.findall(r"`([a-z_]+)`", row))
