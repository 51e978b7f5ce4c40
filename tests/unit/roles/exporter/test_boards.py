"""Boards and alert rules ask only for what is told, and each alarm fires."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from harness.prometheus import promtool

from mqmesh.roles.broker.all_features import FEATURES
from mqmesh.roles.broker.ha.member.ha_metrics import MEMBER_METRICS
from mqmesh.roles.broker.index.index_status import INDEX_PROCESS_METRICS
from mqmesh.roles.broker.replica_metrics import COUNT_METRICS, REPLICA_METRICS
from mqmesh.roles.dispatch import METRICS as COMMAND_METRICS
from mqmesh.roles.exporter.names import COMMITTED, DELIVERIES, FAILURES, exported_as_own
from mqmesh.roles.schedule.service import SCHEDULE_METRICS
from mqmesh.roles.shell import _CONNECTION_METRICS, _PROCESS_METRICS
from mqmesh.roles.store_metrics import STORE_METRICS
from mqmesh.security.guard import METRICS as GUARD_METRICS

METRICS = (
    *(one for feature in FEATURES for one in feature.metrics),
    *STORE_METRICS,
    *SCHEDULE_METRICS,
    *INDEX_PROCESS_METRICS,
    *MEMBER_METRICS,
    *COUNT_METRICS,
    *REPLICA_METRICS,
    *COMMAND_METRICS,
    *_CONNECTION_METRICS,
    *_PROCESS_METRICS,
    *GUARD_METRICS,
)

# What raises each alarm, beside labels that all have.
TROUBLE = {
    "MqmeshProcessDown": {"mqmesh_up": "0x60"},
    "MqmeshExporterDown": {},
    "MqmeshDiskFilling": {"mqmesh_store_disk_used_ratio": "0.9x60"},
    "MqmeshDiskFull": {"mqmesh_store_disk_full": "1x60"},
    "MqmeshCarryHeavy": {"mqmesh_table_log_ratio": "0.3x60"},
    "MqmeshTableDamaged": {"mqmesh_table_unreadable_values": "1x60"},
    "MqmeshStoreNotWritable": {"mqmesh_store_writable": "0x60"},
    "MqmeshMessagesLostUnread": {"mqmesh_forced_lost_messages_total": "0+1x60"},
    "MqmeshGroupBehind": {
        "rocketmq_consumer_lag_messages": "20000x60",
        "rocketmq_consumer_lag_latency_milliseconds": "70000x60",
    },
    "MqmeshGroupStuck": {
        "rocketmq_consumer_lag_messages": "1x60",
        "rocketmq_consumer_connections": "1x60",
        "mqmesh_consumer_offset": "5x60",
    },
    "MqmeshGroupFailing": {
        "mqmesh_group_recent_failures": "6x60",
        "mqmesh_group_recent_deliveries": "10x60",
    },
    "MqmeshGroupPaused": {"mqmesh_group_paused": "1x1000"},
    "MqmeshGroupWithoutMembers": {"rocketmq_consumer_lag_messages": "1x60"},
    "MqmeshMixedSubscriptions": {"mqmesh_group_differing_members": "1x60"},
    "MqmeshDeadLetters": {"rocketmq_send_to_dlq_messages_total": "0+1x60"},
    "MqmeshMessageHeld": {"mqmesh_delivery_oldest_lease_seconds": "3601x60"},
    "MqmeshLeasesExpiring": {"mqmesh_delivery_expired_total": "0+600x60"},
    "MqmeshHalfMessagesWaiting": {"mqmesh_half_messages_oldest_seconds": "301x60"},
    "MqmeshHalfMessagesParked": {"mqmesh_half_messages_parked": "1x60"},
    "MqmeshDelaysLate": {"rocketmq_timer_dequeue_latency": "6000x60"},
    "MqmeshNoScheduleService": {
        "rocketmq_timing_messages": "3x60",
        "mqmesh_schedule_service_info": "1x60",
    },
    "MqmeshBusy": {"mqmesh_refusals_total": "0+600x60"},
    "MqmeshNoPermission": {"mqmesh_refusals_total": "0+600x60"},
    "MqmeshIndexBehind": {"mqmesh_index_lag_seconds": "61x60"},
    "MqmeshArchiveBehind": {"mqmesh_snapshots_waiting_oldest_seconds": "3601x60"},
    "MqmeshReplicaBehind": {"mqmesh_ha_replica_silent_seconds": "11x60"},
    "MqmeshUnsafeAnswers": {"mqmesh_unsafe_answers_total": "0+1x60"},
    "MqmeshNoFailover": {"mqmesh_ha_coordinator_up": "0x60"},
    "MqmeshBugSurvived": {"mqmesh_callback_failures_total": "0+1x60"},
}
CODES = {"MqmeshBusy": "system_busy", "MqmeshNoPermission": "no_permission"}
NODE = 'cluster="c",node_type="broker",node_id="a"'
LABELS = (
    f'{NODE},consumer_group="g",is_retry="false",'
    'response_code="%s",send_status="flush_disk_timeout",replica="1",topic="t",value="off"'
)

# Totals that come with their first events, and what their process tells meanwhile.
EVENTS = {
    "MqmeshDeadLetters": ("rocketmq_send_to_dlq_messages_total", "rocketmq_broker_permission", 1),
    "MqmeshUnsafeAnswers": ("mqmesh_unsafe_answers_total", "mqmesh_uptime_seconds", 1),
    "MqmeshNoPermission": ("mqmesh_refusals_total", "mqmesh_uptime_seconds", 11),
}
# Their values each 15 s, those of what is told meanwhile, and how many alarms are on in the end.
COURSES = {
    "the first events": ("_x43 {0}x2", "1x45", 1),
    "the first events of a process that began anew": ("{0}x39 stale _x2 {0}x2", "1x45", 1),
    "old events": ("{0}x45", "1x45", 0),
    "old events of a process that was away": ("{0}x39 stale _x2 {0}x2", "1x39 stale _x2 1x2", 0),
    "old events, seen by a new Prometheus": ("_x43 {0}x2", "_x43 1x2", 0),
}


@pytest.fixture(scope="module")
def boards(project_root: Path) -> Path:
    return project_root / "mqmesh/roles/exporter/boards"


def test_every_name_that_is_asked_for_is_told(boards, project_root):
    told = {one.metric.rocketmq_name or exported_as_own(one.metric)[0].name for one in METRICS}
    # Those that are no metrics; a process test looks for each of them.
    lines = (project_root / "tests" / "data" / "rocketmq-metrics.txt").read_text().splitlines()
    told |= {line.split()[0] for line in lines}
    told |= {"mqmesh_up", "mqmesh_group_differing_members", COMMITTED, DELIVERIES, FAILURES}
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
    tests = []
    for alarm, told in TROUBLE.items():
        labels = LABELS % CODES.get(alarm, "-")
        series = {f"{name}{{{labels}}}": values for name, values in told.items()}
        at = "4h5m" if alarm == "MqmeshGroupPaused" else "14m"
        tests.append(firing(alarm, series or {"other": "1x60"}, at, 1))
    check(boards, tests, tmp_path)


def test_a_total_that_comes_with_its_first_events_is_growth_and_one_that_is_only_seen_first_is_not(
    boards, tmp_path
):
    tests = []
    for alarm, (total, beside, count) in EVENTS.items():
        labels = LABELS % CODES.get(alarm, "-")
        for values, meanwhile, is_on in COURSES.values():
            series = {
                f"{total}{{{labels}}}": values.format(count),
                f"{beside}{{{NODE}}}": meanwhile,
            }
            tests.append(firing(alarm, series, "11m15s", is_on))
    check(boards, tests, tmp_path)


def test_a_group_is_stuck_while_its_offsets_stand_still(boards, tmp_path):
    tests = []
    labels = LABELS % "-"
    for values, is_on in ("5x60", 1), ("0x60", 1), ("0+1x60", 0), ("100-1x60", 0):
        told = TROUBLE["MqmeshGroupStuck"] | {"mqmesh_consumer_offset": values}
        series = {f"{name}{{{labels}}}": course for name, course in told.items()}
        tests.append(firing("MqmeshGroupStuck", series, "14m", is_on))
    check(boards, tests, tmp_path)


def test_connections_without_a_good_key_are_requests_without_permission(boards, tmp_path):
    series = {f"mqmesh_refused_connections_total{{{NODE}}}": "0+5x60"}
    check(boards, [firing("MqmeshNoPermission", series, "14m", 1)], tmp_path)


def firing(alarm: str, series: dict[str, str], at: str, count: int) -> dict[str, object]:
    """A test of promtool: so many alarms of a name are on."""
    samples = [{"labels": "{}", "value": count}] if count else []
    return {
        "interval": "15s",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alarm}",alertstate="firing"}})',
                "eval_time": at,
                "exp_samples": samples,
            }
        ],
    }


def check(boards: Path, tests: list[dict[str, object]], folder: Path) -> None:
    """Lets promtool try the rules."""
    rules = [str(boards / "mqmesh.rules.yml")]
    document = {"rule_files": rules, "evaluation_interval": "15s", "tests": tests}
    (folder / "test.yml").write_text(json.dumps(document))
    said = promtool("test", "rules", str(folder / "test.yml"))
    assert said.startswith("0\n"), said
