"""Consumer groups: settings, progress, and offsets moved under running consumers."""

from __future__ import annotations

import itertools
import json
import logging
import random
import threading
import time
from collections import Counter

import pytest
from harness.commands import run_command
from harness.patience import until
from harness.stopwatch import Stopwatch

from mqmesh.errors import GroupNotFound, InvalidArgument, OffsetIllegal
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.groups import GroupConfig, ResetWhere
from mqmesh.protocol.route import TopicConfig
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.admin.tracks import TrackClient
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster

PATIENCE_S = 20.0
QUEUES = 4
_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster of two brokers that no test harms."""
    folder = tmp_path_factory.mktemp("c")
    with ProcessCluster(folder, brokers=("broker-a", "broker-b")) as cluster:
        with GroupAdmin(cluster.namesrv_addr) as admin:
            until(lambda: len(_brokers(admin)) == 2)
        yield cluster


@pytest.fixture
def admin(cluster):
    with GroupAdmin(cluster.namesrv_addr) as admin:
        yield admin


@pytest.fixture
def names():
    """A topic and a group that no other test uses."""
    number = next(_numbers)
    return f"topic-{number}", f"group-{number}"


class Listener:
    """Keeps what it gets; waits while it is told to."""

    def __init__(self):
        self.changed = threading.Condition()
        self.bodies: list[bytes] = []
        self.open = threading.Event()
        self.open.set()

    def __call__(self, messages):
        self.open.wait(PATIENCE_S)
        with self.changed:
            self.bodies += [message.body for message in messages]
            self.changed.notify_all()
        return ConsumeResult.SUCCESS

    def wait_for(self, condition):
        """Waits until something is so of the bodies."""
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self.bodies), PATIENCE_S), len(
                self.bodies
            )


def send(cluster, topic, count, start=0, **fields):
    with Producer("producers", namesrv_addr=cluster.namesrv_addr) as producer:
        futures = [
            producer.send_async(Message(topic, b"%d" % number, sharding_key=str(number), **fields))
            for number in range(start, start + count)
        ]
        return [future.result() for future in futures]


def push(cluster, topic, group, listener, *, expression="*", **options):
    options = {
        "consume_from_where": "FIRST_OFFSET",
        "persist_consumer_offset_interval_ms": 100,
        **options,
    }
    consumer = PushConsumer(group, namesrv_addr=cluster.namesrv_addr, **options)
    consumer.subscribe(topic, expression, listener=listener)
    return consumer


def all_bodies(count):
    return {b"%d" % number for number in range(count)}


def make_topic(admin, topic):
    admin.put_topic(TopicConfig(topic, QUEUES, QUEUES))


# ---- Running consumers --------------------------------------------------------------------


def test_a_reset_to_the_first_message_takes_effect_on_running_consumers_at_once(
    cluster, admin, names
):
    topic, group = names
    make_topic(admin, topic)
    send(cluster, topic, 400)
    one, two = Listener(), Listener()
    with push(cluster, topic, group, one), push(cluster, topic, group, two):
        both = lambda: Counter(one.bodies + two.bodies)  # noqa: E731
        until(lambda: set(both()) == all_bodies(400))
        until(lambda: admin.progress(group).lag == 0)
        preview = admin.reset_offset(group, topic, ResetWhere.FIRST, dry_run=True)
        assert (preview.reread, preview.skipped, preview.members_notified) == (400, 0, 2)
        before = sum(both().values())
        watch = Stopwatch()
        done = admin.reset_offset(group, topic, ResetWhere.FIRST)
        assert (done.reread, done.skipped, done.members_notified) == (400, 0, 2)
        until(lambda: sum(both().values()) >= before + 400)
        assert watch.seconds < 5
        until(lambda: admin.progress(group).lag == 0)
        assert sum(both().values()) == before + 400
        assert set(both().values()) == {2}


def test_skipping_drops_what_consumers_hold_and_no_commit_of_before_undoes_it(
    cluster, admin, names
):
    topic, group = names
    make_topic(admin, topic)
    send(cluster, topic, 500)
    got = Listener()
    got.open.clear()
    options = {"consume_thread_count": 2, "pull_threshold_for_queue": 20}
    with push(cluster, topic, group, got, **options) as consumer:
        until(lambda: admin.progress(group).in_flight >= 20)
        assert admin.progress(group).lag == 500
        moves = admin.skip_backlog(group)
        assert moves.skipped == 500
        assert admin.progress(group).lag == 0
        send(cluster, topic, 50, 1_000)
        got.open.set()
        got.wait_for(lambda bodies: {b"%d" % n for n in range(1_000, 1_050)} <= set(bodies))
        until(lambda: admin.progress(group).lag == 0)
        # Only what the listener was at when the backlog was skipped.
        assert len(set(got.bodies) & all_bodies(500)) <= 2
        assert len(consumer.assignment()) == 2 * QUEUES


def test_a_polling_consumer_follows_too_also_one_that_took_its_queues_by_itself(
    cluster, admin, names
):
    topic, group = names
    make_topic(admin, topic)
    send(cluster, topic, 100)
    consumer = PullConsumer(
        group, namesrv_addr=cluster.namesrv_addr, consume_from_where="FIRST_OFFSET"
    )
    with consumer:
        consumer.assign(consumer.queues(topic))
        read = []
        until(lambda: read.extend(consumer.poll(100)) or len(read) == 100)
        consumer.commit()
        assert admin.progress(group).lag == 0
        assert admin.reset_offset(group, topic, ResetWhere.FIRST).members_notified == 0
        again = []
        until(lambda: again.extend(consumer.poll(100)) or len(again) >= 100)
        assert {message.body for message in again} == all_bodies(100)
        consumer.commit()
        until(lambda: admin.progress(group).lag == 0)


def test_members_of_a_broadcasting_group_are_moved_while_they_run(cluster, admin, names, tmp_path):
    topic, group = names
    make_topic(admin, topic)
    send(cluster, topic, 40)
    got = Listener()
    options = {"message_model": "BROADCASTING", "offsets_dir": str(tmp_path)}
    with push(cluster, topic, group, got, **options):
        got.wait_for(lambda bodies: len(bodies) == 40)
        admin.reset_offset(group, topic, ResetWhere.FIRST)
        got.wait_for(lambda bodies: len(bodies) == 80)
        assert_lag_is_unknown(cluster, topic, group)
    assert set(Counter(got.bodies).values()) == {2}
    assert all(one.progress.consumer_offset < 0 for one in admin.progress(group).queues)


def assert_lag_is_unknown(cluster, topic, group):
    """Its member keeps the offsets, so brokers tell no lag; the member tells where it is."""

    def run(*arguments):
        command = run_command("--namesrv", cluster.namesrv_addr, *arguments)
        assert command.code == 0, command.err
        return command

    shown = run("group", "progress", group)
    assert shown.out[-1].startswith("lag unknown; ")
    assert "keep their offsets by themselves" in shown.err[0]
    found = json.loads(run("group", "progress", group, "--json").out[0])
    assert {found["lag"], found["lag_ms"], found["in_flight"]} == {None}
    assert {one["lag"] for one in found["queues"]} == {None}
    rows = json.loads(run("group", "list", "--json").out[0])
    assert [row["lag"] for row in rows if row["group"] == group] == [None]
    assert group not in " ".join(run("group", "list", "--lag-over", "0").out)
    traffic = json.loads(run("topic", "stats", "--all", "--json").out[0])
    assert [row["backlog"] for row in traffic if row["topic"] == topic] == [0]


def test_resets_while_members_come_and_go_neither_lose_nor_repeat(cluster, admin, names):
    topic, group = names
    make_topic(admin, topic)
    send(cluster, topic, 1_000)
    chance, pause, got = random.Random(7), threading.Event(), Listener()
    # Small pulls, so that resets meet consumers in the middle of their work.
    options = {"pull_threshold_for_queue": 50, "pull_max_bytes": 2_000}
    members = [push(cluster, topic, group, got, **options)]
    members[0].start()
    for step in range(16):
        if step % 4 == 1:
            members.append(push(cluster, topic, group, got, **options))
            members[-1].start()
        elif step % 4 == 3:
            members.pop(chance.randrange(len(members))).close()
        else:
            where = chance.choice([ResetWhere.FIRST, ResetWhere.LAST])
            admin.reset_offset(group, topic, where)
        pause.wait(chance.random() / 20)
    # Until here members repeat and leave out what they were told to.
    until(lambda: admin.progress(group).lag == 0)
    got.bodies.clear()
    admin.reset_offset(group, topic, ResetWhere.FIRST)
    until(lambda: set(got.bodies) == all_bodies(1_000))
    until(lambda: admin.progress(group).lag == 0)
    assert len(got.bodies) == 1_000
    for member in members:
        member.close()


# ---- Groups without members ------------------------------------------------------------------


def test_a_group_that_does_not_run_goes_on_where_it_was_sent(cluster, admin, names):
    topic, group = names
    make_topic(admin, topic)
    send(cluster, topic, 60)
    got = Listener()
    with push(cluster, topic, group, got):
        got.wait_for(lambda bodies: set(bodies) == all_bodies(60))
    middle_ms = max(result.store_timestamp for result in [_newest(cluster, topic)]) + 1
    until(lambda: time.time() * 1_000 > middle_ms + 5)
    send(cluster, topic, 40, 60)
    preview = admin.reset_offset(
        group, topic, ResetWhere.TIMESTAMP, timestamp_ms=middle_ms, dry_run=True
    )
    assert (preview.reread, preview.skipped) == (0, 0)
    assert admin.skip_backlog(group).skipped == 40
    moves = admin.reset_offset(group, topic, ResetWhere.TIMESTAMP, timestamp_ms=middle_ms)
    assert (moves.reread, moves.skipped, moves.members_notified) == (40, 0, 0)
    rest = Listener()
    with push(cluster, topic, group, rest):
        rest.wait_for(lambda bodies: len(bodies) >= 40)
    assert sorted(rest.bodies) == sorted(b"%d" % n for n in range(60, 100))


def _newest(cluster, topic):
    with PullConsumer(
        "newest", namesrv_addr=cluster.namesrv_addr, consume_from_where="FIRST_OFFSET"
    ) as consumer:
        consumer.assign(consumer.queues(topic))
        found = []
        until(lambda: found.extend(consumer.poll(100)) or len(found) >= 60)
        return max(found, key=lambda message: message.store_timestamp)


def test_one_queue_goes_to_an_offset_and_no_further_than_it_reaches(cluster, admin, names):
    topic, group = names
    make_topic(admin, topic)
    send(cluster, topic, 200)
    with push(cluster, topic, group, got := Listener()):
        got.wait_for(lambda bodies: set(bodies) == all_bodies(200))
    place = {"queue_id": 1, "broker_name": "broker-b"}
    with pytest.raises(InvalidArgument, match="one queue"):
        admin.reset_offset(group, topic, ResetWhere.OFFSET, queue_offset=3)
    with pytest.raises(OffsetIllegal):
        admin.reset_offset(group, topic, ResetWhere.OFFSET, queue_offset=10_000, **place)
    moves = admin.reset_offset(group, topic, ResetWhere.OFFSET, queue_offset=3, **place)
    (only,) = moves.queues
    assert only.reread == only.change.old_offset - 3
    with PullConsumer(group, namesrv_addr=cluster.namesrv_addr) as consumer:
        assert len(consumer.queues(topic)) == 2 * QUEUES
        assert consumer.committed(MessageQueue(topic, "broker-b", 1)) == 3
        assert admin.progress(group).lag == only.reread


def test_a_group_goes_on_where_another_one_is(cluster, admin, names):
    topic, group = names
    make_topic(admin, topic)
    send(cluster, topic, 100)
    with push(cluster, topic, group, got := Listener()):
        got.wait_for(lambda bodies: set(bodies) == all_bodies(100))
    send(cluster, topic, 30, 100)
    clone = f"{group}-clone"
    assert len(admin.clone_offset(group, clone, dry_run=True).queues) == 2 * QUEUES
    with pytest.raises(GroupNotFound):
        admin.progress(clone)
    admin.clone_offset(group, clone)
    with push(cluster, topic, clone, rest := Listener()):
        rest.wait_for(lambda bodies: len(bodies) >= 30)
    assert sorted(rest.bodies) == sorted(b"%d" % n for n in range(100, 130))
    assert admin.progress(group).lag == 30


# ---- Who is in a group, and how far it is ---------------------------------------------------


def test_lag_is_told_in_messages_and_in_time(cluster, admin, names):
    topic, group = names
    make_topic(admin, topic)
    with push(cluster, topic, group, got := Listener()) as consumer:
        send(cluster, topic, 100)
        got.wait_for(lambda bodies: set(bodies) == all_bodies(100))
        until(lambda: admin.progress(group).lag == 0)
        live = admin.progress(group)
        assert (live.members, live.message_model, live.lag_ms) == (1, "CLUSTERING", 0)
        ours = [one for one in live.queues if one.progress.topic == topic]
        assert len(ours) == 2 * QUEUES
        assert {one.progress.client_id for one in ours} == {consumer.client_id}
        assert until(lambda: admin.progress(group).consume_tps) > 0
    send(cluster, topic, 25, 100)
    left = until(lambda: (p := admin.progress(group)).members == 0 and p)
    assert left.lag == 25
    assert 0 < left.lag_ms < 60_000
    first = left.lag_ms
    assert until(lambda: admin.progress(group).lag_ms > first)
    summary = admin.groups(group)["broker-a"][0]
    assert topic in summary.topics
    assert group in admin.topic_consumers(topic)


def test_a_member_that_subscribes_differently_is_warned_and_the_admin_sees_it(
    cluster, admin, names, caplog
):
    topic, group = names
    make_topic(admin, topic)
    send(cluster, topic, 10, tag="a")
    with (
        caplog.at_level(logging.WARNING, "mqmesh.sdk"),
        push(cluster, topic, group, Listener(), expression="a || b"),
        push(cluster, topic, group, Listener(), expression="b||a"),
    ):
        assert "subscribes differently" not in caplog.text
        with push(cluster, topic, group, Listener(), expression="a") as other:
            until(lambda: "subscribes differently" in caplog.text)
            assert f"member {other.client_id} subscribes differently" in caplog.text
            assert f"topic {topic}: 'a' instead of 'a || b'" in caplog.text
            assert caplog.text.count("subscribes differently") == 1
            members = admin.connections(group)
            assert [bool(one.difference) for one in members].count(True) == 1
            assert admin.progress(group).differing == 1
            command = run_command("--namesrv", cluster.namesrv_addr, "group", "connections", group)
            assert command.code == 0
            assert any("subscribes differently" in line for line in command.err)
        until(lambda: admin.progress(group).differing == 0)


def test_settings_and_offsets_survive_a_kill_of_the_broker(short_tmp_path, names):
    topic, group = names
    settings = {"auto_create_subscription_group": "false"}
    with (
        ProcessCluster(short_tmp_path, broker_settings=settings) as cluster,
        GroupAdmin(cluster.namesrv_addr) as admin,
    ):
        until(lambda: _brokers(admin))
        make_topic(admin, topic)
        send(cluster, topic, 50)
        with push(cluster, topic, group, Listener(), start_timeout_ms=300) as stranger:
            assert until(lambda: stranger.assignment() == [])
        with pytest.raises(GroupNotFound):
            admin.progress(group)
        admin.create_group(GroupConfig(group, retry_max_times=3))
        with push(cluster, topic, group, got := Listener()):
            got.wait_for(lambda bodies: len(bodies) == 50)
            until(lambda: admin.progress(group).lag == 0)
        admin.reset_offset(group, topic, ResetWhere.FIRST)
        cluster.brokers["broker-a"].kill()
        cluster.start_broker("broker-a")
        until(lambda: "broker-a" in _brokers(admin))
        assert admin.groups(group)["broker-a"][0].config == GroupConfig(group, retry_max_times=3)
        assert admin.progress(group).lag == 50


def _brokers(admin):
    return {broker.broker_name for broker in admin.cluster().brokers}


# ---- What happened to a message ---------------------------------------------------------------


def test_what_each_group_did_about_a_message(cluster, admin, names, tmp_path):
    topic, group = names
    make_topic(admin, topic)
    with Producer("producers", namesrv_addr=cluster.namesrv_addr) as producer:
        sent = producer.send(Message(topic, b"1", tag="a"))
        last = producer.send(Message(topic, b"2", tag="a"), queue=sent.message_queue)
    held = Listener()
    # What a filter passes over is told when a waiting pull ends.
    quick = {"broker_suspend_max_time_ms": 200}
    broadcasting = {"message_model": "BROADCASTING", "offsets_dir": str(tmp_path)}
    with (
        TrackClient(cluster.namesrv_addr) as client,
        push(cluster, topic, f"{group}-all", everything := Listener()),
        push(cluster, topic, f"{group}-b", Listener(), expression="b", **quick),
        push(cluster, topic, f"{group}-held", held) as holder,
        push(cluster, topic, f"{group}-cast", Listener(), **broadcasting),
    ):
        held.open.clear()
        everything.wait_for(lambda bodies: len(bodies) == 2)

        def states(message_id):
            found = client.track(message_id)
            return {one.group.removeprefix(group): one for one in found.tracks}

        wanted = {"-all": "CONSUMED", "-b": "FILTERED", "-cast": "UNKNOWN"}
        until(
            lambda: (
                wanted.items() <= {n: t.state for n, t in states(last.message_id).items()}.items()
            )
        )
        found = states(last.message_id)
        assert found["-all"].members == 1
        assert found["-held"].state in ("CONSUMED", "IN_FLIGHT")
        if found["-held"].state == "IN_FLIGHT":
            assert found["-held"].client_id == holder.client_id
        held.open.set()
    admin.reset_offset(f"{group}-all", topic, ResetWhere.FIRST)
    track = TrackClient(cluster.namesrv_addr)
    with track:
        (one,) = [t for t in track.track(last.message_id).tracks if t.group == f"{group}-all"]
        assert (one.state, one.messages_before, one.members) == ("WAITING", 1, 0)
        assert track.track("0" * 32).copies == []
    command = run_command(
        "--namesrv", cluster.namesrv_addr, "query", "track", last.message_id, "--json"
    )
    assert command.code == 0
    assert '"state":"WAITING"' in command.out[0]
    assert run_command("--namesrv", cluster.namesrv_addr, "query", "track", "0" * 32).code == 1


def test_an_ordered_group_is_moved_too_and_stays_in_order(cluster, admin, names):
    topic, group = names
    make_topic(admin, topic)
    send(cluster, topic, 200)
    seen: dict[MessageQueue, list[int]] = {}
    lock = threading.Lock()

    def listen(messages):
        with lock:
            for message in messages:
                seen.setdefault(message.message_queue, []).append(message.queue_offset)
        return ConsumeResult.SUCCESS

    consumer = push(cluster, topic, group, listen, consume_orderly=True)
    with consumer:
        until(lambda: sum(map(len, seen.values())) == 200)
        until(lambda: admin.progress(group).lag == 0)
        admin.reset_offset(group, topic, ResetWhere.FIRST)
        until(lambda: sum(map(len, seen.values())) == 400)
        until(lambda: admin.progress(group).lag == 0)
    for offsets in seen.values():
        half = len(offsets) // 2
        assert offsets == [*range(half), *range(half)]


def test_the_command_line_from_creation_to_deletion(cluster, admin, names):
    topic, group = names
    make_topic(admin, topic)

    def run(*arguments, code=0):
        command = run_command("--namesrv", cluster.namesrv_addr, "group", *arguments)
        assert command.code == code, command.err
        return command

    run("create", group, "--retry-max-times", "5")
    assert "exists already" in run("create", group, code=1).err[0]
    assert len(json.loads(run("create", group, "--if-missing", "--json").out[0])["brokers"]) == 2
    run("update", group, "--retry-max-times", "7")
    assert admin.groups(group)["broker-b"][0].config.retry_max_times == 7
    send(cluster, topic, 30)
    with push(cluster, topic, group, got := Listener()):
        got.wait_for(lambda bodies: len(bodies) == 30)
        assert any("connected" in line for line in run("connections", group).out)
        listed = json.loads(run("list", "--json").out[0])
        (row,) = [row for row in listed if row["group"] == group]
        assert (row["members"], row["topics"]) == (1, [topic])
    until(lambda: admin.progress(group).members == 0)
    shown = run("progress", group).out
    assert shown[-1].startswith("lag 0 messages")
    preview = run("reset-offset", group, "-t", topic, "--to-first", "--dry-run").out
    assert preview[-1].startswith(f"group {group} would read 30 messages again")
    assert json.loads(run("progress", group, "--json").out[0])["lag"] == 0
    run("reset-offset", group, "-t", topic, "--to-first", "--yes")
    run("clone-offset", group, f"{group}-2", "--yes")
    done = json.loads(run("skip", group, "--yes", "--json").out[0])
    assert (done["skipped"], done["dry_run"]) == (30, False)
    assert json.loads(run("progress", f"{group}-2", "--json").out[0])["lag"] == 30
    run("delete", group, "--with-topics", "--yes")
    assert "no consumer group" in run("progress", group, code=1).err[0]


def test_what_failed_is_tracked_to_its_retries_and_to_the_dead_letters(cluster, admin, names):
    topic, group = names
    make_topic(admin, topic)
    with Producer("producers", namesrv_addr=cluster.namesrv_addr) as producer:
        sent = producer.send(Message(topic, b"1"))

    def fail(messages):
        raise ValueError("no such order")

    admin.create_group(GroupConfig(f"{group}-strict", retry_max_times=0))
    with (
        TrackClient(cluster.namesrv_addr) as client,
        push(cluster, topic, group, fail),
        push(cluster, topic, f"{group}-strict", fail),
    ):

        def tracks():
            found = client.track(sent.message_id).tracks
            return {one.group: one for one in found if one.state in ("RETRYING", "DEAD")}

        found = until(lambda: len(both := tracks()) == 2 and both)
    late, dead = found[group], found[f"{group}-strict"]
    assert (late.state, late.reconsume_times, dead.state) == ("RETRYING", 1, "DEAD")
    assert late.due_ms > sent_ms(client_copies(cluster, sent.message_id))
    assert "ValueError: no such order" in late.last_failure
    assert "ValueError: no such order" in dead.last_failure
    assert admin.progress(f"{group}-strict").dead == 1
    assert admin.progress(group).dead == 0
    with TrackClient(cluster.namesrv_addr) as client:
        shown = client.by_id(sent.message_id)
        assert {one.info.topic for one in shown.messages} == {topic, f"%DLQ%{group}-strict"}
        assert shown.hidden == 1


def client_copies(cluster, message_id):
    with TrackClient(cluster.namesrv_addr) as client:
        return client.by_id(message_id, with_system=True).messages


def sent_ms(copies):
    return min(one.store_timestamp for one in copies)
