"""The tables of a broker: rows of confirmed changes, and above them the unsettled changes.

Rows follow the log: a follower reads it, a master takes over what it stores. The rows never have
what a cut of the log could take back. A master keeps changes in memory until they are confirmed,
and compares revisions with them. Rows that do not fit the log, or are lost, are made again from
it, a slice at a time; meanwhile the tables answer nothing.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec

from mqmesh.batch.delayed_batch import expires_ms
from mqmesh.batch.record_batch import BatchHeader
from mqmesh.errors import BrokerNotAvailable, CorruptBatch, CorruptRecord, StorageError
from mqmesh.message import CARRIED_TOPIC
from mqmesh.namespaces import namespace_of
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.features.tables.changes import (
    Change,
    TableMessage,
    changes_of,
    table_messages,
)
from mqmesh.roles.broker.features.tables.counts import TableCounts
from mqmesh.roles.broker.features.tables.row import ROWS_VERSION, Revision, Row, TableHead, row_key
from mqmesh.roles.broker.features.tables.row_maker import RowMaker
from mqmesh.roles.broker.features.tables.row_store import BrokerTable, RowsStep, RowStore
from mqmesh.roles.broker.features.tables.unsettled import UnsettledChanges
from mqmesh.roles.broker.topic_state.topic_table import Topic, TopicTable
from mqmesh.storage.interface import BatchToPut, PutResult
from mqmesh.storage.table_rows import TableRows
from mqmesh.units import MAX_OFFSET, CommitLogOffset

HOLDER: Final = "the carrying of tables"
"""The name under which the log's end is kept from retention."""
SLICE_MS: Final = 50
"""Time of one slice of the work that makes, counts or writes rows."""

_log = logging.getLogger(__name__)


