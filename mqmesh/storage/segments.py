"""The files of the commit log: found by offset, allocated in full before use.

A segment's name is the commit-log offset of its first byte, 20 digits. All have
the size that was configured when they were made. A file takes its name only
after it was allocated and synced, so a file with a name can be written to its
end without running out of room, and sync needs no change of its size.
"""

import errno
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from mqmesh.errors import DiskFull, TooManyOpenFiles
from mqmesh.storage.atomic_file import storage_error, sync_directory
from mqmesh.storage.chores import Chores
from mqmesh.storage.disk_space import SpaceOf, system_space

_NAME: Final = re.compile(r"\d{20}")


class Segment:
    """One file of the log.

    Attributes:
        start: Commit-log offset of its first byte.
        size: In bytes, as it was made; the file may have been cut since.
        path: Its file.
        fd: Open for writing, else -1. Owned by the commit log.
    """

    __slots__ = ("fd", "path", "size", "start")

    def __init__(self, start: int, size: int, path: str) -> None:
        self.start = start
        self.size = size
        self.path = path
        self.fd = -1

    @property
    def end(self) -> int:
        """Commit-log offset behind its last byte."""
        return self.start + self.size


class Segments:
    """All segments of a log, ascending. There may be holes where a file was lost."""

    def __init__(
        self,
        directory: Path,
        *,
        segment_size: int,
        reserve_bytes: int,
        chores: Chores,
        space_of: SpaceOf = system_space,
    ) -> None:
        """Lists the files; removes what a crash left unfinished.

        Args:
            directory: Theirs; it exists.
            segment_size: Of new segments.
            reserve_bytes: Room that a new one must leave on the disk.
            chores: Thread that prepares the next one.
            space_of: Looks at the disk, on any thread.
        """
        self._directory = directory
        self._segment_size = segment_size
        self._reserve_bytes = reserve_bytes
        self._chores = chores
        self._space_of = space_of
        self._preparing: Future[Segment] | None = None
        for unfinished in directory.glob("*.new"):
            unfinished.unlink()
        paths = sorted(p for p in directory.iterdir() if _NAME.fullmatch(p.name))
        self._list: list[Segment] = []
        for path in paths:
            start, size = int(path.name), path.stat().st_size
            self._list.append(Segment(start, size, str(path)))
        for segment, follower in zip(self._list, self._list[1:], strict=False):
            # Cut from outside: the successor knows better, but a hole as large as a whole
            # file is a lost one. As large as its neighbour: the config may have changed.
            gap = follower.start - segment.end
            if gap < 0 or 0 < gap < follower.size:
                segment.size = follower.start - segment.start
        if self._list and self._list[-1].size < segment_size:
            self._list[-1].size = segment_size
        self._starts = [segment.start for segment in self._list]

    def __len__(self) -> int:
        return len(self._list)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._list)

    @property
    def first(self) -> Segment:
        """The oldest; there is one."""
        return self._list[0]

    @property
    def last(self) -> Segment:
        """The newest; there is one. It may be one prepared ahead."""
        return self._list[-1]

    @property
    def disk_bytes(self) -> int:
        """Size of all files."""
        return sum(segment.size for segment in self._list)

    def find(self, commitlog_offset: int) -> Segment | None:
        """The segment that an offset lies in, None if there is none."""
        index = bisect_right(self._starts, commitlog_offset) - 1
        if index < 0 or commitlog_offset >= self._list[index].end:
            return None
        return self._list[index]

    def after(self, segment: Segment) -> Segment | None:
        """The next one that exists, be it behind a hole; None behind the last."""
        index = bisect_right(self._starts, segment.start)
        return self._list[index] if index < len(self._list) else None

    def prepare(self, start: int) -> None:
        """Has a helper thread make the segment that begins at an offset; returns at once."""
        if self._preparing is None and self.find(start) is None:
            self._preparing = self._chores.submit(lambda: self._make(start))

    def get_or_make(self, start: int) -> Segment:
        """The segment that begins at an offset, made if there is none.

        Raises:
            DiskFull: No room for it.
            StorageError: It cannot be made.
        """
        found = self.find(start)
        if found is None:
            preparing, self._preparing = self._preparing, None
            if preparing is not None:
                try:
                    self._insert(preparing.result())
                except (DiskFull, TooManyOpenFiles):
                    pass  # There may be room by now; the next lines will tell.
            found = self.find(start)
        if found is None:
            found = self._make(start)
            self._insert(found)
        assert found.start == start
        return found

    def remove_after(self, segment: Segment) -> int:
        """Removes all segments behind one, durably: they hold nothing but a cut tail.

        Returns:
            How many.
        """
        keep = bisect_right(self._starts, segment.start)
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
            count: How many; at least one must be left.
        """
        assert 0 < count < len(self._list)
        gone = self._list[:count]
        assert all(one.fd < 0 for one in gone)
        del self._list[:count], self._starts[:count]
        return gone

    def put_back(self, segments: Sequence[Segment]) -> None:
        """Undoes ``take_first`` for the newest of those that it took."""
        self._list[:0] = segments
        self._starts[:0] = [segment.start for segment in segments]

    def _insert(self, segment: Segment) -> None:
        index = bisect_right(self._starts, segment.start)
        self._list.insert(index, segment)
        self._starts.insert(index, segment.start)

    def _make(self, start: int) -> Segment:
        path = self._directory / f"{start:020d}"
        new = path.with_name(path.name + ".new")
        try:
            room = self._space_of(self._directory).available
            if room < self._segment_size + self._reserve_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                os.posix_fallocate(fd, 0, self._segment_size)
                os.fsync(fd)
            except OSError:
                os.unlink(new)
                raise
            finally:
                os.close(fd)
            os.rename(new, path)
            sync_directory(self._directory)
        except OSError as error:
            raise storage_error(
                error, f"no room for a log segment of {self._segment_size} bytes"
            ) from error
        return Segment(start, self._segment_size, str(path))
