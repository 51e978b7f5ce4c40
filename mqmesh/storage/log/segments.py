"""The files of the commit log: found by offset, of their full size from the beginning.

A segment's name is the commit-log offset of its first byte, 20 digits. Every file has the size that
was configured when it was made, so a sync never changes the size, and a map can cover a whole file.
A file takes its name only after its size is synced. Its blocks on the disk are allocated later, see
``room.py``; a file is written only where it has blocks.
"""

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

from mqmesh.errors import DiskFull, TooManyOpenFiles
from mqmesh.private_files import FILE_MODE
from mqmesh.storage.files.atomic_file import storage_error, sync_directory
from mqmesh.storage.files.chores import Chores

STAT_BLOCK_BYTES: Final = 512
"""Unit of ``st_blocks``, on every file system."""

_NAME: Final = re.compile(r"\d{20}")


class Segment:
    """One file of the log.

    Attributes:
        start: Commit-log offset of its first byte.
        size: Original size in bytes; the file may have been cut since.
        end: Commit-log offset behind its last byte.
        path: File of the segment.
        fd: Descriptor for writing, else -1. Owned by the commit log.
        allocated_through: Commit-log offset up to which blocks are allocated. The file may be
            written from its end at opening up to here.
    """

    __slots__ = ("_block_bytes", "allocated_through", "end", "fd", "path", "size", "start")

    def __init__(self, start: int, size: int, path: str, block_bytes: int = 0) -> None:
        self.start = start
        self.resize(size)
        self.path = path
        self.fd = -1
        self.allocated_through = start
        self._block_bytes = block_bytes

    def resize(self, size: int) -> None:
        """Note that the segment was made with another size than its file has."""
        self.size, self.end = size, self.start + size

    @property
    def disk_bytes(self) -> int:
        """Bytes that the segment's blocks take on the disk."""
        return max(self._block_bytes, self.allocated_through - self.start)

    @property
    def spare_bytes(self) -> int:
        """Part of ``disk_bytes`` that seems to be allocated behind ``allocated_through``."""
        return self.disk_bytes - (self.allocated_through - self.start)

    def note_blocks(self, found: os.stat_result) -> None:
        """Notes the blocks of its file, after another file has taken its place.

        Args:
            found: Status of the file that has the name now.
        """
        self._block_bytes = found.st_blocks * STAT_BLOCK_BYTES


class SegmentList:
    """Segments of a log, ascending. There may be gaps where a file was lost."""

    def __init__(self, segments: Iterable[Segment] = ()) -> None:
        """Takes the segments.

        Args:
            segments: Segments of one log, in any order.
        """
        self._take(segments)

    def _take(self, segments: Iterable[Segment]) -> None:
        self._list = sorted(segments, key=lambda segment: segment.start)
        self._starts = [segment.start for segment in self._list]

    def __len__(self) -> int:
        return len(self._list)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._list)

    @property
    def first(self) -> Segment:
        """The oldest segment; the list must not be empty."""
        return self._list[0]

    @property
    def last(self) -> Segment:
        """The newest segment, possibly one prepared ahead; the list must not be empty."""
        return self._list[-1]

    @property
    def disk_bytes(self) -> int:
        """Bytes that the blocks of all files take."""
        return sum(segment.disk_bytes for segment in self._list)

    def find(self, commitlog_offset: int) -> Segment | None:
        """Return the segment that an offset lies in, None if there is none."""
        index = bisect_right(self._starts, commitlog_offset) - 1
        if index < 0 or commitlog_offset >= self._list[index].end:
            return None
        return self._list[index]

    def after(self, commitlog_offset: int) -> Segment | None:
        """Return the first segment that begins behind an offset, also behind a gap, or None."""
        index = bisect_right(self._starts, commitlog_offset)
        return self._list[index] if index < len(self._list) else None


class FoundSegments(SegmentList):
    """Segments in a directory, for readers that may not write."""

    def __init__(self, directory: Path) -> None:
        """Lists the files; a directory that does not exist yet has none.

        Args:
            directory: Directory of the log.

        Raises:
            StorageError: The directory cannot be read.
        """
        super().__init__()
        self._directory = directory
        self.refresh()

    def refresh(self) -> None:
        """Lists the files again.

        Raises:
            StorageError: The directory cannot be read.
        """
        try:
            self._take(list_segments(self._directory))
        except FileNotFoundError:
            return  # the store is just being made
        except OSError as error:
            raise storage_error(error, f"{self._directory} cannot be read") from error