class Tables:
    """All tables of a broker in one role.

    Args:
        core: The core of the broker.
        topics: Topics.
        rows: Rows of the process.

    Attributes:
        counts: Counts of the revisions in the rows.
        unsettled: Changes that are in memory only.
        generation: Number of times that all rows were forgotten; a ``BrokerTable`` of an earlier
            generation is stale.
        released: Commit-log offset; retention may remove the log before it, since all readable
            revisions were carried.
    """

    def __init__(self, core: Core, topics: TopicTable, rows: TableRows) -> None:
        self._core = core
        self._store = core.store
        self._clock = core.clock
        self._topics = topics
        self._segment_bytes = core.config.storage.mapped_file_size_commit_log
        self.counts = TableCounts(rows, core.clock, self._segment_bytes)
        self._rows = RowStore(core.store, rows, self.counts)
        self._maker = RowMaker(core, self._rows)
        self.unsettled = UnsettledChanges()
        self._version: object = None
        self._begun = False
        self._tables: dict[str, BrokerTable] = {}
        self._numbers: dict[str, list[int]] = {}
        self._is_made = False
        # A reset of the rows failed, and is tried again before they are used.
        self._must_reset = False
        self._held = -1
        self.generation = 0
        self.released = 0

    def __iter__(self) -> Iterator[BrokerTable]:
        return iter(list(self._tables.values()))

    @property
    def is_whole(self) -> bool:
        """Return whether the rows of all tables are made and counted."""
        return self._is_made and self.counts.are_complete and not self._must_reset

    @property
    def is_used(self) -> bool:
        """Return whether the rows were opened: there is a table, or there was one."""
        return self._begun

    def bytes_of(self, namespace: str) -> int:
        """Return the bytes that the tables of a namespace keep, as far as they are in the rows."""
        if namespace not in self._numbers:
            own = (one for one in self._tables.values() if namespace_of(one.name) == namespace)
            self._numbers[namespace] = [one.number for one in own]
        return sum(self.counts.sizes.get(number, 0) for number in self._numbers[namespace])

    # ---- The start -------------------------------------------------------------------

    def load(self) -> None:
        """Take over the rows of an earlier role; the store shows all of its log now."""
        self._maker.carried_goal = self._maker.end_of(CARRIED_TOPIC)
        self.look_at_topics()

    def look_at_topics(self) -> None:
        """Add tables that were created, and drop tables that were deleted, since the last call."""
        if self._topics.version is self._version:
            return
        self._version = self._topics.version
        found = {topic.config.topic: topic for topic in self._topics if topic.is_table}
        if not self._begun:
            if not found:
                if self._held == 0:
                    self._keep_from(MAX_OFFSET)  # the tables that needed it are gone
                return
            self._keep_from(0)  # until the rows say what they need
            try:
                self._begin(found)
            except StorageError as error:
                self._rows.report(error)
                self._version = None
                return
        for table in list(self._tables.values()):
            topic = found.get(table.name)
            if topic is None or topic.table_id != table.topic.table_id:
                self._drop(table)
            else:
                table.topic = topic
        for name, topic in found.items():
            if name not in self._tables:
                self._add(topic)
        self._look_at_goals()

    def _add(self, topic: Topic, head: TableHead | None = None) -> BrokerTable:
        table = self._tables[topic.config.topic] = self._rows.add(topic, head)
        table.goal = self._maker.end_of(table.name)
        self._numbers.clear()
        return table

    def _drop(self, table: BrokerTable) -> None:
        del self._tables[table.name]
        self._numbers.clear()
        try:
            self._rows.drop(table)
        except StorageError as error:
            self._rows.report(error)

    def _begin(self, found: dict[str, Topic]) -> None:
        self._rows.begin()
        try:
            fits = not self._must_reset and self._take_over(found)
            if not fits:
                _log.warning("the tables do not fit the log, and are made again from it")
        except StorageError as error:
            fits = False
            _log.error("the tables are made again from the log: %s", error)
        if not fits:
            self._reset()
        self._begun = True

    def _take_over(self, found: dict[str, Topic]) -> bool:
        """Go on with the rows of an earlier role; False if they do not fit the log."""
        head = self._rows.read_head()
        if head is None:
            return True
        if head.version != ROWS_VERSION or head.store_id != self._store.stats().store_id:
            return False
        if not self._maker.fits(CARRIED_TOPIC, head.carried, head.carried_mark):
            return False
        lost = {}
        for name, known in self._rows.take_over(head).items():
            topic = found.get(name)
            if topic is None or topic.table_id != known.table_id:
                lost[name] = known
            elif self._maker.fits(name, known.applied, known.mark):
                self._add(topic, known)
            else:
                return False
        self.counts.load()
        self._rows.drop_lost(lost)
        return True

    def _reset(self) -> None:
        """Forget all rows; they are made again from the log."""
        self.generation += 1
        self._must_reset = True
        self._rows.reset()
        self._must_reset = False
        self.unsettled.clear()
        self._is_made = False
        for table in list(self._tables.values()):
            anew = self._add(table.topic)
            anew.goal = max(table.goal, anew.goal)

    def begin_anew(self, reason: object) -> None:
        """Forget all rows, which are damaged or lack something, and make them from the log."""
        if not self._begun:
            return
        _log.error("the tables are made again from the log: %s", reason)
        try:
            self._reset()
        except StorageError as error:
            self._rows.report(error)  # ``follow`` tries again

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Make all rows again when one is found damaged; report other errors of the rows."""
        try:
            yield
        except CorruptRecord as error:
            self.begin_anew(error)
        except StorageError as error:
            self._rows.report(error)

    # ---- Following the log -----------------------------------------------------------

    def follow(self, end: int) -> bool:
        """Count rows, and take changes from the log into them, for one slice of time at most.

        A master does so for tables that are not ready; the others get what it stores.

        Args:
            end: Commit-log offset; batches that end behind it are left for later.

        Returns:
            True when the rows have all of the log up to the end, and are counted.
        """
        self.look_at_topics()
        if not self._begun:
            return True
        until_ms = self._clock.monotonic_ms() + SLICE_MS
        with self._guarded():
            if self._must_reset:
                self._reset()
            self.counts.count_on(until_ms)
            if self._core.is_follower or not self._is_made:
                self._is_made = self._maker.make(self._tables, end, until_ms)
        self._look_at_goals()
        return self.is_whole

    def _look_at_goals(self) -> None:
        """Make the tables of a master ready whose rows have reached the goals."""
        if self._core.is_follower:
            return
        for table in self._tables.values():
            table.is_ready = table.is_ready or self._maker.is_made(table)
        self._is_made = all(table.is_ready for table in self._tables.values())

    # ---- What a master stores --------------------------------------------------------

    def ready(self, topic: Topic) -> BrokerTable:
        """Return the table of a topic, with the newest revisions of all keys.

        Raises:
            BrokerNotAvailable: Its rows are being made from the log, or cannot be opened.
        """
        self.look_at_topics()
        table = self._tables.get(topic.config.topic)
        if table is None:
            raise BrokerNotAvailable(f"the tables cannot be opened: {self._rows.problem}")
        if not table.is_ready:
            raise BrokerNotAvailable(
                f"table {table.name!r} is being made again from the log of this broker",
                retry_after_ms=SLICE_MS,
            )
        return table

    def on_stored(
        self,
        topic: Topic,
        batch: BatchToPut,
        result: PutResult,
        messages: Sequence[TableMessage] | None,
    ) -> None:
        """Note the changes of a batch that was stored.

        Args:
            topic: Topic of the batch.
            batch: The batch.
            result: Offsets of the batch.
            messages: Messages of the batch, if they were decoded before.
        """
        self.look_at_topics()
        table, header = self._tables.get(topic.config.topic), batch.header
        if table is None:
            return  # the rows cannot be opened
        base = int(result.base_queue_offset)
        next_offset = table.goal = base + header.message_count
        if not table.is_ready:
            return
        try:
            found = table_messages(batch.data, header) if messages is None else messages
        except CorruptBatch as error:
            _log.error("messages of table %s cannot be decoded: %s", table.name, error)
            found = []
        changes = changes_of(
            found,
            base=base,
            place=result.commitlog_offset,
            stored_ms=result.store_timestamp,
            expires_ms=expires_ms(batch.data, header),
            tombstone_ms=self._core.config.table_tombstone_ms,
        )
        mark = (int(result.commitlog_offset), header.producer_crc)
        own = [(table, change.for_row()) for change in changes]
        self.unsettled.add(RowsStep(table, own, next_offset, mark, int(result.end_offset)))

    def on_carried(
        self,
        changes: Iterable[tuple[BrokerTable, Change]],
        result: PutResult,
        header: BatchHeader,
    ) -> None:
        """Note the changes of a batch of carried messages that was stored."""
        place = int(result.commitlog_offset)
        moved = []
        for table, one in changes:
            revision = msgspec.structs.replace(one.revision, place=place)
            moved.append((table, Change(one.key, revision, one.value).for_row()))
        next_offset = int(result.base_queue_offset) + header.message_count
        mark = (place, header.producer_crc)
        self._maker.carried_goal = next_offset
        self.unsettled.add(RowsStep(None, moved, next_offset, mark, int(result.end_offset)))

    def settle(self) -> None:
        """Write confirmed changes into the rows, for one slice of time at most."""
        limit = self._core.commit_point.high_watermark()
        if not self.unsettled.has_confirmed(limit):
            return
        until_ms = self._clock.monotonic_ms() + SLICE_MS
        with self._guarded():
            while steps := self.unsettled.confirmed(limit):
                self._rows.write(steps)
                self.unsettled.remove(steps)
                if self._clock.monotonic_ms() >= until_ms:
                    return

    def check_settled(self) -> None:
        """Write all confirmed changes into the rows, for a reader.

        Raises:
            BrokerNotAvailable: Some are not written yet, or cannot be written.
        """
        self.settle()
        if self.unsettled.has_confirmed(self._core.commit_point.high_watermark()):
            problem = self._rows.problem
            reason = f"cannot be written: {problem}" if problem else "are being written"
            raise BrokerNotAvailable(f"the tables {reason}", retry_after_ms=SLICE_MS)

    def newest(
        self, table: BrokerTable, keys: Sequence[bytes]
    ) -> list[tuple[Revision | None, int]]:
        """Return the newest revision of each key, and where its batch ends in the log.

        The second is 0 if the revision is in the rows, since it is confirmed then.

        Raises:
            BrokerNotAvailable: The rows are damaged, and are made again.
        """
        below = [key for key in keys if key not in table.newest]
        rows = zip(below, self.rows_of(table, below), strict=True)
        settled = {key: (None if row is None else row.newest, 0) for key, row in rows}
        return [table.newest.get(key) or settled[key] for key in keys]

    def rows_of(self, table: BrokerTable, keys: Sequence[bytes]) -> list[Row | None]:
        """Return the rows of keys.

        Raises:
            BrokerNotAvailable: The rows are damaged, and are made again.
        """
        places = [row_key(table.number, key) for key in keys]
        try:
            return self._rows.get(places)
        except StorageError as error:
            raise self._damaged(error) from error

    def rows_behind(
        self, table: BrokerTable, start: bytes, stop: bytes | None, most: int
    ) -> list[tuple[bytes, Row]]:
        """Return keys and rows of a table from one key on, in order.

        Args:
            table: The table.
            start: First key.
            stop: End of the keys; None for all.
            most: Number of rows.

        Raises:
            BrokerNotAvailable: The rows are damaged, and are made again.
        """
        try:
            return self._rows.range(table.number, start, stop, most)
        except StorageError as error:
            raise self._damaged(error) from error

    def _damaged(self, error: StorageError) -> BrokerNotAvailable:
        if isinstance(error, CorruptRecord):
            self.begin_anew(error)
        return BrokerNotAvailable(f"the tables cannot be read: {error}", retry_after_ms=SLICE_MS)

    # ---- Time ------------------------------------------------------------------------

    def due(self, now_ms: int, most: int) -> list[tuple[BrokerTable, bytes]]:
        """Return keys whose values have expired; remove the tombstones whose time is over."""
        with self._guarded():
            return self._rows.take_due(now_ms, most)
        return []

    def tidy(self) -> None:
        """Remove some rows of deleted tables."""
        with self._guarded():
            self._rows.remove_gone()

    # ---- Retention -------------------------------------------------------------------

    def hold(self) -> None:
        """Keep from retention the log that rows lead to, and the log that they do not have yet."""
        if not self._begun:
            return
        self._keep_from(self.lowest())

    def _keep_from(self, lowest: int) -> None:
        if lowest != self._held:
            self._held = lowest
            self._store.keep_from(HOLDER, CommitLogOffset(lowest))

    def release(self, offset: int) -> None:
        """Release the log before an offset: a pass has carried all rows that led there.

        Rows that lead there nevertheless keep it, unless they are of deleted tables.
        """
        if self._rows.gone or self.counts.lowest_place() + self._segment_bytes > offset:
            self.released = max(self.released, offset)
            self.hold()

    def lowest(self) -> int:
        """Return the commit-log offset from which on the tables need the log."""
        if not self.is_whole:
            return 0
        place = max(self.counts.lowest_place(), self.released)
        if self._core.is_follower:
            return min(place, self._maker.lacks_from(self._tables))
        first = self.unsettled.first
        return place if first is None else min(place, first.mark[0])

    def close(self) -> None:
        """Store the counts for the next role: this one ends."""
        if self._begun:
            with self._guarded():
                self.counts.store()
