"""Data cut off the log, kept aside in files below ``cut/``.

A file is named ``<epoch>-<commit-log offset>``: the newest epoch that was cut, and the offset of
its first byte. Its content is the log from there on, with the zeros at the ends of segments.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from mqmesh.private_files import FILE_MODE, make_folder
from mqmesh.storage.files.atomic_file import storage_error, sync_directory
from mqmesh.units import GIB, MIB

log = logging.getLogger(__name__)

NAME: Final = "cut"
MOST_BYTES: Final = 1 * GIB
"""Largest number of bytes kept of one cut."""
KEPT_MS: Final = 7 * 24 * 3_600_000
"""Time that a file is kept, by the wall clock."""
_PIECE_BYTES: Final = 1 * MIB


def keep_cut(
    directory: Path, read: Callable[[int, int], bytes], start: int, end: int, *, epoch: int
) -> Path:
    """Writes a stretch of the log that is about to be cut to a file, durably.

    Args:
        directory: Directory of the files; made if need be.
        read: Reads bytes of the log, from an offset on, at most so many; at least one.
        start: Commit-log offset of the first byte.
        end: Commit-log offset behind the last byte; only the first ``MOST_BYTES`` are kept.
        epoch: The newest epoch in the stretch.

    Returns:
        The file.

    Raises:
        DiskFull: No room.
        StorageError: The log cannot be read, or the file not written.
    """
    path = directory / f"{epoch}-{start}"
    new = path.with_name(path.name + ".new")
    stop = min(end, start + MOST_BYTES)
    try:
        make_folder(directory)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
        try:
            while start < stop:
                rest = memoryview(read(start, min(_PIECE_BYTES, stop - start)))
                start += len(rest)
                while rest:
                    rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(new, path)
        sync_directory(directory)
        sync_directory(directory.parent)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise storage_error(error, f"{path} cannot be written, so nothing is cut") from error
    if stop < end:
        log.error("%d bytes of what is cut are not kept in %s", end - stop, path)
    return path


def remove_old_cuts(directory: Path, now_ms: int) -> None:
    """Removes files that were kept for long enough.

    Args:
        directory: Directory of the files.
        now_ms: Wall clock.
    """
    try:
        for path in directory.iterdir():
            if path.stat().st_mtime_ns // 1_000_000 < now_ms - KEPT_MS:
                path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("what was cut off the log stays in %s: %s", directory, error)
