"""Interface of every message store: the docstrings here are the specification.

A store keeps record batches, whole and unchanged but for the broker's first 48
bytes, and finds them again by message queue and queue offset. It knows topics
and queues only as names and numbers: permissions, groups and consumer offsets
are the broker's. ``mqmesh.testing.store_contract`` is the suite that every
backend passes.

A store belongs to one thread, the broker's event loop. The only thing that
happens on another thread is the call of ``wake``, which says that
``durable_offset`` has moved or that the store has stopped.
"""

import contextlib
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Final, Protocol, cast, runtime_checkable

import msgspec

from mqmesh.batch.payload import Buffer
from mqmesh.batch.record_batch import BatchHeader
from mqmesh.errors import ConfigError, DiskFull
from mqmesh.log_identity import EpochStart, LogIdentity
from mqmesh.units import GIB, KIB, MAX_OFFSET, MIB, CommitLogOffset, QueueOffset, TimestampMs

Wake = Callable[[], None]
"""Called from a helper thread; must only make the event loop look again."""


class FlushDiskType(enum.Enum):
    """Time at which an answer may be given. RocketMQ's names."""

    ASYNC_FLUSH = "ASYNC_FLUSH"
    """At once; the disk has it within ``flush_interval_commitlog_ms``."""
    SYNC_FLUSH = "SYNC_FLUSH"
    """After the disk has it; until then no consumer sees it."""


class PutStatus(enum.Enum):
    """Result of a put, for one batch."""

    PUT_OK = "PUT_OK"
    DUPLICATE = "DUPLICATE"
    """Stored before, under the offsets in the result; it was not stored again."""
    MESSAGE_ILLEGAL = "MESSAGE_ILLEGAL"
    """Larger than a whole segment of the log, it or its group; not stored, and never will be."""
    SEQUENCE_CONFLICT = "SEQUENCE_CONFLICT"
    """Its sequences, or some of them, are those of a remembered batch with other content, or of
    its group some batches are stored and others not; not stored, and never will be."""
    TOO_MANY_PRODUCERS = "TOO_MANY_PRODUCERS"
    """No room to remember it for its producer without forgetting what others may still repeat; not
    stored, a later call may succeed."""


class GetStatus(enum.Enum):
    """Result of a read. RocketMQ's names."""

    FOUND = "FOUND"
    NO_NEW_MESSAGE = "NO_NEW_MESSAGE"
    """The offset is the queue's next one."""
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    """Nothing fits the tags up to ``next_queue_offset``; go on from there."""
    MESSAGES_LOST = "MESSAGES_LOST"
    """Messages up to ``next_queue_offset`` are lost to damage; go on from there. Brokers say it: a
    store answers ``NO_MATCHED_MESSAGE`` to a read without tags."""
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    """Before the first message; ``next_queue_offset`` is the first one."""
    OFFSET_OVERFLOW = "OFFSET_OVERFLOW"
    """Behind the queue's next one; ``next_queue_offset`` is that."""


class BatchToPut(msgspec.Struct, frozen=True, gc=False):
    """A batch on its way into the store.

    Attributes:
        topic: Physical topic: what the batch's meta says.
        queue_id: What the batch's header says.
        header: Its header, from ``check_batch``: the store trusts it.
        data: The whole batch; bytes 0 to 47 are not looked at. Layout: record batch.
        tag_hashes: As in the batch's meta: 0, 8 or 8 bytes a message.
        group: Neighbours with the same number are stored all or none, whatever dies meanwhile; 0
            for a batch on its own.
    """

    topic: str
    queue_id: int
    header: BatchHeader
    data: Buffer
    tag_hashes: bytes = b""
    group: int = 0


class PutResult(msgspec.Struct, frozen=True, gc=False):
    """Place of a batch that was stored, now or before.

    Attributes:
        status: What became of it.
        base_queue_offset: Queue offset of its first message, -1 if not stored.
        commitlog_offset: Where it begins in the log, -1 if not stored.
        end_offset: It is on disk once ``durable_offset()`` has reached this.
        store_timestamp: When it was stored: for a duplicate, the first time.
    """

    status: PutStatus
    base_queue_offset: QueueOffset
    commitlog_offset: CommitLogOffset
    end_offset: CommitLogOffset
    store_timestamp: TimestampMs


