"""Descriptors of files and sockets, and the error when the process has none left."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from mqmesh.transport.descriptors import NONE_LEFT, too_many_open_files


@contextmanager
def descriptors_for(what: str) -> Iterator[None]:
    """Turn the system's error for want of descriptors into mqmesh's.

    Args:
        what: Name of the file or socket that the block opens, for the error.

    Raises:
        TooManyOpenFiles: The process or the system has no descriptor left.
    """
    try:
        yield
    except (OSError, zmq.ZMQError) as error:
        if error.errno not in NONE_LEFT:
            raise
        raise too_many_open_files(what, error.errno) from error


def check_descriptors(count: int, what: str) -> None:
    """Check that descriptors can be opened.

    Args:
        count: Number of needed descriptors.
        what: Name of the part that needs them, for the error.

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
