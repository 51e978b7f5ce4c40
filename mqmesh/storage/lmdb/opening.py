"""Opens the environment of an ``lmdb`` store and reads the state that the store keeps in memory."""

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from mqmesh.batch.record_batch import MAGIC, check_stored
from mqmesh.errors import CorruptBatch, CorruptRecord, StorageError
from mqmesh.private_files import make_folder, make_private
from mqmesh.storage.commitlog.checkpoint import read_boot_id
from mqmesh.storage.files.atomic_file import storage_error, sync_directory
from mqmesh.storage.files.store_lock import StoreLock
from mqmesh.storage.interface import (
    DamagedRange,
    FlushDiskType,
    OnProgress,
    RecoveryProgress,
    StoreConfig,
)
from mqmesh.storage.lmdb import layout
from mqmesh.storage.lmdb.env import LmdbEnv, Pair
from mqmesh.storage.lmdb.layout import EnvironmentHead
from mqmesh.storage.log.control_record import decode_control_record
from mqmesh.storage.queues.producer_states import Key, ProducerStates, StoredBatch
from mqmesh.units import GIB, MIB, CommitLogOffset, TimestampMs

log = logging.getLogger(__name__)

DIRECTORY: Final = "lmdb"
"""Name of the environment's directory, in the directory of the store."""
FIRST_MAP_BYTES: Final = 1 * GIB
"""First size of the map: address space, not memory."""
PAIRS_AT_ONCE: Final = 1024
BATCHES_AT_ONCE: Final = 16
PROGRESS_EVERY_BYTES: Final = 8 * MIB
ANY_OFFSET: Final = b"\xff" * 8


class Queue:
    """A message queue.

    Attributes:
        topic: Physical topic.
        topic_id: Id of the topic, until its next deletion.
        queue_id: Number of the queue, from 0.
        end: Queue offset of the next message; 0 only before the first message was stored.
    """

    __slots__ = ("end", "queue_id", "topic", "topic_id")

    def __init__(self, topic: str, topic_id: int, queue_id: int, end: int = 0) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.queue_id = queue_id
        self.end = end


@dataclass
class Contents:
    """The part of an environment that is kept in memory."""

    head: EnvironmentHead
    started_clean: bool
    states: ProducerStates
    end: int = 0
    next_topic_id: int = 1
    topics: dict[str, dict[int, Queue]] = field(default_factory=dict)
    topic_ids: dict[str, int] = field(default_factory=dict)
    producers: set[bytes] = field(default_factory=set)
    """Keys of the last batches that the environment holds."""
    deleted: list[int] = field(default_factory=list)
    """Topic ids whose pairs are being removed."""
    checked_bytes: int = 0
    damaged: list[DamagedRange] = field(default_factory=list)


@dataclass(frozen=True)
class EnvironmentParts:
    """An opened environment; ``resources`` closes it and releases the lock."""

    directory: Path
    env: LmdbEnv
    contents: Contents
    lock: StoreLock
    resources: contextlib.ExitStack


def open_environment(
    directory: Path, config: StoreConfig, *, now_ms: TimestampMs, on_progress: OnProgress
) -> EnvironmentParts:
    """Opens or makes a store's environment.

    Args:
        directory: Directory of the store; made if need be.
        config: Settings.
        now_ms: Wall clock, for labels.
        on_progress: Called now and then with the progress of a check after a power cut.

    Raises:
        StoreLocked: Another process has the store open.
        StorageError: The environment cannot be opened.
    """
    durable = config.flush_disk_type is FlushDiskType.SYNC_FLUSH
    with contextlib.ExitStack() as resources:
        try:
            make_folder(directory)
            lock = StoreLock(directory)
            resources.callback(lock.release)
            make_private(directory / "lock", directory / DIRECTORY, directory / "index")
            env = LmdbEnv(directory / DIRECTORY, map_size=FIRST_MAP_BYTES, durable=durable)
            resources.callback(env.close)
            for made in (directory / DIRECTORY, directory, directory.parent):
                sync_directory(made)
        except OSError as error:
            what = f"the store {directory} (store_path_root_dir) cannot be opened"
            raise storage_error(error, what) from error
        contents = load(
            env, ProducerStates(config.max_producer_states, config.producer_state_min_age_ms)
        )
        _check_after_power_cut(env, contents, now_ms, on_progress)
        head = msgspec.structs.replace(
            contents.head,
            # The last batches may be lost, and new ones get their offsets.
            epoch=contents.head.epoch + 1,
            next_topic_id=contents.next_topic_id,
            clean=False,
            durable=durable,
            boot_id=read_boot_id(),
        )
        contents.head = head
        env.write([(layout.HEAD_KEY, msgspec.msgpack.encode(head))])
        env.sync()
        return EnvironmentParts(directory, env, contents, lock, resources.pop_all())


