"""Push consumers against a real cluster."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
from harness.stopwatch import Stopwatch

from mqmesh.errors import ClientClosed, ConfigError, InvalidArgument
from mqmesh.message import Message
from mqmesh.protocol.command import encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import (
    ConsumerData,
    HeartbeatRequest,
    LockEntry,
    Subscription,
    UnlockBatchRequest,
)
from mqmesh.protocol.pulling import QueryConsumerOffsetRequest, QueueOffsetEntry
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.client.heartbeats import Heartbeats
from mqmesh.sdk.client.options import ClientOptions
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.channel import BlockingChannel

PATIENCE_S = 20.0
_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster that no test harms; topics get 8 queues."""
    folder = tmp_path_factory.mktemp("cluster")
    settings = {"default_topic_queue_nums": "8", "message_delay_level": "1s 1s 1s 1s"}
    with ProcessCluster(folder, broker_settings=settings) as cluster:
        cluster.start_schedule()
        yield cluster


@pytest.fixture
def own_cluster(short_tmp_path):
    """A cluster that the test may harm."""
    settings = {"default_topic_queue_nums": "8"}
    with ProcessCluster(short_tmp_path, broker_settings=settings) as cluster:
        yield cluster


@pytest.fixture
def names():
    """A topic and a group that no other test uses."""
    number = next(_numbers)
    return f"topic-{number}", f"group-{number}"


class Collector:
    """A listener that keeps what it gets."""

    def __init__(self, answer=ConsumeResult.SUCCESS):
        self.changed = threading.Condition()
        self.bodies: list[bytes] = []
        self.answer = answer

    def __call__(self, messages):
        with self.changed:
            self.bodies += [message.body for message in messages]
            self.changed.notify_all()
        return self.answer

    def wait_for(self, wanted, patience_s=PATIENCE_S):
        """Waits until all wanted bodies came, in any order and number."""
        with self.changed:
            self.changed.wait_for(lambda: set(wanted) <= set(self.bodies), patience_s)
        assert set(wanted) - set(self.bodies) == set()


def until(condition, patience_s=PATIENCE_S):
    """Looks until something is so; returns how long that took."""
    began = time.monotonic()
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < began + patience_s, "waited in vain"
        pause.wait(0.01)
    return time.monotonic() - began


def bodies(count, start=0):
    return [b"%d" % number for number in range(start, start + count)]


def send(cluster, topic, wanted):
    with Producer("producers", namesrv_addr=cluster.namesrv_addr) as producer:
        send_with(producer, topic, wanted)


def send_with(producer, topic, wanted):
    """Sends so that every queue gets some."""
    futures = [
        producer.send_async(Message(topic, body, sharding_key=body.decode())) for body in wanted
    ]
    for future in futures:
        future.result()


def consumer_of(cluster, topic, group, listener, **options):
    options = {"consume_from_where": "FIRST_OFFSET", **options}
    consumer = PushConsumer(group, namesrv_addr=cluster.namesrv_addr, **options)
    consumer.subscribe(topic, listener=listener)
    return consumer


def test_every_message_comes_once(cluster, names):
    topic, group = names
    send(cluster, topic, bodies(500))
    got = Collector()
    with consumer_of(cluster, topic, group, got) as consumer:
        got.wait_for(bodies(500))
        assert len(consumer.assignment()) == 8
    assert Counter(got.bodies) == Counter(bodies(500))


def test_a_new_group_gets_what_is_sent_after_start_and_nothing_else(cluster, names):
    topic, group = names
    send(cluster, topic, bodies(20))
    with PullConsumer(group, namesrv_addr=cluster.namesrv_addr) as other:
        assert len(other.queues(topic)) == 8  # now name servers know the topic
    got = Collector()
    with consumer_of(cluster, topic, group, got, consume_from_where="LAST_OFFSET"):
        send(cluster, topic, bodies(20, 100))
        got.wait_for(bodies(20, 100))
    assert sorted(got.bodies) == sorted(bodies(20, 100))


def test_a_group_goes_on_where_it_stopped(cluster, names):
    topic, group = names
    send(cluster, topic, bodies(100))
    got = Collector()
    with consumer_of(cluster, topic, group, got):
        got.wait_for(bodies(100))
    send(cluster, topic, bodies(100, 100))
    rest = Collector()
    with consumer_of(cluster, topic, group, rest):
        rest.wait_for(bodies(100, 100))
    assert sorted(rest.bodies) == sorted(bodies(100, 100))


