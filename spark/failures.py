"""Errors of Spark, Delta Lake and Arrow, as errors of ours: one sentence, no stack."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from mqmesh import errors
from mqmesh.errors import ConfigError, CorruptRecord, InvalidArgument, MQMeshError, StorageError
from mqmesh.storage.files.atomic_file import storage_error

_OURS: Final = re.compile(r"mqmesh\.errors\.([A-Za-z]+): (.+)")
_KINDS: Final = (ConfigError, InvalidArgument, CorruptRecord, StorageError)
NOT_STARTED: Final = "Python worker failed to connect back"
"""Part of Spark's error when a process of Python took over 10 s to start, as on a busy machine."""
_LIBRARIES: Final = {
    "pyspark": "Spark",
    "py4j": "Spark",
    "_internal": "Delta Lake",
    "deltalake": "Delta Lake",
    "pyarrow": "Arrow",
}
"""First part of a module's name -> the library; deltalake calls its own module ``_internal``."""
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_S3_MESSAGE: Final = re.compile(r"<Message>([^<]+)</Message>")
_BEFORE_CAUSE: Final = re.compile(r'(?:Caused by)?: |Exception in thread "[^"]*" ')
_NO_CAUSE: Final = (
    "Error: Could not create the Java Virtual Machine.",
    "Error: A fatal exception has occurred.",
)
"""Java writes these behind the line that names the cause."""


def as_mqmesh_error(error: Exception) -> MQMeshError:
    """Returns what an error was that a task of ours met in another process, or what Spark says.

    Args:
        error: Raised by Spark; its text holds the stack of the task.
    """
    if isinstance(error, MQMeshError):
        return error
    text = str(error)
    match = _OURS.search(text)
    if match is not None:
        kind = getattr(errors, match[1], None)
        return (kind if kind in _KINDS else StorageError)(match[2].strip())
    name = _library(error) or "Spark"
    return StorageError(f"{name} failed: {type(error).__name__}: {last_cause(text.splitlines())}")


def last_cause(lines: Iterable[str]) -> str:
    """Returns the one line of a Java stack, or of Java's output, that names the last cause.

    Args:
        lines: Lines in the order in which they were written.

    Returns:
        A line without the words before the cause; empty if there is none.
    """
    candidates = [
        line for line in lines if line.strip() and not line.startswith(("\t", *_NO_CAUSE))
    ]
    causes = [line for line in candidates if _BEFORE_CAUSE.match(line)]
    chosen = causes[-1] if causes else next(iter(candidates), "")
    before = _BEFORE_CAUSE.match(chosen)
    return chosen[before.end() if before else 0 :].strip()


def place_error(error: OSError, what: str) -> StorageError:
    """Returns an error of ours for one of Delta Lake's about a place, as a bucket.

    Args:
        error: Its text is a tree of causes over several lines, with colours, or the system's.
        what: Beginning of the sentence, which says what failed.
    """
    if error.strerror:
        return storage_error(error, what)
    lines = [line.strip(" \u21b3") for line in _COLOUR.sub("", str(error)).splitlines()]
    message = _S3_MESSAGE.search(str(error))
    cause = message[1] if message else ": ".join([line for line in lines if line][-2:])
    return StorageError(f"{what}: {cause}")


@contextmanager
def errors_of_libraries(what: str = "cannot reach the archive") -> Iterator[None]:
    """Turns errors of Spark, Delta Lake and Arrow into errors of ours.

    Bugs of ours pass, and errors of the system, which name the file.

    Args:
        what: Beginning of the sentence about a bucket, which says what failed.
    """
    try:
        yield
    except Exception as error:
        # Delta Lake's about a bucket is Python's own class, with a text and no number.
        if isinstance(error, OSError) and not error.strerror:
            raise place_error(error, what) from error
        if not _library(error):
            raise
        raise as_mqmesh_error(error) from error


@contextmanager
def errors_of_place(what: str) -> Iterator[None]:
    """Turns errors of libraries as well as of the system about a place into errors of ours.

    Args:
        what: Beginning of the sentence, which says what failed.
    """
    try:
        with errors_of_libraries(what):
            yield
    except OSError as error:
        raise place_error(error, what) from error


def _library(error: Exception) -> str:
    """Returns the name of the library that an error is of; empty for Python's own and ours."""
    modules = [kind.__module__.partition(".")[0] for kind in type(error).__mro__]
    return next((_LIBRARIES[name] for name in modules if name in _LIBRARIES), "")
