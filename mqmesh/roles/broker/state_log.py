"""Keeps what a broker knows beside its messages in its log, and reads it again at the start.

The log is the truth, so that who has the log has everything, in one order: a topic's record stands
in front of its first message, an offset behind the messages that it counts. Nothing of it is in a
file of its own.

Tables say what has changed; ``write`` puts a record of each change. For each segment of the log
everything is put once more, a bit at a time and beside the changes: a snapshot. Each record says
where the newest whole snapshot begins, so a start reads the last record, goes to that place, and
reads on from there. Retention may remove the log before that place.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

import msgspec

from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.record_batch import read_header
from mqmesh.clock import Clock
from mqmesh.errors import CorruptRecord, MQMeshError, StorageError
from mqmesh.message import STATE_TOPIC
from mqmesh.roles.broker.state_records import (
    STATE_QUEUE,
    JoinedRecords,
    StateBody,
    StateRecord,
    decode_state,
    encode_state,
    in_bodies,
)
from mqmesh.storage.interface import (
    BatchToPut,
    GetStatus,
    MessageStore,
    PutResult,
    PutStatus,
    StoreConfig,
)
from mqmesh.units import KIB, MIB, CommitLogOffset

HOLDER: Final = "the broker's state"
"""The name under which the log's end is kept from retention."""
MOST_BODY_BYTES: Final = 256 * KIB
SNAPSHOT_SLICE: Final = 1_000
"""Keys that a snapshot writes records of at a time."""
READ_BYTES: Final = 1 * MIB
LEAST_REPLAY_BYTES: Final = 16 * MIB
"""A start reads so much, or four times a snapshot, before a new snapshot is made."""
RETRY_MS: Final = 1_000
"""A write that failed is tried again after so long."""

OnSaved = Callable[[MQMeshError | None], None]
"""Function that is called once what was to be saved is safe in the log, or with the reason."""

_log = logging.getLogger(__name__)


class StateTable(Protocol):
    """A table that is kept in the log.

    Attributes:
        changed: Keys of what is not in the log yet, in the order of the changes.
    """

    changed: dict[Any, Any]

    def state_keys(self) -> Iterable[Any]:
        """Keys of all that it holds."""

    def records_of(self, key: Any) -> Iterable[StateRecord]:
        """Return the state records of a key, which may not be there any more."""

    def apply(self, record: Any) -> None:
        """Takes over what a record says."""


class PlannedChange(msgspec.Struct, frozen=True):
    """Change of tables that takes place once its records are in the log.

    Attributes:
        records: State records of what will be true.
        apply: Changes the tables, which say nothing of it to the log any more.
    """

    records: Sequence[StateRecord]
    apply: Callable[[], None]


class Written(msgspec.Struct, frozen=True):
    """Outcome of a write.

    Attributes:
        waiters: Callbacks of waiters, called once the log is safe to ``end_offset`` or at once if
            there was an error.
        end_offset: Where the records end in the log.
        error: Why they could not be written; then they will be tried again.
    """

    waiters: list[OnSaved] = []
    end_offset: int = 0
    error: StorageError | None = None


