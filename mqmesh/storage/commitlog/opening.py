"""Opens the files of a store and brings all of them to one state."""

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqmesh.clock import Clock
from mqmesh.errors import CorruptRecord, DiskFull, StorageError
from mqmesh.private_files import make_folder, make_private
from mqmesh.storage.commitlog.checkpoint import Checkpoint, CheckpointFile, read_boot_id
from mqmesh.storage.commitlog.checkpointer import Checkpointer, sync_paths
from mqmesh.storage.commitlog.cleaner import Cleaner
from mqmesh.storage.commitlog.damage import DamageList
from mqmesh.storage.commitlog.machine import Machine
from mqmesh.storage.commitlog.recovery import LogRecovery, Recovered
from mqmesh.storage.files.atomic_file import (
    load_document,
    save_document,
    storage_error,
    sync_directory,
)
from mqmesh.storage.files.chores import Chores
from mqmesh.storage.files.disk_space import SpaceOf
from mqmesh.storage.files.open_files import OpenFiles
from mqmesh.storage.files.store_lock import StoreLock
from mqmesh.storage.interface import (
    FlushDiskType,
    OnProgress,
    RecoveryProgress,
    StoreConfig,
    Wake,
)
from mqmesh.storage.log.commitlog import CommitLog
from mqmesh.storage.log.epochs import NAME as EPOCHS
from mqmesh.storage.log.epochs import EpochTable
from mqmesh.storage.log.flush import Flusher, Sync
from mqmesh.storage.log.log_start import LOST, NAME, read_log_start, write_log_start
from mqmesh.storage.log.page_window import PageWindow
from mqmesh.storage.log.room import LogRoom
from mqmesh.storage.log.segments import Segments
from mqmesh.storage.log.store_key import NAMES as KEY_NAMES
from mqmesh.storage.log.store_key import StoreKey, open_store_key
from mqmesh.storage.log.tail_cut import NAME as TAIL_CUT
from mqmesh.storage.log.tail_cut import TailCut
from mqmesh.storage.queues.consume_queues import ConsumeQueues
from mqmesh.storage.queues.producer_states import ProducerStates
from mqmesh.storage.queues.queue_table import QueueTable, QueueTableHead, decode_table, encode_table

log = logging.getLogger(__name__)

TAILS_AT_ONCE = 256
MOST_TAILS_AT_START: Final = 1_000
"""Tails written before the store is used; to make a file for each of many queues takes longer than
to read the log once more after another crash."""
OWN_NAMES: Final = (
    *("lock", "checkpoint", "log-beginning", TAIL_CUT, "commitlog", "consumequeue", "index"),
    *KEY_NAMES,
    *(name + spare for name in ("queue-table", "damaged-ranges", EPOCHS) for spare in ("", ".bak")),
)
"""Entries of a store's directory that other users must not read."""


@dataclass(frozen=True)
class StoreParts:
    """Parts of a store, ready for use."""

    commitlog: CommitLog
    queues: ConsumeQueues
    states: ProducerStates
    files: OpenFiles
    flusher: Flusher
    chores: Chores
    checkpointer: Checkpointer
    cleaner: Cleaner
    damage: DamageList
    epochs: EpochTable
    tail_cut: TailCut
    clock: Clock
    recovered: Recovered
    started_clean: bool
    lock: StoreLock
    directory: Path
    sync: Sync
    resources: contextlib.ExitStack
    """Closes files and ends threads; the lock is still held."""


@dataclass(frozen=True)
class _Files:
    """Files that are opened before recovery."""

    directory: Path
    segments: Segments
    key: StoreKey
    queues: ConsumeQueues
    states: ProducerStates
    checkpoint_file: CheckpointFile
    damage: DamageList
    epochs: EpochTable
    tail_cut: TailCut
    sync: Sync
    boot_id: bytes
    last_alive_ms: int | None

    @property
    def table_path(self) -> Path:
        return self.directory / "queue-table"


