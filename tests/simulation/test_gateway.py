"""Clients of RocketMQ by the gateway: groups, offsets, failovers, and other protocols."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.simulation.election import start_group
from harness.simulation.world import World
from simulation.test_election import Site

from mqmesh import Message, Producer, PullConsumer
from mqmesh.coordination.interface import AckReplicas
from mqmesh.protocol.remoting.codes import RemotingCode, RemotingStatus
from mqmesh.protocol.remoting.frame import (
    ONEWAY,
    RESPONSE,
    RemotingCommand,
    RemotingReader,
    encode_frame,
)
from mqmesh.roles.gateway.config import SHARED_LOCK
from mqmesh.storage.files.directory_lock import hold_file
from mqmesh.transport.simulated.streams import SimulatedStream, dial

NAMESRV, BROKER, VIP = 19_876, 20_911, 20_909


class Client:
    """A client of RocketMQ, on one connection to the gateway."""

    def __init__(self, site: Site, port: int, name: str = "java", client_id: str = "") -> None:
        world = site.world
        self._site = site
        self._reader = RemotingReader(1 << 24)
        self._transport = world.transport(name)
        self.client_id = client_id or name
        self.answers: dict[int, RemotingCommand] = {}
        self.commands: list[RemotingCommand] = []
        self.replies: dict[int, tuple[int, bytes]] = {}
        self.is_closed = False
        self._next = 0
        self.stream: SimulatedStream = dial(
            world.network, self._transport.loop, f"tcp://127.0.0.1:{port}"
        )
        self.stream.start(self)

    def on_bytes(self, data: bytes) -> None:
        for command in self._reader.feed(data):
            if command.flag & RESPONSE:
                assert command.opaque not in self.answers, "answered twice"
                self.answers[command.opaque] = command
            else:
                self.commands.append(command)
                if command.code in self.replies:
                    code, body = self.replies[command.code]
                    self.stream.write(*encode_frame(command.answer(code, body=body)))

    def on_stuck(self) -> None:
        pass

    def on_drained(self) -> None:
        pass

    def on_closed(self) -> None:
        self.is_closed = True

    def post(self, code: int, body: object = b"", flag: int = 0, **fields: object) -> int:
        """Sends a request; its number."""
        self._next += 1
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        texts = {name: str(value) for name, value in fields.items()}
        command = RemotingCommand(code, self._next, flag, texts, data, is_json=self._next % 2 == 0)
        self.stream.write(*encode_frame(command))
        return self._next

    def ask(self, code: int, body: object = b"", within_ms: int = 10_000, **fields: object):
        """Sends a request and waits for its answer."""
        number = self.post(code, body, **fields)
        return self.wait(number, within_ms)

    def wait(self, number: int, within_ms: int = 10_000) -> RemotingCommand:
        for _ in range(within_ms // 10):
            if number in self.answers:
                return self.answers[number]
            self._site.run(10)
        raise AssertionError(f"no answer to request {number}")

    def beat(
        self,
        group: str = "g",
        topic: str = "t",
        producer: str = "",
        model: str = "CLUSTERING",
    ) -> RemotingCommand:
        consumer = {
            "groupName": group,
            "consumeType": "CONSUME_PASSIVELY",
            "messageModel": model,
            "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
            "subscriptionDataSet": [{"topic": topic, "subString": "*", "expressionType": "TAG"}],
        }
        producers = [{"groupName": producer}] if producer else []
        body = {
            "clientID": self.client_id,
            "producerDataSet": producers,
            "consumerDataSet": [consumer],
        }
        return self.ask(RemotingCode.HEART_BEAT, body)

    def send(self, body: bytes, *, queue: int = 0, properties: str = "", topic: str = "t") -> int:
        """Posts a message; the request's number."""
        return self.post(
            RemotingCode.SEND_MESSAGE_V2,
            body,
            a="p",
            b=topic,
            c="TBW102",
            d=4,
            e=queue,
            f=0,
            g=0,
            h=0,
            i=properties,
        )

    def pull(self, offset: int, *, queue: int = 0, most: int = 32, suspend_ms: int = 0, **more):
        return self.ask(
            RemotingCode.PULL_MESSAGE,
            within_ms=suspend_ms + 10_000,
            consumerGroup="g",
            topic="t",
            queueId=queue,
            queueOffset=offset,
            maxMsgNums=most,
            sysFlag=6 if suspend_ms else 4,
            subscription="*",
            suspendTimeoutMillis=suspend_ms,
            **more,
        )

    def offset(self, code: int, **fields: object) -> int:
        answer = self.ask(code, topic="t", queueId=0, **fields)
        assert answer.code == RemotingStatus.SUCCESS, answer.remark
        return int(answer.fields["offset"])


