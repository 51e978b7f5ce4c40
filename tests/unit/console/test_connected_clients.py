"""Clients: producers and consumers of all brokers, one row each."""

from __future__ import annotations

import pytest
from harness.console import ConsoleWorld, open_console

from mqmesh.console.queries.clients import client_row
from mqmesh.errors import RequestTimeout
from mqmesh.protocol.gateway import GatewayClient
from mqmesh.protocol.groups import ClientInfo
from mqmesh.protocol.route import BrokerAddress, BrokerData, ClusterInfo
from mqmesh.roles.supervisor.run_file import RoleEntry, RunRecord, write_record

ID = "vm1:4711@DEFAULT#1f2e"


def info(client_id=ID, *, connected=True, silent_ms=900, produces=(), consumes=()):
    return ClientInfo(
        client_id, "PYTHON", "0.1.0", connected, silent_ms, list(produces), list(consumes)
    )


@pytest.fixture
def world():
    names = ("broker-a", "broker-b")
    brokers = [BrokerData("c", name, {0: BrokerAddress("h:1")}) for name in names]
    known = {
        "broker-a": [info(consumes=["billing"]), info("odd <i>", produces=["shop"])],
        "broker-b": [info(connected=False, silent_ms=70_000, consumes=["billing"])],
    }
    return ConsoleWorld({"cluster": ClusterInfo(brokers), "clients": known.__getitem__})


def test_a_client_of_two_brokers_is_one_row(world):
    found = open_console(world).get("/api/v1/clients", params={"kind": "consumers"}).json()
    (row,) = found["rows"]
    assert (row["machine"], row["pid"], row["silent_ms"]) == ("vm1", 4711, 900)
    assert row["brokers"] == ["broker-a", "broker-b"]
    assert row["connected"]


def test_a_member_leads_to_what_it_says_of_itself(world):
    page = open_console(world).get("/clients").text
    assert "/groups/billing/member?client_id=vm1%3A4711%40DEFAULT%231f2e" in page
    assert "odd &lt;i&gt;" in page


def test_clients_of_a_broker_that_does_not_answer_are_missing_and_it_is_said(world):
    known = world.answers["clients"]
    world.answers["clients"] = lambda name: (
        RequestTimeout("silence") if name == "broker-b" else known(name)
    )
    page = open_console(world).get("/clients", params={"search": "BILL"}).text
    assert "no answer of broker-b" in page
    assert "1 clients with" in page


@pytest.mark.parametrize("client_id", ["", "@", "a:b@x", ":7", "host:²@x", "x" * 512])
def test_an_id_of_another_kind_has_no_machine(client_id):
    assert client_row(client_id, [("broker-a", info(client_id))]).pid == 0


@pytest.fixture
def folder(tmp_path):
    """The data folder of a cluster with two gateways."""
    roles = [
        RoleEntry(role=role, name=name, endpoint=f"ipc://{name}", state="running")
        for role, name in (("gateway", "g-1"), ("gateway", "g-2"), ("schedule", "s"))
    ]
    write_record(tmp_path, RunRecord(pid=1, started_ms=1, namesrv="h:1", roles=roles))
    return tmp_path


def test_clients_of_rocketmq_are_those_of_all_gateways(folder):
    java = GatewayClient(
        "10.0.0.7@1",
        "shop",
        "remoting",
        "10.0.0.7:5",
        "JAVA",
        "497",
        True,
        5,
        [],
        ["g"],
        ["t", "and 7 more"],
        [],
    )
    known = {"ipc://g-1": [java], "ipc://g-2": RequestTimeout("silence")}
    world = ConsoleWorld({"gateway_clients": known.__getitem__})
    client = open_console(world, data_dir=str(folder))
    found = client.get("/api/v1/gateway", params={"search": "SHOP"}).json()
    (row,) = found["rows"]
    assert (row["gateway"], row["address"], row["topics"][0]) == ("g-1", "10.0.0.7:5", "t")
    page = client.get("/gateway").text
    assert "no answer of g-2" in page
    assert "/groups/g" in page
    assert "<div>and 7 more</div>" in page
    assert "JAVA 497 by remoting" in page
    assert "No client of RocketMQ" in open_console(world).get("/gateway").text
