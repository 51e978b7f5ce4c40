"""Carry: what a table keeps is written once more at the log's end before its segment goes.

So a log that is turned over has all that tables keep, and replicas, snapshots and rebuilt rows get
it with the log. A row is carried as a whole, its oldest revision first: of each key newer revisions
stand behind older ones in the log, so that retention never takes a tombstone and leaves what it
deleted.
"""

import logging
from collections.abc import Callable
from typing import Final

from mqmesh.batch.record_batch import read_header
from mqmesh.errors import CorruptRecord, MQMeshError, StorageError
from mqmesh.message import CARRIED_TOPIC
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.features.tables.changes import (
    CARRIED_QUEUE,
    CarriedChange,
    Change,
    carried_batch,
)
from mqmesh.roles.broker.features.tables.row import PUT, Row
from mqmesh.roles.broker.features.tables.row_store import BrokerTable
from mqmesh.roles.broker.features.tables.tables import Tables
from mqmesh.roles.broker.features.tables.values import TableValues
from mqmesh.roles.broker.writing.writes import Writes, divided
from mqmesh.storage.interface import BatchToPut, PutStatus
from mqmesh.units import MIB

STEP_MS: Final = 20
"""Time of the carrying between two other ticks."""
_RETRY_MS: Final = 10_000
"""Time to the next pass after one that met a value that cannot be read."""
_MOST_ROWS: Final = 500
_MOST_UNSETTLED: Final = 8
"""Batches that are carried before the first of them is confirmed."""
_BATCH_BYTES: Final = 1 * MIB
_OVERHEAD_BYTES: Final = 200

Wish = Callable[[], int]
"""Function that returns the commit-log offset up to which retention would remove the log."""

_log = logging.getLogger(__name__)


