"""Comparison of the page cache of a file with the disk.

A failed sync reports its error once; since then the system counts the pages as clean, and every
later sync succeeds. So the bytes in memory are compared with a read that bypasses the page cache.
That costs one read of the disk. Pages that are not in memory cost nothing: a reader gets them from
the disk anyway.

Comparing is not enough for pages of zeros. An unwritten block reads as zeros, too. If the first
write to a block has failed, ext4 remembers the block as written for as long as the page is in
memory. A later write to this page is then lost in spite of its sync: after the next mount the
block reads as zeros. So from the first zeros on pages are dropped from memory, and the next reader
finds the block as it is.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from typing import Final

from mqmesh.storage.log.mapped_file import PAGE, page_buffer, pages_in_memory
from mqmesh.units import KIB, MIB

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 2 * MIB
"""Size of one read. Pages come and go in groups of at most so many bytes."""
SMALLEST_BLOCK_BYTES: Final = 1 * KIB
"""Smallest block of a file system. An unwritten block is at least so many zeros."""
_IN_MEMORY: Final = b"\x01"


class DirectFile:
    """A file that is read without the page cache, which stays as it is."""

    def __init__(self, path: str) -> None:
        """Opens the file.

        Args:
            path: The file.

        Raises:
            OSError: The file cannot be opened, or its file system has no direct reads.
        """
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        self._fd = os.open(path, os.O_RDONLY | flag)
        self._buffer = page_buffer(PIECE_BYTES)

    def read(self, position: int, size: int) -> bytes:
        """Read bytes as the disk has them.

        Args:
            position: Position of the first byte; a multiple of a page.
            size: Number of bytes, at most ``PIECE_BYTES``.

        Returns:
            The bytes; fewer where the file ends.

        Raises:
            OSError: They cannot be read.
        """
        count = os.preadv(self._fd, [self._buffer], position)
        return self._buffer[: min(count, size)]

    def is_direct(self, position: int) -> bool:
        """Return False if direct reads may be answered from memory all the same.

        Some file systems accept the flag for direct reads, and ignore it for some files. Only a
        read that goes to the device must begin at one of its blocks, and is refused elsewhere. A
        read of unwritten blocks never goes to the device.

        Args:
            position: Position of a page whose blocks are written.
        """
        with memoryview(self._buffer) as view, view[1:513] as part:
            try:
                os.preadv(self._fd, [part], position + 1)
            except OSError as error:
                return error.errno == errno.EINVAL
        return False

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)
        self._buffer.close()


class DiskCheck:
    """Compares one file with the disk; no other process may map or write it meanwhile."""

    def __init__(self, path: str, start: int, on_piece: Callable[[int], None]) -> None:
        """Opens the file.

        Args:
            path: The file.
            start: Position before which the disk is known to have every byte.
            on_piece: Called with the position of each piece that is compared; may raise.

        Raises:
            OSError: It cannot be opened.
        """
        self._path = path
        self._start = start
        self._on_piece = on_piece
        self._fd = os.open(path, os.O_RDONLY)
        self._size = os.fstat(self._fd).st_size

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)

    def is_on_disk(self) -> bool:
        """Syncs the file and compares.

        Returns:
            False if the disk has other bytes behind ``start``, or if that cannot be found out.
        """
        try:
            os.fdatasync(self._fd)
            return self._is_same()
        except OSError as error:
            log.warning("what the disk has of %s cannot be known: %s", self._path, error)
            return False

    def _is_same(self) -> bool:
        if self._start >= self._size:
            return True
        resident = pages_in_memory(self._fd, self._size)
        zeros_from = self._size
        with contextlib.ExitStack() as resources:
            direct = None
            begin = self._start - self._start % PAGE
            begin_piece = begin - begin % PIECE_BYTES
            for piece in range(begin_piece, self._size, PIECE_BYTES):
                low, high = max(piece, begin), min(piece + PIECE_BYTES, self._size)
                if _IN_MEMORY not in resident[low // PAGE : -(-high // PAGE)]:
                    continue
                self._on_piece(low)
                shown = os.pread(self._fd, high - low, low)
                zeros = shown.find(bytes(SMALLEST_BLOCK_BYTES))
                if zeros >= 0:
                    zeros_from = min(zeros_from, low + zeros)
                if not shown[max(0, self._start - low) :].strip(b"\0"):
                    continue  # nothing is stored here
                if direct is None:
                    direct = DirectFile(self._path)
                    resources.callback(direct.close)
                    if not direct.is_direct(low):
                        log.warning("%s is always read from memory by its file system", self._path)
                        return False
                if direct.read(low, len(shown)) != shown:
                    log.error("the disk does not have what was stored in %s", self._path)
                    return False
        return self._forget(zeros_from)

    def _forget(self, position: int) -> bool:
        """Drops pages behind a position from memory; False if some stay."""
        low = position - position % PIECE_BYTES
        if position >= self._size:
            return True
        os.posix_fadvise(self._fd, low, 0, os.POSIX_FADV_DONTNEED)
        return _IN_MEMORY not in pages_in_memory(self._fd, self._size)[low // PAGE :]
