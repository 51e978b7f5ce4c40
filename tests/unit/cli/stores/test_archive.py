"""`mqmesh archive` without Spark: what it says when something is missing, and its small words."""

from __future__ import annotations

import errno
import importlib
import shutil
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from mqmesh.cli import main
from mqmesh.cli.stores import archive as commands
from mqmesh.cli.stores import archive_parts
from mqmesh.errors import ConfigError, StorageError


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
    ("arguments", "module", "advice"),
    [
        (
            ("ingest", "somewhere", "--to", "x"),
            "session",
            "'mqmesh[spark]'; or use --engine local, without Spark and Java",
        ),
        (("status", "x"), "", "'mqmesh[archive]'"),
        (("find", "x", "--key", "k"), "", "'mqmesh[archive]'"),
        (("sql", "x", "select 1"), "session", "'mqmesh[spark]'"),
        (("vacuum", "x"), "", "'mqmesh[archive]'"),
        (("export", "x", "--topic", "t"), "", "'mqmesh[archive]'"),
    ],
)
def test_without_its_packages_the_archive_says_how_to_get_them(
    arguments, module, advice, monkeypatch, capsys
):
    def nothing(name):
        raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")

    monkeypatch.setattr(importlib, "import_module", _only(f"mqmesh.spark.{module}", nothing))
    assert main.main(["archive", *arguments]) == 2
    assert capsys.readouterr().err == (f"error: No module named 'pyarrow': pip install {advice}\n")


def test_the_engine_without_java_asks_for_no_spark(monkeypatch, capsys):
    def nothing(name):
        raise ModuleNotFoundError("No module named 'deltalake'", name="deltalake")

    monkeypatch.setattr(importlib, "import_module", _only("mqmesh.spark.ingest", nothing))
    assert main.main(["archive", "ingest", "somewhere", "--to", "x", "--engine", "local"]) == 2
    assert "pip install 'mqmesh[archive]'" in capsys.readouterr().err


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

    def session(*, is_quiet, **options):
        assert is_quiet
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


def _row(number):
    return {
        "broker": "a",
        "topic": "t",
        "queue_id": 0,
        "queue_offset": number,
        "message_id": f"{number:032X}",
        "store_timestamp": datetime(2026, 3, 1, tzinfo=UTC),
        "properties": None,
        "body": b"x",
    }


