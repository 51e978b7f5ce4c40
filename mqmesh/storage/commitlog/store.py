"""CommitLogStore: joins the parts of a store; the default backend.

Files of a store's directory, all described in ``docs/storage-format.md``::

    lock                one process at a time
    checkpoint          extent of the log and of everything derived, two slots
    store-key           the key that proves a record to be this store's; twice
    queue-table         bounds of all queues, last batches of producers
    damaged-ranges      ranges of the log that are lost, if any
    epochs              the epochs of the log, and where each began
    log-cut             the offset at which the log is being cut, if it is
    commitlog/          the segments: the source of truth
    consumequeue/       derived from them
"""

import logging
import shutil
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path

from mqmesh.batch.record_batch import (
    HEADER_SIZE,
    read_header,
)
from mqmesh.clock import Clock
from mqmesh.errors import (
    CorruptBatch,
    CorruptRecord,
    OffsetOutOfRange,
    StorageError,
    StoreClosed,
    StoreLocked,
)
from mqmesh.log_identity import EpochStart, LogIdentity
from mqmesh.storage.commitlog.batch_finder import find_batches, read_batches, sound_batches
from mqmesh.storage.commitlog.checkpointer import Checkpointer
from mqmesh.storage.commitlog.cut_files import NAME as CUT_FILES
from mqmesh.storage.commitlog.cut_files import keep_cut
from mqmesh.storage.commitlog.log_applier import LogApplier
from mqmesh.storage.commitlog.log_repair import LogRepair
from mqmesh.storage.commitlog.machine import REAL_MACHINE, Machine
from mqmesh.storage.commitlog.offset_by_time import find_offset_by_time
from mqmesh.storage.commitlog.opening import StoreParts, open_parts
from mqmesh.storage.commitlog.queue_inspector import QueueInspector
from mqmesh.storage.commitlog.queue_repair import QueueRepairs
from mqmesh.storage.files.open_files import OpenFiles
from mqmesh.storage.files.store_lock import StoreLock
from mqmesh.storage.interface import (
    BatchToPut,
    FlushDiskType,
    GetResult,
    GetStatus,
    LogChunk,
    LogStart,
    MessageStore,
    OnProgress,
    PutResult,
    QueueMove,
    QueueStart,
    QueueView,
    RepairableLog,
    Retention,
    StoreConfig,
    StoreStats,
    Wake,
)
from mqmesh.storage.log.commitlog import CommitLog
from mqmesh.storage.log.control_record import ControlKind
from mqmesh.storage.log.flush import Flusher
from mqmesh.storage.queues.consume_queue import ConsumeQueue
from mqmesh.storage.queues.consume_queues import ConsumeQueues
from mqmesh.storage.queues.placement import Placed, Placement
from mqmesh.storage.queues.producer_states import StoredBatch
from mqmesh.storage.queues.queue_minimum import first_at_or_behind
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs

log = logging.getLogger(__name__)

TAILS_AT_ONCE = 32
"""Consume queues written in one slice."""