def bodies_of(answer: RemotingCommand) -> list[bytes]:
    """The bodies of the records of a pull's answer."""
    data, found = answer.body, []
    while data:
        size, body_size = struct.unpack_from(">i", data)[0], struct.unpack_from(">i", data, 84)[0]
        found.append(data[88 : 88 + body_size])
        data = data[size:]
    return found


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    yield from gateway_site(tmp_path)


def gateway_site(tmp_path: Path) -> Iterator[Site]:
    """A group of replicas with topic t, and a gateway."""
    site = Site(tmp_path)
    site.admin.create_topic("t", queues=2)
    gateway = site.world.add_gateway()
    gateway.start()
    site.run(500)
    yield site
    gateway.stop()
    gateway.release()
    site.close()


def test_a_route_shows_each_broker_group_at_the_gateway(site):
    client = Client(site, NAMESRV)
    route = json.loads(client.ask(RemotingCode.GET_ROUTEINFO_BY_TOPIC, topic="t").body)
    assert route["brokerDatas"] == [
        {
            "cluster": "DefaultCluster",
            "brokerName": "broker-a",
            "brokerAddrs": {"0": f"127.0.0.1:{BROKER}"},
            "enableActingMaster": False,
        }
    ]
    (queues,) = route["queueDatas"]
    assert (queues["readQueueNums"], queues["writeQueueNums"], queues["perm"]) == (2, 2, 6)
    missing = client.ask(RemotingCode.GET_ROUTEINFO_BY_TOPIC, topic="nothing")
    assert missing.code == RemotingStatus.TOPIC_NOT_EXIST
    cluster = client.ask(RemotingCode.GET_ROUTEINFO_BY_TOPIC, topic="DefaultCluster")
    assert json.loads(cluster.body)["brokerDatas"] == route["brokerDatas"], "tools ask for it"
    for topic in ("RMQ_SYS_TRACE_TOPIC", "shop%RMQ_SYS_TRACE_TOPIC"):
        traces = client.ask(RemotingCode.GET_ROUTEINFO_BY_TOPIC, topic=topic)
        assert traces.code == RemotingStatus.SUCCESS, "it comes with the first trace"


def test_a_trace_stands_in_the_topic_of_its_namespace(site):
    client = Client(site, BROKER)
    records = "".join(f"Pub\x01key{number}\x02" for number in range(70)).encode()
    words = " ".join(f"key{number}" for number in range(70))
    for topic in ("RMQ_SYS_TRACE_TOPIC", "shop%RMQ_SYS_TRACE_TOPIC"):
        fields = {"a": "p", "b": topic, "e": 0, "f": 0, "h": 0, "i": f"KEYS\x01{words}\x02"}
        answer = client.ask(RemotingCode.SEND_MESSAGE_V2, records, **fields)
        assert answer.code == RemotingStatus.SUCCESS, answer.remark
        bounds = client.ask(RemotingCode.GET_MAX_OFFSET, topic=topic, queueId=0)
        assert int(bounds.fields["offset"]) == 2, "with at most 64 keys in each"


def test_broker_groups_are_served_soon_after_another_worker_changed_the_ports(tmp_path):
    site = Site(tmp_path)
    gateway = site.world.add_gateway()
    gateway.start()
    client = Client(site, NAMESRV)

    def is_served() -> bool:
        found = client.ask(RemotingCode.GET_BROKER_CLUSTER_INFO)
        return "broker-a" in json.loads(found.body)["brokerAddrTable"]

    with hold_file(site.world.folder / "gateway" / SHARED_LOCK):
        site.run(500)
        assert not is_served()
    site.run(500)
    assert is_served()
    gateway.stop()
    gateway.release()
    site.close()


