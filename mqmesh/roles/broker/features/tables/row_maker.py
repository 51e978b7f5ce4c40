"""Making of rows from the log, for tables that are not ready and for all of a follower."""

import logging
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Final

from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.record_batch import BatchHeader
from mqmesh.errors import CorruptBatch, CorruptRecord
from mqmesh.message import CARRIED_TOPIC
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.features.tables.changes import Change, read_carried, read_changes
from mqmesh.roles.broker.features.tables.row_store import BrokerTable, Mark, RowsStep, RowStore
from mqmesh.storage.interface import GetStatus
from mqmesh.units import MAX_OFFSET, MIB

TABLE_QUEUE: Final = 0
_NO_MARK: Final = (-1, 0)
_READ_BYTES: Final = 1 * MIB

_log = logging.getLogger(__name__)

_Changes = list[tuple[BrokerTable, Change]]
_Decode = Callable[[memoryview, BatchHeader], _Changes]


class RowMaker:
    """Maker of rows, which reads the log on from where the rows end.

    Args:
        core: The core of the broker.
        rows: Rows of all tables.

    Attributes:
        carried_goal: Offset of the carried topic that the rows have to reach before tables answer.
    """

    def __init__(self, core: Core, rows: RowStore) -> None:
        self._core = core
        self._store = core.store
        self._clock = core.clock
        self._rows = rows
        self.carried_goal = 0

    def end_of(self, topic: str) -> int:
        """Return the queue offset behind the last message of a table, or of the carried topic."""
        return int(self._store.queue_bounds(topic, TABLE_QUEUE)[1])

    def fits(self, topic: str, applied: int, mark: Mark) -> bool:
        """Return whether the message before an offset still stands in the batch with a mark."""
        low, high = self._store.queue_bounds(topic, TABLE_QUEUE)
        if not applied or applied == low:
            return True
        if not low < applied <= high:
            return False
        try:
            found = self._store.get(topic, TABLE_QUEUE, applied - 1, max_bytes=1)
            header, _ = next(iter(iter_batches(found.data[0])))
        except (CorruptRecord, IndexError, StopIteration):
            return False
        return mark == mark_of(header)

    def is_made(self, table: BrokerTable) -> bool:
        """Return whether the rows of a table have reached the goals."""
        return table.applied >= table.goal and self._rows.carried >= self.carried_goal

    def lacks_from(self, tables: Mapping[str, BrokerTable]) -> int:
        """Return a commit-log offset before all batches that the rows lack, MAX_OFFSET for none."""
        ends = [(one.applied, self.end_of(one.name), one.mark) for one in tables.values()]
        ends.append((self._rows.carried, self.end_of(CARRIED_TOPIC), self._rows.carried_mark))
        # Behind the batch that they had last; without one from the first segment on.
        places = [max(mark[0], 0) for applied, end, mark in ends if applied < end]
        return min(places, default=MAX_OFFSET)

    def make(self, tables: Mapping[str, BrokerTable], end: int, until_ms: int) -> bool:
        """Make rows of the tables that are not ready.

        Args:
            tables: All tables by name.
            end: Commit-log offset; batches that end behind it are left for later.
            until_ms: End of the time for it, monotonic clock.

        Returns:
            True when the rows have all of the log up to the end.

        Raises:
            StorageError: Rows cannot be written, or the log cannot be read.
        """
        # Before the tables: a key whose tombstone goes is not to come back.
        if not self._make_carried(tables, end, until_ms):
            return False
        unready = [table for table in tables.values() if not table.is_ready]
        # Each of them, though another one waits for a repair.
        done = [self._make_table(table, end, until_ms) for table in unready]
        return all(done)

    def _make_carried(self, tables: Mapping[str, BrokerTable], end: int, until_ms: int) -> bool:
        def decode(data: memoryview, header: BatchHeader) -> _Changes:
            found = []
            for one in read_carried(data, header):
                table = tables.get(one.topic)
                if table is not None and table.topic.table_id == one.table_id:
                    found.append((table, one.change))
            return found

        return self._read_on(CARRIED_TOPIC, None, decode, end, until_ms)

    def _make_table(self, table: BrokerTable, end: int, until_ms: int) -> bool:
        def decode(data: memoryview, header: BatchHeader) -> _Changes:
            tombstone_ms = self._core.config.table_tombstone_ms
            return [(table, one) for one in read_changes(data, header, tombstone_ms)]

        return self._read_on(table.name, table, decode, end, until_ms)

    def _read_on(
        self, topic: str, table: BrokerTable | None, decode: _Decode, end: int, until_ms: int
    ) -> bool:
        """Take the batches of a queue into the rows.

        Returns:
            False if time ran out before the end, or the store is repairing the queue.
        """
        at = self._rows.carried if table is None else table.applied
        while True:
            low, high = map(int, self._store.queue_bounds(topic, TABLE_QUEUE))
            if at >= high:
                return True
            if self._clock.monotonic_ms() >= until_ms:
                return False
            if low >= high:
                self._rows.write([RowsStep(table, [], high, _NO_MARK)])
                return True
            at = max(at, low)
            try:
                found = self._store.get(topic, TABLE_QUEUE, at, max_bytes=_READ_BYTES, verify=True)
            except CorruptRecord as error:
                if self._store.is_repairing(topic, TABLE_QUEUE):
                    return False
                _log.error("a message of %s is passed over: %s", topic, error)
                at += 1
                self._rows.write([RowsStep(table, [], at, _NO_MARK)])
                continue
            if found.status is not GetStatus.FOUND:
                if found.next_queue_offset <= at:
                    return True
                at = int(found.next_queue_offset)
                self._rows.write([RowsStep(table, [], at, _NO_MARK)])
                continue
            changes: _Changes = []
            mark, is_behind = _NO_MARK, False
            for header, data in chain.from_iterable(map(iter_batches, found.data)):
                if header.end_offset > end:
                    is_behind = True
                    break
                try:
                    changes += decode(data, header)
                except CorruptBatch as error:
                    _log.error("messages of %s at %d are passed over: %s", topic, at, error)
                at, mark = int(header.next_queue_offset), mark_of(header)
            if mark != _NO_MARK:
                self._rows.write([RowsStep(table, changes, at, mark)])
            if is_behind:
                return True


def mark_of(header: BatchHeader) -> Mark:
    """Return what distinguishes a stored batch from all others that could stand in its place."""
    return int(header.commitlog_offset), header.producer_crc
