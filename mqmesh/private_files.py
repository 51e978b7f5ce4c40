"""Private files and folders, 0600 and 0700: only the user who runs mqmesh can read them.

Messages, offsets and settings stand in them. The processes of roles have a umask that leaves
other users no rights; files that are also made in users' programs are created with an explicit
mode. A file or folder that an older version, a copy or a restored backup left readable for others
is made private when it is used again.
"""

import logging
import os
import stat
from pathlib import Path
from typing import Final

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_OTHERS: Final = 0o077

log = logging.getLogger(__name__)


def keep_private() -> None:
    """Has all that this process makes from now on be its user's alone."""
    os.umask(_OTHERS)


def make_folder(folder: Path) -> None:
    """Makes a folder that only its owner may look into; one that is there stays as it is.

    Raises:
        OSError: It cannot be made.
    """
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)


def open_private(path: str, flags: int) -> int:
    """Return an opener for ``open`` that makes a file only its owner may read."""
    return os.open(path, flags, FILE_MODE)


def save_private(path: Path, text: str) -> None:
    """Puts a file that only its owner may read in the place of the one that was there, durably.

    Raises:
        OSError: It cannot be written.
    """
    beside = path.with_name(f"{path.name}.new")
    with open(beside, "w", encoding="utf-8", opener=open_private) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def make_private(*paths: Path) -> None:
    """Take from others their rights to files and folders of ours, and to all in them.

    Quick where it was done before: only a folder that others may enter is walked through. Files of
    another user, links and missing files are left alone.

    Args:
        paths: Files and folders.
    """
    for path in paths:
        try:
            _close(path)
        except OSError as error:
            log.warning("others may read %s: %s", path, error.strerror or error)


def _close(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    mode = stat.S_IMODE(found.st_mode)
    is_folder = stat.S_ISDIR(found.st_mode)
    if not mode & _OTHERS or found.st_uid != os.geteuid():
        return
    if not is_folder and not stat.S_ISREG(found.st_mode):
        return
    if is_folder:
        # The folder last: a run that is killed in between begins again.
        for inner in path.iterdir():
            _close(inner)
    path.chmod(mode & ~_OTHERS)