def test_failed_messages_come_again_and_their_neighbours_do_not_wait(cluster, names):
    topic, group = names
    got, tries = Collector(), Counter()

    def listen(messages):
        body = messages[0].body
        tries[body] += 1
        if body == b"5" and tries[body] == 1:
            raise ValueError("no")
        if body == b"6" and tries[body] == 1:
            return ConsumeResult.RECONSUME_LATER
        return got(messages)

    send(cluster, topic, bodies(50))
    with consumer_of(cluster, topic, group, listen) as consumer:
        watch = Stopwatch()
        got.wait_for(set(bodies(50)) - {b"5", b"6"})
        assert watch.seconds < 0.9
        got.wait_for(bodies(50))
        assert consumer.failures == 2
        told = consumer.metrics()
        assert told.number("pulled_messages_total") == 52
        assert told.number("listener_calls_total") == 52
        assert told.number("listener_failures_total") == 2
        until(lambda: consumer.metrics().number("cached_messages", topic) == 0)
    assert tries[b"5"] == tries[b"6"] == 2


def test_members_share_the_queues_as_they_come_and_go(cluster, names):
    topic, group = names
    got = Collector()
    send(cluster, topic, bodies(100))
    members = [consumer_of(cluster, topic, group, got) for _ in range(3)]
    try:
        for member in members:
            member.start()
        until(lambda: sorted(len(m.assignment()) for m in members) == [2, 3, 3])
        owned = [queue for member in members for queue in member.assignment()]
        assert len(set(owned)) == 8
        members.pop().close()
        watch = Stopwatch()
        until(lambda: [len(m.assignment()) for m in members] == [4, 4])
        assert watch.seconds < 2
        send(cluster, topic, bodies(100, 100))
        got.wait_for(bodies(200))
    finally:
        for member in members:
            member.close()


def test_queues_that_change_hands_under_load_lose_nothing(cluster, names):
    topic, group = names
    got, count = Collector(), 4_000
    with (
        Producer("producers", namesrv_addr=cluster.namesrv_addr) as producer,
        consumer_of(cluster, topic, group, got),
    ):
        for start in range(0, count, 1_000):
            with consumer_of(cluster, topic, group, got):
                send_with(producer, topic, bodies(1_000, start))
        got.wait_for(bodies(count))
    repeats = len(got.bodies) - count
    assert repeats < count * 0.05


MEMBER = """
import sys, threading
from mqmesh.sdk.consumer.push_consumer import ConsumeResult, PushConsumer

def listen(messages):
    for message in messages:
        sys.stdout.write(message.body.decode() + "\\n")
    sys.stdout.flush()
    return ConsumeResult.SUCCESS

consumer = PushConsumer(
    sys.argv[3], namesrv_addr=sys.argv[1], consume_from_where="FIRST_OFFSET"
)
consumer.subscribe(sys.argv[2], listener=listen)
consumer.start()
sys.stdout.write("ready\\n")
sys.stdout.flush()
threading.Event().wait()
"""


def test_more_members_than_queues_leave_some_idle(cluster, names):
    topic, group = names
    send(cluster, topic, bodies(10))
    members = [consumer_of(cluster, topic, group, Collector()) for _ in range(10)]
    try:
        for member in members:
            member.start()
        until(lambda: sorted(len(m.assignment()) for m in members) == [0] * 2 + [1] * 8)
    finally:
        for member in members:
            member.close()


def test_a_killed_members_queues_go_to_the_others_and_nothing_is_lost(cluster, names):
    topic, group = names
    send(cluster, topic, bodies(200))
    got = Collector()
    victim = subprocess.Popen(
        [sys.executable, "-c", MEMBER, cluster.namesrv_addr, topic, group],
        stdout=subprocess.PIPE,
    )
    members = [consumer_of(cluster, topic, group, got) for _ in range(2)]
    try:
        from_victim = []
        while b"ready" not in from_victim:
            from_victim.append(victim.stdout.readline().strip())
            assert victim.poll() is None
        for member in members:
            member.start()
        until(lambda: sum(len(m.assignment()) for m in members) in (5, 6))
        send(cluster, topic, bodies(200, 200))
        victim.kill()
        watch = Stopwatch()
        until(lambda: [len(m.assignment()) for m in members] == [4, 4])
        assert watch.seconds < 3
        send(cluster, topic, bodies(200, 400))
        from_victim += victim.stdout.read().splitlines()
        got.wait_for(set(bodies(600)) - set(from_victim))
    finally:
        victim.kill()
        victim.wait()
        victim.stdout.close()
        for member in members:
            member.close()


