"""One consume queue: where in the log the messages of a message queue are.

Layout of an entry, 20 bytes, little endian (the same table stands in
``docs/storage-format.md``):

======== ===== ==== ============================================================
position bytes type meaning
======== ===== ==== ============================================================
0        8     u64  commitlog_offset of its batch; from bit 56 the check's lower 8 bits
8        4     u32  size of the batch in bytes; from bit 25 the check's upper 7 bits
12       8     u64  tag hash (``mqmesh.message.tag_hash``), 0 for no tag
======== ===== ==== ============================================================

The entry of queue offset n is at byte 20 n of the queue. The check is the same in all entries of a
batch (``check_of``): a reader that skips a batch because of its tags reads nothing else that could
show a flipped bit. A message whose batch is lost has 2**64 - 1 and two zeros. New entries stay in
memory (``queue_tail``) until they are written in turn; files are read and written by ``pread`` and
``pwrite``. All of it can be rebuilt from the log, so no answer to a client waits for a sync of
these files.
"""

import errno
import os
import struct
from collections.abc import Iterator
from typing import Final

from mqmesh.batch.payload import Buffer
from mqmesh.checksum import crc32
from mqmesh.errors import CorruptRecord
from mqmesh.private_files import FOLDER_MODE
from mqmesh.storage.files.atomic_file import storage_error
from mqmesh.storage.files.open_files import OpenFiles
from mqmesh.storage.queues.queue_tail import QueueTail
from mqmesh.units import KIB

ENTRY: Final = struct.Struct("<QIQ")
ENTRY_SIZE: Final = 20
VOID_OFFSET: Final = (1 << 64) - 1
VOID_ENTRY: Final = ENTRY.pack(VOID_OFFSET, 0, 0)
"""Entry of a message whose batch was lost to damage."""
_OFFSET_BITS: Final = 56
_SIZE_BITS: Final = 25
OFFSET_MASK: Final = (1 << _OFFSET_BITS) - 1
"""Bits of the offset in an entry's first number."""
SIZE_MASK: Final = (1 << _SIZE_BITS) - 1
"""Bits of the size in an entry's second number."""
MOST_LOOKED_AT_ONCE: Final = 32_768
"""Entries read by one call where messages are lost: there may be millions."""

WRITE_BYTES: Final = 64 * KIB
"""Size of the pieces in which a tail is written, unless a batch is larger. On a virtual machine
they took half as long as pieces of 1 MiB, which now and then took milliseconds
(docs/decisions/0010)."""

_HASH_POSITION: Final = 12
_LARGEST_PRIME_OF_15_BITS: Final = 32_749
_VOIDS: Final = VOID_ENTRY * MOST_LOOKED_AT_ONCE

assert ENTRY.size == ENTRY_SIZE


def entries_of(commitlog_offset: int, size: int, message_count: int, tag_hashes: bytes) -> bytes:
    """Return the entries of one batch, made without a loop over its messages.

    Args:
        commitlog_offset: Commit-log offset of the batch.
        size: Size of the batch in bytes.
        message_count: Messages in it.
        tag_hashes: Tag hashes as in the batch's meta: 0, 8 or 8 bytes a message.

    Returns:
        Layout: consume queue entries.
    """
    if commitlog_offset == VOID_OFFSET:
        return VOID_ENTRY * message_count
    uniform = len(tag_hashes) <= 8
    hashes = tag_hashes.ljust(8, b"\0") * message_count if uniform else tag_hashes
    check = check_of(commitlog_offset, size, hashes)
    place = commitlog_offset | (check & 0xFF) << _OFFSET_BITS
    extent = size | check >> 8 << _SIZE_BITS
    if uniform:
        shared = int.from_bytes(tag_hashes, "little")
        return ENTRY.pack(place, extent, shared) * message_count
    entries = bytearray(ENTRY.pack(place, extent, 0) * message_count)
    for lane in range(8):
        entries[_HASH_POSITION + lane :: ENTRY_SIZE] = tag_hashes[lane::8]
    return bytes(entries)


def check_in(place: int, extent: int) -> int:
    """Return the check that the first two numbers of an entry hold."""
    return place >> _OFFSET_BITS | extent >> _SIZE_BITS << 8