class GetResult(msgspec.Struct, frozen=True, gc=False):
    """Result of a read with its messages.

    Attributes:
        status: See ``GetStatus``.
        next_queue_offset: Where to go on reading.
        min_queue_offset: Of the queue's first message.
        max_queue_offset: Of the message that comes next.
        data: Buffers of whole stored batches in queue order, each buffer one batch or
            several, one behind the other. The first batch may begin before the offset
            that was asked for. Layout: record batch.
        message_count: Messages in ``data`` at or behind the offset asked for.
    """

    status: GetStatus
    next_queue_offset: QueueOffset
    min_queue_offset: QueueOffset
    max_queue_offset: QueueOffset
    data: Sequence[bytes | memoryview] = ()
    message_count: int = 0


class DamagedRange(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of the log that were on disk once and no longer pass their checks.

    Attributes:
        start_offset: Commit-log offset of the first damaged byte.
        end_offset: Of the first good byte behind.
        reason: What was wrong, a sentence.
        found_at_ms: Wall-clock time of the discovery.
    """

    start_offset: CommitLogOffset
    end_offset: CommitLogOffset
    reason: str
    found_at_ms: TimestampMs


class RecoveryProgress(msgspec.Struct, frozen=True, gc=False):
    """Progress of opening a store.

    Attributes:
        step: What is being done, for people.
        done_bytes: Log bytes read.
        total_bytes: Log bytes that have to be read; an upper bound.
    """

    step: str
    done_bytes: int
    total_bytes: int


OnProgress = Callable[[RecoveryProgress], None]


class QueueMove(msgspec.Struct, frozen=True, gc=False):
    """A queue that begins somewhere else, since its oldest messages were removed.

    Attributes:
        topic: Physical topic.
        queue_id: From 0.
        first_before: Queue offset of its first message before.
        first: And now.
    """

    topic: str
    queue_id: int
    first_before: QueueOffset
    first: QueueOffset


class LogChunk(msgspec.Struct, frozen=True, gc=False):
    """A stretch of the log as it is: whole records of one segment and one epoch.

    Attributes:
        start: Commit-log offset of the first record.
        end: Of the record behind the last one; it may stand in the next segment.
        segment_end: Where their segment ends, commit-log offset.
        epoch: Of all of them; 0 if there is none.
        data: Their bytes. Layout: commit log.
    """

    start: CommitLogOffset
    end: CommitLogOffset
    segment_end: int
    epoch: int
    data: Buffer


class QueueStart(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Start of a queue that has no message in the log any more.

    Attributes:
        topic: Physical topic.
        queue_id: From 0.
        queue_offset: Of its next message.
    """

    topic: str
    queue_id: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    queue_offset: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]


MOST_QUEUE_BEGINNINGS: Final = 2_000_000


