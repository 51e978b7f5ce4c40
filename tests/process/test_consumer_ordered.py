"""Ordered consumption against real clusters: crashes, pauses, rebalances, restarts."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading

import pytest
from harness.ordered_calls import find_disorder, find_overlaps, find_shared, find_skips
from harness.ordered_run import Group, Load, flight_keys, run_churn, run_flights, run_keys
from harness.patience import until

from mqmesh.message import PROPERTY_LAST_FAILURE, Message, dlq_topic
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster

PATIENCE_S = 30.0
SETTINGS = {"default_topic_queue_nums": "4"}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster that no test harms; topics get 4 queues."""
    with ProcessCluster(tmp_path_factory.mktemp("ordered"), broker_settings=SETTINGS) as cluster:
        yield cluster


@pytest.fixture
def own_cluster(short_tmp_path):
    """A cluster that the test may harm."""
    with ProcessCluster(short_tmp_path, broker_settings=SETTINGS) as cluster:
        yield cluster


@pytest.fixture
def names():
    """A topic and a group that no other test uses."""
    number = next(_numbers)
    return f"topic-{number}", f"group-{number}"


def send(cluster, topic, count, start=0):
    with Producer("producers", namesrv_addr=cluster.namesrv_addr) as producer:
        futures = [
            producer.send_async(Message(topic, b"%d" % n, sharding_key=f"k{n % 40}"))
            for n in range(start, start + count)
        ]
        for future in futures:
            future.result()


def topics_of(cluster):
    with AdminClient(cluster.namesrv_addr) as admin:
        return admin.topics()


