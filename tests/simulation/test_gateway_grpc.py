"""Clients of RocketMQ 5 by gRPC at the gateway: deliveries, transactions, failovers, limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.grpc_client import GrpcTestClient, queue, resource
from simulation.test_election import Site
from simulation.test_gateway import BROKER, Client

from mqmesh import Message, Producer, PullConsumer
from mqmesh.host import socket_path
from mqmesh.protocol.groups import GroupConfig
from mqmesh.protocol.grpc.calls import GrpcStatus
from mqmesh.protocol.grpc.codes import (
    ClientType,
    FilterType,
    MessageType,
    OffsetPolicy,
    ReplyCode,
    Resolution,
)
from mqmesh.protocol.grpc.messages import CLASSES
from mqmesh.protocol.remoting.codes import RemotingCode, RemotingStatus
from mqmesh.protocol.route import TopicConfig
from mqmesh.roles.gateway.grpc.clients import NODEJS, name_of
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.transport.simulated.streams import dial

PORT = 8_081


class Scene:
    """A broker group that elects, and a gateway."""

    def __init__(self, folder: Path) -> None:
        self.site = Site(folder)
        self.site.admin.create_topic("t", queues=2)
        self.gateway = self.site.world.add_gateway()
        self.gateway.start()
        self.run = self.site.run
        self.run(500)

    def client(self, name: str = "client") -> GrpcTestClient:
        world = self.site.world
        stream = dial(world.network, world.transport(name).loop, f"tcp://127.0.0.1:{PORT}")
        return GrpcTestClient(stream, self.run, name)

    def kill_master(self) -> None:
        leader = self.site.replicas[self.site.leader() - 1]
        leader.kill()
        self.site.world.simulation.after(3_000, leader.start)

    def close(self) -> None:
        self.gateway.stop()
        self.gateway.release()
        self.site.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


def bodies(messages: list[Any]) -> list[bytes]:
    return sorted(one.body for one in messages)


def sent(client: GrpcTestClient, *texts: bytes, topic: str = "t", **system: Any) -> list[Any]:
    """Sends messages; their entries."""
    posted = [client.send(one, topic, **system) for one in texts]
    answers = [client.wait(one).answers[0] for one in posted]
    assert [one.status.code for one in answers] == [ReplyCode.OK] * len(texts), answers
    return [one.entries[0] for one in answers]


def test_routes_stand_at_the_address_that_was_asked(scene):
    client = scene.client()
    endpoints = CLASSES["Endpoints"](
        scheme=3, addresses=[CLASSES["Address"](host="proxy", port=80)]
    )
    route = client.ask("QueryRoute", topic=resource("t"), endpoints=endpoints)
    assert [one.id for one in route.message_queues] == [0, 1]
    assert {one.broker.name for one in route.message_queues} == {"broker-a"}
    assert route.message_queues[0].broker.endpoints == endpoints
    assigned = client.ask("QueryAssignment", topic=resource("t"), group=resource("g"))
    (one,) = assigned.assignments
    assert (one.message_queue.id, one.message_queue.broker.name) == (-1, "broker-a")
    assert one.message_queue.broker.endpoints.addresses[0].port == PORT


def test_settings_are_those_of_the_group(scene):
    client = scene.client()
    entry = CLASSES["SubscriptionEntry"](topic=resource("t"))
    subscription = CLASSES["Subscription"](group=resource("g"), subscriptions=[entry])
    stream = client.settings(client_type=ClientType.PUSH_CONSUMER, subscription=subscription)
    answer = stream.answers[0]
    assert answer.status.code == ReplyCode.OK
    assert answer.settings.backoff_policy.max_attempts == 17
    assert answer.settings.backoff_policy.customized_backoff.next[0].seconds == 10
    assert (answer.settings.subscription.fifo, answer.settings.metric.on) == (False, False)
    assert answer.settings.subscription.receive_batch_size == 32
    producer = scene.client("producer")
    stream = producer.settings(publishing=CLASSES["Publishing"](validate_message_type=True))
    publishing = stream.answers[0].settings.publishing
    assert (publishing.max_body_size, publishing.validate_message_type) == (4 << 20, False)


def test_messages_are_received_and_acknowledged_once(scene):
    client = scene.client()
    entries = sent(client, *[b"%d" % number for number in range(40)], keys=["k"], tag="new")
    assert sorted(one.message_id for one in entries) == sorted(map(str, range(40)))
    got: list[Any] = []
    while found := client.got():
        got += found
        answer = client.ack(*found)
        assert {one.status.code for one in answer.entries} == {ReplyCode.OK}
    assert bodies(got) == sorted(b"%d" % number for number in range(40))
    system = got[0].system_properties
    assert (system.tag, list(system.keys), system.delivery_attempt) == ("new", ["k"], 1)
    assert system.message_id == got[0].body.decode()
    scene.run(15_000)
    assert client.got() == []
    assert client.ack(got[0]).status.code == ReplyCode.OK, "repeating is harmless"
    other = client.ask(
        "AckMessage",
        group=resource("another"),
        topic=resource("t"),
        entries=[CLASSES["AckMessageEntry"](receipt_handle=system.receipt_handle)],
    )
    assert other.entries[0].status.code == ReplyCode.INVALID_RECEIPT_HANDLE


def test_priorities_are_those_of_the_topic(scene):
    client = scene.client()
    scene.site.admin.create_topic(TopicConfig("jobs", 3, 3, priorities=3))
    scene.run(500)
    sent(client, b"plain", topic="jobs")
    sent(client, b"low", topic="jobs", priority=0, message_type=MessageType.PRIORITY)
    sent(client, b"high", topic="jobs", priority=2, message_type=MessageType.PRIORITY)
    for topic, priority in ("jobs", 3), ("t", 0):
        one = client.send(b"x", topic, priority=priority, message_type=MessageType.PRIORITY)
        code = client.wait(one).answers[0].status.code
        assert code == ReplyCode.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
    got = client.got(topic="jobs", wait_s=1)
    assert [(one.body, one.system_properties.priority) for one in got] == [
        *[(b"high", 2), (b"plain", 0), (b"low", 0)],
    ]
    route = client.ask("QueryRoute", topic=resource("jobs"))
    assert MessageType.PRIORITY in route.message_queues[0].accept_message_types


def test_each_message_of_a_lease_has_a_time_of_its_own(scene):
    client = scene.client()
    sent(client, b"short", b"long", b"plain", message_group="one")
    messages = {one.body: one for one in client.got(invisible_s=10)}
    assert len(messages) == 3
    assert client.change(messages[b"short"], 2_000).status.code == ReplyCode.OK
    assert client.change(messages[b"long"], 30_000).status.code == ReplyCode.OK
    scene.run(1_000)
    assert client.got() == []
    (again,) = client.got(wait_s=5)
    assert (again.body, again.system_properties.delivery_attempt) == (b"short", 2)
    client.ack(again)
    scene.run(8_000)
    (again,) = client.got(wait_s=2)
    assert (again.body, again.system_properties.delivery_attempt) == (b"plain", 2)
    assert client.ack(again, messages[b"long"]).status.code == ReplyCode.OK
    scene.run(30_000)
    assert client.got() == []


def test_what_a_push_consumer_has_is_renewed_until_it_is_gone(scene):
    one, other = scene.client("one"), scene.client("other")
    sent(one, b"slow")
    push = {"auto_renew": True, "invisible_s": 0}
    (message,) = one.got(**push)
    for _ in range(20):
        scene.run(9_000)
        one.ask("Heartbeat", client_type=ClientType.PUSH_CONSUMER)
        assert other.got(**push) == []
    one.stream.close()
    scene.run(1_500)
    (message,) = other.got(wait_s=1, **push)
    assert message.system_properties.delivery_attempt == 1, "given back, not failed"
    assert other.change(message, 3_000).status.code == ReplyCode.OK
    assert other.got(**push) == []
    (message,) = other.got(wait_s=5, **push)
    assert message.system_properties.delivery_attempt == 2
    assert other.ack(message).status.code == ReplyCode.OK


def test_a_retry_that_comes_with_another_topic_is_reported_with_its_own(scene):
    client = scene.client()
    scene.site.admin.create_topic("other", queues=1)
    scene.run(500)
    sent(client, b"x")
    push = {"auto_renew": True, "invisible_s": 0}
    (message,) = client.got(**push)
    assert client.change(message, 40_000).status.code == ReplyCode.OK
    for _ in range(3):
        client.got(wait_s=10, topic="other")
        client.ask("Heartbeat")
    (again,) = client.got(topic="other", wait_s=15, **push)
    assert (again.body, again.topic.name) == (b"x", "t")
    assert client.ack(again).status.code == ReplyCode.OK


def test_what_fails_at_a_client_that_knows_no_schedule_comes_again_by_that_of_the_group(scene):
    client = scene.client()
    world = scene.site.world
    with GroupAdmin(world.namesrv_addr, transport=world.transport("groups")) as admin:
        admin.create_group(GroupConfig("g", delivery="message", retry_delays="4s"))
    entry = CLASSES["SubscriptionEntry"](topic=resource("t"))
    client.settings(
        client_type=ClientType.PUSH_CONSUMER,
        user_agent=CLASSES["UA"](language=NODEJS),
        subscription=CLASSES["Subscription"](group=resource("g"), subscriptions=[entry]),
    )
    sent(client, b"x")
    push = {"auto_renew": True, "invisible_s": 0}
    (message,) = client.got(**push)
    assert client.change(message, 0).status.code == ReplyCode.OK
    assert client.got(wait_s=3, **push) == []
    (again,) = client.got(wait_s=3, **push)
    assert again.system_properties.delivery_attempt == 2


def test_topics_are_named_without_the_namespace_of_their_client(scene):
    client = scene.client()
    scene.site.admin.create_topic("space%t", queues=1)
    scene.run(500)
    sent(client, b"x", topic="space%t")
    (message,) = client.got(topic="space%t")
    assert (message.topic.resource_namespace, message.topic.name) == ("space", "t")
    assert client.ack(message).status.code == ReplyCode.OK


def test_what_a_client_did_not_take_of_an_answer_that_it_gave_up_goes_to_others(scene):
    one, other, world = scene.client("one"), scene.client("other"), scene.site.world
    with Producer("p", client=world.client_options(), transport=world.transport("p")) as producer:
        producer.send(Message("t", bytes(1_000_000)))
    push = {"auto_renew": True, "invisible_s": 0}
    one.gives_room = False
    asked = one.receive(**push)
    scene.run(1_000)
    assert other.got(**push) == []
    one.cancel(asked)
    (message,) = other.got(wait_s=1, **push)
    assert message.system_properties.delivery_attempt == 1


def test_what_a_broken_connection_may_not_have_carried_is_not_renewed(scene):
    one, other = scene.client("one"), scene.client("other")
    sent(one, b"early", b"late")
    push = {"auto_renew": True, "invisible_s": 0, "batch_size": 1}
    (early,) = one.got(**push)
    for _ in range(2):
        scene.run(9_000)
        one.ask("Heartbeat")
    (late,) = one.got(**push)
    one.stream.close()
    again = scene.client("one")
    for _ in range(8):
        again.ask("Heartbeat")
        scene.run(9_000)
    (message,) = other.got(**push)
    assert message.body == late.body
    assert again.ack(early).status.code == ReplyCode.OK


def test_what_a_consumer_gives_up_is_a_dead_letter(scene):
    client, world = scene.client(), scene.site.world
    sent(client, b"bad", b"good")
    messages = {one.body: one for one in client.got()}
    receipt = messages[b"bad"].system_properties.receipt_handle
    answer = client.ask(
        "ForwardMessageToDeadLetterQueue",
        group=resource("g"),
        topic=resource("t"),
        receipt_handle=receipt,
        delivery_attempt=3,
    )
    assert answer.status.code == ReplyCode.OK
    assert client.ack(messages[b"good"]).status.code == ReplyCode.OK
    scene.run(15_000)
    assert client.got() == []
    with GroupAdmin(world.namesrv_addr, transport=world.transport("groups")) as admin:
        ((one,),) = admin.groups("g").values()
    assert (one.dead, one.lag) == (1, 0)
    (letter,) = client.got(group="audit", topic="%DLQ%g")
    assert (name_of(letter.topic), letter.body) == ("%DLQ%g", b"bad")
    assert client.ack(letter, group="audit").status.code == ReplyCode.OK


def test_a_client_that_says_farewell_gives_back_what_was_renewed(scene):
    one, other = scene.client("one"), scene.client("other")
    sent(one, b"x")
    assert one.got(auto_renew=True, invisible_s=0)
    one.ask("NotifyClientTermination", group=resource("g"))
    (message,) = other.got(wait_s=1, auto_renew=True, invisible_s=0)
    assert message.system_properties.delivery_attempt == 1


def test_what_comes_for_a_call_that_nobody_waits_for_goes_to_others(scene):
    one, other = scene.client("one"), scene.client("other")
    waiting = one.receive(wait_s=20)
    scene.run(1_000)
    one.cancel(waiting)
    scene.run(100)
    sent(other, b"x")
    (message,) = other.got(wait_s=2)
    assert message.system_properties.delivery_attempt == 1


def test_a_receive_is_answered_before_its_client_gives_up(scene):
    client = scene.client()
    asked = client.receive(wait_s=20, timeout="3S")
    scene.run(2_400)
    assert asked.status is None
    client.wait(asked, 300)
    assert asked.answers[-1].status.code == ReplyCode.MESSAGE_NOT_FOUND


def test_leases_and_acknowledgements_outlive_the_master(scene):
    client, other = scene.client("client"), scene.client("other")
    texts = [b"%d" % number for number in range(10)]
    sent(client, *texts)
    messages = client.got(invisible_s=60)
    assert bodies(messages) == texts
    assert client.ack(*messages[:4]).status.code == ReplyCode.OK
    scene.kill_master()
    scene.run(9_000)
    assert other.got() == [], "shown to the new master"
    assert client.ack(*messages[4:7]).status.code == ReplyCode.OK
    scene.run(60_000)
    left = other.got(wait_s=2)
    assert bodies(left) == bodies(messages[7:])
    assert {one.system_properties.delivery_attempt for one in left} == {2}


def test_nothing_acknowledged_is_lost_when_the_master_is_killed(scene):
    client = scene.client()
    posted = {}
    for number in range(80):
        body = b"%d" % number
        posted[body] = client.send(body)
        scene.run(25)
        if number in (20, 60):
            scene.kill_master()
    scene.run(9_000)
    good = {body for body, one in posted.items() if one.answers[0].status.code == ReplyCode.OK}
    assert len(good) >= 70
    got: list[Any] = []
    while found := client.got(wait_s=1):
        got += found
        assert client.ack(*found).status.code == ReplyCode.OK
    assert good <= set(bodies(got))


def test_transactions_end_also_at_a_gateway_that_was_started_again(scene):
    client = scene.client()
    texts = b"commit", b"rollback", b"later"
    entries = sent(client, *texts, message_type=MessageType.TRANSACTION)
    handles = dict(zip(texts, [one.transaction_id for one in entries], strict=True))

    def end(client: GrpcTestClient, name: bytes, resolution: int, topic: str = "t") -> int:
        answer = client.ask(
            "EndTransaction",
            topic=resource(topic),
            transaction_id=handles[name],
            resolution=resolution,
        )
        return int(answer.status.code)

    assert end(client, b"commit", Resolution.COMMIT) == ReplyCode.OK
    assert end(client, b"rollback", Resolution.ROLLBACK) == ReplyCode.OK
    wrong = end(client, b"later", Resolution.COMMIT, "another")
    assert wrong == ReplyCode.INVALID_TRANSACTION_ID
    scene.gateway.stop()
    scene.gateway.release()
    scene.gateway.start()
    scene.run(1_000)
    again = scene.client("again")
    assert end(again, b"later", Resolution.COMMIT) == ReplyCode.OK
    assert end(again, b"commit", Resolution.ROLLBACK) == ReplyCode.INVALID_TRANSACTION_ID
    assert bodies(again.got(wait_s=1)) == [b"commit", b"later"]


def test_another_producer_is_asked_about_a_transaction(scene):
    one, other = scene.client("one"), scene.client("other")
    sent(one, b"mine", message_type=MessageType.TRANSACTION)
    sent(other, b"other", message_type=MessageType.TRANSACTION)
    one.stream.close()
    stream = other.settings(publishing=CLASSES["Publishing"]())
    for _ in range(400):
        if len(stream.answers) == 3:
            break
        scene.run(100)
    for answer in stream.answers[1:]:
        command = answer.recover_orphaned_transaction_command
        assert command.message.system_properties.delivery_attempt == 1
        ended = other.ask(
            "EndTransaction",
            topic=command.message.topic,
            transaction_id=command.transaction_id,
            resolution=Resolution.COMMIT,
            source=2,
        )
        assert ended.status.code == ReplyCode.OK
    assert bodies(other.got(wait_s=1)) == [b"mine", b"other"]


def test_a_producer_that_was_started_again_is_asked_before_it_sends(scene):
    one = scene.client("one")
    sent(one, b"mine", message_type=MessageType.TRANSACTION)
    scene.gateway.stop()
    scene.gateway.release()
    scene.gateway.start()
    scene.run(1_000)
    again = scene.client("again")
    stream = again.settings(publishing=CLASSES["Publishing"](topics=[resource("t")]))
    for _ in range(400):
        if len(stream.answers) == 2:
            break
        scene.run(100)
    assert stream.answers[1].recover_orphaned_transaction_command.message.body == b"mine"


def test_wrong_requests_are_refused_with_a_code(scene):
    client = scene.client()
    for expected, name, fields in [
        (ReplyCode.TOPIC_NOT_FOUND, "QueryAssignment", {"topic": resource("no")}),
        (ReplyCode.BAD_REQUEST, "QueryRoute", {"topic": resource("a b")}),
        (ReplyCode.INVALID_RECEIPT_HANDLE, "ChangeInvisibleDuration", {"receipt_handle": "x"}),
        (ReplyCode.INVALID_TRANSACTION_ID, "EndTransaction", {"transaction_id": "é"}),
        (ReplyCode.BAD_REQUEST, "SendMessage", {}),
        (ReplyCode.BAD_REQUEST, "AckMessage", {}),
        (ReplyCode.ILLEGAL_INVISIBLE_TIME, "ReceiveMessage", {"message_queue": queue()}),
    ]:
        fields.setdefault("topic", resource("t"))
        fields.setdefault("group", resource("g"))
        if name in {"SendMessage", "ReceiveMessage"}:
            del fields["topic"]
        if name in {"QueryRoute", "EndTransaction", "SendMessage"}:
            del fields["group"]
        assert client.ask(name, **fields).status.code == expected, name
    nobody = scene.client("")
    assert nobody.ask("Heartbeat").status.code == ReplyCode.CLIENT_ID_REQUIRED
    unknown = client.wait(client.post("Heartbeat"))
    assert unknown.status == GrpcStatus.OK


def test_a_group_that_was_made_and_never_used_gets_the_mode_of_its_first_member(scene):
    client, world = scene.client(), scene.site.world
    with GroupAdmin(world.namesrv_addr, transport=world.transport("groups")) as admin:
        admin.create_group(GroupConfig("g", retry_max_times=4))
        sent(client, b"x")
        assert bodies(client.got(wait_s=1)) == [b"x"]
        ((one,),) = admin.groups("g").values()
        config = one.config
    assert (config.delivery, config.retry_max_times) == ("message", 4)


def test_a_group_that_mqadmin_makes_orderly_keeps_the_order_of_message_groups(scene):
    admin, client = Client(scene.site, BROKER, "mqadmin"), scene.client()
    body = {"groupName": "g", "consumeMessageOrderly": True}
    answer = admin.ask(RemotingCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body)
    assert answer.code == RemotingStatus.SUCCESS, answer.remark
    subscription = CLASSES["Subscription"](group=resource("g"))
    stream = client.settings(client_type=ClientType.PUSH_CONSUMER, subscription=subscription)
    assert stream.answers[0].settings.subscription.fifo
    for number in range(4):
        sent(client, b"%d" % number, message_group="one")
    (first,) = client.got(batch_size=1, auto_renew=True, invisible_s=0)
    assert first.body == b"0"
    assert client.got(batch_size=1, auto_renew=True, invisible_s=0) == []
    client.ack(first)
    rest = client.got(auto_renew=True, invisible_s=0)
    assert [one.body for one in rest] == [b"1", b"2", b"3"]


def test_a_group_that_shares_queues_refuses_members_by_grpc(scene):
    world = scene.site.world
    with PullConsumer(
        "g", client=world.client_options(), transport=world.transport("consumer")
    ) as consumer:
        consumer.subscribe("t")
        consumer.poll(100)
        client = scene.client()
        answer = client.wait(client.receive()).answers[-1]
        assert answer.status.code == ReplyCode.FORBIDDEN
        assert "delivery" in answer.status.message


def test_a_client_that_takes_no_answers_gets_no_more_messages(scene):
    client, other, world = scene.client("client"), scene.client("other"), scene.site.world
    with Producer("p", client=world.client_options(), transport=world.transport("p")) as producer:
        for _ in range(24):
            producer.send(Message("t", bytes(1_000_000)))
    client.gives_room = False
    for _ in range(24):
        client.receive(invisible_s=60, batch_size=1)
    scene.run(3_000)
    left = 0
    while found := other.got(batch_size=1, wait_s=1):
        left += len(found)
        other.ack(*found)
    assert 24 - 17 <= left < 24


def test_without_its_packages_a_gateway_serves_the_others(scene, monkeypatch, caplog):
    scene.gateway.stop()
    scene.gateway.release()
    monkeypatch.setattr("mqmesh.roles.gateway.server.find_spec", lambda name: None)
    scene.gateway.start()
    scene.run(500)
    assert "install mqmesh[gateway]" in caplog.text
    assert Client(scene.site, BROKER).beat().code == RemotingStatus.SUCCESS
    with pytest.raises(OSError, match=str(PORT)):
        scene.client()


def pulled(
    client: GrpcTestClient, one: Any, offset: int, **more: Any
) -> tuple[list[Any], int, int]:
    """Pulls once; messages, next offset and code."""
    asked = client.wait(
        client.post("PullMessage", group=resource("g"), message_queue=one, offset=offset, **more)
    )
    messages = [answer.message for answer in asked.answers if answer.HasField("message")]
    (after,) = [answer.next_offset for answer in asked.answers if answer.HasField("next_offset")]
    return messages, after, asked.answers[-1].status.code


def test_a_pull_consumer_reads_queues_and_keeps_its_offsets(scene):
    client, group = scene.client(), resource("g")
    stream = client.settings(
        client_type=ClientType.PULL_CONSUMER, subscription=CLASSES["Subscription"](group=group)
    )
    assert stream.answers[0].status.code == ReplyCode.OK
    sent(client, *[b"%d" % number for number in range(20)], tag="a")
    sent(client, b"other", tag="b")
    expression = CLASSES["FilterExpression"](type=FilterType.TAG, expression="a")
    got: list[Any] = []
    for one in client.ask("QueryRoute", topic=resource("t")).message_queues:
        of = {"group": group, "message_queue": one}
        at, end = (
            client.ask("QueryOffset", message_queue=one, query_offset_policy=policy).offset
            for policy in (OffsetPolicy.BEGINNING, OffsetPolicy.END)
        )
        since = {"query_offset_policy": OffsetPolicy.TIMESTAMP, "message_queue": one}
        assert client.ask("QueryOffset", **since, timestamp={"seconds": 1}).offset == at
        assert client.ask("GetOffset", **of).status.code == ReplyCode.OFFSET_NOT_FOUND
        while at < end:
            messages, at, code = pulled(client, one, at, batch_size=3, filter_expression=expression)
            assert code == (ReplyCode.OK if messages else ReplyCode.MESSAGE_NOT_FOUND)
            got += messages
        assert client.ask("UpdateOffset", **of, offset=at).status.code == ReplyCode.OK
        assert client.ask("GetOffset", **of).offset == end
        assert pulled(client, one, end) == ([], end, ReplyCode.MESSAGE_NOT_FOUND)
        assert pulled(client, one, end + 5) == ([], end, ReplyCode.ILLEGAL_OFFSET)
        negative = client.ask("UpdateOffset", **of, offset=-1)
        assert negative.status.code == ReplyCode.ILLEGAL_OFFSET
    assert bodies(got) == sorted(b"%d" % number for number in range(20))
    assert got[0].system_properties.delivery_attempt == 1
    waiting = client.post(
        "PullMessage",
        group=group,
        message_queue=one,
        offset=end,
        long_polling_timeout=CLASSES["Duration"](seconds=20),
    )
    scene.run(1_000)
    assert waiting.status is None
    sent(client, b"late", b"later")
    assert client.wait(waiting).answers[0].message.body in (b"late", b"later")
    refused = client.ask("GetOffset", group=group, message_queue=queue())
    assert refused.status.code == ReplyCode.BAD_REQUEST


def test_mqadmin_asks_a_consumer_by_grpc_where_it_stands_and_to_consume(scene):
    admin, client = Client(scene.site, BROKER, "mqadmin"), scene.client()
    offset_id = admin.wait(admin.send(b"x", properties="UNIQ_KEY\x01U1\x02")).fields["msgId"]
    entry = CLASSES["SubscriptionEntry"](topic=resource("t"))
    subscription = CLASSES["Subscription"](group=resource("g"), subscriptions=[entry])
    stream = client.settings(client_type=ClientType.PUSH_CONSUMER, subscription=subscription)
    assert bodies(client.got()) == [b"x"]

    def answered(number: int, command: str, code: ReplyCode, **fields: Any) -> Any:
        """Answers the client's newest command; the answer of mqadmin's question."""
        scene.run(500)
        asked = getattr(stream.answers[-1], command)
        status = CLASSES["Status"](code=code)
        reply = {name: CLASSES[kind](nonce=asked.nonce) for name, kind in fields.items()}
        if "thread_stack_trace" in reply:
            reply["thread_stack_trace"].thread_stack_trace = "at main"
        client.say(stream, CLASSES["TelemetryCommand"](status=status, **reply))
        return asked, admin.wait(number)

    of = {"consumerGroup": "g", "clientId": client.client_id}
    code = RemotingCode.GET_CONSUMER_RUNNING_INFO
    plain = admin.ask(code, **of, jstackEnable="false")
    assert b'"topic":"t"' in plain.body.replace(b" ", b"")
    asking = admin.post(code, **of, jstackEnable="true")
    command = "print_thread_stack_trace_command"
    _, answer = answered(asking, command, ReplyCode.OK, thread_stack_trace="ThreadStackTrace")
    assert (answer.code, b"at main" in answer.body) == (RemotingStatus.SUCCESS, True)
    for code, result in (
        (ReplyCode.OK, b"CR_SUCCESS"),
        (ReplyCode.FAILED_TO_CONSUME_MESSAGE, b"CR_LATER"),
        (ReplyCode.NOT_IMPLEMENTED, b"CR_THROW_EXCEPTION"),
    ):
        asking = admin.post(RemotingCode.CONSUME_MESSAGE_DIRECTLY, **of, msgId=offset_id)
        command = "verify_message_command"
        asked, answer = answered(asking, command, code, verify_message_result="VerifyMessageResult")
        assert (asked.message.body, asked.message.system_properties.message_id) == (b"x", "U1")
        assert result in answer.body, answer.remark
    asking = admin.post(RemotingCode.CONSUME_MESSAGE_DIRECTLY, **of, msgId=offset_id)
    assert admin.wait(asking, 20_000).code == RemotingStatus.CONSUMER_NOT_ONLINE


def test_administrators_see_the_clients_of_both_protocols(scene):
    client, world = scene.client("java-5"), scene.site.world
    sent(client, b"x")
    assert bodies(client.got(group="by-grpc")) == [b"x"]
    old = Client(scene.site, BROKER, "10.0.0.7", "java-4")
    assert old.beat("by-remoting").code == RemotingStatus.SUCCESS
    scene.run(2_000)
    endpoint = f"ipc://{socket_path(world.folder / 'gateway')}"
    with AdminClient(world.namesrv_addr, transport=world.transport("admin")) as admin:
        four, five = admin.gateway_clients(endpoint)
        assert (four.client_id, four.protocol, four.connected) == ("java-4", "remoting", True)
        assert (four.user, four.language) == ("", "PYTHON")
        assert (four.consumer_groups, four.topics) == (["by-remoting"], ["t"])
        assert (four.brokers, four.address != "") == (["broker-a"], True)
        assert 2_000 <= four.silent_ms < 4_000
        assert (five.client_id, five.protocol, five.language) == ("java-5", "gRPC", "TEST")
        assert (five.consumer_groups, five.topics, five.connected) == (["by-grpc"], ["t"], True)
        old.stream.close()
        scene.run(500)
        assert [one.connected for one in admin.gateway_clients(endpoint)] == [False, True]
        scene.run(2_000)
        assert [one.client_id for one in admin.gateway_clients(endpoint)] == ["java-5"]
