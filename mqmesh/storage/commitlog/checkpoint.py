"""The checkpoint: the known extent of the log and of everything derived from it, in two slots.

The slots are written in turn and synced, so at any moment at least one of them
is good. There are no timestamps in it: no decision of recovery looks at a clock.

Layout of a slot, little endian, one at byte 0 and one at byte 4096 (the same
table stands in ``docs/storage-format.md``):

======== ===== ====== ==========================================================
position bytes type   meaning
======== ===== ====== ==========================================================
0        4     bytes  magic, ``MQC1``
4        4     u32    crc: CRC-32 of bytes 8 to 71
8        8     u64    sequence: the good slot with the larger one counts
16       4     u32    store_id
20       4     u32    epoch
24       8     u64    synced_through: the log is on disk to here
32       8     u64    dispatched_through: consume queues and the queue table have it to here
40       8     u64    queues_synced_through: consume queue files are on disk to here
48       4     u32    flags: 1 for a clean stop, 2 for tails left by it
52       4     bytes  reserved, 0
56       16    bytes  boot_id of the system that wrote it
======== ===== ====== ==========================================================

At byte 8192 is the synced mark, which is written after every sync of the log and never synced
itself. It is true in any state in which a start may find it; after the death of the process it is
the newest one.

======== ===== ====== ==========================================================
position bytes type   meaning
======== ===== ====== ==========================================================
0        4     bytes  magic, ``MQS1``
4        4     u32    crc: CRC-32 of bytes 8 to 23
8        4     u32    store_id
12       4     bytes  reserved, 0
16       8     u64    synced_through, if it is larger than in the slot
======== ===== ====== ==========================================================
"""

import logging
import os
import struct
import uuid
from pathlib import Path
from typing import Final

import msgspec

from mqmesh.checksum import crc32
from mqmesh.private_files import FILE_MODE
from mqmesh.storage.files.atomic_file import storage_error, sync_directory
from mqmesh.storage.log.flush import Sync

log = logging.getLogger(__name__)

SLOT_POSITIONS: Final = (0, 4096)
SLOT_SIZE: Final = 72
MARK_POSITION: Final = 8192
_FILE_SIZE: Final = 12288
_SLOT = struct.Struct("<4sIQIIQQQI4s16s")
_MARK = struct.Struct("<4sII4sQ")
_MAGIC: Final = b"MQC1"
_MARK_MAGIC: Final = b"MQS1"
_CLEAN: Final = 1
_TAILS_LEFT: Final = 2

assert _SLOT.size == SLOT_SIZE


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a checkpoint slot.

    Attributes:
        store_id: Identity of the store, in every record of its log.
        epoch: Lower bound of the newest record's epoch.
        synced_through: Commit-log offset; before it, a bad record is damage, never a torn tail.
        dispatched_through: Commit-log offset; records before it need not be read again after
            the death of the process.
        queues_synced_through: The same for the death of the system.
        clean: The store was closed in order; everything ends at ``synced_through``.
        boot_id: 16 bytes that are new each time the system starts.
        tails_left: For a clean stop: consume queues were not written, so that behind
            ``queues_synced_through`` their files are as after a crash.
    """

    store_id: int
    epoch: int
    synced_through: int
    dispatched_through: int
    queues_synced_through: int
    clean: bool
    boot_id: bytes
    tails_left: bool = False


def read_boot_id() -> bytes:
    """Return the running system's boot id, 16 bytes; zeros where the system has none."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return uuid.UUID(text).bytes
    except (OSError, ValueError):
        return bytes(16)


