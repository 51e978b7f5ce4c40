"""Exit codes and error lines of the command line."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from mqmesh.cli import main
from mqmesh.cli.admin import topic
from mqmesh.cli.main import COMMANDS
from mqmesh.cli.messages import send
from mqmesh.cli.processes import cluster
from mqmesh.errors import InvalidArgument, NoRoute
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.version import VERSION


def run(capsys, *arguments):
    code = main.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def failing(monkeypatch):
    """Makes `mqmesh topic list` end with an exception."""

    def failing(error):
        class Admin:
            def __init__(self, namesrv, broker_name):
                raise error

        monkeypatch.setattr(topic, "GroupAdmin", Admin)

    return failing


# What people call; the others are for processes that start one another.
VISIBLE = [
    name for name in COMMANDS if not main.root.get_command(click.Context(main.root), name).hidden
]


@pytest.mark.parametrize("command", VISIBLE)
def test_every_command_has_help_with_examples(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert "Examples:" in out
    assert len(out.splitlines()) > 5


def test_help_of_the_root_lists_the_commands(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(f"  {name} " in out for name in VISIBLE)


def test_the_version_is_told(capsys):
    assert run(capsys, "--version") == (0, f"mqmesh, version {VERSION}\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("nmaesrv",),
        ("topic", "creat"),
        ("topic", "create"),
        ("topic", "create", "a", "--queues", "x"),
        ("topic", "create", "a", "--queues", "70000"),
        ("topic", "create", "a", "--queues", "0"),
        ("topic", "create", "a", "--read-queues", "0"),
        ("up", "--data-dir", ""),
        ("status", "--data-dir", ""),
        ("down", "--data-dir", ""),
        ("status", "--nonsense"),
        ("send", "a", "b", "--count", "0"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(capsys, arguments):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


BROKEN = b"k\xff".decode(errors="surrogateescape")


@pytest.mark.parametrize(
    "arguments",
    [
        ("query", "by-key", BROKEN, "-t", "orders"),
        ("query", "by-key", "k", "-t", BROKEN),
        ("query", "track", BROKEN),
        ("consume", "orders", "--tags", BROKEN),
        ("consume", "orders", "--sql", f"a = '{BROKEN}'"),
        ("consume", BROKEN),
        ("consume", "orders", "--group", BROKEN),
        ("send", "orders", "body", "--tag", BROKEN),
        ("send", "orders", "body", "-k", "good", "-k", BROKEN),
        ("send", "orders", "body", "-p", f"a={BROKEN}"),
        ("send", "orders", "body", "--sharding-key", BROKEN),
        ("dlq", "list", "billing", "--reason", BROKEN),
        ("dlq", "resend", "billing", BROKEN),
        ("group", "progress", BROKEN),
        ("topic", "stats", BROKEN),
        ("tx", "list", "--group", BROKEN),
        ("--namesrv", BROKEN, "topic", "list"),
    ],
)
def test_a_text_that_is_no_utf8_is_wrong_usage(capsys, arguments):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: Invalid value for ")
    assert "k\\udcff" in err
    assert "is not valid UTF-8" in err
    assert err.count("\n") == 1


def test_files_and_bodies_may_be_any_bytes(capsys, monkeypatch, tmp_path):
    def refuse(*arguments, **options):
        raise InvalidArgument("planned")

    monkeypatch.setattr(send, "Producer", refuse)
    path = tmp_path / BROKEN
    path.write_bytes(b"body")
    for body in ([BROKEN], ["--file", str(path)]):
        assert run(capsys, "send", "orders", *body) == (2, "", "error: planned\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("progress", "{}"),
        ("progress", "billing", "--topic", "{}"),
        ("connections", "{}"),
        ("connections", "{}", "--producers"),
        ("create", "{}"),
        ("create", "{}", "--if-missing"),
        ("update", "{}", "--consume"),
        ("delete", "{}", "--yes"),
        ("reset-offset", "{}", "--topic", "orders", "--to-first", "--yes"),
        ("reset-offset", "billing", "--topic", "{}", "--to-first", "--yes"),
        ("clone-offset", "{}", "billing", "--yes"),
        ("clone-offset", "billing", "{}", "--yes"),
        ("clone-offset", "billing", "audit", "--topic", "{}", "--yes"),
        ("skip", "{}", "--yes"),
        ("skip", "billing", "--topic", "{}", "--yes"),
    ],
)
@pytest.mark.parametrize("name", ["a b", "x" * 300, "ünicode"])
def test_commands_for_groups_check_names_before_they_ask_anybody(
    capsys, monkeypatch, arguments, name
):
    def ask(*arguments):
        raise NoRoute("somebody was asked")

    monkeypatch.setattr(AdminClient, "_masters", ask)
    code, out, err = run(capsys, "group", *(one.format(name) for one in arguments))
    assert (code, out) == (2, ""), err
    assert "somebody was asked" not in err


@pytest.mark.parametrize("name", ["%RETRY%g", "SCHEDULE_TOPIC_XXXX", ""])
def test_reserved_names_of_groups_are_refused_as_well(capsys, monkeypatch, name):
    monkeypatch.delattr(AdminClient, "_masters")
    assert run(capsys, "group", "progress", name)[0] == 2


@pytest.mark.parametrize("message_id", ["a b", "12", "g" * 32])
def test_track_checks_the_id_before_it_asks_anybody(capsys, monkeypatch, message_id):
    monkeypatch.delattr(AdminClient, "_masters")
    assert run(capsys, "query", "track", message_id)[0] == 2


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (NoRoute("nobody knows"), 1, "error: nobody knows\n"),
        (NoRoute("two\nlines"), 1, "error: two\\nlines\n"),
        (InvalidArgument("illegal"), 2, "error: illegal\n"),
        (OSError("disk"), 1, "error: disk\n"),
        (
            ZeroDivisionError("bug"),
            1,
            "error: internal error: ZeroDivisionError: bug (--debug shows where)\n",
        ),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
    ],
)
def test_what_goes_wrong_is_one_line_and_an_exit_code(capsys, failing, error, code, line):
    failing(error)
    assert run(capsys, "topic", "list") == (code, "", line)


def test_a_bug_shows_its_traceback_when_asked(capsys, failing):
    failing(ZeroDivisionError("bug"))
    code, _, err = run(capsys, "--debug", "topic", "list")
    assert code == 1
    assert "Traceback" in err


def test_a_deletion_is_confirmed(capsys, monkeypatch):
    code, _, err = run(capsys, "topic", "delete", "orders", "--json")
    assert (code, err) == (2, '{"error":"this deletes all messages of the topic; add --yes"}\n')


def test_an_update_must_change_something(capsys):
    code, _, err = run(capsys, "topic", "update", "orders")
    assert code == 2
    assert "nothing to change" in err


@pytest.mark.parametrize("place", ["before", "behind"])
def test_json_and_name_servers_may_be_said_before_or_behind_the_command(capsys, monkeypatch, place):
    seen = []

    class Admin:
        def __init__(self, namesrv, broker_name):
            seen.append(namesrv)

        def __enter__(self):
            return self

        def __exit__(self, *args):
            return None

        def topic_configs(self):
            return {}

    monkeypatch.setattr(topic, "GroupAdmin", Admin)
    options = ("--json", "--namesrv", "h:1")
    command = ("topic", "list")
    arguments = (*options, *command) if place == "before" else (*command, *options)
    assert run(capsys, *arguments) == (0, "[]\n", "")
    assert seen == ["h:1"]


def test_nothing_running_is_status_1_and_no_error_for_down(capsys, tmp_path):
    code, _, err = run(capsys, "status", "--data-dir", str(tmp_path))
    assert code == 1
    assert err == f"no cluster is running on {tmp_path}; `mqmesh up` starts one\n"
    code, out, _ = run(capsys, "status", "--data-dir", str(tmp_path), "--json")
    assert code == 1
    assert '"running":false' in out
    assert run(capsys, "down", "--data-dir", str(tmp_path))[0] == 0


def test_a_wrong_cluster_file_is_exit_code_2_and_nothing_starts(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "Supervisor", None)
    code, out, err = run(capsys, "up", "-c", str(tmp_path / "nowhere.toml"))
    assert (code, out) == (2, "")
    assert err.endswith("nowhere.toml: No such file or directory\n")


def test_a_number_that_is_none_is_called_one(capsys):
    _, _, err = run(capsys, "ha", "promote", "broker-a", "x")
    assert "'x' is not a valid integer." in err
    _, _, err = run(capsys, "send", "t", "x", "--rate", "y")
    assert "'y' is not a valid number." in err


def test_commands_that_only_ask_load_no_producers_and_consumers(tmp_path):
    """They would take a third longer."""
    commands = """
        admin.topic admin.group admin.clusters admin.broker admin.settings admin.kv admin.ha
        messages.query messages.dlq messages.tx messages.trace
    """
    heavy = ["asyncio", "mqmesh.sdk.producer.producer", "mqmesh.sdk.consumer.consumer_options"]
    heavy += ["difflib", "tempfile", "tomllib"]
    modules = ", ".join(f"mqmesh.cli.{name}" for name in commands.split())
    code = f"import sys, {modules}\nprint([one for one in {heavy} if one in sys.modules])"
    # Elsewhere than in the checkout, whose folders would hide those of an installed wheel.
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=True
    )
    assert done.stdout == b"[]\n"
