"""The message index: its parts, one for each indexed log segment, and their directories.

Files of the directory, all described in ``docs/storage-format.md``::

    lock                     one process at a time
    <20 digits>.live/        index of the segment that begins there, being filled
    <20 digits>.sealed/      the same when the segment is full: one run, with a seal
    <20 digits>.new/         being sealed; the next start removes leftovers of a crash

Everything here is made from the log. A part that is damaged, or that belongs to another log or
to another course of the same log, is removed, and made again.
"""

import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from mqmesh.errors import CorruptRecord, StorageError
from mqmesh.private_files import make_folder
from mqmesh.storage.files.atomic_file import storage_error, sync_directory
from mqmesh.storage.files.store_lock import StoreLock
from mqmesh.storage.index.merge import merge_runs
from mqmesh.storage.index.part import IndexPart, PartHead, SortedRun
from mqmesh.storage.index.seal import check_seal, load_seal, seal_part
from mqmesh.storage.lmdb.env import DATA_FILE

log = logging.getLogger(__name__)

LIVE: Final = ".live"
SEALED: Final = ".sealed"
NEW: Final = ".new"

_NAME: Final = re.compile(r"(\d{20})(\.live|\.sealed)\Z")
_UNFINISHED: Final = re.compile(r"\d{20}\.new\Z")


class _Slot:
    """The index of one segment, open or not."""

    __slots__ = ("directory", "part", "sealed", "suspect")

    def __init__(self, directory: Path, sealed: bool) -> None:
        self.directory = directory
        self.sealed = sealed
        self.suspect = False
        self.part: IndexPart | None = None