def open_parts(
    directory: Path,
    config: StoreConfig,
    *,
    clock: Clock,
    wake: Wake,
    on_progress: OnProgress,
    machine: Machine,
    lock: StoreLock | None = None,
) -> StoreParts:
    """Opens a store's files and recovers them; arguments as for ``CommitLogStore.open``.

    Args:
        lock: The store's lock, if the caller has it; released if opening fails.

    Raises:
        StoreLocked: Another process has the store open.
        StorageError: The store cannot be opened.
    """
    with contextlib.ExitStack() as held:
        try:
            if lock is None:
                _make_directories(directory)
                lock = StoreLock(directory)
            held.callback(lock.release)
            with contextlib.ExitStack() as resources:
                parts = _open(directory, config, clock, wake, on_progress, machine, lock, resources)
            held.pop_all()
            return parts
        except OSError as error:
            what = f"the store {directory} (store_path_root_dir) cannot be opened"
            raise storage_error(error, what) from error


def _open(
    directory: Path,
    config: StoreConfig,
    clock: Clock,
    wake: Wake,
    on_progress: OnProgress,
    machine: Machine,
    lock: StoreLock,
    resources: contextlib.ExitStack,
) -> StoreParts:
    chores = machine.make_chores("mqmesh-chores")
    resources.callback(chores.close)
    files = OpenFiles(config.max_open_files)
    resources.callback(files.close)
    before = _open_files(directory, config, files, chores, clock, machine)
    resources.callback(before.checkpoint_file.close)
    checkpoint = before.checkpoint_file.newest
    started_clean = not len(before.segments) if checkpoint is None else checkpoint.clean
    if checkpoint is None and not started_clean:
        log.error("the checkpoint is lost, the whole log is read instead")
    recovered = _recover(before, files, checkpoint, clock, on_progress)
    commitlog = _commitlog(before, files, chores, config, machine.space_of, recovered)
    resources.callback(commitlog.close)
    flusher = machine.make_flusher(
        durable_offset=recovered.end,
        at_once=config.flush_disk_type is FlushDiskType.SYNC_FLUSH,
        interval_ms=config.flush_interval_commitlog_ms,
        wake=wake,
        sync=machine.sync,
        note=lambda offset: before.checkpoint_file.note_synced(recovered.store_id, offset),
    )
    resources.callback(flusher.close)
    checkpointer = _checkpointer(
        before, config, commitlog, flusher, chores, clock, recovered, checkpoint
    )
    cleaner = Cleaner(
        directory=directory / "commitlog",
        config=config,
        commitlog=commitlog,
        queues=before.queues,
        files=files,
        flusher=flusher,
        checkpointer=checkpointer,
        chores=chores,
        clock=clock,
        space_of=machine.space_of,
        last_alive_ms=before.last_alive_ms,
    )
    _settle(before, checkpointer, recovered, started_clean, on_progress)
    return StoreParts(
        commitlog,
        before.queues,
        before.states,
        files,
        flusher,
        chores,
        checkpointer,
        cleaner,
        before.damage,
        before.epochs,
        before.tail_cut,
        clock,
        recovered,
        started_clean,
        lock,
        directory,
        before.sync,
        resources.pop_all(),
    )


def _commitlog(
    before: _Files,
    files: OpenFiles,
    chores: Chores,
    config: StoreConfig,
    space_of: SpaceOf,
    recovered: Recovered,
) -> CommitLog:
    room = LogRoom(
        before.segments.directory,
        ahead_bytes=config.allocate_ahead_bytes,
        keep_free_bytes=config.disk_reserve_bytes,
        chores=chores,
        space_of=space_of,
    )
    return CommitLog(
        before.segments,
        files,
        room,
        _page_window(config),
        key=before.key,
        epochs=before.epochs,
        end=recovered.end,
        epoch=recovered.epoch,
        recorded_epoch=recovered.recorded_epoch,
        store_id=recovered.store_id,
    )


def _page_window(config: StoreConfig) -> PageWindow:
    # With a sync after each write, calls are better: after each sync the kernel must make a page
    # ready anew for the next store.
    is_async = config.flush_disk_type is FlushDiskType.ASYNC_FLUSH
    return PageWindow(config.commit_log_window_bytes if is_async else 0)


