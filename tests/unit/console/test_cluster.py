"""The cluster: replicas, name servers, settings, key/value; drains, hand-overs, imports."""

from __future__ import annotations

import pytest
from harness.console import ConsoleWorld, open_console

from mqmesh.console.actions.cluster import ANYBODY
from mqmesh.errors import NoRoute, RequestTimeout, TopicNotFound
from mqmesh.message import MessageQueue
from mqmesh.metrics import Readings
from mqmesh.protocol.admin import ConfigChange, ConfigEntry, RoleInfo
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.replication import HaStatus, SwitchOverResponse
from mqmesh.protocol.route import (
    BrokerAddress,
    BrokerData,
    ClusterInfo,
    Perm,
    QueueData,
    TopicRoute,
)
from mqmesh.roles.supervisor.run_file import RoleEntry, RunRecord, write_record
from mqmesh.sdk.admin.cluster_plan import (
    BrokerSetup,
    ClusterSetup,
    ImportAction,
    ImportStep,
    ImportThing,
    write_setup,
)
from mqmesh.sdk.admin.ha_admin import ReplicaReport
from mqmesh.sdk.admin.namesrv_admin import Draining, NamesrvChange, NamesrvConfigChange
from mqmesh.sdk.probes import Probe

NAMESRV = "127.0.0.1:9876"
SECRET = "T%wD[ha)bi?qHlhJVBcM=/s@3E)!8/>vq#G9Q.h]"


def status(broker_id, role="FOLLOWING", log_end=1_000, **others):
    return HaStatus("broker-a", broker_id, role, 4, 0, log_end, log_end, **others)


def report(found):
    number = 0 if found.role == "MASTER" else found.broker_id
    return ReplicaReport("broker-a", number, f"h:{found.broker_id}", found)


def elected(**others):
    lead = status(
        1, "MASTER", in_sync=[1, 2], voters=[1, 2, 3], switched_ms=5_000, reason="1 was missed"
    )
    late = status(3, log_end=400, lag_ms=9_000, voters=[1, 2, 3], **others)
    return [report(lead), report(status(2, voters=[1, 2, 3])), report(late)]


def entry(key, value, default="1", *, is_changeable=True):
    return ConfigEntry(key, value, default, default, value != default, is_changeable)


@pytest.fixture
def world():
    route = TopicRoute("TBW102", [QueueData("broker-a", 4, 4, Perm.READ_WRITE.value)], [])
    brokers = [BrokerData("c", name, {0: BrokerAddress("h:1")}) for name in ("broker-a", "b")]
    settings = [
        entry("storage.file_reserved_time", "72", "48"),
        entry("listen_port", "1", "2", is_changeable=False),
        entry("log_level", '"INFO"', '"INFO"'),
    ]
    changed = [ConfigChange("log_level", '"INFO"', '"DEBUG"')]
    done = Draining([NAMESRV], [], 3)
    return ConsoleWorld(
        {
            "ha_status": lambda broker_name="": elected(),
            "route": route,
            "ping": RoleInfo("namesrv", "ns-1", "0.1.0", 7, "running", 60_000),
            "cluster": ClusterInfo(brokers),
            "config": lambda where: settings if where == NAMESRV else {0: settings, 2: settings},
            "set_config": lambda *args: (
                {0: changed}
                if args[0] == "broker-a"
                else NamesrvConfigChange([NAMESRV], [], {NAMESRV: changed})
            ),
            "drain": done,
            "undrain": done,
            "switch_over": SwitchOverResponse(2, 5),
            "pause_failover": None,
            "kv_namespaces": ["shop"],
            "list_kv": {"currency": "EUR", "<b>": "\u202e"},
            "has_kv": lambda space, key: key == "currency",
            "get_kv": "EUR",
            "put_kv": NamesrvChange([NAMESRV], ["127.0.0.1:9877"]),
            "delete_kv": NamesrvChange([NAMESRV], []),
            "export": ClusterSetup(brokers={"broker-a": BrokerSetup()}),
            "plan_import": [
                ImportStep(ImportAction.CREATE, ImportThing.TOPIC, "broker-a", "t2"),
                ImportStep(ImportAction.LEAVE, ImportThing.TOPIC, "broker-a", "orders"),
                ImportStep(ImportAction.CONFLICT, ImportThing.TOPIC, "broker-a", "x", "full"),
            ],
            "carry_out": 1,
            "probe_brokers": [
                Probe(MessageQueue("SELF_TEST_TOPIC", "broker-a", 0), 1.5, SendStatus.SEND_OK),
                Probe(MessageQueue("SELF_TEST_TOPIC", "b", 0), 0, None, "nobody is there"),
            ],
        },
        stepped=("probe_brokers",),
    )


