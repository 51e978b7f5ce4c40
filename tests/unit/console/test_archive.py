"""Snapshots: those of this machine are listed, damaged ones with the reason; one is made."""

from __future__ import annotations

import contextlib
import datetime
from types import SimpleNamespace

import msgspec
import pytest
from harness.console import KEY, ConsoleWorld, open_console

from mqmesh.console.queries import archive as queries
from mqmesh.protocol.admin import ConfigEntry
from mqmesh.protocol.route import BrokerAddress, BrokerData, ClusterInfo
from mqmesh.protocol.snapshots import SnapshotInfo
from mqmesh.security.access_list import AccessList, Action, Rule, User, UserRole
from mqmesh.storage.tools.snapshot import MANIFEST, Manifest, seal_manifest


def entry(key, value):
    text = msgspec.json.encode(value).decode()
    return ConfigEntry(key, text, '""', text, False, False)


@pytest.fixture
def world(tmp_path):
    for name, text in (
        ("b.good", seal_manifest(msgspec.json.encode(manifest(created_ms=5_000)))),
        ("b.torn", b"{"),
    ):
        folder = tmp_path / "snapshots" / name
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_bytes(text)
    settings = [entry("snapshot.root_dir", ""), entry("store_path_root_dir", str(tmp_path / "b"))]
    brokers = [BrokerData("c", "broker-a", {0: BrokerAddress("h:1")})]
    made = SnapshotInfo("/data/snapshots/x", "broker-a", 0, 100, 7, 4_096, 3, 250)
    return ConsoleWorld(
        {
            "cluster": ClusterInfo(brokers),
            "config": lambda name: {0: settings, 2: settings},
            "create_snapshot": made,
        }
    )


def manifest(**others):
    return Manifest(
        mqmesh_version="0.1.0",
        cluster_name="c",
        broker_name="broker-a",
        broker_id=0,
        store_id=1,
        epoch=1,
        start_offset=0,
        end_offset=0,
        files=[],
        **others,
    )


def test_snapshots_of_this_machine_are_listed_once_with_what_is_damaged(world):
    found = open_console(world).get("/api/v1/archive").json()["snapshots"]["rows"]
    assert [(one["name"], one["created_ms"]) for one in found] == [("b.good", 5_000), ("b.torn", 0)]
    assert "cannot be decoded" in found[1]["problem"]
    page = open_console(world).get("/archive").text
    assert "b.good" in page
    assert "cannot be decoded" in page


def test_a_user_who_may_not_see_everything_sees_no_files(world):
    world.sees_all = False
    assert open_console(world).get("/api/v1/archive").json()["snapshots"]["rows"] == []


@pytest.mark.parametrize("root", ["", "/nonexistent"])
def test_snapshots_elsewhere_are_said_where(world, root):
    settings = [entry("snapshot.root_dir", root)]
    world.answers["config"] = lambda name: {0: settings}
    assert "snapshot.root_dir" in open_console(world).get("/archive").text


def test_a_broker_makes_a_snapshot(world):
    client = open_console(world)
    path = "/new/snapshot"
    assert "<option" in client.get(path).text
    csrf = client.csrf(path)
    assert "links" in client.act(path, csrf, "plan", broker_name="broker-a").text
    done = client.act(path, csrf, broker_name="broker-a").text
    assert "7 messages are in /data/snapshots/x" in done


class FakeArchive:
    """Modules of an archive with two messages."""

    def __init__(self):
        self.asked = []

    def __call__(self, name):
        return self

    def errors_of_libraries(self):
        return contextlib.nullcontext()

    def sources(self, path):
        gap = SimpleNamespace(gap_before=64)
        return [
            SimpleNamespace(
                broker="b", position=100, keys_position=90, ingests=[gap, gap], gaps=[gap]
            )
        ]

    def find(self, path, **asked):
        self.asked.append(asked)
        rows = [row("orders", b"<i>"), row("secret", b"no")]
        return SimpleNamespace(rows=rows, more=True)


def row(topic, body):
    at = datetime.datetime.fromtimestamp(5, datetime.UTC)
    names = ("store_timestamp", "topic", "broker", "queue_id", "queue_offset", "message_id", "body")
    return dict(zip(names, (at, topic, "b", 0, 7, "0C6A", body), strict=True))


def test_the_archive_has_its_gaps_and_is_looked_up_by_key_and_time(world, monkeypatch):
    fake = FakeArchive()
    monkeypatch.setattr(queries, "archive_module", fake)
    client = open_console(world, archive="/archive")
    (source,) = client.get("/api/v1/archive").json()["sources"]
    assert (source["ingests"], source["missing_bytes"], source["keys_position"]) == (2, 64, 90)
    page = client.get("/archive/find", params={"key": "4711", "since": "2d"}).text
    assert "&lt;i&gt;" in page
    assert "more than 50" in page
    (asked,) = fake.asked
    assert asked["key"] == "4711"
    assert asked["from_ms"] == world.clock.wall_ms() - 2 * 86_400_000


def test_messages_of_topics_that_a_user_may_not_read_are_left_out(world, monkeypatch):
    monkeypatch.setattr(queries, "archive_module", FakeArchive())
    rule = Rule([Action.SUB], ["orders"])
    reader = User("", [KEY], UserRole.VIEW, allow=[rule])
    world.access_list = AccessList(1, [reader])
    client = open_console(world, archive="/archive")
    found = client.get("/api/v1/archive/find", params={"key": "4711"}).json()
    assert [one["topic"] for one in found["rows"]] == ["orders"]
    assert "1 are in topics" in found["cut"]
    assert client.get("/archive/find", params={"topic": "secret"}).status_code == 403
    world.sees_all = False
    assert client.get("/archive/find", params={"key": "1"}).status_code == 403


def test_without_an_archive_it_is_said_which_setting_names_it(world):
    assert "set archive in" in open_console(world).get("/archive/find").text