def load(env: LmdbEnv, states: ProducerStates) -> Contents:
    """Reads the state that a store keeps in memory; changes only the states given.

    Raises:
        CorruptRecord, StorageError: The environment cannot be read.
    """
    value = env.get(layout.HEAD_KEY)
    if value is None:
        if env.at_or_before(b"\xff") is not None:
            raise CorruptRecord("the environment has pairs and no head: it is no store's")
        store_id = int.from_bytes(os.urandom(4), "little")
        head = EnvironmentHead(layout.FORMAT, store_id, 1, 1, True, True, b"")
    else:
        head = layout.decode_head(value)
    contents = Contents(head, head.clean, states)
    contents.next_topic_id = head.next_topic_id
    last = env.at_or_before(layout.log_key(0)[:1] + ANY_OFFSET)
    if last is not None and last[0].startswith(layout.LOG):
        contents.end = layout.log_offset(last[0]) + len(last[1])
    contents.deleted = [
        layout.log_offset(key) for key, _ in pairs(env, *layout.of_kind(layout.DELETED))
    ]
    names = _load_queues(env, contents)
    _load_states(env, contents, names)
    used = [*names, *contents.deleted]
    contents.next_topic_id = max(head.next_topic_id, *(one + 1 for one in used), 1)
    return contents


def _load_queues(env: LmdbEnv, contents: Contents) -> dict[int, str]:
    names = {}
    for _, value in pairs(env, *layout.of_kind(layout.TOPIC)):
        topic_id, topic = layout.decode_topic(value)
        names[topic_id] = topic
        contents.topic_ids[topic] = topic_id
    for key, _ in pairs(env, *layout.of_kind(layout.QUEUE)):
        topic_id, queue_id = layout.split_queue_key(key)
        name = names.get(topic_id)
        if name is None:
            continue
        found = env.at_or_before(layout.entry_key(topic_id, queue_id, 0)[:-8] + ANY_OFFSET)
        if found is None or layout.split_entry_key(found[0])[:2] != (topic_id, queue_id):
            raise CorruptRecord(f"queue {queue_id} of {name!r} has no entries")
        end = layout.decode_entry(*found).end
        contents.topics.setdefault(name, {})[queue_id] = Queue(name, topic_id, queue_id, end)
    return names


def _load_states(env: LmdbEnv, contents: Contents, names: dict[int, str]) -> None:
    windows: list[tuple[Key, list[StoredBatch]]] = []
    for key, value in pairs(env, *layout.of_kind(layout.PRODUCER)):
        topic_id, queue_id, producer_id = layout.split_producer_key(key)
        if topic_id not in names:
            continue
        contents.producers.add(key)
        window = layout.decode_window(value)
        if window:
            windows.append(((names[topic_id], queue_id, producer_id), window))
    windows.sort(key=lambda one: one[1][-1].commitlog_offset)
    contents.states.load(windows)


def pairs(
    env: LmdbEnv, start: bytes, stop: bytes, *, at_once: int = PAIRS_AT_ONCE
) -> Iterator[Pair]:
    """Yield all pairs between two keys, read in pieces of ``at_once`` pairs."""
    while True:
        some = env.range(start, stop, most=at_once)
        yield from some
        if len(some) < at_once:
            return
        start = some[-1][0] + b"\0"


def check_log(env: LmdbEnv, store_id: int, first: int = 0) -> Iterator[tuple[int, int, str | None]]:
    """Checks every record of the log.

    Args:
        env: The environment.
        store_id: Store id that batches must have.
        first: Commit-log offset of the first record to look at.

    Yields:
        For each record its begin, its end, and its fault or None; for a gap between records
        the same.

    Raises:
        CorruptRecord, StorageError: The environment itself is damaged.
    """
    position = first
    stop = layout.of_kind(layout.LOG)[1]
    for key, value in pairs(env, layout.log_key(first), stop, at_once=BATCHES_AT_ONCE):
        start = layout.log_offset(key)
        if start != position:
            yield min(position, start), max(position, start), "records are missing"
        position = start + len(value)
        yield start, position, wrong_with(value, start, store_id)


def wrong_with(record: bytes, commitlog_offset: int, store_id: int) -> str | None:
    """Return the fault of a record of the log; None for a good one."""
    try:
        if not record.startswith(MAGIC):
            marker = decode_control_record(record)
            place = marker.commitlog_offset, marker.total_size, marker.store_id
        else:
            header = check_stored(record)
            place = header.commitlog_offset, header.total_size, header.store_id
    except (CorruptBatch, StorageError) as error:
        return str(error)
    if place != (commitlog_offset, len(record), store_id):
        return f"the record belongs somewhere else: {place}"
    return None


def _check_after_power_cut(
    env: LmdbEnv, contents: Contents, now_ms: TimestampMs, on_progress: OnProgress
) -> None:
    """Read everything after a power cut, which may damage anything where commits were not synced.

    Raises:
        CorruptRecord: The environment is damaged, so it is unknown how much is lost.
    """
    head = contents.head
    if head.clean or head.durable or head.boot_id == read_boot_id():
        return
    log.warning("the system stopped while the store was open: all of it is checked")
    reported = 0
    for start, end, wrong in check_log(env, head.store_id):
        contents.checked_bytes = end
        if wrong is not None:
            log.error("bytes %d to %d of the log are damaged: %s", start, end, wrong)
            contents.damaged.append(
                DamagedRange(CommitLogOffset(start), CommitLogOffset(end), wrong, now_ms)
            )
        if end - reported >= PROGRESS_EVERY_BYTES:
            reported = end
            on_progress(RecoveryProgress("checking the log", end, contents.end))