class StateLog:
    """The state records of one broker.

    Features register their tables by ``keep``, before the log is loaded.

    Args:
        store: Its log; None when nothing is to be kept.
        clock: Source of time.
        config: Of the store; a snapshot is made for each segment of the log.

    Attributes:
        failure: Why the last write failed; None if it did not.
        records_written: How many records were put, each of many changes.
    """

    def __init__(
        self,
        store: MessageStore | None,
        clock: Clock,
        *,
        config: StoreConfig,
    ) -> None:
        self.failure: StorageError | None = None
        self.records_written = 0
        self._store = store
        self._tables: dict[type[StateRecord], StateTable] = {}
        self._changes: dict[StateTable, Callable[[Any], Iterable[StateRecord]]] = {}
        self._on_damaged: list[Callable[[], None]] = []
        self._joined = JoinedRecords()
        self.urgent: list[dict[Any, Any]] = []
        self._clock = clock
        self._segment_bytes = config.mapped_file_size_commit_log
        self._most_body_bytes = min(MOST_BODY_BYTES, config.max_batch_bytes // 2)
        self.waiters: list[OnSaved] = []
        self._retry_ms = 0
        self._next_offset = 0
        self._log_end = 0
        # The newest whole snapshot: where it begins, in the queue and in the log, where it ends in
        # the log, its size, and what was written since it began.
        self._snapshot_at = 0
        self._snapshot_position = 0
        self._snapshot_end = 0
        self._snapshot_bytes = 0
        self._bytes_since = 0
        # The one that is being made: where it begins, and what it has not written yet.
        self._making_at: int | None = None
        self._making_position = 0
        self._making_bytes = 0
        self._left: deque[tuple[StateTable, Any]] = deque()

    def keep(
        self,
        kind: type[StateRecord],
        table: StateTable,
        *,
        urgent: bool = False,
        changes_of: Callable[[Any], Iterable[StateRecord]] | None = None,
        on_damaged: Callable[[], None] | None = None,
    ) -> None:
        """Registers a table that is kept in the log.

        Args:
            kind: Records that hold what the table holds.
            table: Empty yet.
            urgent: Changes are written in the turn in which they came.
            changes_of: Returns the records of what has changed of a key, where ``records_of``
                returns more than that.
            on_damaged: Called by ``load`` where records are damaged, between those before and those
                behind them.
        """
        assert kind not in self._tables
        self._tables[kind] = table
        if changes_of is not None:
            self._changes[table] = changes_of
        if on_damaged is not None:
            self._on_damaged.append(on_damaged)
        if urgent:
            self.urgent.append(table.changed)

    @property
    def is_urgent(self) -> bool:
        """Something is to be written in this turn: asked for by each of them."""
        # After a failure only those who wait for an answer: the rest is tried again each second.
        return bool(self.waiters) or (self.failure is None and any(self.urgent))

    @property
    def is_due(self) -> bool:
        """Something is to be written that can wait no longer than a tenth of a second."""
        if self.failure is not None:
            return self._clock.monotonic_ms() >= self._retry_ms
        if self.is_urgent or self._making_at is not None:
            return True
        if self._store is not None:
            self._look_at_end(self._store)
        return self._wants_snapshot()

    def save(self, on_saved: OnSaved | None = None) -> None:
        """Has all changes written at the end of this turn.

        Args:
            on_saved: Called with the outcome, later.
        """
        self.waiters.append(on_saved or _nobody)

    def abandon(self, error: MQMeshError) -> None:
        """Write nothing here any more, and fail all that wait for a write."""
        waiters, self.waiters = self.waiters, []
        for on_saved in waiters:
            on_saved(error)

    def write(self) -> Written:
        """Put records of all changes, and a slice of a snapshot if one is being made.

        Changes that cannot be put stay changed. Records may use the room on the disk that is
        reserved, which messages may not.
        """
        waiters, self.waiters = self.waiters, []
        store, changed = self._store, [table.changed for table in self._tables.values()]
        if store is None:
            for keys in changed:
                keys.clear()
            return Written(waiters)
        has_changes = bool(waiters or self.failure or any(changed))
        if not has_changes:
            self._look_at_end(store)  # what is put next says it by itself
        if self._making_at is None and self._wants_snapshot():
            self._begin_snapshot()
        if not has_changes and self._making_at is None:
            return Written()
        slice_size = min(SNAPSHOT_SLICE, len(self._left))
        is_whole = self._making_at is not None and slice_size == len(self._left)
        batches = self._encoded(self._records(slice_size), is_whole=is_whole)
        try:
            results = store.put(batches, self._clock.wall_ms(), despite_full=True)
            self._check_stored(batches, results)
        except StorageError as error:
            if self.failure is None:
                _log.error("topics, groups and offsets cannot be written: %s", error)
            self.failure = error
            self._retry_ms = self._clock.monotonic_ms() + RETRY_MS
            return Written(waiters, error=error)
        self.failure = None
        for keys in changed:
            keys.clear()
        for _ in range(slice_size):
            self._left.popleft()
        self.note_put(batches, results)
        if self._making_at is not None and is_whole:
            self._end_snapshot(self._making_at, results[-1].end_offset)
        return Written(waiters, end_offset=results[-1].end_offset)

    def batches_of(self, change: PlannedChange) -> list[BatchToPut]:
        """Return the batches of a change, which the caller stores in a group with others.

        ``note_put`` follows, before anything else is written here.
        """
        return self._encoded(change.records, is_whole=False)

    def note_put(self, batches: Sequence[BatchToPut], results: Sequence[PutResult]) -> None:
        """Note that batches of state records are in the log.

        Args:
            batches: In order, at least one.
            results: Their places.
        """
        written = sum(len(batch.data) for batch in batches)
        self._bytes_since += written
        self.records_written += len(batches)
        if self._making_at is not None:
            if self._making_bytes == 0:
                self._making_position = results[0].commitlog_offset
            self._making_bytes += written
        self._next_offset = int(results[-1].base_queue_offset) + 1
        self._log_end = results[-1].end_offset

    def _encoded(self, records: Iterable[StateRecord], *, is_whole: bool) -> list[BatchToPut]:
        wall_ms = self._clock.wall_ms()
        bodies = in_bodies(records, self._most_body_bytes)
        batches = []
        for number, body in enumerate(bodies, 1):
            at = self._snapshot_at
            if is_whole and number == len(bodies) and self._making_at is not None:
                at = self._making_at
            data = encode_state(body, at, wall_ms)
            batches.append(BatchToPut(STATE_TOPIC, STATE_QUEUE, read_header(data), data))
        return batches

    def _check_stored(self, batches: list[BatchToPut], results: list[PutResult]) -> None:
        for batch, result in zip(batches, results, strict=True):
            if result.status is not PutStatus.PUT_OK:
                raise StorageError(
                    f"the log does not take {len(batch.data)} bytes of topics, groups and offsets "
                    f"({result.status.name}): segments have {self._segment_bytes} "
                    "(storage.mapped_file_size_commit_log)"
                )

    def _records(self, slice_size: int) -> Iterator[StateRecord]:
        for table in self._tables.values():
            records_of = self._changes.get(table, table.records_of)
            for key in table.changed:
                yield from records_of(key)
        for place in range(slice_size):
            table, key = self._left[place]
            if key not in table.changed or table in self._changes:
                yield from table.records_of(key)

    # ---- Snapshots ---------------------------------------------------------------------

    def _wants_snapshot(self) -> bool:
        store = self._store
        if store is None:
            return False
        if self._bytes_since > max(LEAST_REPLAY_BYTES, 4 * self._snapshot_bytes):
            return True
        # From its end, or one that is larger than a segment would be a reason for the next one.
        return self._log_end // self._segment_bytes != self._snapshot_end // self._segment_bytes

    def _look_at_end(self, store: MessageStore) -> None:
        # Too costly for each write: it asks for the room on the disk, too.
        self._log_end = int(store.stats().max_commitlog_offset)

    def _begin_snapshot(self) -> None:
        self._making_at = self._next_offset
        self._making_bytes = 0
        self._left.extend(
            (table, key) for table in self._tables.values() for key in table.state_keys()
        )

    def _end_snapshot(self, begun_at: int, end_offset: int) -> None:
        self._snapshot_at, self._making_at = begun_at, None
        self._snapshot_position, self._snapshot_end = self._making_position, end_offset
        self._snapshot_bytes = self._bytes_since = self._making_bytes
        self._keep()

    def _keep(self) -> None:
        assert self._store is not None
        self._store.keep_from(HOLDER, CommitLogOffset(self._snapshot_position))

    # ---- The start ---------------------------------------------------------------------

    def load(self) -> None:
        """Fills the tables, which are empty, from the log.

        Raises:
            CorruptRecord: The records are damaged, and no older snapshot is left. The tables are
                never begun anew in silence.
        """
        store = self._store
        if store is None:
            return
        low, end = (int(bound) for bound in store.queue_bounds(STATE_TOPIC, STATE_QUEUE))
        self._next_offset = end
        self._look_at_end(store)
        if not end:
            return
        at = self._pointer_before(end, low)
        while at is not None:
            found = _Replay(store, at, end)
            if found.is_whole:
                self._take(found, at)
                return
            _log.error("the snapshot of topics, groups and offsets at %d is damaged", at)
            at = self._pointer_before(at, low)
        raise CorruptRecord(
            f"{STATE_TOPIC}, which keeps topics, groups and consumer offsets, is damaged from "
            f"{low} to {end}, and every consumer group would begin anew; put back a copy of the "
            "store"
        )

    def follow(self) -> bool:
        """Takes over the records that a leader has added since this was called last, or ``load``.

        Returns:
            True if there were any.

        Raises:
            CorruptRecord: No older snapshot is left either: see ``load``.
        """
        store = self._store
        if store is None:
            return False
        end = int(store.queue_bounds(STATE_TOPIC, STATE_QUEUE)[1])
        if end == self._next_offset:
            return False
        for place, _, _, body in _read_from(store, self._next_offset, end):
            if body is None:
                _log.error("a record of topics, groups and offsets is damaged, at %d", place)
                continue
            for record in self._joined.read(body):
                if record is None:
                    _log.error("a part of a record of topics and groups is missing, at %d", place)
                else:
                    self._tables[type(record)].apply(record)
            if body.snapshot_at != self._snapshot_at:
                self._snapshot_at = body.snapshot_at
                for _, position, _, begun in _read_from(
                    store, body.snapshot_at, body.snapshot_at + 1, most_bytes=1
                ):
                    if begun is not None:
                        self._snapshot_position = position
                        self._keep()
                    break
        for table in self._tables.values():
            table.changed.clear()
        self._next_offset = end
        return True

    def _pointer_before(self, behind: int, low: int) -> int | None:
        """Return where the snapshot begins that the last readable record before a place names."""
        assert self._store is not None
        for place in range(behind - 1, low - 1, -1):
            body = _read_one(self._store, place)
            if body is not None and low <= body.snapshot_at < behind:
                return body.snapshot_at
        return None

    def _take(self, found: "_Replay", at: int) -> None:
        for record in found.records:
            if record is not None:
                self._tables[type(record)].apply(record)
                continue
            for on_damaged in self._on_damaged:
                on_damaged()
        for table in self._tables.values():
            table.changed.clear()
        if found.damaged:
            _log.error(
                "%d records of topics, groups and offsets are damaged: groups may get again what "
                "they had",
                len(found.damaged),
            )
        self._joined = found.joined
        self._snapshot_at = at
        self._snapshot_position, self._snapshot_end = found.position, found.snapshot_end
        self._snapshot_bytes, self._bytes_since = found.snapshot_bytes, found.total_bytes
        self._keep()


class _Replay:
    """The state records from a place on.

    Attributes:
        records: In order; None where some are damaged.
        damaged: Queue offsets of batches that cannot be read.
        is_whole: The snapshot that begins there can be read to its end.
        joined: Reader of the records, which may have read the beginning of one.
        position: Of the first batch in the log.
        snapshot_end: Where the snapshot ends in the log.
        snapshot_bytes: Of the snapshot.
        total_bytes: Of all.
    """

    def __init__(self, store: MessageStore, at: int, end: int) -> None:
        self.records: list[StateRecord | None] = []
        self.damaged: list[int] = []
        self.is_whole = False
        self.position = 0
        self.snapshot_end = 0
        self.snapshot_bytes = 0
        self.total_bytes = 0
        self.joined = JoinedRecords()
        is_sound = True
        for place, position, size, body in _read_from(store, at, end):
            if body is None:
                self.damaged.append(place)
                self.records.append(None)
                is_sound = is_sound and self.is_whole
                continue
            if place == at:
                self.position = position
            self.records += self.joined.read(body)
            self.total_bytes += size
            if is_sound and not self.is_whole and body.snapshot_at >= at:
                self.is_whole = True
                self.snapshot_end = position + size
                self.snapshot_bytes = self.total_bytes


def _read_from(
    store: MessageStore, at: int, end: int, *, most_bytes: int = READ_BYTES
) -> Iterator[tuple[int, int, int, StateBody | None]]:
    """Queue offset, commit-log offset, size and body of each batch; None if it is damaged."""
    place = at
    while place < end:
        try:
            found = store.get(STATE_TOPIC, STATE_QUEUE, place, max_bytes=most_bytes)
        except CorruptRecord as error:
            _log.error("%s", error)
            yield place, 0, 0, None
            place += 1
            continue
        if found.status is not GetStatus.FOUND:
            return
        for data in found.data:
            for header, batch in iter_batches(data):
                yield (
                    int(header.base_queue_offset),
                    int(header.commitlog_offset),
                    header.total_size,
                    _decoded(batch),
                )
        place = int(found.next_queue_offset)


def _read_one(store: MessageStore, place: int) -> StateBody | None:
    for _, _, _, body in _read_from(store, place, place + 1, most_bytes=1):
        return body
    return None


def _decoded(batch: memoryview) -> StateBody | None:
    try:
        return decode_state(batch)
    except CorruptRecord as error:
        _log.error("%s", error)
        return None


def _nobody(error: MQMeshError | None) -> None:
    return None