class CommitLogStore(MessageStore):
    """A commit log, consume queues that point into it, and the threads that sync them.

    Attributes:
        repair: Search and repair of damage by a disk.
        retention: Removes old messages.
        inspector: Shows consume queues as they are.
    """

    repair: RepairableLog
    retention: Retention
    inspector: QueueView

    def __init__(
        self, parts: StoreParts, config: StoreConfig, *, reopen: Callable[[StoreLock], StoreParts]
    ) -> None:
        """Takes over parts that were brought to one state; see ``open``.

        Args:
            parts: The parts.
            config: Settings.
            reopen: Opens the store once more, after its parts were closed and the log was cut.
        """
        self._config = config
        self._reopen = reopen
        self._sync_flush = config.flush_disk_type is FlushDiskType.SYNC_FLUSH
        # Returns the end of the part that consumers may see; None: all.
        self._shown_to: Callable[[], int] | None = self._durable if self._sync_flush else None
        self._shown_before = 0
        self._put_batches = 0
        self._put_messages = 0
        self._failure: str | None = None
        self._tails_stuck = False
        self._closed = False
        self._take_over(parts)

    def _take_over(self, parts: StoreParts) -> None:
        self._parts = parts
        self._log: CommitLog = parts.commitlog
        self._queues: ConsumeQueues = parts.queues
        self._files: OpenFiles = parts.files
        self._flusher: Flusher = parts.flusher
        self._checkpointer: Checkpointer = parts.checkpointer
        self.retention = self._cleaner = parts.cleaner
        self._placement = Placement(
            parts.states,
            parts.queues.find_or_add,
            store_id=parts.commitlog.store_id,
            config=self._config,
            store_check=parts.commitlog.key.batch_check,
        )
        self._applier = LogApplier(
            parts.queues,
            parts.states,
            parts.epochs,
            parts.damage,
            clock=parts.clock,
            remove=self._remove_later,
            shows_later=self._shown_to is not None,
        )
        self._repairs = QueueRepairs(
            parts.queues,
            parts.commitlog.segments,
            parts.damage,
            key=parts.commitlog.key,
            store_id=parts.commitlog.store_id,
            clock=parts.clock,
        )
        repair = LogRepair(
            parts.commitlog,
            parts.queues,
            self._applier,
            parts.damage,
            clock=parts.clock,
            sync=parts.sync,
        )
        parts.resources.callback(repair.close)
        self.repair = repair
        self.inspector = QueueInspector(parts.queues, parts.files, parts.commitlog)

    @classmethod
    def open(
        cls,
        directory: Path,
        config: StoreConfig,
        *,
        clock: Clock,
        wake: Wake,
        on_progress: OnProgress,
        machine: Machine = REAL_MACHINE,
    ) -> "CommitLogStore":
        """Opens a store, recovering it first if it was not closed in order.

        Args:
            directory: Directory of the files; made if need be.
            config: Settings.
            clock: Source of time, for labels.
            wake: Called from the flush thread when ``durable_offset`` has moved or the
                store has stopped; must not raise.
            on_progress: Called now and then while recovery goes on.
            machine: Disk and threads; tests pass a disk that fails.

        Raises:
            StoreLocked: Another process has the store open.
            StorageError: The store cannot be opened.
        """
        open_it = partial(
            open_parts,
            directory,
            config,
            clock=clock,
            wake=wake,
            on_progress=on_progress,
            machine=machine,
        )
        return cls(open_it(), config, reopen=lambda lock: open_it(lock=lock))

    def put(
        self,
        batches: Sequence[BatchToPut],
        store_timestamp: TimestampMs,
        *,
        despite_full: bool = False,
    ) -> list[PutResult]:
        """Implement ``MessageStore.put``."""
        commitlog, flusher, queues = self._log, self._flusher, self._queues
        # Every send runs this: conditions that are nearly always true are tested without a call.
        if self._closed or self._failure is not None or flusher.error is not None:
            self._check_writable()
        if self._cleaner.gate.refusal is not None and not despite_full:
            self._cleaner.gate.check()
        if queues.unwritten_bytes >= queues.most_unwritten_bytes:
            queues.write_oldest(TAILS_AT_ONCE)
        start = commitlog.end
        placed: list[Placed[ConsumeQueue]] = []
        try:
            append = commitlog.begin(store_timestamp)
            results = self._placement.place(
                append, batches, store_timestamp, commitlog.epoch, placed
            )
            if placed:
                append.write()
        except StorageError:
            self._placement.take_back(placed, start)
            raise
        if placed:
            self._put_batches += len(placed)
            self._put_messages += self._applier.add(placed)
            if flusher.durable_offset >= commitlog.retire_at:
                commitlog.retire(flusher.durable_offset)
            flusher.written(commitlog.end, commitlog.unsynced_fds)
        return results

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
        """Implement ``MessageStore.get``."""
        self._check_open()
        self._see()
        queue = self._queues.find(topic, queue_id)
        first, end = (0, 0) if queue is None else (queue.first, queue.visible)
        bounds = QueueOffset(first), QueueOffset(end)
        if queue_offset < first:
            return GetResult(GetStatus.OFFSET_TOO_SMALL, bounds[0], *bounds)
        if queue_offset > end:
            return GetResult(GetStatus.OFFSET_OVERFLOW, bounds[1], *bounds)
        if queue is None or queue_offset == end:
            return GetResult(GetStatus.NO_NEW_MESSAGE, bounds[1], *bounds)
        try:
            runs, following = find_batches(
                queue, self._files, queue_offset, end, max_bytes=max_bytes, tag_hashes=tag_hashes
            )
            if not runs:
                return GetResult(GetStatus.NO_MATCHED_MESSAGE, QueueOffset(following), *bounds)
            data, good, damaged = read_batches(self._log, topic, queue_id, runs)
            if verify:
                data, good = sound_batches(data)
        except CorruptRecord as error:
            raise self._repair(queue, queue_offset, str(error)) from error
        if good < len(runs):
            following = runs[good].start
            if not good:
                place = runs[0].commitlog_offset
                what = f"it leads to {place} in the log, where its batch is not, or not sound"
                raise self._repair(queue, following, what)
            del runs[good:]
        if damaged is not None:
            reason = "its tag hashes fail their check"
            self._repairs.begin(queue, damaged, reason, log_end=self._log.end)
        count = sum(run.stop - run.start for run in runs)
        return GetResult(GetStatus.FOUND, QueueOffset(following), *bounds, data, count)

    def _repair(self, queue: ConsumeQueue, queue_offset: int, reason: str) -> CorruptRecord:
        """Request a comparison of a queue with the log; return the error for readers meanwhile."""
        self._repairs.begin(queue, queue_offset, reason, log_end=self._log.end)
        where = f"offset {queue_offset} of queue {queue.queue_id} of {queue.topic!r}"
        return CorruptRecord(f"{where} is damaged: {reason}")

    def is_repairing(self, topic: str, queue_id: int) -> bool:
        """Implement ``MessageStore.is_repairing``."""
        queue = self._queues.find(topic, queue_id)
        return queue is not None and self._repairs.is_under_way(queue)

    def queue_bounds(self, topic: str, queue_id: int) -> tuple[QueueOffset, QueueOffset]:
        """Implement ``MessageStore.queue_bounds``."""
        self._check_open()
        self._see()
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            return QueueOffset(0), QueueOffset(0)
        return QueueOffset(queue.first), QueueOffset(queue.visible)

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: TimestampMs) -> QueueOffset:
        """Implement ``MessageStore.offset_by_time``."""
        self._check_open()
        self._see()
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            return QueueOffset(0)
        try:
            return QueueOffset(find_offset_by_time(queue, self._files, self._log, timestamp_ms))
        except CorruptRecord as error:
            raise self._repair(queue, queue.first, str(error)) from error

    def read_at(self, commitlog_offset: CommitLogOffset) -> bytes:
        """Implement ``MessageStore.read_at``."""
        self._check_open()
        end = self._log.end
        if self._shown_to is not None:
            end = min(end, max(self._shown_to(), self._shown_before))
        if not self._log.start <= commitlog_offset < end:
            raise OffsetOutOfRange(f"{commitlog_offset} is not between {self._log.start} and {end}")
        try:
            header = read_header(self._log.read(commitlog_offset, HEADER_SIZE))
            data = self._log.read(commitlog_offset, header.total_size)
            self._log.check.batch(data, commitlog_offset)
        except (CorruptBatch, CorruptRecord) as error:
            raise CorruptRecord(f"no good batch begins at {commitlog_offset}: {error}") from error
        return data

    def producer_window(self, topic: str, queue_id: int, producer_id: int) -> list[StoredBatch]:
        """Implement ``MessageStore.producer_window``."""
        self._check_open()
        return self._parts.states.window((topic, queue_id, producer_id))

    def queues(self, topic: str) -> list[int]:
        """Implement ``MessageStore.queues``."""
        self._check_open()
        queues = self._queues.by_topic.get(topic, {})
        return sorted(queue_id for queue_id, queue in queues.items() if queue.end)

    def topics(self) -> list[str]:
        """Implement ``MessageStore.topics``."""
        self._check_open()
        return [
            topic
            for topic, queues in self._queues.by_topic.items()
            if any(queue.end for queue in queues.values())
        ]

    def delete_topic(self, topic: str) -> None:
        """Implement ``MessageStore.delete_topic``."""
        self._check_writable()
        if topic not in self._queues.by_topic:
            return
        append = self._log.begin(self._parts.clock.wall_ms())
        deleted_at = append.mark(ControlKind.TOPIC_DELETED, topic.encode())
        append.write()
        self._notify_flusher()
        self._applier.delete_topic(topic, deleted_at)

    def _remove_later(self, directory: str) -> None:
        self._parts.chores.submit(lambda: shutil.rmtree(directory, ignore_errors=True))

    def durable_offset(self) -> CommitLogOffset:
        """Implement ``MessageStore.durable_offset``."""
        self._check_open()
        return CommitLogOffset(self._flusher.durable_offset)

    def epoch(self) -> int:
        """Implement ``MessageStore.epoch``."""
        return self._log.epoch

    def cut_offset(self, topic: str, queue_id: int, epoch: int) -> QueueOffset | None:
        """Implement ``MessageStore.cut_offset``."""
        self._check_open()
        cut = self._parts.epochs.lost_since(epoch)
        if epoch < self._log.epoch:
            # If the newest epoch has no record yet, its first one will begin there.
            cut = self._log.end if cut is None else min(cut, self._log.end)
        if cut is None:
            return None
        queue = self._queues.find(topic, queue_id)
        return QueueOffset(0 if queue is None else first_at_or_behind(queue, self._files, cut))

    def keep_from(self, holder: str, commitlog_offset: CommitLogOffset) -> None:
        """Implement ``MessageStore.keep_from``."""
        self._cleaner.keep_from[holder] = commitlog_offset

    def show_to(self, position: Callable[[], int] | None) -> None:
        """Implement ``MessageStore.show_to``."""
        self._shown_to, self._applier.shows_later = position, position is not None
        self._shown_before = self._log.end
        if position is None:
            self._applier.see(self._log.end)

    def retention_wish(self) -> CommitLogOffset:
        """Implement ``MessageStore.retention_wish``."""
        return CommitLogOffset(self._cleaner.retention_offset)

    def take_forced_moves(self) -> list[QueueMove]:
        """Implement ``MessageStore.take_forced_moves``."""
        moves = self._cleaner.forced_moves
        if not moves:
            return []
        self._cleaner.forced_moves = {}
        return list(moves.values())

    def read_raw(
        self,
        start: CommitLogOffset,
        *,
        max_bytes: int,
        stop: CommitLogOffset | None = None,
        whole_groups: bool = True,
    ) -> LogChunk:
        """Implement ``ReplicableLog.read_raw``."""
        self._check_open()
        stop = CommitLogOffset(self._log.end) if stop is None else stop
        return self._log.read_raw(start, max_bytes, stop, whole_groups=whole_groups)

    def append_raw(self, chunk: LogChunk) -> None:
        """Implement ``ReplicableLog.append_raw``."""
        if self._closed or self._failure is not None or self._flusher.error is not None:
            self._check_writable()
        if self._cleaner.gate.refusal is not None and not self._cleaner.retention_offset:
            # Retention that waits for a holder of the log waits for more of it: that makes room.
            self._cleaner.gate.check()
        if self._queues.unwritten_bytes >= self._queues.most_unwritten_bytes:
            self._applier.make_room()
        records = self._log.check_chunk(chunk)
        if not records:
            return
        self._log.append_raw(chunk)
        self._notify_flusher()
        try:
            for record in records:
                self._applier.apply(record)
        except (StorageError, OSError) as error:
            # The log has records that queues lack; the next start adds them.
            self._failure = f"records were added that cannot be applied: {error}"
            log.critical("the store stops: %s", self._failure)
            raise StoreClosed(self._failure) from error

    def truncate(self, end_offset: CommitLogOffset) -> None:
        """Implement ``ReplicableLog.truncate``."""
        self._check_writable()
        if end_offset == self._log.end:
            return
        self._log.read_raw(end_offset, 0, self._log.end)
        end_offset = CommitLogOffset(self._log.group_start(end_offset))
        keep_cut(
            self._parts.directory / CUT_FILES,
            self._log.read_some,
            end_offset,
            self._log.end,
            epoch=self._log.recorded_epoch,
        )
        self._parts.tail_cut.begin(end_offset)
        lock, cleaner = self._parts.lock, self._cleaner
        self._close_parts()
        try:
            self._take_over(self._reopen(lock))
        except BaseException as error:
            self._closed = True  # the next start completes the cut
            if isinstance(error, StorageError):
                raise StoreClosed(f"the log cannot be cut: {error}") from error
            raise
        self._cleaner.configure(cleaner.config)  # changed, maybe, since the store was opened
        self._cleaner.keep_from = cleaner.keep_from
        self._cleaner.forced_moves = cleaner.forced_moves

    def begin_epoch(self, epoch: int, note: bytes = b"") -> None:
        """Implement ``ReplicableLog.begin_epoch``."""
        self._check_writable()
        self._log.begin_epoch(epoch, note)
        self._log.begin(self._parts.clock.wall_ms()).write()
        self._notify_flusher()

    def epochs(self) -> Sequence[EpochStart]:
        """Implement ``ReplicableLog.epochs``."""
        # The table is on the disk before the first record of an epoch is, and a power cut or a
        # full disk may take that record. The winner of an election by an epoch must have one.
        starts, end = self._parts.epochs.starts, max(self._log.end, self._log.start + 1)
        return starts[: bisect_left(starts, end, key=attrgetter("start_offset"))]

    def log_end(self) -> CommitLogOffset:
        """Implement ``ReplicableLog.log_end``."""
        return CommitLogOffset(self._log.end)

    def identity(self) -> LogIdentity:
        """Implement ``ReplicableLog.identity``."""
        self._check_open()
        commitlog = self._log
        proof, epochs = commitlog.key.proof(), list(self.epochs())
        return LogIdentity(commitlog.store_id, proof, commitlog.start, commitlog.end, epochs)

    def beginning(self) -> LogStart:
        """Implement ``ReplicableLog.beginning``."""
        self._check_open()
        start = self._log.start
        queues = [
            QueueStart(queue.topic, queue.queue_id, queue.end)
            for queue in self._queues
            if queue.end and first_at_or_behind(queue, self._files, start) == queue.end
        ]
        return LogStart(
            self._log.key.secret,
            self._log.store_id,
            self._log.segments.segment_size,
            start,
            [one for one in self.epochs() if one.start_offset <= start],
            queues,
        )

    def tick(self, now_ms: int) -> bool:
        """Implement ``MessageStore.tick``."""
        self._check_writable()
        self._check_place()
        self._see()
        self._log.prepare_ahead()
        more = self._write_tails()
        more = self._repairs.step() or more
        more = self._cleaner.tick(now_ms) or more
        self._parts.epochs.tick(now_ms, self._parts.chores.submit)
        try:
            self._log.check_files(now_ms)
            return self._checkpointer.tick(now_ms) or more
        except StorageError as error:
            self._failure = str(error)
            log.critical("the store stops: %s", error)
            raise StoreClosed(self._failure) from error

    def _write_tails(self) -> bool:
        """Writes some consume queues if they hold much in memory; True if there is more."""
        try:
            more = not self._queues.write_large()
            if self._queues.crowded and not self._queues.write_oldest(TAILS_AT_ONCE):
                more = True
        except StorageError as error:
            if not self._tails_stuck:
                log.error("consume queues stay in memory: %s", error)
            self._tails_stuck = True
            return False
        self._tails_stuck = False
        return more

    def stats(self) -> StoreStats:
        """Implement ``MessageStore.stats``."""
        self._check_open()
        segments = self._log.segments
        recovered, cleaner = self._parts.recovered, self._cleaner
        return StoreStats(
            backend="commitlog",
            disk_bytes=segments.disk_bytes,
            segments=len(segments),
            min_commitlog_offset=self._log.start,
            max_commitlog_offset=self._log.end,
            durable_offset=self._flusher.durable_offset,
            topics=len(self._queues.by_topic),
            queues=len(self._queues),
            put_batches=self._put_batches,
            put_messages=self._put_messages,
            duplicates=self._placement.duplicates,
            unwritten_queue_bytes=self._queues.unwritten_bytes,
            flushes=self._flusher.flushes,
            flush_errors=int(self._flusher.error is not None or self._failure is not None),
            epoch=self._log.epoch,
            store_id=self._log.store_id,
            started_clean=self._parts.started_clean,
            recovered_bytes=recovered.read_bytes,
            cut_bytes=recovered.cut_bytes,
            damaged=self._parts.damage.ranges,
            writable=self._stopped_by() is None,
            oldest_timestamp=cleaner.oldest_timestamp,
            disk_used_percent=0.0 if cleaner.space is None else cleaner.space.used_percent,
            disk_full=cleaner.gate.refusal is not None or self._log.refusal is not None,
            deleted_segments=cleaner.deleted_segments,
            deleted_bytes=cleaner.deleted_bytes,
            forcibly_deleted_segments=cleaner.forced_segments,
            clock_jumps=cleaner.age_clock.jumps,
            mapped_bytes=self._log.maps.mapped_bytes,
            log_views=self._log.maps.views,
            held_bytes=self._log.maps.held_bytes,
        )

    def wait_for_chores(self) -> None:
        """Blocks until the helper thread has done all requested tasks; for tests."""
        if not self._closed:
            self._parts.chores.submit(lambda: None).result()

    def checkpointed_through(self) -> CommitLogOffset:
        """Return the commit-log offset before which no kind of crash requires reading again."""
        return CommitLogOffset(self._checkpointer.queues_synced_through)

    def close(self) -> None:
        """Implement ``MessageStore.close``."""
        if self._closed:
            return
        self._closed = True
        self._flusher.close()
        self._parts.chores.close()
        if self._stopped_by() is None:
            try:
                self._checkpointer.close()
            except StorageError as error:
                log.error("the store was not closed in order, the next start recovers: %s", error)
        self._close_parts()
        self._parts.lock.release()

    def _close_parts(self) -> None:
        """Ends threads and closes files; the store is as after the death of the process."""
        self._flusher.close()
        self._parts.chores.close()
        self._parts.resources.close()

    def _see(self) -> None:
        """Lets consumers see the log up to its limit for them."""
        if self._shown_to is not None:
            self._applier.see(self._shown_to())

    def _durable(self) -> int:
        return self._flusher.durable_offset

    def _notify_flusher(self) -> None:
        flusher, commitlog = self._flusher, self._log
        if flusher.durable_offset >= commitlog.retire_at:
            commitlog.retire(flusher.durable_offset)
        flusher.written(commitlog.end, commitlog.unsynced_fds)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store was closed")

    def _check_writable(self) -> None:
        self._check_open()
        reason = self._stopped_by()
        if reason is not None:
            raise StoreClosed(f"the store has stopped: {reason}")

    def _check_place(self) -> None:
        try:
            self._parts.lock.check()
        except StoreLocked as error:
            self._failure = str(error)
            log.critical("the store stops: %s", error)
            raise StoreClosed(self._failure) from error

    def _stopped_by(self) -> str | None:
        error = self._flusher.error
        return self._failure if error is None else f"the commit log cannot be synced: {error}"
