"""The tables of a broker: rows of what is confirmed, and above them what is not yet.

Rows follow the log: at a follower by reading it, at a master by what is stored. They never have
what a cut of the log could take back. What a master has stored and is not confirmed is in memory,
so that revisions are compared with the newest ones. Rows that do not fit the log, or are lost, are
made again from it, a slice at a time; meanwhile the tables answer nothing.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from mqmesh.batch.delayed_batch import expires_ms
from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.record_batch import BatchHeader
from mqmesh.errors import BrokerNotAvailable, CorruptBatch, CorruptRecord, StorageError
from mqmesh.message import CARRIED_TOPIC
from mqmesh.namespaces import namespace_of
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.features.tables.changes import (
    Change,
    TableMessage,
    changes_of,
    read_carried,
    read_changes,
    table_messages,
)
from mqmesh.roles.broker.features.tables.row import (
    COUNTS_KEY,
    DUE_PREFIX,
    GONE_PREFIX,
    HEAD_KEY,
    MOST_INLINE_BYTES,
    PUT,
    ROW_PREFIX,
    ROWS_VERSION,
    TABLE_PREFIX,
    Revision,
    Row,
    RowCounts,
    RowsHead,
    TableHead,
    due_key,
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
from mqmesh.roles.broker.topic_state.topic_table import Topic, TopicTable
from mqmesh.storage.interface import BatchToPut, GetStatus, PutResult
from mqmesh.storage.table_rows import TableRows
from mqmesh.units import MAX_OFFSET, MIB, CommitLogOffset

HOLDER: Final = "the carrying of tables"
"""The name under which the log's end is kept from retention."""
TABLE_QUEUE: Final = 0
SETTLE_AT: Final = 256
"""Changes that are written into the rows at once, at the end of a turn; fewer wait for a tick."""
MOST_UNSETTLED_BYTES: Final = 64 * MIB
"""Memory of changes that are not in the rows; with more the tables take none."""
SLICE_MS: Final = 50
"""Time of one slice of the work that makes, counts or writes rows."""
_CHANGE_BYTES: Final = 500
"""Memory of a change beside its key and value."""
_READ_BYTES: Final = 1 * MIB
_SCAN: Final = 1_000

_log = logging.getLogger(__name__)

Mark = tuple[int, int]


