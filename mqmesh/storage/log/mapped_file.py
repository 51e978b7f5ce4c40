"""Files in memory: written by stores, read as views. The only module that uses ``mmap``.

A map reports trouble with the disk by a signal (SIGBUS) where a call would raise an error. So this
module touches no page that the kernel has not vouched for: stores go only into pages that
``bring_in`` has made ready, views are made only of pages that are in memory, and a scan brings in a
stretch, which fails with an error, before it looks at it.

A map is never shrunk and never flushed (``mmap.flush`` holds the interpreter's lock; syncs use the
descriptor). Views keep a map, which is freed together with its last view. Calls by ``ctypes``
release the interpreter's lock, the methods of ``mmap`` do not.
"""

import ctypes
import errno
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Final

from mqmesh.batch.payload import Buffer
from mqmesh.units import MIB

PAGE: Final = mmap.PAGESIZE
MOST_LOOKED_AT_BYTES: Final = 64 * MIB
"""Limit of one view; longer than any record."""
LOOK_AHEAD_BYTES: Final = 4 * MIB
"""Stretch of a file whose pages are looked up in memory by one call: readers come one behind the
other, and from several queues whose batches lie side by side."""

_POPULATE_READ: Final = 22
_POPULATE_WRITE: Final = 23
_DONT_NEED: Final = 4
_RANDOM: Final = 1
_SEQUENTIAL: Final = 2
_IN_MEMORY: Final = b"\x01"

_libc: Final = ctypes.CDLL(None, use_errno=True)
_madvise: Final = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int
_IS_LINUX: Final = sys.platform == "linux"
if _IS_LINUX:
    _mincore: Final = _libc.mincore
    _mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    _mincore.restype = ctypes.c_int


def page_buffer(size: int) -> mmap.mmap:
    """Return memory that begins with a page, as direct reads require it.

    Args:
        size: Size in bytes.
    """
    return mmap.mmap(-1, size)


