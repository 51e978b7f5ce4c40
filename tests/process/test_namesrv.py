"""A name server over real sockets."""

from __future__ import annotations

import os
import signal

import pytest
from harness.stopwatch import Stopwatch

from mqmesh.errors import NoPermission, StoreLocked, TopicNotFound
from mqmesh.protocol.admin import RoleInfo
from mqmesh.protocol.command import decode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.route import (
    BrokerAddress,
    ClusterInfo,
    DataVersion,
    DeleteTopicRequest,
    GetClusterRequest,
    GetRouteRequest,
    KvRequest,
    KvResponse,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    RouteHint,
    TopicConfig,
    TopicList,
    TopicListRequest,
    TopicRoute,
    UnregisterBrokerRequest,
    WipeWritePermRequest,
    topic_hash,
)
from mqmesh.roles.namesrv.config import NamesrvConfig
from mqmesh.roles.namesrv.server import HINT_INTERVAL_MS, NameServer
from mqmesh.transport.zmq.hints import HintSubscriber
from mqmesh.transport.zmq.sockets import HEARTBEAT_INTERVAL_MS

FIRST_PING_S = 3 * HEARTBEAT_INTERVAL_MS / 1_000
"""By then a broker's connection has sent a ping: one that stops before leaves nothing to miss."""

BROKER = """
import sys
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.command import encode_header
from mqmesh.protocol.route import BrokerAddress, DataVersion, RegisterBrokerRequest, TopicConfig
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.client import CommandClient
from mqmesh.transport.zmq.loop import EventLoop
loop = EventLoop()
def register(up):
    if up:
        client.request(
            RequestCode.REGISTER_BROKER,
            lambda answer: None,
            header=encode_header(
                RegisterBrokerRequest(
                    "C", "broker-a", 0, BrokerAddress("127.0.0.1:1"), DataVersion(1, 1),
                    [TopicConfig("t")], 6, 1,
                )
            ),
        )
client = CommandClient(sockets.new_context(), loop, sys.argv[1], on_connection=register)
print("ready", flush=True)
loop.run()
"""


class Site:
    """A name server and a client that knows it."""

    def __init__(self, wire, **settings) -> None:
        self.wire = wire
        self.server = NameServer(NamesrvConfig(**({"listen_port": 0} | settings)), wire.transport)
        self.endpoint = self.server.start()
        self.client = wire.client(self.endpoint)
        self.hints: list[RouteHint] = []
        self.subscriptions = 0

    def ask(self, code, header=None, kind=None, client=None):
        return self.wire.ask(client or self.client, code, header, kind)

    def route(self, topic="t"):
        return self.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteRequest(topic), TopicRoute)

    def has_route(self, topic="t"):
        try:
            self.route(topic)
        except TopicNotFound:
            return False
        return True

    def register(self, client=None, name="broker-a", *, topics=("t",), instance=1, counter=1):
        configs = [TopicConfig(one) if isinstance(one, str) else one for one in topics]
        header = RegisterBrokerRequest(
            "C",
            name,
            0,
            BrokerAddress("127.0.0.1:1", "/x", "host"),
            DataVersion(5, counter),
            configs,
            6,
            instance,
        )
        return self.ask(RequestCode.REGISTER_BROKER, header, RegisterBrokerResponse, client)

    def listen(self):
        """Hear hints; returns when they surely come."""
        info = self.ask(RequestCode.GET_BROKER_CLUSTER_INFO, GetClusterRequest(), ClusterInfo)

        def connected():
            self.subscriptions += 1

        self.wire.closing(
            HintSubscriber(
                self.wire.context,
                self.wire.loop,
                info.hint_endpoint,
                on_hint=lambda data: self.hints.append(decode_header(RouteHint, data)),
                on_connected=connected,
            )
        )
        self.wire.until(lambda: self.subscriptions)
        # The subscription itself is on its way: publish until it is there.
        number = 0
        while not self.hints:
            number += 1
            self.register(name="probe", topics=["probe"], counter=number, instance=9)
            self.ask(RequestCode.UNREGISTER_BROKER, UnregisterBrokerRequest("C", "probe", 0, 9))
            self.wire.loop.tick(20)
        # Hints of the probe may be gathered still.
        self.wire.turn_for(3 * HINT_INTERVAL_MS / 1_000)
        self.hints.clear()


