"""Each job of mqadmin by the command that docs/admin.md has for it: table and JSON, on a cluster.

A row without a command has a reason in the table. One that cannot be run like this, as the cluster
here has no keys, names the test that shows it. All others are run as they stand there, but for the
names in ``JOBS``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness.patience import until

from mqmesh.cli import main
from mqmesh.message import Message
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| ([a-z]\w+) \| (–|`[^`]+`) \| (.*?) ?\|$", (ROOT / "docs/admin.md").read_text(), re.M
)
QUEUES = 4
MESSAGES = 2 * QUEUES

SHOWN = {
    "startMonitoring": "test_monitor.py::test_messages_that_wait_for_nobody_are_an_alarm",
    "queryMsgTraceById": "test_trace.py::test_blocking_clients_are_traced",
    "updateAclConfig": "test_secure.py::test_what_mqadmin_does_with_access_lists",
    "deleteAclConfig": "test_secure.py::test_what_mqadmin_does_with_access_lists",
    "clusterAclConfigVersion": "test_secure.py::test_what_mqadmin_does_with_access_lists",
}
"""Jobs that need another cluster than this one, and the tests that show them: table and JSON."""


class Job(msgspec.Struct, frozen=True):
    """How a job is tried.

    Attributes:
        text: What stands in the table that people get.
        told: Whether programs get what they should: JSON lines.
        words: What is written in place of words of the command; ``{mode}`` is text or json.
        before: A command that is run before it.
        after: One that is run afterwards.
    """

    text: str
    told: Callable[[list[Any]], object]
    words: dict[str, str] = {}
    before: str = ""
    after: str = ""


def of_orders(found: list[Any]) -> bool:
    (one,) = found
    return one["topic"] == "orders"


def bodies(found: list[Any]) -> set[str]:
    return {one["body"] for one in found}


def says(*words: str) -> Callable[[list[Any]], object]:
    return lambda found: all(word in json.dumps(found) for word in words)


def is_exported(found: list[Any]) -> bool:
    return (
        says("cluster.json")(found) and json.loads(Path("cluster.json").read_text())["format"] == 1
    )


JOBS = {
    "getBrokerConfig": Job(
        "long_polling_max_ms",
        says("long_polling_max_ms", "14000"),
        before="broker set broker-a long_polling_max_ms=14000",
        after="broker set broker-a --unset long_polling_max_ms",
    ),
    "getNamesrvConfig": Job("broker_expire_ms", says("broker_expire_ms", "scan_interval_ms")),
    "updateNamesrvConfig": Job(
        "broker_expire_ms",
        says("broker_expire_ms", "60000"),
        before="namesrv set broker_expire_ms=70000",
    ),
    "exportConfigs": Job("cluster.json", is_exported),
    "updateTopic": Job(
        "8 read and 8 write queues",
        lambda found: found[0]["brokers"][0]["write_queue_nums"] == 8,
        {"orders": "made-{mode}"},
    ),
    "updateTopicPerm": Job(
        "queues, r", lambda found: found[0]["brokers"][0]["perm"] == "r", {"orders": "perm"}
    ),
    "deleteTopic": Job(
        "doomed-text",
        lambda found: found[0]["deleted_from"] == ["broker-a"],
        {"orders": "doomed-{mode}"},
        before="topic create doomed-{mode} --broker broker-a",
    ),
    "topicRoute": Job("broker-b", of_orders),
    "topicStatus": Job("messages in 8 queues", lambda found: found[0]["messages"] >= MESSAGES),
    "topicClusterList": Job(
        "DefaultCluster", lambda found: found[0]["queues"][0]["cluster_name"] == "DefaultCluster"
    ),
    "topicList": Job(
        "orders", lambda found: {one["topic"]: one["groups"] for one in found[0]}["orders"]
    ),
    "allocateMQ": Job("broker-a:0", lambda found: len(found[0]) == 3),
    "updateSubGroup": Job(
        "5 retries", lambda found: found[0]["brokers"][0]["retry_max_times"] == 5
    ),
    "deleteSubGroup": Job(
        "doomed-text",
        lambda found: found[0]["deleted_from"] == ["broker-a", "broker-b"],
        {"billing": "doomed-{mode}"},
        before="group create doomed-{mode}",
    ),
    "consumerProgress": Job(
        "1 member", lambda found: found[0]["group"] == "billing" and found[0]["members"] == 1
    ),
    "consumerStatus": Job(
        "stacks of", lambda found: found[0]["members"][0]["stacks"] and not found[0]["silent"]
    ),
    "getConsumerConfig": Job(
        "group billing on broker-b", lambda found: len(found[0]["brokers"]) == 2
    ),
    "brokerStatus": Job(
        "uptime_ms", lambda found: found[0]["metrics"]["broker_name"]["value"] == "broker-a"
    ),
    "brokerConsumeStats": Job(
        "behind",
        lambda found: "behind" in {one["group"] for one in found[0]},
        {"1000": "0"},
    ),
    "sendMsgStatus": Job(
        "50 messages, 0 failed",
        lambda found: {one["status"] for one in found} == {"SEND_OK"} and len(found) == 50,
    ),
    "deleteExpiredCommitLog": Job(
        "0 segments of 0 bytes would go",
        lambda found: (found[0]["dry_run"], found[0]["segments"]) == (True, []),
    ),
    "queryMsgById": Job(
        "0-0", lambda found: found[0]["messages"][0]["body"] == "0-0", {"ID": "offset id"}
    ),
    "queryMsgByKey": Job("0-0", lambda found: found[0]["messages"]),
    "queryMsgByUniqueKey": Job("0-0", lambda found: found[0]["messages"][0]["body"] == "0-0"),
    "queryMsgByOffset": Job(
        "0-0", lambda found: found[0]["messages"][0]["queue_offset"] == 0, {"17": "0"}
    ),
    "printMsg": Job("1-3", lambda found: len(bodies(found)) >= MESSAGES),
    "printMsgByQueue": Job("1-3", lambda found: {one["queue_id"] for one in found} == {3}),
    "sendMessage": Job("SEND_OK", lambda found: found[0]["status"] == "SEND_OK"),
    "consumeMessage": Job(
        "broker-",
        lambda found: len(found) == 1 and found[0]["topic"] == "orders",
        {"10": "1 --from first --timeout 30"},
    ),
    "checkMsgSendRT": Job("100 messages, 0 failed", lambda found: len(found) == 100),
    "producerConnection": Job("connected", lambda found: len(found[0]["members"]) == 1),
    "consumerConnection": Job(
        "clustering", lambda found: found[0]["members"][0]["message_model"] == "CLUSTERING"
    ),
    "clusterList": Job(
        "broker-b", lambda found: {"broker-a", "broker-b"} <= {one["name"] for one in found[0]}
    ),
    "clusterRT": Job("broker-b", lambda found: len(found) == 4, {"60": "2", "10": "0"}),
    "updateBrokerConfig": Job(
        "long_polling_max_ms",
        lambda found: found[0]["replicas"][0]["broker_id"] == 0,
        after="broker set broker-a --unset long_polling_max_ms",
    ),
    "statsAll": Job("orders", lambda found: "orders" in {one["topic"] for one in found[0]}),
    "exportMetrics": Job("broker-b", lambda found: len(found[0]["brokers"]) == 2),
    "exportMetadata": Job("2 brokers", lambda found: found[0]["topics"] > 0),
    "queryCq": Job("TAG HASH", lambda found: found[0]["entries"], {"17": "0"}),
    "producer": Job("shop", lambda found: "shop" in json.dumps(found)),
    "resetOffsetByTime": Job("orders", lambda found: found[0]["dry_run"] is True),
    "skipAccumulatedMessage": Job("orders", lambda found: found[0]["dry_run"] is False),
    "cloneGroupOffset": Job("orders", lambda found: found[0]["queues"]),
    "updateKvConfig": Job("shop", lambda found: found[0]["silent_namesrvs"] == []),
    "deleteKvConfig": Job(
        "shop", lambda found: found[0]["silent_namesrvs"] == [], before="kv put shop currency EUR"
    ),
    "wipeWritePerm": Job(
        "broker-a",
        lambda found: found[0]["broker_name"] == "broker-a",
        after="broker undrain broker-a",
    ),
    "addWritePerm": Job(
        "broker-a",
        lambda found: found[0]["broker_name"] == "broker-a",
        before="broker drain broker-a --yes",
    ),
}


class Scene:
    """A cluster with the names of the document: topic orders, groups billing, shop and behind."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self.namesrv = cluster.namesrv_addr
        self.producer = Producer("shop", namesrv_addr=self.namesrv)
        self.consumer = PushConsumer(
            "billing",
            namesrv_addr=self.namesrv,
            consume_from_where="FIRST_OFFSET",
            persist_consumer_offset_interval_ms=50,
        )
        self.message_id = self.offset_id = ""

    def begin(self) -> None:
        with GroupAdmin(self.namesrv) as admin:
            for topic in ("orders", "perm"):
                admin.create_topic(topic, queues=QUEUES)
            self.producer.start()
            for at, queue in enumerate(self.producer.fetch_publish_queues("orders")):
                body = b"%d-%d" % (at // QUEUES, queue.queue_id)
                sent = self.producer.send(Message("orders", body, keys=("4711",)), queue=queue)
                if at == 0:
                    self.message_id = sent.message_id
            self.consumer.subscribe("orders", listener=lambda messages: None)
            self.consumer.start()
            until(lambda: admin.progress("billing").lag == 0)
            until(lambda: admin.progress("billing").queues)
        behind = ["consume", "orders", "--group", "behind", "--from", "first", "-n", "1"]
        assert main.main(["--namesrv", self.namesrv, *behind]) == 0

    def close(self) -> None:
        self.consumer.close()
        self.producer.close()


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    folder = tmp_path_factory.mktemp("j")
    with ProcessCluster(folder, brokers=("broker-a", "broker-b")) as cluster:
        scene = Scene(cluster)
        try:
            scene.begin()
            yield scene
        finally:
            scene.close()


@pytest.fixture
def run(scene, monkeypatch, tmp_path, capsys):
    """Run a command line of the document; returns what it printed."""
    monkeypatch.setenv("MQMESH_NAMESRV", scene.namesrv)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> str:
        code = main.main(shlex.split(line))
        out, err = capsys.readouterr()
        assert code == 0, f"{line}: {err}"
        return out

    def offset_id() -> str:
        told = json.loads(run(f"query by-id {scene.message_id} --json"))
        return told["messages"][0]["offset_message_id"]

    scene.offset_id = scene.offset_id or offset_id()
    return run


def line_of(command: str, job: Job, mode: str, scene: Scene) -> str:
    """The command of a row, about what is there."""
    line = command.strip("`").removeprefix("mqmesh ")
    line = line.replace("0C6A9F0E5D3B7A12000000000000002A", scene.message_id)
    line = re.sub(r"127\.0\.0\.1:\d+#\S+", scene.offset_id, line)
    words = [job.words.get(word, word).format(mode=mode) for word in line.split()]
    return " ".join(words)


@pytest.mark.parametrize(("name", "command", "remark"), ROWS, ids=[row[0] for row in ROWS])
def test_the_job_is_done_by_the_command_of_the_table(scene, run, name, command, remark):
    if command == "–":
        assert remark, "neither a command nor a reason"
        assert name not in JOBS
        return
    if name in SHOWN:
        file, _, test = SHOWN[name].partition("::")
        assert f"def {test}" in (Path(__file__).parent / file).read_text()
        return
    job = JOBS[name]
    for mode in ("text", "json"):
        if job.before:
            run(job.before.format(mode=mode))
        line = line_of(command, job, mode, scene)
        out = run(line if mode == "text" else f"{line} --json")
        if mode == "text":
            assert job.text in out
        else:
            assert job.told([json.loads(each) for each in out.splitlines()]), out
        if job.after:
            run(job.after)


def test_nothing_is_tried_that_is_not_in_the_table():
    assert not (JOBS.keys() | SHOWN.keys()) - {name for name, _, _ in ROWS}
