"""Interface of every message store: the docstrings here are the specification.

A store keeps record batches, whole and unchanged but for the broker's first 48
bytes, and finds them again by message queue and queue offset. It knows topics
and queues only as names and numbers: permissions, groups and consumer offsets
are the broker's. ``mqmesh.testing.store_contract`` is the suite that every
backend passes.

A store belongs to one thread, the broker's event loop. Only ``wake`` is called on another thread:
it reports that ``durable_offset`` has moved or that the store has stopped.
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
"""Called from a helper thread; must do no more than wake the event loop."""


class FlushDiskType(enum.Enum):
    """Time at which a send may be answered. RocketMQ's names."""

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
    """Larger than a whole segment of the log, or its group is; not stored, and never will be."""
    SEQUENCE_CONFLICT = "SEQUENCE_CONFLICT"
    """Some or all of its sequences are those of a remembered batch with other content, or only some
    batches of its group are stored already; not stored, and never will be."""
    TOO_MANY_PRODUCERS = "TOO_MANY_PRODUCERS"
    """No room to remember the batch without forgetting others that producers may still repeat; not
    stored, a later call may succeed."""


class GetStatus(enum.Enum):
    """Result of a read. RocketMQ's names."""

    FOUND = "FOUND"
    NO_NEW_MESSAGE = "NO_NEW_MESSAGE"
    """The offset is the queue's next offset."""
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    """No message up to ``next_queue_offset`` has the tags; go on from there."""
    MESSAGES_LOST = "MESSAGES_LOST"
    """Messages up to ``next_queue_offset`` are lost to damage; go on from there. Brokers give this
    status: a store answers ``NO_MATCHED_MESSAGE`` to a read without tags."""
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    """The offset is before the first message; ``next_queue_offset`` is the first offset."""
    OFFSET_OVERFLOW = "OFFSET_OVERFLOW"
    """The offset is behind the queue's next offset, which ``next_queue_offset`` is."""


class BatchToPut(msgspec.Struct, frozen=True, gc=False):
    """A batch that is to be stored.

    Attributes:
        topic: Physical topic, the same as in the batch's meta.
        queue_id: Number of the queue, the same as in the batch's header.
        header: Header of the batch, from ``check_batch``: the store trusts it.
        data: The whole batch; the store ignores bytes 0 to 47. Layout: record batch.
        tag_hashes: Tag hashes as in the batch's meta: 0, 8 or 8 bytes a message.
        group: Neighbours with the same number are stored all or none, also in a crash; 0
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
        status: Result of the put.
        base_queue_offset: Queue offset of its first message, -1 if not stored.
        commitlog_offset: Commit-log offset at which the batch begins, -1 if not stored.
        end_offset: The batch is on disk once ``durable_offset()`` has reached this offset.
        store_timestamp: Time at which the batch was stored: for a duplicate, the first time.
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
        next_queue_offset: Queue offset of the next read.
        min_queue_offset: Queue offset of the first message.
        max_queue_offset: Queue offset of the message that is stored next.
        data: Buffers of whole stored batches in queue order, each buffer one batch or
            several, one behind the other. The first batch may begin before the requested
            offset. Layout: record batch.
        message_count: Messages in ``data`` at or behind the requested offset.
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
        end_offset: Commit-log offset of the first good byte behind.
        reason: Reason why the bytes are not valid, a sentence.
        found_at_ms: Wall-clock time of the discovery.
    """

    start_offset: CommitLogOffset
    end_offset: CommitLogOffset
    reason: str
    found_at_ms: TimestampMs


class RecoveryProgress(msgspec.Struct, frozen=True, gc=False):
    """Progress of opening a store.

    Attributes:
        step: Current step, a text for people.
        done_bytes: Log bytes read.
        total_bytes: Log bytes that have to be read; an upper bound.
    """

    step: str
    done_bytes: int
    total_bytes: int


OnProgress = Callable[[RecoveryProgress], None]


class QueueMove(msgspec.Struct, frozen=True, gc=False):
    """A queue with a new first message, since its oldest messages were removed.

    Attributes:
        topic: Physical topic.
        queue_id: Number of the queue, from 0.
        first_before: Queue offset of its first message before the removal.
        first: Queue offset of its first message after the removal.
    """

    topic: str
    queue_id: int
    first_before: QueueOffset
    first: QueueOffset


class LogChunk(msgspec.Struct, frozen=True, gc=False):
    """A stretch of the log as it is: whole records of one segment and one epoch.

    Attributes:
        start: Commit-log offset of the first record.
        end: Commit-log offset of the record behind the last one; it may be in the next segment.
        segment_end: Commit-log offset at which their segment ends.
        epoch: Epoch of all records; 0 if there is none.
        data: Bytes of the records. Layout: commit log.
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
        queue_id: Number of the queue, from 0.
        queue_offset: Queue offset of its next message.
    """

    topic: str
    queue_id: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    queue_offset: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]


