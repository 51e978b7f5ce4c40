"""Makes a snapshot of a store that is in use, and a store of a snapshot.

A snapshot is made in three steps, each safe beside a broker that goes on:

1. ``begin``: copies the small files, and removes leftovers of earlier tries.
2. The index process copies its live parts into ``index/``.
3. ``finish``: links the log's full segments and copies the last one, up to a commit-log offset that
   was durable when steps 1 and 2 were done; so none of their files is ahead of the log.

Full segments never change, and retention removes the oldest first. So they are linked from the
newest to the oldest: if one is missing, all before it are, and the linked ones have no gaps.
No hold on retention is needed.
"""

import errno
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from mqmesh.errors import ConfigError, CorruptRecord, DiskFull, StorageError
from mqmesh.log_identity import EPOCHS_APART
from mqmesh.storage.commitlog.checkpoint import Checkpoint, CheckpointFile
from mqmesh.storage.files.atomic_file import (
    peek_document,
    save_document,
    storage_error,
    sync_directory,
)
from mqmesh.storage.files.disk_space import SpaceOf, system_space
from mqmesh.storage.log.flush import SYSTEM_SYNC
from mqmesh.storage.log.store_key import NAMES as SECRETS
from mqmesh.storage.queues.queue_table import decode_table, encode_without_files
from mqmesh.storage.tools.snapshot import (
    MANIFEST,
    PIECE_BYTES,
    UNFINISHED,
    FileKind,
    Manifest,
    SnapshotFile,
    broker_of,
    checksum_of,
    is_sound,
    load_manifest,
    seal_manifest,
)
from mqmesh.storage.tools.snapshot_keeping import remove_older
from mqmesh.storage.tools.snapshot_reading import Snapshot, verify_log
from mqmesh.units import MIB

INDEX_DIRECTORY: Final = "index"
COPY_BYTES: Final = 64 * MIB
"""Bytes copied by one call of the system, which lets other threads work meanwhile."""
PIECES_PER_S: Final = 10
"""Waits per second of a copy whose speed is limited."""

_log = logging.getLogger(__name__)

_SEGMENT: Final = re.compile(r"\d{20}\Z")
_SEALED: Final = re.compile(r"\d{20}\.sealed\Z")
_LIVE: Final = re.compile(r"\d{20}\.live\Z")
_DOCUMENT: Final = re.compile(r"[a-z_]{1,64}\.json\Z")
_STATE_FILES: Final = ("queue-table", "epochs", "log-beginning", *SECRETS)
_NO_LINK: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP})
_NO_COPY_CALL: Final = frozenset({errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})

OnStep = Callable[[str, int, int], None]
"""Callback for progress: the step being done, bytes done, bytes in all."""


