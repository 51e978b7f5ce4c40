"""A real Prometheus looks at a cluster through the exporter."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from harness.metrics_scene import CONSUMED, STEPS, TOPIC, MetricsScene, MetricsTraffic
from harness.patience import PATIENCE_S, until
from harness.prometheus import Prometheus, promtool
from harness.rocketmq import families, golden_families

from mqmesh.errors import MessageIllegal
from mqmesh.sdk.admin.group_admin import GroupAdmin

BOARDS = Path("mqmesh/roles/exporter/boards")
LABELS = {"Cluster": "c", "Env": "test"}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MetricsScene]:
    with closing(MetricsScene(tmp_path_factory.mktemp("m"))) as scene:
        yield scene


@pytest.fixture(scope="module")
def traffic(
    scene: MetricsScene, tmp_path_factory: pytest.TempPathFactory, project_root: Path
) -> Iterator[MetricsTraffic]:
    with closing(MetricsTraffic(scene.namesrv_addr, tmp_path_factory.mktemp("o"))) as traffic:
        wanted = golden_families(project_root).keys()
        until(lambda: wanted <= families(scene.page()).keys())
        refused = pytest.raises(MessageIllegal, match="members")
        with GroupAdmin(scene.namesrv_addr) as admin, refused:
            admin.delete_group("billing")
        yield traffic


@pytest.fixture(scope="module")
def prometheus(
    scene: MetricsScene,
    traffic: MetricsTraffic,
    tmp_path_factory: pytest.TempPathFactory,
    project_root: Path,
) -> Iterator[Prometheus]:
    rules = project_root / BOARDS / "mqmesh.rules.yml"
    folder = tmp_path_factory.mktemp("p")
    with closing(Prometheus(folder, scene.target, rules, LABELS)) as prometheus:
        yield prometheus


def names_of_rocketmqs_boards(project_root: Path) -> tuple[list[list[str]], set[str]]:
    """Names with the labels that they must have; and those that mqmesh has not."""
    lines = (project_root / "tests" / "data" / "rocketmq-metrics.txt").read_text().splitlines()
    told = [line.split() for line in lines if not line.startswith(("#", "-"))]
    return told, {line.split()[1] for line in lines if line.startswith("-")}


def of_rocketmqs_boards(project_root: Path) -> list[str]:
    """An expression for each name that they ask for, which has all of the labels that they use."""
    fixed = [f'{name}="{value}"' for name, value in LABELS.items()]
    found = []
    for name, *labels in names_of_rocketmqs_boards(project_root)[0]:
        chosen = ",".join([*fixed, *(f'{label}=~".+"' for label in labels)])
        found.append(f"sum by ({','.join(labels)}) ({name}{{{chosen}}})")
    of_day = "rocketmq_brokeruntime_msg"
    ends, done = "sum by (topic) (rocketmq_producer_offset)", "(rocketmq_consumer_offset)"
    lag = "sum by (group, topic) (rocketmq_group_diff)"
    return [
        *found,
        # What they subtract has the same labels.
        f"{of_day}_put_total_today_now - {of_day}_puttotal_todaymorning",
        f"{of_day}_puttotal_todaymorning - {of_day}_puttotal_yesterdaymorning",
        f"{of_day}_gettotal_today_now - {of_day}_gettotal_todaymorning",
        f"{of_day}_gettotal_todaymorning - {of_day}_gettotal_yesterdaymorning",
        "rocketmq_brokeruntime_commitlog_maxoffset - rocketmq_brokeruntime_commitlog_minoffset",
        f"{ends} - on (topic) group_right sum by (group, topic) {done}",
        # Those that look for less than 0 and for more than 100,000 find nothing where all is well.
        f"{lag} >= 0 and {lag} <= 100000",
    ]


def of_our_boards(project_root: Path) -> list[str]:
    """What our boards ask for, with all of their variables' values."""
    found = [
        target["expr"]
        for path in sorted((project_root / BOARDS).glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    ]
    return [re.sub(r"\$[a-z]+", ".*", one) for one in found]


@pytest.mark.timeout(600)
def test_whatever_boards_ask_for_has_a_series_all_the_time(prometheus, project_root, pytestconfig):
    theirs, ours = of_rocketmqs_boards(project_root), of_our_boards(project_root)
    assert len(theirs) > 80
    assert len(ours) > 30
    for expression in *theirs, *ours:
        until(lambda expression=expression: prometheus.query(expression))
    began_s, lasts_s = prometheus.scraped_s(), pytestconfig.getoption("metrics_seconds")
    until(lambda: prometheus.scraped_s() >= began_s + lasts_s, lasts_s + PATIENCE_S)
    until_s = began_s + lasts_s
    gaps = {one: prometheus.gaps(one, began_s, until_s) for one in (*theirs, *ours)}
    assert {one: found for one, found in gaps.items() if found} == {}
    assert prometheus.gaps("mqmesh_unknown", began_s, until_s), "it does look"
    assert set(prometheus.rules().values()) == {"ok"}


def test_what_boards_ask_for_in_vain_the_documentation_gives_a_reason_for(
    scene, traffic, project_root
):
    text = (project_root / "docs" / "metrics.md").read_text()
    (table,) = re.findall(r"^\| absent, whatever boards ask for \|.*\n((?:\|.*\n)+)", text, re.M)
    absent = names_of_rocketmqs_boards(project_root)[1]
    assert set(re.findall(r"`(rocketmq_\w+)`", table)) == absent
    assert absent & families(scene.page()).keys() == set()


def test_names_and_labels_are_those_of_a_real_broker_of_rocketmq(scene, traffic, project_root):
    golden = golden_families(project_root)
    told = families(scene.page())
    assert {name: told.get(name) for name in golden} == golden


def documented_names(project_root: Path) -> tuple[list[str], list[str]]:
    """What the tables of RocketMQ's names say: patterns of what is told, and of what is not."""
    text = (project_root / "docs" / "metrics.md").read_text()
    section = text.partition("\n## Names\n")[2].partition("\n| absent, whatever ")[0]
    told: list[str] = []
    absent: list[str] = []
    for names, remark in re.findall(r"^\| (.*`.*) \| (.*) \|$", section, re.M):
        found = absent if remark.startswith("absent") else told
        for name in re.findall(r"`((?:rocketmq_|…)[^`]*)`", names):
            pattern = re.escape(name).replace("…", r"\w*")
            found.append(
                re.sub(r"\\{(.*)\\}", lambda one: f"({one[1].replace(',', '|')})", pattern)
            )
    return told, absent


def test_all_names_of_rocketmq_that_are_told_are_documented_and_the_other_way_round(
    scene, traffic, project_root
):
    told, absent = documented_names(project_root)
    names = re.findall(r"^# TYPE (rocketmq_\w+) ", scene.page(), re.M)
    assert [one for one in names if not any(re.fullmatch(known, one) for known in told)] == []
    assert [one for one in told if not any(re.fullmatch(one, name) for name in names)] == []
    assert [one for one in absent if any(re.fullmatch(one, name) for name in names)] == []


def test_our_own_names_are_as_prometheus_wants_them(scene, traffic):
    said = promtool("check", "metrics", text=scene.page().encode())
    told = [line for line in said.splitlines()[1:] if not line.startswith("rocketmq_")]
    assert told == []
    promtool_knows = "rocketmq_group_diff label names"
    assert promtool_knows in said, "it does look"


def test_the_alert_rules_are_evaluated_and_a_process_that_dies_raises_one(scene, prometheus):
    until(lambda: prometheus.query("mqmesh_up") and not prometheus.query("mqmesh_up == 0"))
    assert "MqmeshProcessDown" not in prometheus.firing()
    scene.kill_follower()
    until(lambda: "MqmeshProcessDown" in prometheus.firing())
    (target,) = prometheus.targets()
    assert target["health"] == "up", "one that does not answer hides nobody"


def test_totals_and_lag_are_those_that_clients_counted_and_administrators_see(scene, traffic):
    seen = traffic.finish()
    delayed = seen["sent late"] + seen["sent weak"] + seen["sent dead"]
    # What clients need not wait for.
    until(lambda: _value(scene.page(), "rocketmq_half_messages") == 0)
    until(lambda: _value(scene.page(), "rocketmq_timer_dequeue_total") == delayed)
    with GroupAdmin(scene.namesrv_addr) as admin:
        until(lambda: admin.progress("billing").lag == 0 == admin.progress("packing").lag)
        progress = {
            (group, topic): admin.progress(group, topic).lag
            for group, topic in (("billing", TOPIC), ("packing", STEPS), ("slow", TOPIC))
        }
        (readings,) = admin.runtime_info().values()
    told = scene.page()
    commits, rollbacks = seen["sent commit"], seen["sent rollback"]
    orders = sum(seen[f"sent {kind}"] for kind in (*CONSUMED, "dead"))
    retries = delayed - seen["sent late"]
    assert progress["slow", TOPIC] == orders
    for (group, topic), lag in progress.items():
        of_group = f'topic="{topic}",consumer_group="{group}"'
        assert _value(told, "rocketmq_consumer_lag_messages", of_group) == lag
        assert _value(told, "rocketmq_group_diff", f'group="{group}",topic="{topic}"') == lag
    for name, labels, count in (
        ("rocketmq_messages_in_total", f'topic="{TOPIC}"', orders),
        ("rocketmq_messages_in_total", f'topic="{STEPS}"', seen["sent step"]),
        ("rocketmq_messages_in_total", 'topic="%RETRY%billing"', retries),
        ("rocketmq_send_to_dlq_messages_total", 'group="billing"', seen["sent dead"]),
        ("rocketmq_messages_out_total", f'topic="{TOPIC}",consumer_group="slow"', orders),
        ("rocketmq_messages_out_total", f'topic="{TOPIC}",consumer_group="audit"', orders),
        ("rocketmq_commit_messages_total", TOPIC, commits + seen["sent asked-commit"]),
        ("rocketmq_rollback_messages_total", TOPIC, rollbacks + seen["sent asked-rollback"]),
        ("mqmesh_put_messages_total", scene.master, readings.number("put_messages_total")),
    ):
        assert _value(told, name, labels) == count, (name, labels)


def _value(text: str, name: str, labels: str = "") -> float:
    lines = [line for line in text.splitlines() if line.startswith(name + "{")]
    (found,) = [line for line in lines if labels in line]
    return float(found.rpartition(" ")[2])