def test_a_broker_that_is_killed_and_comes_back_is_consumed_on(own_cluster, names):
    topic, group = names
    got = Collector()
    send(own_cluster, topic, bodies(400))
    consumers = [consumer_of(own_cluster, topic, group, got) for _ in range(2)]
    for consumer in consumers:
        consumer.start()
    try:
        until(lambda: [len(c.assignment()) for c in consumers] == [4, 4])
        send(own_cluster, topic, bodies(100, 400))
        got.wait_for(bodies(500))  # so both read all their queues
        own_cluster.brokers["broker-a"].kill()
        own_cluster.start_broker()
        send(own_cluster, topic, bodies(500, 500))
        watch = Stopwatch()
        got.wait_for(bodies(1_000))
        assert watch.seconds < 10  # not by the rebalance of every 20 s
        until(lambda: [len(c.assignment()) for c in consumers] == [4, 4])
    finally:
        for consumer in consumers:
            consumer.close()
    # The broker forgot the members and the last commits, and both were told to it again.
    assert Counter(got.bodies) == Counter(bodies(1_000))
    rest = Collector()
    with consumer_of(own_cluster, topic, group, rest):
        send(own_cluster, topic, bodies(1, 1_000))
        rest.wait_for(bodies(1, 1_000))
    assert rest.bodies == bodies(1, 1_000)


def test_queues_that_somebody_had_for_a_moment_are_taken_anew(cluster, names):
    """After a broker's restart a member may be there before the broker has met the others."""
    topic, group = names
    got = Collector()
    send(cluster, topic, bodies(80))
    wanted = ConsumerData(group, "CLUSTERING", "FIRST_OFFSET", [Subscription(topic)])
    all_queues = [QueueOffsetEntry(topic, queue_id, 0) for queue_id in range(8)]
    locks = [LockEntry(topic, queue_id) for queue_id in range(8)]
    context = sockets.new_context()
    other = BlockingChannel(context, f"tcp://{cluster.brokers['broker-a'].endpoint}")

    def ask(code, header):
        return other.request(code, header=encode_header(header), timeout_ms=3_000)

    def lag(queue_ids):
        with GroupAdmin(cluster.namesrv_addr) as admin:
            found = admin.progress(group, topic).queues
        return [one.lag for one in found if one.progress.queue_id in queue_ids]

    try:
        with consumer_of(cluster, topic, group, got) as consumer:
            got.wait_for(bodies(80))
            # Another member comes, and claims all queues for a moment, those that ours keeps, too.
            ask(RequestCode.HEART_BEAT, HeartbeatRequest("~other", consumers=[wanted]))
            claim = QueryConsumerOffsetRequest(group, all_queues, "~other")
            ask(RequestCode.QUERY_CONSUMER_OFFSET, claim)
            ask(RequestCode.UNLOCK_BATCH_MQ, UnlockBatchRequest(group, "~other", locks))
            until(lambda: len(consumer.assignment()) == 4)
            ours = {queue.queue_id for queue in consumer.assignment()}
            send(cluster, topic, bodies(80, 80))
            until(lambda: lag(ours) == [0] * 4, patience_s=10)
    finally:
        other.close()
        context.term()


def test_without_name_servers_consuming_goes_on(own_cluster, names):
    topic, group = names
    got = Collector()
    with (
        Producer("producers", namesrv_addr=own_cluster.namesrv_addr) as producer,
        consumer_of(own_cluster, topic, group, got) as consumer,
    ):
        send_with(producer, topic, bodies(100))
        got.wait_for(bodies(100))
        own_cluster.namesrvs[0].kill()
        send_with(producer, topic, bodies(100, 100))
        got.wait_for(bodies(200))
        own_cluster.restart_namesrv()
        send_with(producer, topic, bodies(100, 200))
        got.wait_for(bodies(300))
        assert len(consumer.assignment()) == 8
    assert Counter(got.bodies) == Counter(bodies(300))


def test_another_listener_takes_over_when_a_topic_is_unsubscribed_first(cluster, names):
    topic, group = names
    first, second = Collector(), Collector()
    send(cluster, topic, bodies(50))
    with consumer_of(cluster, topic, group, first) as consumer:
        first.wait_for(bodies(50))
        with pytest.raises(InvalidArgument, match=f"{topic!r} is subscribed already"):
            consumer.subscribe(topic, listener=second)
        consumer.unsubscribe(topic)
        consumer.subscribe(topic, listener=second)
        send(cluster, topic, bodies(50, 50))
        second.wait_for(bodies(50, 50))
        consumer.unsubscribe(topic)
        until(lambda: consumer.assignment() == [])
    assert not set(first.bodies) & set(second.bodies)


def test_closing_is_quick_while_the_broker_is_down(own_cluster, names):
    topic, group = names
    got = Collector()
    send(own_cluster, topic, bodies(50))
    consumer = consumer_of(own_cluster, topic, group, got)
    consumer.start()
    got.wait_for(bodies(50))
    own_cluster.brokers["broker-a"].kill()
    watch = Stopwatch()
    consumer.close()
    assert watch.seconds < 2


def test_closing_does_not_wait_long_for_a_listener_that_hangs(cluster, names):
    topic, group = names
    begun, release = threading.Event(), threading.Event()

    def listen(_messages):
        begun.set()
        release.wait(PATIENCE_S)
        return ConsumeResult.SUCCESS

    send(cluster, topic, bodies(1))
    consumer = consumer_of(cluster, topic, group, listen)
    consumer.start()
    assert begun.wait(PATIENCE_S)
    watch = Stopwatch()
    consumer.close()
    assert watch.seconds < 2
    release.set()