class Pace:
    """Limits copies to so many bytes a second, and ends them on request.

    Attributes:
        piece_bytes: Bytes that may be copied before ``copied`` is called.
    """

    def __init__(
        self,
        bytes_per_s: int = 0,
        is_over: Callable[[], bool] = lambda: False,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Takes the limit.

        Args:
            bytes_per_s: Largest number of bytes a second; 0 for no limit.
            is_over: Called after each piece; True ends the copy.
            sleep: Waits so many seconds.
        """
        self.piece_bytes = COPY_BYTES
        if bytes_per_s:
            self.piece_bytes = max(1, min(COPY_BYTES, bytes_per_s // PIECES_PER_S))
        self._bytes_per_s = bytes_per_s
        self._is_over = is_over
        self._sleep = sleep

    def copied(self, count: int) -> None:
        """Waits as long as so many bytes may take.

        Raises:
            StorageError: ``is_over`` ended the copy.
        """
        if self._is_over():
            raise StorageError("the copy was ended before it was whole")
        if self._bytes_per_s:
            self._sleep(count / self._bytes_per_s)


_AT_ONCE: Final = Pace()


class SnapshotOf(msgspec.Struct, frozen=True, kw_only=True):
    """Source of a snapshot.

    Attributes:
        mqmesh_version: Version of this program.
        cluster_name: Cluster of the broker.
        broker_name: Name of the broker.
        broker_id: Id of the broker.
        store_id: Identity of the store.
        epoch: Epoch of the log.
        end_offset: Commit-log offset of a record or of the log's end, durable.
        created_ms: Current time, wall clock.
        archive: Archive that takes it in and deletes it then; empty for none.
    """

    mqmesh_version: str
    cluster_name: str
    broker_name: str
    broker_id: int
    store_id: int
    epoch: int
    end_offset: int
    created_ms: int
    archive: str = ""


def begin_snapshot(
    store: Path, root: Path, name: str, *, reserve_bytes: int, space_of: SpaceOf = system_space
) -> Path:
    """Makes the directory of a snapshot with copies of the small files.

    Args:
        store: Directory of the store.
        root: Directory of snapshots; made if need be.
        name: Name of the new snapshot.
        reserve_bytes: Room that must stay free on the disk, beside a copy of the last segment.
        space_of: Measures the free space of the disk.

    Returns:
        Directory of the snapshot, under a temporary name.

    Raises:
        DiskFull: There is not enough room.
        StorageError: The snapshot cannot be made.
    """
    new = root / (name + UNFINISHED)
    try:
        root.mkdir(parents=True, exist_ok=True)
        remove_unfinished(root, broker_of(name))
        last = max(
            (p for p in (store / "commitlog").iterdir() if _SEGMENT.match(p.name)), default=None
        )
        wanted = reserve_bytes + (last.stat().st_size if last is not None else 0)
        available = space_of(root).available
        if available < wanted:
            raise DiskFull(
                f"a snapshot needs {wanted} bytes on the disk of {root}, {available} are available "
                "(storage.disk_reserve_bytes and a log segment)"
            )
        (new / "commitlog").mkdir(parents=True)
        (new / "config").mkdir()
        (new / INDEX_DIRECTORY).mkdir()
        for path in _documents(store):
            _copy_file(path, new / "config" / path.name)
        for state in _STATE_FILES:
            try:
                _copy_file(store / state, new / state)
            except FileNotFoundError:
                continue
    except OSError as error:
        abandon_snapshot(new)
        raise storage_error(error, f"the snapshot {new} cannot be made") from error
    return new


def remove_unfinished(root: Path, broker_name: str) -> None:
    """Removes the leftovers of a broker's unfinished snapshots.

    Args:
        root: Directory of snapshots; need not exist.
        broker_name: Name of the snapshots' broker.
    """
    for path in root.glob(f"*{UNFINISHED}"):
        if broker_of(path.name) == broker_name:
            abandon_snapshot(path)


def abandon_snapshot(new: Path) -> None:
    """Removes a snapshot that is not finished."""
    shutil.rmtree(new, ignore_errors=True)


def finish_snapshot(
    store: Path, new: Path, facts: SnapshotOf, *, keep: int, pace: Pace = _AT_ONCE
) -> tuple[Path, Manifest]:
    """Links and copies log and index, writes the manifest, and gives the directory its name.

    Args:
        store: Directory of the store.
        new: Directory that ``begin_snapshot`` made.
        facts: Source of the snapshot.
        keep: Snapshots of this broker to keep, those for archives not counted; older ones are
            removed. 0 keeps all.
        pace: Speed of the copies.

    Returns:
        Directory and manifest of the snapshot.

    Raises:
        DiskFull: No room; the snapshot was removed.
        StorageError: The snapshot cannot be made, and was removed.
    """
    try:
        segments = _take_segments(store / "commitlog", new / "commitlog", facts.end_offset, pace)
        _take_index(store / INDEX_DIRECTORY, new / INDEX_DIRECTORY, pace)
        files = [*segments, *_listed(new)]
        manifest = Manifest(
            **msgspec.structs.asdict(facts),
            start_offset=min((int(file.path[-20:]) for file in segments), default=facts.end_offset),
            files=files,
        )
        text = seal_manifest(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        _write(new / MANIFEST, text)
        for directory in [new, *(path for path in new.rglob("*") if path.is_dir())]:
            sync_directory(directory)
        final = new.with_name(new.name.removesuffix(UNFINISHED))
        new.rename(final)
        sync_directory(final.parent)
    except (OSError, StorageError) as error:
        abandon_snapshot(new)
        if isinstance(error, StorageError):
            raise
        raise storage_error(error, f"the snapshot {new} cannot be made") from error
    if keep:
        try:
            remove_older(final.parent, facts.broker_name, keep)
        except (OSError, ConfigError, StorageError) as error:
            _log.warning("older snapshots of %s cannot be removed: %s", facts.broker_name, error)
    return final, manifest


def _take_segments(source: Path, target: Path, end_offset: int, pace: Pace) -> list[SnapshotFile]:
    names = sorted(path.name for path in source.iterdir() if _SEGMENT.match(path.name))
    starts = [int(name) for name in names]
    files: list[SnapshotFile] = []
    for number in range(len(names) - 1, -1, -1):
        name, start = names[number], starts[number]
        if start >= end_offset:
            continue  # prepared ahead, or newer than the snapshot
        try:
            size = (source / name).stat().st_size
            # A file that was cut from outside ends at the latest where the next one begins.
            if number + 1 < len(names):
                size = min(size, starts[number + 1] - start)
            if start + size <= end_offset and (source / name).stat().st_size == size:
                _link_or_copy(source / name, target / name, pace)
            else:
                size = min(size, end_offset - start)
                _copy_file(source / name, target / name, size, pace)
        except FileNotFoundError:
            break  # retention has removed it meanwhile, and all before it
        files.append(SnapshotFile(path=f"commitlog/{name}", size=size, kind=FileKind.SEGMENT))
    if files and int(files[0].path[-20:]) + files[0].size < end_offset:
        raise CorruptRecord(f"the log in {source} ends before {end_offset}")
    return files[::-1]


def _take_index(source: Path, target: Path, pace: Pace) -> None:
    """Links sealed parts; a part that vanishes meanwhile is left out as a whole."""
    if not source.is_dir():
        return
    for path in sorted(p for p in source.iterdir() if _SEALED.match(p.name)):
        part = target / path.name
        try:
            part.mkdir()
            for name in ("seal", "data.mdb"):
                _link_or_copy(path / name, part / name, pace)
        except FileNotFoundError:
            shutil.rmtree(part)
            continue
        shutil.rmtree(target / f"{path.name[:20]}.live", ignore_errors=True)


def _listed(new: Path) -> Iterator[SnapshotFile]:
    for path in sorted((new / "config").iterdir()):
        yield _listing(new, path, FileKind.CONFIG)
    for state in _STATE_FILES:
        if (new / state).exists():
            yield _listing(new, new / state, FileKind.STATE)
    for part in sorted((new / INDEX_DIRECTORY).iterdir()):
        if _SEALED.match(part.name):
            yield _listing(new, part / "seal", FileKind.INDEX)
            known = _sealed_checksum(part / "seal")
            yield _listing(new, part / "data.mdb", FileKind.INDEX, known)
        elif _LIVE.match(part.name) and (part / "data.mdb").is_file():
            yield _listing(new, part / "data.mdb", FileKind.INDEX)


def _sealed_checksum(path: Path) -> int | None:
    """Return the checksum in a file's seal: to read the file again takes a second a gigabyte."""
    document = peek_document(path)
    try:
        return None if document is None else int(msgspec.json.decode(document)["crc32"])
    except (msgspec.MsgspecError, TypeError, KeyError, ValueError):
        return None


def _listing(new: Path, path: Path, kind: FileKind, checksum: int | None = None) -> SnapshotFile:
    if checksum is None and path.name not in SECRETS:
        checksum = checksum_of(path)
    return SnapshotFile(
        path=path.relative_to(new).as_posix(),
        size=path.stat().st_size,
        kind=kind,
        # Other users may read the manifest, so it has no checksum of a secret.
        crc32=checksum,
    )


def restore_snapshot(
    directory: Path,
    target: Path,
    *,
    damaged: bool = False,
    on_step: OnStep = lambda step, done, total: None,
) -> Manifest:
    """Makes a store of a snapshot, which a broker can be started on.

    Its log goes on with a higher epoch, by which records of both stores are distinguished.
    Queues and everything else derived from the log are made anew when the store is opened. The
    files are copies: neither the snapshot nor its source is ever written to.
    Everything is read and checked before the first file is made.

    Args:
        directory: Directory of the snapshot.
        target: Directory of the store; it does not exist, or is empty.
        damaged: True to accept damaged stretches of the log; their messages are lost.
        on_step: Called with the progress.

    Raises:
        ConfigError: The directory is no snapshot, or the target is in the way.
        CorruptRecord: The snapshot is damaged.
        DiskFull, StorageError: The store cannot be made.
    """
    manifest = load_manifest(directory)
    try:
        if target.exists() and any(target.iterdir()):
            raise ConfigError(f"{target} is not empty; a store is restored into an empty directory")
        if not damaged:
            _check_log(directory, on_step)
        target.mkdir(parents=True, exist_ok=True)
        total = sum(file.size for file in manifest.files)
        done = 0
        for file in manifest.files:
            path = target / file.path
            if file.kind is FileKind.INDEX and ".live/" in file.path:
                continue  # it is not trusted: it is made again from the log
            if not is_sound(directory, file):
                if file.kind is FileKind.INDEX:
                    continue
                raise CorruptRecord(f"{directory / file.path} fails its checksum")
            on_step("copying", done, total)
            path.parent.mkdir(parents=True, exist_ok=True)
            _copy_file(directory / file.path, path)
            done += file.size
        _write_checkpoint(target, manifest)
        for part in [target, *(path for path in target.rglob("*") if path.is_dir())]:
            sync_directory(part)
    except OSError as error:
        raise storage_error(error, f"{target} cannot be made") from error
    return manifest


def _check_log(directory: Path, on_step: OnStep) -> None:
    """Check every record of a snapshot's log.

    Raises:
        CorruptRecord: Some are damaged; the message has the number of stretches, and the first
            place.
    """
    report = verify_log(
        Snapshot(directory),
        lambda progress: on_step(progress.step, progress.done_bytes, progress.total_bytes),
    )
    if report.damage:
        first, count = report.damage[0], len(report.damage) + report.further_damage
        raise CorruptRecord(
            f"the log of {directory} is damaged from {first.start_offset} to {first.end_offset} "
            f"({first.reason}){f', and in {count - 1} further places' if count > 1 else ''}; "
            "`mqmesh snapshot verify` lists them, `mqmesh snapshot restore --damaged` restores "
            "what is left"
        )


def _write_checkpoint(target: Path, manifest: Manifest) -> None:
    """Notes that the log was synced to its end, and that no consume queue is there yet."""
    through = manifest.start_offset
    document = peek_document(target / "queue-table")
    if document is not None:
        table = decode_table(document)
        through = min(table.head.through, manifest.end_offset)
        (target / "queue-table").unlink()
        save_document(target / "queue-table", encode_without_files(table, manifest.start_offset))
    file = CheckpointFile(target / "checkpoint", sync=SYSTEM_SYNC)
    try:
        file.save(
            Checkpoint(
                store_id=manifest.store_id,
                epoch=manifest.epoch + EPOCHS_APART,
                synced_through=manifest.end_offset,
                dispatched_through=through,
                queues_synced_through=manifest.start_offset,
                clean=True,
                # The boot id of no running system: so entries of all queues are written anew.
                boot_id=bytes(16),
            )
        )
    finally:
        file.close()


def copy_snapshot(
    directory: Path, target: Path, *, on_step: OnStep = lambda step, done, total: None
) -> None:
    """Copies a snapshot, manifest last; links where that is possible.

    Args:
        directory: Directory of the snapshot.
        target: Directory of the copy; it must not exist.
        on_step: Called with the progress.

    Raises:
        ConfigError: The directory is no snapshot, or the target exists.
        StorageError: The snapshot cannot be copied; the target was removed.
    """
    manifest = load_manifest(directory)
    if target.exists():
        raise ConfigError(f"{target} exists already")
    new = target.with_name(target.name + UNFINISHED)
    total, done = manifest.disk_bytes, 0
    try:
        abandon_snapshot(new)
        for file in manifest.files:
            on_step("copying", done, total)
            (new / file.path).parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(directory / file.path, new / file.path)
            done += file.size
        new.mkdir(parents=True, exist_ok=True)
        _copy_file(directory / MANIFEST, new / MANIFEST)
        for part in [new, *(path for path in new.rglob("*") if path.is_dir())]:
            sync_directory(part)
        new.rename(target)
        sync_directory(target.parent)
    except OSError as error:
        abandon_snapshot(new)
        raise storage_error(error, f"{target} cannot be made") from error


def _documents(store: Path) -> list[Path]:
    directory = store / "config"
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _DOCUMENT.match(path.name))