def test_a_broker_group_that_comes_after_the_gateway_is_served_at_once(tmp_path):
    world = World(1, tmp_path)
    world.add_namesrvs(2)
    gateway, broker = world.add_gateway(), world.add_broker("broker-b")
    for process in (*world.namesrvs, gateway):
        process.start()
    world.simulation.run(2_000)
    broker.start()
    world.simulation.run(1_000)
    found = Client(SimpleNamespace(world=world, run=world.simulation.run), NAMESRV).ask(
        RemotingCode.GET_BROKER_CLUSTER_INFO
    )
    assert "broker-b" in json.loads(found.body)["brokerAddrTable"]
    gateway.stop()
    for process in world.processes():
        process.release()


def test_the_first_master_of_a_group_is_found_at_once(tmp_path):
    class GatewayWorld(World):
        def add_schedule(self, group: str) -> None:
            super().add_schedule(group)
            self.gateway = self.add_gateway()
            self.gateway.start()  # before the replicas

    world = GatewayWorld(1, tmp_path, real_store=True)
    start_group(world, AckReplicas.ALL)
    made = Client(SimpleNamespace(world=world, run=world.simulation.run), BROKER).ask(
        RemotingCode.UPDATE_AND_CREATE_TOPIC,
        topic="new",
        defaultTopic="TBW102",
        readQueueNums=1,
        writeQueueNums=1,
        perm=6,
    )
    assert made.code == RemotingStatus.SUCCESS, made.remark
    world.gateway.stop()
    for process in (world.gateway, *world.processes()):
        process.release()
    for disk in world.disks.values():
        disk.release()


def test_what_is_sent_is_pulled_by_both(site):
    client = Client(site, VIP)
    properties = "TAGS\x01new\x02KEYS\x01k1 k2\x02UNIQ_KEY\x01FD01\x02to\x01FR\x02"
    numbers = [client.send(b"%d" % number, properties=properties) for number in range(40)]
    answers = [client.wait(number) for number in numbers]
    assert {one.code for one in answers} == {RemotingStatus.SUCCESS}
    assert [int(one.fields["queueOffset"]) for one in answers] == list(range(40))
    assert len({one.fields["msgId"] for one in answers}) == 40
    first = client.pull(0)
    assert bodies_of(first) == [b"%d" % number for number in range(32)]
    assert (first.fields["nextBeginOffset"], first.fields["maxOffset"]) == ("32", "40")
    rest = client.pull(32)
    assert bodies_of(rest) == [b"%d" % number for number in range(32, 40)]
    assert client.pull(40).code == RemotingStatus.PULL_NOT_FOUND
    world = site.world
    with PullConsumer(
        "own",
        client=world.client_options(),
        transport=world.transport("consumer"),
        consume_from_where="FIRST_OFFSET",
    ) as consumer:
        consumer.subscribe("t")
        got = []
        while len(got) < 40:
            got += consumer.poll(5_000)
    assert (got[0].tag, got[0].keys) == ("new", ("k1", "k2", "FD01"))
    assert got[0].property("to") == "FR"


def test_a_pull_waits_for_a_message_of_mqmesh(site):
    client, world = Client(site, BROKER), site.world
    number = client.post(
        RemotingCode.PULL_MESSAGE,
        consumerGroup="g",
        topic="t",
        queueId=1,
        queueOffset=0,
        maxMsgNums=32,
        sysFlag=6,
        subscription="*",
        suspendTimeoutMillis=20_000,
    )
    site.run(2_000)
    assert number not in client.answers
    with Producer(
        "p", client=world.client_options(), transport=world.transport("producer")
    ) as producer:
        for _ in range(2):
            producer.send(Message("t", b"late", properties={"a": "1\x02b"}))
    assert bodies_of(client.wait(number)) == [b"late"]


