"""Delayed messages through real processes: levels, points in time, crashes, retention."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from harness.commands import run_command
from harness.patience import until

from mqmesh.errors import BrokerError, CancelRefused, InvalidArgument
from mqmesh.message import Message
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.delays import DelayClient
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster

PATIENCE_S = 30.0
SETTINGS = {"message_delay_level": "1s 2s", "default_topic_queue_nums": "2"}


@pytest.fixture
def cluster(tmp_path):
    with ProcessCluster(tmp_path, broker_settings=SETTINGS) as cluster:
        cluster.start_schedule()
        yield cluster


@pytest.fixture
def producer(cluster):
    with Producer(
        "producers", namesrv_addr=cluster.namesrv_addr, send_msg_timeout_ms=30_000
    ) as producer:
        yield producer


@pytest.fixture
def consumer(cluster):
    with PullConsumer(
        "consumers", namesrv_addr=cluster.namesrv_addr, consume_from_where="FIRST_OFFSET"
    ) as consumer:
        consumer.subscribe("t")
        yield consumer


def now_ms():
    return time.time_ns() // 1_000_000


def poll_until(consumer, condition):
    """Polls until a condition holds for what came; the messages."""
    found, deadline = [], time.monotonic() + PATIENCE_S
    while not condition(found):
        assert time.monotonic() < deadline, f"only {len(found)} messages came"
        found += consumer.poll(100, 1_000)
    return found


def metrics(cluster):
    with AdminClient(cluster.namesrv_addr) as admin:
        return admin.runtime_info()["broker-a"]


def test_messages_come_when_they_are_due_and_cancelled_ones_never(cluster, producer, consumer):
    by_level = producer.send(Message("t", b"level", delay_level=1, tag="x", keys=["k"]))
    above = producer.send(Message("t", b"above", delay_level=50))
    at_time = producer.send(Message("t", b"time").delayed_by(300))
    batch = producer.send_batch(
        [Message("t", b"%d" % i, deliver_at_ms=now_ms() + 100 * i) for i in (9, 1, 5)]
    )
    cancelled = producer.send(Message("t", b"cancelled").delayed_by(60_000))
    also = producer.send(Message("t", b"also cancelled").delayed_by(60_000))
    at_once = producer.send(Message("t", b"now"))
    producer.cancel_delayed(cancelled)
    told = run_command(
        "schedule", "cancel", also.message_id, "--namesrv", cluster.namesrv_addr, "--json"
    )
    assert told.code == 0, told.err
    assert json.loads(told.out[0])["cancelled_at"] == ["broker-a"]

    found = poll_until(consumer, lambda found: any(m.body == b"above" for m in found))
    bodies = [message.body for message in found]
    assert sorted(bodies) == sorted([b"level", b"above", b"time", b"9", b"1", b"5", b"now"])
    ids = {message.body: message.message_id for message in found}
    assert ids[b"level"] == by_level.message_id
    assert ids[b"time"] == at_time.message_id
    assert ids[b"now"] == at_once.message_id
    assert [ids[b"9"], ids[b"1"], ids[b"5"]] == batch.message_ids
    stored = {message.body: message for message in found}
    assert 1_000 <= stored[b"level"].store_timestamp - by_level.store_timestamp < 10_000
    assert 2_000 <= stored[b"above"].store_timestamp - above.store_timestamp < 10_000
    assert (stored[b"level"].tag, list(stored[b"level"].keys)) == ("x", ["k"])
    for body in (b"time", b"9", b"1", b"5"):
        assert stored[body].store_timestamp >= stored[body].deliver_at_ms
    with pytest.raises(CancelRefused, match="before"):
        producer.cancel_delayed(at_time)
    for other in (batch, at_time.message_id):
        with pytest.raises(InvalidArgument, match="SendResult of one message"):
            producer.cancel_delayed(other)
    with (
        DelayClient(cluster.namesrv_addr) as client,
        pytest.raises(BrokerError, match="does not wait here"),
    ):
        client.cancel("0" * 32)
    assert metrics(cluster)["schedule_cancelled_total"] == 2
    until(lambda: metrics(cluster)["schedule_pending"] == 0)


def test_nothing_is_lost_however_often_broker_and_service_are_killed(cluster, producer, consumer):
    count, due_ms = 1_000, now_ms() + 1_500
    sent = {}
    for number in range(count):
        message = Message("t", b"%06d" % number, deliver_at_ms=due_ms + number * 2)
        sent[number] = producer.send_async(message)
    ids = {future.result().message_id for future in sent.values()}
    seen: list = []

    def has(share):
        return lambda found: len({m.message_id for m in (*seen, *found)}) >= count * share

    for kill, start in (
        (cluster.schedules["broker-a"].kill, cluster.start_schedule),
        (lambda: cluster.brokers["broker-a"].kill(), cluster.start_broker),
        (lambda: cluster.schedules["broker-a"].kill(), cluster.start_schedule),
        (lambda: cluster.brokers["broker-a"].kill(), cluster.start_broker),
    ):
        kill()
        start()
        seen += poll_until(consumer, has(len(seen) / count / 2 + 0.1))
    seen += poll_until(consumer, has(1.0))
    assert {message.message_id for message in seen} == ids
    # The consumer may read again what it had not committed; the store may not hold much twice.
    places = {(m.message_queue, m.queue_offset) for m in seen}
    assert len(places) < count * 1.5
    early = [m for m in seen if m.store_timestamp < m.deliver_at_ms]
    assert early == []


def test_a_clean_restart_goes_on_with_the_timetable(cluster, producer):
    waits = producer.send(Message("t", b"waits").delayed_by(3_600_000))
    until(lambda: metrics(cluster)["schedule_pending"] == 1)
    cluster.schedules["broker-a"].stop()
    cluster.brokers["broker-a"].stop()
    cluster.start_broker()
    cluster.start_schedule()
    until(lambda: metrics(cluster)["schedule_pending"] == 1)
    producer.cancel_delayed(waits)
    log = (cluster.folder / "schedule-broker-a.log").read_text()
    assert "WARNING" not in log
    assert "timetable" not in log


def test_a_lost_timetable_is_made_anew_and_downtime_is_made_up_for(cluster, producer, consumer):
    sent = [
        # Batches of one message, as their levels differ.
        producer.send_async(Message("t", b"%d" % i, delay_level=1 + i % 2))
        for i in range(1_000)
    ]
    gone = producer.send(Message("t", b"cancelled", delay_level=2))
    producer.cancel_delayed(gone)
    ids = {future.result().message_id for future in sent}
    cluster.schedules["broker-a"].kill()
    shutil.rmtree(cluster.folder / "schedule-broker-a")
    until(lambda: now_ms() > gone.store_timestamp + 2_100)
    cluster.start_schedule()
    found = poll_until(consumer, lambda found: len(found) >= len(ids))
    assert sorted(message.message_id for message in found) == sorted(ids)
    assert consumer.poll(300) == []


def test_what_is_due_after_the_retention_survives_it(tmp_path):
    body = os.urandom(20_000)
    settings = SETTINGS | {
        "storage.mapped_file_size_commit_log": "131072",
        "storage.delete_when": ";".join(f"{hour:02d}" for hour in range(24)),
        "storage.clean_resource_interval_ms": "100",
        "storage.checkpoint_interval_ms": "100",
        "storage.clean_file_forcibly_enable": "false",
        "storage.disk_space_warning_level_ratio": "100",
        "max_message_size": "65536",
    }
    with ProcessCluster(tmp_path, broker_settings=settings) as cluster:
        cluster.start_schedule()
        with Producer("producers", namesrv_addr=cluster.namesrv_addr) as producer:
            late = producer.send(Message("t", b"late" + body).delayed_by(8_000))
            dropped = producer.send(Message("t", b"dropped").delayed_by(3_600_000))
            for _ in range(20):
                producer.send(Message("other", body))
            log = cluster.folder / "broker-a" / "commitlog"
            first = min(log.iterdir())

            def first_is_gone():
                for path in sorted(log.iterdir())[:-2]:
                    with contextlib.suppress(FileNotFoundError):
                        os.utime(path, (1, 1))
                return not first.exists()

            until(first_is_gone)
            info = metrics(cluster)
            assert int(info["schedule_rolled_total"]) >= 2
            producer.cancel_delayed(dropped)
            with PullConsumer(
                "c", namesrv_addr=cluster.namesrv_addr, consume_from_where="FIRST_OFFSET"
            ) as consumer:
                consumer.subscribe("t")
                (message,) = poll_until(consumer, len)
    assert message.body.startswith(b"late")
    assert message.message_id == late.message_id
    assert message.store_timestamp >= message.deliver_at_ms


def test_the_example_gives_up_what_is_not_paid(cluster, project_root):
    done = subprocess.run(
        [
            sys.executable,
            str(project_root / "examples" / "order_timeout.py"),
            *("--namesrv", cluster.namesrv_addr, "--orders", "6", "--delay", "2"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    states = json.loads(done.stdout.splitlines()[-1])
    assert list(states.values()) == ["given up", "paid"] * 3