@pytest.mark.parametrize("flags", [(), ("--json",), ("--body",)])
def test_find_says_when_there_is_more_and_when_there_is_nothing(flags, monkeypatch, capsys):
    def find(archive, *, most, **wanted):
        return SimpleNamespace(rows=[_row(number) for number in range(most)], more=True)

    def find_nothing(archive, **wanted):
        return SimpleNamespace(rows=[], more=False)

    monkeypatch.setattr(commands, "archive_module", lambda name: SimpleNamespace(find=find))
    assert main.main(["archive", "find", "x", "-k", "k", *flags]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 32
    assert "there are more messages than these 32; --max shows further ones" in said.err
    monkeypatch.setattr(commands, "archive_module", lambda name: SimpleNamespace(find=find_nothing))
    assert main.main(["archive", "find", "x", "-k", "k", *flags]) == 1
    said = capsys.readouterr()
    assert (said.out, "no message was found" in said.err) == ("", True)


def _sql(monkeypatch, query):
    """Has `archive sql` ask a fake; returns the options of its session."""
    options = {}

    def session(**given):
        options.update(given)
        return SimpleNamespace(stop=lambda: None)

    modules = SimpleNamespace(session=session, query=query)
    monkeypatch.setattr(commands, "archive_module", lambda name: modules)
    return options


def test_sql_says_when_rows_are_left_out(monkeypatch, capsys):
    rows = [(number,) for number in range(5)]

    def query(spark, archive, text, values):
        limit = lambda count: SimpleNamespace(collect=lambda: rows[:count])  # noqa: E731
        return SimpleNamespace(columns=["n"], limit=limit)

    _sql(monkeypatch, query)
    assert main.main(["archive", "sql", "x", "select 1", "--max", "4"]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == (
        "n\n0\n1\n2\n3\n",
        "there are more rows than these 4; --max shows further ones\n",
    )
    assert main.main(["archive", "sql", "x", "select 1", "--max", "5"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "quiet"),
    [
        (["archive", "sql", "x", "s"], True),
        (["archive", "sql", "x", "s", "-v"], False),
        (["--debug", "archive", "sql", "x", "s"], False),
    ],
)
def test_what_java_writes_is_shown_only_when_asked_for(arguments, quiet, monkeypatch, capsys):
    def query(spark, archive, text, values):
        raise ConfigError("no")

    options = _sql(monkeypatch, query)
    assert main.main(arguments) == 2
    assert options["is_quiet"] is quiet


def _failing(library):
    """An error of a library, as its type tells."""
    return type("SomethingFailed", (Exception,), {"__module__": f"{library}.errors"})(
        "An error occurred while calling o1.collect.\n"
        ": org.apache.spark.SparkException: Job aborted.\n"
        "\tat org.apache.spark.a(b.scala:3)\n"
        "Caused by: java.io.IOException: No space left on device\n"
        "\tat java.base/c(d.java:4)\n"
    )


@pytest.mark.parametrize(
    ("library", "name"),
    [("pyspark", "Spark"), ("py4j", "Spark"), ("_internal", "Delta Lake"), ("pyarrow", "Arrow")],
)
@pytest.mark.parametrize(
    "arguments", [("sql", "x", "select 1"), ("status", "x"), ("vacuum", "x"), ("find", "x")]
)
def test_errors_of_libraries_are_one_line_with_the_last_cause(
    arguments, library, name, monkeypatch, capsys
):
    def fail(*arguments, **options):
        raise _failing(library)

    fails = dict.fromkeys(("query", "sources", "vacuum", "find"), fail)
    modules = SimpleNamespace(session=lambda **_: SimpleNamespace(stop=lambda: None), **fails)
    monkeypatch.setattr(commands, "archive_module", lambda name: modules)
    assert main.main(["archive", *arguments]) == 1
    assert capsys.readouterr().err == (
        f"error: {name} failed: SomethingFailed: java.io.IOException: No space left on device\n"
    )


def test_a_bug_of_ours_stays_a_bug(monkeypatch, capsys):
    def fail(*arguments, **options):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(commands, "archive_module", lambda name: SimpleNamespace(sources=fail))
    assert main.main(["archive", "status", "x"]) == 1
    assert "internal error: ZeroDivisionError" in capsys.readouterr().err


def test_run_goes_on_after_errors_of_the_system_and_without_snapshots_that_vanish(
    tmp_path, monkeypatch, capsys
):
    """The broker removes a snapshot while another is taken in; then the disk fails."""
    root = tmp_path / "snapshots"
    taken = []

    def take_in(spark, path, archive, **options):
        taken.append(path.name)
        if path.name == "a.0":
            shutil.rmtree(root / "a.1")
            shutil.rmtree(root / "a.2")
        if not path.exists():
            raise StorageError("no snapshot")

    def snapshot(admin, name, place):
        if taken:
            raise OSError(errno.EIO, "Input/output error")
        for number in range(5):
            (root / f"a.{number}").mkdir(parents=True)
        return root / "a.4"

    waits = iter([False, True])
    interrupt = SimpleNamespace(wait=lambda seconds: next(waits))
    needed = [True, True, False, False, True]
    found = [(root / f"a.{number}", is_needed) for number, is_needed in enumerate(needed)]
    deleted = []
    for name, instead in {
        "archive_module": lambda name: SimpleNamespace(archive_place=Path),
        "_take_in": take_in,
        "_snapshot": snapshot,
        "AdminClient": lambda namesrv: nullcontext(),
        "Interrupt": lambda: nullcontext(interrupt),
        "waiting_snapshots": lambda *arguments: found,
        "delete_snapshot": lambda path: deleted.append(path.name),
    }.items():
        monkeypatch.setattr(commands, name, instead)
    options = ("--broker", "a", "--every", "1h", "--engine", "local")
    assert main.main(["archive", "run", "--to", str(tmp_path / "archive"), *options]) == 1
    assert taken == ["a.0", "a.1", "a.4"]
    assert deleted == ["a.0", "a.3", "a.4"]
    assert capsys.readouterr().err == "error: a: [Errno 5] Input/output error\n"
