"""Snapshots of running brokers, and brokers started on what was restored."""

from __future__ import annotations

import json

import pytest
from harness.commands import run_command

from mqmesh.message import Message
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.storage.tools.snapshot_reading import Snapshot, verify_snapshot
from mqmesh.testing.processes import ProcessCluster

SETTINGS = {"storage.mapped_file_size_commit_log": str(256 * 1024), "snapshot.keep": "2"}
COUNT = 3_000


def send(cluster, start, stop, topic="orders"):
    with Producer("p", namesrv_addr=cluster.namesrv_addr) as producer:
        for low in range(start, stop, 100):
            producer.send_batch(
                [
                    Message(topic, f"{n} {'x' * 400}".encode(), keys=[f"order-{n}"])
                    for n in range(low, min(low + 100, stop))
                ]
            )


def consume(cluster, most, group="g"):
    """Numbers of so many messages of a group, committed."""
    found = []
    with PullConsumer(
        group, namesrv_addr=cluster.namesrv_addr, consume_from_where="FIRST_OFFSET"
    ) as consumer:
        consumer.subscribe("orders")
        while len(found) < most:
            messages = consumer.poll(5_000)
            assert messages, f"only {len(found)} of {most} messages came"
            found += [int(message.body.split()[0]) for message in messages]
        consumer.commit()
    return found


@pytest.mark.timeout(180)
def test_a_restored_broker_goes_on_where_the_snapshot_ended(short_tmp_path):
    with ProcessCluster(short_tmp_path, broker_settings=SETTINGS) as cluster:
        send(cluster, 0, COUNT)
        done = consume(cluster, COUNT // 2)
        # Committed offsets are saved each 5 s; a clean restart saves them at once.
        cluster.brokers["broker-a"].stop()
        cluster.start_broker()
        cluster.wait_known()
        made = run_command(
            "--namesrv", cluster.namesrv_addr, "snapshot", "create", "broker-a", "--json"
        )
        assert made.code == 0, made.err
        told = json.loads(made.out[0])
        send(cluster, COUNT, COUNT + 500)
        with AdminClient(cluster.namesrv_addr) as admin:
            metrics = admin.runtime_info()["broker-a"]
        assert metrics["snapshots_made_total"] == 1
        assert told["end_offset"] < metrics["store_max_commitlog_offset"]
    path = told["path"]
    report = verify_snapshot(
        Snapshot(short_tmp_path / "snapshots" / path.rpartition("/")[2]), print
    )
    assert report.sound
    assert told["messages"] == report.messages >= COUNT
    listed = run_command("snapshot", "list", str(short_tmp_path / "snapshots"), "--json")
    assert [json.loads(line)["path"] for line in listed.out] == [path]
    assert run_command("snapshot", "verify", path).out[-1:] == ["sound"]
    again = short_tmp_path / "again"
    again.mkdir()
    restored = run_command("snapshot", "restore", path, str(again / "broker-a"))
    assert restored.code == 0, restored.err
    by_key = ("query", "by-key", "order-17", "--topic", "orders", "--json")
    with ProcessCluster(again, broker_settings=SETTINGS) as cluster:
        rest = consume(cluster, COUNT - len(done))
        assert sorted(done + rest) == list(range(COUNT))
        send(cluster, COUNT, COUNT + 100)
        assert sorted(consume(cluster, 100)) == list(range(COUNT, COUNT + 100))
        found = run_command("--namesrv", cluster.namesrv_addr, *by_key)
        while found.code and "not indexed yet" in found.err[0]:
            # The newest part of the index is made again beside everything else.
            found = run_command("--namesrv", cluster.namesrv_addr, *by_key)
        assert found.code == 0, found.err
        assert len(found.out) == 1


@pytest.mark.timeout(120)
def test_each_snapshot_under_load_is_whole_and_only_the_newest_stay(short_tmp_path):
    with ProcessCluster(short_tmp_path, broker_settings=SETTINGS) as cluster:
        ends = []
        with (
            AdminClient(cluster.namesrv_addr) as admin,
            Producer("p", namesrv_addr=cluster.namesrv_addr) as producer,
        ):
            for round_number in range(4):
                waiting = [producer.send_async(Message("orders", bytes(2_000))) for _ in range(300)]
                ends.append(admin.create_snapshot("broker-a").end_offset)
                for one in waiting:
                    one.result(30)
                assert ends == sorted(ends), round_number
        root = short_tmp_path / "snapshots"
        kept = sorted(root.iterdir())
        assert len(kept) == 2
        for path, end in zip(kept, ends[-2:], strict=True):
            snapshot = Snapshot(path)
            assert snapshot.manifest.end_offset == end
            assert verify_snapshot(snapshot, print).sound