def test_nothing_acknowledged_is_lost_when_the_master_is_killed(site):
    client = Client(site, BROKER)
    client.beat()
    sent: dict[int, bytes] = {}
    for number in range(120):
        body = b"%d" % number
        sent[client.send(body, queue=number % 2)] = body
        site.run(20)
        if number in (30, 80):
            leader = site.replicas[site.leader() - 1]
            leader.kill()
            site.world.simulation.after(3_000, leader.start)
    site.run(8_000)
    answers = {body: client.answers.get(number) for number, body in sent.items()}
    assert None not in answers.values()
    good = {body for body, one in answers.items() if one.code == RemotingStatus.SUCCESS}
    assert len(good) >= 110, {one.remark for one in answers.values()}
    stored: list[bytes] = []
    for queue in range(2):
        offset, end = (
            0,
            int(client.ask(RemotingCode.GET_MAX_OFFSET, topic="t", queueId=queue).fields["offset"]),
        )
        while offset < end:
            found = client.pull(offset, queue=queue)
            stored += bodies_of(found)
            offset = int(found.fields["nextBeginOffset"])
    assert good <= set(stored)
    assert len(stored) == len(set(stored)), "a send that is tried again is stored once"


def test_offsets_are_kept_and_claims_follow_the_members(site):
    one = Client(site, BROKER, "one")
    assert one.beat().code == RemotingStatus.SUCCESS
    fields = {"consumerGroup": "g", "topic": "t", "queueId": 0}
    code = RemotingCode.QUERY_CONSUMER_OFFSET
    assert one.ask(code, **fields).code == RemotingStatus.QUERY_NOT_FOUND
    one.wait(one.send(b"x"))
    assert one.ask(code, **fields).fields["offset"] == "0", "the first message is there yet"
    never = one.ask(code, setZeroIfNotFound=False, **fields)
    assert never.code == RemotingStatus.QUERY_NOT_FOUND
    one.post(RemotingCode.UPDATE_CONSUMER_OFFSET, flag=ONEWAY, commitOffset=1, **fields)
    site.run(100)
    assert one.offset(RemotingCode.QUERY_CONSUMER_OFFSET, consumerGroup="g") == 1
    site.run(1_000)
    one.commands.clear()
    other = Client(site, BROKER, "other")
    other.beat()
    site.run(1_000)
    assert [c.code for c in one.commands] == [RemotingCode.NOTIFY_CONSUMER_IDS_CHANGED]
    listed = one.ask(RemotingCode.GET_CONSUMER_LIST_BY_GROUP, consumerGroup="g")
    assert json.loads(listed.body) == {"consumerIdList": ["one", "other"]}
    assert other.offset(RemotingCode.QUERY_CONSUMER_OFFSET, consumerGroup="g") == 1, "a claim"
    one.commands.clear()
    late = one.ask(RemotingCode.UPDATE_CONSUMER_OFFSET, commitOffset=0, **fields)
    assert late.code == RemotingStatus.SYSTEM_ERROR, "the queue is the other member's"
    assert {c.code for c in one.commands} == {RemotingCode.NOTIFY_CONSUMER_IDS_CHANGED}
    # A client of RocketMQ never gives a claim back: whose queue it is next goes on without.
    assert one.offset(RemotingCode.QUERY_CONSUMER_OFFSET, consumerGroup="g") == 1
    assert one.ask(RemotingCode.UPDATE_CONSUMER_OFFSET, commitOffset=1, **fields).code == 0
    assert other.ask(RemotingCode.UPDATE_CONSUMER_OFFSET, commitOffset=1, **fields).code == 0


@pytest.mark.parametrize(("model", "rows"), [("BROADCASTING", 0), ("CLUSTERING", 2)])
def test_a_broadcasting_group_has_no_progress_at_the_broker(site, model, rows):
    one = Client(site, BROKER, "one")
    one.beat(model=model)
    answer = one.ask(RemotingCode.GET_CONSUME_STATS, consumerGroup="g", topic="t")
    assert answer.body.count(b'"queueId"') == rows


def test_a_client_whose_connection_ends_leaves_and_one_that_comes_back_stays(site):
    one, other = Client(site, BROKER, "one"), Client(site, BROKER, "other")
    one.beat()
    other.beat()
    other.stream.close()
    again = Client(site, BROKER, "again", "other")
    again.beat()
    site.run(3_000)
    listed = one.ask(RemotingCode.GET_CONSUMER_LIST_BY_GROUP, consumerGroup="g")
    assert json.loads(listed.body)["consumerIdList"] == ["one", "other"]
    again.stream.close()
    site.run(3_000)
    listed = one.ask(RemotingCode.GET_CONSUMER_LIST_BY_GROUP, consumerGroup="g")
    assert json.loads(listed.body)["consumerIdList"] == ["one"]
    one.ask(RemotingCode.UNREGISTER_CLIENT, clientID="one", consumerGroup="g")
    gone = one.ask(RemotingCode.GET_CONSUMER_LIST_BY_GROUP, consumerGroup="g")
    assert gone.code == RemotingStatus.SYSTEM_ERROR