class LogStart(msgspec.Struct, array_like=True, frozen=True):
    """Start of a copy of a log. Array positions are on the wire and never change.

    All that is derived from a log comes with its records, but for three things: whose log it is,
    where it begins, and how far queues had come of which retention has removed all messages.

    Attributes:
        key: Of the store, secret: its owner can forge records.
        store_id: Identity of the store.
        segment_bytes: Size of its segments.
        log_start: Commit-log offset of the first record that it has.
        epochs: Those that began there or before.
        queues: Queues without messages.
    """

    key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    store_id: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    segment_bytes: Annotated[int, msgspec.Meta(ge=64 * KIB, le=4 * GIB)]
    log_start: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]
    epochs: Annotated[list[EpochStart], msgspec.Meta(max_length=10_000)]
    queues: Annotated[list[QueueStart], msgspec.Meta(max_length=MOST_QUEUE_BEGINNINGS)]


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers about a store, for people and metrics.

    Attributes:
        backend: Name of the backend.
        disk_bytes: What its files take, including room taken ahead.
        segments: Files of the log, 0 for backends without.
        min_commitlog_offset: Where the oldest stored batch may begin.
        max_commitlog_offset: Where the next batch will begin.
        durable_offset: Synced through to here.
        topics: Topics with at least one queue.
        queues: Message queues.
        put_batches: Batches stored since the store was opened.
        put_messages: Messages in them.
        duplicates: Batches answered as stored before, since the store was opened.
        unwritten_queue_bytes: Memory of consume queue entries that are not written yet.
        flushes: Syncs of the log since the store was opened.
        flush_errors: Failed syncs; the store has stopped when this is not 0.
        epoch: Grows whenever a tail is cut, and, unless the store is a ``ReplicableLog``, whenever
            it is opened: numbers that a broker gives out begin with it.
        store_id: Identity of the store, in every batch.
        started_clean: The last stop was an orderly one.
        recovered_bytes: Log bytes that were checked when the store was opened.
        cut_bytes: Bytes of a torn tail that were cut off when the store was opened.
        damaged: Ranges of the log that are lost to bit rot and the like.
        writable: False once the store has stopped writing for good.
        oldest_timestamp: Wall clock where the log begins, in ms; 0 if that is not known.
        disk_used_percent: How full the disk is, by whomever; 0 if it is not known.
        disk_full: True while writes are refused because of that, or because the last one found
            no room.
        deleted_segments: Segments that retention has removed since the store was opened.
        deleted_bytes: Their size.
        forcibly_deleted_segments: Those of them that went before their time, to make room.
        clock_jumps: Leaps of the wall clock that were noticed since the store was opened.
        mapped_bytes: Size of the mapped segments; what of it is in memory belongs to the page
            cache, and the system takes it back when it needs it.
        log_views: Reads of the log that were not copied and are still in use.
        held_bytes: Size of removed segments whose room on the disk such reads keep.
    """

    backend: str
    disk_bytes: int = 0
    segments: int = 0
    min_commitlog_offset: int = 0
    max_commitlog_offset: int = 0
    durable_offset: int = 0
    topics: int = 0
    queues: int = 0
    put_batches: int = 0
    put_messages: int = 0
    duplicates: int = 0
    unwritten_queue_bytes: int = 0
    flushes: int = 0
    flush_errors: int = 0
    epoch: int = 0
    store_id: int = 0
    started_clean: bool = True
    recovered_bytes: int = 0
    cut_bytes: int = 0
    damaged: Sequence[DamagedRange] = ()
    writable: bool = True
    oldest_timestamp: int = 0
    disk_used_percent: float = 0.0
    disk_full: bool = False
    deleted_segments: int = 0
    deleted_bytes: int = 0
    forcibly_deleted_segments: int = 0
    clock_jumps: int = 0
    mapped_bytes: int = 0
    log_views: int = 0
    held_bytes: int = 0


MIN_SEGMENT_BYTES: Final = 64 * KIB
MAX_GROUP_BYTES: Final = 28 * MIB
"""Most bytes of a group of batches, which replicas get in one frame: the largest batch and what
the broker writes with it."""
GROUP_BYTES: Final = 4 * MIB
"""Size up to which the broker gathers batches in a group, unless one alone is larger. A replica on
a slow link must get its frame before it takes the leader for silent, or it gets it again for
ever."""
_Percent = Annotated[int, msgspec.Meta(ge=1, le=100)]


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a store; backends ignore what does not concern them.

    Attributes:
        flush_disk_type: Whether answers wait for the disk. ``SYNC_FLUSH`` survives a power
            cut, ``ASYNC_FLUSH`` only the death of the process.

        flush_interval_commitlog_ms: Longest time that stored bytes stay unsynced with
            ``ASYNC_FLUSH``, 10 to 60,000 ms.
        checkpoint_interval_ms: How often the store notes how far everything derived from
            the log has come, 100 to 600,000 ms. A restart after a crash reads the log from
            there, so shorten it for quicker restarts.
        disk_reserve_bytes: Room on the disk that the log leaves for offsets, queues and
            recovery, from 0: a write that would take it is refused with ``DiskFull``.
        allocate_ahead_bytes: Room on the disk that the log takes ahead of its end, 64 KiB to
            1 GiB. Where it holds more than that, it takes as much as it holds, up to a segment.

        file_reserved_time: How long messages are kept at least, 1 to 876,000 hours. Whole log
            segments go, so the last message of a segment decides.
        delete_when: Hours of the day, local time, in which expired segments are removed: two
            digits each, ``;`` between them. Choose hours with little traffic.
        disk_max_used_space_ratio: When the disk is so full, 1 to 100 percent, expired segments
            are removed at any hour.
        disk_space_clean_forcibly_ratio: With ``clean_file_forcibly_enable``: when the disk is so
            full, 1 to 100 percent, the oldest segments are removed whatever their age, so consumers
            may lose what they have not read yet.
        disk_space_warning_level_ratio: When the disk is so full, 1 to 100 percent, writes are
            refused until there is room again; reads, commits and deletes go on.
        clean_file_forcibly_enable: Whether ``disk_space_clean_forcibly_ratio`` counts. Without
            it nothing goes before its time, and a full disk only refuses writes. With it each
            removal is an error in the log that says which groups lose how much.
        clean_resource_interval_ms: How often segments to remove are looked for, and how long
            after the start for the first time, 100 to 3,600,000 ms.
        delete_files_batch_max: Segments removed at most at a time, 1 to 10,000. It bounds what
            a wrong clock or setting can do before it is noticed.

        mapped_file_size_commit_log: Size of a log segment, 64 KiB to 4 GiB. No batch larger
            than a segment can be stored, so keep it over 16 MiB except in tests.
        commit_log_window_bytes: How far ahead of the log's end pages are brought into memory at
            most, with ``ASYNC_FLUSH``, 0 to 1 GiB; 0 for not at all.
        mapped_file_size_consume_queue: Entries in a consume queue file, 16 to 100,000,000.
        consume_queue_tail_bytes: Memory for what is not yet written to the consume queues,
            64 KiB to 4 GiB; a batch takes 32 bytes, and 8 a message if their tags differ.
        max_open_files: Descriptors for reading and for consume queues, 8 to 100,000.
        max_producer_states: Pairs of producer and queue that duplicates are recognised for,
            16 to 10,000,000, of one producer 8,192. A pair takes up to 2 KiB of memory. The ones
            unused for longest are forgotten.
        producer_state_min_age_ms: But not within this time after their last batch, 0 to
            3,600,000 ms: meanwhile new producers are refused when there is no room. Keep it over
            the timeouts of sends, because no repetition comes later than that.
    """

    flush_disk_type: FlushDiskType = FlushDiskType.ASYNC_FLUSH

    flush_interval_commitlog_ms: Annotated[int, msgspec.Meta(ge=10, le=60_000)] = 500
    checkpoint_interval_ms: Annotated[int, msgspec.Meta(ge=100, le=600_000)] = 5_000
    disk_reserve_bytes: Annotated[int, msgspec.Meta(ge=0)] = 16 * MIB
    allocate_ahead_bytes: Annotated[int, msgspec.Meta(ge=MIN_SEGMENT_BYTES, le=1 * GIB)] = 16 * MIB

    file_reserved_time: Annotated[int, msgspec.Meta(ge=1, le=876_000)] = 72
    delete_when: Annotated[
        str, msgspec.Meta(pattern=r"^([01][0-9]|2[0-3])(;([01][0-9]|2[0-3])){0,23}$")
    ] = "04"
    disk_max_used_space_ratio: _Percent = 75
    disk_space_clean_forcibly_ratio: _Percent = 85
    disk_space_warning_level_ratio: _Percent = 90
    clean_file_forcibly_enable: bool = False
    clean_resource_interval_ms: Annotated[int, msgspec.Meta(ge=100, le=3_600_000)] = 10_000
    delete_files_batch_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 10

    mapped_file_size_commit_log: Annotated[int, msgspec.Meta(ge=MIN_SEGMENT_BYTES, le=4 * GIB)] = (
        1 * GIB
    )
    commit_log_window_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 * GIB)] = 4 * MIB
    mapped_file_size_consume_queue: Annotated[int, msgspec.Meta(ge=16, le=100_000_000)] = 300_000
    consume_queue_tail_bytes: Annotated[int, msgspec.Meta(ge=64 * KIB, le=4 * GIB)] = 64 * MIB
    max_open_files: Annotated[int, msgspec.Meta(ge=8, le=100_000)] = 256
    max_producer_states: Annotated[int, msgspec.Meta(ge=16, le=10_000_000)] = 100_000
    producer_state_min_age_ms: Annotated[int, msgspec.Meta(ge=0, le=3_600_000)] = 60_000

    @property
    def max_batch_bytes(self) -> int:
        """The largest batch that fits a segment, also in a group with what is noted of it."""
        return self.mapped_file_size_commit_log - 2 * KIB

    @property
    def max_group_bytes(self) -> int:
        """The largest group that fits a segment beside the markers around it, and a frame."""
        return min(self.mapped_file_size_commit_log - 256, MAX_GROUP_BYTES)


