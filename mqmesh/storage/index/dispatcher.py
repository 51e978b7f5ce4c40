"""Follows the commit log for the index process, a bounded step at a time.

The newest records come first. Only when these are done, or nearly so, are gaps filled (segments
whose index is missing or not complete) and full segments sealed. Every query gets the number of
bytes that are not indexed yet.
"""

import logging
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final

import msgspec

from mqmesh.errors import CorruptRecord, DiskFull, StorageError
from mqmesh.storage.files.cpu_pressure import CpuPressure
from mqmesh.storage.index.dispatcher_reader import LogReader
from mqmesh.storage.index.merge import runs_to_merge
from mqmesh.storage.index.message_index import MessageIndex
from mqmesh.storage.index.part import IndexPart, LogSlice, PartHead
from mqmesh.storage.log.segments import FoundSegments, Segment
from mqmesh.storage.log.store_key import StoreKey
from mqmesh.units import MIB

log = logging.getLogger(__name__)

CLOSE_BYTES: Final = 16 * MIB
"""Lag of the index below which other work is done in turn with the newest records."""
CATCH_UP_MS: Final = 1_000
"""Time for which the log counts as growing fast after the index trailed it by more than a step."""
SMALL_STEPS: Final = 8
"""A step that is smaller than usual by this factor is hashed at once even then."""
PAUSES: Final = 15
"""While the log grows and the machine is crowded, other work is followed by a pause so many
times as long: it may wait, and producers and consumers should not notice it."""
BUSY_MS: Final = 1_000
"""Time for which the log counts as growing after it grew."""
REFRESH_MS: Final = 5_000
"""Interval of checks for vanished segments."""
RETRY_MS: Final = 1_000
"""Pause after a full disk, or another error of the system's."""
OTHER_RETRY_MS: Final = 30_000
"""Pause after an error in work that may wait."""

Room = Callable[[], bool]
"""True while the disk has room for more index."""

_Work = Generator[None, None, None]


class DispatcherStats(msgspec.Struct, frozen=True):
    """Numbers about the work.

    Attributes:
        indexed_through: Commit-log offset to which the newest messages are indexed.
        missing_bytes: Log bytes that queries do not see yet: behind ``indexed_through``, and in
            gaps.
        waiting: Reason why no work is done at the moment, "" if there is none.
        segments: Segments with an index.
        sealed: Sealed segments among them.
        disk_bytes: Size of the index.
        batches: Batches indexed since the start.
        discarded: Parts removed because they could not be trusted.
        skipped_bytes: Damaged log bytes that were skipped.
        texts: Stretches of keys that are not sorted yet.
        at_rest: Everything is indexed, sorted and merged.
    """

    indexed_through: int = 0
    missing_bytes: int = 0
    waiting: str = ""
    segments: int = 0
    sealed: int = 0
    disk_bytes: int = 0
    batches: int = 0
    discarded: int = 0
    skipped_bytes: int = 0
    texts: int = 0
    at_rest: bool = False


