"""Closes clients that a program left open at its end, so that no message is lost silently.

The interpreter waits for threads that are no daemons, then calls the functions of ``atexit``, and
only then stops daemons such as a client loop. So all messages that the program sent are in a buffer
by then, and can still leave. Children of ``multiprocessing`` end without ``atexit`` (before Python
3.13); they call finalizers of their own.
"""

import atexit
import logging
import os
import weakref
from multiprocessing.process import parent_process
from typing import Final, Protocol

_LAST: Final = -1_000
"""Priority among the finalizers of a child: objects that others finalize may still send."""

_log = logging.getLogger(__name__)


class Closable(Protocol):
    """Interface of clients that are closed at the program's end."""

    def close(self) -> None:
        """Waits for calls that are under way, within its time, and closes; idempotent."""


_open: "weakref.WeakSet[Closable]" = weakref.WeakSet()
_process = 0


def close_at_exit(client: Closable) -> None:
    """Closes a client at the end of this process, if it still lives and was not closed before."""
    global _process
    _open.add(client)
    if _process == os.getpid():
        return
    _process = os.getpid()
    # Once for each process: a child inherits what its parent has registered, or not.
    atexit.unregister(close_all)
    atexit.register(close_all)
    if parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, close_all, exitpriority=_LAST)


def closed(client: Closable) -> None:
    """Note that a client was closed; nothing is left to be done at the end."""
    _open.discard(client)


def close_all() -> None:
    """Closes all clients that were not closed."""
    for client in list(_open):
        try:
            client.close()
        except Exception:
            # The others must be closed, too.
            _log.exception("a client could not be closed at the end of the program")
