"""Counts of the revisions in rows, by segment of the log and by table."""

from typing import Final

from mqmesh.clock import Clock
from mqmesh.roles.broker.features.tables.row import (
    COUNTS_KEY,
    PUT,
    ROW_PREFIX,
    Row,
    RowCounts,
    pack,
    read_row_key,
    unpack,
    unpack_row,
)
from mqmesh.storage.table_rows import TableRows
from mqmesh.units import MAX_OFFSET

_SCAN: Final = 1_000
"""Rows that are read at once."""


class TableCounts:
    """Counter of the revisions that rows have.

    A role that ends in order stores its counts beside the rows. Rows of a role that was killed are
    counted in slices; changes of rows that the count has not reached do not count meanwhile.
    Methods that read or write raise ``StorageError``; ``CorruptRecord`` of what is damaged.

    Args:
        rows: The rows.
        clock: Ends a slice.
        segment_bytes: Size of a segment of the log.

    Attributes:
        keys: Live keys by number of the table.
        sizes: Bytes of keys and values of all revisions that are kept, by number of the table.
        are_stored: Counts may stand beside the rows; the next write of rows deletes them.
    """

    def __init__(self, rows: TableRows, clock: Clock, segment_bytes: int) -> None:
        self._rows = rows
        self._clock = clock
        self._segment_bytes = segment_bytes
        self._segments: dict[int, tuple[int, int]] = {}
        # Rows before this place are counted; None for all.
        self._counted_to: bytes | None = None
        self.keys: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.are_stored = True

    @property
    def are_complete(self) -> bool:
        """Return whether all rows are counted."""
        return self._counted_to is None

    @property
    def live_bytes(self) -> int:
        """Bytes of keys and values that all tables keep."""
        return sum(self.sizes.values())

    def lowest_place(self) -> int:
        """Return the offset of the first segment that rows lead to, MAX_OFFSET if none is."""
        return min(self._segments) * self._segment_bytes if self._segments else MAX_OFFSET

    def load(self) -> None:
        """Take over the stored counts, or begin to count all rows."""
        data = self._rows.get_many([COUNTS_KEY])[0]
        if data is None:
            self.are_stored, self._counted_to = False, ROW_PREFIX
            return
        counts = unpack(COUNTS_KEY, data, RowCounts)
        self._segments, self.keys, self.sizes = counts.segments, counts.keys, counts.sizes

    def store(self) -> None:
        """Write complete counts beside the rows, unless they stand there."""
        if not self.are_stored and self.are_complete:
            counts = RowCounts(self._segments, self.keys, self.sizes)
            self._rows.write([(COUNTS_KEY, pack(COUNTS_KEY, counts))])
            self.are_stored = True

    def clear(self) -> None:
        """Forget all counts: there are no rows any more."""
        self._segments.clear()
        self._counted_to = None
        self.keys.clear()
        self.sizes.clear()
        self.are_stored = False

    def count_on(self, until_ms: int) -> None:
        """Count rows that are not counted yet, until a time of the monotonic clock."""
        while self._counted_to is not None and self._clock.monotonic_ms() < until_ms:
            end = bytes((ROW_PREFIX[0] + 1,))
            found = self._rows.range(self._counted_to, end, most=_SCAN)
            rows = [(place, unpack_row(place, data)) for place, data in found]
            self._counted_to = found[-1][0] + b"\0" if len(found) == _SCAN else None
            for place, row in rows:
                self._count(place, row, 1)

    def replace(self, place: bytes, old: Row | None, new: Row | None) -> None:
        """Count the row at a ``row_key`` that was written or deleted; None stands for no row."""
        if self._counted_to is not None and place >= self._counted_to:
            return  # the count is still to reach it
        if old is not None:
            self._count(place, old, -1)
        if new is not None:
            self._count(place, new, 1)

    def forget(self, number: int) -> None:
        """Forget a table without rows, by its number."""
        self.keys.pop(number, None)
        self.sizes.pop(number, None)

    def _count(self, place: bytes, row: Row, sign: int) -> None:
        number, key = read_row_key(place)
        segments, live = self._segments, 0
        for one in row.revisions:
            segment, size = one.place // self._segment_bytes, one.size + len(key)
            count, total = segments.get(segment, (0, 0))
            if count + sign:
                segments[segment] = (count + sign, total + sign * size)
            else:
                segments.pop(segment, None)
            live += size
        self.sizes[number] = self.sizes.get(number, 0) + sign * live
        if row.newest.operation == PUT:
            self.keys[number] = self.keys.get(number, 0) + sign