def read_checkpoint(path: Path) -> Checkpoint | None:
    """Read the newest good checkpoint of a file, None if there is none; changes nothing.

    Raises:
        StorageError: The file cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, f"{path} cannot be opened") from error
    try:
        return _newest(fd)[1]
    except OSError as error:
        raise storage_error(error, f"{path} cannot be read") from error
    finally:
        os.close(fd)


class CheckpointFile:
    """The file with the two slots and the mark. One thread at a time, except for the mark.

    Attributes:
        newest: The newest good checkpoint, None if there is none.
    """

    def __init__(self, path: Path, *, sync: Sync) -> None:
        """Opens the file, making it if need be.

        Args:
            path: The file; its directory exists.
            sync: Makes a descriptor's data durable.

        Raises:
            StorageError: The file cannot be opened or made.
        """
        self._sync = sync
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE)
            self._sequence, self.newest = _newest(self._fd)
            if os.fstat(self._fd).st_size == 0:
                os.pwrite(self._fd, bytes(_FILE_SIZE), 0)
                os.fsync(self._fd)
                sync_directory(path.parent)
        except OSError as error:
            raise storage_error(error, f"{path} cannot be opened") from error

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint over the older slot, durably.

        Raises:
            OSError: The checkpoint could not be made durable; the newer slot is untouched.
        """
        self._sequence += 1
        data = _encode(checkpoint, self._sequence)
        os.pwrite(self._fd, data, SLOT_POSITIONS[self._sequence % 2])
        self._sync(self._fd)
        self.newest = checkpoint

    def note_synced(self, store_id: int, synced_through: int) -> None:
        """Notes the end of the synced log, in case the process dies; a few microseconds.

        Args:
            store_id: Identity of the store.
            synced_through: As in a checkpoint.
        """
        data = _MARK.pack(_MARK_MAGIC, 0, store_id, bytes(4), synced_through)
        data = _MARK_MAGIC + crc32(data[8:]).to_bytes(4, "little") + data[8:]
        try:
            os.pwrite(self._fd, data, MARK_POSITION)
        except OSError as error:
            # The next start then compares more of the log with the disk; nothing else happens.
            log.warning("the synced mark cannot be written: %s", error)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)


def _newest(fd: int) -> tuple[int, Checkpoint | None]:
    newest: tuple[int, Checkpoint | None] = (0, None)
    for position in SLOT_POSITIONS:
        found = _decode(os.pread(fd, SLOT_SIZE, position))
        if found is not None and found[0] > newest[0]:
            newest = found
    sequence, checkpoint = newest
    if checkpoint is None:
        return newest
    synced = _decode_mark(os.pread(fd, _MARK.size, MARK_POSITION), checkpoint.store_id)
    if synced <= checkpoint.synced_through:
        return newest
    return sequence, msgspec.structs.replace(checkpoint, synced_through=synced)


def _encode(checkpoint: Checkpoint, sequence: int) -> bytes:
    fields = _SLOT.pack(
        _MAGIC,
        0,
        sequence,
        checkpoint.store_id,
        checkpoint.epoch,
        checkpoint.synced_through,
        checkpoint.dispatched_through,
        checkpoint.queues_synced_through,
        _CLEAN * checkpoint.clean | _TAILS_LEFT * checkpoint.tails_left,
        bytes(4),
        checkpoint.boot_id,
    )
    return _MAGIC + crc32(fields[8:]).to_bytes(4, "little") + fields[8:]


def _decode(data: bytes) -> tuple[int, Checkpoint] | None:
    if len(data) != SLOT_SIZE:
        return None
    magic, crc, sequence, store_id, epoch, synced, dispatched, queues, flags, _, boot_id = (
        _SLOT.unpack(data)
    )
    if magic != _MAGIC or crc32(data[8:]) != crc:
        return None
    return sequence, Checkpoint(
        store_id=store_id,
        epoch=epoch,
        synced_through=synced,
        dispatched_through=dispatched,
        queues_synced_through=queues,
        clean=bool(flags & _CLEAN),
        boot_id=boot_id,
        tails_left=bool(flags & _TAILS_LEFT),
    )


def _decode_mark(data: bytes, store_id: int) -> int:
    if len(data) != _MARK.size:
        return 0
    magic, crc, found_id, _, synced = _MARK.unpack(data)
    is_good = magic == _MARK_MAGIC and crc32(data[8:]) == crc and found_id == store_id
    return int(synced) if is_good else 0
