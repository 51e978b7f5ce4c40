"""`mqmesh archive` without Spark: what it says when something is missing, and its small words."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from mqmesh.cli import main
from mqmesh.cli.stores import archive as commands
from mqmesh.cli.stores import archive_parts
from mqmesh.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("2h", 7_200), ("400d", 34_560_000)]
)
def test_spans_of_time_are_read(text, seconds):
    assert archive_parts.span_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "0h", "-1h", "1.5h", "1w", "１h", "10"])
def test_what_is_no_span_is_refused(text):
    with pytest.raises(ConfigError, match="is no span of time"):
        archive_parts.span_seconds(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ("ingest", "somewhere", "--to", "x"),
        ("status", "x"),
        ("find", "x", "--key", "k"),
        ("sql", "x", "select 1"),
        ("vacuum", "x"),
        ("export", "x", "--topic", "t"),
    ],
)
def test_without_its_packages_the_archive_says_how_to_get_them(arguments, monkeypatch, capsys):
    def nothing(name):
        raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")

    monkeypatch.setattr(importlib, "import_module", _only("mqmesh.spark.", nothing))
    assert main.main(["archive", *arguments]) == 2
    assert capsys.readouterr().err == (
        "error: No module named 'pyarrow': pip install 'mqmesh[spark]'\n"
    )


def _only(prefix, instead):
    real = importlib.import_module
    return lambda name, *rest: instead(name) if name.startswith(prefix) else real(name, *rest)


def test_rows_for_programs_have_bodies_as_text_or_in_base64():
    row = {"topic": "t", "properties": [("a", "1")], "body": b"hi"}
    assert archive_parts.plain_row(row) == {"topic": "t", "properties": {"a": "1"}, "body": "hi"}
    assert archive_parts.plain_row({"properties": None, "body": b"\xff"}) == {
        "properties": {},
        "body_base64": b"\xff",
    }


@pytest.mark.parametrize("age", ["1h", "23h"])
def test_only_whole_days_expire(age, capsys):
    assert main.main(["archive", "expire", "x", "--older-than", age]) == 2
    assert "whole days go" in capsys.readouterr().err


def test_settings_of_spark_reach_a_session_which_always_ends(monkeypatch, capsys):
    seen = []

    def session(**options):
        seen.append(options["extra"])
        return SimpleNamespace(stop=lambda: seen.append("stopped"))

    def verify(spark, archive):
        raise ConfigError(f"{archive} is no archive")

    monkeypatch.setattr(
        commands, "archive_module", lambda name: SimpleNamespace(session=session, verify=verify)
    )
    settings = ("--conf", "spark.a=b=c", "--conf", "spark.d=")
    assert main.main(["archive", "verify", "x", *settings]) == 2
    assert seen == [{"spark.a": "b=c", "spark.d": ""}, "stopped"]
    assert main.main(["archive", "verify", "x", "--conf", "spark.a"]) == 2
    assert "--conf 'spark.a': write KEY=VALUE" in capsys.readouterr().err
    assert len(seen) == 2
