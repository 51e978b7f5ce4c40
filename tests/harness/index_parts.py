"""The index of one segment for tests: an empty one, and what it is filled with."""

from pathlib import Path
from typing import Any, Final

from mqmesh.storage.index.part import IndexPart, LogSlice, PartHead

ORIGIN: Final = 1 << 20
"""Commit-log offset where the segment begins."""


def empty_part(directory: Path) -> IndexPart:
    """Makes a part that covers nothing yet, in a directory of its own that does not exist."""
    head = PartHead(store_id=1, boot_id=b"b" * 16, segment_start=ORIGIN)
    return IndexPart.create(directory, head, map_size=1 << 20)


def next_slice(part: IndexPart, size: int = 100, **fields: Any) -> LogSlice:
    """Makes a slice of the log that begins where a part ends.

    Args:
        part: The part.
        size: Bytes of the log.
        fields: Fields of the slice, in place of those of one record stored at time 0.
    """
    start = part.head.segment_start + part.head.through
    fields = {"oldest_ms": 0, "newest_ms": 0, **fields}
    return LogSlice(start=start, stop=start + size, last_offset=start, **fields)