@pytest.fixture
def site(wire):
    site = Site(wire)
    yield site
    site.server.stop()


def test_it_answers_to_ping(site):
    info = site.ask(RequestCode.PING, kind=RoleInfo)
    assert (info.role, info.name, info.pid, info.state) == (
        "namesrv",
        "namesrv",
        os.getpid(),
        "running",
    )
    assert info.uptime_ms >= 0
    assert info.version


def test_a_registered_broker_is_in_routes_topics_and_cluster(site):
    assert not site.register().need_topics
    route = site.route()
    assert [queue.broker_name for queue in route.queues] == ["broker-a"]
    assert route.brokers[0].addresses == {0: BrokerAddress("127.0.0.1:1", "/x", "host")}
    assert route.hint_endpoint.startswith("tcp://127.0.0.1:")
    info = site.ask(RequestCode.GET_BROKER_CLUSTER_INFO, GetClusterRequest(), ClusterInfo)
    assert info.brokers == route.brokers
    assert info.hint_endpoint == route.hint_endpoint
    topics = site.ask(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, TopicListRequest(), TopicList)
    assert topics.topics == ["t"]


def hint_of(*topics: str) -> RouteHint:
    return RouteHint(["broker-a"], sorted(map(topic_hash, topics)))


def test_every_change_is_hinted(site):
    site.listen()
    broker = site.wire.client(site.endpoint)

    def hint():
        site.wire.until(lambda: site.hints)
        return site.hints.pop()

    site.register(broker)
    assert hint() == hint_of("t")
    site.register(broker, topics=["t", "u"], counter=2)
    assert hint() == hint_of("u")
    site.register(broker, topics=["t", "u"], counter=2)
    site.ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, WipeWritePermRequest("broker-a"))
    assert hint() == hint_of("t", "u")
    site.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, DeleteTopicRequest("u"))
    assert hint() == hint_of("u")
    site.ask(RequestCode.UNREGISTER_BROKER, UnregisterBrokerRequest("C", "broker-a", 0, 1))
    assert hint() == hint_of("t")
    assert site.hints == []


def test_many_changes_in_one_turn_make_one_hint(site):
    site.listen()
    clients = [site.wire.client(site.endpoint) for _ in range(8)]
    for number, client in enumerate(clients):
        site.register(client, name=f"broker-{number}", topics=[f"t{number}"])
    site.wire.until(lambda: {b for one in site.hints for b in one.brokers} >= {"broker-7"})
    site.hints.clear()
    for client in clients:
        client.close()
    site.wire.until(lambda: len({b for one in site.hints for b in one.brokers}) == 8)
    hashes = {topic_hash(f"t{number}") for number in range(8)}
    assert {one for hint in site.hints for one in hint.topics} == hashes
    assert len(site.hints) <= 8


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_clients_learn_of_a_dead_or_stopped_broker_in_under_two_seconds(site, peer_process, number):
    site.listen()
    with peer_process(BROKER, site.endpoint) as broker:
        site.wire.until(lambda: site.hints)
        assert site.has_route()
        site.hints.clear()
        site.wire.turn_for(FIRST_PING_S)
        watch = Stopwatch()
        os.kill(broker.pid, number)
        site.wire.until(lambda: site.hints)
        assert not site.has_route()
        assert watch.seconds < 2


