"""Cut of a log's end, durable: a cut that was begun is finished after a crash.

A cut has three steps. First a note says where the log is to end. Then the bytes behind are zeroed
and synced. When everything derived from these bytes is removed, too, the note is taken back. A
start that finds a note completes the cut. So cut bytes never come back, and no record need mention
the cut: replicas of a log stay byte for byte the same. Layout of the note, ``log-cut``, little
endian:

======== ===== ===== =========================================================
position bytes type  meaning
======== ===== ===== =========================================================
0        4     bytes magic, ``MQT1``
4        4     u32   crc: CRC-32 of bytes 8 to 15
8        8     u64   end_offset: commit-log offset; 2**64 - 1 while no cut is going on
======== ===== ===== =========================================================

The note is written in place, with one write that no sector border divides, so it needs no room on a
full disk.
"""

import logging
import os
import struct
from pathlib import Path
from typing import Final

from mqmesh.checksum import crc32
from mqmesh.private_files import FILE_MODE
from mqmesh.storage.files.atomic_file import storage_error
from mqmesh.storage.log.scan import data_ranges
from mqmesh.storage.log.segments import Segment, Segments
from mqmesh.units import MIB

log = logging.getLogger(__name__)

MAGIC: Final = b"MQT1"
NAME: Final = "log-cut"
NO_CUT: Final = 2**64 - 1
PIECE_BYTES: Final = 1 * MIB
"""Bytes zeroed by one call."""

_LAYOUT = struct.Struct("<4sIQ")


class TailCut:
    """The cut of a log's end that is going on, if any.

    Attributes:
        end_offset: Where the log is to end; None while no cut is going on.
    """

    def __init__(self, path: Path, segments: Segments) -> None:
        """Reads the note; makes it if there is none.

        Args:
            path: File of the note; the maker of the store syncs its directory.
            segments: Files of the log.

        Raises:
            StorageError: The note cannot be read, or made.
        """
        self._path = path
        self._segments = segments
        self.end_offset: int | None = None
        data = b""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            pass  # a new store
        except OSError as error:
            raise storage_error(error, f"{path} cannot be read") from error
        found = _decode(data)
        if found is None:
            # An empty file is left by a process that was killed while it made the store.
            if data:
                log.error("%s is damaged; a cut that was going on stays undone", path)
            self._note(NO_CUT)
        elif found != NO_CUT:
            self.end_offset = found

    def begin(self, end_offset: int) -> None:
        """Notes where the log is to end; from then on the cut is done, in this life or the next.

        Raises:
            StorageError: The note cannot be written.
        """
        self._note(end_offset)
        self.end_offset = end_offset

    def clear(self) -> None:
        """Zeroes the bytes of the log behind its new end, durably. No other part may write there.

        Raises:
            StorageError: The disk reports an error; may be tried again.
        """
        end = self.end_offset
        assert end is not None
        # The last files first: the remaining log must not have a hole.
        self._segments.remove_behind(end)
        segment = self._segments.find(end)
        if segment is not None:
            try:
                self._zero(segment, end - segment.start)
            except OSError as error:
                raise storage_error(error, f"the end of {segment.path} cannot be cut") from error

    def finish(self) -> None:
        """Takes the note back: no cut byte is left, here or in anything derived from the log.

        Raises:
            StorageError: The note cannot be written.
        """
        self._note(NO_CUT)
        self.end_offset = None

    def _zero(self, segment: Segment, start: int) -> None:
        fd = os.open(segment.path, os.O_RDWR)
        try:
            for low, high in list(data_ranges(fd, start, segment.size)):
                for position in range(low, high, PIECE_BYTES):
                    os.pwrite(fd, bytes(min(PIECE_BYTES, high - position)), position)
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def _note(self, end_offset: int) -> None:
        number = end_offset.to_bytes(8, "little")
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT, FILE_MODE)
            try:
                os.pwrite(fd, MAGIC + crc32(number).to_bytes(4, "little") + number, 0)
                os.fdatasync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise storage_error(error, f"{self._path} cannot be written") from error


def read_log_cut(path: Path) -> int | None:
    """Return where the log is being cut; None if it is not, or not known. Changes nothing.

    Args:
        path: File of the note.

    Raises:
        OSError: The note cannot be read.
    """
    try:
        found = _decode(path.read_bytes())
    except FileNotFoundError:
        return None
    return None if found == NO_CUT else found


def _decode(data: bytes) -> int | None:
    if len(data) != _LAYOUT.size:
        return None
    magic, crc, end_offset = _LAYOUT.unpack(data)
    return int(end_offset) if magic == MAGIC and crc == crc32(data[8:]) else None
