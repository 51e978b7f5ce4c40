"""Makes a store that is to become a copy of another one's log, and has no record of it yet.

The copy begins with a ``LogStart``; the records follow by ``append_raw``.
"""

import os
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Final, Protocol

import msgspec

from mqmesh.errors import InvalidArgument, RemoteProtocolError
from mqmesh.message import check_topic
from mqmesh.private_files import make_folder
from mqmesh.storage.commitlog.checkpoint import Checkpoint, CheckpointFile
from mqmesh.storage.commitlog.opening import OWN_NAMES
from mqmesh.storage.files.atomic_file import save_document, storage_error, sync_directory
from mqmesh.storage.files.store_lock import StoreLock
from mqmesh.storage.interface import LogStart
from mqmesh.storage.log.epochs import NAME as EPOCHS
from mqmesh.storage.log.epochs import encode_epochs
from mqmesh.storage.log.flush import SYSTEM_SYNC
from mqmesh.storage.log.log_start import NAME as LOG_BEGINNING
from mqmesh.storage.log.log_start import write_log_start
from mqmesh.storage.log.segments import make_segment
from mqmesh.storage.log.store_key import StoreKey, save_store_key
from mqmesh.storage.queues.queue_table import (
    QueueRow,
    QueueTable,
    QueueTableHead,
    encode_without_files,
)
from mqmesh.units import MAX_OFFSET

REPLACED: Final = "replaced-"
"""Prefix of the folder that keeps the former content of a store that became a copy; a time
follows."""
_BESIDE: Final = ("config", "cut")
"""Files that other parts keep in a store's directory about its log."""


_decoder = msgspec.msgpack.Decoder(LogStart)


def encode_log_start(beginning: LogStart) -> bytes:
    """Encode the start of a log for the wire."""
    return msgspec.msgpack.encode(beginning)


def decode_log_start(data: bytes | memoryview) -> LogStart:
    """Reads the start of a log as another store's broker has sent it.

    Raises:
        RemoteProtocolError: The bytes are no such start, or no log can begin like that.
    """
    try:
        beginning = _decoder.decode(data)
        for queue in beginning.queues:
            check_topic(queue.topic)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, InvalidArgument) as error:
        raise RemoteProtocolError(f"what a log begins with cannot be read: {error}") from error
    start, epochs = beginning.log_start, beginning.epochs
    if start > MAX_OFFSET - beginning.segment_bytes:
        raise RemoteProtocolError(f"a log cannot begin at {start}: its segment would never end")
    if any(one.start_offset > start for one in epochs) or not all(
        one.epoch < other.epoch and one.start_offset <= other.start_offset
        for one, other in pairwise(epochs)
    ):
        raise RemoteProtocolError(f"the epochs of a log that begins at {start} are out of order")
    if len({(queue.topic, queue.queue_id) for queue in beginning.queues}) < len(beginning.queues):
        raise RemoteProtocolError("a queue is named twice where a log begins")
    return beginning


def begin_copy(
    directory: Path, beginning: LogStart, *, now_ms: int, keeps: bool = True
) -> Path | None:
    """Makes a closed store without records that is to become a copy of another store's log.

    The former content of the directory is moved aside. A crash meanwhile leaves a store that is
    empty or incomplete: then this is to be done again.

    Args:
        directory: Directory of the store; made if need be.
        beginning: Start of the log.
        now_ms: Wall clock; names the folder of the moved content.
        keeps: False for a store without a record: the moved content is removed once the copy is
            there.

    Returns:
        Folder of the former store; None if there was none, or none that is kept.

    Raises:
        StoreLocked: The store is open.
        DiskFull, StorageError: The copy cannot be made.
    """
    try:
        make_folder(directory)
        lock = StoreLock(directory)
        try:
            aside = _move_aside(directory, now_ms)
            _make(directory, beginning)
            if aside is not None and not keeps:
                shutil.rmtree(aside)
                aside = None
        finally:
            lock.release()
    except OSError as error:
        raise storage_error(error, f"the store {directory} cannot be made a copy") from error
    return aside


class BeginCopy(Protocol):
    """Type of ``begin_copy``."""

    def __call__(
        self, directory: Path, beginning: LogStart, *, now_ms: int, keeps: bool = True
    ) -> Path | None: ...


def _move_aside(directory: Path, now_ms: int) -> Path | None:
    names = [name for name in (*OWN_NAMES, *_BESIDE) if name != "lock"]
    found = [name for name in names if (directory / name).exists()]
    if not found:
        return None
    aside = directory / f"{REPLACED}{now_ms}"
    while aside.exists():  # left by a try that ended half way
        now_ms += 1
        aside = directory / f"{REPLACED}{now_ms}"
    make_folder(aside)
    sync_directory(directory)
    # The segments last: without them the other files are no store, and alone they are one.
    for name in sorted(found, key=lambda name: name == "commitlog"):
        os.rename(directory / name, aside / name)
    sync_directory(aside)
    sync_directory(directory)
    return aside


def _make(directory: Path, beginning: LogStart) -> None:
    start = beginning.log_start
    epochs = [one for one in beginning.epochs if one.start_offset <= start]
    epoch = epochs[-1].epoch if epochs else 0
    for name in ("commitlog", "consumequeue"):
        make_folder(directory / name)
    save_store_key(directory, StoreKey(beginning.key))
    write_log_start(directory / LOG_BEGINNING, start)
    save_document(directory / EPOCHS, encode_epochs(epochs))
    head = QueueTableHead(start, epoch, start)
    rows = [QueueRow(q.topic, q.queue_id, q.queue_offset, q.queue_offset) for q in beginning.queues]
    table = QueueTable(head, rows, [])
    save_document(directory / "queue-table", encode_without_files(table, start))
    make_segment(directory / "commitlog", start, beginning.segment_bytes)
    # Last of all; from then on the directory is a store that was closed in order.
    checkpoint = CheckpointFile(directory / "checkpoint", sync=SYSTEM_SYNC)
    try:
        checkpoint.save(
            Checkpoint(
                store_id=beginning.store_id,
                epoch=max(epoch, 1),
                synced_through=start,
                dispatched_through=start,
                queues_synced_through=start,
                clean=True,
                boot_id=bytes(16),
            )
        )
    finally:
        checkpoint.close()
    sync_directory(directory)
