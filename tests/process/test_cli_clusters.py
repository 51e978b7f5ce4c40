"""Commands for clusters, files and terminals, on a running cluster."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time

import pytest

from mqmesh.cli import main
from mqmesh.message import Message, dlq_topic
from mqmesh.protocol.groups import GroupConfig
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.dead_letters import DeadLetterClient
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster

PATIENCE_S = 40


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("c")
    with ProcessCluster(folder, brokers=("broker-a", "broker-b")) as cluster:
        cluster.start_schedule("broker-a")
        cluster.start_schedule("broker-b")
        yield cluster


@pytest.fixture(autouse=True)
def environment(cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("MQMESH_NAMESRV", cluster.namesrv_addr)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.fixture
def run(capsys):
    """Run a command with --json; returns exit code, decoded lines, decoded lines of errors."""

    def run(*arguments):
        code = main.main([*arguments, "--json"])
        out, err = capsys.readouterr()
        return code, *([json.loads(line) for line in text.splitlines()] for text in (out, err))

    return run


@pytest.fixture
def topic(cluster, request):
    name = "cli." + request.node.name[5:100].replace("[", "-").replace("]", "")
    with AdminClient(cluster.namesrv_addr) as admin:
        admin.create_topic(name, queues=2)
    return name


def test_a_cluster_that_up_did_not_start_is_listed(run, cluster, capsys):
    code, (rows,), err = run("cluster", "list")
    assert (code, err) == (0, [])
    brokers = [row for row in rows if row["role"] == "broker"]
    assert [(row["name"], row["state"]) for row in brokers] == [
        ("broker-a", "running"),
        ("broker-b", "running"),
    ]
    assert {row["pid"] for row in brokers} == {one.pid for one in cluster.brokers.values()}
    assert all(row["state"] == "running" for row in rows)
    assert main.main(["cluster", "list"]) == 0
    assert "broker-b" in capsys.readouterr().out


def test_a_name_server_tells_its_metrics(cluster):
    with AdminClient(cluster.namesrv_addr) as admin:
        told = admin.role_info(cluster.namesrv_addr.split(",")[0])
        carried = len(admin.topics())
    assert (told["broker_groups"], told["drained_brokers"]) == (2, 0)
    assert told["topics"] == carried


def test_a_broker_is_shown(run, cluster, capsys):
    code, (found,), _ = run("broker", "show", "broker-b")
    assert code == 0
    assert found["members"][0]["pid"] == cluster.brokers["broker-b"].pid
    metrics = found["metrics"]
    assert metrics["schedule_service"]["value"] == "on"
    assert metrics["index_lag_bytes"]["rocketmq_name"] == "rocketmq_storage_dispatch_behind_bytes"
    asked = {one["labels"]["request_code"] for one in metrics["command_requests_total"]["values"]}
    assert "open_schedule" in asked
    assert main.main(["broker", "show", "broker-b"]) == 0
    assert "schedule_service" in capsys.readouterr().out
    code, out, err = run("broker", "show", "broker-x")
    assert (code, out) == (1, [])
    assert err[0]["error"] == "no broker group 'broker-x'; there are broker-a, broker-b"


def test_fewer_queues_hide_no_unread_message_unasked(run, cluster, topic):
    name = topic + "-few"
    run("topic", "create", name, "--queues", "4", "--broker", "broker-a")
    with Producer("p", namesrv_addr=cluster.namesrv_addr) as producer:
        for _ in range(4):
            producer.send_batch([Message(name, b"x")] * 5)

    def update(*options):
        code, out, err = run("topic", "update", name, *options)
        queues = [(one["read_queue_nums"], one["write_queue_nums"]) for one in out[0]["brokers"]]
        return code, queues, " ".join(str(one) for one in err)

    code, queues, err = update("--queues", "2")
    assert (code, queues) == (0, [(4, 2)])
    assert "10 unread messages on broker-a would be hidden: its read queues stay 4" in err
    for wanted in (["--read-queues", "2"], ["--perm", "none"]):
        code, out, (err,) = run("topic", "update", name, *wanted)
        assert (code, out) == (2, [])
        hidden = 10 if "2" in wanted else 20
        assert f"this hides {hidden} unread messages of topic {name}; add --yes" in err["error"]
    assert update("--read-queues", "2", "--yes") == (0, [(2, 2)], "")
    assert update("--queues", "4") == (0, [(4, 4)], "")
    with GroupAdmin(cluster.namesrv_addr) as admin:
        admin.create_group(GroupConfig("g-few"))
        admin.skip_backlog("g-few", name)
    assert update("--queues", "2") == (0, [(2, 2)], ""), "all groups have read the others"


def test_what_was_there_with_other_settings_is_said(run, topic):
    code, (done,), (err,) = run("topic", "create", topic, "--queues", "8", "--if-missing")
    assert (code, done["brokers"][0]["read_queue_nums"]) == (0, 2)
    assert "was left as it was on broker-a, broker-b" in str(err)
    assert run("topic", "create", topic, "--if-missing")[2] == []


def test_a_topic_on_one_broker_only(run, topic):
    name = topic + "-one"
    _, (done,), _ = run("topic", "create", name, "--broker", "broker-b", "--queues", "3")
    assert [one["broker_name"] for one in done["brokers"]] == ["broker-b"]
    _, (route,), _ = run("topic", "route", name)
    (queue,) = route["queues"]
    assert (queue["cluster_name"], queue["broker_name"]) == ("DefaultCluster", "broker-b")
    _, (found,), _ = run("topic", "list", "--broker", "broker-a")
    assert name not in {one["topic"] for one in found}
    _, (found,), _ = run("topic", "list", "--cluster", "DefaultCluster", "--consumers")
    assert {"topic": name, "brokers": done["brokers"], "groups": []} in found
    code, _, err = run("topic", "list", "--cluster", "other")
    assert (code, err) == (2, [{"error": "there is no cluster 'other'; there are DefaultCluster"}])

    _, (shares,), _ = run("topic", "allocate", name, "--members", "b,a")
    assert [(one["client_id"], len(one["queues"])) for one in shares] == [("a", 2), ("b", 1)]
    assert run("topic", "delete", name, "--broker", "broker-a", "--yes")[0] == 1
    code, _, err = run("topic", "create", name, "--broker", "broker-x")
    assert (code, "there are broker-a, broker-b" in err[0]["error"]) == (1, True)
    _, (done,), _ = run("topic", "delete", name, "--broker", "broker-b", "--yes")
    assert done["deleted_from"] == ["broker-b"]


def test_groups_that_are_far_behind_are_listed(run, cluster, topic):
    with Producer("p", namesrv_addr=cluster.namesrv_addr) as producer:
        for _ in range(3):
            producer.send(Message(topic, b"x"))
    assert run("consume", topic, "--group", "behind", "--from", "first", "-n", "1")[0] == 0
    _, (found,), _ = run("group", "list", "--lag-over", "1")
    assert [(one["group"], one["lag"]) for one in found] == [("behind", 2)]
    assert run("group", "list", "--lag-over", "2")[1] == [[]]
    _, (found,), _ = run("topic", "list", "--consumers")
    assert {one["topic"]: one["groups"] for one in found}[topic] == ["behind"]


def test_test_messages_reach_every_queue_and_every_broker(run, topic, capsys):
    code, found, _ = run("topic", "probe", topic, "--count", "5")
    assert code == 0
    queues = [(one["broker_name"], one["queue_id"]) for one in found]
    assert queues == [
        ("broker-a", 0),
        ("broker-a", 1),
        ("broker-b", 0),
        ("broker-b", 1),
        ("broker-a", 0),
    ]
    assert {one["status"] for one in found} == {"SEND_OK"}
    code, found, _ = run("cluster", "probe", "--max", "2", "--interval", "0")
    assert [one["broker_name"] for one in found] == ["broker-a", "broker-b"] * 2
    assert all(one["took_ms"] > 0 for one in found)
    code, found, _ = run("broker", "probe", "broker-b", "--count", "3")
    assert (code, [one["broker_name"] for one in found]) == (0, ["broker-b"] * 3)
    assert main.main(["broker", "probe", "broker-a"]) == 0
    assert "10 messages, 0 failed" in capsys.readouterr().out
    code, _, err = run("topic", "probe", "no-such-topic")
    assert (code, len(err)) == (1, 1)


def test_small_texts_are_kept_by_namespace(run, cluster):
    code, (done,), _ = run("kv", "put", "shop", "currency", "EUR")
    assert (code, done) == (0, {"namesrvs": [cluster.namesrv_addr], "silent_namesrvs": []})
    assert run("kv", "get", "shop", "currency")[1] == [
        {"namespace": "shop", "key": "currency", "value": "EUR"}
    ]
    assert run("kv", "list")[1] == run("kv", "list", "shop")[1] == [{"shop": {"currency": "EUR"}}]
    assert run("kv", "delete", "shop", "currency", "--yes")[0] == 0
    assert run("kv", "list")[1] == [{}]
    gone = "there is no key 'currency' in namespace 'shop'"
    assert run("kv", "delete", "shop", "currency", "--yes") == (1, [], [{"error": gone}])
    code, _, err = run("kv", "get", "shop", "currency")
    assert (code, "does not exist" in err[0]["error"]) == (1, True)


def test_producers_leave_a_broker_that_is_drained(run, cluster, topic):
    code, (done,), _ = run("broker", "drain", "broker-b", "--yes")
    assert (code, done["broker_name"], done["silent_namesrvs"]) == (0, "broker-b", [])

    def perms():
        _, (route,), _ = run("topic", "route", topic)
        return {one["broker_name"]: one["perm"] for one in route["queues"]}

    try:
        assert perms() == {"broker-a": "rw", "broker-b": "r"}
        with Producer("p", namesrv_addr=cluster.namesrv_addr) as producer:
            sent = [producer.send(Message(topic, b"x")) for _ in range(8)]
        assert {one.message_queue.broker_name for one in sent} == {"broker-a"}
    finally:
        code, _, _ = run("broker", "undrain", "broker-b")
    assert code == 0
    assert perms() == {"broker-a": "rw", "broker-b": "rw"}
    code, _, (err,) = run("broker", "drain", "broker-x", "--yes")
    assert code == 1
    assert "no broker group 'broker-x'; there are broker-a, broker-b" in err["error"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("topic", "stats", "no-such-topic"),
        ("topic", "stats", "a/b"),
        ("topic", "stats"),
        ("topic", "nonsense"),
        ("nonsense",),
        ("consume", "t", "--queue", "x"),
        ("group", "show", "no-such-group"),
        ("dlq", "purge", "g"),
        ("query", "by-id", "x"),
        ("send", "t", "x", "--delay", "soon"),
        ("--namesrv", "nonsense", "topic", "list"),
    ],
)
def test_errors_are_json_where_answers_are(run, arguments):
    code, out, err = run(*arguments)
    assert code in (1, 2)
    assert out == []
    assert [list(line) for line in err] == [["error"]]


def test_json_goes_to_the_file_while_a_bar_is_drawn_on_the_terminal(cluster, topic, tmp_path):
    leader, terminal = pty.openpty()
    file = tmp_path / "sent.jsonl"
    try:
        with file.open("wb") as out:
            done = subprocess.run(
                [sys.executable, "-m", "mqmesh.cli", "send", topic, "x", "-n", "3000", "--json"],
                stdin=terminal,
                stdout=out,
                stderr=terminal,
                env=os.environ | {"TERM": "xterm"},
                timeout=PATIENCE_S,
                check=False,
            )
        drawn = os.read(leader, 100_000)
    finally:
        os.close(leader)
        os.close(terminal)
    assert done.returncode == 0
    sent = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({one["message_id"] for one in sent}) == 3_000
    assert b"sending" in drawn
    assert b"message_id" not in drawn


def test_messages_are_sent_for_later(run, topic):
    now_ms = time.time_ns() // 1_000_000
    assert run("send", topic, "later", "--delay", "1h")[0] == 0
    assert run("send", topic, "then", "--deliver-at", "2090-01-01T00:00Z")[0] == 0
    assert run("send", topic, "soon", "--delay", "1ms")[0] == 0
    code, found, _ = run("consume", topic, "--from", "first", "-n", "1", "--timeout", "30")
    assert (code, [one["body"] for one in found]) == (0, ["soon"])
    assert found[0]["deliver_at_ms"] >= now_ms
    for wrong in (
        ("--delay", "1"),
        ("--delay", "50000d"),
        ("--deliver-at", "1h"),
        ("--deliver-at", "lunch"),
    ):
        assert run("send", topic, "x", *wrong)[0] == 2
    assert run("send", topic, "x", "--delay", "1h", "--deliver-at", "2090-01-01")[0] == 2


def test_delayed_messages_that_wait_are_listed(run, cluster, topic):
    def waiting():
        code, (found,), _ = run("schedule", "list", "--topic", topic)
        assert code == 0
        return [(one["body"], one["real_topic"], one["keys"]) for one in found]

    assert waiting() == []
    for body, delay in (("third", "3h"), ("first", "1h"), ("second", "2h"), ("now", "1ms")):
        assert run("send", topic, body, "--delay", delay, "--key", body)[0] == 0
    assert run("consume", topic, "--from", "first", "-n", "1", "--timeout", "30")[0] == 0
    assert waiting() == [(body, topic, [body]) for body in ("first", "second", "third")]
    _, (found,), _ = run("schedule", "list", "--topic", topic, "--max", "2")
    assert [one["body"] for one in found] == ["first", "second"]
    assert run("schedule", "cancel", found[0]["message_id"])[0] == 0
    assert [body for body, *_ in waiting()] == ["second", "third"]


def test_some_queues_are_read_and_up_to_some_point(run, cluster, topic, capsys):
    with Producer("p", namesrv_addr=cluster.namesrv_addr) as producer:
        for queue in producer.fetch_publish_queues(topic):
            for n in range(20):
                tag = "late" if n >= 10 else "early"
                producer.send(Message(topic, b"%d" % n, tag=tag), queue=queue)
    first = ("consume", topic, "--from", "first")
    code, found, _ = run(*first, "--until", "end")
    assert (code, len(found)) == (0, 80)
    code, found, _ = run(*first, "--until", "end", "--queue", "1")
    assert {one["queue_id"] for one in found} == {1}
    assert len(found) == 40
    code, found, _ = run(*first, "--until", "end", "--tags", "early")
    assert (code, len(found)) == (0, 40)
    _, found, _ = run(*first, "-n", "80")
    middle_ms = sorted(one["store_timestamp"] for one in found)[40]
    code, early, _ = run(*first, "--until", str(middle_ms))
    assert {one["message_id"] for one in early} == {
        one["message_id"] for one in found if one["store_timestamp"] < middle_ms
    }
    one_queue = ("--broker", "broker-b", "--queue", "1")
    code, found, _ = run(*first, "--until", "end", *one_queue)
    assert {(one["broker_name"], one["queue_id"]) for one in found} == {("broker-b", 1)}
    assert len(found) == 20
    code, (counts,), _ = run(*first, "--until", "end", *one_queue, "--count-by", "tag")
    assert counts == [{"tag": "early", "messages": 10}, {"tag": "late", "messages": 10}]
    code, (counts,), _ = run(*first, "--until", "end", "--queue", "0", "--count-by", "queue")
    assert [(one["queue"], one["messages"]) for one in counts] == [
        ("broker-a:0", 20),
        ("broker-b:0", 20),
    ]
    assert main.main([*first, "--until", "end", "--count-by", "tag"]) == 0
    assert "MESSAGES" in capsys.readouterr().out
    code, _, err = run(*first, "--broker", "broker-x")
    assert (code, "broker-a, broker-b" in err[-1]["error"]) == (2, True)
    assert run(*first, "--queue", "7")[0] == 2
    backward = ("consume", topic, "--from", "1h", "--until", "2h")
    assert run(*backward)[::2] == (2, [{"error": "--until 2h is before --from 1h"}])
    assert run(*first, "--queue", "1", "--group", "g")[0] == 2


def test_a_mistyped_name_is_an_error_and_no_empty_answer(run, tmp_path):
    file = tmp_path / "letters.jsonl"
    nobody = "no consumer group 'nobody' on a broker that runs"
    for arguments in (
        ("dlq", "list", "nobody"),
        ("dlq", "resend", "nobody", "--all"),
        ("dlq", "purge", "nobody", "--yes"),
        ("dlq", "export", "nobody", str(file)),
        ("group", "leases", "nobody"),
        ("group", "release", "nobody", "--member", "m"),
    ):
        assert run(*arguments) == (1, [], [{"error": nobody}])
    assert not file.exists()
    nope = "no topic 'nope' on a broker that runs; `mqmesh topic create 'nope'` makes it"
    for arguments in (
        ("consume", "nope", "--until", "end"),
        ("trace", "by-key", "nope", "4711"),
        ("topic", "stats", "nope"),
    ):
        assert run(*arguments) == (1, [], [{"error": nope}])
    table = nope.replace("mqmesh topic", "mqmesh table")
    assert run("table", "ls", "nope") == (1, [], [{"error": table}])
    code, found, (err,) = run("group", "connections", "nope", "--producers")
    assert (code, found) == (1, [])
    assert err["error"] == "no producer of a group 'nope' is connected"
    code, found, (err,) = run("trace", "show", "zz")
    assert (code, found, "'zz': must be 32 hex digits" in err["error"]) == (2, [], True)
    code, found, (err,) = run("query", "by-id", "xyz")
    assert (code, err["error"]) == (2, "message id 'xyz' is not 32 hex digits")


def test_a_group_that_shares_queues_has_no_leases(run, topic):
    group = f"{topic}-group"
    assert run("group", "create", group)[0] == 0
    for arguments in (("leases", group), ("release", group, "--member", "m")):
        code, found, (err,) = run("group", *arguments)
        assert (code, found, "has delivery = queue" in err["error"]) == (2, [], True)


def test_messages_are_sent_to_a_queue_of_ones_choice(run, topic):
    code, (sent,), _ = run("send", topic, "x", "--queue", "1", "--broker", "broker-b")
    assert (code, sent["broker_name"], sent["queue_id"]) == (0, "broker-b", 1)
    code, sent, _ = run("send", topic, "x", "--broker", "broker-a", "-n", "4")
    places = [(one["broker_name"], one["queue_id"]) for one in sent]
    assert (code, places) == (0, [("broker-a", 0), ("broker-a", 1)] * 2)
    for wrong, why in (
        (("--queue", "1"), "say which by --broker"),
        (("--queue", "9", "--broker", "broker-a"), "has no queue 9 on broker 'broker-a'"),
        (("--broker", "broker-x"), "it is on broker-a, broker-b"),
        (("--queue", "1", "--sharding-key", "k"), "leave out"),
    ):
        code, _, err = run("send", topic, "x", *wrong)
        assert (code, why in err[0]["error"]) == (2, True), err


def test_topics_and_groups_tell_of_times(run, topic):
    now_ms = time.time_ns() // 1_000_000
    for _ in range(2):
        assert run("send", topic, "x", "--queue", "0", "--broker", "broker-a")[0] == 0
    _, found, _ = run("consume", topic, "--group", topic, "--from", "first", "-n", "1")
    _, (stats,), _ = run("topic", "stats", topic)
    first, other = stats["queues"][:2]
    assert now_ms - 5_000 <= first["first_timestamp"] <= first["last_update_timestamp"]
    assert first["first_timestamp"] == found[0]["store_timestamp"]
    assert (other["first_timestamp"], other["last_update_timestamp"]) == (0, 0)
    _, (progress,), _ = run("group", "progress", topic, "--topic", topic)
    waits, empty = progress["queues"][:2]
    assert (waits["consumer_offset"], waits["lag"]) == (1, 1)
    assert waits["oldest_timestamp"] == first["last_update_timestamp"]
    assert empty["oldest_timestamp"] == 0


def test_looking_on_leaves_nothing_behind(run, cluster, topic):
    assert run("send", topic, "x")[0] == 0
    with GroupAdmin(cluster.namesrv_addr) as admin:

        def names():
            # Not how quickly they consume: that of other tests' groups goes on to change.
            return {one.config.group for groups in admin.groups().values() for one in groups}

        before = names()
        assert run("consume", topic, "--from", "first", "-n", "1")[0] == 0
        deadline = time.monotonic() + PATIENCE_S
        while not names() <= before:  # the word that a client leaves has no answer
            assert time.monotonic() < deadline
        topics = admin.topics()
    assert not [name for name in topics if "mqmesh-consume" in name]


def test_a_group_is_shown_with_what_was_set(run, cluster, topic, capsys):
    group = topic
    made = run("group", "create", group, "--retry-max-times", "5", "--no-notify")[1][0]
    code, (found,), _ = run("group", "show", group)
    assert code == 0
    assert found["brokers"] == made["brokers"]
    assert found["brokers"][0]["retry_max_times"] == 5
    assert found["brokers"][0]["is_configured"] is True
    (listed,) = [one for one in run("group", "list")[1][0] if one["group"] == group]
    assert listed == found
    assert main.main(["group", "show", group]) == 0
    shown = capsys.readouterr().out
    assert "5 retries, members are not notified of others" in shown


def test_dead_letters_are_counted_by_age_and_purged(run, cluster, topic, capsys):
    group = f"{topic}-g"
    with Producer("p", namesrv_addr=cluster.namesrv_addr) as producer:
        producer.send(Message(topic, b"x"))
    consumer = PushConsumer(
        group,
        namesrv_addr=cluster.namesrv_addr,
        consume_from_where="FIRST_OFFSET",
        max_reconsume_times=0,
    )
    consumer.subscribe(topic, listener=lambda messages: ConsumeResult.RECONSUME_LATER)
    with consumer, DeadLetterClient(cluster.namesrv_addr) as letters:
        deadline = time.monotonic() + PATIENCE_S
        while not letters.groups().get(group):
            assert time.monotonic() < deadline
    _, (listed,), _ = run("dlq", "list")
    (own,) = [one for one in listed if one["group"] == group]
    assert own["dead_letters"] == 1
    _, (found,), _ = run("dlq", "list", group)
    given_up_ms = found["dead_letters"][0]["store_timestamp"]
    assert own["oldest_timestamp"] == own["newest_timestamp"] == given_up_ms
    assert found["oldest_timestamp"] == found["newest_timestamp"] == given_up_ms
    assert (found["ages"]["< 1 hour"], sum(found["ages"].values())) == (1, 1)
    assert main.main(["dlq", "list", group]) == 0
    assert "the oldest" in capsys.readouterr().out
    assert main.main(["dlq", "list"]) == 0
    assert "OLDEST" in capsys.readouterr().out
    assert run("dlq", "purge", group)[0] == 2  # without --yes
    assert run("dlq", "purge", group, "--yes") == (0, [{"group": group, "purged": 1}], [])
    assert run("dlq", "purge", group, "--yes") == (0, [{"group": group, "purged": 0}], [])
    with AdminClient(cluster.namesrv_addr) as admin:
        assert dlq_topic(group) not in admin.topics()


def test_the_shell_completes_topics_and_groups(cluster, topic):
    with GroupAdmin(cluster.namesrv_addr) as admin:
        admin.put_group(admin_config(topic))

    def complete(*words):
        environment = os.environ | {
            "_MQMESH_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(("mqmesh", *words)),
            "COMP_CWORD": str(len(words)),
        }
        command = [sys.executable, "-m", "mqmesh.cli"]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
        return [line.partition(",")[2] for line in done.stdout.split()]

    assert complete("topic", "stats", "cli.the") == [topic]
    assert complete("send", "cli.the") == [topic]
    assert complete("query", "by-key", "k", "--topic", "cli.the") == [topic]
    assert complete("group", "progress", "cli.the") == [topic]
    assert complete("consume", "t", "--group", "cli.the") == [topic]
    assert "purge" in complete("dlq", "")
    assert complete("--namesrv", "127.0.0.1:1", "topic", "stats", "c") == []


def admin_config(group):
    from mqmesh.protocol.groups import GroupConfig

    return GroupConfig(group)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_shells_need_is_printed(capsys, shell):
    assert main.main(["completion", shell]) == 0
    assert "_MQMESH_COMPLETE" in capsys.readouterr().out
