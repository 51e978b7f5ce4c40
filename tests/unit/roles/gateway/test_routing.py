"""Routes of retry topics, by which RocketMQ's tools find groups."""

from __future__ import annotations

import pytest

from mqmesh.errors import BrokerNotAvailable, MQMeshError, TopicNotFound
from mqmesh.protocol.command import Command, encode_header
from mqmesh.protocol.groups import GroupConfig, GroupSummaries, GroupSummary
from mqmesh.protocol.remoting.codes import RemotingCode
from mqmesh.protocol.remoting.frame import RemotingCommand
from mqmesh.roles.gateway.ports import BrokerPorts
from mqmesh.roles.gateway.routing import Routing


class Asked:
    """A question for the route of ``%RETRY%g``, by brokers that answer as given."""

    def __init__(self, **brokers: list[str] | MQMeshError) -> None:
        self._brokers = brokers
        self.bodies: list[bytes] = []
        self.errors: list[MQMeshError] = []
        ports = BrokerPorts(
            "127.0.0.1", 20_911, lambda port, name: None, lambda change: change(None)
        )
        for name in brokers:
            ports.serve(name, "c")
        routing = Routing(self, ports, lambda group: False)
        request = RemotingCommand(RemotingCode.GET_ROUTEINFO_BY_TOPIC, fields={"topic": "%RETRY%g"})
        routing.handlers()[RemotingCode.GET_ROUTEINFO_BY_TOPIC](self, request)

    def find_route(self, topic, on_done) -> None:
        on_done(TopicNotFound("not there"))

    def ask(self, broker_name, code, header, on_done) -> None:
        found = self._brokers[broker_name]
        if not isinstance(found, MQMeshError):
            groups = [GroupSummary(GroupConfig(group)) for group in found]
            header = encode_header(GroupSummaries(groups))
            found = Command(0, 1, 0, memoryview(header), memoryview(b""))
        on_done(found)

    def answer(self, request, *, body=b"") -> None:
        self.bodies.append(body)

    def fail(self, request, error) -> None:
        self.errors.append(error)


def test_a_group_is_found_although_a_broker_group_has_no_master():
    asked = Asked(a=BrokerNotAvailable("no master"), b=[], c=["g"])
    assert (len(asked.bodies), asked.errors) == (1, [])


@pytest.mark.parametrize(
    ("first", "kind"), [([], TopicNotFound), (BrokerNotAvailable("no master"), BrokerNotAvailable)]
)
def test_a_group_that_nobody_knows_fails_with_what_went_wrong(first, kind):
    asked = Asked(a=first, b=[])
    assert asked.bodies == []
    assert [type(error) for error in asked.errors] == [kind]
