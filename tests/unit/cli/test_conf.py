"""The files in conf/ show what holds without them."""

from __future__ import annotations

import itertools
import re

import pytest

from mqmesh.cli.processes.layout import load_cluster
from mqmesh.config import key_names, load_config, read_toml
from mqmesh.console.config import ConsoleConfig
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.coordinator.config import CoordinatorConfig
from mqmesh.roles.exporter.config import ExporterConfig
from mqmesh.roles.exporter.monitor_config import MonitorConfig
from mqmesh.roles.filtersrv.config import FiltersrvConfig
from mqmesh.roles.gateway.config import GatewayConfig
from mqmesh.roles.namesrv.config import NamesrvConfig
from mqmesh.roles.schedule.config import ScheduleConfig

ROLES = [
    ("broker.toml", BrokerConfig),
    ("console.toml", ConsoleConfig),
    ("coordinator.toml", CoordinatorConfig),
    ("exporter.toml", ExporterConfig),
    ("filtersrv.toml", FiltersrvConfig),
    ("gateway.toml", GatewayConfig),
    ("monitor.toml", MonitorConfig),
    ("namesrv.toml", NamesrvConfig),
    ("schedule.toml", ScheduleConfig),
]


@pytest.mark.parametrize(("name", "kind"), ROLES)
def test_a_file_says_what_the_struct_says(project_root, name, kind):
    assert load_config(kind, project_root / "conf" / name) == kind()


@pytest.mark.parametrize(("name", "kind"), ROLES)
def test_a_file_lists_every_key_in_the_struct_s_order(project_root, name, kind):
    values = read_toml(project_root / "conf" / name)
    assert sorted(_leaves(values, "")) == sorted(key_names(kind))


@pytest.mark.parametrize(("name", "kind"), ROLES)
def test_every_key_of_a_file_has_a_comment(project_root, name, kind):
    lines = (project_root / "conf" / name).read_text().splitlines()
    bare = [
        line
        for before, line in itertools.pairwise(lines)
        if re.match(r"\w+ = ", line) and not before.startswith("#")
    ]
    assert bare == []


def test_the_cluster_file_is_the_cluster_without_a_file(project_root):
    assert load_cluster(project_root / "conf" / "cluster.toml") == load_cluster(None)


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        ("2m.toml", 2),
        ("2m-2s-async.toml", 4),
        ("2m-2s-sync.toml", 4),
        ("3r-auto.toml", 3),
        ("3r-auto-machine1.toml", 1),
    ],
)
def test_a_layout_of_replicas_is_what_its_name_says(project_root, name, processes):
    config = load_cluster(project_root / "conf" / "ha" / name)
    assert len(config.broker) == processes
    if "auto" in name:
        assert {one.ha.total_replicas for one in config.broker} == {3}


def _leaves(values, prefix):
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key
