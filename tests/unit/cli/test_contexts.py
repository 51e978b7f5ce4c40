"""Where commands find their cluster."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import msgspec
import pytest
from harness.keys import credentials

from mqmesh.cli import contexts, main
from mqmesh.cli.credentials import choose_cluster
from mqmesh.errors import ConfigError, InvalidArgument
from mqmesh.sdk.client.options import DEFAULT_NAMESRV
from mqmesh.security.keys import save_credentials


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("MQMESH_NAMESRV", raising=False)
    return tmp_path


@pytest.fixture
def run(capsys):
    def run(*arguments):
        code = main.main(["context", *arguments, "--json"])
        captured = capsys.readouterr()
        return json.loads(captured.out) if code == 0 else (code, json.loads(captured.err)["error"])

    return run


def find_namesrv(said, context):
    return contexts.find_cluster(said, context)[0]


def test_contexts_are_added_used_listed_and_removed(run, home):
    assert run("list") == []
    assert run("add", "prod", "--namesrv", "a:1, b:2") == {
        "context": "prod",
        "namesrv": "a:1;b:2",
        "namespace": "",
        "credentials": "",
        "in_use": False,
    }
    assert run("add", "test", "--namesrv", "[::1]:9876", "--use")["in_use"]
    assert find_namesrv(None, None) == "[::1]:9876"
    assert run("use", "prod")["in_use"]
    assert [(one["context"], one["in_use"]) for one in run("list")] == [
        ("prod", True),
        ("test", False),
    ]
    assert find_namesrv(None, None) == "a:1;b:2"
    assert find_namesrv(None, "test") == "[::1]:9876"
    run("remove", "prod")
    assert find_namesrv(None, None) == DEFAULT_NAMESRV
    file = home / "mqmesh" / "contexts.json"
    assert contexts.contexts_file() == file
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["contexts.json"]


def test_what_is_said_goes_before_the_variable_and_that_before_the_context(run, monkeypatch):
    run("add", "prod", "--namesrv", "a:1", "--use")
    monkeypatch.setenv("MQMESH_NAMESRV", "b:2,c:3")
    assert find_namesrv("d:4", None) == "d:4"
    assert find_namesrv(None, "prod") == "a:1"
    assert find_namesrv(None, None) == "b:2,c:3"
    monkeypatch.setenv("MQMESH_NAMESRV", "")
    assert find_namesrv(None, None) == "a:1"
    with pytest.raises(ConfigError, match="exclude"):
        find_namesrv("d:4", "prod")


@pytest.mark.parametrize(
    "arguments",
    [
        ("use", "unknown"),
        ("remove", "unknown"),
        ("add", "x", "--namesrv", "no address"),
        ("add", "", "--namesrv", "a:1"),
        ("add", "x" * 256, "--namesrv", "a:1"),
    ],
)
def test_what_is_wrong_changes_nothing(run, home, arguments):
    run("add", "prod", "--namesrv", "a:1", "--use")
    before = contexts.contexts_file().read_bytes()
    assert run(*arguments)[0] == 2
    assert contexts.contexts_file().read_bytes() == before


@pytest.mark.parametrize("content", ["", "{", '{"version": 2}', '{"contexts": {"a": 5}}', "[]"])
def test_a_file_that_cannot_be_read_is_told_and_kept(run, home, content):
    path = contexts.contexts_file()
    path.parent.mkdir()
    path.write_text(content)
    assert run("list")[0] == 2
    assert run("add", "prod", "--namesrv", "a:1")[0] == 2
    assert path.read_text() == content


def test_a_relative_folder_is_ignored_as_the_specification_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert contexts.contexts_file() == tmp_path / ".config" / "mqmesh" / "contexts.json"


def test_a_context_has_keys_by_the_name_of_their_file(run, home, monkeypatch):
    monkeypatch.delenv("MQMESH_CREDENTIALS", raising=False)
    monkeypatch.chdir(home)
    for name in ("own", "other"):
        keys = msgspec.structs.replace(credentials(name), namesrv_addr="127.0.0.1:1")
        save_credentials(home / f"{name}.toml", keys)
    own, other = str(home / "own.toml"), str(home / "other.toml")
    added = run("add", "prod", "--credentials", "own.toml", "--use")
    assert (added["namesrv"], added["credentials"]) == ("127.0.0.1:1", own)
    run("add", "test", "--namesrv", "127.0.0.1:1", "--credentials", "other.toml")
    assert keys_of(monkeypatch, None, None) == own
    assert keys_of(monkeypatch, None, "test") == other
    assert keys_of(monkeypatch, "127.0.0.1:1", None) is None, "what is said is of no context"
    assert keys_of(monkeypatch, None, None, variable="x.toml") == "x.toml"
    assert keys_of(monkeypatch, None, "test", variable="x.toml") == other
    run("add", "prod", "--namesrv", "127.0.0.1:1")
    assert keys_of(monkeypatch, None, "prod") is None, "it was given anew without keys"
    run("remove", "test")
    assert contexts.load_contexts().credentials == {}
    (home / "own.toml").chmod(0o644)
    assert "lets others read" in run("add", "prod", "--credentials", "own.toml")[1]
    assert "say --namesrv" in run("add", "prod")[1]


def keys_of(monkeypatch, said, context, variable=""):
    """The file with keys that a command has."""
    with monkeypatch.context() as patch:
        patch.setenv("MQMESH_CREDENTIALS", variable)
        choose_cluster(said, context, Path("mqmesh-data"))
        return os.environ["MQMESH_CREDENTIALS"] or None


def test_a_command_asks_the_context_it_is_told(run, capsys):
    run("add", "prod", "--namesrv", "127.0.0.1:1")
    assert main.main(["--context", "prod", "--json", "topic", "list"]) == 1
    assert "127.0.0.1:1" in json.loads(capsys.readouterr().err)["error"]
    assert main.main(["--context", "unknown", "topic", "list"]) == 2
    assert "no context 'unknown' (prod)" in capsys.readouterr().err


def chosen_namespace(monkeypatch, variable, *, said=None, context=None):
    with monkeypatch.context() as patch:
        patch.setenv("MQMESH_NAMESPACE", variable)
        choose_cluster(None, context, Path("mqmesh-data"), said)
        return os.environ["MQMESH_NAMESPACE"]


def test_the_namespace_is_said_or_of_a_named_context_or_the_variable_or_the_context(
    run, monkeypatch
):
    assert run("add", "shop", "--namesrv", "a:1", "--namespace", "shop")["namespace"] == "shop"
    assert run("add", "none", "--namesrv", "a:1")["namespace"] == ""
    run("use", "shop")
    assert chosen_namespace(monkeypatch, "") == "shop"
    assert chosen_namespace(monkeypatch, "bank") == "bank"
    assert chosen_namespace(monkeypatch, "bank", context="shop") == "shop"
    assert chosen_namespace(monkeypatch, "bank", context="none") == "bank"
    assert chosen_namespace(monkeypatch, "bank", context="shop", said="x") == "x"
    assert chosen_namespace(monkeypatch, "bank", said="") == ""
    with pytest.raises(InvalidArgument, match="namespace 'a%b'"):
        chosen_namespace(monkeypatch, "", said="a%b")
    code, error = run("add", "x", "--namesrv", "a:1", "--namespace", "a%b")
    assert (code, "namespace" in error) == (2, True)
    run("remove", "shop")
    assert chosen_namespace(monkeypatch, "") == ""
