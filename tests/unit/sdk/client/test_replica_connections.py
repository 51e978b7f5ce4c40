"""Connections to followers: made when they are asked, and never waited for."""

from __future__ import annotations

import pytest
from harness.simulated_network import SimulatedServer

from mqmesh.errors import ClientClosed, EndpointUnreachable, NoRoute
from mqmesh.protocol.command import Reply
from mqmesh.protocol.route import BrokerAddress, BrokerData, TopicRoute
from mqmesh.sdk.client.broker_connections import CONNECT_PATIENCE_MS
from mqmesh.sdk.client.replica_connections import ReplicaConnections
from mqmesh.sdk.client.route_cache import RouteCache

CODE = 77


class Follower(SimulatedServer):
    """Answers everything, or nothing."""

    deaf = False

    def serve(self, command, answer):
        if not self.deaf:
            answer(Reply(b""), 1)


class Case:
    def __init__(self, world) -> None:
        self.network = world.network
        self.follower = Follower(self.network, "tcp://replica:1")
        self.routes = RouteCache()
        address = {1: BrokerAddress("replica:1")}
        self.routes.update(TopicRoute("t", [], [BrokerData("c", "a", address)]))
        transport = self.network.transport()
        self.connections = ReplicaConnections(transport, self.routes, use_ipc=False)
        transport.run_loop(transport.loop.run, "client")

    def ask(self, replica_id: int = 1) -> list:
        outcomes: list[object] = []
        self.connections.request(
            "a", replica_id, CODE, outcomes.append, header=b"", timeout_ms=20_000
        )
        assert not outcomes
        return outcomes

    def outcome(self, outcomes: list, within_ms: int = 50) -> object:
        self.network.run(within_ms)
        (one,) = outcomes
        return one


@pytest.fixture
def case(world) -> Case:
    return Case(world)


def test_one_connection_serves_all_that_is_asked(case):
    assert not isinstance(case.outcome(case.ask()), Exception)
    assert not isinstance(case.outcome(case.ask()), Exception)
    assert len(case.follower.connections) == 1


def test_one_that_nobody_knows_is_an_error(case):
    assert isinstance(case.outcome(case.ask(2)), NoRoute)


def test_one_that_cannot_be_reached_is_not_waited_for(case):
    case.follower.crash()
    assert isinstance(case.outcome(case.ask(), CONNECT_PATIENCE_MS + 50), EndpointUnreachable)
    case.follower.start()
    assert not isinstance(case.outcome(case.ask()), Exception)


def test_one_that_dies_is_asked_in_vain(case):
    case.outcome(case.ask())
    case.follower.deaf = True
    outcomes = case.ask()
    case.network.run(50)
    case.follower.crash()
    assert isinstance(case.outcome(outcomes), EndpointUnreachable)


def test_what_is_not_used_is_let_go(case):
    case.outcome(case.ask())
    case.connections.tidy()
    assert len(case.follower.connections) == 1
    case.connections.tidy()
    assert not case.follower.connections
    assert not isinstance(case.outcome(case.ask()), Exception)


def test_once_closed_nobody_is_asked(case):
    case.follower.deaf = True
    outcomes = case.ask()
    case.network.run(50)
    case.connections.close()
    assert isinstance(case.outcome(outcomes), ClientClosed)
    assert isinstance(case.outcome(case.ask()), ClientClosed)