def test_a_broker_that_was_stopped_and_goes_on_registers_again_by_itself(site, peer_process):
    with peer_process(BROKER, site.endpoint) as broker:
        site.wire.until(site.has_route)
        site.wire.turn_for(FIRST_PING_S)
        os.kill(broker.pid, signal.SIGSTOP)
        site.wire.until(lambda: not site.has_route())
        os.kill(broker.pid, signal.SIGCONT)
        site.wire.until(site.has_route)


def test_a_broker_that_was_killed_returns_with_a_new_life(site, peer_process):
    for instance in range(2, 7):
        with peer_process(BROKER, site.endpoint):
            site.wire.until(site.has_route)
        # Its process is gone, so the name server may have to read that first, and no more.
        broker = site.wire.client(site.endpoint)

        def returned(broker=broker, instance=instance):
            try:
                return site.register(broker, instance=instance)
            except NoPermission:
                return False

        assert site.wire.until(returned) < 0.5
        broker.close()
        site.wire.until(lambda: not site.has_route())


def test_what_must_outlive_a_restart_does(wire, tmp_path):
    site = Site(wire, data_dir=str(tmp_path / "made" / "here"))
    site.ask(RequestCode.PUT_KV_CONFIG, KvRequest("ns", "k", "v"))
    site.register(topics=["t", TopicConfig("o", 3, 3, order=True)])
    site.ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, WipeWritePermRequest("broker-a"))
    site.server.stop()
    site.client.close()
    again = Site(wire, data_dir=str(tmp_path / "made" / "here"))
    assert again.ask(RequestCode.GET_KV_CONFIG, KvRequest("ns", "k"), KvResponse).pairs == {
        "k": "v"
    }
    assert not again.has_route("t"), "only brokers know that"
    route = again.route("o")
    assert (route.order, route.brokers) == (True, [])
    assert [queue.write_queue_nums for queue in route.queues] == [3]
    assert again.register().wiped_write_perm
    again.server.stop()


def test_one_data_dir_serves_one_process(wire, tmp_path):
    site = Site(wire, data_dir=str(tmp_path))
    with pytest.raises(StoreLocked):
        Site(wire, data_dir=str(tmp_path))
    site.server.stop()
    again = Site(wire, data_dir=str(tmp_path))
    again.server.stop()


def test_a_damaged_state_is_refused_and_kept(wire, tmp_path):
    site = Site(wire, data_dir=str(tmp_path))
    site.ask(RequestCode.PUT_KV_CONFIG, KvRequest("ns", "k", "v"))
    site.server.stop()
    for name in ("namesrv.json", "namesrv.json.bak"):
        if (tmp_path / name).exists():
            (tmp_path / name).write_bytes(b"garbage")
    server = NameServer(NamesrvConfig(listen_port=0, data_dir=str(tmp_path)), wire.transport)
    with pytest.raises(Exception, match=r"namesrv\.json"):
        server.start()
    server.stop()
    assert list(tmp_path.glob("*.damaged-*"))


def test_a_taken_port_is_said_and_leaves_nothing_open(wire, site):
    port = int(site.endpoint.rpartition(":")[2])
    server = NameServer(NamesrvConfig(listen_port=port), wire.transport)
    with pytest.raises(OSError, match=str(port)):
        server.start()
    server.stop()
    server.stop()


def test_a_name_server_of_ten_thousand_topics_stays_quick(site):
    topics = [f"topic-with-a-longer-name-{number:05}" for number in range(10_000)]
    site.register(topics=topics)
    watch = Stopwatch()
    for counter in range(50):
        answer = site.ask(
            RequestCode.REGISTER_BROKER,
            RegisterBrokerRequest(
                "C", "broker-a", 0, BrokerAddress("a:1"), DataVersion(5, 1), None, 6, 1
            ),
            RegisterBrokerResponse,
        )
        assert not answer.need_topics
        site.route(topics[counter * 100])
    assert watch.seconds < 2
    listing = site.ask(
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, TopicListRequest(), TopicList
    )
    assert listing.topics == topics
