"""Record on disk of a running cluster: its supervisor, and its processes.

The supervisor holds the data folder itself (flock) as long as it lives, and in it
``mqmesh.lock``, which has its process id; ``mqmesh.run.json`` says what it runs. The kernel
drops the locks however the supervisor dies, so a stale file is never taken for a running
cluster, and no removed file makes a running one look stopped.
"""

import fcntl
import os
import select
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec

from mqmesh.errors import ConfigError
from mqmesh.private_files import FILE_MODE, make_folder, make_private, open_private
from mqmesh.storage.files.directory_lock import DirectoryLock

T = TypeVar("T")

LOCK_NAME: Final = "mqmesh.lock"
RUN_NAME: Final = "mqmesh.run.json"
DOWN_NAME: Final = "mqmesh.down.json"
LOOK_AGAIN: Final = signal.SIGUSR1
"""Has the supervisor read ``DOWN_NAME``: names of processes that are to be down, the others up."""
ORPHAN_GRACE_MS: Final = 1_500
LOCK_TRIES: Final = 5
LOCK_PAUSE_S: Final = 0.02


class RoleEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a running cluster.

    Attributes:
        role: ``namesrv``, ``broker``, …
        name: Name of the instance.
        pid: Process id, 0 while there is none.
        endpoint: Endpoint of the process, "" while that is unknown.
        state: ``starting``, ``running``, ``waiting`` (for its next start), ``stopping`` or
            ``stopped``; one that was stopped alone stays so until it is started again.
        started_ms: Wall-clock time of its last start, in ms.
        restarts: Number of restarts.
        exits: Number of ends without a request, by reason: ``killed by SIGKILL``, …
        argv: Command line of the process.
        server_key: Public key that it proves to clients; "" where nothing is encrypted.
    """

    role: str
    name: str
    pid: int = 0
    endpoint: str = ""
    state: str = "starting"
    started_ms: int = 0
    restarts: int = 0
    exits: dict[str, int] = {}
    argv: list[str] = []
    server_key: str = ""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A running cluster.

    Attributes:
        pid: Process id of the supervisor.
        started_ms: Wall-clock time of its start, in ms.
        namesrv: Name servers, ``host:port;host:port``.
        roles: Processes of the supervisor.
        version: Version of this form.
    """

    pid: int
    started_ms: int
    namesrv: str
    roles: Annotated[list[RoleEntry], msgspec.Meta(max_length=10_000)]
    version: int = 1


