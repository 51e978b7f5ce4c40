"""A monitor beside a real cluster."""

from __future__ import annotations

import json
import signal

from harness.commands import CommandProcess, run_command

from mqmesh.message import Message
from mqmesh.protocol.membership import ConsumeFromWhere


def test_messages_that_wait_for_nobody_are_an_alarm_until_they_are_read(mqmesh_cluster):
    topic, group = mqmesh_cluster.topic(queues=1), mqmesh_cluster.group()
    producer = mqmesh_cluster.producer()

    def read() -> list[bytes]:
        options = {"consume_from_where": ConsumeFromWhere.FIRST_OFFSET}
        with mqmesh_cluster.pull_consumer(group, **options) as consumer:
            consumer.subscribe(topic)
            found = [one.body for one in consumer.poll(10_000)]
            consumer.commit()
        return found

    producer.send(Message(topic, b"read"))
    assert read() == [b"read"]
    producer.send(Message(topic, b"unread"))

    namesrv = f"namesrv_addr={json.dumps([mqmesh_cluster.namesrv_addr])}"

    def mine() -> list[str]:
        done = run_command("monitor", "--once", "--json", "--set", namesrv)
        alarms = json.loads("".join(done.out))
        assert done.code == bool(alarms)
        return [one["alarm"] for one in alarms if one["labels"].get("consumer_group") == group]

    assert mine() == ["group-without-members"]
    head, *rows = run_command("monitor", "--once", "--set", namesrv).out
    assert head.split()[:3] == ["SINCE", "SEVERITY", "ALARM"]
    (row,) = (row for row in rows if group in row)
    assert row.split()[1:3] == ["warning", "group-without-members"]
    assert read() == [b"unread"]
    assert mine() == []


def test_a_monitor_watches_until_it_is_stopped(mqmesh_cluster, short_tmp_path):
    path, state = short_tmp_path / "monitor.toml", short_tmp_path / "state.json"
    path.write_text(
        f'namesrv_addr = ["{mqmesh_cluster.namesrv_addr}", "127.0.0.1:1"]\n'
        f'timeout_ms = 100\nstate_file = "{state}"\n'
        '[[rule]]\nalarm = "process-down"\nfor_s = 0\n'
    )
    with CommandProcess("monitor", "-c", str(path)) as monitor:
        monitor.expect(r"process-down \(critical\): namesrv 127.0.0.1:1 does not answer")
        monitor.send_signal(signal.SIGTERM)
        assert monitor.wait() == 0
    assert b"process-down" in state.read_bytes()


def test_a_command_that_watches_asks_the_name_servers_that_others_ask():
    nobody = "127.0.0.1:1"
    for arguments in ("--namesrv", nobody, "monitor"), ("monitor", "--namesrv", nobody):
        told = run_command(*arguments, "--once", "--json")
        (alarm,) = json.loads(told.out[0])
        assert (alarm["alarm"], alarm["labels"]["node_id"]) == ("process-down", nobody)
    settled = ("--set", 'namesrv_addr=["127.0.0.1:2"]', "--once", "--json")
    (alarm,) = json.loads(run_command("monitor", "--namesrv", nobody, *settled).out[0])
    assert alarm["labels"]["node_id"] == "127.0.0.1:2", "settings stand above it"
