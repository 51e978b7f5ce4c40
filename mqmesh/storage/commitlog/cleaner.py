"""Removes what retention has chosen, in steps beside all other work.

One pass: let all consume queues begin behind the chosen segments; note that the segments will be
removed; take them off the list and unlink their files; let a checkpoint record it; remove consume
queue files without any entry left. Readers are led away from the segments before these are removed,
and a descriptor that is still open keeps the bytes that it reads.

A kill at any step does no harm. The list of files in the directory is what counts for the log, and
only its oldest files are ever removed. If a queue table has an earlier beginning of consume queues,
opening the store moves it on. Their files still exist, since they are removed only after a table
has recorded the later beginning.
"""

import logging
import os
import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from mqmesh.batch.record_batch import HEADER_SIZE, MAGIC, read_header
from mqmesh.clock import Clock
from mqmesh.errors import CorruptBatch, CorruptRecord, StorageError
from mqmesh.storage.commitlog.checkpointer import Checkpointer
from mqmesh.storage.commitlog.cut_files import NAME as CUT_FILES
from mqmesh.storage.commitlog.cut_files import remove_old_cuts
from mqmesh.storage.commitlog.retention import (
    HOUR_MS,
    AgeClock,
    SealedFile,
    Verdict,
    WriteGate,
    files_to_delete,
    hours_of,
)
from mqmesh.storage.files.atomic_file import sync_directory
from mqmesh.storage.files.chores import Chores
from mqmesh.storage.files.disk_space import Space, SpaceOf
from mqmesh.storage.files.open_files import OpenFiles
from mqmesh.storage.interface import CleaningReport, GoingSegment, QueueMove, StoreConfig
from mqmesh.storage.log.commitlog import CommitLog
from mqmesh.storage.log.control_record import CONTROL_RECORD_SIZE, decode_control_record
from mqmesh.storage.log.flush import Flusher
from mqmesh.storage.log.log_start import NAME, write_log_start
from mqmesh.storage.log.record import record_size
from mqmesh.storage.log.segments import STAT_BLOCK_BYTES, Segment
from mqmesh.storage.queues.consume_queue import ConsumeQueue
from mqmesh.storage.queues.consume_queues import ConsumeQueues
from mqmesh.storage.queues.queue_minimum import first_at_or_behind, remove_unused
from mqmesh.units import QueueOffset

log = logging.getLogger(__name__)

T = TypeVar("T")

SPACE_EVERY_MS: Final = 100
"""Interval at which the room on the disk is measured."""
MOST_WORKING_NS: Final = 2_000_000
"""Limit of one step, in ns; the caller has other work to do."""


