"""The engine on a simulated network: routes, connections, heartbeats, and its end."""

from __future__ import annotations

import threading
from functools import partial

import msgspec
import pytest
from harness.batches import PRODUCER_KEY
from harness.simulated_cluster import Fault, FaultKind

from mqmesh.errors import (
    ClientClosed,
    EndpointUnreachable,
    InvalidArgument,
    MQMeshError,
    NoRoute,
    RemoteProtocolError,
    RequestTimeout,
    TopicNotFound,
)
from mqmesh.message import MessageQueue
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import ErrorHeader, Reply, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import HeartbeatRequest
from mqmesh.protocol.messaging import encode_send
from mqmesh.protocol.route import (
    BrokerAddress,
    BrokerData,
    QueueData,
    RouteHint,
    TopicRoute,
    TopicRoutes,
    topic_hash,
)
from mqmesh.sdk.client.broker_connections import choose_endpoint
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.client.options import ClientOptions
from mqmesh.sdk.client.route_finder import LOST_MASTER_MS

SEND = RequestCode.SEND_MESSAGE
ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC


class Client:
    """An engine, and all that it told."""

    def __init__(self, world, **options) -> None:
        self.routes_told: list[set[str]] = []
        self.brokers_told: list[tuple[str, bool]] = []
        self.ended = 0
        self.engine = ClientEngine(
            ClientOptions(namesrv_addr=world.cluster.namesrv_addr, **options),
            heartbeat=lambda: HeartbeatRequest(self.engine.client_id, ["g"]),
            on_routes=self.routes_told.append,
            on_broker=lambda name, up: self.brokers_told.append((name, up)),
            on_end=self._end,
            transport=world.network.transport(),
        )

    def _end(self) -> None:
        self.ended += 1

    def find(self, topic: str) -> list:
        found: list[TopicRoute | MQMeshError] = []
        self.engine.finder.find(topic, found.append)
        return found

    def send(self, broker: str = "a", timeout_ms: int = 500) -> list:
        found: list[object] = []
        self.engine.request(
            broker,
            SEND,
            found.append,
            header=encode_send(1, 1, PRODUCER_KEY),
            timeout_ms=timeout_ms,
        )
        return found


@pytest.fixture
def make(world):
    made = []

    def make(**options) -> Client:
        client = Client(world, **options)
        made.append(client)
        client.engine.start()
        world.run()
        return client

    yield make
    for client in made:
        client.engine.close()
        assert client.ended <= 1


# ---- Routes -------------------------------------------------------------------------------


def test_a_route_is_asked_for_once_however_many_want_it(world, make):
    client = make()
    before = world.cluster.namesrvs[0].requests.count(ROUTE)
    found = client.find("t") + client.find("t")
    one, two = client.find("t"), client.find("t")
    assert found == one == two == [], "never before find returns"
    world.run()
    assert one == two
    assert one[0].topic == "t"
    assert world.cluster.namesrvs[0].requests.count(ROUTE) == before + 1
    assert client.routes_told == [{"t"}]
    queues = client.engine.routes.publish_queues("t")
    assert queues == tuple(MessageQueue("t", "a", number) for number in range(4))


def test_a_topic_that_nobody_knows_is_asked_for_again_each_second(world, make):
    client = make()
    found = client.find("later")
    world.run()
    assert isinstance(found[0], TopicNotFound)
    before = world.cluster.namesrvs[0].requests.count(ROUTE)
    world.run(5_000)
    assert 4 <= world.cluster.namesrvs[0].requests.count(ROUTE) - before <= 6
    world.broker.add_topic("later")
    world.run(1_100)
    assert {"later"} in client.routes_told
    client.find("never")
    client.engine.finder.forget("never")
    world.run(100)
    before = world.cluster.namesrvs[0].requests.count(ROUTE)
    world.run(5_000)
    assert world.cluster.namesrvs[0].requests.count(ROUTE) - before == 0


def test_a_hint_brings_a_new_route_at_once_and_the_poll_brings_it_at_last(world, make):
    client = make()
    client.find("t")
    world.run()
    world.broker.add_topic("t", queues=6)
    world.run(10)
    assert len(client.engine.routes.publish_queues("t")) == 6
    world.network.hearers.clear()  # hints may be lost
    world.broker.add_topic("t", queues=7)
    world.run(100)
    assert len(client.engine.routes.publish_queues("t")) == 6
    world.run(30_000)
    assert len(client.engine.routes.publish_queues("t")) == 7


