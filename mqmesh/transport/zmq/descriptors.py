"""Descriptors of files and sockets, and what is raised when the process has none left."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import zmq

from mqmesh.errors import TooManyOpenFiles

_NONE_LEFT: Final = frozenset({errno.EMFILE, errno.ENFILE})


@contextmanager
def descriptors_for(what: str) -> Iterator[None]:
    """Turn the system's error for want of descriptors into ours.

    Args:
        what: That is opened in the block, for the error.

    Raises:
        TooManyOpenFiles: The process or the system has no descriptor left.
    """
    try:
        yield
    except (OSError, zmq.ZMQError) as error:
        if error.errno not in _NONE_LEFT:
            raise
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        whose = "this process" if error.errno == errno.EMFILE else "the system"
        raise TooManyOpenFiles(
            f"{what} cannot be opened: {whose} has no file descriptor left; a process may have "
            f"{most} (ulimit -n, LimitNOFILE of systemd), and each client takes some 20"
        ) from error


def check_descriptors(count: int, what: str) -> None:
    """Check that descriptors can be opened.

    Args:
        count: How many are wanted.
        what: What needs them, for the error.

    Raises:
        TooManyOpenFiles: There are fewer.
    """
    opened: list[int] = []
    try:
        with descriptors_for(what):
            opened.append(os.eventfd(0))
            while len(opened) < count:
                opened.append(os.dup(opened[0]))
    finally:
        for descriptor in opened:
            os.close(descriptor)