class Cleaner:
    """Watches the disk, and runs a pass now and then.

    Attributes:
        config: Limits and times.
        space: The room on the disk, None while it is not known.
        gate: Refuses writes while there is too little.
        age_clock: Clock for the ages of files.
        keep_from: Commit-log offsets at and behind which nothing is removed, by name of the holder.
        retention_offset: Commit-log offset up to which the log would be deleted without
            ``keep_from``; 0 if nothing would.
        oldest_timestamp: Wall clock, in ms, at which the first record of the log was written; 0 if
            that is not known.
        deleted_segments: Segments removed so far.
        deleted_bytes: Size of these segments.
        forced_segments: Segments among them that were removed before their time.
        forced_moves: Beginnings of queues before and after such a removal, by topic and queue; the
            caller removes those that it has taken note of.
    """

    def __init__(
        self,
        *,
        directory: Path,
        config: StoreConfig,
        commitlog: CommitLog,
        queues: ConsumeQueues,
        files: OpenFiles,
        flusher: Flusher,
        checkpointer: Checkpointer,
        chores: Chores,
        clock: Clock,
        space_of: SpaceOf,
        last_alive_ms: int | None,
    ) -> None:
        """Starts between two passes, and measures the room on the disk.

        Args:
            directory: Directory of the log's segments.
            config: Limits and times.
            commitlog: The log.
            queues: Consume queues.
            files: Descriptors for reading.
            flusher: Reports how far the log is durable.
            checkpointer: Makes the new beginnings durable.
            chores: Thread that unlinks.
            clock: Clock for ages and hours.
            space_of: Measures the free space of the disk.
            last_alive_ms: Wall clock of the last checkpoint of the run before.
        """
        self._directory = directory
        self.config = config
        self._log = commitlog
        self._queues = queues
        self._files = files
        self._flusher = flusher
        self._checkpointer = checkpointer
        self._chores = chores
        self._clock = clock
        self._space_of = space_of
        self.age_clock = AgeClock(
            clock.monotonic_ms(),
            clock.wall_ms(),
            reserved_ms=config.file_reserved_time * HOUR_MS,
            last_alive_ms=last_alive_ms,
        )
        self.space: Space | None = None
        self.gate = WriteGate(config.disk_space_warning_level_ratio)
        self.keep_from: dict[str, int] = {}
        self.retention_offset = 0
        self.oldest_timestamp = 0
        self._oldest_at = -1
        self.deleted_segments = 0
        self.deleted_bytes = 0
        self.forced_segments = 0
        self.forced_moves: dict[tuple[str, int], QueueMove] = {}
        self._blind = False
        self._pass: Iterator[bool] | None = None
        self._report: CleaningReport | None = None
        self._look_ms: int | None = None
        self._next_ms: int | None = None
        self._look_at_disk()

    def configure(self, config: StoreConfig) -> None:
        """Implement ``Retention.configure``."""
        self.config = config
        self.age_clock.reserved_ms = config.file_reserved_time * HOUR_MS

    def tick(self, now_ms: int) -> bool:
        """Measures the disk when it is time, and does a step of a pass, or begins one.

        Returns:
            True when the next step need not wait for anything.
        """
        if self._look_ms is None or now_ms >= self._look_ms:
            self._look_ms = now_ms + SPACE_EVERY_MS
            self._look_at_disk()
            self._look_at_clock()
            self._look_at_oldest()
        if self._pass is None:
            if self._next_ms is None:
                # Never at once: an administrator who starts a broker on a full disk gets the time
                # to see why it is full before anything is removed by force.
                self._next_ms = now_ms + self.config.clean_resource_interval_ms
            if now_ms < self._next_ms:
                return False
            self._next_ms = now_ms + self.config.clean_resource_interval_ms
            self._chores.submit(
                partial(remove_old_cuts, self._directory.parent / CUT_FILES, self._clock.wall_ms())
            )
            verdict = self._decide()
            if not verdict.count:
                return False
            self._pass = self._steps(verdict)
        problem = ""
        try:
            return next(self._pass)
        except StopIteration:
            pass
        except (OSError, StorageError) as error:
            log.error("retention stops for now: %s", error)
            problem = str(error)
        self._pass = None
        if self._report is not None:
            self._report.finished, self._report.error = True, problem
            self._report = None
        return False

    def clean(self, *, dry_run: bool) -> CleaningReport | None:
        """Implement ``Retention.clean``."""
        if self._pass is not None:
            return None
        verdict = self._decide(hour=min(hours_of(self.config.delete_when)))
        going = self._sealed()[: verdict.count]
        report = CleaningReport(
            [GoingSegment(one.start, one.size) for one in going],
            verdict.reason or self._why_nothing(),
            verdict.forced,
        )
        if not going:
            report.finished = True
            return report
        self._report = report
        self._pass = self._look_ahead(verdict) if dry_run else self._steps(verdict)
        return report

    def _why_nothing(self) -> str:
        if self.retention_offset:
            holder = min(self.keep_from, key=self.keep_from.__getitem__)
            return f"{holder} needs the segments that would go"
        hours = self.config.file_reserved_time
        return f"no full segment is older than {hours} h (file_reserved_time)"

    def _look_ahead(self, verdict: Verdict) -> Iterator[bool]:
        """Run a pass that only finds out which queues would begin later."""
        assert self._report is not None
        following = self._log.segments.after(self._sealed()[verdict.count - 1].start)
        assert following is not None
        until_ns = self._clock.monotonic_ns() + MOST_WORKING_NS
        for queue in list(self._queues):
            if self._clock.monotonic_ns() >= until_ns:
                yield True
                until_ns = self._clock.monotonic_ns() + MOST_WORKING_NS
            try:
                first = first_at_or_behind(queue, self._files, following.start)
            except CorruptRecord as error:
                log.error("queue %d of %r: %s", queue.queue_id, queue.topic, error)
                continue
            if first != queue.first:
                self._report.moves.append(_move(queue, queue.first, first))

    def _look_at_disk(self) -> None:
        try:
            self.space = self._space_of(self._directory)
        except OSError as error:
            if not self._blind:
                log.error("the room on the disk is not known, retention by room rests: %s", error)
            self._blind = True
            return
        self._blind = False
        if self.gate.look(self.space):
            if self.gate.refusal is None:
                log.warning(
                    "the disk is %.1f %% full now, writing goes on", self.space.used_percent
                )
            else:
                log.error("writes are refused: %s", self.gate.refusal)

    def _look_at_oldest(self) -> None:
        start = self._log.start
        if start == self._oldest_at or start == self._log.end:
            return
        self._oldest_at, self.oldest_timestamp = start, 0
        with suppress(CorruptBatch, CorruptRecord, StorageError):
            if self._log.read(start, len(MAGIC)) == MAGIC:
                header = read_header(self._log.read(start, HEADER_SIZE))
                self.oldest_timestamp = header.store_timestamp
            else:
                size = record_size(self._log.read(start, CONTROL_RECORD_SIZE))
                self.oldest_timestamp = decode_control_record(
                    self._log.read(start, size)
                ).store_timestamp

    def _look_at_clock(self) -> int:
        clock, ages = self._clock, self.age_clock
        before = ages.jumps
        now_ms = ages.look(clock.monotonic_ms(), clock.wall_ms())
        if ages.jumps != before:
            log.warning("the wall clock has leaped; ages of log segments are measured without that")
        return now_ms

    def _decide(self, hour: int | None = None) -> Verdict:
        """Decide which segments go; ``hour`` stands for the time of day."""
        files = []
        sealed = self._sealed()
        for segment in sealed:
            try:
                found = os.stat(segment.path)
            except OSError as error:
                # No segment behind it may be removed before it.
                log.error("%s cannot be looked at: %s", segment.path, error)
                break
            size = found.st_blocks * STAT_BLOCK_BYTES
            files.append(SealedFile(size, found.st_mtime_ns // 1_000_000))
        if not files:
            return Verdict(0)
        if hour is None:
            hour = time.localtime(self._clock.wall_ms() / 1000).tm_hour
        # An unknown room does not count as full: then only the age decides.
        space = self.space if self.space is not None and not self._blind else Space(0, 1)
        verdict = files_to_delete(
            files, space, now_ms=self._look_at_clock(), hour=hour, config=self.config
        )
        return self._without_kept(verdict, sealed)

    def _without_kept(self, verdict: Verdict, sealed: list[Segment]) -> Verdict:
        count = verdict.count
        if self.keep_from:
            keep_from = min(self.keep_from.values())
            count = sum(segment.end <= keep_from for segment in sealed[:count])
        before, self.retention_offset = self.retention_offset, 0
        if count < verdict.count:
            self.retention_offset = sealed[verdict.count - 1].end
            if self.retention_offset != before:
                log.warning(
                    "%d log segments stay until %s has written anew what it needs of them: %s",
                    verdict.count - count,
                    min(self.keep_from, key=self.keep_from.__getitem__),
                    verdict.reason,
                )
        return Verdict(count, verdict.reason, verdict.forced) if count else Verdict(0)

    def _sealed(self) -> list[Segment]:
        """Return the segments that are full, durable and closed, up to the first that is not."""
        found = []
        # Without writes only this call closes segments that have become durable.
        self._log.retire(self._flusher.durable_offset)
        durable = min(self._flusher.durable_offset, self._log.end)
        for segment in self._log.segments:
            if segment.fd >= 0 or segment.end > durable:
                break
            found.append(segment)
        # The newest of the list is never one of them, else the log would have no file at all.
        return found if len(found) < len(self._log.segments) else found[:-1]

    def _steps(self, verdict: Verdict) -> Iterator[bool]:
        """Run one pass. Yields True for "go on when you like", False for "waiting"."""
        segments = self._log.segments
        going = self._sealed()[: verdict.count]
        following = segments.after(going[-1].start)
        assert following is not None
        moved: set[str] = set()
        yield from self._advance(following.start, moved, forced=verdict.forced)
        note = partial(write_log_start, self._directory.parent / NAME, following.start)
        yield from _wait(self._chores.submit(note))
        yield from self._remove_segments(len(going), verdict)
        if not moved:
            return
        # Only now: on a full disk removing the segments makes the room that the queue table needs.
        wanted = self._checkpointer.request()
        while self._checkpointer.finished < wanted:
            yield False
        for topic in moved:
            yield from self._remove_queue_files(topic)

    def _advance(self, log_start: int, moved: set[str], *, forced: bool) -> Iterator[bool]:
        """Moves the beginnings of queues; notes the topics whose queues have moved."""
        until_ns = self._clock.monotonic_ns() + MOST_WORKING_NS
        for queue in list(self._queues):
            if self._clock.monotonic_ns() >= until_ns:
                yield True
                until_ns = self._clock.monotonic_ns() + MOST_WORKING_NS
            if self._queues.find(queue.topic, queue.queue_id) is not queue:
                continue  # deleted meanwhile
            before = queue.first
            try:
                if self._queues.advance(queue, log_start):
                    moved.add(queue.topic)
                    if self._report is not None:
                        self._report.moves.append(_move(queue, before, queue.first))
                    if forced:
                        self._note_forced(queue, before)
            except CorruptRecord as error:
                # A read there makes the store repair the queue.
                log.error("queue %d of %r: %s", queue.queue_id, queue.topic, error)

    def _note_forced(self, queue: ConsumeQueue, before: int) -> None:
        place = queue.topic, queue.queue_id
        known = self.forced_moves.get(place)
        self.forced_moves[place] = QueueMove(
            *place,
            first_before=QueueOffset(before) if known is None else known.first_before,
            first=QueueOffset(queue.first),
        )

    def _remove_segments(self, count: int, verdict: Verdict) -> Iterator[bool]:
        segments = self._log.segments
        gone = segments.take_first(count)
        for segment in gone:
            self._files.close_path(segment.path)
        log.log(
            logging.ERROR if verdict.forced else logging.INFO,
            "%d log segments go%s, the log begins at %d now: %s",
            count,
            " before their time" if verdict.forced else "",
            self._log.start,
            verdict.reason,
        )
        for number, segment in enumerate(gone):
            try:
                yield from _wait(self._chores.submit(partial(self._unlink, segment.path)))
            except OSError:
                segments.put_back(gone[number:])
                raise
            self._log.maps.forget(segment)
            self.deleted_segments += 1
            self.forced_segments += verdict.forced
            self.deleted_bytes += segment.size

    def _unlink(self, path: str) -> None:
        os.unlink(path)
        # One after the other, else a power cut could leave a hole.
        sync_directory(self._directory)

    def _remove_queue_files(self, topic: str) -> Iterator[bool]:
        directory = self._queues.topic_directory(topic)
        firsts = {
            queue_id: min(queue.first, queue.written)
            for queue_id, queue in self._queues.by_topic.get(topic, {}).items()
        }
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return
        entries = self.config.mapped_file_size_consume_queue
        future = self._chores.submit(partial(remove_unused, fd, firsts, entries))
        for name in (yield from _wait(future)):
            self._files.close_path(f"{directory}/{name}")


def _move(queue: ConsumeQueue, before: int, first: int) -> QueueMove:
    return QueueMove(queue.topic, queue.queue_id, QueueOffset(before), QueueOffset(first))


def _wait(future: "Future[T]") -> Generator[bool, None, T]:
    while not future.done():
        yield False
    return future.result()