def test_a_hint_makes_a_client_ask_only_for_the_topics_that_changed(world, make):
    namesrv = world.cluster.namesrvs[0]
    topics = [f"t{number}" for number in range(100)]
    world.broker.topics.update({one: QueueData("a", 1, 1, 6) for one in topics})
    client = make()
    client.engine.finder.refresh([*topics, "missing"])
    world.run()
    assert all(client.engine.routes.route(one) is not None for one in topics)
    namesrv.topics_asked.clear()
    for name in ("t7", "of_others"):
        namesrv.announce(RouteHint(["a"], [topic_hash(name)]))
    world.run(10)
    assert namesrv.topics_asked == ["t7"]


def test_many_routes_are_asked_for_in_few_requests(world, make):
    namesrv = world.cluster.namesrvs[0]
    topics = [f"t{number}" for number in range(10_000)]
    world.broker.topics.update({one: QueueData("a", 1, 1, 6) for one in topics})
    client = make()
    before = len(namesrv.requests)
    found = [client.find(topic) for topic in topics]
    world.run()
    assert [one[0].topic for one in found] == topics
    assert len(namesrv.requests) - before <= 16
    assert sum(map(len, client.routes_told)) == len(topics)
    for ask_all in (client.engine.finder.refresh_all, lambda: namesrv.announce(RouteHint(["a"]))):
        namesrv.topics_asked.clear()
        before = len(namesrv.requests)
        ask_all()
        world.run(10)
        assert sorted(namesrv.topics_asked) == sorted(topics)
        assert len(namesrv.requests) - before <= 16


def test_a_name_server_that_answers_for_other_topics_ends_the_search(world, make, monkeypatch):
    client = make()
    namesrv = world.cluster.namesrvs[0]
    monkeypatch.setattr(namesrv, "_routes", lambda topics: TopicRoutes([], [], ["else"]))
    found = [[], []]
    client.engine.finder.refresh(["x", "y"])
    for topic, one in zip(("x", "y"), found, strict=True):
        client.engine.finder.find(topic, one.append)
    world.run()
    assert [type(one[0]) for one in found] == [RemoteProtocolError] * 2


def test_while_a_master_is_lost_one_topic_of_its_group_is_asked_for_and_then_all(world, make):
    namesrv = world.cluster.namesrvs[0]
    topics = [f"t{number}" for number in range(100)]
    world.broker.topics.update({one: QueueData("a", 1, 1, 6) for one in topics})
    client = make()
    client.engine.finder.refresh(topics)
    world.run()
    client.engine.brokers.connection("a")
    world.run()
    world.cluster.notices_deaths = False  # the hint that tells of it is lost
    world.broker.crash()
    world.run(100)
    namesrv.topics_asked.clear()
    world.run(2 * LOST_MASTER_MS)
    assert 1 <= len(namesrv.topics_asked) <= 3
    world.network.hearers.clear()
    world.broker.move("tcp://127.0.0.1:19999")
    world.run(2 * LOST_MASTER_MS)
    assert set(topics) <= set(namesrv.topics_asked)


def test_a_broker_with_an_address_that_is_none_stops_nobody(world, make, monkeypatch, caplog):
    namesrv = world.cluster.namesrvs[0]
    real = namesrv.route

    def route(topic):
        """The rogue says that it carries each topic, too."""
        found = real(topic)
        assert found is not None
        rogue = BrokerData("c", "rogue", {0: BrokerAddress("127.0.0.1:66x")})
        return msgspec.structs.replace(
            found,
            queues=[*found.queues, QueueData("rogue", 4, 4, 6)],
            brokers=[*found.brokers, rogue],
        )

    monkeypatch.setattr(namesrv, "route", route)
    world.broker.add_topic("u")
    client = make()
    found = []
    for topic in ("t", "u"):
        client.engine.finder.find(topic, found.append)
    world.run()
    for topic in ("t", "u"):
        queues = client.engine.routes.publish_queues(topic)
        assert {one.broker_name for one in queues} == {"a"}
    assert [route.topic for route in found] == ["t", "u"]
    client.engine.finder.refresh_all()
    world.run()
    assert caplog.text.count("'rogue'") == 1, "said once"


