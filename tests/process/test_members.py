"""Running consumers are asked how they are, and handed messages, on a running cluster."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from harness.patience import until

from mqmesh import aio
from mqmesh.cli import main
from mqmesh.errors import BrokerError, ClientNotOnline, GroupNotFound, NoPermission
from mqmesh.message import Message
from mqmesh.protocol.membership import ConsumeFromWhere, MessageModel
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.members import MemberClient
from mqmesh.sdk.admin.queries import QueryClient
from mqmesh.sdk.client.options import ClientOptions
from mqmesh.sdk.consumer.listening import handed_over
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster

FIRST = ConsumeFromWhere.FIRST_OFFSET
SOON_MS = 200
"""In place of the ten seconds, where nothing is to come."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ProcessCluster(tmp_path_factory.mktemp("c")) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    with MemberClient(cluster.namesrv_addr) as client:
        yield client


@pytest.fixture
def names(cluster, request):
    """A topic of two queues with four messages, and a group: namesrv, topic, group, message ids."""
    name = "m." + request.node.name[5:60].partition("[")[0]
    with AdminClient(cluster.namesrv_addr) as admin:
        admin.create_topic(name, queues=2, exist_ok=True)
    with Producer("p", namesrv_addr=cluster.namesrv_addr) as producer:
        sent = [producer.send(Message(name, b"%d" % at)).message_id for at in range(4)]
    with QueryClient(cluster.namesrv_addr) as client:
        # The index process may have been started a moment ago.
        until(lambda: client.by_id(sent[-1]).messages)
    return cluster.namesrv_addr, name, "g." + name[2:], sent


@pytest.fixture
def run(cluster, monkeypatch, tmp_path, capsys):
    """Run a command; returns exit code, what it printed, and what it printed of errors."""
    monkeypatch.setenv("MQMESH_NAMESRV", cluster.namesrv_addr)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def run(*arguments):
        return main.main([*arguments]), *capsys.readouterr()

    return run


class Hanging:
    """A listener that hangs until it is let go."""

    def __init__(self):
        self.go_on = threading.Event()
        self.entered = threading.Event()
        self.calls = 0

    def __call__(self, messages):
        self.calls += 1
        self.hang_in_the_listener()

    def hang_in_the_listener(self):
        self.entered.set()
        assert self.go_on.wait(60)


def test_a_push_consumer_that_hangs_says_where(run, client, names, monkeypatch):
    monkeypatch.setattr(handed_over, "HAND_OVER_MS", SOON_MS)
    namesrv, topic, group, sent = names
    listener = Hanging()
    consumer = PushConsumer(
        group,
        namesrv_addr=namesrv,
        consume_from_where=FIRST,
        consume_thread_count=1,
        persist_consumer_offset_interval_ms=50,
    )
    consumer.subscribe(topic, listener=listener)
    try:
        with consumer:
            assert listener.entered.wait(60)
            until(lambda: _cached(client, group, consumer.client_id, topic) == 4)
            code, out, _ = run(
                "group", "running", group, "--client", consumer.client_id, "--stack", "--json"
            )
            assert code == 0
            (told,) = json.loads(out)["members"]
            assert (told["client_id"], told["kind"]) == (consumer.client_id, "push")
            assert told["properties"]["consume_thread_count"] == "1"
            assert topic in [one["topic"] for one in told["subscriptions"]]
            (flying,) = told["in_flight"]
            assert flying["message_id"] in sent
            queues = [one for one in told["queues"] if one["topic"] == topic]
            assert {one["queue_id"] for one in queues} == {0, 1}
            assert sum(one["cached_messages"] for one in queues) == 4
            assert sum(one["in_flight"] for one in queues) == 1
            assert all(one["since_pull_ms"] >= 0 for one in queues)
            (stats,) = [one for one in told["topics"] if one["topic"] == topic]
            assert stats["cached_messages"] == 4
            assert stats["ok_per_s"] == 0
            assert "hang_in_the_listener" in told["stacks"]
            code, out, _ = run("group", "running", group, "--stack")
            assert code == 0
            assert "IN FLIGHT" in out
            assert "hang_in_the_listener" in out
            code, out, _ = run("group", "running", group, "--client", consumer.client_id)
            assert flying["message_id"] in out
            found = client.hand_to(sent[0], group, consumer.client_id)
            assert (found.result, "workers are busy" in found.text) == ("TIMEOUT", True)
            listener.go_on.set()
            until(lambda: _done(client, group, consumer.client_id, topic) == 4)
            assert listener.calls == 4, "what was handed over in vain does not come later"
    finally:
        listener.go_on.set()
    until(lambda: _is_gone(client, group, consumer.client_id))
    assert run("group", "running", group, "--client", consumer.client_id)[0] == 1


