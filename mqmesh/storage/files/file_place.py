"""Distinguishes a file from its copies, to find a store put back from a backup, or moved."""

import os
from pathlib import Path

from mqmesh.private_files import FILE_MODE
from mqmesh.storage.files.atomic_file import storage_error


def file_place(path: Path) -> str:
    """Return a text that differs for every copy of a file, and after a change of owner or rights.

    A text kept elsewhere that is no longer the same shows a copy. A snapshot of a whole
    disk that is put back under a store is none.

    Args:
        path: The file; it is made, empty, if it is missing. Nobody writes to it.

    Raises:
        StorageError: It cannot be made or looked at.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise storage_error(error, f"{path} cannot be made or looked at") from error
    # The number alone is given again; the time no copy takes over.
    return f"{found.st_ino}-{found.st_ctime_ns}"
