"""Removal of a broker's snapshots: older ones, and those that no archive waits for any more.

A snapshot that was made for an archive stays until the archive has taken it in and deletes it, or
until others cover its log, or until it exceeds its room. A snapshot that is being read stays.
"""

import fcntl
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from mqmesh.storage.files.atomic_file import storage_error
from mqmesh.storage.files.disk_space import SpaceOf, system_space
from mqmesh.storage.tools.snapshot import MANIFEST, broker_of, delete_snapshot

_log = logging.getLogger(__name__)


class WaitingSnapshot(msgspec.Struct, frozen=True):
    """A snapshot for an archive, as its manifest describes it.

    Attributes:
        archive: Archive that it was made for; empty for none.
        store_id: Identity of the store.
        start_offset: Commit-log offset where its log begins.
        end_offset: Commit-log offset behind its last record.
        created_ms: Wall clock of its creation.
        name: Name of its directory.
    """

    archive: str = ""
    store_id: int = 0
    start_offset: int = 0
    end_offset: int = 0
    created_ms: int = 0
    name: str = ""


class WaitingReport(msgspec.Struct, frozen=True):
    """Snapshots of a broker that archives have not taken in.

    Attributes:
        count: Number of snapshots.
        oldest_ms: Wall clock of the creation of the oldest; 0 without any.
        own_bytes: Bytes on the disk that only these snapshots still hold.
        dropped: Names of snapshots that were removed now to make room.
    """

    count: int = 0
    oldest_ms: int = 0
    own_bytes: int = 0
    dropped: tuple[str, ...] = ()


@contextmanager
def hold_snapshot(directory: Path) -> Iterator[None]:
    """Keeps a broker from removing a snapshot while it is read; without effect on a file system
    that has no locks.

    Args:
        directory: Directory of the snapshot.

    Raises:
        StorageError: There is no snapshot, or it cannot be read.
    """
    try:
        manifest = os.open(directory / MANIFEST, os.O_RDONLY)
    except OSError as error:
        raise storage_error(error, f"{directory / MANIFEST} cannot be read") from error
    try:
        with suppress(OSError):
            fcntl.flock(manifest, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(manifest)


def remove_older(root: Path, broker_name: str, keep: int) -> None:
    """Removes a broker's snapshots except the newest; none that was made for an archive.

    Args:
        root: Directory of snapshots.
        broker_name: Name of the snapshots' broker.
        keep: Number of snapshots that stay, from 1.
    """
    for one in [one for one in _snapshots(root, broker_name) if not one.archive][:-keep]:
        _remove(root / one.name)


def waiting_snapshots(root: Path, broker_name: str, archive: str) -> list[tuple[Path, bool]]:
    """Returns the existing snapshots of a broker that were made for an archive, oldest first,
    and whether the archive would lack a part of the log without each.

    Args:
        root: Directory of snapshots.
        broker_name: Name of the snapshots' broker.
        archive: Archive that they were made for.
    """
    found = [one for one in _snapshots(root, broker_name) if one.archive == archive]
    needed = needed_snapshots(found)
    return [(root / one.name, one in needed) for one in found]


def clean_waiting(
    root: Path,
    broker_name: str,
    *,
    most_bytes: int,
    most_used_percent: int,
    space_of: SpaceOf = system_space,
) -> WaitingReport:
    """Removes snapshots for archives that others cover, and the oldest where room is short.

    One snapshot is removed at a time, so that the next call measures how much room that made. None
    is removed while the oldest is being read: an archive takes it in, and deletes it.

    Args:
        root: Directory of snapshots; need not exist.
        broker_name: Name of the snapshots' broker.
        most_bytes: Limit of the bytes that only these snapshots hold; 0 for no limit.
        most_used_percent: Used part of the disk beyond which the oldest is removed, if that makes
            room.
        space_of: Measures the free space of the disk.

    Raises:
        OSError: The directory cannot be read.
    """
    if not root.is_dir():
        return WaitingReport()
    found = [one for one in _snapshots(root, broker_name) if one.archive]
    needed = needed_snapshots(found)
    waiting = [one for one in found if one in needed or not _remove(root / one.name)]
    dropped = []
    own_bytes = _own_bytes([root / one.name for one in waiting])
    is_short = own_bytes and (
        0 < most_bytes < own_bytes or space_of(root).used_percent >= most_used_percent
    )
    if is_short and _remove(root / waiting[0].name):
        dropped.append(waiting.pop(0).name)
        own_bytes = _own_bytes([root / one.name for one in waiting])
    return WaitingReport(
        len(waiting),
        min((one.created_ms for one in waiting), default=0),
        own_bytes,
        tuple(dropped),
    )


def needed_snapshots(found: Sequence[WaitingSnapshot]) -> list[WaitingSnapshot]:
    """Returns the snapshots without which an archive would lack a stretch of a log. Pure.

    Args:
        found: Snapshots of a broker, oldest first.
    """
    chains: dict[tuple[str, int], list[WaitingSnapshot]] = {}
    for one in found:
        chain = chains.setdefault((one.archive, one.store_id), [])
        # The newest covers each one that begins no earlier, and with the one before the last it may
        # cover the last. It ends earlier if the store was restored from a backup.
        while chain and _has(one, chain[-1].start_offset, chain[-1].end_offset):
            chain.pop()
        while (
            len(chain) > 1
            and chain[-2].start_offset <= chain[-1].start_offset
            and _has(one, chain[-2].end_offset, chain[-1].end_offset)
        ):
            chain.pop()
        chain.append(one)
    needed = {one.name for chain in chains.values() for one in chain}
    return [one for one in found if one.name in needed]


def _has(one: WaitingSnapshot, start: int, end: int) -> bool:
    return one.start_offset <= start and end <= one.end_offset


def _snapshots(root: Path, broker_name: str) -> list[WaitingSnapshot]:
    """Returns whole snapshots of a broker; their names begin with the time, so oldest first."""
    found = []
    for path in sorted(root.iterdir()):
        if broker_of(path.name) != broker_name:
            continue
        try:
            text = (path / MANIFEST).read_bytes()
        except OSError:
            continue  # unfinished, or just removed
        try:
            one = msgspec.json.decode(text, type=WaitingSnapshot)
        except msgspec.MsgspecError:
            one = WaitingSnapshot()
        found.append(msgspec.structs.replace(one, name=path.name))
    return found


def _own_bytes(directories: list[Path]) -> int:
    """Returns the bytes on the disk of files that belong to no store and no other snapshot."""
    links: Counter[tuple[int, int]] = Counter()
    held: dict[tuple[int, int], tuple[int, int]] = {}
    for directory in directories:
        for folder, _, names in os.walk(directory):
            for name in names:
                try:
                    found = os.lstat(os.path.join(folder, name))
                except FileNotFoundError:
                    continue  # an archive has taken it in meanwhile
                inode = (found.st_dev, found.st_ino)
                links[inode] += 1
                held[inode] = (found.st_nlink, found.st_blocks * 512)
    return sum(size for inode, (count, size) in held.items() if links[inode] >= count)


def _remove(directory: Path) -> bool:
    """Removes a snapshot; False if it is being read, or another process has removed it."""
    try:
        with open(directory / MANIFEST, "rb") as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError as error:
                _log.debug("%s cannot be locked: %s", directory, error)  # no locks there
            delete_snapshot(directory)
    except FileNotFoundError:
        return False
    return True