def test_a_commit_right_behind_the_farewell_of_a_member_counts(site):
    one = Client(site, BROKER, "one")
    one.beat(producer="CLIENT_INNER_PRODUCER")  # which each client in Java has
    one.wait(one.send(b"x"))
    fields = {"consumerGroup": "g", "topic": "t", "queueId": 0}
    one.ask(RemotingCode.QUERY_CONSUMER_OFFSET, **fields)  # a claim
    left = one.post(RemotingCode.UNREGISTER_CLIENT, clientID="one", consumerGroup="g")
    site.run(10)
    one.post(RemotingCode.UPDATE_CONSUMER_OFFSET, flag=ONEWAY, commitOffset=1, **fields)
    assert one.wait(left).code == RemotingStatus.SUCCESS
    gone = one.ask(RemotingCode.GET_CONSUMER_LIST_BY_GROUP, consumerGroup="g")
    assert gone.code == RemotingStatus.SYSTEM_ERROR
    assert one.offset(RemotingCode.QUERY_CONSUMER_OFFSET, consumerGroup="g") == 1


def test_a_tool_moves_a_group_again_that_it_has_just_reset(site):
    one, tool = Client(site, BROKER, "one"), Client(site, BROKER, "tool")
    one.beat()
    for body in b"a", b"b":
        one.wait(one.send(body))
    fields = {"consumerGroup": "g", "topic": "t", "queueId": 0}
    one.pull(0)
    one.ask(RemotingCode.UPDATE_CONSUMER_OFFSET, commitOffset=2, **fields)
    one.ask(RemotingCode.UNREGISTER_CLIENT, clientID="one", consumerGroup="g")
    where = {"topic": "t", "group": "g", "timestamp": 0, "isForce": True}
    tool.ask(RemotingCode.INVOKE_BROKER_TO_RESET_OFFSET, **where)
    tool.post(RemotingCode.UPDATE_CONSUMER_OFFSET, flag=ONEWAY, commitOffset=2, **fields)
    site.run(500)
    found = tool.offset(RemotingCode.QUERY_CONSUMER_OFFSET, consumerGroup="g")
    assert found == 0, "the late commit of a consumer undoes no reset"
    moved = tool.ask(RemotingCode.UPDATE_CONSUMER_OFFSET, commitOffset=1, **fields)
    assert moved.code == RemotingStatus.SUCCESS, moved.remark
    assert tool.offset(RemotingCode.QUERY_CONSUMER_OFFSET, consumerGroup="g") == 1
    beyond = tool.ask(RemotingCode.UPDATE_CONSUMER_OFFSET, commitOffset=9, **fields)
    assert beyond.code == RemotingStatus.SYSTEM_ERROR


def test_a_member_that_comes_back_right_behind_its_farewell_stays(site):
    one = Client(site, BROKER, "one")
    one.beat()
    left = one.post(RemotingCode.UNREGISTER_CLIENT, clientID="one", consumerGroup="g")
    one.beat()
    one.wait(left)
    listed = one.ask(RemotingCode.GET_CONSUMER_LIST_BY_GROUP, consumerGroup="g")
    assert json.loads(listed.body)["consumerIdList"] == ["one"]


def test_members_are_known_to_the_next_master(site):
    one = Client(site, BROKER, "one")
    one.beat()
    leader = site.replicas[site.leader() - 1]
    leader.kill()
    site.run(8_000)
    listed = one.ask(RemotingCode.GET_CONSUMER_LIST_BY_GROUP, consumerGroup="g")
    assert json.loads(listed.body)["consumerIdList"] == ["one"]
    leader.start()
    site.run(2_000)