def _checkpointer(
    before: _Files,
    config: StoreConfig,
    commitlog: CommitLog,
    flusher: Flusher,
    chores: Chores,
    clock: Clock,
    recovered: Recovered,
    checkpoint: Checkpoint | None,
) -> Checkpointer:
    return Checkpointer(
        table_path=before.table_path,
        file=before.checkpoint_file,
        commitlog=commitlog,
        queues=before.queues,
        states=before.states,
        flusher=flusher,
        chores=chores,
        sync=before.sync,
        clock=clock,
        interval_ms=config.checkpoint_interval_ms,
        boot_id=before.boot_id,
        dispatched_through=_dispatched_through(checkpoint, recovered),
        queues_synced_through=recovered.queues_synced_through,
    )


def _make_directories(directory: Path) -> None:
    for folder in (directory, directory / "commitlog", directory / "consumequeue"):
        make_folder(folder)
    make_private(*(directory / name for name in OWN_NAMES))
    sync_directory(directory)
    sync_directory(directory.parent)


def _open_files(
    directory: Path,
    config: StoreConfig,
    files: OpenFiles,
    chores: Chores,
    clock: Clock,
    machine: Machine,
) -> _Files:
    segments = Segments(
        directory / "commitlog",
        segment_size=config.mapped_file_size_commit_log,
        chores=chores,
    )
    queues = ConsumeQueues(
        directory / "consumequeue",
        files,
        file_entries=config.mapped_file_size_consume_queue,
        most_unwritten_bytes=config.consume_queue_tail_bytes,
        clock=clock,
    )
    checkpoint_path = directory / "checkpoint"
    last_alive_ms = None
    if checkpoint_path.exists():
        # Time of its last change, before this run changes it.
        last_alive_ms = checkpoint_path.stat().st_mtime_ns // 1_000_000
    return _Files(
        directory,
        segments,
        open_store_key(directory, is_new=not len(segments)),
        queues,
        ProducerStates(config.max_producer_states, config.producer_state_min_age_ms),
        CheckpointFile(checkpoint_path, sync=machine.sync),
        DamageList(directory / "damaged-ranges"),
        EpochTable(directory / EPOCHS),
        TailCut(directory / TAIL_CUT, segments),
        machine.sync,
        machine.boot_id or read_boot_id(),
        last_alive_ms,
    )


def _dispatched_through(checkpoint: Checkpoint | None, recovered: Recovered) -> int:
    return 0 if checkpoint is None else min(checkpoint.dispatched_through, recovered.end)


def _recover(
    before: _Files,
    files: OpenFiles,
    checkpoint: Checkpoint | None,
    clock: Clock,
    on_progress: OnProgress,
) -> Recovered:
    table = _load_table(before.table_path)

    def save_progress(position: int, epoch: int) -> None:
        _save_progress(before, position, epoch, recovery.store_id, on_progress)

    recovery = LogRecovery(
        segments=before.segments,
        key=before.key,
        queues=before.queues,
        states=before.states,
        epochs=before.epochs,
        tail_cut=before.tail_cut,
        files=files,
        damage=before.damage,
        checkpoint=checkpoint,
        same_boot=_is_same_boot(checkpoint, before.boot_id),
        clock=clock,
        on_progress=on_progress,
        save_progress=save_progress,
    )
    _note_lost_beginning(before, clock)
    recovered = recovery.run(table)
    if table is not None and len(before.segments):
        log_start = before.segments.first.start
        if log_start > table.head.log_start:
            # The process was killed between the removal of segments and the table that records it.
            before.queues.advance_all(log_start)
    before.damage.save()
    if not len(before.segments):
        before.epochs.learn(recovered.epoch, recovered.end)
    before.epochs.save()
    synced = 0 if checkpoint is None else checkpoint.synced_through
    _sync_segments(before, synced, recovered.end, on_progress)
    return recovered


def _is_same_boot(checkpoint: Checkpoint | None, boot_id: bytes) -> bool:
    """Return True if the system has surely not restarted; one without a boot id may have."""
    return checkpoint is not None and checkpoint.boot_id == boot_id and any(boot_id)


def _note_lost_beginning(before: _Files, clock: Clock) -> None:
    """Reports missing segments that retention did not remove."""
    path = before.directory / NAME
    begins = read_log_start(path)
    start = before.segments.first.start if len(before.segments) else 0
    if begins is None:
        write_log_start(path, start)
        sync_directory(before.directory)
    elif start > begins:
        before.damage.add(begins, start, LOST, clock.wall_ms())