def pages_in_memory(fd: int, size: int) -> bytes:
    """Return which pages of a file are in the page cache, without changing that.

    Args:
        fd: Descriptor, open for reading.
        size: Size of the file, in bytes; at least 1.

    Returns:
        One byte for each page: 1 if it is there, else 0.

    Raises:
        OSError: This system does not report it.
    """
    if not _IS_LINUX:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    pages = bytearray(-(-size // PAGE))
    found = ctypes.c_char.from_buffer(pages)
    # Copy on write, since ctypes gives addresses of writable memory only; nothing is written.
    mapped = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    first = ctypes.c_char.from_buffer(mapped)
    try:
        if _mincore(ctypes.addressof(first), size, ctypes.addressof(found)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        del first
        mapped.close()
    return bytes(pages)


class MappedFile:
    """A file of a fixed size, mapped once and in full, for reading and for stores.

    Attributes:
        size: Size in bytes.
    """

    __slots__ = (
        "_address",
        "_map",
        "_residency",
        "_residency_address",
        "_resident_from",
        "_resident_to",
        "size",
    )

    def __init__(self, path: str, size: int) -> None:
        """Maps the file.

        Args:
            path: The file.
            size: Smallest size that the file must have.

        Raises:
            OSError: The file cannot be opened or mapped, or is shorter.
        """
        fd = os.open(path, os.O_RDWR)
        try:
            found = os.fstat(fd).st_size
            if found < size:
                raise OSError(errno.EIO, f"{path} has {found} bytes instead of {size}")
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self.size = size
        # The array that has the address is dropped at once, else the map could never be freed.
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        # Only pages in memory are read: the kernel's read-ahead would fetch pages that are not
        # written yet, which are pages of zeros, each cleared and then written over.
        _advise(self._address, 0, size, _RANDOM)
        self._residency = bytearray(MOST_LOOKED_AT_BYTES // PAGE + 2)
        self._residency_address = ctypes.addressof(ctypes.c_char.from_buffer(self._residency))
        self._resident_from = self._resident_to = 0

    @property
    def views(self) -> int:
        """Views that are still in use; slices of one another count as one."""
        return sys.getrefcount(self._map) - 2  # this object's, and the argument

    def leave(self) -> "LeftMap":
        """Return the map for as long as it has views, when this object gives it up."""
        return LeftMap(weakref.ref(self._map), self.size)

    def look_again(self) -> None:
        """Forgets which pages were in memory at the last look."""
        self._resident_from = self._resident_to = 0

    def view(self, position: int, size: int, *, stop: int) -> memoryview | None:
        """Return bytes of the file, not copied.

        Args:
            position: Position of the first byte, in the file.
            size: Number of bytes.
            stop: End of the written bytes; the look ahead ends there.

        Returns:
            Read-only view; None unless all its pages are in memory, or were at the last look since
            ``look_again``. A caller that gets None reads by a call, which reports an error of the
            disk, or a file that was cut, by an exception.
        """
        end = position + size
        assert 0 <= position <= end <= stop <= self.size
        if position < self._resident_from or end > self._resident_to:
            far = min(stop, max(end, position + LOOK_AHEAD_BYTES))
            if not self._is_resident(position, far):
                if far == end or not self._is_resident(position, end):
                    return None
                far = end
            self._resident_from, self._resident_to = position, far
        return memoryview(self._map)[position:end].toreadonly()

    def store(self, position: int, pieces: Sequence[Buffer]) -> None:
        """Puts buffers into the file, one behind the other.

        Args:
            position: Position of the first byte, in the file; ``bring_in`` has made all pages of
                the buffers ready.
            pieces: The buffers.
        """
        for piece in pieces:
            end = position + len(piece)
            self._map[position:end] = piece
            position = end

    def bring_in(self, position: int, stop: int) -> bool:
        """Makes pages ready for stores; takes long, and other threads go on meanwhile.

        Args:
            position: Position in the file.
            stop: End of the pages; at most ``size``.

        Returns:
            False if that is not possible here: the system is no Linux, or its kernel is older than
            5.14 or has no memory, or the file has no such pages.
        """
        assert 0 <= position <= stop <= self.size
        return _advise(self._address, position, stop, _POPULATE_WRITE)

    def give_back(self, position: int, stop: int) -> None:
        """Releases pages that were made ready; their content stays in the file."""
        assert 0 <= position <= stop <= self.size
        _advise(self._address, position, stop, _DONT_NEED)

    def _is_resident(self, position: int, stop: int) -> bool:
        start = position - position % PAGE
        length = stop - start
        # Memory may hold more than the file, if it was cut: pages come in groups.
        if not _IS_LINUX or length > MOST_LOOKED_AT_BYTES or self._map.size() < stop:
            return False
        if _mincore(self._address + start, length, self._residency_address):
            return False
        pages = -(-length // PAGE)
        return self._residency.count(_IN_MEMORY, 0, pages) == pages


class LeftMap:
    """A map that only its views keep.

    Attributes:
        size: Size in bytes.
    """

    __slots__ = ("_map", "size")

    def __init__(self, left: "weakref.ref[mmap.mmap]", size: int) -> None:
        """Take a map over; called by ``MappedFile.leave``."""
        self._map = left
        self.size = size

    @property
    def views(self) -> int:
        """Views that are still in use; with 0 of them the file is not mapped any more."""
        left = self._map()
        return 0 if left is None else sys.getrefcount(left) - 2


class ScannedFile:
    """A file that is read from its beginning to its end, once, a window at a time.

    Only the newest two windows stay in the memory of this process: a reader may still use the one
    before. An older view stays valid, but its bytes are read from the file again.
    """

    def __init__(self, fd: int) -> None:
        """Maps the file in its present size.

        Args:
            fd: Descriptor, open for reading; the map does not need it afterwards.

        Raises:
            OSError: The file cannot be mapped; an empty file never can.
        """
        size = os.fstat(fd).st_size
        if not size:
            raise OSError(errno.EINVAL, "an empty file cannot be mapped")
        # A private map, which is never written: ctypes gives no address of a read-only one. The map
        # shows writes of other processes to the file.
        self._map = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
        self._size = size
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        _advise(self._address, 0, size, _SEQUENTIAL)
        self._kept_from = self._last = 0

    def view(self, position: int, size: int) -> memoryview | None:
        """Return bytes of the file, not copied; fewer where it ended when it was mapped.

        Args:
            position: Position of the first byte, in the file.
            size: Number of bytes.

        Returns:
            The view; None if the pages cannot be brought in. A read by a call reports the reason.
        """
        stop = min(position + size, self._size)
        if position >= stop or not _advise(self._address, position, stop, _POPULATE_READ):
            return None
        keep_from = min(self._last, position)
        keep_from -= keep_from % PAGE
        if keep_from > self._kept_from:
            _advise(self._address, self._kept_from, keep_from, _DONT_NEED)
        self._kept_from, self._last = keep_from, position
        return memoryview(self._map)[position:stop].toreadonly()


def _advise(address: int, position: int, stop: int, advice: int) -> bool:
    """Gives the system advice about bytes of a map; other threads go on meanwhile."""
    start = position - position % PAGE
    return _IS_LINUX and not _madvise(address + start, stop - start, advice)
