"""Rows of all tables: they are read, written with what they have of the log, and removed."""

import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from mqmesh.errors import StorageError
from mqmesh.roles.broker.features.tables.changes import Change
from mqmesh.roles.broker.features.tables.counts import TableCounts
from mqmesh.roles.broker.features.tables.row import (
    COUNTS_KEY,
    DUE_PREFIX,
    GONE_PREFIX,
    HEAD_KEY,
    PUT,
    ROWS_VERSION,
    TABLE_PREFIX,
    Revision,
    Row,
    RowsHead,
    TableHead,
    due_of,
    due_until,
    gone_key,
    gone_number,
    pack,
    read_due,
    row_key,
    row_start,
    unpack,
    unpack_row,
    with_revision,
)
from mqmesh.roles.broker.topic_state.topic_table import Topic
from mqmesh.storage.interface import MessageStore
from mqmesh.storage.table_rows import TableRows
from mqmesh.units import MAX_OFFSET

_MOST_REMOVED: Final = 1_000
"""Rows of a deleted table that are removed at once."""

_log = logging.getLogger(__name__)

Mark = tuple[int, int]
"""Commit-log offset and checksum of a stored batch, see ``mark_of``."""


class BrokerTable:
    """One table.

    Attributes:
        topic: Topic with its messages.
        number: Number in the keys of its rows.
        applied: Queue offset of the first message that the rows do not have.
        mark: ``mark_of`` the batch before.
        goal: Queue offset that the rows have to reach before the table answers.
        is_ready: The rows have reached the goal.
        newest: Newest revision of each key that is not in the rows, and where its batch ends.
    """

    def __init__(self, topic: Topic, head: TableHead) -> None:
        self.topic = topic
        self.number = head.number
        self.applied = head.applied
        self.mark: Mark = head.mark
        self.goal = 0
        self.is_ready = False
        self.newest: dict[bytes, tuple[Revision, int]] = {}

    @property
    def name(self) -> str:
        """Name of its topic."""
        return self.topic.config.topic


class RowsStep(msgspec.Struct, frozen=True, eq=False):
    """Step of the rows along one queue of the log, with the changes of its batches.

    Attributes:
        table: Table of the queue; None for the carried topic.
        changes: Changes, each with its table.
        next_offset: Queue offset behind the step.
        mark: ``mark_of`` the last batch.
        end_offset: Where that batch ends in the log; 0 if it is confirmed.
    """

    table: BrokerTable | None
    changes: list[tuple[BrokerTable, Change]]
    next_offset: int
    mark: Mark
    end_offset: int = 0


