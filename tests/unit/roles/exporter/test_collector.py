"""Who is asked, and what is told of those who do not answer."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mqmesh.errors import ConfigError, RequestTimeout
from mqmesh.metrics import Metric, MetricKind, MetricReading, MetricSample, Readings
from mqmesh.protocol.admin import RoleInfo
from mqmesh.protocol.groups import GroupTopics
from mqmesh.protocol.route import BrokerAddress, BrokerData, ClusterInfo
from mqmesh.roles.exporter.collector import Collector
from mqmesh.roles.exporter.config import ExporterConfig
from mqmesh.roles.exporter.page import text_of
from mqmesh.roles.supervisor.run_file import RoleEntry
from mqmesh.sdk.admin.group_admin import AllProgress
from mqmesh.testing.clock import ManualClock


def gauge(name, value):
    metric = Metric(name, MetricKind.GAUGE, "", "what it is")
    return MetricReading(metric, [MetricSample((), value)])


def entry(endpoint, name):
    return RoleEntry(role="coordinator", name=name, endpoint=endpoint)


class World:
    """A cluster: a master with two replicas; those in ``gone`` do not answer."""

    def __init__(self):
        self.gone = set()
        self.clients = []
        addresses = {number: BrokerAddress(f"host:{number}") for number in range(3)}
        self.brokers = [BrokerData("c", "broker-a", addresses)]
        self.own_ids = {"host:0": 2, "host:1": 1, "host:2": 3, "ns:1": 0, "co:1": 0, "co:2": 0}
        self.own_ids["elsewhere:2"] = 3
        self.beside = [entry("co:1", "coordinator"), entry("co:2", "co:2")]
        self.groups = ["billing", "mail", "stock"]

    def connect(self, endpoint, broker_name):
        self.clients.append(Client(self, broker_name))
        return self.clients[-1]


class Client:
    def __init__(self, world, broker_name):
        self.world, self.broker_name, self.is_closed = world, broker_name, False
        self.was_asked_for_groups = False

    def close(self):
        self.is_closed = True

    def check(self, endpoint):
        if endpoint in self.world.gone:
            raise RequestTimeout("no answer")

    def cluster(self):
        self.check("ns:1")
        return ClusterInfo(self.world.brokers)

    def role_info(self, endpoint):
        self.check(endpoint)
        return Readings([gauge("broker_id", self.world.own_ids[endpoint])])

    def ping(self, endpoint):
        name = "coordinator" if endpoint == "co:1" else endpoint
        return RoleInfo("coordinator", name, "0", 1, "running", 1)

    def all_progress(self):
        self.was_asked_for_groups = True
        groups = [GroupTopics(name, [], dead=5) for name in self.world.groups]
        return {self.broker_name: AllProgress(groups, 1)}


@pytest.fixture
def world() -> World:
    return World()


def make(world, clock=None, **settings) -> Collector:
    config = ExporterConfig(namesrv_addr=["ns:1"], other_addr=["co:1"], **settings)
    return Collector(config, clock or ManualClock(), lambda: world.beside, connect=world.connect)


def told(collector, name):
    """Values of an exported metric by node."""
    families = text_string_to_metric_families(text_of(collector.collect()).decode())
    return {
        (sample.labels["node_type"], sample.labels["node_id"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name == name
    }


def test_everybody_is_asked_and_replicas_have_their_own_numbers(world):
    assert told(make(world), "mqmesh_up") == {
        ("namesrv", "ns:1"): 1,
        ("coordinator", "coordinator"): 1,
        ("coordinator", "co:2"): 1,
        ("broker", "broker-a-r2"): 1,
        ("broker", "broker-a-r1"): 1,
        ("broker", "broker-a-r3"): 1,
    }


def test_a_broker_of_the_run_file_is_down_when_name_servers_have_dropped_it(world):
    world.beside = [
        RoleEntry(role="broker", name="broker-a-r1", endpoint="tcp://host:1"),
        RoleEntry(role="broker", name="broker-a-r3", endpoint="tcp://elsewhere:2"),
        RoleEntry(role="broker", name="broker-b", endpoint="tcp://host:9"),
    ]
    world.gone = {"host:9"}
    up = told(make(world), "mqmesh_up")
    assert up["broker", "broker-b"] == 0
    assert len([one for one in up if one[0] == "broker"]) == 4, "who is listed is asked once"


def test_a_broker_that_name_servers_tell_later_is_asked_for_its_own_groups(world):
    listed, world.brokers = world.brokers, []
    world.beside = [RoleEntry(role="broker", name="broker-a", endpoint="tcp://host:0")]
    collector = make(world)
    collector.collect()
    world.brokers = listed
    collector.collect()
    asked = {one.broker_name for one in world.clients if one.was_asked_for_groups}
    assert asked == {"broker-a"}, "and not for those of all brokers"


def test_who_does_not_answer_is_down_and_hides_nobody(world):
    collector = make(world)
    collector.collect()
    world.gone = {"host:1", "ns:1"}
    up = told(collector, "mqmesh_up")
    assert up["namesrv", "ns:1"] == up["broker", "broker-a-r1"] == 0
    assert up["broker", "broker-a-r2"] == 1, "brokers are known from before"


def test_who_never_answered_has_the_names_of_the_run_file_or_none(world):
    world.gone = {"co:1", "co:2"}
    up = told(make(world), "mqmesh_up")
    assert up["coordinator", "co:2"] == 0
    world.beside = []
    assert told(make(world), "mqmesh_up")["process", "co:1"] == 0


def test_who_does_not_answer_any_more_keeps_its_names(world):
    world.beside = []
    collector = make(world)
    assert told(collector, "mqmesh_up")["coordinator", "coordinator"] == 1
    world.gone = {"co:1", "host:0"}
    up = told(collector, "mqmesh_up")
    assert up["coordinator", "coordinator"] == up["broker", "broker-a-r2"] == 0
    assert len(up) == 5


def test_keys_that_cannot_be_read_are_told_at_once():
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        Collector(ExporterConfig(credentials="nowhere.toml"), ManualClock())


def test_without_any_answer_there_is_a_page(world):
    world.gone = {"ns:1", "co:1", "co:2"}
    assert set(told(make(world), "mqmesh_up").values()) == {0}


def test_groups_beyond_the_limit_are_counted(world):
    collector = make(world, max_groups=2)
    (left_out,) = told(collector, "mqmesh_exporter_groups_left_out").values()
    assert left_out == 1
    text = text_of(collector.collect())
    assert b'group="billing"' in text
    assert b'group="stock"' not in text


def test_groups_that_are_not_told_do_not_count_towards_the_limit(world):
    collector = make(world, max_groups=1, group_regex="*oc*")
    (left_out,) = told(collector, "mqmesh_exporter_groups_left_out").values()
    assert left_out == 0
    text = text_of(collector.collect())
    assert b'group="stock"' in text
    assert b"billing" not in text


def test_the_names_of_rocketmq_4_can_be_left_out(world):
    assert b"rocketmq_broker_tps" in text_of(make(world).collect())
    assert b"rocketmq_broker_tps" not in text_of(make(world, rocketmq4_names=False).collect())


def test_a_broker_that_left_is_down_for_a_while_and_then_forgotten(world):
    clock = ManualClock()
    collector = make(world, clock, forget_ms=1_000)
    assert len(told(collector, "mqmesh_up")) == 6
    world.brokers = []
    assert told(collector, "mqmesh_up")["broker", "broker-a-r1"] == 0
    clock.advance(1_001)
    assert len(told(collector, "mqmesh_up")) == 3


def test_connections_to_brokers_that_left_are_closed(world):
    collector = make(world)
    collector.collect()
    world.brokers = []
    collector.collect()
    assert [one.is_closed for one in world.clients if one.broker_name] == [True] * 3
    collector.close()
    assert all(one.is_closed for one in world.clients)
