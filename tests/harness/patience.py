"""Waiting for what other processes and threads do."""

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from mqmesh.errors import MQMeshError

PATIENCE_S: Final = 40.0
_PAUSE_S: Final = 0.01
"""Pause between two looks: without one, waiting takes the processor from other processes."""

_T = TypeVar("_T")


def until(condition: Callable[[], _T], patience_s: float = PATIENCE_S) -> _T:
    """Looks until something is so.

    Args:
        condition: Looks; an error of mqmesh says that the cluster is on its way to it.
        patience_s: For how long.

    Returns:
        The result of the look.
    """
    deadline_s = time.monotonic() + patience_s
    pause = threading.Event()
    trouble: MQMeshError | None = None
    while True:
        try:
            found, trouble = condition(), None
            if found:
                return found
        except MQMeshError as error:
            trouble = error
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited in vain for {patience_s} s") from trouble
        pause.wait(_PAUSE_S)
