"""Distinguishes a file from its copies, to find a store put back from a backup, or moved."""

import os
from pathlib import Path

from mqmesh.private_files import FILE_MODE
from mqmesh.storage.files.atomic_file import storage_error


def file_place(path: Path) -> str:
    """Return a text that differs for every copy of a file, and after a change of owner or rights.

    If a text kept elsewhere differs from this one, the file is a copy. A snapshot of a whole
    disk that is put back under a store does not count as one.

    Args:
        path: The file; it is made, empty, if it is missing. It must never be written.

    Raises:
        StorageError: The file cannot be made or read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise storage_error(error, f"{path} cannot be made or looked at") from error
    # A file system reuses the inode number alone; a copy never takes over the time.
    return f"{found.st_ino}-{found.st_ctime_ns}"