def called(world, method):
    return [call[2:] for call in world.calls if call[1] == method]


def test_a_group_has_its_master_and_how_far_others_are(world):
    (group,) = open_console(world).get("/api/v1/cluster").json()["groups"]
    assert (group["master"], group["epoch"], group["in_sync"]) == (1, 4, [1, 2])
    rows = {one["broker_id"]: one for one in group["replicas"]}
    assert rows[1]["lag_bytes"] is None
    assert (rows[3]["lag_bytes"], rows[3]["lag_ms"], rows[3]["is_in_sync"]) == (600, 9_000, False)
    page = open_console(world).get("/cluster").text
    assert "catching up" in page
    assert "2 of 3" in page
    assert "1 was missed" in page


def test_a_replica_that_is_missed_is_seen(world):
    dead = ReplicaReport("broker-a", 2, "h:2", None, "no answer within 3 s")
    world.answers["ha_status"] = [elected()[2], dead]
    (group,) = open_console(world).get("/api/v1/cluster").json()["groups"]
    assert group["master"] is None
    problems = {one["broker_id"]: one["problem"] for one in group["replicas"]}
    assert problems == {1: "name servers do not know it", 2: "no answer within 3 s", 3: ""}
    assert "no master" in open_console(world).get("/cluster").text


def test_a_cluster_without_brokers_says_so(world):
    world.answers["ha_status"] = NoRoute("no broker")
    world.answers["ping"] = RequestTimeout("silence")
    found = open_console(world).get("/api/v1/cluster").json()
    assert found["groups"] == []
    assert found["namesrvs"][0]["state"] == "down"
    assert "mqmesh broker -c" in open_console(world).get("/cluster").text


@pytest.mark.parametrize("has_route", [True, False])
def test_a_drained_group_is_known_by_routes_or_by_its_broker(world, has_route):
    if has_route:
        queue = QueueData("broker-a", 4, 4, Perm.READ.value)
        world.answers["route"] = TopicRoute("TBW102", [queue], [])
    else:
        world.answers["route"] = TopicNotFound("none")
        world.answers["runtime_info"] = {"broker-a": Readings([])}
    page = open_console(world).get("/cluster").text
    assert ('data-test="undrain-broker-a"' in page) is has_route
    assert ('data-test="drain-broker-a"' in page) is not has_route


def test_processes_are_those_of_the_run_file_without_their_keys(world, tmp_path):
    roles = [
        RoleEntry(role="broker", name="b-r1", pid=7, state="running", started_ms=1),
        RoleEntry(role="schedule", name="s", state="waiting", restarts=3, server_key=SECRET),
    ]
    write_record(tmp_path, RunRecord(pid=1, started_ms=1, namesrv=NAMESRV, roles=roles))
    client = open_console(world, data_dir=str(tmp_path))
    found = client.get("/api/v1/cluster")
    assert [one["name"] for one in found.json()["processes"]] == ["s", "b-r1"]
    assert SECRET not in found.text + client.get("/cluster").text
    world.sees_all = False
    refused = open_console(world, data_dir=str(tmp_path)).get("/api/v1/cluster")
    assert refused.status_code == 403


def test_a_drain_says_where_producers_go(world):
    client = open_console(world)
    path = "/cluster/broker-a/drain"
    assert "and go to b" in client.get(path).text
    assert called(world, "drain") == []
    assert "routes of 3 topics" in client.act(path, client.csrf(path)).text
    assert called(world, "drain") == [(("broker-a",), {})]
    assert "come back" in client.act("/cluster/broker-a/undrain", client.csrf(path)).text


def test_the_lead_goes_to_a_replica_that_is_in_sync(world):
    client = open_console(world)
    path = "/cluster/broker-a/switch-over"
    form = client.get(path).text
    assert "<option>2</option>" in form
    assert "<option>3</option>" not in form
    csrf = client.csrf(path)
    assert "3 is not in sync" in client.act(path, csrf, "plan", replica="3").text
    assert "most of the log" in client.act(path, csrf, "plan", replica=ANYBODY).text
    assert "Replica 2 leads broker-a in epoch 5" in client.act(path, csrf, replica="2").text
    assert called(world, "switch_over") == [(("broker-a", 2), {})]