def test_a_consumer_may_be_closed_by_its_listener(cluster, names):
    topic, group = names
    closed = threading.Event()

    def listen(_messages):
        consumer.close()
        closed.set()
        return ConsumeResult.SUCCESS

    send(cluster, topic, bodies(1))
    consumer = consumer_of(cluster, topic, group, listen)
    consumer.start()
    assert closed.wait(PATIENCE_S)


def test_broadcasting_gives_every_member_every_message_and_a_place_of_its_own(
    cluster, names, tmp_path
):
    topic, group = names

    def member(number, listener):
        return consumer_of(
            cluster,
            topic,
            group,
            listener,
            message_model="BROADCASTING",
            offsets_dir=str(tmp_path),
            client=ClientOptions(instance_name=f"member-{number}"),
        )

    send(cluster, topic, bodies(50))
    got = [Collector(), Collector()]
    with member(0, got[0]) as first, member(1, got[1]) as second:
        for one in got:
            one.wait_for(bodies(50))
        assert first.assignment() == second.assignment()
        with pytest.raises(ConfigError, match="instance_name 'member-0'"):
            member(0, got[0]).start()
    send(cluster, topic, bodies(50, 50))
    again = Collector(ConsumeResult.RECONSUME_LATER)  # which broadcasting does not
    with member(0, again):
        again.wait_for(bodies(50, 50))
    assert Counter(again.bodies) == Counter(bodies(50, 50))
    last = Collector()
    with member(0, last):
        send(cluster, topic, bodies(1, 100))
        last.wait_for(bodies(1, 100))
    assert last.bodies == bodies(1, 100)


def test_starting_without_a_cluster_goes_on_by_itself(short_tmp_path, names):
    topic, group = names
    got = Collector()
    with ProcessCluster(short_tmp_path) as cluster:
        send(cluster, topic, bodies(10))
        cluster.brokers["broker-a"].kill()
        consumer = consumer_of(cluster, topic, group, got, start_timeout_ms=100)
        with consumer:
            assert consumer.assignment() == [] or not got.bodies
            cluster.start_broker()
            got.wait_for(bodies(10))


def test_a_start_without_name_servers_says_which_and_why(names, caplog):
    topic, group = names
    # One request to a name server lasts a second, then its failure is known.
    consumer = PushConsumer(group, namesrv_addr="127.0.0.1:1", start_timeout_ms=2_000)
    consumer.subscribe(topic, listener=Collector())
    with consumer:
        pass
    assert "not all queues are known after 2000 ms" in caplog.text
    assert f"(no route of {topic} from 127.0.0.1:1: no connection to tcp://" in caplog.text


def test_misuse_is_told_at_once(cluster):
    with pytest.raises(InvalidArgument, match="reserved"):
        PushConsumer("%RETRY%g")
    with pytest.raises(InvalidArgument, match="consume_thread_count"):
        PushConsumer("g", consume_thread_count=0)
    with pytest.raises(InvalidArgument, match="pull_everything"):
        PushConsumer("g", pull_everything=True)
    consumer = PushConsumer("g", namesrv_addr=cluster.namesrv_addr)
    with pytest.raises(InvalidArgument, match="character 4"):
        consumer.subscribe("t", "A||", listener=Collector())
    with pytest.raises(InvalidArgument, match="callable"):
        consumer.subscribe("t", listener="listener")
    consumer.subscribe("t", listener=Collector())
    with pytest.raises(InvalidArgument, match="subscribed already"):
        consumer.subscribe("t", "A", listener=Collector())
    consumer.close()
    consumer.close()
    with pytest.raises(ClientClosed):
        consumer.subscribe("t2", listener=Collector())


def test_a_consumer_of_many_topics_has_their_queues_and_floods_nobody(own_cluster, monkeypatch):
    topics = [f"t{number}" for number in range(1_200)]
    with AdminClient(own_cluster.namesrv_addr) as admin:
        admin.create_topics(topics, queues=1)
    sent = []
    send_one = Heartbeats.send
    monkeypatch.setattr(
        Heartbeats, "send", lambda self, *args: (sent.append(args), send_one(self, *args))
    )
    got = Collector()
    consumer = PushConsumer(
        "g", namesrv_addr=own_cluster.namesrv_addr, consume_from_where="FIRST_OFFSET"
    )
    with consumer:
        for topic in topics:
            consumer.subscribe(topic, listener=got)
        until(lambda: len(consumer.assignment()) == len(topics))
        send(own_cluster, topics[-1], bodies(10))
        got.wait_for(bodies(10))
    assert len(sent) < 20