def _load_table(path: Path) -> QueueTable | None:
    try:
        document = load_document(path)
        return None if document is None else decode_table(document)
    except CorruptRecord as error:
        # The log has everything that the table had.
        log.error("the queue table is lost, the whole log is read instead: %s", error)
        return None


def _save_progress(
    before: _Files, position: int, epoch: int, store_id: int, on_progress: OnProgress
) -> None:
    """Saves the state of a long recovery, so that the next one need not repeat it."""
    newest = before.checkpoint_file.newest
    try:
        _write_tails(before.queues, on_progress)
        _sync_segments(before, 0, position, on_progress)
        changed, before.queues.changed = before.queues.changed, set()
        sync_paths(sorted(changed), before.sync)
        head = QueueTableHead(position, epoch)
        deletions = before.queues.deletions.items()
        table = encode_table(head, before.queues, before.states.dump(), deletions)
        save_document(before.table_path, b"".join(table))
    except DiskFull as error:
        log.warning("the progress of recovery cannot be saved: %s", error)
        return
    before.checkpoint_file.save(
        Checkpoint(
            store_id=store_id,
            epoch=max(epoch, newest.epoch if newest else 1),
            synced_through=max(position, newest.synced_through if newest else 0),
            dispatched_through=position,
            queues_synced_through=position,
            clean=False,
            # Pages behind this position may still be lost with the system that wrote them.
            boot_id=newest.boot_id if newest else before.boot_id,
        )
    )


def _settle(
    before: _Files,
    checkpointer: Checkpointer,
    recovered: Recovered,
    started_clean: bool,
    on_progress: OnProgress,
) -> None:
    """Makes the result of recovery the state on disk."""
    if before.tail_cut.end_offset is not None:
        _finish_cut(before, checkpointer, recovered, on_progress)
        return
    if started_clean and not recovered.read_bytes and not recovered.cut_bytes:
        checkpointer.note_start()
        return
    trimmed = before.queues.trim()
    if trimmed:
        log.warning("%d bytes of consume queues were ahead of the log and are cut", trimmed)
    if before.queues.dirty_count > MOST_TAILS_AT_START:
        # Rounds of the checkpointer write them, a few at a time, beside all other work.
        checkpointer.note_start()
        return
    try:
        _write_tails(before.queues, on_progress)
        checkpointer.save_now()
    except DiskFull as error:
        log.error("the store opens without saving what recovery found: %s", error)
        checkpointer.note_start()


def _finish_cut(
    before: _Files, checkpointer: Checkpointer, recovered: Recovered, on_progress: OnProgress
) -> None:
    """Makes sure that no file on the disk refers to the cut part of the log.

    Raises:
        DiskFull: No room; the next start tries again.
    """
    before.queues.trim()
    _write_tails(before.queues, on_progress)
    # The synced mark is synced together with the checkpoint.
    before.checkpoint_file.note_synced(recovered.store_id, recovered.end)
    for _ in range(2):  # the second save replaces the backup of the old table, too
        checkpointer.save_now()
    before.tail_cut.finish()


def _write_tails(queues: ConsumeQueues, on_progress: OnProgress) -> None:
    total = queues.unwritten_bytes
    while queues.dirty_count:
        queues.write_oldest(TAILS_AT_ONCE)
        on_progress(
            RecoveryProgress("writing consume queues", total - queues.unwritten_bytes, total)
        )


def _sync_segments(before: _Files, start: int, end: int, on_progress: OnProgress) -> None:
    """Makes the log durable between two offsets."""
    for number, segment in enumerate(_between(before.segments, start, end)):
        on_progress(RecoveryProgress("syncing log segments", number, number + 1))
        fd = os.open(segment, os.O_RDONLY)
        try:
            before.sync(fd)
        except OSError as error:
            raise StorageError(f"{segment} cannot be synced: {error}") from error
        finally:
            os.close(fd)


def _between(segments: Segments, start: int, end: int) -> Iterator[str]:
    for segment in segments:
        if segment.start < end and start < segment.end:
            yield segment.path
