"""Broadcasting: every member gets every message, over kills of its process as well."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest
from harness.patience import until

from mqmesh.message import Message
from mqmesh.protocol.route import TopicConfig
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster

PATIENCE_S = 30.0
MESSAGES = 4_000
KILLS = 4
QUEUES = 4

# Writes each body as a line; a line that is written was consumed, whatever happens next.
CONSUMER = """
import os, sys, threading
from mqmesh import ConsumeResult, PushConsumer
from mqmesh.sdk.client.options import ClientOptions

namesrv, topic, folder, name, out = sys.argv[1:]
file = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def listen(messages):
    for message in messages:
        os.write(file, message.body + b"\\n")
    return ConsumeResult.SUCCESS

consumer = PushConsumer(
    "everyone", namesrv_addr=namesrv, consume_from_where="FIRST_OFFSET",
    message_model="BROADCASTING", offsets_dir=folder, persist_consumer_offset_interval_ms=5,
    client=ClientOptions(instance_name=name), pull_threshold_for_queue=50,
)
consumer.subscribe(topic, listener=listen)
with consumer:
    print("ready", flush=True)
    threading.Event().wait()
"""


@pytest.fixture
def cluster(short_tmp_path):
    with ProcessCluster(short_tmp_path) as cluster:
        yield cluster


class Member:
    """A broadcasting consumer in a process of its own, started again after each kill."""

    def __init__(self, cluster, folder, name):
        self.folder, self.out = folder / "offsets", folder / f"{name}.txt"
        self._arguments = [cluster.namesrv_addr, "t", str(self.folder), name, str(self.out)]
        self.start()

    def start(self):
        self._process = subprocess.Popen(
            [sys.executable, "-c", CONSUMER, *self._arguments], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout.readline() == "ready\n"

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def wait_for(self, count):
        until(lambda: len(set(self.lines())) >= count)

    def lines(self):
        # The last line may be half written by a process that was killed in the middle of it.
        data = self.out.read_bytes() if self.out.exists() else b""
        return data.split(b"\n")[:-1]


def send(cluster):
    with Producer("p", namesrv_addr=cluster.namesrv_addr) as producer:
        for number in range(MESSAGES):
            future = producer.send_async(
                Message("t", b"%d" % number, sharding_key=str(number % 64))
            )
            if number % 500 == 499:
                future.result()


def test_offsets_in_files_survive_kills_at_any_moment(cluster, tmp_path):
    with AdminClient(cluster.namesrv_addr) as admin:
        until(lambda: admin.cluster().brokers)
        admin.put_topic(TopicConfig("t", QUEUES, QUEUES))
    send(cluster)
    victim, other = Member(cluster, tmp_path, "victim"), Member(cluster, tmp_path, "other")
    try:
        for kill in range(1, KILLS + 1):
            victim.wait_for(kill * MESSAGES // (KILLS + 2))
            victim.kill()
            for path in victim.folder.glob("*.json"):
                json.loads(path.read_bytes())  # the old form or the new one, never a part
            victim.start()
        everything = {b"%d" % number for number in range(MESSAGES)}
        until(lambda: set(victim.lines()) == everything)
        until(lambda: set(other.lines()) == everything)
    finally:
        victim.kill()
        other.kill()
    repeats = sum(Counter(victim.lines()).values()) - MESSAGES
    # What was held when it was killed, and what was done in the 5 ms since the last commit.
    assert repeats <= KILLS * QUEUES * 100
    assert max(Counter(other.lines()).values()) == 1
