"""Whether Java is told to use an archive of classes, to write one, or neither."""

from __future__ import annotations

import os

import pytest

from mqmesh.spark.jvm.class_archive import MAGIC, MOST_KEPT, PATIENCE_S, class_archive_options
from mqmesh.spark.jvm.java import Java

NOW_S = 1_000_000.0


@pytest.fixture
def java(tmp_path):
    home = tmp_path / "java"
    (home / "lib" / "server").mkdir(parents=True)
    (home / "lib" / "server" / "classes.jsa").write_bytes(b"base")
    return Java(home, 17, "JAVA_HOME")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def options(java, cache, packages="pyspark 4.1.1"):
    return class_archive_options(java, packages, cache, NOW_S)


def written(java, cache):
    """The file that the first session has Java write."""
    first = options(java, cache).split()[0]
    name, _, path = first.partition("=")
    assert name == "-XX:ArchiveClassesAtExit"
    return cache / path


def test_the_first_session_has_it_written_and_later_ones_use_it(java, cache):
    path = written(java, cache)
    assert path.parent == cache
    path.write_bytes(MAGIC + b"classes")
    assert options(java, cache).startswith(f"-XX:SharedArchiveFile={path} ")


def test_other_packages_and_another_java_have_another(java, cache):
    path = written(java, cache)
    path.write_bytes(MAGIC)
    assert "ArchiveClassesAtExit" in options(java, cache, "pyspark 4.2.0")
    os.utime(java.home / "lib" / "server" / "classes.jsa", ns=(1, 1))
    assert "ArchiveClassesAtExit" in options(java, cache)


def test_one_that_is_being_written_is_left_alone_until_it_is_given_up(java, cache):
    path = written(java, cache)
    path.write_bytes(bytes(100))
    os.utime(path, (NOW_S - 1, NOW_S - 1))
    assert options(java, cache) == ""
    os.utime(path, (NOW_S - PATIENCE_S - 1, NOW_S - PATIENCE_S - 1))
    assert "ArchiveClassesAtExit" in options(java, cache)


def test_a_java_without_an_archive_of_its_own_does_without(java, cache):
    (java.home / "lib" / "server" / "classes.jsa").unlink()
    assert options(java, cache) == ""


def test_a_place_with_a_space_cannot_be_told_to_java(java, tmp_path):
    assert options(java, tmp_path / "my cache") == ""


def test_few_archives_of_other_versions_stay_and_those_used_last(java, cache):
    paths = []
    for number in range(MOST_KEPT + 2):
        path = cache / options(java, cache, f"pyspark {number}").split()[0].partition("=")[2]
        path.write_bytes(MAGIC)
        os.utime(path, (number, number))
        paths.append(path)
    assert "SharedArchiveFile" in options(java, cache, f"pyspark {MOST_KEPT - 1}")
    assert "ArchiveClassesAtExit" in options(java, cache, "pyspark new")
    left = {path for path in paths if path.exists()}
    assert len(left) == MOST_KEPT
    assert paths[MOST_KEPT - 1] in left