class StoredEntry(msgspec.Struct, frozen=True, gc=False):
    """One entry of a consume queue.

    Attributes:
        queue_offset: Of its message.
        commitlog_offset: Where the message's batch begins, as it says; -1 if it does not.
        size: Of the batch in bytes.
        tag_hash: 0 for no tag.
        problem: What is wrong with it; "" for nothing.
    """

    queue_offset: int
    commitlog_offset: int
    size: int
    tag_hash: int
    problem: str = ""


class QueueView(Protocol):
    """Consume queues of a store, for the search for damage."""

    def entries(
        self, topic: str, queue_id: int, queue_offset: int, count: int
    ) -> list[StoredEntry]:
        """Return entries as they are, ascending; damage is reported in the entry, not raised.

        Args:
            topic: Physical topic.
            queue_id: From 0.
            queue_offset: The first one; where the queue begins later, there.
            count: Most; none behind what consumers see.
        """


@runtime_checkable
class InspectableStore(Protocol):
    """A store with consume queues to look at.

    Attributes:
        inspector: Reads them. Another one after ``ReplicableLog.truncate``.
    """

    inspector: QueueView


class GoingSegment(msgspec.Struct, frozen=True, gc=False):
    """A segment of the log that goes.

    Attributes:
        commitlog_offset: Where it begins.
        size: Its bytes.
    """

    commitlog_offset: int
    size: int


