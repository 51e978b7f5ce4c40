"""Where a table lies, and is made, with servers that a test plays."""

import pytest

from mqmesh.errors import InvalidArgument, MessageIllegal, NoPermission, TopicNotFound
from mqmesh.protocol.admin import TopicConfigs
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.route import (
    BrokerAddress,
    BrokerData,
    ClusterInfo,
    GetRouteRequest,
    QueueData,
    TopicConfig,
    TopicRoute,
)
from mqmesh.protocol.tables import TableEntries
from mqmesh.sdk.tables.key_value import KeyValue
from mqmesh.testing.clock import ManualClock

BROKERS = [BrokerData("c", name, {0: BrokerAddress(f"{name}:1")}) for name in ("a", "b")]
TABLE = TopicConfig("kv", 1, 1, order=True, history=1)


class Cluster:
    """A name server and two brokers, behind the transport of a client.

    Attributes:
        tables: The topic of each broker that has it.
        refusal: Of READ_TABLE.
        meanwhile: Called when a table was made.
    """

    ring = None

    def __init__(self):
        self.clock = ManualClock()
        self.tables = {}
        self.refusal = None
        self.meanwhile = lambda: None

    def channel(self, endpoint):
        return Channel(self, endpoint.removeprefix("tcp://").split(":")[0])

    def close(self):
        """The client closes its transport."""

    def answer(self, place, code, header):
        if code == RequestCode.GET_BROKER_CLUSTER_INFO:
            return ClusterInfo(BROKERS)
        if code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            assert decode_header(GetRouteRequest, header).topic == "kv"
            if not self.tables:
                raise _not_found()
            return TopicRoute("kv", [QueueData(name, 1, 1, 6) for name in self.tables], BROKERS)
        if code == RequestCode.GET_TOPIC_CONFIG:
            if place not in self.tables:
                raise _not_found()
            return TopicConfigs([self.tables[place]])
        if code == RequestCode.UPDATE_AND_CREATE_TOPIC:
            self.tables[place] = TABLE
            self.meanwhile()
            return TABLE
        assert code == RequestCode.READ_TABLE
        if self.refusal is not None:
            raise self.refusal
        return TableEntries(0, [], "")


class Channel:
    """One connection of the client's."""

    def __init__(self, cluster, place):
        self._cluster = cluster
        self._place = place

    def request(self, code, *, header, timeout_ms, **parts):
        answer = encode_header(self._cluster.answer(self._place, code, header))
        return Command(0, 1, 1, memoryview(answer), memoryview(b""))

    def cancel(self):
        """Nothing is under way."""

    close = cancel


def _not_found():
    return TopicNotFound("no topic 'kv'")


@pytest.fixture
def cluster():
    return Cluster()


@pytest.fixture
def kv(cluster):
    with KeyValue("kv", "ns:1", transport=cluster) as kv:
        yield kv


def make(cluster):
    with KeyValue("kv", "ns:1", transport=cluster, create=True):
        pass


def test_a_table_is_made_once(cluster):
    make(cluster)
    make(cluster)
    assert len(cluster.tables) == 1


def test_who_makes_a_table_that_another_one_makes_elsewhere_does_not_write_to_it(cluster, kv):
    cluster.meanwhile = lambda: cluster.tables.update(a=TABLE, b=TABLE)
    with pytest.raises(InvalidArgument, match="lies on a, b, and a table on one"):
        make(cluster)
    with pytest.raises(InvalidArgument, match="delete it where it is not wanted"):
        kv.put("key", b"1")


def test_an_ordinary_topic_is_not_written_to_as_a_table(cluster, kv):
    cluster.tables["a"] = TopicConfig("kv", 1, 1)
    cluster.refusal = MessageIllegal("topic 'kv' is no table (history = 0)")
    with pytest.raises(MessageIllegal, match="no table"):
        make(cluster)
    with pytest.raises(MessageIllegal, match="no table"):
        kv.put("key", b"1")


def test_who_may_only_write_need_not_read(cluster):
    cluster.refusal = NoPermission("user 'w' has no SUB")
    make(cluster)