def _is_gone(client, group, client_id) -> bool:
    """Whether a group that has lost its only member is gone; the member may just be leaving."""
    try:
        client.running_info(group, client_id)
    except GroupNotFound:
        return True
    except ClientNotOnline:
        return False
    return False


def _cached(client, group, client_id, topic) -> int:
    queues = client.running_info(group, client_id).queues
    return sum(one.cached_messages for one in queues if one.topic == topic)


def _done(client, group, client_id, topic) -> int:
    queues = client.running_info(group, client_id).queues
    return sum(max(one.committed_offset, 0) for one in queues if one.topic == topic)


def test_an_asyncio_consumer_that_hangs_says_where(run, names):
    namesrv, topic, group, sent = names

    async def scene():
        entered, go_on = asyncio.Event(), asyncio.Event()

        async def hang_in_the_coroutine():
            entered.set()
            await go_on.wait()

        async def listen(messages):
            await hang_in_the_coroutine()

        consumer = aio.PushConsumer(group, namesrv_addr=namesrv, consume_from_where=FIRST)
        await consumer.subscribe(topic, listener=listen)
        async with consumer, aio.MemberClient(namesrv) as members:
            await entered.wait()
            told = await members.running_info(group, consumer.client_id, with_stacks=True)
            assert told.properties["asyncio"] == "True"
            assert {one.message_id for one in told.in_flight} <= set(sent)
            assert told.in_flight
            assert "hang_in_the_coroutine" in told.stacks
            go_on.set()

    asyncio.run(scene())


def test_pull_consumers_tell_what_polls_returned(run, client, names):
    namesrv, topic, group, _ = names
    consumer = PullConsumer(
        group, namesrv_addr=namesrv, consume_from_where=FIRST, auto_commit=False
    )
    consumer.subscribe(topic)
    polled = []
    with consumer:
        until(lambda: polled.extend(consumer.poll(100, 4 - len(polled) or 1)) or len(polled) == 4)
        told = client.running_info(group, consumer.client_id)
        assert (told.kind, sum(one.in_flight for one in told.queues)) == ("pull", 4)
        assert {one.committed_offset for one in told.queues} <= {-1, 0}
        consumer.commit()
        assert _done(client, group, consumer.client_id, topic) == 4

    async def scene():
        consumer = aio.PullConsumer(group, namesrv_addr=namesrv)
        await consumer.subscribe(topic)
        async with consumer, aio.MemberClient(namesrv) as members:
            told = await members.running_info(group, consumer.client_id, with_stacks=True)
            assert {one.queue_id for one in told.queues} == {0, 1}
            assert "running_info" in told.stacks

    asyncio.run(scene())


def test_who_wants_to_tell_nothing_tells_nothing(run, client, names):
    namesrv, topic, group, _ = names
    consumer = PullConsumer(group, namesrv_addr=namesrv, admin_introspection=False)
    consumer.subscribe(topic)
    with consumer:
        with pytest.raises(NoPermission, match="admin_introspection"):
            client.running_info(group, consumer.client_id)
        code, out, _ = run("group", "running", group, "--json")
        told = json.loads(out)
        assert (code, told["members"]) == (1, [])
        assert "admin_introspection" in told["silent"][consumer.client_id]


def test_heartbeats_tell_what_was_done_of_late(client, names):
    namesrv, topic, group, _ = names
    consumer = PushConsumer(
        group,
        client=ClientOptions(namesrv_addr=namesrv, heartbeat_broker_interval_ms=100),
        consume_from_where=FIRST,
    )
    consumer.subscribe(topic, listener=lambda messages: None)

    def told():
        found = client.connections(group)
        return {one.topic: one for one in found[0].stats} if found else {}

    with consumer:
        until(lambda: topic in told() and told()[topic].ok_per_s > 0)
        assert told()[topic].pulled_per_s > 0
        assert told()[topic].failed_last_hour == 0


