"""A cluster's setup goes into a document, and from there into an empty cluster."""

from __future__ import annotations

import asyncio
import json

import pytest

from mqmesh import aio
from mqmesh.cli import main
from mqmesh.errors import TransportError
from mqmesh.message import Message
from mqmesh.protocol.groups import GroupConfig
from mqmesh.protocol.route import Perm
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.cluster_admin import ClusterAdmin
from mqmesh.sdk.admin.cluster_plan import (
    BrokerSetup,
    ClusterSetup,
    GroupSetup,
    TopicSetup,
    write_setup,
)
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster

NAMES = ("broker-a", "broker-b")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ProcessCluster(tmp_path_factory.mktemp("o"), brokers=NAMES) as cluster:
        with ClusterAdmin(cluster.namesrv_addr) as admin:
            admin.create_topic("orders", queues=8)
            admin.create_topic("audit", queues=2, perm=Perm.READ, order=True)
            admin.put_topic_schema("orders", '{"type": "object"}')
            admin.create_group(GroupConfig("billing", retry_max_times=5))
            admin.put_kv("shop", "currency", "EUR")
            admin.drain("broker-b")
        with AdminClient(cluster.namesrv_addr, broker_name="broker-a") as admin:
            admin.create_topic("only-here", queues=1)
        yield cluster


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    with ProcessCluster(tmp_path_factory.mktemp("e"), brokers=NAMES) as cluster:
        yield cluster


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run a command at a cluster with --json; returns exit code, answer, errors."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def run(cluster, *arguments):
        code = main.main([*arguments, "--namesrv", cluster.namesrv_addr, "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else None, err

    return run


def document(path):
    setup = json.loads(path.read_text(encoding="utf-8"))
    assert setup.pop("exported_at").endswith("Z")
    return setup


def test_an_export_makes_an_empty_cluster_the_same(cluster, empty, run, tmp_path, capsys):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    code, told, _ = run(cluster, "cluster", "export", str(first))
    assert (code, told["brokers"], told["topics"], told["keys"]) == (0, 2, 5, 1)
    exported = document(first)
    assert exported["format"] == 1
    assert exported["brokers"]["broker-b"]["drained"]
    orders = exported["brokers"]["broker-a"]["topics"]["orders"]
    assert (orders["read_queue_nums"], orders["schema"]) == (8, '{"type": "object"}')

    code, planned, _ = run(empty, "cluster", "import", str(first), "--dry-run")
    assert (code, planned["done"], planned["counts"]["conflict"]) == (0, 0, 0)
    assert planned["counts"]["create"] == 5 + 2 + 1
    with AdminClient(empty.namesrv_addr) as admin:
        assert "orders" not in admin.topics()

    code, done, _ = run(empty, "cluster", "import", str(first), "--yes")
    assert (code, done["done"]) == (0, planned["counts"]["create"] + 1)
    run(empty, "cluster", "export", str(second))
    assert document(second) == exported
    code, again, _ = run(empty, "cluster", "import", str(first), "--yes", "--prune")
    assert (code, again["done"], again["steps"]) == (0, 0, [])
    assert main.main(["cluster", "import", str(first), "--namesrv", empty.namesrv_addr]) == 0
    assert "0 to create" in capsys.readouterr().err


@pytest.mark.timeout(300)
def test_ten_thousand_topics_are_carried_over_byte_for_byte(run, tmp_path):
    made, told_path = tmp_path / "made.json", tmp_path / "told.json"
    topics = {
        f"topic-{number:05d}": TopicSetup(number % 7 + 1, number % 7 + 1, 6, number % 2 == 0)
        for number in range(10_000)
    }
    groups = {f"group-{number:03d}": GroupSetup(True, False, number, True) for number in range(100)}
    setup = ClusterSetup(brokers={"broker-a": BrokerSetup(topics, groups)}, kv={"shop": {"k": "ö"}})
    made.write_bytes(write_setup(setup))
    with ProcessCluster(tmp_path) as cluster:
        code, told, _ = run(cluster, "cluster", "import", str(made), "--yes")
        assert (code, told["done"]) == (0, 10_000 + 100 + 1)
        assert run(cluster, "cluster", "export", str(told_path))[0] == 0
    lines = [
        [line for line in path.read_bytes().splitlines(keepends=True) if b"exported_at" not in line]
        for path in (made, told_path)
    ]
    assert lines[0] == lines[1]
    assert len(lines[0]) > 60_000


def test_what_loses_messages_is_a_conflict_until_it_is_forced(cluster, run, tmp_path):
    path = tmp_path / "now.json"
    run(cluster, "cluster", "export", str(path))
    with AdminClient(cluster.namesrv_addr, broker_name="broker-a") as admin:
        admin.create_topic("extra", queues=1)
        admin.create_topic("unused", queues=1)
    with Producer("p", namesrv_addr=cluster.namesrv_addr) as producer:
        producer.send(Message("extra", b"x"))
    code, told, err = run(cluster, "cluster", "import", str(path), "--yes", "--prune")
    assert (code, told["done"]) == (1, 0)
    assert "1 conflicts, so nothing was done" in err
    by_name = {one["name"]: one["action"] for one in told["steps"]}
    assert by_name == {"extra": "conflict", "unused": "delete"}
    code, told, _ = run(cluster, "cluster", "import", str(path), "--yes", "--prune", "--force")
    assert (code, told["done"]) == (0, 2)
    assert run(cluster, "cluster", "import", str(path), "--yes", "--prune")[1]["steps"] == []


def test_settings_are_exported_for_people(cluster, run, tmp_path):
    path = tmp_path / "with.json"
    run(cluster, "cluster", "export", str(path), "--configs")
    settings = document(path)["brokers"]["broker-a"]["settings"]
    assert settings["storage.mapped_file_size_commit_log"] == 64 * 1024 * 1024
    assert run(cluster, "cluster", "import", str(path), "--yes")[1]["steps"] == []


def test_files_that_are_none_are_told(cluster, run, tmp_path):
    path = tmp_path / "export.json"
    path.write_text('{"format": 3}', encoding="utf-8")
    code, _, err = run(cluster, "cluster", "import", str(path), "--dry-run")
    assert (code, "export.json: format 3, this version reads 1" in err) == (2, True)
    assert run(cluster, "cluster", "import", str(tmp_path / "none"), "--dry-run")[0] == 2
    code, _, err = run(cluster, "cluster", "export", str(tmp_path / "no" / "file"))
    assert (code, "No such file" in err) == (2, True)


def test_an_import_that_fails_half_way_says_what_was_done_and_repeating_finishes_it(
    cluster, empty, tmp_path
):
    async def export():
        async with aio.ClusterAdmin(cluster.namesrv_addr) as admin:
            return await admin.export()

    wanted = asyncio.run(export())
    with ClusterAdmin(empty.namesrv_addr, timeout_ms=1_000) as admin:
        admin.carry_out(wanted, admin.plan_import(wanted))
        for name in ("audit", "orders"):
            admin.delete_topic(name)
        steps = admin.plan_import(wanted)
        assert [(one.broker_name, one.name) for one in steps if one.action == "create"] == [
            ("broker-a", "audit"),
            ("broker-a", "orders"),
            ("broker-b", "audit"),
            ("broker-b", "orders"),
        ]
        empty.brokers["broker-b"].suspend()
        try:
            with pytest.raises(
                TransportError, match=r"create topic audit at broker-b: .*\(done before: 2 steps"
            ):
                admin.carry_out(wanted, steps)
        finally:
            empty.brokers["broker-b"].resume()
    with ClusterAdmin(empty.namesrv_addr) as admin:
        admin.carry_out(wanted, admin.plan_import(wanted))
        assert {one.action for one in admin.plan_import(wanted)} == {"leave"}
