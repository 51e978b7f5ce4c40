"""A real Prometheus looks at a cluster through the exporter."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from harness.patience import until
from harness.prometheus import Prometheus, promtool
from harness.rocketmq import families, golden_families

from mqmesh import (
    ClientOptions,
    ConsumeResult,
    LocalTransactionState,
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
    TransactionListener,
    TransactionProducer,
)
from mqmesh.errors import MessageIllegal
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.testing.processes import RoleProcess

BOARDS = Path("mqmesh/roles/exporter/boards")
LABELS = {"Cluster": "c", "Env": "test"}
# Nobody is elected in a cluster like this.
NEVER_HERE = ("mqmesh_ha_elections_total", "mqmesh_ha_set_changes_total")


class Desk(TransactionListener):
    """Does as the body says."""

    def execute_local_transaction(self, message, argument):
        return LocalTransactionState(message.body.decode())

    def check_local_transaction(self, message):
        return LocalTransactionState.UNKNOWN


class Cluster:
    """A master with a follower, a name server, and an exporter."""

    def __init__(self, folder: Path) -> None:
        self.namesrv = RoleProcess("namesrv", {"listen_port": "0"}, folder / "namesrv.log")
        self.processes = [self.namesrv]
        master = self.broker(folder, 0)
        self.follower = self.broker(folder, 1, **{"ha.master_addr": master.endpoint})
        settings = {
            "listen_port": "0",
            "namesrv_addr": f'["{self.namesrv.endpoint}"]',
            "min_interval_ms": "0",
        }
        exporter = RoleProcess("exporter", settings, folder / "exporter.log")
        self.processes.append(exporter)
        self.page = exporter.endpoint
        self.target = exporter.endpoint.removeprefix("http://").removesuffix("/metrics")

    def broker(self, folder: Path, number: int, **settings: str) -> RoleProcess:
        common = {
            "listen_port": "0",
            "broker_id": str(number),
            "namesrv_addr": f'["{self.namesrv.endpoint}"]',
            "store_path_root_dir": str(folder / f"r{number}"),
            "ha.mode": "manual",
            "ha.ack_replicas": "one",
        }
        process = RoleProcess("broker", common | settings, folder / f"r{number}.log")
        self.processes.append(process)
        return process

    def text(self) -> bytes:
        with urlopen(self.page) as answer:
            return answer.read()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("m"))
    yield cluster
    for process in cluster.processes:
        process.kill()


@pytest.fixture(scope="module")
def traffic(cluster: Cluster) -> Iterator[None]:
    """Messages of all kinds, and some more all the time."""
    namesrv = cluster.namesrv.endpoint
    stop = threading.Event()
    done: list[bytes] = []

    def consume(messages):
        done.extend(message.body for message in messages)
        return ConsumeResult.RECONSUME_LATER if b"bad" in messages[0].body else None

    def go_on(producer):
        while not stop.wait(0.02):
            producer.send(Message("orders", b"more"))

    with (
        Producer("shop", namesrv_addr=namesrv) as producer,
        TransactionProducer("pay", Desk(), namesrv_addr=namesrv) as payer,
        PushConsumer(
            "billing",
            client=ClientOptions(namesrv_addr=namesrv, heartbeat_broker_interval_ms=1_000),
            consume_from_where="FIRST_OFFSET",
            max_reconsume_times=0,
        ) as consumer,
    ):
        consumer.subscribe("orders", listener=consume)
        for state in LocalTransactionState.COMMIT, LocalTransactionState.ROLLBACK:
            payer.send_message_in_transaction(Message("orders", state.value.encode()))
        producer.send(Message("orders", b"bad"))
        until(lambda: done)
        with GroupAdmin(namesrv) as admin, pytest.raises(MessageIllegal, match="members"):
            admin.delete_group("billing")
        sender = threading.Thread(target=go_on, args=(producer,))
        sender.start()
        try:
            until(lambda: len(done) > 3)
            yield
        finally:
            stop.set()
            sender.join()


@pytest.fixture(scope="module")
def prometheus(cluster: Cluster, traffic: None, tmp_path_factory: pytest.TempPathFactory):
    rules = Path(__file__).parents[2] / BOARDS / "mqmesh.rules.yml"
    started = Prometheus(tmp_path_factory.mktemp("p"), cluster.target, rules, LABELS)
    yield started
    started.close()


def of_rocketmqs_boards(project_root: Path) -> list[str]:
    """An expression for each name that they ask for, which has all of the labels that they use."""
    lines = (project_root / "tests" / "data" / "rocketmq-metrics.txt").read_text().splitlines()
    wanted = [line.split() for line in lines if not line.startswith(("#", "-"))]
    fixed = [f'{name}="{value}"' for name, value in LABELS.items()]
    found = []
    for name, *labels in wanted:
        chosen = ",".join([*fixed, *(f'{label}=~".+"' for label in labels)])
        found.append(f"sum by ({','.join(labels)}) ({name}{{{chosen}}})")
    of_day = "rocketmq_brokeruntime_msg"
    ends, done = "sum by (topic) (rocketmq_producer_offset)", "(rocketmq_consumer_offset)"
    return [
        *found,
        # What they subtract has the same labels.
        f"{of_day}_put_total_today_now - {of_day}_puttotal_todaymorning",
        f"{of_day}_puttotal_todaymorning - {of_day}_puttotal_yesterdaymorning",
        f"{of_day}_gettotal_today_now - {of_day}_gettotal_todaymorning",
        f"{of_day}_gettotal_todaymorning - {of_day}_gettotal_yesterdaymorning",
        "rocketmq_brokeruntime_commitlog_maxoffset - rocketmq_brokeruntime_commitlog_minoffset",
        f"{ends} - on (topic) group_right sum by (group, topic) {done}",
    ]


def expressions(project_root: Path) -> list[str]:
    """What our boards ask for, with all of their variables' values."""
    found = [
        target["expr"]
        for path in sorted((project_root / BOARDS).glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    ]
    return [re.sub(r"\$[a-z]+", ".*", one) for one in found]


def test_whatever_rocketmqs_boards_ask_for_has_a_series(prometheus, project_root):
    asked = of_rocketmqs_boards(project_root)
    assert len(asked) > 80
    for expression in asked:
        until(lambda expression=expression: prometheus.query(expression))


def test_names_and_labels_are_those_of_a_real_broker_of_rocketmq(cluster, traffic, project_root):
    golden = golden_families(project_root)
    told = families(cluster.text().decode())
    assert {name: told.get(name) for name in golden} == golden


def test_every_expression_of_our_boards_gives_a_series(prometheus, project_root):
    asked = [one for one in expressions(project_root) if not any(n in one for n in NEVER_HERE)]
    assert len(asked) > 30
    until(lambda: all(map(prometheus.query, asked)))


def test_the_alert_rules_are_evaluated_and_a_process_that_dies_raises_one(cluster, prometheus):
    until(lambda: prometheus.query("mqmesh_up") and not prometheus.query("mqmesh_up == 0"))
    assert "MqmeshProcessDown" not in prometheus.firing()
    cluster.follower.kill()
    until(lambda: "MqmeshProcessDown" in prometheus.firing())
    (target,) = prometheus.targets()
    assert target["health"] == "up", "one that does not answer hides nobody"


def test_our_own_names_are_as_prometheus_wants_them(cluster, traffic):
    said = promtool("check", "metrics", text=cluster.text())
    told = [line for line in said.splitlines()[1:] if not line.startswith("rocketmq_")]
    assert told == []
    promtool_knows = "rocketmq_group_diff label names"
    assert promtool_knows in said, "it does look"


def test_totals_are_those_that_administrators_see(cluster, traffic):
    with GroupAdmin(cluster.namesrv.endpoint) as admin:
        before = admin.runtime_info()["broker-a"].number("put_messages_total")
        text = cluster.text().decode()
        after = admin.runtime_info()["broker-a"].number("put_messages_total")
    found = re.findall(r'^mqmesh_put_messages_total{.*node_id="broker-a".*} (\S+)$', text, re.M)
    assert before <= float(found[0]) <= after


def test_lag_and_totals_are_those_that_clients_counted_and_administrators_see(cluster, traffic):
    namesrv, topic = cluster.namesrv.endpoint, "counted"
    with Producer("counting", namesrv_addr=namesrv) as producer:
        for number in range(50):
            producer.send(Message(topic, b"%d" % number))
    with (
        PullConsumer(
            "counting", namesrv_addr=namesrv, consume_from_where="FIRST_OFFSET", auto_commit=False
        ) as consumer,
        GroupAdmin(namesrv) as admin,
    ):
        consumer.subscribe(topic)
        got: list[bytes] = []
        until(lambda: got.extend(m.body for m in consumer.poll(timeout_ms=100)) or len(got) == 50)
        consumer.commit(dict.fromkeys(consumer.assignment(), 0))
        progress = admin.progress("counting", topic)
        told = cluster.text().decode()
    labels = f'topic="{topic}"'
    assert _value(told, "rocketmq_messages_in_total", labels) == 50
    assert _value(told, "rocketmq_messages_out_total", 'consumer_group="counting"', labels) >= 50
    lag = _value(told, "rocketmq_consumer_lag_messages", 'consumer_group="counting"', labels)
    diff = _value(told, "rocketmq_group_diff", 'group="counting"', labels)
    assert lag == diff == progress.lag == 50


def _value(text: str, name: str, *labels: str) -> float:
    lines = [line for line in text.splitlines() if line.startswith(name + "{")]
    (found,) = [line for line in lines if all(label in line for label in labels)]
    return float(found.rpartition(" ")[2])
