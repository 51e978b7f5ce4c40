"""SEND_REPLY_MESSAGE and ACKNOWLEDGE_REPLY."""

from __future__ import annotations

import pytest

from mqmesh.errors import ClientNotOnline, MessageIllegal, RemoteProtocolError, SystemBusy
from mqmesh.protocol.command import Principal, decode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import HeartbeatRequest
from mqmesh.protocol.replies import AcknowledgeReply, PushReply, SendReplyRequest, SendReplyResponse
from mqmesh.roles.broker.open_replies import ACKNOWLEDGE_TIMEOUT_MS


@pytest.fixture
def online(stage):
    stage.ask(RequestCode.HEART_BEAT, HeartbeatRequest("asker"), peer=b"asker")
    return stage


def send(stage, body=b"reply", client_id="asker") -> int:
    header = SendReplyRequest(client_id, "c" * 32, 5)
    return stage.begin(RequestCode.SEND_REPLY_MESSAGE, header, body, peer=b"replier")


def pushed(stage) -> tuple[bytes, PushReply, bytes]:
    peer, code, header, body = stage.notices.pop()
    assert code == RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT
    return peer, decode_header(PushReply, header), bytes(body)


def acknowledge(stage, token, taken=True, peer=b"asker") -> None:
    header = AcknowledgeReply(token, taken)
    stage.begin(RequestCode.ACKNOWLEDGE_REPLY, header, peer=peer, oneway=True)


@pytest.mark.parametrize("taken", [True, False])
def test_the_replier_hears_what_became_of_its_reply(online, taken):
    opaque = send(online)
    assert opaque not in online.answers
    peer, push, body = pushed(online)
    assert (peer, push.correlation_id, push.attempt_id, body) == (b"asker", "c" * 32, 5, b"reply")
    acknowledge(online, push.token, taken)
    assert online.answer(opaque, SendReplyResponse).taken is taken
    assert online.features.core.stats.total.replies_pushed == 1


def test_a_client_that_is_not_here_gets_nothing(online):
    online.features.state.groups.on_disconnect(online.peer(b"asker"), 0)
    for client_id in ("asker", "nobody"):
        with pytest.raises(ClientNotOnline, match=client_id):
            online.answer(send(online, client_id=client_id))
    assert online.notices == []
    assert online.features.core.stats.total.replies_undeliverable == 2


def test_a_confined_replier_reaches_nobody_outside_of_its_namespace(online):
    asker, replier = online.peer(b"asker"), online.peer(b"replier")
    replier.principal = Principal("u", namespace="shop")
    with pytest.raises(ClientNotOnline):
        online.answer(send(online))
    assert online.notices == []
    asker.principal = Principal("v", namespace="shop")
    for of_whom in (replier.principal, Principal("u")):
        replier.principal = of_whom
        send(online)
        assert pushed(online)[0] == b"asker"


def test_the_end_of_the_connection_of_who_asked_ends_the_wait(online):
    opaque = send(online)
    online.features.request_reply.client_gone(online.peer(b"asker"), 0)
    with pytest.raises(ClientNotOnline):
        online.answer(opaque)


def test_a_client_that_never_acknowledges_ends_the_wait(online):
    opaque = send(online)
    online.features.request_reply.tick(online.clock.monotonic_ms())
    assert opaque not in online.answers
    online.features.request_reply.tick(online.clock.monotonic_ms() + ACKNOWLEDGE_TIMEOUT_MS)
    with pytest.raises(ClientNotOnline):
        online.answer(opaque)


def test_the_end_of_the_master_ends_the_wait(online):
    opaques = [send(online), send(online)]
    online.features.request_reply.stopping()
    for opaque in opaques:
        with pytest.raises(ClientNotOnline):
            online.answer(opaque)
    assert online.features.request_reply.open_count == 0


def test_a_stranger_cannot_acknowledge(online):
    opaque = send(online)
    _, push, _ = pushed(online)
    acknowledge(online, push.token, peer=b"stranger")
    acknowledge(online, 10**12)
    assert opaque not in online.answers


def test_bounds(make_stage):
    stage = make_stage(max_message_size=10, max_open_replies=1)
    stage.ask(RequestCode.HEART_BEAT, HeartbeatRequest("asker"), peer=b"asker")
    for body in (b"", b"x" * 2_000_000):
        with pytest.raises(MessageIllegal, match="max_message_size"):
            stage.answer(send(stage, body))
    with pytest.raises(RemoteProtocolError):
        stage.ask(RequestCode.SEND_REPLY_MESSAGE, SendReplyRequest("asker", "c" * 65))
    send(stage)
    with pytest.raises(SystemBusy, match="max_open_replies"):
        stage.answer(send(stage))