class DataFolderLock:
    """Lock that gives a data folder one supervisor at most.

    Args:
        folder: Data folder; it is made when it does not exist.

    Raises:
        ConfigError: Another supervisor has it, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK_NAME
        try:
            make_folder(folder)
            make_private(path, folder / RUN_NAME)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            raise ConfigError(f"data folder {folder}: {error.strerror or error}") from error
        self._folder: DirectoryLock | None = None
        try:
            self._folder = _try(lambda: DirectoryLock(folder))
            is_ours = self._folder is not None and _try(lambda: _lock(self._descriptor)) is not None
        except OSError as error:
            self.release()
            raise ConfigError(f"data folder {folder}: no lock: {error.strerror}") from error
        if not is_ours:
            self.release()
            holder = supervisor_pid(folder)
            raise ConfigError(
                f"data folder {folder}: a cluster is running on it already"
                f"{f' (process {holder})' if holder else ''}; `mqmesh down` stops it"
            )
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        """Lets the next one have it."""
        os.close(self._descriptor)
        if self._folder is not None:
            self._folder.release()


def supervisor_pid(folder: Path) -> int:
    """Process id of the supervisor of a data folder, 0 when none is running."""
    path = folder / LOCK_NAME
    try:
        lock = DirectoryLock(folder, shared=True)
    except BlockingIOError:
        record = read_record(folder)
        return _pid_in(path) or (record.pid if record is not None else 0)
    except OSError:
        return 0
    is_held = lock.is_held
    lock.release()
    if is_held:
        return 0
    # A file system that does not lock directories.
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _pid_in(path)
    finally:
        os.close(descriptor)
    return 0


def write_record(folder: Path, record: RunRecord) -> None:
    """Replaces the record as a whole.

    Raises:
        OSError: The record could not be written; the former one stays.
    """
    new = folder / (RUN_NAME + ".new")
    with open(new, "wb", opener=open_private) as file:
        file.write(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
    new.replace(folder / RUN_NAME)


def read_record(folder: Path) -> RunRecord | None:
    """Return the record of a data folder; None when there is none that can be read."""
    try:
        return msgspec.json.decode((folder / RUN_NAME).read_bytes(), type=RunRecord)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def remove_record(folder: Path) -> None:
    """Removes the record, if there is one."""
    (folder / RUN_NAME).unlink(missing_ok=True)


def read_down(folder: Path) -> frozenset[str]:
    """Names of processes that are to be down while the rest of the cluster runs."""
    try:
        return msgspec.json.decode((folder / DOWN_NAME).read_bytes(), type=frozenset[str])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return frozenset()


def write_down(folder: Path, names: Collection[str]) -> None:
    """Replaces these names.

    Raises:
        OSError: The names could not be written; the former ones stay.
    """
    if not names:
        (folder / DOWN_NAME).unlink(missing_ok=True)
        return
    new = folder / (DOWN_NAME + ".new")
    with open(new, "wb", opener=open_private) as file:
        file.write(msgspec.json.encode(sorted(names)) + b"\n")
    new.replace(folder / DOWN_NAME)


def put_down(folder: Path, names: Collection[str], *, up: bool, timeout_ms: int) -> list[RoleEntry]:
    """Has the supervisor of a data folder stop or start processes, and waits until it has.

    Args:
        folder: Data folder.
        names: Names of the processes.
        up: True to start the processes, false to stop them.
        timeout_ms: Time to wait, ms.

    Returns:
        Entries of the processes in their new state.

    Raises:
        ConfigError: Nothing is running, or there are no such processes.
        TimeoutError: The supervisor has not done so after ``timeout_ms``.
        PermissionError: The supervisor belongs to another user.
    """
    pid, record = supervisor_pid(folder), read_record(folder)
    if not pid or record is None:
        raise ConfigError(f"no cluster is running on {folder}; `mqmesh up` starts one")
    known = {entry.name for entry in record.roles}
    if missing := sorted(set(names) - known):
        raise ConfigError(
            f"no process is named {', '.join(missing)}; there are {', '.join(sorted(known))}"
        )
    down = read_down(folder)
    write_down(folder, down - set(names) if up else down | set(names))
    os.kill(pid, LOOK_AGAIN)
    wanted = "running" if up else "stopped"
    deadline = time.monotonic() + timeout_ms / 1_000
    while True:
        record = read_record(folder)
        found = [one for one in record.roles if one.name in names] if record is not None else []
        if all(one.state == wanted for one in found):
            return found
        if time.monotonic() >= deadline:
            states = ", ".join(f"{one.name} is {one.state}" for one in found)
            raise TimeoutError(f"after {timeout_ms / 1_000:g} s {states}")
        time.sleep(LOCK_PAUSE_S)


def stop_supervisor(folder: Path, timeout_ms: int) -> bool:
    """Asks the supervisor of a data folder to stop, and waits until it is gone.

    Returns:
        False when none was running.

    Raises:
        TimeoutError: The supervisor is still there after ``timeout_ms``.
        PermissionError: The supervisor belongs to another user.
    """
    pid = supervisor_pid(folder)
    descriptor = _open_process(pid) if pid else None
    if descriptor is None:
        return False
    try:
        # Still locked, so the process that we hold is the one that was meant.
        if supervisor_pid(folder) != pid:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        if not _wait_for(descriptor, timeout_ms):
            raise TimeoutError(f"process {pid} has not stopped after {timeout_ms / 1000:g} s")
    except ProcessLookupError:
        return True
    finally:
        os.close(descriptor)
    return True


def end_orphans(record: RunRecord) -> list[str]:
    """Ends the processes that outlived their supervisor; call it only when that is gone.

    Roles end by themselves then, but one that is busy with a recovery may take a while.

    Returns:
        Names of those that were there.
    """
    found = []
    for entry in record.roles:
        descriptor = _open_process(entry.pid) if entry.pid else None
        if descriptor is None:
            continue
        try:
            # The number may have gone to a stranger; the command line shows it.
            if _command_line(entry.pid) == entry.argv:
                found.append(entry.name)
                signal.pidfd_send_signal(descriptor, signal.SIGTERM)
                if not _wait_for(descriptor, ORPHAN_GRACE_MS):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    _wait_for(descriptor, ORPHAN_GRACE_MS)
        except ProcessLookupError:
            continue
        finally:
            os.close(descriptor)
    return found


def _try(take: Callable[[], T]) -> T | None:
    # A process that looks whether a cluster is running holds the lock for microseconds.
    for _ in range(LOCK_TRIES):
        try:
            return take()
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_S)
    return None


def _lock(descriptor: int) -> int:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _pid_in(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return 0
    return int(text) if text.isdecimal() and len(text) < 11 else 0


def _open_process(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (ProcessLookupError, ValueError):
        return None


def _wait_for(descriptor: int, timeout_ms: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(timeout_ms))


def _command_line(pid: int) -> list[str]:
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return data.decode(errors="surrogateescape").split("\0")[:-1]
