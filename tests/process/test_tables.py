"""Tables of keys and values, as real processes keep them."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import threading

import pytest
from harness.patience import until

from mqmesh import aio
from mqmesh.cli import main
from mqmesh.errors import InvalidArgument, MessageIllegal, RevisionConflict, TopicNotFound
from mqmesh.message import Message
from mqmesh.protocol.tables import KvOperation
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.tables.key_value import KeyValue
from mqmesh.testing.processes import ProcessCluster

_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster whose broker is killed now and then, and started again."""
    with ProcessCluster(tmp_path_factory.mktemp("c")) as cluster:
        yield cluster


@pytest.fixture
def kv(cluster):
    """A table that no other test uses."""
    with KeyValue(f"table-{next(_numbers)}", cluster.namesrv_addr, create=True, history=3) as table:
        yield table


def test_writes_are_compared_by_revision_and_read_back(kv):
    first = kv.create("a", b"1")
    with pytest.raises(RevisionConflict) as conflict:
        kv.create("a", b"2")
    assert conflict.value.revision == first
    second = kv.update("a", b"2", revision=first)
    assert kv.get("a").value == b"2"
    assert [one.revision for one in kv.history("a")] == [first, second]
    kv.delete("a", revision=second)
    assert kv.get("a") is None
    revisions = kv.put_many({f"k/{number:04}": b"%d" % number for number in range(2_500)})
    assert list(kv.keys("k/")) == list(revisions)
    found = kv.get_many([*revisions, "missing"])
    assert {key: one.revision for key, one in found.items()} == revisions


def test_a_watch_sees_changes_and_expiry_and_ends_with_its_client(kv):
    kv.put("x/before", b"1")
    kv.put("y/other", b"2")
    entries = []

    thread = threading.Thread(target=lambda: entries.extend(kv.watch("x/")))
    thread.start()
    until(lambda: len(entries) == 1)
    kv.put("x/short", b"3", ttl_ms=300)
    kv.delete("x/before")
    until(lambda: len(entries) == 4)
    assert [(one.key, one.operation) for one in entries] == [
        ("x/before", KvOperation.PUT),
        ("x/short", KvOperation.PUT),
        ("x/before", KvOperation.DEL),
        ("x/short", KvOperation.EXPIRE),
    ]
    kv.close()
    thread.join(10)
    assert not thread.is_alive()


def test_a_table_survives_the_broker_and_the_loss_of_its_rows(cluster, kv):
    values = {f"k{number}": b"%d" % number for number in range(300)}
    kv.put_many(values)
    revision = kv.put("k0", bytes(10_000))
    (broker,) = cluster.brokers
    for lost in (False, True):
        cluster.brokers[broker].kill()
        rows = cluster.folder / broker / "tables"
        assert rows.exists()
        if lost:
            shutil.rmtree(rows)
        cluster.start_broker(broker)
        found = kv.get_many(values)
        assert found.pop("k0").value == bytes(10_000)
        assert {key: one.value for key, one in found.items()} == {
            key: value for key, value in values.items() if key != "k0"
        }
        revision = kv.update("k0", bytes(10_000), revision=revision)


def test_coroutines_have_the_same_table(cluster, kv):
    async def work():
        async with aio.KeyValue(kv.table, cluster.namesrv_addr) as table:
            await table.put("a", b"1")
            assert (await table.get("a")).value == b"1"
            assert [one.key async for one in table.entries()] == ["a"]
            async with aio.TableAdmin(cluster.namesrv_addr) as admin:
                (found,) = [one for one in await admin.tables() if one.table == kv.table]
                assert (found.keys, found.bytes, found.revision, found.history) == (1, 2, 1, 3)
                assert [one.key for one in (await admin.table_keys(kv.table)).entries] == ["a"]
                assert [one.revision for one in (await admin.table_history(kv.table, "a")).entries]
                assert (await admin.table_value(kv.table, "a", 1)).value == b"1"
            async for entry in table.watch():
                return entry.value

    assert asyncio.run(asyncio.wait_for(work(), 20)) == b"1"


def test_what_is_no_table_and_no_key_is_named(cluster, kv):
    with pytest.raises(InvalidArgument, match="1 to 255"):
        kv.put("", b"1")
    missing = KeyValue("no-table-there", cluster.namesrv_addr, patience_ms=0)
    with missing, pytest.raises(TopicNotFound):
        missing.get("a")
    with Producer("p", namesrv_addr=cluster.namesrv_addr) as producer:
        producer.send(Message("plain-topic", b"1"))
        with pytest.raises(MessageIllegal, match="one key"):
            producer.send(Message(kv.table, b"1"))
        producer.send(Message(kv.table, b"1", keys=["by-producer"]))
    assert kv.get("by-producer").value == b"1"
    plain = KeyValue("plain-topic", cluster.namesrv_addr)
    with plain, pytest.raises(MessageIllegal, match="no table"):
        plain.put("a", b"1")


def test_the_command_line_writes_compares_and_lists(cluster, capsys):
    def run(*arguments):
        code = main.main(["table", *arguments, "--json", "--namesrv", cluster.namesrv_addr])
        return code, json.loads(capsys.readouterr().out or "null")

    assert run("create", "by-command", "--history", "2")[1]["history"] == 2
    assert run("put", "by-command", "x/a", "1", "--revision", "0")[1]["revision"] == 1
    assert run("put", "by-command", "x/a", "2", "--revision", "0")[0] == 1
    assert run("put", "by-command", "x/b", "3", "--ttl", "1h")[0] == 0
    assert run("get", "by-command", "x/a")[1]["value"] == "1"
    assert [one["key"] for one in run("ls", "by-command", "x/")[1]] == ["x/a", "x/b"]
    assert run("watch", "by-command", "x/", "--max", "1")[1]["key"] == "x/a"
    assert run("rm", "by-command", "x/a", "--revision", "1", "--yes")[1]["revision"] == 3
    assert [one["operation"] for one in run("history", "by-command", "x/a")[1]] == ["PUT", "DEL"]
    assert run("get", "by-command", "x/a")[0] == 1
