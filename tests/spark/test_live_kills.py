"""Streams whose driver and broker are killed, and the same job on a cluster of Spark's.

MQMESH_KILLS=20 MQMESH_SEED=7 pytest tests/spark/test_live_kills.py kills more drivers, at other
places.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

import pytest
from deltalake import DeltaTable

from mqmesh.message import Message
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.spark.jvm.java import find_java
from mqmesh.testing.processes import ProcessCluster

pytestmark = [pytest.mark.timeout(3_600)]

JOB = Path(__file__).parent / "live_job.py"
MESSAGES_PER_KILL = 1_500
"""So many that no driver is killed when all of them have come: it would be waited for in vain."""
TAGS = 5


class Lines:
    """A process, and the lines that it has printed so far."""

    def __init__(self, arguments, log, **options) -> None:
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                **options,
            )

    def wait_for(self, word):
        """Read on up to a line with a word."""
        for line in self.process.stdout:
            if word in line:
                return line
        pytest.fail(f"it ended without {word!r}:\n{self.log.read_text()[-4_000:]}")

    def say(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self):
        """As a crash would, with the processes that it started."""
        self.process.kill()
        os.killpg(self.process.pid, 9)
        self.close()

    def close(self):
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def cluster():
    folder = Path(tempfile.mkdtemp(prefix="mq-"))
    with ProcessCluster(folder) as cluster:
        with AdminClient(cluster.namesrv_addr) as admin:
            admin.create_topic("orders", queues=3)
            admin.create_topic("copies", queues=3)
        yield cluster
    shutil.rmtree(folder, ignore_errors=True)


def fill(cluster, start, stop):
    with Producer("fill", namesrv_addr=cluster.namesrv_addr) as producer:
        futures = [
            producer.send_async(
                Message(
                    "orders",
                    f"body {number}".encode(),
                    f"tag{number % TAGS}",
                    [f"k{number}"],
                    {"n": str(number)},
                    sharding_key=f"s{number % 40}",
                )
            )
            for number in range(start, stop)
        ]
        for future in futures:
            future.result()


def stored(cluster, topic):
    """Bodies in a topic."""
    found = []
    with PullConsumer("look", namesrv_addr=cluster.namesrv_addr, auto_commit=False) as consumer:
        consumer.assign(consumer.queues(topic))
        consumer.seek_to_begin()
        left = sum(consumer.lag().values())
        while left:
            some = consumer.poll(10_000, 1_000)
            assert some, f"{left} messages of {topic} do not come"
            left -= len(some)
            found += some
    return found


def driver(cluster, folder, *master):
    arguments = [sys.executable, str(JOB), cluster.namesrv_addr, str(folder), *master]
    return Lines(arguments, folder / "driver.log")


def check(cluster, folder, count):
    """Table and topic have each message once, as it was sent."""
    expected = Counter(f"body {number}".encode() for number in range(count))
    table = DeltaTable(str(folder / "table")).to_pyarrow_table()
    assert Counter(table["body"].to_pylist()) == expected
    tags = Counter(table["tag"].to_pylist())
    assert tags == Counter(f"tag{number % TAGS}" for number in range(count))
    assert len(set(table["message_id"].to_pylist())) == count
    copies = stored(cluster, "copies")
    assert Counter(one.body for one in copies) == expected
    for one in copies:
        number = int(one.body.split()[1])
        assert (one.tag, tuple(one.keys), one.properties, one.sharding_key) == (
            f"tag{number % TAGS}",
            (f"k{number}",),
            {"n": str(number)},
            f"s{number % 40}",
        )


def commits(folder):
    """Batches that both queries have finished."""
    return sum(
        len(list((folder / name / "commits").glob("[0-9]*")))
        for name in ("checkpoint-table", "checkpoint-topic")
    )


def wait_commits(run, folder, most):
    """Let the driver go on until there are so many commits, or it is done."""
    pause = threading.Event()
    while commits(folder) < most and run.process.poll() is None:
        pause.wait(0.01)


@pytest.mark.long
@pytest.mark.parametrize("seed", [int(os.environ.get("MQMESH_SEED", "1"))])
def test_each_message_once_when_driver_and_broker_are_killed(cluster, tmp_path, seed):
    chance = random.Random(seed)
    kills = int(os.environ.get("MQMESH_KILLS", "2"))
    count = kills * MESSAGES_PER_KILL
    fill(cluster, 0, count)
    for number in range(kills):
        run = driver(cluster, tmp_path)
        try:
            run.wait_for("STARTED")
            before = commits(tmp_path)
            wait_commits(run, tmp_path, before + chance.randint(1, 4))
            print(f"kill {number + 1} of {kills} at {commits(tmp_path)} commits", flush=True)
            if number % 2:
                cluster.brokers["broker-a"].kill()
        finally:
            run.kill()
        if number % 2:
            cluster.start_broker()
    run = driver(cluster, tmp_path)
    try:
        run.wait_for("STARTED")
        before = commits(tmp_path)
        wait_commits(run, tmp_path, before + 1)
        # The broker alone: the queries wait for it, and go on.
        cluster.brokers["broker-a"].kill()
        cluster.start_broker()
        run.wait_for("ALL")
        fill(cluster, count, count + 500)
        run.say("more")
        run.wait_for("ALL")
        run.say("")
        run.close()
    finally:
        if run.process.poll() is None:
            run.kill()
    check(cluster, tmp_path, count + 500)


@pytest.fixture
def standalone(tmp_path):
    """A master and two workers of Spark's own classes, on loopback; gives the master's address."""
    import pyspark

    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        "JAVA_HOME": str(find_java().home),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "SPARK_NO_DAEMONIZE": "1",
    }
    spark_class = str(home / "bin" / "spark-class")
    package = "org.apache.spark.deploy"
    processes = []

    def start(*arguments):
        log = tmp_path / f"{arguments[0]}-{len(processes)}.log"
        command = [spark_class, f"{package}.{arguments[0]}", *arguments[1:]]
        command += ["--host", "127.0.0.1", "--webui-port", "0"]
        # It logs to standard error.
        one = Lines([*command], log, env=environment, cwd=tmp_path)
        processes.append(one)
        return log, one

    def wait(log, process, words):
        pause = threading.Event()
        while words not in (text := log.read_text(errors="replace")):
            assert process.process.poll() is None, text[-3_000:]
            pause.wait(0.05)
        return next(line for line in text.splitlines() if words in line)

    try:
        master = start("master.Master", "--port", "0")
        line = wait(*master, "Starting Spark master at")
        address = line.split()[-1]
        workers = [
            start(
                "worker.Worker",
                "--cores",
                "1",
                "--memory",
                "1g",
                "--work-dir",
                str(tmp_path / f"work-{number}"),
                address,
            )
            for number in range(2)
        ]
        for worker in workers:
            wait(*worker, "Successfully registered with master")
        yield address
    finally:
        for one in reversed(processes):
            one.kill()


def test_the_job_on_a_cluster_of_spark_gives_the_same(cluster, standalone, tmp_path):
    fill(cluster, 0, 2_000)
    run = driver(cluster, tmp_path, standalone)
    try:
        run.wait_for("ALL")
        run.say("")
        run.close()
    finally:
        if run.process.poll() is None:
            run.kill()
    check(cluster, tmp_path, 2_000)
    # Tasks ran on both workers.
    assert all(list((tmp_path / f"work-{number}").glob("app-*")) for number in range(2))