def test_a_route_that_changes_while_it_is_asked_for_is_asked_for_again(world, make):
    client = make()
    client.find("t")
    world.run()
    before = world.cluster.namesrvs[0].requests.count(ROUTE)
    client.engine.finder.refresh(["t"])
    client.engine.finder.refresh(["t"])  # as a hint: the answer on its way may be of before
    client.engine.finder.refresh(["t"])
    world.run()
    assert world.cluster.namesrvs[0].requests.count(ROUTE) == before + 2


def test_while_a_master_cannot_be_reached_routes_are_asked_for(world, make, monkeypatch):
    client = make()
    client.find("t")
    world.run()
    client.engine.brokers.connection("a")
    world.run()
    world.network.hearers.clear()  # hints may be lost
    monkeypatch.setattr(client.engine.brokers.connection("a"), "unreachable", True)
    client.engine.finder.refresh(["t"])
    world.run(50)
    before = world.cluster.namesrvs[0].requests.count(ROUTE)
    world.run(3_000)
    asked = world.cluster.namesrvs[0].requests.count(ROUTE) - before
    assert 5 <= asked <= 3_000 // LOST_MASTER_MS + 1
    monkeypatch.undo()
    world.run(1_000)
    before = world.cluster.namesrvs[0].requests.count(ROUTE)
    world.run(3_000)
    assert world.cluster.namesrvs[0].requests.count(ROUTE) == before, "an idle client sleeps"


def test_a_route_survives_a_name_server_that_forgot_it(world, make):
    client = make()
    client.find("t")
    world.run()
    world.cluster.namesrvs[0].forget()
    found = client.find("t")
    world.run(500)
    assert isinstance(found[0], TopicNotFound)
    assert client.engine.routes.route("t") is not None


def test_a_topic_name_that_cannot_be_sent_does_not_stop_others(world, make):
    client = make()
    with pytest.raises(MQMeshError):
        client.engine.finder.find("\ud800", lambda _: None)
    with pytest.raises(MQMeshError):
        client.engine.finder.find("\ud800", lambda _: None)
    assert "\ud800" not in client.engine.finder._asking


def test_waiting_for_a_route(world, make):
    client = make()
    route = world.call(lambda: client.engine.wait_route("t", 1_000))
    assert route.topic == "t"
    before = len(world.cluster.namesrvs[0].requests)
    assert client.engine.wait_route("t", 1_000) is route, "known by now"
    assert len(world.cluster.namesrvs[0].requests) == before
    assert world.call(lambda: client.engine.wait_route("t", 1_000, fresh=True)) == route
    assert len(world.cluster.namesrvs[0].requests) == before + 1
    missing = world.call(lambda: client.engine.wait_route("missing", 1_000))
    assert isinstance(missing, NoRoute)
    assert isinstance(missing.__cause__, TopicNotFound)
    world.cluster.namesrvs[0].crash()
    down = world.call(lambda: client.engine.wait_route("missing", 5))
    assert isinstance(down, NoRoute)


# ---- Connections --------------------------------------------------------------------------


def test_a_broker_without_an_address_is_no_route(world, make):
    client = make()
    with pytest.raises(NoRoute):
        client.engine.brokers.connection("unknown")
    found = client.send("unknown")
    assert found == []
    world.run()
    assert isinstance(found[0], NoRoute)
    assert not client.engine.brokers.may_come("unknown")
    assert not client.engine.brokers.is_connected("unknown")
    assert client.engine.brokers.live_endpoint("unknown") is None


def test_a_connection_is_made_once_and_told(world, make):
    client = make()
    client.find("t")
    world.run()
    assert client.engine.brokers.may_come("a")
    one = client.engine.brokers.connection("a")
    assert client.engine.brokers.connection("a") is one
    assert not client.engine.brokers.is_connected("a")
    world.run()
    assert client.engine.brokers.is_connected("a")
    assert client.engine.brokers.live_endpoint("a") == world.broker.endpoint
    assert client.brokers_told == [("a", True)]
    assert len(world.broker.heartbeats) == 1, "a heartbeat with the connection"
    world.broker.crash()
    world.run(1)
    assert client.brokers_told == [("a", True), ("a", False)]
    assert client.engine.brokers.is_unreachable("a")
    assert not client.engine.brokers.may_come("a")
    world.broker.start()
    world.run(200)
    assert client.brokers_told[-1] == ("a", True)
    assert len(world.broker.heartbeats) == 2


