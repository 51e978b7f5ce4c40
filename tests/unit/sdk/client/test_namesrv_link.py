"""The way to the name servers on a simulated network."""

from __future__ import annotations

import pytest

from mqmesh.errors import (
    ClientClosed,
    EndpointUnreachable,
    MQMeshError,
    QueueFull,
    TopicNotFound,
    TransportError,
)
from mqmesh.protocol.command import encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.route import GetRouteRequest
from mqmesh.sdk.client.namesrv_link import NamesrvLink


class Linked:
    """A link, and all that it told."""

    def __init__(self, world, number: int) -> None:
        world.build(namesrvs=number)
        self.world = world
        self.hints: list[object] = []
        self.connected = 0
        transport = world.network.transport()
        self.loop = transport.loop
        self.link = NamesrvLink(
            transport,
            world.cluster.namesrv_addr.split(";"),
            timeout_ms=1_000,
            on_hint=self.hints.append,
            on_connected=self._connect,
        )

    def _connect(self) -> None:
        self.connected += 1

    @property
    def current(self) -> int:
        """Which name server it asks."""
        ports = [one.endpoint for one in self.world.cluster.namesrvs]
        return ports.index(self.link._client.endpoint)

    def ask(self, topic: str = "t") -> list:
        found: list[object] = []
        header = encode_header(GetRouteRequest(topic))
        self.link.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header, found.append)
        return found


@pytest.fixture
def linked(world, monkeypatch):
    monkeypatch.setattr(world.network.random, "sample", lambda addresses, _: list(addresses))
    made = []

    def make(number: int) -> Linked:
        made.append(Linked(world, number))
        return made[-1]

    yield make
    for one in made:
        one.link.close()
        one.link.close()


def test_an_answer_comes_also_when_it_is_a_refusal(world, linked):
    one = linked(1)
    good, bad = one.ask(), one.ask("missing")
    assert good == bad == []
    world.run()
    assert not isinstance(good[0], MQMeshError)
    assert isinstance(bad[0], TopicNotFound), "the next one is asked only when one is silent"


def test_the_next_one_is_asked_when_one_is_down(world, linked):
    one = linked(3)
    world.cluster.namesrvs[0].crash()
    world.cluster.namesrvs[1].crash()
    found = one.ask()
    world.run(2_500)
    assert not isinstance(found[0], MQMeshError)
    assert one.current == 2
    quick = one.ask()
    world.run(5)
    assert quick, "the one that answers is asked first from then on"


def test_all_requests_under_way_fail_over_when_one_is_given_up(world, linked):
    one = linked(2)
    world.run()
    silent = world.cluster.namesrvs[0]
    silent.serve = lambda command, answer: None
    first = one.ask()
    world.run(900)
    others = [one.ask() for _ in range(5)]
    world.run(150)
    assert all(not isinstance(found[0], MQMeshError) for found in (first, *others))


def test_each_is_asked_at_most_once(world, linked):
    one = linked(2)
    for namesrv in world.cluster.namesrvs:
        namesrv.crash()
    found = one.ask()
    world.run(5_000)
    assert len(found) == 1
    assert isinstance(found[0], TransportError)


def test_a_request_that_cannot_even_be_queued_has_its_outcome_too(world, linked, monkeypatch):
    one = linked(1)

    def full(*_, **__):
        raise QueueFull("in a test")

    monkeypatch.setattr(one.link._client, "request", full)
    found = one.ask()
    assert found == []
    world.run()
    assert isinstance(found[0], QueueFull)


def test_after_close_everything_has_ended(world, linked):
    one = linked(2)
    found = one.ask()
    one.link.close()
    assert isinstance(found[0], ClientClosed)
    assert world.network.hearers == []


def test_hints_are_heard_and_what_was_before_is_asked_for(world, linked):
    one = linked(1)
    world.run()
    assert one.connected == 2, "with the connection, and with the hints"
    world.broker.add_topic("new")
    world.run()
    assert [hint.brokers for hint in one.hints] == [["a"]]
    world.network.hearers[0].hear(b"nonsense")
    world.run()
    assert len(one.hints) == 1


def test_when_its_name_server_dies_the_link_changes_at_once(world, linked):
    one = linked(2)
    world.run()
    world.cluster.namesrvs[0].crash()
    world.run(10)
    assert one.current == 1
    assert [hearer.endpoint for hearer in world.network.hearers] == [
        world.cluster.namesrvs[1].hint_endpoint
    ]
    world.broker.add_topic("new")
    world.run()
    assert len(one.hints) == 1


def test_a_single_name_server_that_comes_back_is_heard_again(world, linked):
    one = linked(1)
    world.run()
    world.cluster.namesrvs[0].crash()
    world.run()
    assert world.network.hearers == []
    world.cluster.namesrvs[0].start()
    world.run(200)
    assert one.connected == 4
    world.broker.add_topic("new")
    world.run()
    assert len(one.hints) == 1


def test_what_an_abandoned_name_server_says_of_hints_is_not_heard(world, linked):
    one = linked(2)
    slow = world.cluster.namesrvs[0]
    serve = slow.serve
    slow.serve = lambda command, answer: serve(command, lambda reply, _: answer(reply, 50))
    world.run(3)
    one.link._next()
    world.run(200)
    assert [hearer.endpoint for hearer in world.network.hearers] == [
        world.cluster.namesrvs[1].hint_endpoint
    ]


def test_an_error_names_the_one_that_was_given_up(world, linked):
    one = linked(1)
    world.cluster.namesrvs[0].crash()
    found = one.ask()
    world.run(1_500)
    assert isinstance(found[0], EndpointUnreachable)