class CleaningReport(msgspec.Struct):
    """Report of a pass of retention.

    Attributes:
        segments: That go, oldest first.
        reason: Why they go, or why none does.
        forced: They go before their time.
        moves: Queues that begin later.
        finished: The pass is over, or what it would do is known.
        error: Why it stopped before; "" if it did not.
    """

    segments: list[GoingSegment]
    reason: str
    forced: bool = False
    moves: list[QueueMove] = []
    finished: bool = False
    error: str = ""


class Retention(Protocol):
    """Control of the removal of old messages from a store."""

    def configure(self, config: StoreConfig) -> None:
        """Decides by other settings from now on.

        Args:
            config: Its marks and times count: ``file_reserved_time``, ``delete_when``,
                ``disk_max_used_space_ratio``, ``clean_file_forcibly_enable``.
        """

    def clean(self, *, dry_run: bool) -> CleaningReport | None:
        """Begins a pass now, whatever the hour is; ``tick`` does it, and completes the report.

        Args:
            dry_run: Nothing goes: only find out what would.

        Returns:
            What it does; None if a pass is under way.
        """


@runtime_checkable
class RetainingStore(Protocol):
    """A store that removes old messages by itself.

    Attributes:
        retention: What does so. Another one after ``ReplicableLog.truncate``.
    """

    retention: Retention


class RepairableLog(Protocol):
    """Log of a store, for the search and repair of what a disk has changed in it."""

    def look(self) -> None:
        """Checks the next slice of the log, some milliseconds; what is bad is in ``damaged`` then.

        After the end it rests for a day.
        """

    def damaged(self) -> Sequence[DamagedRange]:
        """Return the damaged ranges of the log, ascending; none that retention has removed."""

    def put_back(self, chunk: LogChunk) -> None:
        """Writes good records in the place of damaged ones, durably, and has queues lead there.

        Args:
            chunk: From ``read_raw`` of a log that is the same; it begins where a damaged range
                does, and what it leaves of that is damaged as before.

        Raises:
            OffsetOutOfRange: No known damage begins there.
            CorruptRecord: A record of it is not good; nothing was written.
            StorageError: The disk refuses, or the segments have other bounds than here.
        """


