"""Work that a broker has done in a helper thread: its type, and its errors."""

from collections.abc import Callable
from typing import Any

from mqmesh.errors import MQMeshError, StorageError

OnDone = Callable[[Any, MQMeshError | None], None]
RunAside = Callable[[Callable[[], Any], OnDone], None]
"""Has a helper thread do something, and calls back in the loop's thread: outcome, error."""


def as_mqmesh_error(error: BaseException) -> MQMeshError:
    """The error of our own tree for whatever a helper thread met."""
    return error if isinstance(error, MQMeshError) else StorageError(f"unexpected: {error!r}")
