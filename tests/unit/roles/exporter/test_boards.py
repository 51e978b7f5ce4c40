"""Boards and alert rules ask only for what is told, and each alarm fires."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from harness.prometheus import promtool

from mqmesh.roles.broker.all_features import FEATURES
from mqmesh.roles.broker.ha.member.chronicle import MEMBER_FIGURES
from mqmesh.roles.broker.ha.replica_figures import COUNT_FIGURES, REPLICA_FIGURES
from mqmesh.roles.broker.index.index_status import INDEX_PROCESS_FIGURES
from mqmesh.roles.broker.store_figures import STORE_FIGURES
from mqmesh.roles.dispatch import FIGURES as COMMAND_FIGURES
from mqmesh.roles.exporter.names import own_metric
from mqmesh.roles.schedule.service import SCHEDULE_FIGURES
from mqmesh.roles.shell import _CONNECTION_FIGURES, _PROCESS_FIGURES

FIGURES = (
    *(one for feature in FEATURES for one in feature.figures),
    *STORE_FIGURES,
    *SCHEDULE_FIGURES,
    *INDEX_PROCESS_FIGURES,
    *MEMBER_FIGURES,
    *COUNT_FIGURES,
    *REPLICA_FIGURES,
    *COMMAND_FIGURES,
    *_CONNECTION_FIGURES,
    *_PROCESS_FIGURES,
)

# What raises each alarm, beside labels that all have.
TROUBLE = {
    "MqmeshProcessDown": {"mqmesh_up": "0x60"},
    "MqmeshExporterDown": {},
    "MqmeshDiskFilling": {"mqmesh_store_disk_used_ratio": "0.9x60"},
    "MqmeshDiskFull": {"mqmesh_store_disk_full": "1x60"},
    "MqmeshStoreNotWritable": {"mqmesh_store_writable": "0x60"},
    "MqmeshMessagesLostUnread": {"mqmesh_forced_lost_messages_total": "0+1x60"},
    "MqmeshGroupBehind": {
        "rocketmq_consumer_lag_messages": "20000x60",
        "rocketmq_consumer_lag_latency_milliseconds": "70000x60",
    },
    "MqmeshGroupStuck": {
        "rocketmq_consumer_lag_messages": "1x60",
        "rocketmq_consumer_connections": "1x60",
        "rocketmq_messages_out_total": "5x60",
    },
    "MqmeshGroupWithoutMembers": {"rocketmq_consumer_lag_messages": "1x60"},
    "MqmeshDeadLetters": {"rocketmq_send_to_dlq_messages_total": "0+1x60"},
    "MqmeshHalfMessagesParked": {"mqmesh_half_messages_parked": "1x60"},
    "MqmeshDelaysLate": {"rocketmq_timer_dequeue_latency": "6000x60"},
    "MqmeshNoScheduleService": {
        "rocketmq_timing_messages": "3x60",
        "mqmesh_schedule_service_info": "1x60",
    },
    "MqmeshBusy": {"mqmesh_refusals_total": "0+600x60"},
    "MqmeshIndexBehind": {"mqmesh_index_lag_seconds": "61x60"},
    "MqmeshReplicaBehind": {"mqmesh_ha_replica_silent_seconds": "11x60"},
    "MqmeshUnsafeAnswers": {"mqmesh_unsafe_answers_total": "0+1x60"},
    "MqmeshNoFailover": {"mqmesh_ha_coordinator_up": "0x60"},
    "MqmeshBugSurvived": {"mqmesh_callback_failures_total": "0+1x60"},
}
LABELS = (
    'cluster="c",node_type="broker",node_id="a",consumer_group="g",is_retry="false",'
    'response_code="system_busy",send_status="flush_disk_timeout",replica="1",topic="t",value="off"'
)


@pytest.fixture(scope="module")
def boards(project_root: Path) -> Path:
    return project_root / "mqmesh/roles/exporter/boards"


def test_every_name_that_is_asked_for_is_told(boards, project_root):
    told = {one.figure.metric or own_metric(one.figure)[0].name for one in FIGURES}
    # Those that are no figures; a process test looks for each of them.
    lines = (project_root / "tests" / "data" / "rocketmq-metrics.txt").read_text().splitlines()
    told |= {line.split()[0] for line in lines}
    told |= {"mqmesh_up"}
    asked = {
        name.removesuffix("_bucket")
        for path in boards.iterdir()
        for name in re.findall(r"\b(?:mqmesh|rocketmq)_[a-z_]+", path.read_text())
    }
    assert asked - told == set()
    assert len(asked) > 25


def test_boards_have_no_data_source_of_their_own(boards):
    for path in boards.glob("*.json"):
        text = path.read_text()
        sources = set(re.findall(r'"uid": "([^"]*)"', text))
        assert sources == {"${datasource}"}
        panels = json.loads(text)["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)


def test_each_alarm_fires(boards, tmp_path):
    rules = boards / "mqmesh.rules.yml"
    (group,) = yaml.safe_load(rules.read_text())["groups"]
    assert [rule["alert"] for rule in group["rules"]] == list(TROUBLE)
    tests = [
        {
            "interval": "15s",
            "input_series": [
                {"series": f"{name}{{{LABELS}}}", "values": values}
                for name, values in series.items()
            ]
            or [{"series": "other", "values": "1x60"}],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alarm}",alertstate="firing"}})',
                    "eval_time": "14m",
                    "exp_samples": [{"labels": "{}", "value": 1}],
                }
            ],
        }
        for alarm, series in TROUBLE.items()
    ]
    document = {"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": tests}
    (tmp_path / "test.yml").write_text(json.dumps(document))
    said = promtool("test", "rules", str(tmp_path / "test.yml"))
    assert said.startswith("0\n"), said