class MessageIndex:
    """All parts of an index. One thread at a time.

    Attributes:
        discarded: Parts that were removed because they could not be trusted.
    """

    def __init__(self, directory: Path, *, map_size: int, most_open: int) -> None:
        """Takes the lock and lists the parts; opens nothing yet.

        Args:
            directory: Directory of the index; made if need be.
            map_size: First size of a new part's map, in bytes.
            most_open: Number of parts to keep open.

        Raises:
            StoreLocked: Another process has the index.
            StorageError: The directory cannot be used.
        """
        self._directory = directory
        self._map_size = map_size
        self._most_open = most_open
        self.discarded = 0
        self._slots: dict[int, _Slot] = {}
        # In the order of their last use; a dict serves as a list without searching.
        self._open: dict[int, IndexPart] = {}
        self._pinned = -1
        try:
            make_folder(directory)
        except OSError as error:
            raise storage_error(error, f"{directory} cannot be made") from error
        self._lock = StoreLock(directory)
        try:
            self._list()
        except OSError as error:
            self._lock.release()
            raise storage_error(error, f"{directory} cannot be read") from error

    def _list(self) -> None:
        for path in sorted(self._directory.iterdir()):
            match = _NAME.match(path.name)
            if match is None:
                if _UNFINISHED.match(path.name):
                    shutil.rmtree(path)
                continue
            start, sealed = int(match[1]), match[2] == SEALED
            before = self._slots.get(start)
            if before is not None:
                # The part is sealed, but a crash kept its live twin from being removed.
                assert sealed
                shutil.rmtree(before.directory)
            self._slots[start] = _Slot(path, sealed)

    @property
    def starts(self) -> list[int]:
        """Commit-log offsets of the segments that have a part, ascending."""
        return sorted(self._slots)

    @property
    def disk_bytes(self) -> int:
        """Size of all LMDB files."""
        total = 0
        for slot in self._slots.values():
            try:
                total += (slot.directory / DATA_FILE).stat().st_size
            except OSError:
                continue
        return total

    @property
    def open_parts(self) -> list[IndexPart]:
        """The parts that are open now; parts that are being written are among them."""
        return list(self._open.values())

    def is_sealed(self, start: int) -> bool:
        """Return True when the part of a segment is sealed."""
        slot = self._slots.get(start)
        return slot is not None and slot.sealed

    def suspect_all(self) -> None:
        """Trust no file before it was checked: the process died by a signal.

        Live parts have no checksum and are removed; sealed ones count as absent until ``check``
        has passed.
        """
        for start, slot in list(self._slots.items()):
            if slot.sealed:
                slot.suspect = True
            else:
                self.discard(start, "the process that used it was killed by a fault")

    @property
    def suspects(self) -> list[int]:
        """Segments whose part must be checked before use, ascending."""
        return sorted(start for start, slot in self._slots.items() if slot.suspect)

    def check(self, start: int) -> Iterator[None]:
        """Checks a suspect part, a step each time it is resumed; discards it if it is bad."""
        slot = self._slots[start]
        try:
            yield from check_seal(slot.directory)
        except StorageError as error:
            self.discard(start, str(error))
        else:
            slot.suspect = False

    def part(self, start: int) -> IndexPart | None:
        """Return the part of a segment, opened if need be; None if there is none to be trusted.

        A part that cannot be opened is discarded. Valid until the next call of any method.
        """
        slot = self._slots.get(start)
        if slot is None or slot.suspect:
            return None
        if slot.part is None:
            try:
                slot.part = self._open_part(start, slot)
            except StorageError as error:
                self.discard(start, str(error))
                return None
            self._open[start] = slot.part
            self._close_unused(start)
        else:
            self._open[start] = self._open.pop(start)
        return slot.part

    def _close_unused(self, used: int) -> None:
        for start in list(self._open):
            if len(self._open) <= self._most_open:
                break
            if start not in (used, self._pinned):
                self._close(start)

    def _open_part(self, start: int, slot: _Slot) -> IndexPart:
        size = load_seal(slot.directory).size if slot.sealed else -1
        found = _size_of(slot.directory / DATA_FILE)
        if slot.sealed and found != size:
            raise CorruptRecord(f"{slot.directory} has {found} bytes instead of {size}")
        if found < 0:
            raise CorruptRecord(f"{slot.directory} has no {DATA_FILE}")
        part = IndexPart.open(slot.directory, map_size=self._map_size)
        if part.head.segment_start != start:
            part.close()
            raise CorruptRecord(f"{slot.directory} is that of {part.head.segment_start}")
        return part

    def create(self, head: PartHead) -> IndexPart:
        """Makes an empty part for a segment that has none.

        Raises:
            DiskFull: No room.
            StorageError: The part cannot be made.
        """
        start = head.segment_start
        assert start not in self._slots
        new, directory = self._path(start, NEW), self._path(start, LIVE)
        try:
            # It gets its name only with its head: a process killed here leaves no part without one.
            _remove(new)
            IndexPart.create(new, head, map_size=self._map_size).close()
            _remove(directory)
            new.rename(directory)
        except OSError as error:
            raise storage_error(error, f"{directory} cannot be made") from error
        slot = self._slots[start] = _Slot(directory, sealed=False)
        slot.part = self._open[start] = IndexPart.open(directory, map_size=self._map_size)
        return slot.part

    def seal(self, start: int) -> Iterator[None]:
        """Seals a part that is complete, a step each time it is resumed.

        The work ends early when the part is removed meanwhile.

        Raises:
            DiskFull: No room; the part stays as it is.
            CorruptRecord: The part is damaged.
            StorageError: The part cannot be sealed.
        """
        part = self.part(start)
        assert part is not None
        new, final = self._path(start, NEW), self._path(start, SEALED)
        _remove(new)
        self._pinned = start
        try:
            for _ in seal_part(part, new, map_size=self._map_size):
                yield
                if self.part(start) is not part:
                    return  # it was discarded, or its segment removed
            _remove(final)
            new.rename(final)
            sync_directory(self._directory)
        except OSError as error:
            raise storage_error(error, f"{final} cannot be made") from error
        finally:
            self._pinned = -1
            _remove(new)
        live = self._slots[start].directory
        self._close(start)
        self._slots[start] = _Slot(final, sealed=True)
        _remove(live)

    def merge(self, start: int, runs: Sequence[SortedRun]) -> Iterator[None]:
        """Merges some runs of an open part, a step each time it is resumed.

        Raises:
            DiskFull: No room; the part stays as it is.
            CorruptRecord: The part is damaged.
            StorageError: The part cannot be read or written.
        """
        part = self.part(start)
        assert part is not None
        self._pinned = start
        try:
            for _ in merge_runs(part, runs):
                yield
                if self.part(start) is not part:
                    return  # it was discarded
        finally:
            self._pinned = -1

    def copy_live(self, directory: Path) -> list[int]:
        """Copies all parts that are not sealed, for a snapshot; sealed ones can be linked.

        Args:
            directory: Directory in which a directory ``<segment>.live`` is made for each.

        Returns:
            Segments of the parts that were copied.

        Raises:
            DiskFull: No room.
            StorageError: A copy cannot be made.
        """
        copied = []
        for start, slot in sorted(self._slots.items()):
            part = None if slot.sealed else self.part(start)
            if part is None:
                continue
            target = directory / f"{start:020d}{LIVE}"
            try:
                target.mkdir()
            except OSError as error:
                raise storage_error(error, f"{target} cannot be made") from error
            part.env.copy(target)
            copied.append(start)
        return copied

    def remove(self, start: int) -> None:
        """Removes the part of a segment that is gone; no error if there is none."""
        slot = self._slots.pop(start, None)
        if slot is not None:
            part = self._open.pop(start, None)
            if part is not None:
                part.close()
            _remove(slot.directory)

    def discard(self, start: int, reason: str) -> None:
        """Removes a part that cannot be trusted, and logs the reason."""
        log.error("the index of the segment at %d is made anew: %s", start, reason)
        self.discarded += 1
        self.remove(start)

    def close(self) -> None:
        """Closes everything and releases the lock; at most once."""
        for start in list(self._open):
            self._close(start)
        self._lock.release()

    def _close(self, start: int) -> None:
        part = self._open.pop(start, None)
        if part is not None:
            part.close()
            self._slots[start].part = None

    def _path(self, start: int, kind: str) -> Path:
        return self._directory / f"{start:020d}{kind}"


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _remove(directory: Path) -> None:
    # Files that remain after an error are removed when the index is opened next.
    shutil.rmtree(directory, ignore_errors=True)
