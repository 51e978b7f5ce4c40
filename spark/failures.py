"""Errors that come out of Spark, as errors of ours: one sentence instead of two stacks."""

import re
from typing import Final

from mqmesh import errors
from mqmesh.errors import ConfigError, CorruptRecord, MQMeshError, StorageError

_OURS: Final = re.compile(r"mqmesh\.errors\.([A-Za-z]+): (.+)")
_KINDS: Final = (ConfigError, CorruptRecord, StorageError)


def as_mqmesh_error(error: Exception) -> MQMeshError:
    """What an error was that a task of ours met in another process, or what Spark says.

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
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return StorageError(f"Spark failed: {type(error).__name__}: {first}")
