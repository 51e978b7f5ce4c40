"""Delta Lake's jars: those in a folder, and those that Spark fetched before."""

from __future__ import annotations

import threading
from functools import partial
from urllib.parse import quote

import pytest

from mqmesh.errors import ConfigError
from mqmesh.spark.jvm import jars

PACKAGE = "io.delta:delta-spark_4.1_2.13:4.2.0"


def test_a_folder_without_the_jar_of_delta_is_refused(tmp_path):
    tmp_path.joinpath("other.jar").touch()
    with pytest.raises(ConfigError, match=r"mqmesh archive jars --to"):
        jars.jar_files(tmp_path)
    tmp_path.joinpath("io.delta_delta-spark_4.1_2.13-4.2.0.jar").touch()
    assert len(jars.jar_files(tmp_path)) == 2


@pytest.fixture
def bare_pyspark(tmp_path, monkeypatch):
    """A pyspark without jars: the tests need none that is installed."""
    own = tmp_path / "pyspark"
    own.mkdir()
    monkeypatch.setattr(jars, "lacking_jars", partial(jars.lacking_jars, own=own))


@pytest.mark.usefixtures("bare_pyspark")
def test_what_was_fetched_is_known_the_next_time_while_it_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert jars.fetched_jars(PACKAGE) == []
    names = [str(tmp_path / name) for name in ("a 1.jar", "b.jar", "c%20.jar")]
    for name in names:
        open(name, "wb").close()
    uris = [quote(name) for name in names]
    jars.remember_jars(PACKAGE, ["file://" + uris[0], "file:" + uris[1], names[2]])
    assert jars.fetched_jars(PACKAGE) == names
    assert jars.fetched_jars(PACKAGE + ".1") == []
    tmp_path.joinpath("b.jar").unlink()
    assert jars.fetched_jars(PACKAGE) == []


def test_jars_that_pyspark_brings_are_left_out(tmp_path):
    for name in ("parquet-column-1.16.0.jar", "jackson-core-2.20.0.jar", "breeze_2.13-2.1.0.jar"):
        tmp_path.joinpath(name).touch()
    fetched = [
        "/i/io.delta_delta-spark_4.1_2.13-4.2.0.jar",
        "/i/org.apache.parquet_parquet-column-1.16.0.jar",
        "/i/com.fasterxml.jackson.core_jackson-core-2.13.5.jar",
        "/i/com.fasterxml.jackson.core_jackson-annotations-2.13.5.jar",
    ]
    assert jars.lacking_jars(fetched, tmp_path) == [fetched[0], fetched[3]]


@pytest.mark.usefixtures("bare_pyspark")
def test_a_note_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    tmp_path.joinpath("cache").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    jars.remember_jars(PACKAGE, ["/a.jar"])
    assert jars.fetched_jars(PACKAGE) == []


def test_one_fetches_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    waits, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(jars.time, "sleep", lambda span_s: waits.set())

    def fetch():
        with jars.turn_to_fetch():
            ended.set()

    other = threading.Thread(target=fetch)
    with jars.turn_to_fetch():
        other.start()
        assert waits.wait(30)
        assert not ended.is_set()
    other.join(30)
    assert ended.is_set()


def test_nobody_waits_for_ever_to_fetch(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(jars, "MOST_FETCH_S", -1)
    with (
        jars.turn_to_fetch(),
        pytest.raises(ConfigError, match=r"fetching jars for .*archive jars"),
        jars.turn_to_fetch(),
    ):
        pass


def test_where_no_lock_can_be_made_jars_are_fetched_all_the_same(tmp_path, monkeypatch):
    tmp_path.joinpath("cache").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with jars.turn_to_fetch():
        pass