class Answers:
    """A listener that does as it is told, and notes what it got."""

    def __init__(self):
        self.seen = []
        self.answer = lambda: None

    def __call__(self, messages):
        self.seen += [(one.message_id, one.is_handed_over) for one in messages]
        return self.answer() if messages[0].is_handed_over else None

    @staticmethod
    def fail():
        raise ValueError("no such account")


def test_a_message_is_handed_to_a_member_again(run, client, names, monkeypatch):
    namesrv, topic, group, sent = names
    listener, hang = Answers(), Hanging()
    consumer = PushConsumer(
        group,
        namesrv_addr=namesrv,
        consume_from_where=FIRST,
        persist_consumer_offset_interval_ms=50,
    )
    consumer.subscribe(topic, listener=listener)
    with consumer:
        until(lambda: _done(client, group, consumer.client_id, topic) == 4)
        listener.seen.clear()
        to = ("--group", group, "--client", consumer.client_id)
        code, out, _ = run("query", "hand-to", sent[2], *to, "--json")
        told = json.loads(out)
        assert (code, told["result"], told["client_id"]) == (0, "SUCCESS", consumer.client_id)
        assert listener.seen == [(sent[2], True)]
        place = client.by_id(sent[1]).messages[0].offset_message_id
        assert client.hand_to(place, group, consumer.client_id).result == "SUCCESS"
        assert listener.seen[1:] == [(sent[1], True)]
        listener.answer = Answers.fail
        code, out, _ = run("query", "hand-to", sent[0], *to)
        assert code == 1
        assert "EXCEPTION" in out
        assert "ValueError: no such account" in out
        listener.answer = lambda: ConsumeResult.RECONSUME_LATER
        assert client.hand_to(sent[0], group, consumer.client_id).result == "RECONSUME_LATER"
        listener.answer = hang.hang_in_the_listener
        with monkeypatch.context() as patch:
            patch.setattr(handed_over, "HAND_OVER_MS", SOON_MS)
            found = client.hand_to(sent[0], group, consumer.client_id)
        assert (found.result, found.took_ms >= SOON_MS) == ("TIMEOUT", True)
        listener.answer = lambda: None
        assert client.hand_to(sent[0], group, consumer.client_id).result == "SUCCESS", "by another"
        hang.go_on.set()
        progress = client.progress(group)
        assert (progress.lag, progress.retrying, progress.dead) == (0, 0, 0)
        assert run("query", "hand-to", "0" * 32, *to)[0] == 1
        with pytest.raises(ClientNotOnline):
            client.hand_to(sent[0], group, "somebody")
    with pytest.raises(GroupNotFound):
        client.hand_to(sent[0], group, consumer.client_id)


def test_coroutines_take_messages_too(names):
    namesrv, topic, group, sent = names
    seen = []

    async def scene():
        async def listen(messages):
            seen.extend(one.message_id for one in messages if one.is_handed_over)

        consumer = aio.PushConsumer(group, namesrv_addr=namesrv)
        await consumer.subscribe(topic, listener=listen)
        async with consumer, aio.MemberClient(namesrv) as members:
            found = await members.hand_to(sent[3], group, consumer.client_id)
            assert (found.result, seen) == ("SUCCESS", [sent[3]])

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"consume_orderly": True}, "in order"),
        ({"message_model": MessageModel.BROADCASTING}, "broadcasts"),
    ],
)
def test_groups_that_broadcast_or_keep_order_take_none(client, names, tmp_path, options, why):
    namesrv, topic, group, sent = names
    listener = Answers()
    consumer = PushConsumer(
        f"{group}-{why.split()[0]}",
        namesrv_addr=namesrv,
        offsets_dir=str(tmp_path),
        **options,
    )
    consumer.subscribe(topic, listener=listener)
    with consumer:
        with pytest.raises(BrokerError, match=why):
            client.hand_to(sent[0], consumer.group, consumer.client_id)
        assert (sent[0], True) not in listener.seen