class Carry:
    """The carrying of a master.

    Args:
        core: The core of the broker.
        tables: Tables.
        values: Reads values from the log.
        writes: Makes the topic.
        wish_of_replicas: Returns what retention of the replicas wishes.

    Attributes:
        unreadable: Values that the newest pass met and that cannot be read from the log.
        carried_bytes: Bytes of the batches that were written so.
        carried_values: Revisions in them.
    """

    def __init__(
        self,
        core: Core,
        tables: Tables,
        values: TableValues,
        writes: Writes,
        wish_of_replicas: Wish,
    ) -> None:
        self._store = core.store
        self._clock = core.clock
        self._tables = tables
        self._values = values
        self._writes = writes
        self._wish_of_replicas = wish_of_replicas
        self._most_bytes = min(_BATCH_BYTES, core.config.storage.max_group_bytes // 4)
        self._wish = 0
        self._generation = 0
        self._todo: list[tuple[BrokerTable, bytes]] = []
        self._passed_over = False
        self._next_pass_ms = 0
        self._problem = ""
        self._found_unreadable = self.unreadable = 0
        self.carried_bytes = 0
        self.carried_values = 0

    def tick(self) -> None:
        """Carry some rows, if retention waits for that."""
        tables = self._tables
        # A replica has the same log, and may have less room for it.
        wish = max(int(self._store.retention_wish()), self._wish_of_replicas())
        if not wish or tables.lowest() >= wish:
            self.unreadable = 0
            return
        until_ms = self._clock.monotonic_ms() + STEP_MS
        if self._generation != tables.generation:
            # The pass had rows that are not there any more.
            self._generation, self._wish = tables.generation, 0
            self._todo.clear()
        try:
            while (
                tables.is_whole
                and tables.unsettled.carried_batches < _MOST_UNSETTLED
                and self._clock.monotonic_ms() < until_ms
            ):
                if not self._todo and (tables.unsettled.carried_batches or not self._begin(wish)):
                    return
                self._step(until_ms)
                tables.settle()
            self._problem = ""
        except (StorageError, MQMeshError) as error:
            self._passed_over = True
            if not self._problem:
                _log.error("values of tables cannot be carried on: %s", error)
            self._problem = str(error)

    def _begin(self, wish: int) -> bool:
        """Begin a pass through all rows, or end the one before; False when nothing is left."""
        if self._wish == wish:
            self._wish, self.unreadable = 0, self._found_unreadable
            if not self._passed_over:
                # All that a row led to before it was carried.
                self._tables.release(wish)
            return False
        if self._clock.monotonic_ms() < self._next_pass_ms:
            return False
        self._writes.ensure_topic(CARRIED_TOPIC)
        self._wish, self._passed_over, self._found_unreadable = wish, False, 0
        self._todo = [(table, b"") for table in self._tables]
        return bool(self._todo)

    def _step(self, until_ms: int) -> None:
        table, start = self._todo[-1]
        rows = self._tables.rows_behind(table, start, None, _MOST_ROWS)
        carried: list[list[CarriedChange]] = []
        size = looked = 0
        for key, row in rows:
            looked += 1
            if all(one.place >= self._wish for one in row.revisions):
                continue
            if key in table.newest:
                # It would stand behind the newer one.
                self._passed_over = True
                continue
            changes = self._changes(table, key, row)
            if changes:
                carried.append(changes)
                size += _size_of_row(changes)
            if size >= self._most_bytes or self._clock.monotonic_ms() >= until_ms:
                break
        if carried:
            self._put(table, carried)
        # Not before: rows whose put fails come again.
        if looked < _MOST_ROWS and looked == len(rows):
            self._todo.pop()
        else:
            self._todo[-1] = (table, rows[looked - 1][0] + b"\0")

    def _changes(self, table: BrokerTable, key: bytes, row: Row) -> list[CarriedChange]:
        """Return the revisions of a row, oldest first; none where a value cannot be read here.

        A follower may have it sound, so nothing is carried in its place: the log is kept.
        """
        try:
            values = [self._values.value(key, row, one) for one in row.revisions]
        except CorruptRecord as error:
            self._passed_over = True
            self._found_unreadable += 1
            self._next_pass_ms = self._clock.monotonic_ms() + _RETRY_MS
            _log.error(
                "%r in table %s cannot be carried, and the log is kept for it until somebody "
                "writes or deletes the key: %s",
                key.decode(errors="replace"),
                table.name,
                error,
            )
            return []
        return [
            CarriedChange(table.name, table.topic.table_id, Change(key, revision, value))
            for revision, value in zip(row.revisions[::-1], values[::-1], strict=True)
        ]

    def _put(self, table: BrokerTable, rows: list[list[CarriedChange]]) -> None:
        """Put rows into the log, each whole or not at all.

        Of a row that was cut, an older value would come back when its tombstone has gone.
        """
        batches: list[BatchToPut] = []
        parts: list[list[CarriedChange]] = []
        now_ms = self._clock.wall_ms()
        for group, some in enumerate(divided(rows, _size_of_row, self._most_bytes), 1):
            cut = list(divided([one for row in some for one in row], _size_of, self._most_bytes))
            data = [carried_batch(part, now_ms) for part in cut]
            # A row that no group takes is cut all the same: else it would keep the log for ever.
            is_group = len(cut) > 1 and sum(map(len, data)) <= self._writes.max_group_bytes
            batches += [
                BatchToPut(
                    CARRIED_TOPIC, CARRIED_QUEUE, read_header(one), one, group=group * is_group
                )
                for one in data
            ]
            parts += cut
        # Room that messages do not get any more is used: it makes room.
        results = self._store.put(batches, now_ms, despite_full=True)
        for part, batch, result in zip(parts, batches, results, strict=True):
            if result.status is not PutStatus.PUT_OK:
                raise StorageError(f"the log does not take {len(batch.data)} carried bytes")
            self.carried_bytes += len(batch.data)
            self.carried_values += len(part)
            moved = [(table, one.change) for one in part]
            self._tables.on_carried(moved, result, batch.header)


def _size_of(one: CarriedChange) -> int:
    size = one.change.revision.size if one.change.revision.operation == PUT else 0
    return size + len(one.change.key) + _OVERHEAD_BYTES


def _size_of_row(changes: list[CarriedChange]) -> int:
    return sum(map(_size_of, changes))