@runtime_checkable
class ReplicableLog(Protocol):
    """Log of a store, for its copies.

    A copy is byte for byte what it is a copy of; all that is derived from a log is the same then,
    too. The stores share id and key.

    Attributes:
        repair: What a disk has changed in it. Another one after ``truncate``.
    """

    repair: RepairableLog

    def read_raw(
        self,
        start: CommitLogOffset,
        *,
        max_bytes: int,
        stop: CommitLogOffset | None = None,
        whole_groups: bool = True,
    ) -> LogChunk:
        """Reads records as they are.

        Args:
            start: Where the first one begins.
            max_bytes: Stop before the record, or group, that would exceed this; one is read
                whatever its size.
            stop: Read nothing that ends behind this: the durable offset, say. None for all that
                is written.
            whole_groups: False for a chunk that may end inside of a group, for ``put_back`` alone.

        Returns:
            A chunk; without records when the log, or what may be read of it, ends at ``start``, or
            inside of the group that begins there: no chunk with its marker does. Its bytes may be a
            view of the log, so hand it on before the log is cut.

        Raises:
            OffsetOutOfRange: The log is gone there, or does not reach as far.
            CorruptRecord: No record begins there, or it is damaged.
        """

    def append_raw(self, chunk: LogChunk) -> None:
        """Adds records as they are, and brings up to them all that is derived from the log.

        The next ``put`` begins an epoch of its own.

        Args:
            chunk: From ``read_raw`` of a log that is the same up to there.

        Raises:
            OffsetOutOfRange: The log does not end where the chunk begins.
            CorruptRecord: A record of it is not good, or of a group some are missing; nothing was
                added.
            DiskFull: No room; nothing was added, and a later call may succeed.
            StorageError: The write failed, or the segments have other bounds than here; nothing
                was added.
            StoreClosed: Closed, or stopped by a failed sync.
        """

    def truncate(self, end_offset: CommitLogOffset) -> None:
        """Cuts the end of the log off, durably, with all that was derived from it.

        Of a group that would be cut nothing is left. What is cut is kept aside. Work grows with
        that, and with the number of queues. After a crash meanwhile the cut is done when the store
        is opened next. The index process, which reads the log beside the store, should not have
        come as far: it notices, says so, and compares itself with the log.

        Args:
            end_offset: Where a record begins.

        Raises:
            OffsetOutOfRange: The log is gone there, or does not reach as far.
            CorruptRecord: No good record begins there; nothing was cut.
            DiskFull: No room for what is to be kept; nothing was cut.
            StoreClosed: The disk refuses; the store has to be opened again, which does the rest.
        """

    def begin_epoch(self, epoch: int, note: bytes = b"") -> None:
        """Begins an epoch: notes it durably, then in the log.

        Args:
            epoch: Higher than all before.
            note: What its leader notes in the log, up to 4,096 bytes.

        Raises:
            DiskFull: No room; may be tried again.
            StorageError: The epoch is not higher, or the write failed.
        """

    def epochs(self) -> Sequence[EpochStart]:
        """Epochs of which the log has records, ascending; see ``mqmesh.log_identity.common_end``.

        Of a log without any: those that it goes on from.
        """

    def log_end(self) -> CommitLogOffset:
        """Return the offset where the next record will begin."""

    def identity(self) -> LogIdentity:
        """Return the identity of the log, and the part of it that is there."""

    def beginning(self) -> LogStart:
        """Return the start of a new copy of the log; the records follow by ``append_raw``.

        Hold ``log_start`` by ``keep_from`` until the copy has come further.
        """


def replicable(store: "MessageStore") -> ReplicableLog:
    """Return the log of a store, for replicas.

    Raises:
        ConfigError: The backend has none.
    """
    if not _has_log(type(store)):
        raise ConfigError("replicas need the backend commitlog (storage.backend)")
    return cast("ReplicableLog", store)


@cache
def _has_log(kind: "type[MessageStore]") -> bool:
    """Return True for a store with a log; cached, since ``isinstance`` took long in each turn."""
    methods = [name for name, value in vars(ReplicableLog).items() if callable(value)]
    return all(hasattr(kind, name) for name in methods if not name.startswith("_"))