class Segments(SegmentList):
    """All segments of a log, for its writer."""

    def __init__(
        self,
        directory: Path,
        *,
        segment_size: int,
        chores: Chores,
    ) -> None:
        """Lists the files; removes unfinished files of a crash.

        Args:
            directory: Directory of the segments; it exists.
            segment_size: Size of new segments.
            chores: Thread that prepares the next segment.
        """
        for unfinished in directory.glob("*.new"):
            unfinished.unlink()
        super().__init__(list_segments(directory))
        self._directory = directory
        self._segment_size = segment_size
        self._chores = chores
        self._preparing: Future[Segment] | None = None
        if self._list and self._list[-1].size < segment_size:
            self._list[-1].resize(segment_size)

    @property
    def directory(self) -> Path:
        """Directory of the segments."""
        return self._directory

    @property
    def segment_size(self) -> int:
        """Size of new segments, in bytes."""
        return self._segment_size

    def prepare(self, start: int) -> None:
        """Makes a helper thread create the segment that begins at an offset; returns at once."""
        if self._preparing is None and self.find(start) is None:
            self._preparing = self._chores.submit(partial(self._make, start))

    def take_up(self) -> None:
        """Adds the segment that the helper thread has made, if it is finished."""
        preparing = self._preparing
        if preparing is None or not preparing.done():
            return
        self._preparing = None
        # If it could not be made, a writer that needs it will try again, and gets the error.
        if preparing.exception() is None:
            self._insert(preparing.result())

    def get_or_make(self, start: int) -> Segment:
        """Return the segment that begins at an offset, made if there is none.

        Raises:
            DiskFull: The disk has no room, not even for the file's name.
            StorageError: The segment cannot be made.
        """
        found = self.find(start)
        if found is None:
            preparing, self._preparing = self._preparing, None
            if preparing is not None:
                try:
                    self._insert(preparing.result())
                except (DiskFull, TooManyOpenFiles):
                    pass  # There may be room by now; the next lines try it.
            found = self.find(start)
        if found is None:
            found = self._make(start)
            self._insert(found)
        assert found.start == start
        return found

    def remove_behind(self, commitlog_offset: int) -> int:
        """Removes all segments that begin behind an offset, durably: they hold nothing but a cut
        tail.

        Returns:
            Number of removed segments.
        """
        keep = bisect_right(self._starts, commitlog_offset)
        gone = self._list[keep:]
        for one in reversed(gone):
            assert one.fd < 0
            os.unlink(one.path)
        if gone:
            sync_directory(self._directory)
        del self._list[keep:], self._starts[keep:]
        return len(gone)

    def take_first(self, count: int) -> list[Segment]:
        """Takes the oldest segments off the list; their files stay.

        Args:
            count: Number of segments; at least one must be left.
        """
        assert 0 < count < len(self._list)
        gone = self._list[:count]
        assert all(one.fd < 0 for one in gone)
        del self._list[:count], self._starts[:count]
        return gone

    def put_back(self, segments: Sequence[Segment]) -> None:
        """Undoes ``take_first`` for the newest of the segments that it took."""
        self._list[:0] = segments
        self._starts[:0] = [segment.start for segment in segments]

    def _insert(self, segment: Segment) -> None:
        index = bisect_right(self._starts, segment.start)
        self._list.insert(index, segment)
        self._starts.insert(index, segment.start)

    def _make(self, start: int) -> Segment:
        return make_segment(self._directory, start, self._segment_size)


def make_segment(directory: Path, start: int, size: int) -> Segment:
    """Makes the file of a segment, durably.

    Args:
        directory: Directory of the log.
        start: Commit-log offset of its first byte.
        size: Size in bytes.

    Raises:
        DiskFull: The disk has no room, not even for the file's name.
        StorageError: The file cannot be made.
    """
    path = directory / f"{start:020d}"
    new = path.with_name(path.name + ".new")
    try:
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, FILE_MODE)
        try:
            os.ftruncate(fd, size)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(new, path)
        sync_directory(directory)
    except OSError as error:
        raise storage_error(
            error, f"{path}, a log segment of {size} bytes, cannot be made"
        ) from error
    return Segment(start, size, str(path))


def list_segments(directory: Path) -> list[Segment]:
    """List the segments in a directory, ascending.

    Args:
        directory: Directory of the log.

    Raises:
        FileNotFoundError: The directory does not exist.
        OSError: The directory cannot be read.
    """
    found = []
    for name in sorted(filter(_NAME.fullmatch, os.listdir(directory))):
        path = directory / name
        try:
            file = path.stat()
        except FileNotFoundError:
            continue  # the file was removed after it was listed
        block_bytes = file.st_blocks * STAT_BLOCK_BYTES
        found.append(Segment(int(name), file.st_size, str(path), block_bytes))
    for segment, follower in pairwise(found):
        # Cut from outside: the successor knows better, but a hole as large as a whole
        # file is a lost one. As large as its neighbour: the config may have changed.
        gap = follower.start - segment.end
        if gap < 0 or 0 < gap < follower.size:
            segment.resize(follower.start - segment.start)
    return found
