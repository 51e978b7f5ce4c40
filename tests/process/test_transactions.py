"""Transactions over real sockets: what consumers see, who is asked, and what bad listeners do."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqmesh.cli.main import main
from mqmesh.errors import ClientClosed, InvalidArgument, MQMeshError, TransactionConflict
from mqmesh.message import (
    TRANS_CHECK_MAX_TIME_TOPIC,
    TRANS_HALF_TOPIC,
    TRANS_OP_HALF_TOPIC,
    Message,
    StoredMessage,
)
from mqmesh.sdk.admin.delays import DelayClient
from mqmesh.sdk.admin.members import MemberClient
from mqmesh.sdk.admin.queries import QueryClient
from mqmesh.sdk.admin.transaction_admin import TransactionAdmin
from mqmesh.sdk.connector.numbered_sender import NumberedBatch, NumberedSender
from mqmesh.sdk.connector.queue_reader import QueueReader, Stretch
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.replies import is_request
from mqmesh.sdk.transactions.transaction_producer import TransactionProducer
from mqmesh.sdk.transactions.transactions import LocalTransactionState, TransactionListener
from mqmesh.testing.processes import ProcessCluster

PATIENCE_S = 30.0
COMMIT, ROLLBACK = LocalTransactionState.COMMIT, LocalTransactionState.ROLLBACK
UNKNOWN = LocalTransactionState.UNKNOWN


class Listener(TransactionListener):
    """Does what the argument of the send, and a function for checks, say."""

    def __init__(self, check: Callable[[bytes], LocalTransactionState] | None = None) -> None:
        self._check = check or (lambda body: UNKNOWN)
        self.checked: list[bytes] = []

    def execute_local_transaction(self, message, arg):
        assert message.message_id
        if isinstance(arg, BaseException):
            raise arg
        return arg

    def check_local_transaction(self, message):
        self.checked.append(message.body)
        return self._check(message.body)


def eventually(condition: Callable[[], object]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        threading.Event().wait(0.02)


def visible(cluster: ProcessCluster, topic: str) -> list[tuple[bytes, str]]:
    """Everything that a consumer of a topic gets: bodies and ids."""
    with PullConsumer("audit", namesrv_addr=cluster.namesrv_addr, auto_commit=False) as consumer:
        consumer.assign(consumer.queues(topic))
        consumer.seek_to_begin()
        left, found = sum(consumer.lag().values()), []
        while left > 0:
            messages = consumer.poll(10_000, 1_000)
            assert messages
            left -= len(messages)
            found += [(one.body, one.message_id) for one in messages]
        return sorted(found)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[ProcessCluster]:
    """A name server and a broker that asks soon and gives up soon."""
    settings = {
        "transaction_timeout_ms": "400",
        "transaction_check_interval_ms": "200",
        "transaction_check_max": "3",
    }
    with (
        tempfile.TemporaryDirectory(prefix="mq-") as folder,
        ProcessCluster(Path(folder), broker_settings=settings) as cluster,
    ):
        yield cluster


@pytest.fixture
def start(cluster) -> Iterator[Callable[..., TransactionProducer]]:
    """Start producers; closed with the test."""
    producers: list[TransactionProducer] = []

    def start(group: str, listener=None, **options) -> TransactionProducer:
        producer = TransactionProducer(
            group, listener or Listener(), namesrv_addr=cluster.namesrv_addr, **options
        )
        producers.append(producer)
        producer.start()
        return producer

    yield start
    for producer in producers:
        producer.close()


def test_consumers_see_what_was_committed_under_its_id_and_nothing_else(cluster, start):
    producer = start("g1")
    done = producer.send_message_in_transaction(Message("t1", b"yes"), COMMIT)
    assert done.is_ended
    refused = producer.send_message_in_transaction(Message("t1", b"no"), ROLLBACK)
    assert (refused.is_ended, refused.local_transaction_state) == (True, ROLLBACK)
    open_one = producer.send_message_in_transaction(Message("t1", b"open"), UNKNOWN)
    assert not open_one.is_ended
    failed = producer.send_message_in_transaction(Message("t1", b"bug"), ValueError("planned"))
    assert failed.local_transaction_state is UNKNOWN
    assert visible(cluster, "t1") == [(b"yes", done.message_id)]


def test_the_block_commits_and_rolls_back(cluster, start):
    producer = start("g2")
    with producer.transaction(Message("t2", b"good")) as good:
        assert visible(cluster, "t2") == []
    assert good.is_ended
    with pytest.raises(KeyError), producer.transaction(Message("t2", b"bad")):
        raise KeyError
    with producer.transaction(Message("t2", b"early")) as early:
        early.rollback()
    with pytest.raises(InvalidArgument, match="ROLLBACK before"):
        early.commit()
    assert visible(cluster, "t2") == [(b"good", good.message_id)]


def test_an_interrupted_block_is_left_to_the_check_back(cluster, start):
    listener = Listener(lambda body: COMMIT)
    producer = start("g3", listener)
    with pytest.raises(KeyboardInterrupt), producer.transaction(Message("t3", b"perhaps")):
        raise KeyboardInterrupt
    eventually(lambda: [body for body, _ in visible(cluster, "t3")] == [b"perhaps"])
    assert listener.checked == [b"perhaps"]


def test_a_listener_that_wants_to_exit_leaves_its_message_to_the_check_back(cluster, start):
    listener = Listener(lambda body: COMMIT)
    producer = start("g13", listener, max_transactions_in_flight=1)
    message = Message("t13", b"exits")
    done = producer.send_message_in_transaction_async(message, SystemExit()).result(PATIENCE_S)
    assert (done.is_ended, done.local_transaction_state) == (False, UNKNOWN)
    eventually(lambda: [body for body, _ in visible(cluster, "t13")] == [b"exits"])
    # Its place is free again.
    after = producer.send_message_in_transaction_async(Message("t13", b"next"), COMMIT)
    assert after.result(PATIENCE_S).is_ended


def test_nobody_is_asked_about_what_waits_for_a_thread(cluster, start):
    class Slow(Listener):
        def execute_local_transaction(self, message, arg):
            arg.wait(PATIENCE_S)
            return COMMIT

    listener, go = Slow(lambda body: ROLLBACK), threading.Event()
    producer = start("g14", listener, execute_thread_count=1)
    messages = [Message("t14", b"%d" % number) for number in range(3)]
    futures = [producer.send_message_in_transaction_async(one, go) for one in messages]
    with TransactionAdmin(cluster.namesrv_addr) as admin:
        eventually(lambda: len(admin.half_messages(group="g14", parked=True).messages) == 3)
    go.set()
    assert all(future.result(PATIENCE_S).is_ended for future in futures)
    assert len(visible(cluster, "t14")) == 3
    assert not listener.checked


def test_order_within_a_sharding_key_is_kept(cluster, start):
    producer = start("g5")
    for number in range(20):
        message = Message("t5", b"%02d" % number, sharding_key="one")
        producer.send_message_in_transaction(message, COMMIT)
    assert [body for body, _ in visible(cluster, "t5")] == [b"%02d" % n for n in range(20)]


def test_half_messages_are_in_no_query_and_no_lag_and_nobody_reads_their_topic(cluster, start):
    producer = start("g6")
    producer.send_message_in_transaction(Message("t6", b"first"), COMMIT)
    message = Message("t6", b"hidden", keys=("hidden-key",))
    with producer.transaction(message) as transaction, QueryClient(cluster.namesrv_addr) as query:
        eventually(lambda: _is_indexed(query))
        assert query.by_key("t6", "hidden-key").messages == []
        assert query.by_id(transaction.message_id).messages == []
        assert len(visible(cluster, "t6")) == 1
        for topic in (TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC):
            assert _read(cluster, topic) == []
    with QueryClient(cluster.namesrv_addr) as query:
        assert [one.body for one in query.by_id(transaction.message_id).messages] == [b"hidden"]
        assert [one.body for one in query.by_key("t6", "hidden-key").messages] == [b"hidden"]


def _is_indexed(query: QueryClient) -> bool:
    try:
        return not query.by_key("t6", "nothing").notes
    except MQMeshError:
        return False


def _read(cluster, topic):
    with PullConsumer("audit", namesrv_addr=cluster.namesrv_addr, auto_commit=False) as consumer:
        consumer.assign(consumer.queues(topic))
        consumer.seek_to_begin()
        return consumer.poll(10, 300)


def test_bad_listeners_park_only_their_own_message(cluster, start):
    hanging = threading.Event()

    def check(body: bytes) -> LocalTransactionState:
        if body.startswith(b"throws"):
            raise ValueError("planned")
        if body.startswith(b"hangs"):
            hanging.wait(PATIENCE_S)
        return COMMIT if body.startswith(b"good") else UNKNOWN

    producer = start("g7", Listener(check))
    bad = [b"throws", b"hangs 1", b"hangs 2", b"unknown"]
    for body in bad + [b"good %d" % number for number in range(20)]:
        producer.send_message_in_transaction(Message("t7", body), UNKNOWN)
    eventually(lambda: len(visible(cluster, "t7")) == 20)
    with TransactionAdmin(cluster.namesrv_addr) as admin:
        eventually(lambda: len(admin.half_messages(group="g7", parked=True).messages) == len(bad))
    hanging.set()
    assert {body for body, _ in visible(cluster, TRANS_CHECK_MAX_TIME_TOPIC)} >= set(bad)
    assert all(body.startswith(b"good") for body, _ in visible(cluster, "t7"))


def test_another_member_is_asked_when_the_sender_is_gone(cluster, start):
    sender = start("g8")
    sender.send_message_in_transaction(Message("t8", b"orphan"), UNKNOWN)
    sender.close()
    with pytest.raises(ClientClosed):
        sender.send_message_in_transaction(Message("t8", b"late"), COMMIT)
    # It has sent nothing, and is asked all the same.
    listener = Listener(lambda body: COMMIT)
    start("g8", listener)
    eventually(lambda: [body for body, _ in visible(cluster, "t8")] == [b"orphan"])
    assert listener.checked == [b"orphan"]


def test_a_decision_that_comes_too_late_is_told(cluster, start):
    # Not the sender, as long as the block runs there, but another member is asked.
    own, other = Listener(lambda body: COMMIT), Listener(lambda body: ROLLBACK)
    producer = start("g9", own)
    start("g9", other)
    with pytest.raises(TransactionConflict, match="had ended otherwise"):  # noqa: SIM117
        with producer.transaction(Message("t9", b"slow")) as transaction:
            with TransactionAdmin(cluster.namesrv_addr) as admin:
                eventually(lambda: not admin.half_messages(group="g9").messages)
    assert not transaction.is_ended
    assert visible(cluster, "t9") == []
    assert (own.checked, other.checked) == ([], [b"slow"])


def test_the_commands_list_show_and_end_half_messages(cluster, start, capsys):
    producer = start("g10")
    ids = [
        producer.send_message_in_transaction(
            Message(
                "t10",
                b'{"order": %d}' % number,
                keys=(f"k{number}",),
                properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "3600"},
            ),
            UNKNOWN,
        ).message_id
        for number in range(3)
    ]

    def run(*arguments: str) -> str:
        capsys.readouterr()
        code = main(["--namesrv", cluster.namesrv_addr, "tx", *arguments])
        out, err = capsys.readouterr()
        assert code == 0, err
        return out

    listed = json.loads(run("list", "--group", "g10", "--json"))["messages"]
    assert [one["message_id"] for one in listed] == ids
    assert {one["state"] for one in listed} == {"PENDING"}
    assert listed[0]["live_members"] == 1
    assert listed[0]["next_check_ms"] > 3_000_000
    shown = json.loads(run("show", ids[1], "--json"))
    assert (shown["body"], shown["keys"]) == ('{"order": 1}', ["k1"])
    assert "goes to" in run("show", ids[1])
    assert json.loads(run("commit", ids[0], "--yes", "--json"))["decision"] == "commit"
    run("rollback", ids[1], "--yes")
    assert [body for body, _ in visible(cluster, "t10")] == [b'{"order": 0}']
    assert ids[2] in run("list", "--topic", "t10", "--older-than", "0")
    assert main(["--namesrv", cluster.namesrv_addr, "tx", "commit", ids[0], "--yes"]) == 1
    assert "has ended" in capsys.readouterr().err
    assert main(["--namesrv", cluster.namesrv_addr, "tx", "commit", ids[2], "--json"]) == 2


@pytest.mark.parametrize(
    "message",
    [
        Message("t11", b"x", delay_level=1),
        Message("t11", b"x", deliver_at_ms=1),
        Message("t11", b""),
        Message(TRANS_HALF_TOPIC, b"x"),
    ],
)
def test_what_cannot_be_sent_in_a_transaction_is_refused_before_it_begins(start, message):
    with pytest.raises(InvalidArgument):
        start("g11").send_message_in_transaction(message, COMMIT)


class Tenant:
    """Clients of one namespace; those of all namespaces use the same names."""

    def __init__(self, namespace: str, namesrv_addr: str) -> None:
        self.client = {"namesrv_addr": namesrv_addr, "namespace": namespace}
        self.body = f"of {namespace}".encode()
        self.got: list[StoredMessage] = []
        self.listener = Listener(lambda body: COMMIT)
        self.producer = TransactionProducer("shared", self.listener, **self.client)
        self.consumer = PushConsumer("readers", consume_from_where="FIRST_OFFSET", **self.client)

    def listen(self, messages: list[StoredMessage]) -> None:
        for message in messages:
            self.got.append(message)
            if is_request(message):
                self.producer.reply(message, message.topic.encode())

    def work(self) -> None:
        with MemberClient(**self.client) as admin:
            admin.create_topic("everything", queues=2)
        self.producer.start()
        self.consumer.subscribe("everything", listener=self.listen)
        self.consumer.start()
        for tag, decision in (("commit", COMMIT), ("check", UNKNOWN)):
            half = Message("everything", self.body, tag=tag)
            assert self.producer.send_message_in_transaction(half, decision).send_result
        delayed = Message("everything", self.body, tag="later").delayed_by(3_600_000)
        assert self.producer.send(delayed).message_queue.topic == "everything"
        reply = self.producer.request(Message("everything", self.body, tag="ask"), 15_000)
        assert (reply.topic, reply.body) == ("everything", b"everything")
        self.number()

    def number(self) -> None:
        with NumberedSender(key=bytes(16), born_host="h", **self.client) as sender:
            queue = sender.writable_queues("everything")[1]
            numbered = [Message("everything", self.body, tag="numbered")]
            for _ in range(2):
                sender.send([NumberedBatch(queue, numbered, 0)])
        with QueueReader(**self.client) as reader:
            edges = reader.edges(queue)
            stretch = Stretch(queue, edges.first, edges.end)
            found = [m for _, some in reader.read(stretch, on_loss=pytest.fail) for m in some]
            assert {(one.topic, one.message_queue) for one in found} == {("everything", queue)}

    def look(self) -> None:
        wanted = {"commit", "check", "ask", "numbered"}
        eventually(lambda: {one.tag for one in self.got} == wanted)
        assert len(self.got) == len(wanted)
        assert {(one.topic, one.body) for one in self.got} == {("everything", self.body)}
        assert self.listener.checked == [self.body]
        with TransactionAdmin(**self.client) as admin:
            assert admin.half_messages().messages == []
        with DelayClient(**self.client) as delays:
            (waits,) = delays.waiting()
            assert (waits.real_topic, waits.message.topic) == ("everything", "everything")
            assert waits.message.body == self.body
        with MemberClient(**self.client) as admin:
            (member,) = admin.connections("readers")
            info = admin.running_info("readers", member.client_id)
            assert (info.group, {one.topic for one in info.subscriptions}) == (
                "readers",
                {"everything", "%RETRY%readers"},
            )
            first = next(one for one in self.got if one.tag == "commit")
            handed = admin.hand_to(first.message_id, "readers", member.client_id)
            assert handed.result == "SUCCESS"
            assert self.got[-1].topic == "everything"
        assert self.got[-1].is_handed_over

    def close(self) -> None:
        self.consumer.close()
        self.producer.close()


def test_clients_of_namespaces_use_the_same_names_and_meet_nowhere(cluster):
    tenants = [Tenant(one, cluster.namesrv_addr) for one in ("shop", "bank", "")]
    try:
        for tenant in tenants:
            tenant.work()
        for tenant in tenants[:2]:
            tenant.look()
        with MemberClient(cluster.namesrv_addr) as admin:
            whole = {"everything", "shop%everything", "bank%everything"}
            assert whole <= set(admin.topics())
    finally:
        for tenant in tenants:
            tenant.close()
