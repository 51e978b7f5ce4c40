"""What identifies this machine, and where local sockets may stand."""

import hashlib
import os
import socket
import stat
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Final

from mqmesh.errors import ConfigError

MAX_SOCKET_PATH_BYTES: Final = 107
"""Longest path of a Unix socket on Linux."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


@lru_cache(maxsize=1)
def host_id() -> str:
    """Identifies this machine until it restarts: equal ids may use ``ipc`` endpoints.

    Containers on one machine differ in their host names, and do not share sockets either.

    Returns:
        16 hex digits.
    """
    try:
        boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot_id = ""  # not Linux: the name alone has to do
    text = f"{boot_id}\n{socket.gethostname()}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def socket_directory() -> Path:
    """The directory that this user's local sockets stand in, made if need be.

    Returns:
        ``<temporary directory>/mqmesh-<uid>``; only this user may look into it.

    Raises:
        ConfigError: It belongs to somebody else, is a link, or others may enter it.
        OSError: It cannot be made.
    """
    directory = Path(tempfile.gettempdir()) / f"mqmesh-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        # In a directory that everybody may write to, somebody may have been here first.
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(f"{directory} is no directory of ours; remove it") from None
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(f"others may enter {directory}; make it private: chmod 700") from None
    return directory


def socket_path(owner: Path) -> Path | None:
    """Where the local socket of a store stands.

    Args:
        owner: The store's directory.

    Returns:
        A path that is the same at each start, or None if it would be too long for a socket.

    Raises:
        ConfigError, OSError: As ``socket_directory``.
    """
    name = hashlib.blake2b(str(owner.resolve()).encode(), digest_size=8).hexdigest()
    path = socket_directory() / f"{name}.sock"
    return path if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES else None
