"""The end of a process's file descriptors, which may hide behind a connection that is not made."""

import errno
import os
import resource
from typing import Final

from mqmesh.errors import TooManyOpenFiles

NONE_LEFT: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""Error numbers for a lack of descriptors: of the process, and of the system."""


def too_many_open_files(what: str, number: int) -> TooManyOpenFiles:
    """Return the error for a file or socket that cannot be opened.

    Args:
        what: Name of the file or socket, for the sentence.
        number: The system's error number, one of ``NONE_LEFT``.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    whose = "this process" if number == errno.EMFILE else "the system"
    return TooManyOpenFiles(
        f"{what} cannot be opened: {whose} has no file descriptor left; a process may have "
        f"{most} (ulimit -n, LimitNOFILE of systemd), and each client takes some 20"
    )


def shortage(what: str) -> TooManyOpenFiles | None:
    """Return the error for a lack of descriptors, or None if there are some.

    ZeroMQ connects in a thread of its own, where it tries again and again without a report.

    Args:
        what: Name of the connection that needs a descriptor.
    """
    try:
        os.close(os.eventfd(0))
    except OSError as error:
        if error.errno in NONE_LEFT:
            return too_many_open_files(what, error.errno)
        raise
    return None