class RowStore:
    """Store of the rows of all tables, and of the heads that say how far the rows are.

    All methods that read or write raise ``StorageError``; ``CorruptRecord`` of damaged rows.

    Args:
        store: The log that the rows are made from.
        rows: Pairs of bytes.
        counts: Counter of the rows.

    Attributes:
        carried: Queue offset of the first carried message that the rows do not have.
        carried_mark: ``mark_of`` the batch before.
        gone: Numbers of deleted tables that may have rows.
        problem: Reason why the rows could not be written last; empty if they could.
    """

    def __init__(self, store: MessageStore, rows: TableRows, counts: TableCounts) -> None:
        self._store = store
        self._rows = rows
        self._counts = counts
        self._by_number: dict[int, BrokerTable] = {}
        self._next_number = 1
        self.carried = 0
        self.carried_mark: Mark = (-1, 0)
        self.gone: list[int] = []
        self.problem = ""

    def begin(self) -> None:
        """Open the rows for a role that begins; again does no harm."""
        self._rows.begin()

    def reset(self) -> None:
        """Forget all rows and tables."""
        self._rows.reset()
        self._counts.clear()
        self._by_number.clear()
        self._next_number = 1
        self.carried, self.carried_mark = 0, (-1, 0)
        self.gone.clear()

    def report(self, error: StorageError) -> None:
        """Note why the rows cannot be written; the first error is logged."""
        if not self.problem:
            _log.error("the tables cannot be written: %s", error)
        self.problem = str(error)

    # ---- Tables ----------------------------------------------------------------------

    def read_head(self) -> RowsHead | None:
        """Read the head of all rows, None if nothing was ever written."""
        data = self._rows.get_many([HEAD_KEY])[0]
        return None if data is None else unpack(HEAD_KEY, data, RowsHead)

    def take_over(self, head: RowsHead) -> dict[str, TableHead]:
        """Go on with the rows of an earlier role; return the heads of its tables by name."""
        self._next_number, self.carried = head.next_number, head.carried
        self.carried_mark = head.carried_mark
        self.gone = [gone_number(key) for key, _ in self._pairs(GONE_PREFIX)]
        heads = [(key, unpack(key, data, TableHead)) for key, data in self._pairs(TABLE_PREFIX)]
        return {key[len(TABLE_PREFIX) :].decode(): known for key, known in heads}

    def _pairs(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        return self._rows.range(prefix, bytes((prefix[0] + 1,)), most=MAX_OFFSET)

    def add(self, topic: Topic, head: TableHead | None = None) -> BrokerTable:
        """Add a table, with the rows of a head or with none."""
        if head is None:
            head = TableHead(self._next_number, topic.table_id)
            self._next_number += 1
        table = self._by_number[head.number] = BrokerTable(topic, head)
        self._counts.keys.setdefault(head.number, 0)
        return table

    def drop(self, table: BrokerTable) -> None:
        """Forget a table; ``remove_gone`` removes its rows bit by bit."""
        del self._by_number[table.number]
        self.gone.append(table.number)
        self._write({gone_key(table.number): b""}, [_head_key(table.name)])

    def drop_lost(self, lost: dict[str, TableHead]) -> None:
        """Forget tables of an earlier role that were deleted since, by name."""
        if lost:
            numbers = [head.number for head in lost.values()]
            puts = [(gone_key(number), b"") for number in numbers]
            self._rows.write(puts, map(_head_key, lost))
            self.gone += numbers

    def remove_gone(self) -> None:
        """Remove some rows of deleted tables."""
        if not self.gone:
            return
        number = self.gone[0]
        found = self._rows.range(row_start(number), row_start(number + 1), most=_MOST_REMOVED)
        rows = [(place, unpack_row(place, data)) for place, data in found]
        if not rows:
            self._write({}, [gone_key(number)])
            del self.gone[0]
            self._counts.forget(number)
            return
        deletes = [place for place, _ in rows]
        deletes += [due_of(place, row) for place, row in rows if row.newest.expires_ms]
        self._write({}, deletes)
        for place, row in rows:
            self._counts.replace(place, row, None)

    # ---- Reads -----------------------------------------------------------------------

    def get(self, places: Sequence[bytes]) -> list[Row | None]:
        """Return the row at each ``row_key``, None where there is none."""
        return [
            None if data is None else unpack_row(place, data)
            for place, data in zip(places, self._rows.get_many(places), strict=True)
        ]

    def range(
        self, number: int, start: bytes, stop: bytes | None, most: int
    ) -> list[tuple[bytes, Row]]:
        """Return keys and rows of a table in order, as ``Tables.rows_behind`` does."""
        first = row_start(number)
        end = row_start(number + 1) if stop is None else first + stop
        found = self._rows.range(first + start, end, most=most)
        return [(key[len(first) :], unpack_row(key, data)) for key, data in found]

    # ---- Writes ----------------------------------------------------------------------

    def write(self, steps: Sequence[RowsStep]) -> None:
        """Write the changes of steps, and how far the rows are then: all or nothing."""
        changes = [
            (row_key(table.number, change.key), table, change)
            for step in steps
            for table, change in step.changes
        ]
        places = list(dict.fromkeys(place for place, _, _ in changes))
        before = dict(zip(places, self.get(places), strict=True))
        after = dict(before)
        for place, table, change in changes:
            if table.number not in self._by_number:
                continue  # deleted meanwhile
            history = table.topic.config.history
            row = with_revision(after[place], change.revision, change.value, history)
            if row is not None:
                after[place] = row
        puts: dict[bytes, bytes] = {}
        deletes: list[bytes] = []
        moved = [place for place in places if after[place] is not before[place]]
        for place in moved:
            row, old = after[place], before[place]
            assert row is not None
            puts[place] = pack(place, row)
            if old is not None and old.newest.expires_ms:
                deletes.append(due_of(place, old))
            if row.newest.expires_ms:
                puts[due_of(place, row)] = b""
        self._write(puts, deletes, steps)
        for place in moved:
            self._counts.replace(place, before[place], after[place])

    def _write(
        self, puts: dict[bytes, bytes], deletes: list[bytes], steps: Sequence[RowsStep] = ()
    ) -> None:
        """Write pairs, with the heads of all tables and of those that have come further."""
        carried, mark = self.carried, self.carried_mark
        heads: dict[BrokerTable, TableHead] = {}
        for step in steps:
            table = step.table
            if table is None:
                carried, mark = step.next_offset, step.mark
            elif table.number in self._by_number:
                table_id = table.topic.table_id
                heads[table] = TableHead(table.number, table_id, step.next_offset, step.mark)
        for table, head in heads.items():
            key = _head_key(table.name)
            puts[key] = pack(key, head)
        # Always: no other table gets the number of one that is deleted.
        store_id = self._store.stats().store_id
        own = RowsHead(ROWS_VERSION, store_id, self._next_number, carried, mark)
        puts[HEAD_KEY] = pack(HEAD_KEY, own)
        if self._counts.are_stored:
            deletes.append(COUNTS_KEY)
        self._rows.write(sorted(puts.items()), deletes)
        self._counts.are_stored = False
        self.problem = ""
        self.carried, self.carried_mark = carried, mark
        for table, head in heads.items():
            table.applied, table.mark = head.applied, head.mark

    # ---- Time ------------------------------------------------------------------------

    def take_due(self, now_ms: int, most: int) -> list[tuple[BrokerTable, bytes]]:
        """Return keys whose values have expired; remove the tombstones whose time is over.

        Args:
            now_ms: Wall clock.
            most: Rows that are looked at.
        """
        found = self._rows.range(DUE_PREFIX, due_until(now_ms), most=most)
        due = [(key, *read_due(key)) for key, _ in found]
        places = [row_key(number, key) for _, number, key in due]
        expired: list[tuple[BrokerTable, bytes]] = []
        removed: list[tuple[bytes, Row]] = []
        deletes: list[bytes] = []
        for (due_key, number, key), place, row in zip(due, places, self.get(places), strict=True):
            if row is None or due_of(place, row) != due_key:
                deletes.append(due_key)
                continue
            table = self._by_number.get(number)
            if table is None or key in table.newest:
                continue
            if row.newest.operation == PUT:
                expired.append((table, key))
            else:
                removed.append((place, row))
                deletes += (due_key, place)
        if deletes:
            self._write({}, deletes)
        for place, row in removed:
            self._counts.replace(place, row, None)
        return expired


def _head_key(name: str) -> bytes:
    return TABLE_PREFIX + name.encode()
