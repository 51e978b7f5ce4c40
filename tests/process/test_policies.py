"""Policies of consumer groups, as real processes keep them."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter

import pytest
from harness.failovers import GROUP, ElectedGroup
from harness.patience import until

from mqmesh.cli import main
from mqmesh.errors import MQMeshError
from mqmesh.message import PROPERTY_DLQ_ORIGIN_TOPIC, Message
from mqmesh.protocol.groups import GroupConfig
from mqmesh.roles.exporter.names import numbers
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster, RoleProcess

_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster that no test harms."""
    settings = {"default_topic_queue_nums": "4"}
    with ProcessCluster(tmp_path_factory.mktemp("c"), broker_settings=settings) as cluster:
        cluster.start_schedule()
        yield cluster


@pytest.fixture
def names():
    """A topic and a group that no other test uses."""
    number = next(_numbers)
    return f"policy-topic-{number}", f"policy-group-{number}"


class Kept:
    """A listener that keeps what comes and when, and fails the first tries of each message."""

    def __init__(self, failures=0):
        self.times: dict[bytes, list[float]] = {}
        self.order: list[bytes] = []
        self._failures = failures
        self._tries: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    def __call__(self, messages):
        for message in messages:
            with self._lock:
                self.order.append(message.body)
                self.times.setdefault(message.body, []).append(time.monotonic())
                self._tries[message.body] += 1
                tries = self._tries[message.body]
            if tries <= self._failures:
                raise ValueError("planned")


def send(namesrv, topic, count=1, body=b"m"):
    with Producer("producers", namesrv_addr=namesrv) as producer:
        for number in range(count):
            producer.send_async(Message(topic, b"%b%d" % (body, number)))


def consume(namesrv, group, *topics, listener, **options):
    consumer = PushConsumer(
        group, namesrv_addr=namesrv, consume_from_where="FIRST_OFFSET", **options
    )
    for topic in topics:
        consumer.subscribe(topic, listener=listener)
    return consumer


def number(namesrv, name):
    with GroupAdmin(namesrv) as admin:
        return sum(one.number(name) for one in admin.runtime_info().values())


def paused_groups(namesrv):
    with GroupAdmin(namesrv) as admin:
        (readings,) = admin.runtime_info().values()
    return dict(numbers(readings, "group_paused"))