class BrokerTable:
    """One table.

    Attributes:
        topic: Its topic.
        number: Of its rows.
        applied: Queue offset of the first message that the rows do not have.
        mark: Of the message before: commit-log offset and checksum of its batch.
        goal: Queue offset up to which the rows are to be made before the table answers.
        is_ready: They are.
        newest: Newest revision of keys that is not in the rows, and where its batch ends.
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

    @property
    def head(self) -> TableHead:
        """Head for the rows."""
        return TableHead(self.number, self.topic.table_id, self.applied, self.mark)


class _Unsettled(msgspec.Struct, frozen=True, eq=False):
    """Changes that one batch has brought, and that are not in the rows yet.

    Attributes:
        end_offset: Where the batch ends in the log.
        changes: With their tables.
        next_offset: Queue offset behind the batch.
        mark: Of the batch.
        table: Whose queue it stands in; None for the carried topic.
    """

    end_offset: int
    changes: list[tuple[BrokerTable, Change]]
    next_offset: int
    mark: Mark
    table: BrokerTable | None

    @property
    def size(self) -> int:
        """Memory in bytes, about."""
        return sum(_CHANGE_BYTES + len(one.key) + len(one.value) for _, one in self.changes)


class Tables:
    """All tables of a broker in one role.

    Args:
        core: The core of the broker.
        topics: Topics.
        rows: Rows of the process.

    Attributes:
        unsettled: Changes that are in memory only.
        unsettled_bytes: Their memory.
        keys: Live keys by number of the table.
        sizes: Bytes of keys and values of all revisions that are kept, by number of the table.
        carried_unsettled: Batches of carried messages that are not in the rows yet.
        generation: Number of times that all rows were forgotten: tables of another one are stale.
        released: The log before this commit-log offset may go: all that can be read was carried.
    """

    def __init__(self, core: Core, topics: TopicTable, rows: TableRows) -> None:
        self._core = core
        self._store = core.store
        self._clock = core.clock
        self._topics = topics
        self._rows = rows
        self._segment_bytes = core.config.storage.mapped_file_size_commit_log
        self._version: object = None
        self._begun = False
        self._problem = ""
        self._tables: dict[str, BrokerTable] = {}
        self._by_number: dict[int, BrokerTable] = {}
        self._numbers: dict[str, list[int]] = {}
        self._gone: list[int] = []
        self._next_number = 1
        self._carried = 0
        self._carried_mark: Mark = (-1, 0)
        self._carried_goal = 0
        self._is_whole = False
        # There may be some until rows are written.
        self._has_counts = True
        # Rows before this place are counted; None for all.
        self._counted_to: bytes | None = None
        self._queue: deque[_Unsettled] = deque()
        self._segments: dict[int, tuple[int, int]] = {}
        self._held = -1
        self.unsettled = self.unsettled_bytes = 0
        self.keys: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.carried_unsettled = 0
        self.generation = 0
        self.released = 0

    def __iter__(self) -> Iterator[BrokerTable]:
        return iter(list(self._tables.values()))

    @property
    def is_whole(self) -> bool:
        """Return whether no rows have to be made again, and all are counted."""
        return self._is_whole and self._counted_to is None

    @property
    def is_used(self) -> bool:
        """Return whether there is any table, or rows of one."""
        return self._begun

    @property
    def live_bytes(self) -> int:
        """Bytes of keys and values that all tables keep."""
        return sum(self.sizes.values())

    def bytes_of(self, namespace: str) -> int:
        """Return the bytes that the tables of a namespace keep, as far as they are in the rows."""
        if namespace not in self._numbers:
            own = (one for one in self._tables.values() if namespace_of(one.name) == namespace)
            self._numbers[namespace] = [one.number for one in own]
        return sum(self.sizes.get(number, 0) for number in self._numbers[namespace])

    @property
    def tombstone_ms(self) -> int:
        """Life of a tombstone."""
        return self._core.config.table_tombstone_ms

    # ---- The start -------------------------------------------------------------------

    def load(self) -> None:
        """Take over the rows that there are; the store shows all of its log now.

        Rows that do not fit the log are given up.

        Raises:
            StorageError: There is no room for rows, or their file cannot be used.
        """
        self._carried_goal = self._end_of(CARRIED_TOPIC)
        self.look_at_topics()

    def look_at_topics(self) -> None:
        """Note tables that were made or deleted since."""
        if self._topics.version is self._version:
            return
        self._version = self._topics.version
        found = {topic.config.topic: topic for topic in self._topics if topic.is_table}
        if not self._begun:
            if not found:
                if self._held == 0:
                    self._keep_from(MAX_OFFSET)  # those that needed it are gone
                return
            self._keep_from(0)  # until the rows say what they need
            try:
                self._begin(found)
            except StorageError as error:
                self._report(error)
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
                self._add_new(topic)
        self._look_at_goals()

    def _add_new(self, topic: Topic) -> BrokerTable:
        table = self._add(topic, TableHead(self._next_number, topic.table_id))
        self._next_number += 1
        return table

    def _add(self, topic: Topic, head: TableHead) -> BrokerTable:
        table = self._tables[topic.config.topic] = BrokerTable(topic, head)
        table.goal = self._end_of(table.name)
        self._numbers.clear()
        self._by_number[table.number] = table
        self.keys.setdefault(table.number, 0)
        return table

    def _begin(self, found: dict[str, Topic]) -> None:
        self._rows.begin()
        try:
            fits = self._take_over(found)
            if not fits:
                _log.warning("the tables do not fit the log, and are made again from it")
        except StorageError as error:
            fits = False
            _log.error("the tables are made again from the log: %s", error)
        if not fits:
            self._reset()
        self._begun = True

    def _take_over(self, found: dict[str, Topic]) -> bool:
        """Read what the rows say of themselves; False if that does not fit the log."""
        data = self._rows.get_many([HEAD_KEY])[0]
        if data is None:
            return True
        head = unpack(HEAD_KEY, data, RowsHead)
        if head.version != ROWS_VERSION or head.store_id != self._store.stats().store_id:
            return False
        if not self._fits(CARRIED_TOPIC, head.carried, head.carried_mark):
            return False
        self._next_number, self._carried = head.next_number, head.carried
        self._carried_mark = head.carried_mark
        self._gone = [gone_number(key) for key, _ in self._range(GONE_PREFIX)]
        lost = []
        for key, data in self._range(TABLE_PREFIX):
            known, topic = unpack(key, data, TableHead), found.get(key[1:].decode())
            if topic is None or topic.table_id != known.table_id:
                lost.append((key, known.number))
            elif self._fits(topic.config.topic, known.applied, known.mark):
                self._add(topic, known)
            else:
                return False
        counts = self._rows.get_many([COUNTS_KEY])[0]
        if counts is not None:
            self._take_counts(unpack(COUNTS_KEY, counts, RowCounts))
        else:
            self._has_counts, self._counted_to = False, ROW_PREFIX
        if lost:
            self._rows.write(
                [(gone_key(number), b"") for _, number in lost], [key for key, _ in lost]
            )
            self._gone += [number for _, number in lost]
        return True

    def _range(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        return self._rows.range(prefix, bytes((prefix[0] + 1,)), most=MAX_OFFSET)

    def _take_counts(self, counts: RowCounts) -> None:
        self._segments, self.keys, self.sizes = counts.segments, counts.keys, counts.sizes

    def _count_on(self, until_ms: int) -> None:
        """Count rows that a role that was killed has left; what is written meanwhile, too."""
        while self._counted_to is not None and self._clock.monotonic_ms() < until_ms:
            end = bytes((ROW_PREFIX[0] + 1,))
            found = self._rows.range(self._counted_to, end, most=_SCAN)
            rows = [(key, unpack_row(key, data)) for key, data in found]
            self._counted_to = found[-1][0] + b"\0" if len(found) == _SCAN else None
            for key, row in rows:
                self._count(key, row, 1)

    def _fits(self, topic: str, applied: int, mark: Mark) -> bool:
        """Return whether the message before an offset of a queue is still the one that it was."""
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

    def _end_of(self, topic: str) -> int:
        return int(self._store.queue_bounds(topic, TABLE_QUEUE)[1])

    def _reset(self) -> None:
        """Forget all rows; they are made again from the log."""
        self.generation += 1
        self._rows.reset()
        self._queue.clear()
        self._gone.clear()
        self._segments.clear()
        self._by_number.clear()
        self.keys.clear()
        self.sizes.clear()
        self.carried_unsettled = self._carried = 0
        self.unsettled = self.unsettled_bytes = 0
        self._carried_mark, self._counted_to = (-1, 0), None
        self._has_counts = False
        self._is_whole = False
        self._next_number = 1
        for table in list(self._tables.values()):
            anew = self._add_new(table.topic)
            anew.goal = max(table.goal, anew.goal)

    def begin_anew(self, reason: object) -> None:
        """Forget all rows, which are damaged or lack something; they are made from the log."""
        if not self._begun:
            return
        _log.error("the tables are made again from the log: %s", reason)
        try:
            self._reset()
        except StorageError as error:
            self._report(error)  # who meets the damage again tries again

    # ---- Following the log -----------------------------------------------------------

    def follow(self, end: int) -> bool:
        """Take over what the log has, for one slice of time at most.

        At a master only tables that are not ready are made so; others follow what is stored.

        Args:
            end: Nothing is taken over that ends behind this commit-log offset.

        Returns:
            True when the rows have all of it.
        """
        self.look_at_topics()
        if not self._begun:
            return True
        until_ms = self._clock.monotonic_ms() + SLICE_MS
        try:
            self._count_on(until_ms)
            if self._core.is_follower or not self._is_whole:
                # Before the tables: a key whose tombstone goes is not to come back.
                self._is_whole = self._follow_carried(end, until_ms)
                if self._is_whole:
                    unready = [one for one in self._tables.values() if not one.is_ready]
                    # Each of them, though another one waits for a repair.
                    done = [self._follow_table(table, end, until_ms) for table in unready]
                    self._is_whole = all(done)
        except CorruptRecord as error:
            self.begin_anew(error)
        except StorageError as error:
            self._report(error)
        self._look_at_goals()
        return self.is_whole

    def _look_at_goals(self) -> None:
        """Have the tables of a master answer whose rows are made."""
        if self._core.is_follower:
            return
        for table in self._tables.values():
            is_made = table.applied >= table.goal and self._carried >= self._carried_goal
            table.is_ready = table.is_ready or is_made
        self._is_whole = all(table.is_ready for table in self._tables.values())

    def _follow_carried(self, end: int, until_ms: int) -> bool:
        def take(header: BatchHeader, data: memoryview) -> list[tuple[BrokerTable, Change]]:
            found = []
            for one in read_carried(data, header):
                table = self._tables.get(one.topic)
                if table is not None and table.topic.table_id == one.table_id:
                    found.append((table, one.change))
            return found

        def step(changes: list[tuple[BrokerTable, Change]], offset: int, mark: Mark) -> None:
            self._write(changes, None, offset, mark)

        return self._read_on(CARRIED_TOPIC, lambda: self._carried, take, step, end, until_ms)

    def _follow_table(self, table: BrokerTable, end: int, until_ms: int) -> bool:
        def take(header: BatchHeader, data: memoryview) -> list[tuple[BrokerTable, Change]]:
            return [(table, one) for one in read_changes(data, header, self.tombstone_ms)]

        def step(changes: list[tuple[BrokerTable, Change]], offset: int, mark: Mark) -> None:
            self._write(changes, table, offset, mark)

        return self._read_on(table.name, lambda: table.applied, take, step, end, until_ms)

    def _read_on(
        self,
        topic: str,
        place: Callable[[], int],
        take: Callable[[BatchHeader, memoryview], list[tuple[BrokerTable, Change]]],
        step: Callable[[list[tuple[BrokerTable, Change]], int, Mark], None],
        end: int,
        until_ms: int,
    ) -> bool:
        """Read a queue from a place to the end of the log.

        Returns:
            False if time ran out before, or the store is repairing the queue at this place.
        """
        while True:
            at = place()
            low, high = self._store.queue_bounds(topic, TABLE_QUEUE)
            if at >= high:
                return True
            if self._clock.monotonic_ms() >= until_ms:
                return False
            if low >= high:
                step([], int(high), (-1, 0))
                return True
            at = max(at, int(low))
            changes: list[tuple[BrokerTable, Change]] = []
            mark: Mark = (-1, 0)
            try:
                found = self._store.get(topic, TABLE_QUEUE, at, max_bytes=_READ_BYTES, verify=True)
            except CorruptRecord as error:
                if self._store.is_repairing(topic, TABLE_QUEUE):
                    return False
                _log.error("a message of %s is passed over: %s", topic, error)
                step([], at + 1, mark)
                continue
            if found.status is not GetStatus.FOUND:
                if found.next_queue_offset <= at:
                    return True
                step([], int(found.next_queue_offset), mark)
                continue
            is_behind = False
            for buffer in found.data:
                for header, data in iter_batches(buffer):
                    if header.end_offset > end:
                        is_behind = True
                        break
                    try:
                        changes += take(header, data)
                    except CorruptBatch as error:
                        _log.error("messages of %s at %d are passed over: %s", topic, at, error)
                    at, mark = int(header.next_queue_offset), mark_of(header)
                if is_behind:
                    break
            if mark[0] >= 0:
                step(changes, at, mark)
            if is_behind:
                return True

    # ---- What a master stores --------------------------------------------------------

    def ready(self, topic: Topic) -> BrokerTable:
        """Return the table of a topic, with the newest revisions of all keys.

        Raises:
            BrokerNotAvailable: It is being made again from the log, or cannot be written.
        """
        self.look_at_topics()
        table = self._tables.get(topic.config.topic)
        if table is None:
            raise BrokerNotAvailable(f"the tables cannot be opened: {self._problem}")
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
        """Take note of a batch that the store has.

        Args:
            topic: Of the batch.
            batch: The batch.
            result: Where it stands.
            messages: Of the batch, where they were decoded before.
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
            tombstone_ms=self.tombstone_ms,
        )
        mark = (int(result.commitlog_offset), header.producer_crc)
        end = int(result.end_offset)
        for change in changes:
            table.newest[change.key] = (change.revision, end)
        with_table = [(table, _without_long_value(change)) for change in changes]
        self._wait_for(_Unsettled(end, with_table, next_offset, mark, table))

    def on_carried(
        self,
        changes: Iterable[tuple[BrokerTable, Change]],
        result: PutResult,
        header: BatchHeader,
    ) -> None:
        """Take note of a batch of carried messages that the store has."""
        place = int(result.commitlog_offset)
        moved = []
        for table, one in changes:
            revision = msgspec.structs.replace(one.revision, place=place)
            moved.append((table, _without_long_value(Change(one.key, revision, one.value))))
        next_offset = int(result.base_queue_offset) + header.message_count
        mark = (place, header.producer_crc)
        self._carried_goal = next_offset
        self._wait_for(_Unsettled(int(result.end_offset), moved, next_offset, mark, None))
        self.carried_unsettled += 1

    def _wait_for(self, one: _Unsettled) -> None:
        self._queue.append(one)
        self.unsettled += len(one.changes)
        self.unsettled_bytes += one.size

    def settle(self) -> None:
        """Write into the rows what is confirmed by now, for one slice of time at most."""
        queue, limit = self._queue, self._core.commit_point.high_watermark()
        until_ms = self._clock.monotonic_ms() + SLICE_MS
        while queue and queue[0].end_offset <= limit:
            changes: list[tuple[BrokerTable, Change]] = []
            steps: list[_Unsettled] = []
            for one in queue:
                if one.end_offset > limit or len(changes) >= _SCAN:
                    break
                steps.append(one)
                changes += one.changes
            try:
                self._write_steps(changes, steps)
            except CorruptRecord as error:
                self.begin_anew(error)
                return
            except StorageError as error:
                self._report(error)
                return
            for _ in steps:
                queue.popleft()
            self.unsettled -= len(changes)
            self.unsettled_bytes -= sum(one.size for one in steps)
            self.carried_unsettled -= sum(one.table is None for one in steps)
            for step in steps:
                if step.table is None:
                    continue
                for table, change in step.changes:
                    known = table.newest.get(change.key)
                    if known is not None and known[0].revision == change.revision.revision:
                        del table.newest[change.key]
            if self._clock.monotonic_ms() >= until_ms:
                return

    def check_settled(self) -> None:
        """Write what is confirmed, for a reader.

        Raises:
            BrokerNotAvailable: It cannot be written.
        """
        self.settle()
        if self._queue and self._queue[0].end_offset <= self._core.commit_point.high_watermark():
            reason = f"cannot be written: {self._problem}" if self._problem else "are being written"
            raise BrokerNotAvailable(f"the tables {reason}", retry_after_ms=SLICE_MS)

    def newest(
        self, table: BrokerTable, keys: Sequence[bytes]
    ) -> list[tuple[Revision | None, int]]:
        """Return the newest revision of each key, and where it ends in the log if that matters.

        Raises:
            BrokerNotAvailable: The rows are damaged, and are made again.
        """
        found: list[tuple[Revision | None, int]] = []
        below = [key for key in keys if key not in table.newest]
        rows = dict(zip(below, self.rows_of(table, below), strict=True))
        for key in keys:
            known = table.newest.get(key)
            if known is None:
                row = rows[key]
                known_row = None if row is None else row.newest
                found.append((known_row, 0))
            else:
                found.append(known)
        return found

    def rows_of(self, table: BrokerTable, keys: Sequence[bytes]) -> list[Row | None]:
        """Return the rows of keys.

        Raises:
            BrokerNotAvailable: The rows are damaged, and are made again.
        """
        places = [row_key(table.number, key) for key in keys]
        try:
            return [
                None if data is None else unpack_row(place, data)
                for place, data in zip(places, self._rows.get_many(places), strict=True)
            ]
        except StorageError as error:
            raise self._damaged(error) from error

    def rows_behind(
        self, table: BrokerTable, start: bytes, stop: bytes | None, most: int
    ) -> list[tuple[bytes, Row]]:
        """Return keys and rows of a table from one key on, in order.

        Args:
            table: The table.
            start: First key.
            stop: Behind the last key; None for all.
            most: How many.

        Raises:
            BrokerNotAvailable: The rows are damaged, and are made again.
        """
        first = row_start(table.number)
        end = row_start(table.number + 1) if stop is None else first + stop
        try:
            found = self._rows.range(first + start, end, most=most)
            return [(key[len(first) :], unpack_row(key, data)) for key, data in found]
        except StorageError as error:
            raise self._damaged(error) from error

    def _damaged(self, error: StorageError) -> BrokerNotAvailable:
        if isinstance(error, CorruptRecord):
            self.begin_anew(error)
        return BrokerNotAvailable(f"the tables cannot be read: {error}", retry_after_ms=SLICE_MS)

    # ---- Rows ------------------------------------------------------------------------

    def _write(
        self,
        changes: list[tuple[BrokerTable, Change]],
        table: BrokerTable | None,
        next_offset: int,
        mark: Mark,
    ) -> None:
        self._write_steps(changes, [_Unsettled(0, changes, next_offset, mark, table)])

    def _write_steps(
        self, changes: list[tuple[BrokerTable, Change]], steps: Sequence[_Unsettled]
    ) -> None:
        """Write changes and how far the rows have come, all or nothing."""
        places = [row_key(table.number, change.key) for table, change in changes]
        known = list(dict.fromkeys(places))
        before: dict[bytes, Row | None] = {
            place: None if data is None else unpack_row(place, data)
            for place, data in zip(known, self._rows.get_many(known), strict=True)
        }
        after = dict(before)
        for place, (table, change) in zip(places, changes, strict=True):
            if table.number not in self._by_number:
                continue  # deleted meanwhile
            history = table.topic.config.history
            row = with_revision(after[place], change.revision, change.value, history)
            if row is not None:
                after[place] = row
        puts: dict[bytes, bytes] = {}
        deletes: list[bytes] = []
        moved = [place for place in known if after[place] is not before[place]]
        for place in moved:
            row, old = after[place], before[place]
            assert row is not None
            puts[place] = pack(place, row)
            if old is not None and old.newest.expires_ms:
                deletes.append(_due_of(place, old))
            if row.newest.expires_ms:
                puts[_due_of(place, row)] = b""
        self._write_rows(puts, deletes, steps)
        for place in moved:
            row, old = after[place], before[place]
            if old is not None:
                self._count(place, old, -1)
            assert row is not None
            self._count(place, row, 1)

    def _write_rows(
        self, puts: dict[bytes, bytes], deletes: list[bytes], steps: Sequence[_Unsettled] = ()
    ) -> None:
        """Write rows, and the heads of what has come further."""
        carried, mark = self._carried, self._carried_mark
        heads: dict[BrokerTable, TableHead] = {}
        for step in steps:
            table = step.table
            if table is None:
                carried, mark = step.next_offset, step.mark
            elif table.number in self._by_number:
                heads[table] = TableHead(
                    table.number, table.topic.table_id, step.next_offset, step.mark
                )
        for table, head in heads.items():
            key = TABLE_PREFIX + table.name.encode()
            puts[key] = pack(key, head)
        # Always: the number of a table that goes is not to be given to another one.
        store_id = self._store.stats().store_id
        own = RowsHead(ROWS_VERSION, store_id, self._next_number, carried, mark)
        puts[HEAD_KEY] = pack(HEAD_KEY, own)
        if self._has_counts:
            deletes.append(COUNTS_KEY)
        self._rows.write(sorted(puts.items()), deletes)
        self._has_counts = False
        self._problem = ""
        self._carried, self._carried_mark = carried, mark
        for table, head in heads.items():
            table.applied, table.mark = head.applied, head.mark

    def _count(self, place: bytes, row: Row, sign: int) -> None:
        if self._counted_to is not None and place >= self._counted_to:
            return  # it is counted when its turn comes
        key_bytes = len(place) - len(row_start(0))
        number = int.from_bytes(place[1 : len(row_start(0))], "big")
        segments, live = self._segments, 0
        for one in row.revisions:
            segment, size = one.place // self._segment_bytes, one.size + key_bytes
            count, total = segments.get(segment, (0, 0))
            if count + sign:
                segments[segment] = (count + sign, total + sign * size)
            else:
                segments.pop(segment, None)
            live += size
        self.sizes[number] = self.sizes.get(number, 0) + sign * live
        if row.newest.operation == PUT:
            self.keys[number] = self.keys.get(number, 0) + sign

    def _report(self, error: StorageError) -> None:
        if not self._problem:
            _log.error("the tables cannot be written: %s", error)
        self._problem = str(error)

    # ---- Time ------------------------------------------------------------------------

    def due(self, now_ms: int, most: int) -> list[tuple[BrokerTable, bytes]]:
        """Return keys whose value has expired by now; tombstones whose time is over go.

        Args:
            now_ms: Wall clock.
            most: Rows that are looked at.
        """
        try:
            found = self._rows.range(DUE_PREFIX, due_until(now_ms), most=most)
            looked = [(key, *read_due(key)) for key, _ in found]
            expired: list[tuple[BrokerTable, bytes]] = []
            gone: list[tuple[bytes, Row]] = []
            deletes: list[bytes] = []
            places = [row_key(number, key) for _, number, key in looked]
            for (due, number, key), place, data in zip(
                looked, places, self._rows.get_many(places), strict=True
            ):
                row = None if data is None else unpack_row(place, data)
                if row is None or _due_of(place, row) != due:
                    deletes.append(due)
                    continue
                table = self._by_number.get(number)
                if table is None or key in table.newest:
                    continue
                if row.newest.operation == PUT:
                    expired.append((table, key))
                else:
                    gone.append((place, row))
                    deletes += (due, place)
            if deletes:
                self._write_rows({}, deletes)
            for place, row in gone:
                self._count(place, row, -1)
        except CorruptRecord as error:
            self.begin_anew(error)
            return []
        except StorageError as error:
            self._report(error)
            return []
        return expired

    def tidy(self) -> None:
        """Remove some rows of tables that are gone."""
        if not self._gone:
            return
        number = self._gone[0]
        try:
            found = self._rows.range(row_start(number), row_start(number + 1), most=_SCAN)
            rows = [(place, unpack_row(place, data)) for place, data in found]
            if not rows:
                self._write_rows({}, [gone_key(number)])
                del self._gone[0]
                self.keys.pop(number, None)
                self.sizes.pop(number, None)
                return
            deletes = [place for place, _ in rows]
            deletes += [_due_of(place, row) for place, row in rows if row.newest.expires_ms]
            self._write_rows({}, deletes)
            for place, row in rows:
                self._count(place, row, -1)
        except CorruptRecord as error:
            self.begin_anew(error)
        except StorageError as error:
            self._report(error)

    def _drop(self, table: BrokerTable) -> None:
        """Forget a table; its rows go bit by bit."""
        del self._tables[table.name], self._by_number[table.number]
        self._numbers.clear()
        self._gone.append(table.number)
        try:
            key = TABLE_PREFIX + table.name.encode()
            self._write_rows({gone_key(table.number): b""}, [key])
        except StorageError as error:
            self._report(error)

    # ---- Retention -------------------------------------------------------------------

    def hold(self) -> None:
        """Keep from retention what rows lead to, and what they do not have yet."""
        if not self._begun:
            return
        self._keep_from(self.lowest())

    def _keep_from(self, lowest: int) -> None:
        if lowest != self._held:
            self._held = lowest
            self._store.keep_from(HOLDER, CommitLogOffset(lowest))

    def release(self, offset: int) -> None:
        """Let the log before an offset go: a pass through all rows has carried what led there.

        Rows that lead there nevertheless keep it, unless they are of tables that are gone.
        """
        lowest = min(self._segments, default=offset)
        if self._gone or (lowest + 1) * self._segment_bytes > offset:
            self.released = max(self.released, offset)
            self.hold()

    def lowest(self) -> int:
        """Return the commit-log offset from which on the log is needed."""
        if not self.is_whole:
            return 0
        lowest = min(self._segments, default=None)
        place = MAX_OFFSET if lowest is None else lowest * self._segment_bytes
        place = max(place, self.released)
        return min(place, self._queue[0].mark[0]) if self._queue else place

    def close(self) -> None:
        """Note what a scan of all rows would find: the role ends."""
        if not self._begun or self._has_counts or self._counted_to is not None:
            return
        try:
            counts = RowCounts(self._segments, self.keys, self.sizes)
            self._rows.write([(COUNTS_KEY, pack(COUNTS_KEY, counts))])
            self._has_counts = True
        except StorageError as error:
            self._report(error)


def mark_of(header: BatchHeader) -> Mark:
    """Return what distinguishes a stored batch from all others that could stand in its place."""
    return int(header.commitlog_offset), header.producer_crc


def _without_long_value(change: Change) -> Change:
    """Return a change as rows need it, without a value that stays in the log alone."""
    if len(change.value) <= MOST_INLINE_BYTES:
        return change
    return Change(change.key, change.revision, b"")


def _due_of(place: bytes, row: Row) -> bytes:
    number = int.from_bytes(place[1 : len(row_start(0))], "big")
    return due_key(row.newest.expires_ms, number, place[len(row_start(0)) :])
