"""Two name servers that know nothing of each other, and a real broker."""

from __future__ import annotations

import pytest

from mqmesh.errors import EndpointUnreachable, TopicNotFound
from mqmesh.protocol.admin import UpdateTopicRequest
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.route import (
    DeleteTopicRequest,
    GetRouteRequest,
    Perm,
    TopicConfig,
    TopicRoute,
    WipeWritePermRequest,
)
from mqmesh.roles.broker.config import BrokerConfig, BrokerStoreConfig
from mqmesh.roles.broker.server import BrokerServer
from mqmesh.roles.namesrv.config import NamesrvConfig
from mqmesh.roles.namesrv.server import NameServer


class Cluster:
    """Name servers and one broker on one event loop."""

    def __init__(self, wire, tmp_path) -> None:
        self.wire = wire
        self.tmp_path = tmp_path
        self.servers = [self.start_server() for _ in range(2)]
        self.endpoints = [endpoint for _, endpoint in self.servers]
        self.clients = [wire.client(endpoint) for endpoint in self.endpoints]
        self.broker, self.broker_endpoint = self.start_broker()
        self.admin = wire.client(self.broker_endpoint)

    def start_server(self, port: int = 0):
        server = NameServer(NamesrvConfig(listen_port=port), self.wire.transport)
        try:
            return server, server.start()
        except OSError:
            server.stop()
            raise

    def restart_server(self, index: int) -> None:
        """Bring a stopped name server back, empty, at its old place."""
        port = int(self.endpoints[index].rpartition(":")[2])
        made = []

        def start() -> bool:
            try:
                made.append(self.start_server(port))
            except OSError:
                return False  # ZeroMQ lets go of a port a moment after it was asked to
            return True

        self.wire.until(start)
        self.servers[index] = made[0]

    def start_broker(self, folder: str = "store"):
        broker = BrokerServer(
            BrokerConfig(
                namesrv_addr=[one.removeprefix("tcp://") for one in self.endpoints],
                listen_port=0,
                enable_ipc=False,
                store_path_root_dir=str(self.tmp_path / folder),
                storage=BrokerStoreConfig(backend="memory"),
            ),
            self.wire.transport,
        )
        return broker, broker.start()

    def create(self, topic: str, **options) -> None:
        request = UpdateTopicRequest(TopicConfig(topic, **options))
        self.wire.ask(self.admin, RequestCode.UPDATE_AND_CREATE_TOPIC, request)

    def routes(self, topic: str) -> list[TopicRoute | None]:
        """What each name server says."""
        found: list[TopicRoute | None] = []
        for client in self.clients:
            try:
                found.append(
                    self.wire.ask(
                        client,
                        RequestCode.GET_ROUTEINFO_BY_TOPIC,
                        GetRouteRequest(topic),
                        TopicRoute,
                    )
                )
            except (TopicNotFound, EndpointUnreachable):  # one that was just started again
                found.append(None)
        return found

    def until_all_know(self, topic: str) -> float:
        return self.wire.until(lambda: all(self.routes(topic)))

    def stop(self) -> None:
        self.broker.stop()
        for server, _ in self.servers:
            server.stop()


@pytest.fixture
def cluster(wire, tmp_path):
    cluster = Cluster(wire, tmp_path)
    yield cluster
    cluster.stop()


def test_a_new_topic_is_known_to_all_name_servers_soon(cluster):
    cluster.create("t", read_queue_nums=8, write_queue_nums=8)
    assert cluster.until_all_know("t") < 1
    for route in cluster.routes("t"):
        assert route is not None
        assert route.queues[0].write_queue_nums == 8
        assert f"tcp://{route.brokers[0].addresses[0].tcp}" == cluster.broker_endpoint
    one, other = cluster.routes("t")
    assert one.hint_endpoint != other.hint_endpoint
    assert one.queues == other.queues


def test_all_routes_are_back_soon_after_all_name_servers_were_restarted_empty(cluster):
    cluster.create("t")
    cluster.until_all_know("t")
    before = [route.queues for route in cluster.routes("t")]
    for server, _ in cluster.servers:
        server.stop()
    cluster.wire.turn_for(0.5)
    for index in range(2):
        cluster.restart_server(index)
    assert cluster.until_all_know("t") < 3
    assert [route.queues for route in cluster.routes("t")] == before


def test_a_topic_made_while_a_name_server_was_away_is_known_when_it_is_back(cluster):
    cluster.create("t")
    cluster.until_all_know("t")
    cluster.servers[0][0].stop()
    cluster.create("u")
    cluster.restart_server(0)
    assert cluster.until_all_know("u") < 3
    assert all(cluster.routes("t"))


def test_a_broker_that_stops_is_in_no_route_at_once(cluster):
    cluster.create("t")
    cluster.until_all_know("t")
    cluster.broker.stop()
    assert cluster.wire.until(lambda: cluster.routes("t") == [None, None]) < 0.5


def test_a_deleted_topic_is_gone_everywhere(cluster):
    cluster.create("t")
    cluster.until_all_know("t")
    cluster.wire.ask(cluster.admin, RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicRequest("t"))
    for client in cluster.clients:
        cluster.wire.ask(client, RequestCode.DELETE_TOPIC_IN_NAMESRV, DeleteTopicRequest("t"))
    cluster.wire.until(lambda: cluster.routes("t") == [None, None])
    cluster.wire.turn_for(0.3)
    assert cluster.routes("t") == [None, None]


def test_a_topic_deleted_at_the_name_servers_only_comes_back_with_the_next_heartbeat(cluster):
    cluster.create("t")
    cluster.until_all_know("t")
    for client in cluster.clients:
        cluster.wire.ask(client, RequestCode.DELETE_TOPIC_IN_NAMESRV, DeleteTopicRequest("t"))
    assert cluster.routes("t") == [None, None]
    cluster.create("u")
    cluster.until_all_know("t")


def test_a_broker_is_drained_at_each_name_server(cluster):
    cluster.create("t")
    cluster.until_all_know("t")
    cluster.wire.ask(
        cluster.clients[0],
        RequestCode.WIPE_WRITE_PERM_OF_BROKER,
        WipeWritePermRequest("broker-a"),
    )
    one, other = cluster.routes("t")
    assert one.queues[0].perm == Perm.READ
    assert other.queues[0].perm == Perm.READ_WRITE


def test_a_second_broker_of_the_same_name_changes_no_route(cluster):
    cluster.create("t")
    cluster.until_all_know("t")
    before = cluster.routes("t")
    second, _ = cluster.start_broker("second")
    cluster.wire.turn_for(0.5)
    assert cluster.routes("t") == before
    second.stop()
    cluster.wire.turn_for(0.1)
    assert cluster.routes("t") == before


def test_the_refusal_names_who_is_in_the_way(cluster, caplog):
    second, _ = cluster.start_broker("second")
    cluster.wire.turn_for(0.3)
    second.stop()
    assert "another live process" in caplog.text