MOST_QUEUE_BEGINNINGS: Final = 2_000_000


class LogStart(msgspec.Struct, array_like=True, frozen=True):
    """Start of a copy of a log. Array positions are on the wire and never change.

    Everything that is derived from a log comes with its records, except three facts: the identity
    of the log, its beginning, and the next offsets of queues that retention has emptied.

    Attributes:
        key: Key of the store, secret: its owner can forge records.
        store_id: Identity of the store.
        segment_bytes: Size of its segments.
        log_start: Commit-log offset of the first record that the log has.
        epochs: Epochs that began at ``log_start`` or before.
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
        disk_bytes: Room on the disk that its files take, including room allocated ahead.
        segments: Files of the log, 0 for backends without.
        min_commitlog_offset: Commit-log offset at which the oldest stored batch may begin.
        max_commitlog_offset: Commit-log offset at which the next batch will begin.
        durable_offset: Commit-log offset up to which the log is synced.
        topics: Topics with at least one queue.
        queues: Message queues.
        put_batches: Batches stored since the store was opened.
        put_messages: Messages in them.
        duplicates: Batches answered as stored before, since the store was opened.
        unwritten_queue_bytes: Memory of consume queue entries that are not written yet.
        flushes: Syncs of the log since the store was opened.
        flush_errors: Failed syncs; the store has stopped when this is not 0.
        epoch: Epoch of the log. It grows whenever a tail is cut, and, unless the store is a
            ``ReplicableLog``, whenever the store is opened: numbers that a broker gives out begin
            with it.
        store_id: Identity of the store, in every batch.
        started_clean: The last stop was an orderly one.
        recovered_bytes: Log bytes that were checked when the store was opened.
        cut_bytes: Bytes of a torn tail that were cut off when the store was opened.
        damaged: Ranges of the log that are lost to bit rot and the like.
        writable: False once the store has stopped writing for good.
        oldest_timestamp: Wall clock at the beginning of the log, in ms; 0 if that is not known.
        disk_used_percent: Used part of the disk, by all programs; 0 if it is not known.
        disk_full: True while writes are refused because of that, or because the last one found
            no room.
        deleted_segments: Segments that retention has removed since the store was opened.
        deleted_bytes: Size of these segments.
        forcibly_deleted_segments: Segments among them that were removed before their time, to make
            room.
        clock_jumps: Leaps of the wall clock that were noticed since the store was opened.
        mapped_bytes: Size of the mapped segments; pages of them that are in memory belong to the
            page cache, and the system takes them back when it needs memory.
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
"""Largest size of a group of batches, which replicas get in one frame: the largest batch and the
records that the broker writes with it."""
GROUP_BYTES: Final = 4 * MIB
"""Size up to which the broker gathers batches in a group, unless one alone is larger. A replica on
a slow link must receive the frame before it takes the silent leader for lost, else it would fetch
the same frame again for ever."""
_Percent = Annotated[int, msgspec.Meta(ge=1, le=100)]


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a store; each backend ignores settings that do not concern it.

    Attributes:
        flush_disk_type: Whether answers wait for the disk. ``SYNC_FLUSH`` survives a power
            cut, ``ASYNC_FLUSH`` only the death of the process.

        flush_interval_commitlog_ms: Longest time that stored bytes stay unsynced with
            ``ASYNC_FLUSH``, 10 to 60,000 ms.
        checkpoint_interval_ms: Interval at which the store notes how far everything derived from
            the log has come, 100 to 600,000 ms. A restart after a crash reads the log from
            there, so shorten it for quicker restarts.
        disk_reserve_bytes: Room on the disk that the log leaves for offsets, queues and
            recovery, from 0: a write that would use it is refused with ``DiskFull``.
        allocate_ahead_bytes: Room on the disk that the log allocates ahead of its end, 64 KiB to
            1 GiB. A log that holds more than that allocates as much as it holds, up to a segment.

        file_reserved_time: Shortest time for which messages are kept, 1 to 876,000 hours. Whole log
            segments are removed, so the last message of a segment decides.
        delete_when: Hours of the day, local time, in which expired segments are removed: two
            digits each, ``;`` between them. Choose hours with little traffic.
        disk_max_used_space_ratio: Used part of the disk, 1 to 100 percent, from which on expired
            segments are removed at any hour.
        disk_space_clean_forcibly_ratio: With ``clean_file_forcibly_enable``: used part of the disk,
            1 to 100 percent, from which on the oldest segments are removed whatever their age, so
            consumers may lose messages that they have not read yet.
        disk_space_warning_level_ratio: Used part of the disk, 1 to 100 percent, from which on
            writes are refused until there is room again; reads, commits and deletes go on.
        clean_file_forcibly_enable: Whether ``disk_space_clean_forcibly_ratio`` counts. Without
            it no segment is removed before its time, and a full disk only refuses writes. With it
            each removal logs an error that names the groups that lose messages, and how many.
        clean_resource_interval_ms: Interval between two searches for segments to remove, and time
            from the start to the first search, 100 to 3,600,000 ms.
        delete_files_batch_max: Largest number of segments removed at a time, 1 to 10,000. It bounds
            the damage of a wrong clock or setting before it is noticed.

        mapped_file_size_commit_log: Size of a log segment, 64 KiB to 4 GiB. No batch larger
            than a segment can be stored, so keep it over 16 MiB except in tests.
        commit_log_window_bytes: Largest size of the stretch behind the log's end whose pages are
            brought into memory ahead, with ``ASYNC_FLUSH``, 0 to 1 GiB; 0 for none.
        mapped_file_size_consume_queue: Entries in a consume queue file, 16 to 100,000,000.
        consume_queue_tail_bytes: Memory for entries that are not yet written to the consume queues,
            64 KiB to 4 GiB; a batch takes 32 bytes, and 8 a message if their tags differ.
        max_open_files: Descriptors for reading and for consume queues, 8 to 100,000.
        max_producer_states: Pairs of producer and queue that duplicates are recognised for,
            16 to 10,000,000, of one producer 8,192. A pair takes up to 2 KiB of memory. The pairs
            unused for longest are forgotten.
        producer_state_min_age_ms: Time after a pair's last batch in which it is not forgotten, 0 to
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
        """The largest batch that fits a segment, also in a group with the records about it."""
        return self.mapped_file_size_commit_log - 2 * KIB

    @property
    def max_group_bytes(self) -> int:
        """The largest group that fits a segment beside the markers around it, and a frame."""
        return min(self.mapped_file_size_commit_log - 256, MAX_GROUP_BYTES)


class StoredEntry(msgspec.Struct, frozen=True, gc=False):
    """One entry of a consume queue.

    Attributes:
        queue_offset: Queue offset of its message.
        commitlog_offset: Commit-log offset of the message's batch in the entry; -1 if it has none.
        size: Size of the batch in bytes.
        tag_hash: Hash of the message's tag, 0 for no tag.
        problem: Fault of the entry, "" for none.
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
            queue_id: Number of the queue, from 0.
            queue_offset: Queue offset of the first entry; if the queue begins later, its first
                offset.
            count: Largest number of entries; none behind the last that consumers see.
        """


@runtime_checkable
class InspectableStore(Protocol):
    """A store with consume queues to look at.

    Attributes:
        inspector: Reader of the consume queues. ``ReplicableLog.truncate`` replaces it.
    """

    inspector: QueueView


class GoingSegment(msgspec.Struct, frozen=True, gc=False):
    """A segment of the log that is being removed.

    Attributes:
        commitlog_offset: Commit-log offset at which it begins.
        size: Size in bytes.
    """

    commitlog_offset: int
    size: int


class CleaningReport(msgspec.Struct):
    """Report of a pass of retention.

    Attributes:
        segments: Segments to remove, oldest first.
        reason: Reason for removing them, or for removing none.
        forced: True if they are removed before their time.
        moves: Queues that begin later.
        finished: The pass is over, or the result of a dry run is known.
        error: Reason why the pass stopped early; "" if it did not.
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
        """Uses other settings from now on.

        Args:
            config: Settings, of which these limits and times count: ``file_reserved_time``,
                ``delete_when``, ``disk_max_used_space_ratio``, ``clean_file_forcibly_enable``.
        """

    def clean(self, *, dry_run: bool) -> CleaningReport | None:
        """Begins a pass now, whatever the hour is; ``tick`` does it, and completes the report.

        Args:
            dry_run: True to find out what would be removed, and remove nothing.

        Returns:
            Report of the pass, filled while it goes on; None if another pass is under way.
        """