def test_a_closed_client_sends_no_heartbeat(world, make):
    client = make()
    client.find("t")
    world.run()
    client.send()
    world.run()
    before = len(world.broker.heartbeats)
    client.engine.close()
    client.engine.heartbeats.send_all()  # as an outcome may ask for that comes with the close
    world.run()
    assert len(world.broker.heartbeats) == before == 1


def test_heartbeats_go_on(world, make):
    client = make(heartbeat_broker_interval_ms=1_000)
    client.find("t")
    world.run()
    client.engine.brokers.connection("a")
    world.run(5_100)
    assert 5 <= len(world.broker.heartbeats) <= 7
    assert {one.client_id for one in world.broker.heartbeats} == {client.engine.client_id}


def test_two_replicas_that_name_each_other_are_not_asked_as_fast_as_they_answer(world, make):
    world.build(brokers=("a", "b"))
    asked = []
    places = [broker.address.tcp for broker in world.cluster.brokers.values()]

    def name_another(other, command, answer):
        asked.append(other)
        reason = ErrorHeader("not me", 0, len(asked), other)
        answer(Reply(encode_header(reason), code=ResponseCode.NOT_MASTER), 0)

    for broker, other in zip(world.cluster.brokers.values(), reversed(places), strict=True):
        broker.serve = partial(name_another, other)
    client = make()
    client.find("t")
    world.run()
    client.engine.brokers.connection("a")
    world.run(5_000)
    assert 20 <= len(asked) <= 80
    assert set(asked) == set(places)


def test_a_broker_that_moved_is_followed_and_its_requests_may_be_repeated(world, make):
    client = make()
    client.find("t")
    world.run()
    client.engine.brokers.connection("a")
    world.run()
    world.broker.faults.append(Fault(FaultKind.LOSE))
    found: list[object] = []
    again: list[object] = []

    def repeat(answer: object) -> None:
        found.append(answer)
        client.engine.request(
            "a", RequestCode.HEART_BEAT, again.append, header=b"\x92\xa1c\x90", timeout_ms=500
        )

    client.engine.request(
        "a", SEND, repeat, header=encode_send(1, 1, PRODUCER_KEY), timeout_ms=5_000
    )
    old = world.broker.endpoint
    world.network.servers["tcp://127.0.0.1:20911"] = world.broker
    world.broker.endpoint = "tcp://127.0.0.1:20911"
    world.cluster.announce("a")
    world.run(50)
    assert isinstance(found[0], EndpointUnreachable), "not ClientClosed: the client is open"
    assert len(again) == 1
    assert not isinstance(again[0], MQMeshError), "it went to the new place"
    assert client.engine.brokers.live_endpoint("a") == "tcp://127.0.0.1:20911"
    del world.network.servers[old]


def test_a_broker_that_nobody_needs_any_more_is_let_go(world, make):
    world.build(brokers=("a", "b"))
    client = make(heartbeat_broker_interval_ms=1_000)
    client.find("t")
    world.run()
    for name in ("a", "b"):
        client.engine.brokers.connection(name)
    world.run()
    world.cluster.brokers["b"].crash()
    world.run(3_000)
    assert list(client.engine.brokers._connections) == ["a"]


def test_unix_sockets_are_for_the_same_machine(tmp_path):
    there = tmp_path / "socket"
    there.touch()
    address = BrokerAddress("10.0.0.7:10911", str(there), "this")
    assert choose_endpoint(address, "this") == f"ipc://{there}"
    assert choose_endpoint(address, "other") == "tcp://10.0.0.7:10911"
    assert choose_endpoint(address, None) == "tcp://10.0.0.7:10911"
    missing = BrokerAddress("10.0.0.7:10911", str(tmp_path / "missing"), "this")
    assert choose_endpoint(missing, "this") == "tcp://10.0.0.7:10911"


# ---- Life ---------------------------------------------------------------------------------


def test_a_nonsense_address_is_refused_at_once():
    with pytest.raises(InvalidArgument):
        ClientEngine(ClientOptions(namesrv_addr="x"), heartbeat=lambda: HeartbeatRequest("c"))


