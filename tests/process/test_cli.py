"""`mqmesh topic`, `send` and `consume` on a running cluster."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from harness.commands import CommandProcess, run_command
from harness.stopwatch import Stopwatch

from mqmesh.cli import main
from mqmesh.message import Message
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.namesrv_admin import NamesrvAdmin
from mqmesh.sdk.client import options
from mqmesh.sdk.consumer import consumer_engine
from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("c")
    settings = {"filter_server_enable": "true"}  # which has metrics of its own
    brokers = ("broker-a", "broker-b")
    with ProcessCluster(folder, brokers=brokers, broker_settings=settings) as cluster:
        yield cluster


@pytest.fixture
def cli(cluster, capsys):
    """Run a command; returns exit code, lines of standard output, lines of standard error."""

    def run(*arguments):
        code = main.main(["--namesrv", cluster.namesrv_addr, *arguments])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return run


@pytest.fixture
def topic(cli, request):
    name = request.node.name[:100].replace("[", "-").replace("]", "")
    assert cli("topic", "create", name, "--queues", "2")[0] == 0
    yield name
    cli("topic", "delete", name, "--yes")


def as_json(cli, *arguments):
    code, out, err = cli(*arguments, "--json")
    assert code == 0, err
    return [json.loads(line) for line in out]


def test_a_topic_is_created_changed_shown_and_deleted(cli):
    code, out, _ = cli("topic", "create", "life", "--queues", "2")
    assert code == 0
    assert out == [
        "topic life on broker-a: 2 read and 2 write queues, rw",
        "topic life on broker-b: 2 read and 2 write queues, rw",
    ]
    code, _, err = cli("topic", "create", "life")
    assert code == 1
    assert err[0].startswith("error: broker broker-a: ")
    assert cli("topic", "create", "life", "--if-missing")[0] == 0

    code, out, err = cli(
        "topic", "update", "life", "--message-ttl", "allow", "--on-expired", "drop"
    )
    assert (code, err) == (0, [])
    buried = cli("topic", "update", "life", "--on-expired", "dead-letter")[1]
    assert buried[0].endswith("rw, messages may expire and become dead letters")
    assert cli("topic", "update", "life", "--retention", "1h")[2][0].startswith("older messages")
    assert cli("topic", "update", "life", "--retention", "none")[2] == []
    cli("topic", "update", "life", "--message-ttl", "deny", "--on-expired", "drop")
    cli("topic", "update", "life", "--write-queues", "1", "--perm", "r", "--order")
    (one,) = [one for one in as_json(cli, "topic", "list")[0] if one["topic"] == "life"]
    assert one["brokers"][0] == {
        "broker_name": "broker-a",
        "read_queue_nums": 2,
        "write_queue_nums": 1,
        "perm": "r",
        "order": True,
        "retention_ms": 0,
        "retention_messages": 0,
        "message_ttl": False,
        "on_expired": "drop",
        "priorities": 0,
        "history": 0,
    }
    (route,) = as_json(cli, "topic", "route", "life")
    assert [queue["broker_name"] for queue in route["queues"]] == ["broker-a", "broker-b"]
    assert route["order"] is True

    assert cli("topic", "delete", "life", "--yes")[0] == 0
    assert not [one for one in as_json(cli, "topic", "list")[0] if one["topic"] == "life"]
    code, _, err = cli("topic", "route", "life")
    assert (code, len(err)) == (1, 1)


def test_one_message_is_sent_and_consumed_with_all_its_parts(cli, topic):
    (sent,) = as_json(
        cli,
        *("send", topic, "hello", "--tag", "new", "--key", "1", "--key", "2"),
        *("--property", "a=b", "--sharding-key", "s"),
    )
    assert sent["status"] == "SEND_OK"
    (message,) = as_json(cli, "consume", topic, "--from", "first", "--max", "1")
    assert message["message_id"] == sent["message_id"]
    assert (message["broker_name"], message["queue_id"]) == (sent["broker_name"], sent["queue_id"])
    parts = {key: message[key] for key in ("body", "tag", "keys", "properties", "sharding_key")}
    assert parts == {
        "body": "hello",
        "tag": "new",
        "keys": ["1", "2"],
        "properties": {"a": "b"},
        "sharding_key": "s",
    }


HOSTILE = "a\x1b]0;t\x07b\x1b[2J\nFORGED\x9b31m\u202eevil\u2066"


def test_nothing_that_a_client_says_moves_a_terminal(cluster, cli, topic, monkeypatch):
    monkeypatch.setattr(options, "born_host", lambda: HOSTILE)
    monkeypatch.setattr(consumer_engine, "VERSION", HOSTILE[:32])
    group = f"{topic}-group"
    with Producer("hostile", namesrv_addr=cluster.namesrv_addr) as producer:
        properties = {"p" + HOSTILE: "v" + HOSTILE}
        message = Message(topic, HOSTILE.encode(), HOSTILE, ["k" + HOSTILE], properties)
        sent = producer.send(message)
    with NamesrvAdmin(cluster.namesrv_addr) as admin:
        admin.put_kv("shop", "hostile", HOSTILE)
    consumer = PullConsumer(group, namesrv_addr=cluster.namesrv_addr)
    consumer.subscribe(topic, MessageSelector.by_tag("t" + HOSTILE))
    with consumer:
        for command in (
            ("query", "by-id", sent.message_id),
            ("consume", topic, "--from", "first", "--max", "1"),
            ("consume", topic, "--from", "first", "--max", "1", "--count-by", "tag"),
            ("group", "connections", group),
            ("group", "progress", group),
            ("group", "running", group),
            ("kv", "list", "shop"),
        ):
            for more in ((), ("--json",)):
                code, out, err = cli(*command, *more)
                assert code == 0, (command, err)
                shown = "\n".join((*out, *err))
                assert not [one for one in "\x1b\x07\x9b\u202e\u2066" if one in shown], command
                assert not [line for line in (*out, *err) if line.startswith("FORGED")], command


@pytest.fixture
def stdin(monkeypatch):
    def stdin(data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return stdin


def test_a_body_may_be_piped_in_byte_for_byte(cli, topic, stdin):
    stdin(b"\xff\x00\n")
    as_json(cli, "send", topic)
    (message,) = as_json(cli, "consume", topic, "--from", "first", "--max", "1")
    assert (message["body"], message["body_base64"]) == (None, "/wAK")


def test_lines_are_messages(cli, topic, stdin):
    stdin(b"one\n\ntwo\nthree\n")
    sent = as_json(cli, "send", topic, "--lines", "--sharding-key", "s")
    assert [one["queue_offset"] for one in sent] == [0, 1, 2]
    messages = as_json(cli, "consume", topic, "--from", "first", "--max", "3")
    assert [one["body"] for one in messages] == ["one", "two", "three"]


def test_many_lines_for_nobody_fail_within_one_timeout(capsys, stdin):
    stdin(b"line\n" * 1_000)
    watch = Stopwatch()
    options = ["--namesrv", "127.0.0.1:1", "send", "nowhere", "--lines", "--timeout", "0.5"]
    assert main.main(options) == 1
    assert watch.seconds < 5
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == "error: gave up, further messages were not sent"
    assert "no route for topic 'nowhere' from 127.0.0.1:1: " in captured.err
    assert "1 failed" in captured.out


def test_a_file_is_a_body_or_many(cli, topic, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo\n")
    as_json(cli, "send", topic, "--file", str(path))
    as_json(cli, "send", topic, "--file", str(path), "--lines")
    messages = as_json(cli, "consume", topic, "--from", "first", "--max", "3")
    assert sorted(one["body"] for one in messages) == ["one", "one\ntwo\n", "two"]


def test_many_messages_are_sent_and_counted(cli, topic):
    code, out, err = cli("send", topic, "x", "--count", "5000")
    assert (code, err) == (0, [])
    assert out[0].startswith("5,000 messages sent in ")
    (stats,) = as_json(cli, "topic", "stats", topic)
    assert stats["messages"] == 5_000
    assert len(stats["queues"]) == 4
    _, out, _ = cli("topic", "stats", topic)
    assert out[-1] == "5,000 messages in 4 queues"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("send", "t"), 2),
        (("send", "t", "x", "--file", __file__), 2),
        (("send", "t", "--file", "/nowhere"), 2),
        (("send", "t", "x", "-p", "a"), 2),
        (("send", "no blanks", "x"), 2),
        (("send", "t", "x", "--tag", "a||b"), 2),
        (("send", "t", ""), 2),
        (("send", "%RETRY%g", "x"), 2),
        (("consume", "no blanks"), 2),
        (("consume", "t", "--from", "yesterday"), 2),
        (("consume", "t", "--tags", "a ||"), 2),
        (("consume", "t", "--group", "no blanks"), 2),
    ],
)
def test_wrong_input_is_one_line(cli, monkeypatch, arguments, code):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    result, out, err = cli(*arguments)
    assert (result, out) == (code, [])
    assert len([line for line in err if line.startswith("error: ")]) == 1
    assert "internal" not in err[-1]


def test_looking_on_commits_nothing_and_a_group_goes_on_where_it_was(cli, topic):
    for body in ("1", "2", "3", "4"):
        cli("send", topic, body, "--sharding-key", "s")
    look = ("consume", topic, "--from", "first", "--max", "2")
    assert [one["body"] for one in as_json(cli, *look)] == ["1", "2"]
    assert [one["body"] for one in as_json(cli, *look)] == ["1", "2"]
    group = (*look, "--group", "readers")
    assert [one["body"] for one in as_json(cli, *group)] == ["1", "2"]
    assert [one["body"] for one in as_json(cli, *group)] == ["3", "4"]


def test_too_few_messages_are_exit_code_1(cli, topic):
    cli("send", topic, "x")
    code, out, err = cli("consume", topic, "--from", "first", "--max", "5", "--timeout", "1")
    assert code == 1
    assert len(out) == 1
    assert err[-1] == "error: only 1 of 5 messages came"


def test_without_a_maximum_the_timeout_is_the_end(cli, topic):
    cli("send", topic, "x")
    code, out, _ = cli("consume", topic, "--from", "10m", "--timeout", "1")
    assert (code, len(out)) == (0, 1)


def test_bodies_alone_are_printed_as_they_are(cluster, topic, cli):
    cli("send", topic, "hello")
    command = run_command(
        *("--namesrv", cluster.namesrv_addr, "consume", topic),
        *("--from", "first", "--max", "1", "--body"),
    )
    assert command.out == ["hello"]


def test_a_tail_sees_what_comes_later_and_ends_with_ctrl_c(cluster, cli, topic):
    arguments = ("--namesrv", cluster.namesrv_addr, "consume", topic, "--json")
    with CommandProcess(*arguments) as tail:
        tail.expect("consuming")
        assert cli("send", topic, "later")[0] == 0
        assert json.loads(tail.expect("later").string)["body"] == "later"
        watch = Stopwatch()
        tail.send_signal(signal.SIGINT)
        assert tail.wait() == 0
        assert watch.seconds < 2.0
        assert not any("Traceback" in line for line in tail.err)


def test_an_endless_send_ends_with_ctrl_c(cluster, topic):
    arguments = ("--namesrv", cluster.namesrv_addr, "send", topic, "x", "--json")
    with CommandProcess(*arguments, "--count", "1000000", "--rate", "50") as command:
        command.expect("SEND_OK")
        watch = Stopwatch()
        command.send_signal(signal.SIGINT)
        assert command.wait() == 130
        assert watch.seconds < 2.0
        assert not any("Traceback" in line for line in command.err)


@pytest.mark.parametrize(
    ("arguments", "first", "code"),
    [
        (("consume", "t", "--json"), "consuming", 0),
        (("send", "t", "x", "--json", "--count", "1000000", "--rate", "100"), "SEND_OK", 1),
    ],
)
def test_ctrl_c_is_quick_also_while_a_broker_hangs(tmp_path, arguments, first, code):
    with ProcessCluster(tmp_path) as cluster:
        main.main(["--namesrv", cluster.namesrv_addr, "topic", "create", "t"])
        with CommandProcess("--namesrv", cluster.namesrv_addr, *arguments) as command:
            command.expect(first)
            cluster.brokers["broker-a"].suspend()
            with pytest.raises(AssertionError):
                command.expect("nothing like this comes", 0.5)
            watch = Stopwatch()
            command.send_signal(signal.SIGINT)
            assert command.wait() == code
            assert watch.seconds < 2.0
            assert not any("Traceback" in line for line in command.err)
            cluster.brokers["broker-a"].resume()


def test_a_reader_that_goes_away_is_no_error(cluster, cli, topic):
    cli("send", topic, "x" * 1_000, "--count", "1000")
    arguments = ("--namesrv", cluster.namesrv_addr, "consume", topic, "--from", "first")
    with CommandProcess(*arguments) as command:
        command.expect("xxx")
        command.close_output()
        assert command.wait() == 0
        assert not any("Traceback" in line for line in command.err)


@pytest.mark.parametrize(
    "arguments",
    [("topic", "list"), ("send", "t", "x", "--timeout", "1"), ("consume", "t", "--max", "1")],
)
def test_without_a_cluster_a_command_says_so_soon(arguments):
    watch = Stopwatch()
    command = run_command("--namesrv", "127.0.0.1:1;127.0.0.1:2", *arguments)
    assert watch.seconds < 8.0
    assert command.code == 1
    assert command.out == []
    assert [line for line in command.err if line.startswith("error: ")] == command.err[-1:]


def test_every_metric_of_a_broker_is_documented(cluster, project_root):
    document = (project_root / "docs" / "reference" / "metrics.md").read_text()
    section = document.partition("## Every process")[2].partition("\n## Name server")[0]
    with AdminClient(cluster.namesrv_addr) as admin:
        metrics = {one.metric.name for one in admin.runtime_info()["broker-a"]}
    assert metrics - set(re.findall(r"^\| `([a-z_]+)`", section, re.MULTILINE)) == set()


def test_an_interrupt_while_modules_are_loaded_shows_no_traceback(tmp_path):
    # In the place of a module that takes long.
    (tmp_path / "click.py").write_text(
        "import sys\nprint('loading', flush=True)\nsys.stdin.read()\n"
    )
    command = [sys.executable, "-m", "mqmesh.cli", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd=tmp_path
    ) as process:
        assert process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=30)
    assert (process.returncode, told) == (-signal.SIGINT, b"")


def test_boards_and_alert_rules_are_written_as_files(cli, tmp_path):
    code, lines, _ = cli("exporter", "boards", str(tmp_path / "new"))
    assert code == 0
    names = {path.name for path in (tmp_path / "new").iterdir()}
    boards = {"mqmesh-overview.json", "mqmesh-groups.json", "mqmesh-broker.json"}
    assert names == boards | {"mqmesh.rules.yml"}
    assert {os.path.basename(line) for line in lines} == names
    assert all(json.loads((tmp_path / "new" / name).read_text())["panels"] for name in boards)
