"""`mqmesh bench` on a running cluster: metrics come out, and nothing stays behind."""

from __future__ import annotations

import json
import signal
import time

import psutil
import pytest
from harness.commands import CommandProcess, run_command

from mqmesh.errors import TopicNotFound
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.testing.processes import ProcessCluster

PATIENCE_S = 30.0
OWN_TOPICS = "mqmesh-bench-"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ProcessCluster(tmp_path_factory.mktemp("c")) as cluster:
        yield cluster


@pytest.fixture
def admin(cluster):
    with AdminClient(cluster.namesrv_addr) as admin:
        yield admin
        left = [name for name in admin.topics() if name.startswith(OWN_TOPICS)]
        assert left == []


def bench(cluster, *arguments):
    return CommandProcess("--namesrv", cluster.namesrv_addr, "bench", *arguments)


def result_of(command, code=0):
    assert command.wait(PATIENCE_S) == code, command.err
    assert not any("Traceback" in line for line in command.err)
    return json.loads(command.out[-1])


def stored(admin, topic):
    try:
        stats = admin.topic_stats(topic)
    except TopicNotFound:
        return 0
    return sum(
        one.max_queue_offset - one.min_queue_offset
        for broker in stats.values()
        for one in broker.queues
    )


def wait_for_sends(admin):
    """Wait until the topic that a benchmark has made holds messages."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        made = [name for name in admin.topics() if name.startswith(OWN_TOPICS)]
        if made and stored(admin, made[0]):
            return
    pytest.fail("no benchmark has sent anything")


def test_produce_sends_what_it_was_told_and_consume_reads_it(cluster, admin):
    admin.create_topic("orders", queues=4)
    how = ("--count", "5001", "--size", "100", "--tag", "new", "--keys", "-p", "shop=Berlin")
    with bench(cluster, "produce", "orders", *how, "--clients", "2", "--json") as command:
        result = result_of(command)
    assert result["total"]["messages"] == 5_001
    assert [one["messages"] for one in result["clients"]] == [2_501, 2_500]
    assert result["total"]["messages_per_second"] > 0
    assert stored(admin, "orders") == 5_001
    with CommandProcess(
        *("--namesrv", cluster.namesrv_addr, "consume", "orders", "--from", "first"),
        *("--max", "1", "--json"),
    ) as command:
        message = result_of(command)
    assert message["tag"] == "new"
    assert message["properties"] == {"shop": "Berlin"}
    assert len(message["keys"]) == 1
    assert message["body_size"] == 100

    with bench(cluster, "consume", "orders", "--clients", "2", "--json") as command:
        result = result_of(command)
    assert result["total"]["messages"] == 5_001
    assert result["topic"] == "orders"
    assert stored(admin, "orders") == 5_001


def test_explicit_batches_are_all_sent_the_last_one_shorter(cluster, admin):
    admin.create_topic("batches", queues=4)
    with bench(
        cluster, "produce", "batches", "--count", "250", "--batch", "100", "--json"
    ) as command:
        assert result_of(command)["total"]["messages"] == 250
    assert stored(admin, "batches") == 250


def test_consume_without_a_topic_sends_first(cluster, admin):
    with bench(cluster, "consume", "--count", "3000", "--json") as command:
        result = result_of(command)
    assert result["total"]["messages"] == 3_000
    assert result["total"]["mib_per_second"] > 0


def test_latency_times_acknowledgements_and_deliveries(cluster, admin):
    how = ("--count", "100", "--rate", "1000", "--clients", "2")
    with bench(cluster, "latency", *how, "--json") as command:
        result = result_of(command)
    assert result["total"]["messages"] == 100
    assert result["missing"] == 0
    assert not any("not committed" in line for line in command.err)
    for what in ("send", "delivery"):
        metrics = result["latency_ms"][what]
        assert 0 < metrics["p50"] <= metrics["p99"] <= metrics["max"]


def test_a_duration_ends_it_and_people_get_a_table(cluster, admin):
    with bench(cluster, "produce", "--duration", "0.5", "--rate", "2000") as command:
        assert command.wait(PATIENCE_S) == 0
    head, row = command.out
    assert head.split()[:5] == ["CLIENT", "MESSAGES", "FAILED", "SECONDS", "MESSAGES/S"]
    assert 1 <= int(row.split()[1].replace(",", "")) <= 1_000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("what", ["produce", "latency"])
def test_an_interrupted_benchmark_tells_what_it_has(cluster, admin, what, number):
    with bench(cluster, what, "--rate", "200", "--json") as command:
        wait_for_sends(admin)
        clients = psutil.Process(command.pid).children()
        command.send_signal(number)
        result = result_of(command, 130)
    assert result["is_interrupted"]
    assert psutil.wait_procs(clients, PATIENCE_S)[1] == []


def test_clients_end_when_their_benchmark_is_killed(cluster, admin):
    with bench(cluster, "produce", "--rate", "200") as command:
        wait_for_sends(admin)
        clients = psutil.Process(command.pid).children()
        command.send_signal(signal.SIGKILL)
        command.wait(PATIENCE_S)
    assert len(clients) == 1
    assert psutil.wait_procs(clients, PATIENCE_S)[1] == []
    for name in admin.topics():
        if name.startswith(OWN_TOPICS):
            admin.delete_topic(name)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("produce", "no-such-topic"), "no-such-topic"),
        (("latency", "--size", "15"), "at least 16"),
        (("produce", "--clients", "65"), "--clients"),
        (("produce", "-p", "x"), "NAME=VALUE"),
    ],
)
def test_what_cannot_be_measured_is_refused(cluster, admin, arguments, words):
    done = run_command("--namesrv", cluster.namesrv_addr, "bench", *arguments)
    assert done.code in (1, 2)
    assert words in "\n".join(done.err)
    assert done.out == []


def test_an_empty_topic_is_not_waited_for(cluster, admin):
    admin.create_topic("empty")
    done = run_command("--namesrv", cluster.namesrv_addr, "bench", "consume", "empty")
    assert done.code == 1
    assert "holds no messages" in "\n".join(done.err)


def test_sends_that_fail_are_told(cluster, admin):
    done = run_command(
        *("--namesrv", cluster.namesrv_addr, "bench", "produce", "--count", "10"),
        *("--property", f"p={'x' * 40_000}", "--json"),
    )
    assert done.code == 1
    assert json.loads(done.out[-1])["total"]["failed"] == 1
    assert "sends that failed: 1, the first one so: " in done.err[-1]


def test_without_a_cluster_it_says_how_to_start_one():
    done = run_command("--namesrv", "127.0.0.1:1", "bench", "produce")
    assert done.code == 1
    assert "mqmesh up" in "\n".join(done.err)
