"""Heartbeats and what they set off."""

from __future__ import annotations

import pytest

from mqmesh.errors import GroupNotFound, InvalidArgument, NoPermission, UnsupportedCommand
from mqmesh.protocol.command import Principal, decode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import (
    ConsumerData,
    ConsumerIdsChanged,
    ConsumerList,
    ConsumerListRequest,
    HeartbeatRequest,
    HeartbeatResponse,
    Subscription,
    UnregisterClientRequest,
)


def consumer(group="g", *, model="CLUSTERING", where="LAST_OFFSET", topic="t", **subscription):
    return ConsumerData(group, model, where, [Subscription(topic, **subscription)])


def beat(stage, client_id, *consumers, peer=None, **options):
    heartbeat = HeartbeatRequest(client_id, consumers=list(consumers), **options)
    return stage.ask(
        RequestCode.HEART_BEAT, heartbeat, HeartbeatResponse, peer=peer or client_id.encode()
    )


def members(stage, group="g"):
    return stage.ask(
        RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerListRequest(group), ConsumerList
    )


def test_members_are_told_of_one_another(stage):
    beat(stage, "c2", consumer())
    beat(stage, "c1", consumer())
    found = members(stage)
    assert found.client_ids == ["c1", "c2"]
    told = [
        (peer, code, decode_header(ConsumerIdsChanged, header))
        for peer, code, header in stage.notices[1:]
    ]
    change = ConsumerIdsChanged("g", found.generation)
    code = RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
    assert sorted(told) == [(b"c1", code, change), (b"c2", code, change)]


def test_a_group_is_not_divided_while_its_members_are_still_coming_back(stage):
    stage.features.state.groups.settled_ms = stage.clock.monotonic_ms() + 1_500
    beat(stage, "c1", consumer())
    stage.clock.advance(1_499)
    with pytest.raises(GroupNotFound, match="coming back"):
        members(stage)
    stage.clock.advance(1)
    assert members(stage).client_ids == ["c1"]


def test_leaving_is_seen_at_once_and_may_be_said_twice(stage):
    beat(stage, "c1", consumer())
    beat(stage, "c2", consumer())
    before = members(stage).generation
    stage.notices.clear()
    for _ in range(2):
        stage.ask(RequestCode.UNREGISTER_CLIENT, UnregisterClientRequest("c1"), peer=b"c1")
    assert members(stage).client_ids == ["c2"]
    assert members(stage).generation > before
    assert [peer for peer, _, _ in stage.notices] == [b"c2"]


def test_a_client_that_came_back_by_another_connection_is_not_taken_out_by_the_former_one(stage):
    beat(stage, "c1", consumer(), peer=b"gateway-1")
    beat(stage, "c1", consumer(), peer=b"gateway-2")
    leaving, now_ms = UnregisterClientRequest("c1"), stage.clock.monotonic_ms()
    stage.ask(RequestCode.UNREGISTER_CLIENT, leaving, peer=b"gateway-1")
    assert members(stage).client_ids == ["c1"]
    stage.features.state.groups.on_disconnect(stage.peer(b"gateway-2"), now_ms)
    stage.ask(RequestCode.UNREGISTER_CLIENT, leaving, peer=b"gateway-1")
    with pytest.raises(GroupNotFound):
        members(stage)


def of_namespace(stage, name: bytes, namespace: str) -> bytes:
    stage.peer(name).principal = Principal("u", namespace=namespace)
    return name


def test_a_client_is_taken_over_and_taken_out_within_its_namespace_only(stage):
    own, again = (of_namespace(stage, name, "shop") for name in (b"own", b"again"))
    beat(stage, "10.0.0.1@7", consumer("shop%g"), peer=own)
    others = [of_namespace(stage, b"other", "bank"), of_namespace(stage, b"none", "")]
    leaving = UnregisterClientRequest("10.0.0.1@7")
    for is_lost in (False, True):
        if is_lost:
            stage.features.state.groups.on_disconnect(stage.peer(own), stage.clock.monotonic_ms())
        for peer in others:
            with pytest.raises(NoPermission, match=r"10\.0\.0\.1@7"):
                beat(stage, "10.0.0.1@7", consumer("bank%g"), peer=peer)
            stage.ask(RequestCode.UNREGISTER_CLIENT, leaving, peer=peer)
            assert members(stage, "shop%g").client_ids == ["10.0.0.1@7"]
    beat(stage, "10.0.0.1@7", consumer("shop%g"), peer=again)
    stage.ask(RequestCode.UNREGISTER_CLIENT, leaving, peer=again)
    beat(stage, "10.0.0.1@7", consumer("bank%g"), peer=others[0])


def test_a_client_that_has_not_come_back_yet_is_its_namespaces(stage):
    groups = stage.features.state.groups
    groups.restore([("shop%g", "c", consumer("shop%g"))], stage.clock.monotonic_ms(), 0)
    with pytest.raises(NoPermission):
        beat(stage, "c", consumer("bank%g"), peer=of_namespace(stage, b"other", "bank"))
    beat(stage, "c", consumer("shop%g"), peer=of_namespace(stage, b"own", "shop"))


@pytest.mark.parametrize(
    ("consumers", "error", "why"),
    [
        ([consumer("%RETRY%g")], InvalidArgument, "reserved"),
        ([consumer("CID_RMQ_SYS_TRANS")], InvalidArgument, "reserved"),
        ([consumer("a b")], InvalidArgument, "a b"),
        ([consumer("")], InvalidArgument, "group"),
        ([consumer(model="SOMETIMES")], InvalidArgument, "CLUSTERING"),
        ([consumer(where="HERE")], InvalidArgument, "FIRST_OFFSET"),
        ([consumer(topic="../etc")], InvalidArgument, "topic"),
        ([consumer(expression="A || ")], InvalidArgument, "character 6"),
        ([consumer(expression_type="LUA")], UnsupportedCommand, "SQL92"),
        ([consumer(expression="a = ", expression_type="SQL92")], InvalidArgument, "character 5"),
        ([consumer(), consumer()], InvalidArgument, "twice"),
    ],
)
def test_nonsense_is_refused_as_a_whole(stage, consumers, error, why):
    with pytest.raises(error, match=why):
        beat(stage, "c1", consumer("good"), *consumers)
    assert stage.features.state.groups.client_count == 0
    with pytest.raises(InvalidArgument, match="reserved"):
        beat(stage, "c1", producer_groups=["%DLQ%g"])
    with pytest.raises(InvalidArgument, match="client id"):
        beat(stage, "", peer=b"x")
