"""Retention passes a sleeping consumer group: it is told, and goes on at the minimum."""

from __future__ import annotations

import json
import logging
import os
import time
from datetime import datetime, timedelta

import pytest
from harness.patience import until

from mqmesh.cli import main
from mqmesh.message import Message
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster

PATIENCE_S = 20.0
BODY = os.urandom(20_000)
SETTINGS = {
    "storage.mapped_file_size_commit_log": "131072",
    "storage.delete_when": ";".join(f"{hour:02d}" for hour in range(24)),
    "storage.clean_resource_interval_ms": "100",
    "storage.checkpoint_interval_ms": "100",
    "storage.clean_file_forcibly_enable": "false",
    "storage.disk_space_warning_level_ratio": "100",
    "default_topic_queue_nums": "1",
    "max_message_size": "65536",
}


@pytest.fixture
def cluster(tmp_path):
    with ProcessCluster(tmp_path, broker_settings=SETTINGS) as cluster:
        yield cluster


def consumer_of(cluster):
    return PullConsumer(
        "sleepers", namesrv_addr=cluster.namesrv_addr, consume_from_where="FIRST_OFFSET"
    )


def poll(consumer, count):
    found, deadline = [], time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages came"
        found += consumer.poll(100, count - len(found))
    return found


def numbers(messages):
    return [int(message.body[:6]) for message in messages]


def test_a_group_that_slept_goes_on_at_the_minimum_and_says_so(cluster, tmp_path, caplog):
    with Producer("producers", namesrv_addr=cluster.namesrv_addr) as producer:
        for number in range(60):
            producer.send(Message("kept", b"%06d" % number + BODY))
    with consumer_of(cluster) as consumer:
        consumer.subscribe("kept")
        assert numbers(poll(consumer, 3)) == [0, 1, 2]
        consumer.commit()
    segments = sorted(tmp_path.rglob("commitlog/0*"))
    assert len(segments) > 6
    long_ago = time.time() - 100 * 3600
    for segment in segments[:3]:
        os.utime(segment, (long_ago, long_ago))
    deadline = time.monotonic() + PATIENCE_S
    while any(segment.exists() for segment in segments[:3]):
        assert time.monotonic() < deadline, "the segments stay"
        with Producer("others", namesrv_addr=cluster.namesrv_addr) as producer:
            producer.send(Message("other", b"time passes"))
    assert all(segment.exists() for segment in segments[3:])
    with caplog.at_level(logging.WARNING), consumer_of(cluster) as consumer:
        consumer.subscribe("kept")
        found = numbers(poll(consumer, 10))
    assert found == list(range(found[0], found[0] + 10))
    assert found[0] > 10
    assert f"offset 3 is gone; going on at {found[0]}" in caplog.text


def test_a_pass_that_an_administrator_asks_for_says_what_goes_and_what_consumers_lose(
    tmp_path, capsys
):
    later = datetime.now() + timedelta(hours=12)
    settings = SETTINGS | {"storage.delete_when": f"{later.hour:02d}"}

    with ProcessCluster(tmp_path, broker_settings=settings) as cluster:
        with Producer("producers", namesrv_addr=cluster.namesrv_addr) as producer:
            for number in range(40):
                producer.send(Message("kept", b"%06d" % number + BODY))
        segments = sorted(tmp_path.rglob("commitlog/0*"))
        long_ago = time.time() - 100 * 3600
        for segment in segments[:2]:
            os.utime(segment, (long_ago, long_ago))

        def clean(*options):
            arguments = ["broker", "clean", "broker-a", *options]
            assert main.main([*arguments, "--namesrv", cluster.namesrv_addr]) == 0
            return capsys.readouterr().out

        # A segment is looked at once it is full, and its checkpoint written.
        until(lambda: len(json.loads(clean("--dry-run", "--json"))["segments"]) == 2)
        planned = json.loads(clean("--dry-run", "--json"))
        assert [one["size"] for one in planned["segments"]] == [131_072] * 2
        (lost,) = (one for one in planned["topics"] if one["topic"] == "kept")
        assert (lost["queues"], lost["min_before"]) == (1, 0)
        assert lost["messages"] == lost["min_after"] > 0
        head, heads, row, *_ = clean("--dry-run").splitlines()  # and the broker's own topic
        assert head.startswith("2 segments of 262,144 bytes would go: older than 72 h")
        assert heads.split()[:3] == ["TOPIC", "QUEUES", "MESSAGES"]
        assert row.split() == ["kept", "1", *map(str, (lost["messages"], 0, lost["min_after"]))]
        assert all(segment.exists() for segment in segments[:2]), "nothing was done"

        done = json.loads(clean("--json"))
        assert (done["dry_run"], done["topics"]) == (False, planned["topics"])
        assert [segment.exists() for segment in segments[:3]] == [False, False, True]
        with consumer_of(cluster) as consumer:
            consumer.subscribe("kept")
            assert numbers(poll(consumer, 1)) == [lost["min_after"]]
