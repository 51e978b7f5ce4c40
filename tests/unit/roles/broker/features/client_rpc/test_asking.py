"""Questions of administrators that are handed on to consumers."""

from __future__ import annotations

import pytest

from mqmesh.errors import (
    ClientNotOnline,
    GroupNotFound,
    InvalidArgument,
    MessageIllegal,
    NoPermission,
    OffsetIllegal,
    SystemBusy,
)
from mqmesh.protocol.client_rpc import (
    MAX_ANSWER_BYTES,
    AskClient,
    ClientAnswer,
    HandedOver,
    HandToRequest,
    RunningInfoRequest,
)
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import ANYBODY, Principal, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import ConsumerConnections, ConsumerConnectionsRequest
from mqmesh.protocol.membership import (
    ConsumerData,
    HeartbeatRequest,
    Subscription,
    TopicConsumption,
)
from mqmesh.roles.broker.features.client_rpc import feature as asking
from mqmesh.roles.broker.features.client_rpc.feature import QUESTION_TIMEOUT_MS

QUESTION = RunningInfoRequest("g", "member", True)


def beat(stage, model="CLUSTERING", **more) -> None:
    data = ConsumerData("g", model, "LAST_OFFSET", [Subscription("t")])
    heartbeat = HeartbeatRequest("member", consumers=[data], **more)
    stage.ask(RequestCode.HEART_BEAT, heartbeat, peer=b"member")
    stage.notices.clear()


@pytest.fixture
def online(stage):
    beat(stage)
    return stage


def ask(stage, question=QUESTION, code=RequestCode.GET_CONSUMER_RUNNING_INFO) -> int:
    return stage.begin(code, question, peer=b"admin")


def handed_on(stage) -> tuple[bytes, AskClient, bytes]:
    peer, code, header, body = stage.notices.pop()
    assert code == RequestCode.ASK_CLIENT
    return peer, decode_header(AskClient, header), bytes(body)


def answer(stage, told: ClientAnswer, body=b"", peer=b"member") -> None:
    stage.begin(RequestCode.ANSWER_OF_CLIENT, told, body, peer=peer, oneway=True)


def test_a_question_goes_to_the_member_and_its_answer_to_who_asked(online):
    opaque = ask(online)
    peer, asked, body = handed_on(online)
    assert (peer, asked.code, body) == (b"member", RequestCode.GET_CONSUMER_RUNNING_INFO, b"")
    assert decode_header(RunningInfoRequest, memoryview(asked.question)) == QUESTION
    answer(online, ClientAnswer(asked.token), encode_header(HandedOver("SUCCESS")), b"stranger")
    assert opaque not in online.answers
    answer(online, ClientAnswer(asked.token), encode_header(HandedOver("SUCCESS", "x", 5)))
    assert online.answer(opaque, HandedOver) == HandedOver("SUCCESS", "x", 5)


def test_what_the_member_refuses_is_refused(online):
    opaque = ask(online)
    _, asked, _ = handed_on(online)
    answer(online, ClientAnswer(asked.token, ResponseCode.NO_PERMISSION, "I tell nothing"))
    with pytest.raises(NoPermission, match="I tell nothing"):
        online.answer(opaque)


def test_an_answer_that_is_too_large_is_not_handed_on(online):
    opaque = ask(online)
    _, asked, _ = handed_on(online)
    answer(online, ClientAnswer(asked.token), bytes(MAX_ANSWER_BYTES + 1))
    with pytest.raises(MessageIllegal, match="limit"):
        online.answer(opaque)


def test_nobody_is_asked_who_is_not_there(online):
    with pytest.raises(GroupNotFound):
        online.answer(ask(online, RunningInfoRequest("other", "member")))
    with pytest.raises(ClientNotOnline, match="stranger"):
        online.answer(ask(online, RunningInfoRequest("g", "stranger")))
    online.features.state.groups.on_disconnect(online.peer(b"member"), 0)
    with pytest.raises(ClientNotOnline, match="broken"):
        online.answer(ask(online))
    assert online.notices == []


def test_who_asked_hears_when_the_member_goes_says_nothing_or_the_broker_ends(online):
    now_ms = online.clock.monotonic_ms()
    gone = ask(online)
    online.features.client_rpc.client_gone(online.peer(b"member"), now_ms)
    silent = ask(online)
    online.features.client_rpc.tick(now_ms + QUESTION_TIMEOUT_MS - 1)
    assert silent not in online.answers
    online.features.client_rpc.tick(now_ms + QUESTION_TIMEOUT_MS)
    last = ask(online)
    online.features.client_rpc.stopping()
    for opaque, why in ((gone, "went away"), (silent, "in time"), (last, "stops")):
        with pytest.raises(ClientNotOnline, match=why):
            online.answer(opaque)


def test_questions_are_bounded(online, monkeypatch):
    monkeypatch.setattr(asking, "MAX_OPEN_QUESTIONS", 1)
    ask(online)
    with pytest.raises(SystemBusy):
        online.answer(ask(online))


def test_a_message_is_handed_to_a_member_with_its_batch(online):
    (sent,) = online.send(online.batch("t"))
    wanted = HandToRequest("g", "member", sent.commitlog_offset, 0)
    ask(online, wanted, RequestCode.CONSUME_MESSAGE_DIRECTLY)
    _, asked, body = handed_on(online)
    assert decode_header(HandToRequest, memoryview(asked.question)) == wanted
    assert body == online.store.read_at(sent.commitlog_offset)


def test_what_must_not_be_handed_over_is_not(stage):
    beat(stage)
    (sent,) = stage.send(stage.batch("secret"))
    code, wanted = RequestCode.CONSUME_MESSAGE_DIRECTLY, HandToRequest("g", "member", 0, 0)
    stage.guard.forbidden.add("secret")
    with pytest.raises(NoPermission, match="secret"):
        stage.answer(ask(stage, HandToRequest("g", "member", sent.commitlog_offset), code))
    stage.guard.forbidden.clear()
    stage.peer(b"admin").principal = Principal("u", namespace="bank")
    for offset in (sent.commitlog_offset, 1 << 40):
        with pytest.raises(OffsetIllegal, match=f"no message begins at {offset} of the log"):
            stage.answer(ask(stage, HandToRequest("g", "member", offset), code))
    stage.peer(b"admin").principal = ANYBODY
    beat(stage, "BROADCASTING")
    with pytest.raises((InvalidArgument, MessageIllegal), match="broadcasts"):
        stage.answer(ask(stage, wanted, code))
    assert stage.notices == []


def test_what_members_did_of_late_is_kept_and_told(stage):
    own = TopicConsumption("g", "t", ok_per_s=5.0)
    beat(stage, stats=[own, TopicConsumption("g", "other"), TopicConsumption("other", "t")])
    asked = ConsumerConnectionsRequest("g")
    code = RequestCode.GET_CONSUMER_CONNECTION_LIST
    (member,) = decode_header(ConsumerConnections, stage.ask(code, asked).header).members
    assert member.stats == [own]
    generation = stage.features.state.groups.group("g").generation
    beat(stage, stats=[TopicConsumption("g", "t", ok_per_s=6.0)])
    assert stage.features.state.groups.group("g").generation == generation
