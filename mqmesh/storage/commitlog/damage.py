"""Damage of the log: ranges of the log that were on disk and are bad now.

Such a range is never cut and never given out. It stays in the log, readers skip it, and it is
listed here, for the operator and for repair from a replica, see ``log_repair.py``.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mqmesh.errors import CorruptRecord
from mqmesh.storage.files.atomic_file import load_document, save_document
from mqmesh.storage.interface import DamagedRange
from mqmesh.units import CommitLogOffset, TimestampMs

log = logging.getLogger(__name__)


class DamageList:
    """Damaged ranges, in a JSON document."""

    def __init__(self, path: Path) -> None:
        """Reads the document.

        Args:
            path: File of the document.

        Raises:
            StorageError: The document could not be read.
        """
        self._path = path
        self._ranges: dict[int, DamagedRange] = {}
        self._changed = False
        try:
            document = load_document(path)
            if document is not None:
                found = msgspec.json.decode(document, type=list[DamagedRange])
                self._ranges = {one.start_offset: one for one in found}
        except (CorruptRecord, msgspec.MsgspecError) as error:
            # Only a report: verifying the store finds the same ranges again.
            log.error("the list of damaged ranges starts anew: %s", error)

    @property
    def ranges(self) -> Sequence[DamagedRange]:
        """All damaged ranges, ascending."""
        return [self._ranges[start] for start in sorted(self._ranges)]

    def begins_at(self, commitlog_offset: int) -> bool:
        """Return True if a known range begins there."""
        return commitlog_offset in self._ranges

    def add(self, start: int, end: int, reason: str, now_ms: int) -> None:
        """Notes and reports a range; a known one is left as it is."""
        known = self._ranges.get(start)
        if known is not None and known.end_offset >= end:
            return
        log.error("bytes %d to %d of the log are damaged and passed over: %s", start, end, reason)
        self._ranges[start] = DamagedRange(
            CommitLogOffset(start), CommitLogOffset(end), reason, TimestampMs(now_ms)
        )
        self._changed = True

    def mend(self, start: int, end: int) -> None:
        """Notes, for ``save``, that the bytes from the beginning of a range to ``end`` are good."""
        known = self._ranges.pop(start, None)
        self._changed |= known is not None
        if known is not None and end < known.end_offset:
            self._ranges[end] = msgspec.structs.replace(known, start_offset=CommitLogOffset(end))

    def cut(self, end_offset: int) -> None:
        """Forgets, for ``save``, ranges behind the end of a log that was cut."""
        kept = {start: one for start, one in self._ranges.items() if one.end_offset <= end_offset}
        self._changed |= len(kept) < len(self._ranges)
        self._ranges = kept

    def save(self) -> None:
        """Makes changes durable.

        Raises:
            StorageError: The changes could not be saved.
        """
        if self._changed:
            save_document(self._path, msgspec.json.encode(self.ranges))
            self._changed = False
