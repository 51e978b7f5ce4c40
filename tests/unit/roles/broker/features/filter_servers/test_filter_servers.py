"""Which filter servers a broker knows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mqmesh.errors import BrokerNotAvailable, NoPermission, SystemBusy
from mqmesh.protocol.filters import RegisterFilterServerRequest
from mqmesh.protocol.route import BrokerAddress
from mqmesh.roles.broker.features.filter_servers.feature import FilterServersFeature
from mqmesh.roles.broker.features.filter_servers.state import EXPIRY_MS, MAX_SERVERS, FilterServers


def request(name):
    return RegisterFilterServerRequest(name, BrokerAddress(f"{name}:1"))


def test_a_broker_that_does_not_allow_filters_says_which_setting_does():
    servers = FilterServers(False, "broker-a")
    with pytest.raises(NoPermission, match=r"filter_server\.enable = true"):
        servers.on_register(b"1", request("a"), 0)
    with pytest.raises(NoPermission, match=r"filter_server\.enable = true"):
        servers.choose("g", 0)


def test_all_members_of_a_group_get_the_same_filter_server():
    servers = FilterServers(True, "broker-a")
    assert servers.on_register(b"1", request("a"), 0)
    assert servers.on_register(b"2", request("b"), 0)
    assert not servers.on_register(b"1", request("a"), 500)
    chosen = {servers.choose(group, 600).name for group in ("g", "h")}
    assert chosen == {"a", "b"}
    assert servers.choose("g", 600) == servers.choose("g", 700)


def test_one_that_left_or_fell_silent_is_forgotten():
    servers = FilterServers(True, "broker-a")
    servers.on_register(b"1", request("a"), 0)
    servers.on_disconnect(b"1")
    servers.on_disconnect(b"1")
    with pytest.raises(BrokerNotAvailable, match="at the moment"):
        servers.choose("g", 0)
    servers.on_register(b"2", request("a"), 0)
    servers.choose("g", EXPIRY_MS)
    with pytest.raises(BrokerNotAvailable):
        servers.choose("g", EXPIRY_MS + 1)


def test_there_may_be_only_so_many():
    servers = FilterServers(True, "broker-a")
    for number in range(MAX_SERVERS):
        servers.on_register(b"%d" % number, request(f"f{number}"), 0)
    with pytest.raises(SystemBusy):
        servers.on_register(b"x", request("x"), 0)
    assert servers.on_register(b"x", request("x"), EXPIRY_MS + 1)


def test_metrics_are_sums_over_those_that_are_there():
    servers = FilterServers(True, "broker-a")
    for peer, name in ((b"1", "a"), (b"2", "b")):
        told = RegisterFilterServerRequest(name, BrokerAddress("h:1"), 3, 1, 100, 20)
        servers.on_register(peer, told, 0)
    owner = SimpleNamespace(servers=servers)
    metrics = {one.metric.name: one for one in FilterServersFeature.metrics}
    assert {name: one.read(owner) for name, one in metrics.items()} == {
        "filter_servers": 2,
        "filters": 6,
        "filters_parked": 2,
        "filter_matches": 200,
        "filter_misses": 40,
    }
    servers.on_disconnect(b"1")
    assert metrics["filters"].read(owner) == 3