def test_failovers_are_paused_and_go_on(world):
    client = open_console(world)
    csrf = client.csrf("/cluster/broker-a/pause")
    client.act("/cluster/broker-a/pause", csrf)
    client.act("/cluster/broker-a/resume", csrf)
    assert called(world, "pause_failover") == [
        (("broker-a",), {}),
        (("broker-a",), {"paused": False}),
    ]


def test_settings_that_are_no_default_come_first(world):
    client = open_console(world)
    path = "/api/v1/cluster/broker-a/settings"
    found = client.get(path).json()
    assert [one["key"] for one in found["table"]["rows"]] == [
        "listen_port",
        "storage.file_reserved_time",
    ]
    assert client.get(path, params={"kind": "all"}).json()["table"]["total"] == 3
    page = client.get("/cluster/broker-a/settings").text
    assert 'data-test="change-storage.file_reserved_time"' in page
    assert 'data-test="change-listen_port"' not in page
    assert client.get("/namesrv/settings").status_code == 200
    assert client.get("/namesrv/settings", params={"address": "evil:1"}).status_code == 400


@pytest.mark.parametrize("path", ["/cluster/broker-a/change", "/namesrv/change"])
def test_a_setting_changes_after_a_plan(world, path):
    client = open_console(world)
    csrf = client.csrf(path)
    plan = client.act(path, csrf, "plan", key="log_level", value="DEBUG").text
    assert "DEBUG" in plan
    assert called(world, "set_config") == []
    assert "In force" not in client.act(path, csrf, key="log_level", value="DEBUG").text
    assert called(world, "set_config")[0][0][-2:] == ({"log_level": "DEBUG"}, [])
    client.act(path, csrf, key="log_level", unset="on")
    assert called(world, "set_config")[1][0][-2:] == ({}, ["log_level"])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"key": "listen_port", "value": "9"}, "only with a restart"),
        ({"key": "nope", "value": "9"}, "no setting"),
        ({"key": "log_level"}, "value: write one"),
    ],
)
def test_a_setting_that_cannot_change_is_a_sentence(world, fields, sentence):
    client = open_console(world)
    path = "/cluster/broker-a/change"
    answer = client.act(path, client.csrf(path), "plan", **fields)
    assert answer.status_code == 400
    assert sentence in answer.text


def test_keys_are_written_and_deleted(world):
    client = open_console(world)
    page = client.get("/kv").text
    assert "<b>" not in page.partition('data-test="keys"')[2].partition("</table>")[0]
    assert "⟨U+202E⟩" in page
    csrf = client.csrf("/kv/put")
    fields = {"namespace": "shop", "key": "currency", "value": "USD"}
    assert "EUR" in client.act("/kv/put", csrf, "plan", **fields).text
    assert "127.0.0.1:9877 does not answer" in client.act("/kv/put", csrf, **fields).text
    assert called(world, "put_kv") == [(("shop", "currency", "USD"), {})]
    gone = client.act("/kv/delete", csrf, namespace="shop", key="currency").text
    assert "is deleted" in gone
    assert "has no x" in client.act("/kv/delete", csrf, namespace="shop", key="x").text


def test_an_export_can_be_imported(world):
    client = open_console(world)
    answer = client.get("/cluster/export")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.content == write_setup(world.answers["export"])
    path = "/cluster/import"
    csrf = client.csrf(path)
    fields = {"document": answer.text}
    plan = client.act(path, csrf, "plan", **fields).text
    assert "1 × create, 1 × leave, 1 × conflict" in plan
    assert "typed" not in plan
    assert "1 steps are done, 1 conflicts" in client.act(path, csrf, **fields).text
    assert "not what" in client.act(path, csrf, "plan", document="no json").text
    assert 'id="typed"' in client.act(path, csrf, "plan", force="on", **fields).text


def test_a_probe_says_which_broker_fails(world):
    client = open_console(world)
    path = "/cluster/probe"
    csrf = client.csrf(path)
    assert "each of 2 broker groups" in client.act(path, csrf, "plan", count="1").text
    done = client.act(path, csrf, count="1").text
    assert "1 of 2 test messages are stored" in done
    assert "nobody is there" in done
