"""Members of groups, and what administrators see of them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from mqmesh.errors import (
    EndpointUnreachable,
    MessageIllegal,
    MQMeshError,
    NoPermission,
    SystemBusy,
)
from mqmesh.protocol.command import Command, encode_header
from mqmesh.protocol.gateway import (
    MAX_ANSWER_BYTES,
    MAX_GATEWAY_NAMES,
    GatewayClient,
    GatewayClientsRequest,
)
from mqmesh.protocol.membership import HeartbeatResponse
from mqmesh.protocol.remoting.codes import RemotingCode
from mqmesh.protocol.remoting.frame import RemotingCommand
from mqmesh.roles.gateway.client_list import list_clients
from mqmesh.roles.gateway.members import GatewayMembers


class Scene:
    """Members whose broker answers heartbeats as it is set."""

    def __init__(self) -> None:
        self.refusal: MQMeshError | None = None
        self.answered: list[MQMeshError | None] = []
        self.members = GatewayMembers(self, 1_000)

    def ask(self, broker_name, code, header, on_done) -> None:
        header = memoryview(encode_header(HeartbeatResponse()))
        on_done(self.refusal or Command(0, 1, 0, header, memoryview(b"")))

    def beat(self, client_id: str, topics: int = 1, group: str = "g") -> None:
        session = SimpleNamespace(
            broker_name="broker-a",
            client_id="",
            peer="h:1",
            last_seen_ms=0,
            is_closed=False,
            answer=lambda request: self.answered.append(None),
            fail=lambda request, error: self.answered.append(error),
        )
        consumer = {
            "groupName": group,
            "consumeType": "CONSUME_PASSIVELY",
            "messageModel": "CLUSTERING",
            "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
            "subscriptionDataSet": [
                {"topic": f"{number:04}".ljust(512, "é"), "subString": "*"}
                for number in range(topics)
            ],
        }
        body = {"clientID": client_id, "producerDataSet": [], "consumerDataSet": [consumer]}
        request = RemotingCommand(RemotingCode.HEART_BEAT, body=json.dumps(body).encode())
        self.members.handlers()[RemotingCode.HEART_BEAT](session, request)

    def list(self) -> tuple[list[GatewayClient], int]:
        """All clients, and how many answers they took."""
        backends = [("", SimpleNamespace(members=self.members, grpc=None))]
        found: list[GatewayClient] = []
        pages, more = 0, True
        while more:
            asked = GatewayClientsRequest(found[-1].client_id if found else "")
            page = list_clients(asked, backends, 0)
            assert len(encode_header(page)) < 2 * MAX_ANSWER_BYTES
            found += page.clients
            pages, more = pages + 1, page.more
        return found, pages


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (MessageIllegal("too many topics"), False),
        (NoPermission("not yours"), False),
        (SystemBusy("later"), True),
        (EndpointUnreachable("nobody"), True),
    ],
)
def test_a_member_whose_first_heartbeat_is_refused_for_good_is_none(error, stays):
    scene = Scene()
    scene.refusal = error
    scene.beat("java")
    assert (scene.answered, len(scene.members)) == ([error], int(stays))
    assert scene.list()[0] == [], "nobody has judged what it says"


def test_a_member_that_is_known_stays_when_a_heartbeat_is_refused():
    scene = Scene()
    scene.beat("java")
    scene.refusal = MessageIllegal("too many topics")
    scene.beat("java")
    assert len(scene.members) == 1


def test_the_list_of_clients_is_cut_to_what_an_answer_holds():
    scene = Scene()
    for number in range(60):
        scene.beat(f"java-{number:02}", topics=MAX_GATEWAY_NAMES + 23)
    rows, pages = scene.list()
    assert [row.client_id for row in rows] == [f"java-{number:02}" for number in range(60)]
    assert pages == 2
    assert len(rows[0].topics) == MAX_GATEWAY_NAMES + 1
    assert rows[0].topics[-1] == "and 23 more"


def test_a_namespace_has_only_its_clients_and_their_names_in_it():
    scene = Scene()
    scene.beat("shop-1", group="shop%billing")
    scene.beat("shop-2", group="%RETRY%shop%billing")
    scene.beat("shops-1", group="shops%billing")
    scene.beat("nobody")
    backends = [("", SimpleNamespace(members=scene.members, grpc=None))]
    page = list_clients(GatewayClientsRequest(), backends, 0, "shop")
    assert [(row.client_id, row.consumer_groups, row.topics) for row in page.clients] == [
        ("shop-1", ["shop%billing"], []),
        ("shop-2", ["%RETRY%shop%billing"], []),
    ]
    assert not page.more