def test_a_member_goes_on_to_pull_and_to_commit_at_the_next_master(site):
    one = Client(site, BROKER, "one")
    one.beat()
    one.wait(one.send(b"before"))
    fields = {"consumerGroup": "g", "topic": "t", "queueId": 0}
    one.ask(RemotingCode.QUERY_CONSUMER_OFFSET, **fields)  # a claim
    assert bodies_of(one.pull(0)) == [b"before"]
    one.ask(RemotingCode.UPDATE_CONSUMER_OFFSET, commitOffset=1, **fields)
    leader = site.replicas[site.leader() - 1]
    leader.kill()
    site.run(8_000)
    one.beat()
    one.wait(one.send(b"after"))
    got: list[bytes] = []
    for _ in range(5):
        if not got:
            got = bodies_of(one.pull(1))
            site.run(1_000)
    assert got == [b"after"]
    assert one.ask(RemotingCode.UPDATE_CONSUMER_OFFSET, commitOffset=2, **fields).code == 0
    leader.start()
    site.run(2_000)


def test_a_pull_of_a_client_that_nobody_knows_is_refused(site):
    client = Client(site, BROKER)
    fields = {"consumerGroup": "g", "topic": "t", "queueId": 0, "queueOffset": 0}
    answer = client.ask(RemotingCode.PULL_MESSAGE, sysFlag=0, maxMsgNums=1, **fields)
    assert answer.code == RemotingStatus.SUBSCRIPTION_NOT_EXIST
    client.beat()
    known = client.ask(RemotingCode.PULL_MESSAGE, sysFlag=0, maxMsgNums=1, **fields)
    assert known.code == RemotingStatus.PULL_NOT_FOUND


def test_many_pulls_that_wait_keep_nothing_from_being_read(site):
    client = Client(site, BROKER)
    pulls = [
        client.post(
            RemotingCode.PULL_MESSAGE,
            consumerGroup="g",
            topic="t",
            queueId=0,
            queueOffset=0,
            maxMsgNums=1,
            sysFlag=6,
            subscription="*",
            suspendTimeoutMillis=20_000,
        )
        for _ in range(1_100)
    ]
    site.run(500)
    assert client.wait(client.send(b"x", queue=1), 2_000).code == RemotingStatus.SUCCESS
    client.wait(client.send(b"y"))
    site.run(1_000)
    assert {bodies_of(client.answers[one])[0] for one in pulls} == {b"y"}


def test_a_queue_is_locked_for_one_member(site):
    one, other = Client(site, BROKER, "one"), Client(site, BROKER, "other")
    one.beat()
    other.beat()
    queue = {"topic": "t", "brokerName": "broker-a", "queueId": 0}

    def lock(client: Client, code: int = RemotingCode.LOCK_BATCH_MQ) -> RemotingCommand:
        body = {"consumerGroup": "g", "clientId": client.client_id, "mqSet": [queue]}
        return client.ask(code, body)

    assert json.loads(lock(one).body) == {"lockOKMQSet": [queue]}
    assert json.loads(lock(other).body) == {"lockOKMQSet": []}
    assert json.loads(lock(one).body) == {"lockOKMQSet": [queue]}, "its own again"
    assert lock(one, RemotingCode.UNLOCK_BATCH_MQ).code == RemotingStatus.SUCCESS
    assert json.loads(lock(other).body) == {"lockOKMQSet": [queue]}
    leader = site.replicas[site.leader() - 1]
    leader.kill()
    site.run(8_000)
    assert json.loads(lock(one).body) == {"lockOKMQSet": []}, "the gateway renewed the lock"
    assert json.loads(lock(other).body) == {"lockOKMQSet": [queue]}
    leader.start()
    site.run(2_000)


