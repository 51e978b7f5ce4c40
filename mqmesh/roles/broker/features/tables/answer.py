"""Answer to READ_TABLE: entries and values, as far as there is room for them."""

from typing import Final

from mqmesh.protocol.tables import ReadTableRequest, TableEntry
from mqmesh.roles.broker.features.tables.row import PUT, Row
from mqmesh.roles.broker.features.tables.values import TableValues
from mqmesh.units import MIB

MOST_LOOKED: Final = 10_000
"""Rows that one READ_TABLE looks at."""
_MOST_READ_BYTES: Final = 16 * MIB
"""Bytes of the log that one READ_TABLE reads, and one batch: a value may be a small part of one."""


class TableAnswer:
    """Answer to one READ_TABLE.

    Args:
        values: Reads values from the log.
        query: Request that is answered.
        now_ms: Wall clock; values that have expired are left out.

    Attributes:
        entries: Entries, in the order of the answer.
        values: Value of each entry that has one.
        after: Newest key that was looked at.
        looked: Rows that were looked at.
        is_full: There is no room for more.
    """

    def __init__(self, values: TableValues, query: ReadTableRequest, now_ms: int) -> None:
        self._values = values
        self._query = query
        self._now_ms = now_ms
        self._left = query.max_bytes
        self._read_until = values.read_bytes + _MOST_READ_BYTES
        self.entries: list[TableEntry] = []
        self.values: list[bytes] = []
        self.after = query.after
        self.looked = 0
        self.is_full = False

    def add(self, text: str, key: bytes, row: Row) -> bool:
        """Add what is wanted of a row; False if there is no room for all of it.

        Args:
            text: Key.
            key: The same in UTF-8.
            row: Its row.
        """
        self.looked += 1
        query, newest = self._query, row.revisions[0]
        if query.history:
            wanted = [one for one in row.revisions[::-1] if one.revision > query.newer_than]
        elif newest.revision > query.newer_than and (query.deleted or newest.is_live(self._now_ms)):
            wanted = [newest]
        else:
            return True
        with_values = not query.keys_only
        for one in wanted:
            if with_values:
                is_over = one.size > self._left or self._values.read_bytes >= self._read_until
                if is_over and self.entries:
                    self.is_full = True
                    return False
                self._left -= one.size
            self.entries.append(
                TableEntry(
                    text, one.revision, one.stored_ms, one.operation, one.expires_ms, one.size
                )
            )
            if with_values and one.operation == PUT:
                value = row.value if one is newest else None
                self.values.append(self._values.value(key, row, one) if value is None else value)
        return True