def begin_own_epoch(store: "MessageStore") -> int:
    """Begins an epoch for a master without a numbering by others, durably.

    On a full disk, too: room for that was taken before.

    Returns:
        Higher than all before.

    Raises:
        StorageError: It cannot be noted.
    """
    if isinstance(store, ReplicableLog):
        starts = store.epochs()
        newest = max(store.epoch(), starts[-1].epoch if starts else 0)
        with contextlib.suppress(DiskFull):  # its record waits until there is room
            store.begin_epoch(newest + 1, b"started")
    return store.stats().epoch


class RememberedBatch(Protocol):
    """Batch of a producer by which a repetition is recognised."""

    @property
    def first_sequence(self) -> int:
        """Sequence of its first message."""

    @property
    def message_count(self) -> int:
        """Number of its messages."""

    @property
    def producer_crc(self) -> int:
        """Checksum of what its producer sent."""

    @property
    def end_offset(self) -> int:
        """Commit-log offset behind it."""


class MessageStore(ABC):
    """Keeps the batches of one broker.

    Every method but ``close`` raises ``StoreClosed`` after ``close``. After a failed sync
    the store has stopped: ``put``, ``delete_topic`` and ``tick`` raise ``StoreClosed``,
    reading goes on.
    """

    @abstractmethod
    def put(
        self,
        batches: Sequence[BatchToPut],
        store_timestamp: TimestampMs,
        *,
        despite_full: bool = False,
    ) -> list[PutResult]:
        """Stores batches in the order given, all of them in one write.

        A batch whose producer, first sequence, message count and producer checksum equal those
        of one of the last few batches of the same queue is not stored again (``DUPLICATE``). One
        that shares only sequences with such a batch is refused (``SEQUENCE_CONFLICT``). Neither
        goes for batches with ``Attributes.REDELIVERED``. What may still be repeated is not
        forgotten for new producers (``TOO_MANY_PRODUCERS``).

        Of a group (``BatchToPut.group``) all batches are stored or none is, whatever dies
        meanwhile, and consumers see all or none. It is judged as a whole: it is a duplicate where
        each of its batches is that is not redelivered, and refused where only some are.

        Args:
            batches: Checked batches; the caller may reuse their memory afterwards. A group that
                is over ``StoreConfig.max_group_bytes`` is refused (``MESSAGE_ILLEGAL``).
            store_timestamp: Now, wall clock.
            despite_full: Uses room that is left when ``disk_space_warning_level_ratio`` has been
                reached: for what the broker itself has to note.

        Returns:
            One result a batch, in the same order.

        Raises:
            DiskFull: No room; nothing was stored, and a later call may succeed.
            StorageError: The write failed; nothing was stored.
            StoreClosed: Closed, or stopped by a failed sync.
        """

    @abstractmethod
    def get(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        *,
        max_bytes: int,
        tag_hashes: frozenset[int] | None = None,
        verify: bool = False,
    ) -> GetResult:
        """Reads batches of a queue.

        An unknown queue reads as an empty one. Work is bounded whatever the filter: a read
        may answer ``NO_MATCHED_MESSAGE`` although messages that fit come later.

        Args:
            topic: Physical topic.
            queue_id: From 0.
            queue_offset: First message wanted.
            max_bytes: Stop before the batch that would exceed this; one batch is returned
                whatever its size.
            tag_hashes: Only batches with a message of one of these tags, and those that the store
                cannot decide without reading them; None for all.
            verify: Look at the batches' checksums, too, which is otherwise left to the reader.
                A store that can repair itself passes, later, what is lost.

        Raises:
            CorruptRecord: The queue leads to a place where its batch is not, or the first batch
                is damaged.
        """

    def is_repairing(self, topic: str, queue_id: int) -> bool:
        """Return whether a queue is compared with the log, so that a read of it may succeed later.

        A read that raises ``CorruptRecord`` begins that, where the store can.
        """
        return False

    @abstractmethod
    def queue_bounds(self, topic: str, queue_id: int) -> tuple[QueueOffset, QueueOffset]:
        """Return the offsets of the first message and of the next one that consumers will see.

        Both are 0 for an unknown queue. What is not yet durable with ``SYNC_FLUSH`` does
        not count.
        """

    @abstractmethod
    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: TimestampMs) -> QueueOffset:
        """Return the offset of the first message stored at or after a time; the end if none.

        The store's wall clock may have jumped; the answer is then one of the places where
        the time was passed.

        Raises:
            CorruptRecord: The queue leads to a place where its batch is not.
        """

    @abstractmethod
    def read_at(self, commitlog_offset: CommitLogOffset) -> bytes:
        """Return the stored batch that begins at an offset, checked by ``check_stored``.

        Raises:
            OffsetOutOfRange: Before the first or behind the last stored batch.
            CorruptRecord: No good batch begins there.
        """

    def producer_window(
        self, topic: str, queue_id: int, producer_id: int
    ) -> Sequence[RememberedBatch]:
        """Return the batches by which repetitions of a producer are recognised, newest last.

        Args:
            topic: Physical topic.
            queue_id: From 0.
            producer_id: Of the producer instance.

        Returns:
            Empty for a producer that is not known there, or not any more.
        """
        return ()

    @abstractmethod
    def queues(self, topic: str) -> list[int]:
        """Ids of the topic's queues that ever got a message, ascending."""

    @abstractmethod
    def topics(self) -> list[str]:
        """Topics with at least one such queue, in no order."""

    @abstractmethod
    def delete_topic(self, topic: str) -> None:
        """Forgets all queues of a topic, durably once ``durable_offset`` has moved past.

        Its batches stay in the log until that is cleaned. A topic of the same name starts
        at queue offset 0. No error if the topic is unknown.

        Raises:
            DiskFull: No room to note the deletion; nothing was deleted.
        """

    @abstractmethod
    def durable_offset(self) -> CommitLogOffset:
        """Return the commit-log offset before which everything is on disk."""

    def epoch(self) -> int:
        """Return the log's epoch, which grows whenever its end may be lost; 0 for no epochs."""
        return 0

    def cut_offset(self, topic: str, queue_id: int, epoch: int) -> QueueOffset | None:
        """Return the offset where a queue differs from that of an epoch which a client knows.

        Args:
            topic: Physical topic.
            queue_id: From 0.
            epoch: The newest that the client knows, from 1.

        Returns:
            Messages at or behind this queue offset are others than in that epoch; None if it
            lost none.

        Raises:
            CorruptRecord: The queue's entries are damaged.
        """
        return None

    def keep_from(self, holder: str, commitlog_offset: CommitLogOffset) -> None:  # noqa: B027
        """Keep the log at and behind an offset from retention, however full the disk is.

        Not remembered when the store is closed. Backends that remove nothing by themselves
        need not listen.

        Args:
            holder: Name of the part that needs it; the lowest offset of all holders counts.
            commitlog_offset: Replaces the one that this holder gave before.
        """

    def show_to(self, position: Callable[[], int] | None) -> None:  # noqa: B027
        """Lets consumers see no more of the log than ``position`` says, be it less than is durable.

        Stores without replicas need not know of it.

        Args:
            position: Commit-log offset, asked with every read. What is there now stays visible.
                None for all of the log, at once.
        """

    def retention_wish(self) -> CommitLogOffset:
        """Return the offset up to which retention would remove but for ``keep_from``, or 0."""
        return CommitLogOffset(0)

    def take_forced_moves(self) -> list[QueueMove]:
        """Queues of which messages were removed before their time, since the call before.

        Backends that never do so need not listen.
        """
        return []

    @abstractmethod
    def tick(self, now_ms: int) -> bool:
        """Does a slice of the work in the background, a few milliseconds at most.

        To be called about ten times a second, busy or not.

        Args:
            now_ms: Monotonic clock.

        Returns:
            True when more is waiting: call again as soon as nothing else is to do.

        Raises:
            StoreClosed: A sync failed; the store has stopped.
        """

    @abstractmethod
    def stats(self) -> StoreStats:
        """Numbers about the store; cheap."""

    @abstractmethod
    def close(self) -> None:
        """Makes everything durable, notes the clean stop and releases the files.

        May be called again. Never raises because of a store that has stopped before.
        """