class Collector:
    """A listener that keeps the numbers it gets, by key."""

    def __init__(self):
        self.lock = threading.Lock()
        self.seen: list[int] = []
        self.by_key: dict[str, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.fails = lambda number, times: False

    def __call__(self, messages):
        for message in messages:
            number = int(message.body)
            if self.fails(number, message.reconsume_times):
                raise ValueError(number)
            with self.lock:
                self.seen.append(number)
                self.by_key.setdefault(message.sharding_key, []).append(number)
                self.tokens.setdefault(message.queue_id, []).append(message.fencing_token)
        return ConsumeResult.SUCCESS

    def check(self, count):
        """Everything came once, each key's in order."""
        until(lambda: len(self.seen) >= count)
        assert sorted(self.seen) == list(range(count))
        assert all(found == sorted(found) for found in self.by_key.values())
        assert all(found[0] > 0 and found == sorted(found) for found in self.tokens.values())


def consumer_of(cluster, topic, group, listener, **options):
    options = {
        "consume_from_where": "FIRST_OFFSET",
        "suspend_current_queue_time_ms": 10,
        **options,
    }
    consumer = PushConsumer(
        group, namesrv_addr=cluster.namesrv_addr, consume_orderly=True, **options
    )
    consumer.subscribe(topic, listener=listener)
    return consumer


# ---- One consumer, or several in one process --------------------------------------------


def test_each_key_is_consumed_in_the_order_it_was_sent(cluster, names):
    send(cluster, names[0], 2_000)
    got = Collector()
    with consumer_of(cluster, *names, got) as consumer:
        got.check(2_000)
        assert len(consumer.assignment()) == 4


def test_a_poison_message_becomes_a_dead_letter_and_its_queue_goes_on(cluster, names):
    topic, group = names
    send(cluster, topic, 200)
    got = Collector()
    got.fails = lambda number, times: number == 60
    letters = []

    def take(messages):
        letters.extend(messages)
        return ConsumeResult.SUCCESS

    with consumer_of(cluster, topic, group, got, max_reconsume_times=3) as consumer:
        until(lambda: len(got.seen) >= 199)
        assert consumer.failures == 4
        until(lambda: dlq_topic(group) in topics_of(cluster))
        with PushConsumer(
            f"{group}-letters",
            namesrv_addr=cluster.namesrv_addr,
            consume_from_where="FIRST_OFFSET",
        ) as reader:
            reader.subscribe(dlq_topic(group), listener=take)
            until(lambda: letters)
    assert sorted(got.seen) == [n for n in range(200) if n != 60]
    assert all(found == sorted(found) for found in got.by_key.values())
    assert (letters[0].body, letters[0].topic, letters[0].sharding_key) == (b"60", topic, "k20")
    assert "ValueError" in letters[0].property(PROPERTY_LAST_FAILURE)


def test_one_more_member_takes_over_without_a_repeat(cluster, names):
    got = Collector()
    with consumer_of(cluster, *names, got):
        send(cluster, names[0], 4_000)
        with consumer_of(cluster, *names, got) as second:
            send(cluster, names[0], 4_000, 4_000)
            until(lambda: len(second.assignment()) == 2)
        send(cluster, names[0], 1_000, 8_000)
        got.check(9_000)


def test_a_rebalance_waits_for_the_listener_that_runs(cluster, names):
    send(cluster, names[0], 400)
    first, second = Collector(), Collector()
    gate, inside = threading.Event(), threading.Semaphore(0)

    def slow(messages):
        inside.release()
        gate.wait(PATIENCE_S)
        return first(messages)

    with consumer_of(cluster, *names, slow) as one:
        for _ in range(4):
            assert inside.acquire(timeout=PATIENCE_S)
        with consumer_of(cluster, *names, second, start_timeout_ms=500) as two:
            until(lambda: len(one.assignment()) == 2)
            assert len(two.assignment()) == 2
            assert not second.seen
            gate.set()
            until(lambda: len(first.seen) + len(second.seen) >= 400)
    assert sorted(first.seen + second.seen) == list(range(400))
    for key, numbers in first.by_key.items():
        assert numbers + second.by_key.get(key, []) == sorted(numbers + second.by_key.get(key, []))


def test_a_queue_that_comes_back_and_goes_again_still_waits_for_its_listener(cluster, names):
    send(cluster, names[0], 400)
    first, others = Collector(), Collector()
    gate, inside = threading.Event(), threading.Semaphore(0)

    def slow(messages):
        inside.release()
        gate.wait(PATIENCE_S)
        return first(messages)

    with consumer_of(cluster, *names, slow) as one:
        for _ in range(4):
            assert inside.acquire(timeout=PATIENCE_S)
        with consumer_of(cluster, *names, others, start_timeout_ms=200):
            until(lambda: len(one.assignment()) == 2)
        until(lambda: len(one.assignment()) == 4)
        with consumer_of(cluster, *names, others, start_timeout_ms=200) as again:
            until(lambda: len(one.assignment()) == 2)
            until(lambda: len(again.assignment()) == 2)
            pause = threading.Event()
            pause.wait(0.5)  # to see that something does not happen
            assert not others.seen
            gate.set()
            until(lambda: len(first.seen) + len(others.seen) >= 400)
    assert sorted(first.seen + others.seen) == list(range(400))


# ---- Members that die, hang, come and go --------------------------------------------------


@pytest.mark.timeout(180)
def test_all_flights_in_the_order_of_their_aircraft(short_tmp_path, project_root):
    keys = list(flight_keys(project_root / "examples" / "data" / "flights.csv.zst"))
    metrics = run_flights(short_tmp_path, keys)
    assert metrics.faults == []
    assert (metrics.messages, metrics.keys) == (336_776, 4_043)
    assert (metrics.kills, metrics.joins) == (1, 1)


@pytest.mark.timeout(120)
def test_members_of_one_queue_keep_the_order_of_keys_through_kills(short_tmp_path):
    keys = [f"k{n * n % 97}" if n % 10 else "" for n in range(6_000)]
    metrics = run_keys(short_tmp_path, keys, members=4, kills=2, restarts=1)
    assert metrics.faults == []
    assert (metrics.kills, metrics.joins, metrics.restarts) == (2, 2, 1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("orderly", [True, False], ids=["in-order", "concurrently"])
def test_members_come_and_go_under_load(short_tmp_path, orderly):
    metrics = run_churn(short_tmp_path, seconds=4, events_a_minute=60, orderly=orderly, brokers=2)
    assert metrics.faults == []
    assert metrics.joins >= 2
    assert metrics.leaves >= 1
    # The promise is 0.1 % of the 240,000 messages of the long form. Without order one hiccup of a
    # busy machine repeats what a member did in it, which is more than that of this short form.
    assert metrics.repeats <= (metrics.messages if orderly else 240_000) * 0.001


@pytest.mark.timeout(180)
def test_order_outlives_failovers(short_tmp_path):
    """H6: one owner of a queue at a time, nothing skipped, each key in order."""
    metrics = run_churn(short_tmp_path, seconds=8, rate=500, events_a_minute=10, failover_s=4)
    assert metrics.faults == []
    assert metrics.failovers >= 1


@pytest.mark.timeout(120)
def test_a_member_that_hung_and_was_replaced_moves_nothing(short_tmp_path):
    """Scenario 32: stopped until another took over, then let go on."""
    keys = [f"k{n % 100}" for n in range(8_000)]
    log, told = short_tmp_path / "m1.log", ("took this member for dead", "taken anew")
    with (
        ProcessCluster(short_tmp_path, broker_settings=SETTINGS) as cluster,
        Group(cluster.namesrv_addr, short_tmp_path, failing=0.0, mode="orderly") as group,
    ):
        group.join(wait=True)
        group.join(wait=True)
        zombie = group.members[0]
        load = Load(cluster.namesrv_addr, keys, rate=1_000)
        load.start()

        def seen(count):
            group.log.read()
            return len(group.log.numbers) >= count

        until(lambda: seen(1_000))
        zombie.send_signal(signal.SIGSTOP)
        others = {f"broker-a:{n}" for n in range(4)}

        def taken_over():
            group.log.read()
            return {call.queue for call in group.log.calls if call.member == "m2"} == others

        until(taken_over)
        until(lambda: seen(6_000))
        zombie.send_signal(signal.SIGCONT)
        until(lambda: seen(len(keys)))
        group.log.read()
        calls = list(group.log.calls)
        # On a slow machine the others have done everything before it has come to say so.
        until(lambda: any(words in log.read_text() for words in told))
    # At most the call that was running when it was stopped ends while the new owner is at work.
    stopped = find_overlaps(calls)
    assert len(stopped) <= 1, stopped
    assert find_skips(calls) == find_shared(calls) == find_disorder(calls, keys) == []


def test_a_member_that_hung_and_was_not_replaced_goes_on_without_a_repeat(short_tmp_path):
    keys = [f"k{n % 100}" for n in range(6_000)]
    with (
        ProcessCluster(short_tmp_path, broker_settings=SETTINGS) as cluster,
        Group(cluster.namesrv_addr, short_tmp_path, failing=0.0, mode="orderly") as group,
    ):
        group.join(wait=True)
        load = Load(cluster.namesrv_addr, keys, rate=1_000)
        load.start()
        log = group.log
        until(lambda: log.read() or len(log.numbers) >= 1_000)
        group.members[0].send_signal(signal.SIGSTOP)
        broker_log = short_tmp_path / "broker-a.log"
        until(lambda: "lost its connection" in broker_log.read_text())
        group.members[0].send_signal(signal.SIGCONT)
        until(lambda: log.read() or len(log.numbers) >= len(keys))
        calls = list(log.calls)
        until(lambda: "took this member for dead" in (short_tmp_path / "m1.log").read_text())
    assert len(calls) == len(keys)
    assert find_skips(calls) == find_overlaps(calls) == find_disorder(calls, keys) == []


ZOMBIE = """
import sys, time
from mqmesh import PushConsumer, ConsumeResult
def listen(messages):
    print(messages[0].queue_id, messages[0].queue_offset, flush=True)
    return ConsumeResult.SUCCESS
with PushConsumer(sys.argv[2], namesrv_addr=sys.argv[1], consume_from_where="FIRST_OFFSET",
                  persist_consumer_offset_interval_ms=100_000) as consumer:
    consumer.subscribe(sys.argv[3], listener=listen)
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_the_offsets_of_a_replaced_member_do_not_count(own_cluster, names):
    """Scenario 32 without order: what the zombie did not commit in time is refused."""
    topic, group = names
    send(own_cluster, topic, 40)
    zombie = subprocess.Popen(
        [sys.executable, "-c", ZOMBIE, own_cluster.namesrv_addr, group, topic],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines = {zombie.stdout.readline() for _ in range(41)}
        assert "ready\n" in lines
        os.kill(zombie.pid, signal.SIGSTOP)
        got = Collector()
        with consumer_of(own_cluster, topic, group, got):
            send(own_cluster, topic, 40, 40)
            until(lambda: set(got.seen) >= set(range(40, 80)))
        with PullConsumer(group, namesrv_addr=own_cluster.namesrv_addr) as looker:
            queues = looker.queues(topic)
            before = [looker.committed(queue) for queue in queues]
            assert sum(at for at in before if at) == 80
            os.kill(zombie.pid, signal.SIGCONT)
            _, log = zombie.communicate(timeout=PATIENCE_S)
            after = [looker.committed(queue) for queue in queues]
        assert after == before
        assert zombie.returncode == 0, log
    finally:
        zombie.kill()
        zombie.communicate()


@pytest.mark.timeout(120)
def test_order_survives_a_broker_that_is_killed_and_started_again(short_tmp_path):
    keys = [f"k{n % 100}" for n in range(3_000)]
    with (
        ProcessCluster(short_tmp_path, broker_settings=SETTINGS) as cluster,
        Group(cluster.namesrv_addr, short_tmp_path, failing=0.2, mode="orderly") as group,
    ):
        load = Load(cluster.namesrv_addr, keys)
        load.start()
        load.wait(PATIENCE_S)
        for _ in range(2):
            group.join(wait=True)

        def seen(count):
            group.log.read()
            return len(group.log.numbers) >= count

        until(lambda: seen(1_000))
        cluster.brokers["broker-a"].kill()
        cluster.start_broker("broker-a")
        assert not seen(len(keys))
        until(lambda: seen(len(keys)))
        calls = list(group.log.calls)
    assert (
        find_disorder(calls, keys)
        == find_skips(calls)
        == find_overlaps(calls)
        == find_shared(calls)
        == []
    )