def check_of(commitlog_offset: int, size: int, hashes: Buffer) -> int:
    """Return the check in the entries of a batch.

    Args:
        commitlog_offset: Commit-log offset of the batch.
        size: Size of the batch in bytes.
        hashes: Tag hashes of all its messages, 8 bytes each.

    Returns:
        Check of 15 bits; it misses damage once in 32,749 times.
    """
    start = (commitlog_offset ^ commitlog_offset >> 32 ^ size) & 0xFFFF_FFFF
    return crc32(hashes, start) % _LARGEST_PRIME_OF_15_BITS


def hashes_of(entries: bytes) -> memoryview:
    """Return the tag hashes of entries, as a sequence of numbers.

    Returns:
        A memoryview of format ``Q``.
    """
    packed = bytearray(len(entries) // ENTRY_SIZE * 8)
    for lane in range(8):
        packed[lane::8] = entries[_HASH_POSITION + lane :: ENTRY_SIZE]
    return memoryview(packed).cast("Q")


def count_void(entries: bytes) -> int:
    """Count the void entries in front of the first other one.

    It compares halves as a whole, without a loop over entries.

    Args:
        entries: Entries, at most ``MOST_LOOKED_AT_ONCE``.
    """
    # All entries before low are void; of those before high at least one is not.
    low, high = 0, len(entries) // ENTRY_SIZE
    if entries == _VOIDS[: len(entries)]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        half = entries[low * ENTRY_SIZE : middle * ENTRY_SIZE]
        if half == _VOIDS[: len(half)]:
            low = middle
        else:
            high = middle
    return low


class ConsumeQueue:
    """Entries of one message queue.

    Attributes:
        topic: Physical topic.
        queue_id: Number of the queue, from 0.
        directory: Directory of its files and those of the topic's other queues.
        first: Queue offset of the first message.
        written: Queue offset before which entries are in files; the tail starts there.
        end: Queue offset of the next message.
        visible: Queue offset behind the last message that consumers may see.
        tail: Batches that are not in files yet.
    """

    __slots__ = (
        "_file_entries",
        "directory",
        "end",
        "first",
        "queue_id",
        "tail",
        "topic",
        "visible",
        "written",
    )

    def __init__(
        self, topic: str, queue_id: int, directory: str, *, first: int, end: int, file_entries: int
    ) -> None:
        """Takes over a queue whose entries are all in files.

        Args:
            topic: Physical topic.
            queue_id: Number of the queue, from 0.
            directory: Directory of the topic's files; made together with the first.
            first: Queue offset of the first message.
            end: Queue offset of the next message.
            file_entries: Entries in one file.
        """
        self.topic = topic
        self.queue_id = queue_id
        self.directory = directory
        self.first = first
        self.written = end
        self.end = end
        self.visible = end
        self.tail = QueueTail(end)
        self._file_entries = file_entries

    def rewind(self, queue_offset: int) -> None:
        """Makes the entries from an offset on be written anew; the tail must be empty."""
        assert not self.tail
        self.first = min(self.first, queue_offset)
        self.written = self.end = self.visible = min(self.end, queue_offset)
        self.tail = QueueTail(self.end)

    def read(self, files: OpenFiles, start: int, stop: int) -> bytes:
        """Entries from one queue offset to another, at most to ``end``.

        Raises:
            CorruptRecord: A file is missing or too short.
            StorageError: The disk reports a read error.
        """
        assert self.first <= start <= stop <= self.end
        written = self.written
        parts = []
        while start < min(stop, written):
            number, index = divmod(start, self._file_entries)
            count = min(stop, written, (number + 1) * self._file_entries) - start
            parts.append(self._read_file(files, number, index, count))
            start += count
        if stop > start:
            tail = self._tail_entries()
            parts.append(tail[(start - written) * ENTRY_SIZE : (stop - written) * ENTRY_SIZE])
        return b"".join(parts)

    def next_place(self, files: OpenFiles, start: int, stop: int) -> tuple[int, int] | None:
        """Return the first message of a stretch that is not lost.

        Args:
            files: Descriptors of consume queue files.
            start: Queue offset where the stretch begins; at least ``first``.
            stop: Queue offset where the stretch ends; at most ``end``.

        Returns:
            Queue offset of the message and commit-log offset of its batch; None if all are lost.

        Raises:
            CorruptRecord: A file is missing or too short.
            StorageError: The disk reports a read error.
        """
        # Most often the very first message is not lost.
        count = 1
        in_files = min(stop, self.written)
        while start < in_files:
            end = min(in_files, start + count)
            entries = self.read(files, start, end)
            lost = count_void(entries)
            start += lost
            if start < end:
                place: int = ENTRY.unpack_from(entries, lost * ENTRY_SIZE)[0]
                if place != VOID_OFFSET:
                    return start, place & OFFSET_MASK
                start += 1  # A void entry that is damaged.
            count = min(8 * count, MOST_LOOKED_AT_ONCE)
        return self._next_place_in_tail(start, stop)

    def _next_place_in_tail(self, start: int, stop: int) -> tuple[int, int] | None:
        tail = self.tail
        while start < stop:
            number = tail.index(start)
            place = tail.row(number)[0]
            if place != VOID_OFFSET:
                return start, place
            start = tail.ends[number]
        return None

    def _tail_entries(self) -> bytes:
        return b"".join(entries_of(*batch) for batch in self.tail.batches())

    def _tail_pieces(self) -> Iterator[bytes]:
        pieces: list[bytes] = []
        size = 0
        for batch in self.tail.batches():
            pieces.append(entries := entries_of(*batch))
            size += len(entries)
            if size >= WRITE_BYTES:
                yield b"".join(pieces)
                pieces, size = [], 0
        yield b"".join(pieces)

    def _read_file(self, files: OpenFiles, number: int, index: int, count: int) -> bytes:
        path = self.file_path(number)
        size = count * ENTRY_SIZE
        try:
            data = os.pread(files.get(path, flags=os.O_RDWR), size, index * ENTRY_SIZE)
        except FileNotFoundError:
            data = b""
        except OSError as error:
            raise storage_error(error, f"{path} cannot be read") from error
        if len(data) != size:
            raise CorruptRecord(f"{path} lacks entries {index} to {index + count}")
        return data

    def write_tail(self, files: OpenFiles, changed: set[str]) -> None:
        """Writes the tail to the files.

        Args:
            files: Descriptors of consume queue files.
            changed: Set to which the paths are added that have to be synced: the files, and the
                directories that have new names in them.

        Raises:
            DiskFull: No room; unwritten entries stay in memory.
            StorageError: The disk reports an error; unwritten entries stay in memory.
        """
        # If that fails half way, entries are written twice, but to the same place.
        end = self.written
        for entries in self._tail_pieces():
            end += self.write_at(files, end, entries, changed)
        self.written = end
        self.tail = QueueTail(end)

    def write_at(
        self, files: OpenFiles, queue_offset: int, entries: bytes, changed: set[str]
    ) -> int:
        """Writes entries into the files; arguments and errors as for ``write_tail``.

        Returns:
            Number of entries that were written.
        """
        done = 0
        try:
            while done < len(entries):
                number, index = divmod(queue_offset + done // ENTRY_SIZE, self._file_entries)
                size = min(len(entries) - done, (self._file_entries - index) * ENTRY_SIZE)
                with memoryview(entries)[done : done + size] as data:
                    fd = self._open_to_write(files, self.file_path(number), changed)
                    if os.pwrite(fd, data, index * ENTRY_SIZE) != size:
                        raise OSError(errno.ENOSPC, "only a part could be written")
                done += size
        except OSError as error:
            what = f"consume queue {self.queue_id} of topic {self.topic!r} cannot be written"
            raise storage_error(error, what) from error
        return done // ENTRY_SIZE

    def _open_to_write(self, files: OpenFiles, path: str, changed: set[str]) -> int:
        changed.add(path)
        try:
            return files.get(path, flags=os.O_RDWR)
        except FileNotFoundError:
            os.makedirs(self.directory, FOLDER_MODE, exist_ok=True)
            changed.update((self.directory, os.path.dirname(self.directory)))
            return files.get(path, flags=os.O_RDWR | os.O_CREAT)

    def file_path(self, number: int) -> str:
        """Return the path of the file with a number, from 0."""
        return f"{self.directory}/{self.queue_id}-{number * self._file_entries * ENTRY_SIZE:020d}"

    def file_number(self, queue_offset: int) -> int:
        """Return the number of the file that holds an entry."""
        return queue_offset // self._file_entries
