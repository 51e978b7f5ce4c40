"""Administrators who use RocketMQ's tools by the gateway; and replies to requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from simulation.test_election import Site
from simulation.test_gateway import BROKER, NAMESRV, Client, bodies_of, gateway_site, offset_of

from mqmesh import Producer, PullConsumer
from mqmesh.protocol.remoting.codes import REFUSED, RemotingCode, RemotingStatus
from mqmesh.protocol.remoting.loose_json import strict_json

QUEUE = {"topic": "t", "brokerName": "broker-a", "queueId": 0}
RUNNING = b"""{"jstack":"main","mqPopTable":{},"mqTable":{
{"brokerName":"broker-a","queueId":0,"topic":"t"}:{"cachedMsgCount":2,"cachedMsgMaxOffset":8,
"cachedMsgMinOffset":7,"cachedMsgSizeInMiB":1,"commitOffset":7,"droped":false}},
"properties":{"PROP_CONSUME_TYPE":"CONSUME_PASSIVELY","PROP_CONSUMER_START_TIMESTAMP":"17"},
"statusTable":{"t":{"consumeFailedMsgs":1,"consumeFailedTPS":0.5,"consumeOKTPS":2.0,"consumeRT":3.0,
"pullRT":1.0,"pullTPS":4.0}},"subscriptionSet":[{"classFilterMode":false,"codeSet":[],
"expressionType":"TAG","subString":"*","subVersion":1,"tagsSet":[],"topic":"t"}]}"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    yield from gateway_site(tmp_path)


def test_a_running_consumer_of_java_is_asked_by_way_of_its_broker(site):
    one, admin = Client(site, BROKER, "one"), Client(site, BROKER, "admin")
    one.beat()
    one.replies[RemotingCode.GET_CONSUMER_RUNNING_INFO] = (0, RUNNING)
    code = RemotingCode.GET_CONSUMER_RUNNING_INFO
    answer = admin.ask(code, consumerGroup="g", clientId="one", jstackEnable="true")
    assert answer.code == RemotingStatus.SUCCESS, answer.remark
    (asked,) = [c for c in one.commands if c.code == code]
    assert asked.fields == {"consumerGroup": "g", "clientId": "one", "jstackEnable": "true"}
    found = json.loads(strict_json(answer.body))
    ((queue, state),) = found["mqTable"].items()
    assert json.loads(queue) == QUEUE
    assert (state["commitOffset"], state["cachedMsgCount"]) == (7, 2)
    assert (found["jstack"], found["statusTable"]["t"]["consumeOKTPS"]) == ("main", 2.0)
    assert found["properties"]["PROP_CONSUMER_START_TIMESTAMP"] == "17"
    one.replies[code] = (0, b"{{{")
    broken = admin.ask(code, consumerGroup="g", clientId="one")
    assert broken.code == RemotingStatus.INVALID_PARAMETER
    del one.replies[code]
    silent = admin.ask(code, consumerGroup="g", clientId="one", within_ms=20_000)
    assert silent.code == RemotingStatus.CONSUMER_NOT_ONLINE
    gone = admin.ask(code, consumerGroup="g", clientId="nobody")
    assert gone.code == RemotingStatus.CONSUMER_NOT_ONLINE


@pytest.mark.parametrize(
    ("said", "shown"),
    [("CR_SUCCESS", "CR_SUCCESS"), ("CR_ROLLBACK", "CR_LATER"), (None, "CR_THROW_EXCEPTION")],
)
def test_a_message_is_handed_to_a_consumer_of_java(site, said, shown):
    one, admin = Client(site, BROKER, "one"), Client(site, BROKER, "admin")
    one.beat()
    sent = one.wait(one.send(b"again"))
    code = RemotingCode.CONSUME_MESSAGE_DIRECTLY
    body = json.dumps({"consumeResult": said, "remark": "why", "spentTimeMills": 5}).encode()
    one.replies[code] = (0, body)
    fields = {"consumerGroup": "g", "clientId": "one", "topic": "t"}
    answer = admin.ask(code, msgId=sent.fields["msgId"], **fields)
    assert answer.code == RemotingStatus.SUCCESS, answer.remark
    found = json.loads(answer.body)
    assert (found["consumeResult"], found["remark"], found["spentTimeMills"]) == (shown, "why", 5)
    (asked,) = [c for c in one.commands if c.code == code]
    assert bodies_of(asked) == [b"again"]
    assert asked.fields["msgId"] == sent.fields["msgId"]
    wrong = admin.ask(code, msgId="nothing", **fields)
    assert wrong.code == RemotingStatus.INVALID_PARAMETER


