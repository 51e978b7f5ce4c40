"""Where commands find their cluster."""

from __future__ import annotations

import json
import stat

import pytest

from mqmesh.cli import contexts, main
from mqmesh.errors import ConfigError
from mqmesh.sdk.client.options import DEFAULT_NAMESRV


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


def test_contexts_are_added_used_listed_and_removed(run, home):
    assert run("list") == []
    assert run("add", "prod", "--namesrv", "a:1, b:2") == {
        "context": "prod",
        "namesrv": "a:1;b:2",
        "in_use": False,
    }
    assert run("add", "test", "--namesrv", "[::1]:9876", "--use")["in_use"]
    assert contexts.find_namesrv(None, None) == "[::1]:9876"
    assert run("use", "prod")["in_use"]
    assert [(one["context"], one["in_use"]) for one in run("list")] == [
        ("prod", True),
        ("test", False),
    ]
    assert contexts.find_namesrv(None, None) == "a:1;b:2"
    assert contexts.find_namesrv(None, "test") == "[::1]:9876"
    run("remove", "prod")
    assert contexts.find_namesrv(None, None) == DEFAULT_NAMESRV
    file = home / "mqmesh" / "contexts.json"
    assert contexts.contexts_file() == file
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["contexts.json"]


def test_what_is_said_goes_before_the_variable_and_that_before_the_context(run, monkeypatch):
    run("add", "prod", "--namesrv", "a:1", "--use")
    monkeypatch.setenv("MQMESH_NAMESRV", "b:2,c:3")
    assert contexts.find_namesrv("d:4", None) == "d:4"
    assert contexts.find_namesrv(None, "prod") == "a:1"
    assert contexts.find_namesrv(None, None) == "b:2,c:3"
    monkeypatch.setenv("MQMESH_NAMESRV", "")
    assert contexts.find_namesrv(None, None) == "a:1"
    with pytest.raises(ConfigError, match="exclude"):
        contexts.find_namesrv("d:4", "prod")


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


def test_a_command_asks_the_context_it_is_told(run, capsys):
    run("add", "prod", "--namesrv", "127.0.0.1:1")
    assert main.main(["--context", "prod", "--json", "topic", "list"]) == 1
    assert "127.0.0.1:1" in json.loads(capsys.readouterr().err)["error"]
    assert main.main(["--context", "unknown", "topic", "list"]) == 2
    assert "no context 'unknown' (prod)" in capsys.readouterr().err
