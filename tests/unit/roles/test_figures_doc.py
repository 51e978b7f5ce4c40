"""docs/operations.md lists the figures that each role declares."""

from __future__ import annotations

import re

import pytest

from mqmesh.roles.coordinator.registry import REGISTRY_FIGURES
from mqmesh.roles.filtersrv.filter_table import FILTER_FIGURES
from mqmesh.roles.filtersrv.worker_places import WORKER_FIGURES
from mqmesh.roles.index_figures import INDEX_FIGURES
from mqmesh.roles.indexer.queries import QUERY_FIGURES
from mqmesh.roles.namesrv.route_table import ROUTE_FIGURES
from mqmesh.roles.schedule.service import SCHEDULE_FIGURES

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
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([a-z_]+)`", row)]
    assert sorted(named) == sorted(one.figure.name for one in DECLARED[role])