def test_members_of_java_follow_a_reset(site):
    one, admin = Client(site, BROKER, "one"), Client(site, BROKER, "admin")
    one.beat()
    for body in b"a", b"b":
        one.wait(one.send(body))
    where = {"consumerGroup": "g", "topic": "t", "queueId": 0}
    one.ask(RemotingCode.QUERY_CONSUMER_OFFSET, **where)
    one.pull(0)
    one.ask(RemotingCode.UPDATE_CONSUMER_OFFSET, commitOffset=2, **where)
    site.run(100)
    code = RemotingCode.INVOKE_BROKER_TO_RESET_OFFSET
    refused = admin.ask(code, group="g", topic="t", timestamp=0, isForce="false")
    assert "force" in refused.remark
    answer = admin.ask(code, group="g", topic="t", timestamp=0, isForce="true")
    assert answer.code == RemotingStatus.SUCCESS, answer.remark
    table = {json.loads(key)["queueId"]: at for key, at in offsets_of(answer.body).items()}
    assert table == {0: 0, 1: 0}
    site.run(100)
    (moved,) = [c for c in one.commands if c.code == RemotingCode.RESET_CONSUMER_CLIENT_OFFSET]
    assert (moved.fields["group"], moved.fields["topic"]) == ("g", "t")
    assert len(offsets_of(moved.body)) == 2
    pulled = one.pull(2)
    assert (pulled.code, pulled.fields["nextBeginOffset"]) == (
        RemotingStatus.PULL_OFFSET_MOVED,
        "0",
    )
    assert bodies_of(one.pull(0)) == [b"a", b"b"]


def offsets_of(body: bytes) -> dict[str, int]:
    return json.loads(strict_json(body))["offsetTable"]


def test_a_reply_is_pushed_to_the_producer_that_asked(site):
    client = Client(site, BROKER, "asks")
    producers = {"clientID": "asks", "producerDataSet": [{"groupName": "p"}]}
    assert client.ask(RemotingCode.HEART_BEAT, {**producers, "consumerDataSet": []}).code == 0
    properties = "CORRELATION_ID\x01c1\x02REPLY_TO_CLIENT\x01asks\x02TTL\x0130000\x02"
    client.wait(client.send(b"how much?", properties=properties))
    world = site.world
    code = RemotingCode.PUSH_REPLY_MESSAGE_TO_CLIENT
    client.replies[code] = (0, b"")
    with (
        PullConsumer(
            "own",
            client=world.client_options(),
            transport=world.transport("consumer"),
            consume_from_where="FIRST_OFFSET",
        ) as consumer,
        Producer(
            "replies", client=world.client_options(), transport=world.transport("replies")
        ) as producer,
    ):
        consumer.subscribe("t")
        (request,) = consumer.poll(10_000)
        taken = producer.reply_async(request, b"42", properties={"from": "python"})
        site.run(1_000)
        assert taken.result(0)
    (pushed,) = [c for c in client.commands if c.code == code]
    assert pushed.body == b"42"
    assert "CORRELATION_ID\x01c1\x02" in pushed.fields["properties"]
    assert "from\x01python\x02" in pushed.fields["properties"]
    record = client.pull(0).body
    assert b"CLUSTER\x01DefaultCluster\x02" in record
    answer = client.ask(
        RemotingCode.SEND_REPLY_MESSAGE_V2,
        b"43",
        b="DefaultCluster_REPLY_TOPIC",
        f=0,
        i="CORRELATION_ID\x01c2\x02REPLY_TO_CLIENT\x01asks\x02",
    )
    assert answer.code == RemotingStatus.SUCCESS, answer.remark
    assert client.commands[-1].body == b"43"
    route = Client(site, NAMESRV, "names").ask(
        RemotingCode.GET_ROUTEINFO_BY_TOPIC, topic="DefaultCluster_REPLY_TOPIC"
    )
    assert route.code == RemotingStatus.SUCCESS
    nobody = "CORRELATION_ID\x01c3\x02REPLY_TO_CLIENT\x01nobody\x02"
    code = RemotingCode.SEND_REPLY_MESSAGE
    late = client.ask(code, b"43", topic="DefaultCluster_REPLY_TOPIC", properties=nobody)
    assert late.code == RemotingStatus.CONSUMER_NOT_ONLINE
    plain = client.ask(code, b"43", topic="DefaultCluster_REPLY_TOPIC", properties="")
    assert plain.code == RemotingStatus.MESSAGE_ILLEGAL