def test_closing_takes_leave_and_is_idempotent(world, make):
    client = make()
    client.find("t")
    world.run()
    connection = client.engine.brokers.connection("a")
    world.run()
    client.engine.close()
    client.engine.close()
    assert RequestCode.UNREGISTER_CLIENT in connection.oneways
    assert client.ended == 1
    assert client.engine.closed
    with pytest.raises(ClientClosed):
        client.engine.post(lambda: None)
    with pytest.raises(ClientClosed):
        client.engine.brokers.connection("a")


def test_closing_ends_requests_under_way(world, make):
    client = make()
    client.find("t")
    world.run()
    client.engine.brokers.connection("a")
    world.run()
    found = client.send(timeout_ms=10_000)
    client.engine.close()
    assert isinstance(found[0], ClientClosed)


def test_a_route_that_comes_with_the_last_turn_connects_to_nothing(world, make):
    client = make()
    world.run()
    found = client.find("t")
    client.engine._closed = True  # as when close was just called, in another thread
    world.run()
    client.engine._closed = False
    assert [type(one) for one in found] == [ClientClosed]
    assert client.routes_told == []
    assert client.engine.loop.callback_failures == 0


def test_a_call_ends_when_the_client_is_closed(world, make):
    client = make()
    found: list[object] = []

    def call() -> None:
        try:
            client.engine.call(lambda done: None, 60_000)
        except MQMeshError as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    world.run()
    client.engine.close()
    thread.join(10)
    assert isinstance(found[0], ClientClosed)


def test_a_call_returns_raises_or_is_late(world, make):
    client = make()
    assert world.call(lambda: client.engine.call(lambda done: done(42), 1_000)) == 42
    refused = NoRoute("x")
    assert world.call(lambda: client.engine.call(lambda done: done(refused), 1_000)) is refused
    late = world.call(lambda: client.engine.call(lambda done: None, 1))
    assert isinstance(late, RequestTimeout)


def test_one_step_that_fails_does_not_stop_the_others(world, make, monkeypatch, caplog):
    client = make()
    client.find("t")
    world.run()
    connection = client.engine.brokers.connection("a")
    world.run()

    def fail() -> None:
        raise OSError("in a test")

    monkeypatch.setattr(connection, "close", fail)
    client.engine.close()
    assert client.ended == 1
    assert "could not close cleanly" in caplog.text


def test_in_a_forked_child_it_is_closed(world, make):
    client = make()
    client.engine._forked()
    with pytest.raises(ClientClosed):
        client.engine.post(lambda: None)
    client.engine.close()
    assert client.ended == 0, "nothing is touched that belongs to the parent"
    client.engine._closed = False


# ---- Bad luck -----------------------------------------------------------------------------


def test_a_request_that_cannot_be_sent_has_an_outcome_all_the_same(world, make, monkeypatch):
    client = make()
    client.find("t")
    world.run()
    connection = client.engine.brokers.connection("a")
    world.run()

    def fail(*_, **__):
        raise OSError("in a test")

    monkeypatch.setattr(connection, "request", fail)
    found = client.send()
    assert found == []
    world.run()
    assert isinstance(found[0], EndpointUnreachable)


def test_a_connection_that_cannot_even_be_tried_is_told(world, make, monkeypatch):
    client = make()
    client.find("t")
    world.run()

    def fail(*_, **__):
        raise OSError("too many open files")

    monkeypatch.setattr(client.engine.transport, "connect", fail)
    with pytest.raises(EndpointUnreachable, match="too many"):
        client.engine.brokers.connection("a")
    found = client.send()
    world.run()
    assert isinstance(found[0], EndpointUnreachable)


def test_a_machine_that_is_off_is_not_waited_for_long(world, make, monkeypatch):
    client = make()
    client.find("t")
    world.run()
    monkeypatch.setattr("harness.simulated_network.SimulatedClient._connect", lambda _: None)
    client.engine.brokers.connection("a")
    world.run(900)
    assert client.engine.brokers.may_come("a")
    world.run(200)
    assert not client.engine.brokers.may_come("a")


def test_what_brokers_warn_of_is_told_once_until_it_is_over(world, make, caplog):
    engine = make().engine
    for broker in ("a", "b", "a"):
        engine.heartbeats.warn_once(broker, ["group g differs"])
    assert caplog.text.count("group g differs") == 1
    engine.heartbeats.warn_once("a", [])
    engine.heartbeats.warn_once("b", [])
    engine.heartbeats.warn_once("a", ["group g differs", "something else"])
    assert caplog.text.count("group g differs") == 2
    assert caplog.text.count("something else") == 1