def run(capsys, cluster, *arguments):
    capsys.readouterr()
    assert main.main([*arguments, "--namesrv", cluster.namesrv_addr, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_schedule_of_retries_is_kept(cluster, names, capsys):
    topic, group = names
    made = run(capsys, cluster, "group", "create", group, "--retry-delays", "1s 2s")
    assert made["brokers"][0]["retry_delays"] == "1s 2s"
    listener = Kept(failures=3)
    with consume(cluster.namesrv_addr, group, topic, listener=listener):
        send(cluster.namesrv_addr, topic)
        until(lambda: len(listener.times.get(b"m0", ())) == 4)
    first, second, third, fourth = listener.times[b"m0"]
    # By the levels of the broker it would be 10, 30 and 60 s.
    assert second - first >= 0.99
    assert third - second >= 1.99
    assert fourth - third >= 1.99
    assert fourth - first < 60


def test_dead_letters_go_where_the_group_says(cluster, names):
    topic, group = names
    with GroupAdmin(cluster.namesrv_addr) as admin:
        admin.create_group(GroupConfig(group, retry_max_times=0, dead_letter=f"{topic}-dead"))
    failing, dead = Kept(failures=1), []
    with (
        consume(cluster.namesrv_addr, group, topic, listener=failing),
        consume(cluster.namesrv_addr, f"{group}-dead", f"{topic}-dead", listener=dead.extend),
    ):
        send(cluster.namesrv_addr, topic)
        until(lambda: dead)
        (letter,) = dead
        assert (letter.body, letter.property(PROPERTY_DLQ_ORIGIN_TOPIC)) == (b"m0", topic)
        dropped = number(cluster.namesrv_addr, "dropped_dead_letters_total")
        with GroupAdmin(cluster.namesrv_addr) as admin:
            admin.put_group(GroupConfig(group, retry_max_times=0, dead_letter="drop"))
        send(cluster.namesrv_addr, topic, body=b"n")
        until(lambda: number(cluster.namesrv_addr, "dropped_dead_letters_total") == dropped + 1)
    assert [letter.body for letter in dead] == [b"m0"]


def test_a_paused_group_gets_nothing_and_goes_on_when_it_is_resumed(cluster, names, capsys):
    topic, group = names
    listener = Kept()
    run(capsys, cluster, "group", "create", group)
    with consume(cluster.namesrv_addr, group, topic, listener=listener):
        send(cluster.namesrv_addr, topic, 10, b"before")
        until(lambda: len(listener.order) == 10)
        paused = run(capsys, cluster, "group", "pause", group, "--until", "2h")
        assert paused["brokers"][0]["paused_until"] > time.time() * 1_000 + 7_000_000
        held = number(cluster.namesrv_addr, "pulls_held_back_total")
        send(cluster.namesrv_addr, topic, 100, b"during")
        until(lambda: number(cluster.namesrv_addr, "held_back_pulls") >= 4)
        assert paused_groups(cluster.namesrv_addr) == {(group,): 1}
        assert number(cluster.namesrv_addr, "pulls_held_back_total") >= held
        assert len(listener.order) == 10
        run(capsys, cluster, "group", "resume", group)
        until(lambda: len(listener.order) == 110)
    assert (group,) not in paused_groups(cluster.namesrv_addr)


def test_a_pause_of_one_topic_leaves_the_others_alone(cluster, names, capsys):
    topic, group = names
    listener = Kept()
    run(capsys, cluster, "group", "create", group)
    run(capsys, cluster, "group", "pause", group, "--topic", topic)
    with consume(cluster.namesrv_addr, group, topic, f"{topic}-b", listener=listener):
        send(cluster.namesrv_addr, topic, body=b"paused")
        send(cluster.namesrv_addr, f"{topic}-b", 20, b"other")
        until(lambda: len(listener.order) == 20)
        assert b"paused0" not in listener.order
        run(capsys, cluster, "group", "resume", group, "--topic", topic)
        until(lambda: b"paused0" in listener.order)


def test_a_rate_is_kept(cluster, names):
    topic, group = names
    with GroupAdmin(cluster.namesrv_addr) as admin:
        admin.create_group(GroupConfig(group, max_messages_per_s=200))
    send(cluster.namesrv_addr, topic, 1_200)
    listener = Kept()
    begun = time.monotonic()
    with consume(cluster.namesrv_addr, group, topic, listener=listener):
        until(lambda: len(listener.order) >= 1_200)
    took_s = max(last for (last,) in listener.times.values()) - begun
    # A second's worth is there at first. A slow machine may take longer.
    assert took_s >= 0.9 * (1_200 - 200) / 200
    assert len(listener.times) == 1_200


def test_a_group_has_its_policies_after_a_failover(short_tmp_path):
    group = ElectedGroup(short_tmp_path)
    try:
        namesrv = group.namesrv.endpoint
        group.admin.create_topic("t")
        config = GroupConfig(
            "billing",
            retry_max_times=1,
            retry_delays="1s",
            dead_letter="t-dead",
            max_messages_per_s=100,
        )
        with GroupAdmin(namesrv) as admin:
            admin.create_group(config)
            (paused,) = admin.pause_group("billing").values()
        send(namesrv, "t", 50)
        master = group.master()
        group.replicas[master].kill()
        until(lambda: group.master() not in (0, master))
        schedule = RoleProcess(
            "schedule",
            {
                "broker_name": GROUP,
                "namesrv_addr": f'["{namesrv}"]',
                "store_path_root_dir": str(short_tmp_path / "schedule"),
                "retry_ms": "50",
            },
            short_tmp_path / "schedule.log",
        )
        try:
            with GroupAdmin(namesrv) as admin:
                ((summary,),) = admin.groups("billing").values()
                assert summary.config == paused
            listener, dead = Kept(failures=2), []
            with (
                consume(namesrv, "billing", "t", listener=listener),
                consume(namesrv, "undertaker", "t-dead", listener=dead.extend),
            ):
                until(lambda: number(namesrv, "held_back_pulls") >= 1)
                assert listener.order == []
                with GroupAdmin(namesrv) as admin:
                    assert list(admin.resume_group("billing").values()) == [config]
                until(lambda: len(dead) == 50)
            for tries in listener.times.values():
                assert tries[1] - tries[0] >= 0.99
        finally:
            schedule.stop()
    finally:
        group.close()


def test_readers_see_the_newest_messages_of_a_topic_only(cluster, names, capsys):
    topic, group = names
    capsys.readouterr()
    made = ["topic", "create", topic, "--queues", "1", "--retention-messages", "20"]
    assert main.main([*made, "--namesrv", cluster.namesrv_addr]) == 0
    assert "shows the last 20 messages of a queue" in capsys.readouterr().out
    send(cluster.namesrv_addr, topic, 100)
    listener = Kept()
    with consume(cluster.namesrv_addr, group, topic, listener=listener):
        until(lambda: b"m99" in listener.order)
        assert sorted(listener.order) == sorted(b"m%d" % number for number in range(80, 100))
        # A group that is behind goes on at the first one that it may see.
        run(capsys, cluster, "group", "pause", group)
        until(lambda: number(cluster.namesrv_addr, "held_back_pulls") >= 1)
        send(cluster.namesrv_addr, topic, 50, b"n")
        run(capsys, cluster, "group", "resume", group)
        until(lambda: b"n49" in listener.order)
        assert sorted(listener.order[20:]) == sorted(b"n%d" % number for number in range(30, 50))
        until(lambda: run(capsys, cluster, "group", "progress", group)["lag"] == 0)


def test_messages_are_tried_against_the_schema_of_their_topic(cluster, names, capsys, tmp_path):
    topic, _ = names
    file = tmp_path / "order.json"
    file.write_text('{"type": "object", "properties": {"id": {"type": "integer"}}}')
    with Producer("producers", namesrv_addr=cluster.namesrv_addr) as producer:
        producer.send(Message(topic, b'{"id": 1}'))
        wrong = producer.send(Message(topic, b'{"id": "one"}'))
    run(capsys, cluster, "topic", "update", topic, "--schema", str(file))
    assert run(capsys, cluster, "topic", "schema", topic)["schema"] == file.read_text()
    code = main.main(["topic", "check", topic, "--namesrv", cluster.namesrv_addr, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["looked"]) == (1, 2)
    assert [(one["message_id"], one["reason"]) for one in found["misfits"]] == [
        (wrong.message_id, "$.id is string, not integer")
    ]
    file.write_text("")
    run(capsys, cluster, "topic", "update", topic, "--schema", str(file))
    assert main.main(["topic", "check", topic, "--namesrv", cluster.namesrv_addr]) == 2
    assert "has no schema" in capsys.readouterr().err


def test_what_makes_no_sense_is_refused_by_brokers_and_before(cluster, names):
    _, group = names
    with GroupAdmin(cluster.namesrv_addr) as admin:
        with pytest.raises(MQMeshError, match="retry_delays 'soon'"):
            admin.create_group(GroupConfig(group, retry_delays="soon"))
        assert group not in {one.config.group for found in admin.groups().values() for one in found}