@pytest.mark.parametrize("code", [200_050, 401, 3_001, 513, 907])
def test_what_mqmesh_has_no_equal_for_is_refused_with_a_reason(site, code):
    client = Client(site, BROKER)
    client.ask(RemotingCode.CHECK_CLIENT_CONFIG)
    answer = client.ask(code)  # in JSON: the other form has no room for large codes
    assert answer.code == RemotingStatus.REQUEST_CODE_NOT_SUPPORTED
    assert REFUSED[code] in answer.remark


def test_topics_of_a_group_go_when_it_is_gone(site):
    client = Client(site, BROKER, "one")
    client.beat()
    code = RemotingCode.DELETE_TOPIC_IN_BROKER
    refused = client.ask(code, topic="%RETRY%g")
    assert refused.code == RemotingStatus.NO_PERMISSION
    assert "belongs to group g" in refused.remark
    assert client.ask(code, topic="%DLQ%nobody").code == RemotingStatus.SUCCESS
    assert client.ask(code, topic="missing").code == RemotingStatus.SUCCESS


def test_retries_and_dead_letters_are_no_topics_of_the_system(site):
    """RocketMQ's dashboard would hide them."""
    client = Client(site, BROKER, "one")
    client.beat()
    offset = offset_of(client.wait(client.send(b"bad")))
    fields = {"group": "g", "offset": offset, "originTopic": "t", "maxReconsumeTimes": 16}
    dead = client.ask(RemotingCode.CONSUMER_SEND_MSG_BACK, delayLevel=-1, **fields)
    assert dead.code == RemotingStatus.SUCCESS, dead.remark
    site.run(2_000)

    def topics(place: int, code: RemotingCode) -> list[str]:
        return json.loads(Client(site, place).ask(code).body)["topicList"]

    assert "%DLQ%g" in topics(NAMESRV, RemotingCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    for place, code in (
        (BROKER, RemotingCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER),
        (NAMESRV, RemotingCode.GET_SYSTEM_TOPIC_LIST_FROM_NS),
    ):
        found = topics(place, code)
        assert "RMQ_SYS_SENT_BACK_TOPIC" in found
        assert not any(one.startswith("%") for one in found)


def test_a_message_is_found_by_the_offset_in_its_id(site):
    client = Client(site, BROKER)
    sent = client.wait(client.send(b"x"))
    code = RemotingCode.QUERY_CONSUME_QUEUE
    found = json.loads(client.ask(code, topic="t", queueId=0, index=0, count=5).body)
    assert [one["physicOffset"] for one in found["queueData"]] == [offset_of(sent)]
    assert (found["minQueueIndex"], found["maxQueueIndex"]) == (0, 1)