@runtime_checkable
class RetainingStore(Protocol):
    """A store that removes old messages by itself.

    Attributes:
        retention: Control of the removal. ``ReplicableLog.truncate`` replaces it.
    """

    retention: Retention


class RepairableLog(Protocol):
    """Log of a store, for the search and repair of damage by a disk."""

    def look(self) -> None:
        """Checks the next slice of the log, some milliseconds; ``damaged`` has the bad ranges then.

        After the end of the log it rests for a day.
        """

    def damaged(self) -> Sequence[DamagedRange]:
        """Return the damaged ranges of the log, ascending; none that retention has removed."""

    def put_back(self, chunk: LogChunk) -> None:
        """Writes good records in the place of damaged ones, durably, and adds their queue entries.

        Args:
            chunk: Chunk from ``read_raw`` of an identical log. It begins where a damaged range
                does; the part of the range that it does not cover stays damaged.

        Raises:
            OffsetOutOfRange: No known damage begins there.
            CorruptRecord: A record of the chunk is not good; nothing was written.
            StorageError: The disk reports an error, or the segments have other bounds than here.
        """


@runtime_checkable
class ReplicableLog(Protocol):
    """Log of a store, for its copies.

    A copy is byte for byte the same as its original, so everything that is derived from it is the
    same, too. The stores share id and key.

    Attributes:
        repair: Search and repair of damage by a disk. ``truncate`` replaces it.
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
            start: Start of the first record.
            max_bytes: Size that the chunk does not exceed, except by its first record or group,
                which is read whatever its size.
            stop: End of the records to read, such as the durable offset. None for all that
                is written.
            whole_groups: False for a chunk that may end inside of a group, for ``put_back`` alone.

        Returns:
            A chunk. It has no records when the log, or the readable part of it, ends at ``start``
            or inside of the group that begins there: no chunk without the whole group has its
            marker. Its bytes may be a view of the log, so hand it on before the log is cut.

        Raises:
            OffsetOutOfRange: The log begins behind ``start``, or ends before it.
            CorruptRecord: No record begins there, or it is damaged.
        """

    def append_raw(self, chunk: LogChunk) -> None:
        """Adds records as they are, and brings everything derived from the log up to them.

        The next ``put`` begins an epoch of its own.

        Args:
            chunk: Chunk from ``read_raw`` of a log that is the same up to there.

        Raises:
            OffsetOutOfRange: The log does not end where the chunk begins.
            CorruptRecord: A record of it is not good, or a group is not whole; nothing was
                added.
            DiskFull: No room; nothing was added, and a later call may succeed.
            StorageError: The write failed, or the segments have other bounds than here; nothing
                was added.
            StoreClosed: Closed, or stopped by a failed sync.
        """

    def truncate(self, end_offset: CommitLogOffset) -> None:
        """Cuts the end of the log off, durably, with everything that was derived from it.

        A group that the cut would divide is removed as a whole. The cut bytes are kept aside. Work
        grows with their number, and with the number of queues. After a crash meanwhile the cut is
        completed when the store is opened next. The index process, which reads the log beside the
        store, should not have come as far: if it has, it notices and logs this, and compares itself
        with the log.

        Args:
            end_offset: Start of a record.

        Raises:
            OffsetOutOfRange: The log begins behind the offset, or ends before it.
            CorruptRecord: No good record begins there; nothing was cut.
            DiskFull: No room for the bytes to keep aside; nothing was cut.
            StoreClosed: The disk reports an error; opening the store again completes the cut.
        """

    def begin_epoch(self, epoch: int, note: bytes = b"") -> None:
        """Begins an epoch: notes it durably, then in the log.

        Args:
            epoch: An epoch higher than all before.
            note: Data of its leader for the log, up to 4,096 bytes.

        Raises:
            DiskFull: No room; may be tried again.
            StorageError: The epoch is not higher, or the write failed.
        """

    def epochs(self) -> Sequence[EpochStart]:
        """Epochs of which the log has records, ascending; see ``mqmesh.log_identity.common_end``.

        A log without records has the epochs that it continues.
        """

    def log_end(self) -> CommitLogOffset:
        """Return the commit-log offset where the next record will begin."""

    def identity(self) -> LogIdentity:
        """Return the identity of the log, and the range of it that this store has."""

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
    """Begins an epoch for a master whose epochs no group numbers, durably.

    This succeeds on a full disk, too: room for it was allocated before.

    Returns:
        The epoch, higher than all before.

    Raises:
        StorageError: The epoch cannot be saved.
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
        """Checksum of the batch as its producer sent it."""

    @property
    def end_offset(self) -> int:
        """Commit-log offset behind the batch."""


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
        of one of the last few batches of the same queue is not stored again (``DUPLICATE``). A
        batch that shares only sequences with such a batch is refused (``SEQUENCE_CONFLICT``).
        Neither rule applies to batches with ``Attributes.REDELIVERED``. A batch that may still be
        repeated is not forgotten for a new producer (``TOO_MANY_PRODUCERS``).

        All batches of a group (``BatchToPut.group``) are stored or none is, also in a crash, and
        consumers see all or none. A group is judged as a whole, by its batches that are not
        redelivered: it is a duplicate if all of them are, and refused if only some are.

        Args:
            batches: Checked batches; the caller may reuse their memory afterwards. A group that
                is over ``StoreConfig.max_group_bytes`` is refused (``MESSAGE_ILLEGAL``).
            store_timestamp: Current time, wall clock.
            despite_full: Uses room that is left when ``disk_space_warning_level_ratio`` has been
                reached: for records of the broker itself.

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
        may answer ``NO_MATCHED_MESSAGE`` although matching messages come later.

        Args:
            topic: Physical topic.
            queue_id: Number of the queue, from 0.
            queue_offset: Queue offset of the first requested message.
            max_bytes: Stop before the batch that would exceed this; one batch is returned
                whatever its size.
            tag_hashes: Only batches with a message of one of these tags, and those that the store
                cannot decode without reading them; None for all.
            verify: Check the batches' checksums, too, which is otherwise left to the reader.
                A later read of a store that can repair itself skips lost messages.

        Raises:
            CorruptRecord: The queue leads to a place without its batch, or the first batch
                is damaged.
        """

    def is_repairing(self, topic: str, queue_id: int) -> bool:
        """Return whether a queue is compared with the log, so that a read of it may succeed later.

        A read that raises ``CorruptRecord`` begins that comparison, if the store can do it.
        """
        return False

    @abstractmethod
    def queue_bounds(self, topic: str, queue_id: int) -> tuple[QueueOffset, QueueOffset]:
        """Return the offsets of the first message and of the next one that consumers will see.

        Both are 0 for an unknown queue. With ``SYNC_FLUSH``, messages that are not yet durable do
        not count.
        """

    @abstractmethod
    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: TimestampMs) -> QueueOffset:
        """Return the offset of the first message stored at or after a time; the end if none.

        The store's wall clock may have jumped; the answer is then one of the places where
        the time was passed.

        Raises:
            CorruptRecord: The queue leads to a place without its batch.
        """

    @abstractmethod
    def read_at(self, commitlog_offset: CommitLogOffset) -> bytes:
        """Return the stored batch that begins at an offset, checked by ``check_stored``.

        Raises:
            OffsetOutOfRange: The offset is before the first or behind the last stored batch.
            CorruptRecord: No good batch begins there.
        """

    def producer_window(
        self, topic: str, queue_id: int, producer_id: int
    ) -> Sequence[RememberedBatch]:
        """Return the batches by which repetitions of a producer are recognised, newest last.

        Args:
            topic: Physical topic.
            queue_id: Number of the queue, from 0.
            producer_id: Id of the producer instance.

        Returns:
            The batches; empty for a producer that is unknown there, or was forgotten.
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

        Its batches stay in the log until retention removes them. A topic of the same name starts
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
            queue_id: Number of the queue, from 0.
            epoch: Newest epoch that the client knows, from 1.

        Returns:
            Queue offset at and behind which messages differ from those of that epoch; None if the
            queue has lost none.

        Raises:
            CorruptRecord: The queue's entries are damaged.
        """
        return None

    def keep_from(self, holder: str, commitlog_offset: CommitLogOffset) -> None:  # noqa: B027
        """Keep the log at and behind an offset from retention, however full the disk is.

        The store does not remember the offset when it is closed. Backends that remove nothing by
        themselves may ignore it.

        Args:
            holder: Name of the part that needs it; the lowest offset of all holders counts.
            commitlog_offset: New offset of this holder, in the place of its last one.
        """

    def show_to(self, position: Callable[[], int] | None) -> None:  # noqa: B027
        """Hides the log behind ``position`` from consumers, even if it is durable.

        Stores without replicas may ignore it.

        Args:
            position: Returns a commit-log offset; called by every read. Messages that are visible
                now stay visible. None shows all of the log, at once.
        """

    def retention_wish(self) -> CommitLogOffset:
        """Return the offset up to which retention would remove without ``keep_from``, or 0."""
        return CommitLogOffset(0)

    def take_forced_moves(self) -> list[QueueMove]:
        """Queues of which messages were removed before their time, since the call before.

        Backends that never do so may ignore it.
        """
        return []

    @abstractmethod
    def tick(self, now_ms: int) -> bool:
        """Does a slice of the work in the background, a few milliseconds at most.

        To be called about ten times a second, busy or not.

        Args:
            now_ms: Monotonic clock.

        Returns:
            True when more work is waiting: call again as soon as there is nothing else to do.

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