def test_a_message_that_is_sent_back_is_a_retry_with_its_topic(site):
    one = Client(site, BROKER, "one")
    one.beat()
    site.world.add_schedule("broker-a").start()
    one.wait(one.send(b"bad"))
    record = one.pull(0).body
    offset = struct.unpack_from(">q", record, 28)[0]
    back = one.ask(
        RemotingCode.CONSUMER_SEND_MSG_BACK,
        group="g",
        offset=offset,
        delayLevel=1,
        originTopic="t",
        maxReconsumeTimes=16,
    )
    assert back.code == RemotingStatus.SUCCESS, back.remark
    site.run(6_000)
    fields = {"consumerGroup": "g", "topic": "%RETRY%g", "queueId": 0, "queueOffset": 0}
    retry = one.ask(RemotingCode.PULL_MESSAGE, sysFlag=0, maxMsgNums=32, **fields)
    assert bodies_of(retry) == [b"bad"]
    assert struct.unpack_from(">i", retry.body, 72)[0] == 1, "its number of tries"
    assert b"RETRY_TOPIC\x01t\x02" in retry.body
    gone = one.ask(RemotingCode.CONSUMER_SEND_MSG_BACK, group="g", offset=2**50, delayLevel=0)
    assert gone.code == RemotingStatus.SYSTEM_ERROR


def test_a_retry_topic_is_shown_before_it_is_there(site):
    names, one = Client(site, NAMESRV, "names"), Client(site, BROKER, "one")
    topic = "%RETRY%g"
    missing = names.ask(RemotingCode.GET_ROUTEINFO_BY_TOPIC, topic=topic)
    one.beat()
    found = names.ask(RemotingCode.GET_ROUTEINFO_BY_TOPIC, topic=topic)
    assert found.code == RemotingStatus.SUCCESS, (missing.code, found.remark)
    fields = {"consumerGroup": "g", "topic": topic, "queueId": 0}
    asked = one.ask(RemotingCode.QUERY_CONSUMER_OFFSET, **fields)
    assert asked.code in (RemotingStatus.SUCCESS, RemotingStatus.QUERY_NOT_FOUND)
    assert one.ask(RemotingCode.GET_MAX_OFFSET, topic=topic, queueId=0).fields["offset"] == "0"
    pulled = one.ask(RemotingCode.PULL_MESSAGE, queueOffset=0, maxMsgNums=1, sysFlag=0, **fields)
    assert pulled.code == RemotingStatus.PULL_NOT_FOUND


@pytest.mark.parametrize(
    ("fields", "code", "why"),
    [
        ({"f": 4, "a": "no group!"}, RemotingStatus.MESSAGE_ILLEGAL, "group"),
        ({"e": "x"}, RemotingStatus.MESSAGE_ILLEGAL, "queueId"),
        ({"b": "%DLQ%g"}, RemotingStatus.NO_PERMISSION, "reserved"),
        ({"b": "%RETRY%g"}, RemotingStatus.MESSAGE_ILLEGAL, "UNIQ_KEY"),
        ({"b": "no such topic!"}, RemotingStatus.INVALID_PARAMETER, "topic"),
        ({"e": 77}, RemotingStatus.MESSAGE_ILLEGAL, "77"),
        ({"e": 2**32}, RemotingStatus.MESSAGE_ILLEGAL, "2**31"),
        ({"f": 4, "a": "p", "i": "DELAY\x013\x02"}, RemotingStatus.MESSAGE_ILLEGAL, "half message"),
        ({"i": "DELAY\x01soon\x02"}, RemotingStatus.MESSAGE_ILLEGAL, "DELAY"),
    ],
)
def test_a_send_that_cannot_be_done_is_refused_with_a_sentence(site, fields, code, why):
    client = Client(site, BROKER)
    usual = {"b": "t", "e": 0, "f": 0, "h": 0, "i": ""}
    answer = client.ask(RemotingCode.SEND_MESSAGE_V2, b"x", **(usual | fields))
    assert answer.code == code, answer.remark
    assert why in answer.remark


def test_unknown_requests_are_refused_and_other_protocols_end(site):
    client = Client(site, BROKER)
    answer = client.ask(30_050)
    assert answer.code == RemotingStatus.REQUEST_CODE_NOT_SUPPORTED
    assert "30050" in answer.remark
    client.stream.write(b"GET / HTTP/1.1\r\n\r\n")
    site.run(100)
    assert client.is_closed


def test_other_protocols_are_logged_once_a_second(site, caplog):
    for _ in range(5):
        client = Client(site, BROKER)
        client.stream.write(b"GET / HTTP/1.1\r\n\r\n")
        site.run(20)
    lines = [one for one in caplog.messages if "speaks no remoting" in one]
    assert len(lines) == 1, lines