def _link_or_copy(source: Path, target: Path, pace: Pace = _AT_ONCE) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        _copy_file(source, target, pace=pace)


def _copy_file(source: Path, target: Path, size: int | None = None, pace: Pace = _AT_ONCE) -> None:
    """Copies a file, or its first bytes, durably; its permissions stay the same."""
    with (
        open(source, "rb", buffering=0) as old,
        open(target, "xb", buffering=0, opener=_private) as new,
    ):
        os.fchmod(new.fileno(), stat.S_IMODE(os.fstat(old.fileno()).st_mode))
        size = os.fstat(old.fileno()).st_size if size is None else size
        _copy_bytes(old.fileno(), new.fileno(), size, pace)
        os.fsync(new.fileno())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _copy_bytes(source: int, target: int, size: int, pace: Pace) -> None:
    done = 0
    while done < size:
        try:
            count = os.copy_file_range(source, target, min(pace.piece_bytes, size - done))
        except OSError as error:
            if done or error.errno not in _NO_COPY_CALL:
                raise
            break
        if not count:
            raise OSError(errno.EIO, f"the file ends after {done} of {size} bytes")
        done += count
        pace.copied(count)
    while done < size:
        piece = os.pread(source, min(PIECE_BYTES, pace.piece_bytes, size - done), done)
        if not piece:
            raise OSError(errno.EIO, f"the file ends after {done} of {size} bytes")
        view = memoryview(piece)
        while view:
            view = view[os.write(target, view) :]
        done += len(piece)
        pace.copied(len(piece))


def _write(path: Path, data: bytes) -> None:
    new = path.with_name(path.name + ".part")
    with open(new, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