class Dispatcher:
    """Brings an index up to its log, and keeps it there. One thread at a time.

    Attributes:
        position: Commit-log offset to which the newest messages are indexed.
        visible: Commit-log offset up to which the log may be read.
        minimum: Commit-log offset before which the log is removed.
        deletions: For each topic that was ever deleted, the offset from which on it counts.
        reader: Reader of the log.
    """

    def __init__(
        self,
        log_directory: Path,
        index: MessageIndex,
        *,
        key: StoreKey,
        store_id: int,
        boot_id: bytes,
        step_bytes: int,
        room: Room,
    ) -> None:
        """Reads nothing yet; see ``begin``.

        Args:
            log_directory: Directory of the segments.
            index: The index, which the caller still owns.
            key: Key of the store that the log belongs to.
            store_id: Identity of the store.
            boot_id: Boot id of the running system; zeros if it has none.
            step_bytes: Approximate number of log bytes to read in one step.
            room: Called before anything is written.

        Raises:
            StorageError: The directory cannot be read.
        """
        self._index = index
        self._store_id = store_id
        self._step_bytes = step_bytes
        self._room = room
        self._boot_id = boot_id
        self.segments = FoundSegments(log_directory)
        self.reader = LogReader(self.segments, key=key, store_id=store_id)
        self.position = 0
        self.visible = 0
        self.minimum = 0
        self.deletions: dict[str, int] = {}
        self._last_offset = -1
        self._last_mark = b""
        self._through: dict[int, int] = {}
        self._started = False
        self._work: _Work | None = None
        self._moved_ms = 0
        self._hurried_ms = -CATCH_UP_MS
        self._other_due_ms = 0
        self._did_other = False
        self._is_oldest_turn = False
        self._at_rest = False
        self._batches = 0
        self._skipped_bytes = 0
        self._disk_bytes = 0
        self._refresh_due_ms = 0
        self._retry_due_ms = 0
        self._waiting = ""

    # ---- Reports of the broker ---------------------------------------------------------

    def advance(self, visible: int, minimum: int, now_ms: int) -> None:
        """Let the log be read up to an offset; the first call compares the index with the log.

        Args:
            visible: Commit-log offset behind a whole record. It goes back when the log is cut; by
                rule a cut reaches no record that was read here.
            minimum: Commit-log offset before which the log is removed.
            now_ms: Monotonic clock.

        Raises:
            StorageError: The log cannot be read.
        """
        newest = self.segments.find(self.visible) or self.segments.after(self.visible)
        if newest is None or visible > newest.end or now_ms >= self._refresh_due_ms:
            self._refresh_due_ms = now_ms + REFRESH_MS
            self.segments.refresh()
            self._drop_vanished()
            self._disk_bytes = self._index.disk_bytes
        if visible > self.visible:
            self._moved_ms = now_ms
        self.visible = visible
        self.minimum = max(self.minimum, minimum)
        if not self._started:
            self._started = True
            self._begin()
        else:
            self._check_course()

    def _check_course(self) -> None:
        """Compares the index with the log again if the log was cut in its indexed part.

        Only confirmed records are read, which no cut reaches except that of an election that may
        lose messages. Offsets do not show a cut, since the log may be as long again by now. The
        last record does: a cut removes it, and no other record has its checksum.
        """
        mark = self._last_mark if self._last_offset < 0 else self.reader.mark_at(self._last_offset)
        is_removed = not mark and self._last_offset < self.visible  # its whole segment, expired
        if mark == self._last_mark or is_removed:
            return
        log.error(
            "the log was cut where the index had read it, which only an election may do that "
            "loses messages: the record at %d is not there any more; the index had come to %d, "
            "the log ends at %d. The index is compared with the log again",
            self._last_offset,
            self.position,
            self.visible,
        )
        self._drop_work()
        self.reader.forget_files()
        self.segments.refresh()
        self._drop_vanished()
        self._through.clear()
        self.deletions.clear()
        self._begin()

    def _begin(self) -> None:
        """Discards all parts that do not fit this log as it is now."""
        self._last_offset = -1
        for start in self._index.starts:
            part = self._index.part(start)
            if part is None:
                continue  # discarded, or to be checked first
            reason = self._mistrust(part, sealed=self._index.is_sealed(start))
            if reason:
                self._index.discard(start, reason)
            else:
                self._note(part)
        newest = self._segment_before(self.visible)
        if newest is not None:
            self.position = newest.start + self._through.get(newest.start, 0)

    def _mistrust(self, part: IndexPart, *, sealed: bool) -> str:
        """Return the reason why a part does not belong to this log, "" if it does."""
        head = part.head
        if head.store_id != self._store_id:
            return f"it is of store {head.store_id:#x}, not {self._store_id:#x}"
        if not sealed and (head.boot_id != self._boot_id or not any(self._boot_id)):
            return "the system was restarted, and it was not synced"
        if head.segment_start + head.through > self.visible:
            return f"it goes to {head.segment_start + head.through}, the log to {self.visible}"
        segment = self.segments.find(head.segment_start)
        if segment is None or segment.start != head.segment_start:
            return "its segment is gone"
        if head.complete and segment.start + head.through != segment.end:
            return f"the segment has {segment.size} bytes, not {head.through}"
        if head.last_place >= 0:
            offset = head.segment_start + head.last_place
            if offset >= self.visible or self.reader.mark_at(offset) != head.last_mark:
                return f"the log has another record at {offset}"
        return ""

    def _note(self, part: IndexPart) -> None:
        head = part.head
        last_offset = head.segment_start + head.last_place
        if head.last_place >= 0 and last_offset > self._last_offset:
            self._last_offset, self._last_mark = last_offset, head.last_mark
        self._through[head.segment_start] = head.through
        for deletion in head.deletions:
            known = self.deletions.get(deletion.topic, -1)
            self.deletions[deletion.topic] = max(known, deletion.commitlog_offset)

    def _segment_before(self, offset: int) -> Segment | None:
        """Return the segment that an offset ends in: for a boundary, the one before."""
        found = None
        for segment in self.segments:
            if segment.start < offset or found is None:
                found = segment
        return found

    def _drop_vanished(self) -> None:
        if not len(self.segments):
            return  # without any file there are no segments to compare with
        starts = {segment.start for segment in self.segments}
        gone = [start for start in self._index.starts if start not in starts]
        for start in gone:
            self._index.remove(start)
            self._through.pop(start, None)
        if gone:
            log.info("the index of %d segments is gone with them", len(gone))
            self.reader.forget_files()

    def lose(self, start: int, reason: str) -> None:
        """Discard a part that turned out to be damaged; it is made again in time."""
        self._index.discard(start, reason)
        self._through.pop(start, None)
        segment = self.segments.find(start)
        if segment is not None and start < self.position < segment.end:
            self.position = start  # otherwise it is a gap from now on

    # ---- The work --------------------------------------------------------------------

    @property
    def lag_bytes(self) -> int:
        """Number of bytes by which the index trails the log."""
        return max(0, self.visible - self.position)

    def step(self, now_ms: int) -> int | None:
        """Does a piece of work, of some tens of milliseconds at most.

        Args:
            now_ms: Monotonic clock.

        Returns:
            Time in ms after which the next step is wanted; None if there is nothing to do before
            the log goes on.
        """
        if not self._started:
            return None
        if now_ms < self._retry_due_ms:
            return self._retry_due_ms - now_ms
        if not self._room():
            return self._wait(now_ms, "the disk is full")
        try:
            delay_ms = self._step(now_ms)
        except StorageError as error:
            self._drop_work()
            return self._wait(now_ms, str(error))
        if self._waiting:
            log.warning("indexing goes on")
            self._waiting = ""
        return delay_ms

    def _wait(self, now_ms: int, reason: str) -> int:
        if not self._waiting:
            log.error("indexing waits: %s", reason)
        self._waiting = reason
        self._retry_due_ms = now_ms + RETRY_MS
        return RETRY_MS

    def _step(self, now_ms: int) -> int | None:
        lag = self.lag_bytes
        if lag > self._step_bytes:
            self._hurried_ms = now_ms
        is_hurried = now_ms - self._hurried_ms < CATCH_UP_MS
        # While there is both, they take turns.
        is_turn = not lag or (lag < CLOSE_BYTES and not self._did_other)
        self._did_other = self._at_rest = False
        if is_turn and now_ms >= self._other_due_ms:
            # If it fails it is not tried again at once: sealing a large part writes much.
            self._other_due_ms = now_ms + OTHER_RETRY_MS
            pressure = CpuPressure()
            did_something = self._other_work()
            self._other_due_ms = 0
            self._did_other = did_something
            if did_something:
                took_ms, is_crowded = pressure.end()
                if is_crowded and now_ms - self._moved_ms < BUSY_MS:
                    self._other_due_ms = now_ms + (1 + PAUSES) * took_ms
                return 0
            self._at_rest = True
        if lag:
            # While the log grows fast, all other processes need the machine.
            self._follow(as_text=is_hurried and lag * SMALL_STEPS > self._step_bytes)
            return 0
        return max(0, self._other_due_ms - now_ms) or None

    def _follow(self, *, as_text: bool) -> None:
        """Indexes the next records."""
        self._check_course()
        if not self.lag_bytes:
            return
        segment = self.segments.find(self.position) or self.segments.after(self.position)
        if segment is None or segment.start >= self.visible:
            # The file of these records was removed.
            self._skipped_bytes += self.lag_bytes
            self.position = self.visible
            return
        if segment.start > self.position:
            self._skipped_bytes += segment.start - self.position
        self.position = self._extend(segment, as_text=as_text)

    def _extend(self, segment: Segment, *, as_text: bool = False) -> int:
        """Indexes a step of a segment; returns the commit-log offset that it then reaches."""
        start = segment.start
        part = self._index.part(start)
        if part is None:
            if start in self._index.suspects:
                # Its check may take a while, and the log does not wait for it.
                self._index.discard(start, "it was not checked yet")
            part = self._index.create(
                PartHead(store_id=self._store_id, boot_id=self._boot_id, segment_start=start)
            )
        position = start + part.head.through
        if part.head.complete or position >= self.visible:
            self._through[start] = part.head.through
            return min(position, max(self.visible, start))
        learned = self.reader.read_slice(
            segment,
            position,
            self.visible,
            epoch=part.head.epoch,
            most_bytes=self._step_bytes,
            as_text=as_text,
        )
        self._append(start, part, learned)
        return learned.stop

    def _append(self, start: int, part: IndexPart, learned: LogSlice) -> None:
        try:
            part.append(learned)
        except DiskFull:
            raise
        except StorageError as error:
            # One error ends the life of an environment: the content of its file is unknown.
            self.lose(start, str(error))
            raise
        self._note(part)
        self._batches += learned.batches
        self._skipped_bytes += learned.skipped_bytes

    def _other_work(self) -> bool:
        """Do a step of checking, filling a gap or sealing; return False if there is nothing."""
        if self._work is None:
            self._work = self._next_work()
            if self._work is None:
                return False
        try:
            next(self._work)
        except StopIteration:
            self._work = None
        return True

    def _drop_work(self) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            work.close()  # closes its files

    def _next_work(self) -> _Work | None:
        suspects = self._index.suspects
        if suspects:
            return self._check(suspects[-1])
        gap = self._newest_gap()
        if gap is not None:
            return self._fill(gap)
        # The newest segment and the oldest take turns: neither may wait for ever.
        self._is_oldest_turn = not self._is_oldest_turn
        starts = self._index.starts
        for start in starts if self._is_oldest_turn else reversed(starts):
            if not self._index.is_sealed(start):
                part = self._index.part(start)
                if part is not None and part.head.texts:
                    return self._tidy(start)
                if part is not None and part.head.complete:
                    return self._seal(start)
                if part is not None and runs_to_merge(part.head.runs):
                    return self._merge(start)
        return None

    def _newest_gap(self) -> Segment | None:
        found = None
        for segment in self.segments:
            if segment.end <= self.position and self._through.get(segment.start, 0) < segment.size:
                found = segment
        return found

    def _check(self, start: int) -> _Work:
        yield from self._index.check(start)
        part = self._index.part(start)
        if part is None:
            return
        reason = self._mistrust(part, sealed=True)
        if reason:
            self._index.discard(start, reason)
        else:
            self._note(part)

    def _fill(self, segment: Segment) -> _Work:
        self._extend(segment)
        yield

    def _tidy(self, start: int) -> _Work:
        part = self._index.part(start)
        assert part is not None
        try:
            part.tidy()
        except DiskFull:
            raise
        except StorageError as error:
            self.lose(start, str(error))
        yield

    def _merge(self, start: int) -> _Work:
        part = self._index.part(start)
        assert part is not None
        try:
            yield from self._index.merge(start, runs_to_merge(part.head.runs))
        except DiskFull:
            raise
        except StorageError as error:
            self.lose(start, str(error))

    def _seal(self, start: int) -> _Work:
        try:
            yield from self._index.seal(start)
        except CorruptRecord as error:
            self.lose(start, str(error))
            return
        if self._index.is_sealed(start):
            log.info("the index of the segment at %d is sealed", start)

    # ---- Metrics ---------------------------------------------------------------------

    @property
    def missing_bytes(self) -> int:
        """Log bytes that queries do not see yet."""
        missing = self.lag_bytes
        for segment in self.segments:
            if segment.end <= self.position:
                missing += max(0, segment.size - self._through.get(segment.start, 0))
        return missing

    def stats(self) -> DispatcherStats:
        """Numbers about the work; cheap enough for ten calls a second."""
        starts = self._index.starts
        return DispatcherStats(
            indexed_through=self.position,
            missing_bytes=self.missing_bytes,
            waiting=self._waiting,
            segments=len(starts),
            sealed=sum(map(self._index.is_sealed, starts)),
            disk_bytes=self._disk_bytes,
            batches=self._batches,
            discarded=self._index.discarded,
            skipped_bytes=self._skipped_bytes,
            texts=sum(len(part.head.texts) for part in self._index.open_parts),
            at_rest=self._at_rest and not self.lag_bytes,
        )

    def close(self) -> None:
        """Closes the log's files; the index stays open."""
        self._drop_work()
        self.reader.close()