def test_a_silent_connection_is_closed(site):
    client = Client(site, NAMESRV)
    site.run(131_000)
    assert client.is_closed


def producer_beat(client: Client, group: str = "p") -> None:
    producers = [{"groupName": group}]
    body = {"clientID": client.client_id, "producerDataSet": producers, "consumerDataSet": []}
    assert client.ask(RemotingCode.HEART_BEAT, body).code == RemotingStatus.SUCCESS


def send_half(client: Client, body: bytes) -> RemotingCommand:
    properties = f"TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01{body.decode()}\x02"
    fields = {"a": "p", "b": "t", "e": 0, "f": 4, "h": 0, "i": properties}
    answer = client.ask(RemotingCode.SEND_MESSAGE_V2, body, **fields)
    assert answer.code == RemotingStatus.SUCCESS, answer.remark
    assert answer.fields["transactionId"] == body.decode()
    return answer


def end(
    client: Client, offset: int, decision: int, place: int, group: str = "p"
) -> RemotingCommand:
    fields = {"producerGroup": group, "commitLogOffset": offset, "commitOrRollback": decision}
    return client.ask(RemotingCode.END_TRANSACTION, tranStateTableOffset=place, **fields)


def offset_of(answer: RemotingCommand) -> int:
    """The offset in the log that a client reads in an id."""
    return int(answer.fields["msgId"][16:], 16)


def test_a_half_message_is_delivered_when_its_transaction_is_committed(site):
    client = Client(site, BROKER)
    producer_beat(client)
    yes, no = send_half(client, b"yes"), send_half(client, b"no")
    assert client.pull(0).code == RemotingStatus.PULL_NOT_FOUND
    first, second = int(yes.fields["queueOffset"]), int(no.fields["queueOffset"])
    assert end(client, offset_of(no), 8, second, "other").code == RemotingStatus.SUCCESS
    assert end(client, offset_of(no), 8, second + 7).code == RemotingStatus.SUCCESS
    assert end(client, offset_of(no), 12, second).code == RemotingStatus.SUCCESS
    assert end(client, offset_of(yes), 8, first).code == RemotingStatus.SUCCESS
    assert end(client, offset_of(yes), 8, first).code == RemotingStatus.SUCCESS, "a repetition"
    assert end(client, 12_345, 8, 0).code == RemotingStatus.SUCCESS, "nobody knows it any more"
    site.run(500)
    assert bodies_of(client.pull(0)) == [b"yes"]


def test_a_producer_is_asked_about_its_transaction_and_one_of_mqmesh_is_answered_too(site):
    client, other = Client(site, BROKER, "one"), Client(site, BROKER, "other")
    producer_beat(client)
    send_half(client, b"late")
    client.stream.close()
    producer_beat(other)
    for _ in range(200):
        site.run(1_000)
        other.post(RemotingCode.UNREGISTER_CLIENT, clientID="nobody")  # it is not silent
        if other.commands:
            break
    (check,) = [c for c in other.commands if c.code == RemotingCode.CHECK_TRANSACTION_STATE]
    assert check.fields["transactionId"] == "late"
    assert bodies_of(check) == [b"late"]
    assert b"PGROUP\x01p\x02" in check.body
    assert b"TRAN_MSG\x01true\x02" in check.body
    assert b"\x01t" in check.body, "the topic that it is for"
    offset, place = (int(check.fields[n]) for n in ("commitLogOffset", "tranStateTableOffset"))
    assert end(other, offset, 0, place).code == RemotingStatus.SUCCESS
    assert end(other, offset, 8, place).code == RemotingStatus.SUCCESS
    site.run(500)
    assert bodies_of(other.pull(0)) == [b"late"]


def test_a_message_is_seen_at_its_place_in_the_log(site):
    client = Client(site, BROKER)
    sent = client.wait(client.send(b"x"))
    viewed = client.ask(RemotingCode.VIEW_MESSAGE_BY_ID, offset=offset_of(sent))
    assert bodies_of(viewed) == [b"x"]
    wrong = client.ask(RemotingCode.VIEW_MESSAGE_BY_ID, offset=offset_of(sent) + 1)
    assert wrong.code == RemotingStatus.SYSTEM_ERROR
