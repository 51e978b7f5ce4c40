"""Messages that are replayed, by real processes."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from harness.patience import until

from mqmesh.cli import main
from mqmesh.message import Message
from mqmesh.sdk.admin.replays import ReplayClient
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster

_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster that no test harms."""
    settings = {"default_topic_queue_nums": "4"}
    with ProcessCluster(tmp_path_factory.mktemp("c"), broker_settings=settings) as cluster:
        yield cluster


@pytest.fixture
def names():
    """A topic and a group that no other test uses."""
    number = next(_numbers)
    return f"replay-topic-{number}", f"replay-group-{number}"


def send(cluster, topic, count, **properties):
    """Sends messages with keys; returns their ids."""
    with Producer("producers", namesrv_addr=cluster.namesrv_addr) as producer:
        return [
            producer.send(
                Message(topic, b"%d" % number, keys=[f"key-{number}"], properties=properties)
            ).message_id
            for number in range(count)
        ]


def consume(cluster, group, topic, listener):
    consumer = PushConsumer(
        group, namesrv_addr=cluster.namesrv_addr, consume_from_where="FIRST_OFFSET"
    )
    consumer.subscribe(topic, listener=listener)
    return consumer


def run(capsys, cluster, *arguments):
    capsys.readouterr()
    code = main.main(["replay", *arguments, "--namesrv", cluster.namesrv_addr, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_group_gets_what_fits_once_more_and_no_other_group_does(cluster, names, capsys):
    topic, group = names
    ids = send(cluster, topic, 20)
    mine, others = [], []
    with (
        consume(cluster, group, topic, mine.extend),
        consume(cluster, f"{group}-other", topic, others.extend),
    ):
        until(lambda: len(mine) == len(others) == 20)
        code, counted = run(capsys, cluster, topic, "--from", "1h", "--into", group, "--dry-run")
        assert (code, counted["found"], counted["copied"]) == (0, 20, 0)
        code, one = run(capsys, cluster, topic, "--key", "key-7", "--into", group)
        assert (code, one["found"], one["copied"]) == (0, 1, 1)
        until(lambda: len(mine) == 21)
        assert mine[-1].message_id == ids[7]
        assert (mine[-1].topic, mine[-1].reconsume_times) == (topic, 0)
        code, every = run(capsys, cluster, topic, "--into", group)
        assert (code, every["copied"]) == (0, 20)
        until(lambda: len(mine) == 41)
        assert sorted(message.message_id for message in mine[21:]) == sorted(ids)
    assert len(others) == 20
    code, nothing = run(capsys, cluster, topic, "--to", "1h", "--into", group)
    assert (code, nothing["found"]) == (1, 0)


def test_another_topic_gets_them_with_their_gaps(cluster, names):
    topic, group = names
    send(cluster, topic, 1, amount="5")
    send(cluster, f"{topic}-copy", 1)
    time_to_pass = time.monotonic() + 0.3
    until(lambda: time.monotonic() > time_to_pass)
    send(cluster, topic, 2, amount="50")
    with ReplayClient(cluster.namesrv_addr) as client:
        begun = time.monotonic()
        done = client.replay(topic, into_topic=f"{topic}-copy", speed=0.25)
        took_s = time.monotonic() - begun
    assert (done.found, done.copied) == (3, 3)
    gap_s = (done.last_ms - done.first_ms) / 1_000
    assert gap_s >= 0.29
    assert took_s >= 4 * gap_s - 0.1
    copies = []
    with consume(cluster, group, f"{topic}-copy", copies.extend):
        until(lambda: len(copies) == 4)
    assert sorted(message.body for message in copies) == [b"0", b"0", b"0", b"1"]
