"""Identity of this machine, and the paths where local sockets may stand."""

import errno
import hashlib
import os
import socket
import stat
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final

import msgspec

from mqmesh.errors import ConfigError

MAX_SOCKET_PATH_BYTES: Final = 107
"""Longest path of a Unix socket on Linux."""

_ENDED: Final = frozenset("ZXx")
"""States of processes that will do nothing more."""
_UNIX_SOCKETS: Final = Path("/proc/net/unix")
_HOST_CHARACTERS: Final = 40
"""Of a host's name in that of an abstract socket, which has 107 bytes."""
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


class ProcessMark(msgspec.Struct, array_like=True, frozen=True):
    """Names one process for ever, unlike its id, which another one gets some day.

    Attributes:
        host: ``host_id``, and which processes see one another there.
        pid: Process id.
        start: When it began, in clock ticks since the machine's start.
    """

    host: Annotated[str, msgspec.Meta(max_length=255)]
    pid: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    start: Annotated[int, msgspec.Meta(ge=0)]


def own_process() -> ProcessMark | None:
    """Return the mark of this process; None where the system does not give it."""
    found = _process_stat("self")
    space = _process_space()
    if found is None or not space:
        return None
    return ProcessMark(space, os.getpid(), found[1])


def is_gone(process: ProcessMark) -> bool:
    """Return True when a process has ended for sure; False when it lives, or runs elsewhere."""
    if process.host != _process_space():
        return False
    found = _process_stat(str(process.pid))
    return found is None or found[0] in _ENDED or found[1] != process.start


def _process_space() -> str:
    try:
        return f"{host_id()}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _process_stat(pid: str) -> tuple[str, int] | None:
    """Return state and start of a process; None when there is none."""
    try:
        # The name, in brackets, may hold anything.
        fields = Path("/proc", pid, "stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def socket_directory() -> Path:
    """Return the directory that this user's local sockets stand in, made if need be.

    Returns:
        ``<temporary directory>/mqmesh-<uid>``; only this user may look into it.

    Raises:
        ConfigError: It belongs to another user, is a link, or others may enter it.
        OSError: It cannot be made.
    """
    import tempfile  # only here: it loads what unpacks archives, and clients start sooner without

    directory = Path(tempfile.gettempdir()) / f"mqmesh-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        # In a directory that everybody may write to, another user may have been here first.
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(
                f"{directory}, the place for local sockets, is no directory of ours; remove it, "
                "set another TMPDIR, or choose a data folder with a shorter path"
            ) from None
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(
                f"others may enter {directory}, the place for local sockets; make it private: "
                "chmod 700"
            ) from None
    return directory


def socket_path(owner: Path, name: str = "sock") -> Path:
    """Return the path of a store's local socket, in a folder that only its owner may enter.

    Where that path is too long or cannot be printed, or its file system takes no sockets, and for
    an owner without a folder, it is in ``socket_directory``.

    Args:
        owner: The store's directory, held by this process; or a name of an owner without one.
        name: Of the socket, unique in the folder.

    Returns:
        A path that is the same at each start. No socket is there.

    Raises:
        ConfigError: There is no place for it; names the remedy.
        OSError: The directory cannot be made.
    """
    own = owner.resolve() / name
    name_bytes = os.fsencode(own)
    # Endpoints travel in messages, which are UTF-8, and name servers take printable ones only. No
    # path that is not UTF-8 can be printed: surrogates stand for its bytes.
    fits = len(name_bytes) <= MAX_SOCKET_PATH_BYTES and str(own).isprintable()
    if owner.is_dir() and fits and _takes_socket(own):
        return own
    digest = hashlib.blake2b(name_bytes, digest_size=8).hexdigest()
    path = socket_directory() / f"{digest}.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"the paths {own} and {path} are too long for a local socket, {MAX_SOCKET_PATH_BYTES} "
            "bytes at most; choose a shorter data folder or a shorter TMPDIR"
        )
    return path


def claim_port(host: str, port: int, folder: Path, worker: int) -> socket.socket:
    """Claim a port that the workers of one gateway share: no other gateway may listen there, too.

    The system lets all processes of a user share a port that its first process shares. So each
    worker binds a Unix socket for each port; the socket's abstract name says which gateway has the
    port. The socket ends with the process, and is visible where the port is: in the same network
    namespace.

    Args:
        host: Address that the gateway listens at.
        port: Port to claim.
        folder: Folder of all workers of the gateway; it exists.
        worker: Number of this worker.

    Returns:
        Socket that holds the claim until it is closed.

    Raises:
        OSError: A gateway of another folder has the port.
    """
    found = folder.stat()
    common = f"mqmesh-gateway/{host[:_HOST_CHARACTERS]}/{port}/"
    own = f"{common}{found.st_dev:x}.{found.st_ino:x}/"
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0{own}{worker}")
        # After the own claim: of two that begin at a time at least one sees the other.
        with _UNIX_SOCKETS.open(encoding="utf-8", errors="replace") as sockets:
            if any(f"@{common}" in line and f"@{own}" not in line for line in sockets):
                raise OSError(
                    errno.EADDRINUSE,
                    f"workers of a gateway with another store_path_root_dir listen at port {port}; "
                    "namesrv_port, broker_port_base and grpc_port of two gateways must differ",
                )
    except (FileNotFoundError, PermissionError):
        return claim  # not Linux, or the system does not show its sockets
    except BaseException:
        claim.close()
        raise
    return claim


def _takes_socket(path: Path) -> bool:
    try:
        # The folder is ours now, so a socket that is there was left by a killed process.
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
        path.unlink()
    except OSError:
        return False
    return True
