"""Delta Lake's jars: which, and how Spark comes by them."""

import fcntl
import importlib.metadata
import importlib.util
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import msgspec

from mqmesh.errors import ConfigError

from .java import cache_directory

SCALA: Final = "2.13"
MOST_FETCH_S: Final = 600
LOOK_AGAIN_S: Final = 0.1

_log = logging.getLogger(__name__)
_VERSION: Final = re.compile(r"-\d.*\.jar\Z")


def delta_package() -> str:
    """Returns Maven coordinates of the jars that fit the installed pyspark and delta-spark.

    Raises:
        ConfigError: One of them is not installed.
    """
    try:
        spark = importlib.metadata.version("pyspark")
        delta = importlib.metadata.version("delta-spark")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'mqmesh[spark]'") from error
    series = ".".join(spark.split(".")[:2])
    return f"io.delta:delta-spark_{series}_{SCALA}:{delta}"


def jar_files(directory: Path) -> list[Path]:
    """Returns the jars in a directory that ``mqmesh archive jars`` has filled.

    Raises:
        ConfigError: There are no jars.
    """
    found = sorted(directory.glob("*.jar"))
    if not any(path.name.startswith(("delta-spark", "io.delta_delta-spark")) for path in found):
        raise ConfigError(
            f"{directory} holds no jar of delta-spark; `mqmesh archive jars --to {directory}` puts "
            "it there"
        )
    return found


def fetched_jars(package: str) -> list[str]:
    """Returns the jars that Spark fetched for a package before, noted by ``remember_jars``.

    With them a session begins some seconds sooner, and without a look at the network.

    Args:
        package: Maven coordinates.

    Returns:
        Absolute paths; empty if one of them, or the list, is not there any more.
    """
    try:
        found = msgspec.json.decode(_list_file(package).read_bytes(), type=list[str])
    except (OSError, msgspec.MsgspecError):
        return []
    return found if all(os.path.isfile(path) for path in found) else []


def remember_jars(package: str, jars: list[str]) -> None:
    """Notes the jars that Spark fetched for a package; it does without an unwritable note.

    Args:
        package: Maven coordinates.
        jars: Jars by Spark's names, see ``jar_path``; those that pyspark has are left out.
    """
    paths = lacking_jars([str(jar_path(jar)) for jar in jars])
    path = _list_file(package)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}.new")
        new.write_bytes(msgspec.json.encode(paths))
        new.replace(path)
    except OSError as error:
        _log.info("which jars were fetched cannot be noted: %s", error)


def jar_path(entry: str) -> Path:
    """Returns the path of a jar.

    Args:
        entry: Spark's name of it: a path, or a URI with ``file:``, where a space is ``%20``.
    """
    path = entry.removeprefix("file:")
    return Path("/" + (path if path == entry else unquote(path)).lstrip("/"))


def lacking_jars(fetched: Iterable[str], own: Path | None = None) -> list[str]:
    """Returns the fetched jars that pyspark lacks: of those that it has, Java takes its own.

    Args:
        fetched: Paths of jars, by Ivy's names: organisation, underscore, artifact and version.
        own: Directory of pyspark's jars; None for the installed one.
    """
    if own is None:
        spec = importlib.util.find_spec("pyspark")
        assert spec is not None and spec.origin is not None
        own = Path(spec.origin).parent / "jars"
    known = {_VERSION.sub("", path.name) for path in own.glob("*.jar")}
    return [
        one for one in fetched if _VERSION.sub("", Path(one).name.partition("_")[2]) not in known
    ]


@contextmanager
def turn_to_fetch() -> Iterator[None]:
    """Waits until no other process of this user fetches jars, and has others wait meanwhile.

    Two that fetch at once take each other's files from Ivy's cache, and neither Spark starts.

    Raises:
        ConfigError: Another one has been at it for too long.
    """
    path = cache_directory(os.environ).parent / "fetching.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("wb")
    except OSError as error:
        _log.info("the progress of fetching jars cannot be shown: %s", error)
        yield
        return
    with file:
        give_up = time.monotonic() + MOST_FETCH_S
        while not _is_locked(file.fileno()):
            if time.monotonic() > give_up:
                raise ConfigError(
                    f"another process has been fetching jars for {MOST_FETCH_S} s ({path} is "
                    "locked); end it, or give this one jars (`archive jars`)"
                )
            time.sleep(LOOK_AGAIN_S)
        yield


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _list_file(package: str) -> Path:
    return cache_directory(os.environ) / f"jars-{package.replace(':', '_')}.json"
