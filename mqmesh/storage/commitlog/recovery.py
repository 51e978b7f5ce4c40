"""Finds the true end of the log, and brings everything derived from it up to there.

The log is read from the end of the queue table. Before the synced mark a record that fails its
checks is damage: recovery skips and reports it, and keeps the records behind it. Behind the mark it
is a torn tail: the log ends there, or at the marker of the group that the record belongs to, and
the tail is cut durably. If the system has not restarted, no page was lost; only then a bad record
is damage there, too, if good records follow it and its group. Without a checkpoint it is unknown
which of that is true: then no record counts of a group of the last segments that is not whole. A
store that was closed in order is opened in the same way, except that there is nothing to read.

First, the pages in the page cache behind the synced mark are compared with the disk, which lacks
them after a failed sync; a segment that differs is copied into a new file.

A crash in the middle of recovery does no harm: nothing is changed before the end was found (a copy
of a segment has the same content), and the steps of the cut are in an order that can be repeated.
"""

import logging
import os
import shutil
from collections.abc import Callable
from typing import Final

import msgspec

from mqmesh.clock import Clock
from mqmesh.errors import CorruptRecord, StorageError
from mqmesh.storage.commitlog.checkpoint import Checkpoint
from mqmesh.storage.commitlog.damage import DamageList
from mqmesh.storage.commitlog.log_applier import LogApplier
from mqmesh.storage.commitlog.rewriting import rewrite
from mqmesh.storage.commitlog.shortening import shorten
from mqmesh.storage.files.open_files import OpenFiles
from mqmesh.storage.interface import OnProgress, RecoveryProgress
from mqmesh.storage.log.epochs import EpochTable
from mqmesh.storage.log.record import RecordGroup, begins_group
from mqmesh.storage.log.scan import EVERYTHING, Damaged, LogScanner
from mqmesh.storage.log.segments import Segments
from mqmesh.storage.log.store_key import StoreKey
from mqmesh.storage.log.tail_cut import TailCut
from mqmesh.storage.queues.consume_queues import ConsumeQueues, doubt_files
from mqmesh.storage.queues.producer_states import ProducerStates
from mqmesh.storage.queues.queue_table import QueueTable
from mqmesh.units import GIB, MIB

log = logging.getLogger(__name__)

PROGRESS_EVERY_BYTES: Final = 8 * MIB
PROGRESS_EVERY_RECORDS: Final = 2048
"""Records between two reports of progress, or bytes: some ten milliseconds."""
SAVE_EVERY_BYTES: Final = 1 * GIB
"""Largest number of bytes of the log that are read before progress is saved."""

SaveProgress = Callable[[int, int], None]
"""Saves the derived state as complete to an offset; the second argument is the epoch."""


class Recovered(msgspec.Struct, frozen=True):
    """Result of recovery.

    Attributes:
        end: Commit-log offset of the next record.
        epoch: Epoch of the next record: a new one if records are, or may be, lost.
        store_id: Identity of the store; a new one if neither checkpoint nor log has one.
        read_bytes: Log bytes that were checked.
        cut_bytes: Bytes of the torn tail.
        recorded_epoch: Epoch of the newest record, 0 if that is not known.
        queues_synced_through: Commit-log offset up to which consume queue files are on disk.
    """

    end: int
    epoch: int
    store_id: int
    read_bytes: int
    cut_bytes: int
    recorded_epoch: int
    queues_synced_through: int


class LogRecovery:
    """One run over the log."""

    def __init__(
        self,
        *,
        segments: Segments,
        key: StoreKey,
        queues: ConsumeQueues,
        states: ProducerStates,
        epochs: EpochTable,
        tail_cut: TailCut,
        files: OpenFiles,
        damage: DamageList,
        checkpoint: Checkpoint | None,
        same_boot: bool,
        clock: Clock,
        on_progress: OnProgress,
        save_progress: SaveProgress,
    ) -> None:
        """Prepares a run.

        Args:
            segments: Files of the log.
            key: Key of the store.
            queues: Consume queues; empty, and filled by the run.
            states: Last batches of producers; empty, and filled by the run.
            epochs: Epochs of the log; those that the log records are added.
            tail_cut: A cut of the log's end that is to be completed, except for its note.
            files: Descriptors of consume queue files.
            damage: List to which damage is added.
            checkpoint: The newest checkpoint, None if it is lost or the store is new.
            same_boot: The system has not restarted since the checkpoint.
            clock: Clock for the labels of damage.
            on_progress: Called now and then with the run's progress.
            save_progress: Called after long reads, when everything up to there can be saved.
        """
        self._segments = segments
        self._key = key
        self._queues = queues
        self._states = states
        self._epochs = epochs
        self._tail_cut = tail_cut
        self._files = files
        self._damage = damage
        self._checkpoint = checkpoint
        self._same_boot = same_boot
        self._clock = clock
        self._on_progress = on_progress
        self._save_progress = save_progress
        self._scanner = LogScanner(
            segments,
            key=key,
            store_id=None if checkpoint is None else checkpoint.store_id,
            # A search through damage may be long; the callback lets the process stop meanwhile.
            on_piece=lambda offset: self._report("searching the log", offset, offset),
        )
        self._applier = LogApplier(
            queues, states, epochs, damage, clock=clock, remove=shutil.rmtree
        )
        self._new_store_id = int.from_bytes(os.urandom(4), "little")
        self._epoch = 0
        self._read_bytes = 0
        self._queues_synced_through = 0

    def run(self, table: QueueTable | None) -> Recovered:
        """Does the whole recovery.

        Args:
            table: The queue table, None if it is lost or the store is new.

        Raises:
            StorageError: The log is missing, of a newer version, or cannot be read.
        """
        checkpoint = self._checkpoint
        if not len(self._segments):
            if checkpoint is not None and checkpoint.synced_through > 0:
                raise StorageError(
                    f"the commit log is gone: {checkpoint.synced_through} bytes were stored, and "
                    f"there is no file; put it back, or remove the whole store to start empty"
                )
            return Recovered(0, 1, self.store_id, 0, 0, 0, 0)
        is_cut = self._tail_cut.end_offset is not None
        try:
            table = self._do_cut(table)
            rewrite(
                self._segments,
                self._first_doubtful(),
                lambda offset: self._report("comparing the log with the disk", offset, offset),
            )
            end = self._rebuild(table)
            torn_bytes = self._cut_torn_tail(end)
        finally:
            self._scanner.close()
        epoch = max(self._epoch, self._epochs.newest, checkpoint.epoch if checkpoint else 1)
        # Without a torn tail, too: there may be zeros in the place of records that a client has
        # read.
        epoch += bool(torn_bytes) or is_cut or self._may_have_lost()
        # If the log lost its end, other records will take the place of the lost ones.
        for topic, deleted_at in self._queues.deletions.items():
            self._queues.deletions[topic] = min(deleted_at, end)
        return Recovered(
            end,
            epoch,
            self.store_id,
            self._read_bytes,
            torn_bytes,
            self._epoch,
            self._queues_synced_through,
        )

    def _do_cut(self, table: QueueTable | None) -> QueueTable | None:
        """Completes a cut of the log that was begun; returns the table if it is still valid."""
        end = self._tail_cut.end_offset
        if end is None:
            return table
        log.warning("the log is cut at %d", end)
        self._tail_cut.clear()
        self._epochs.cut(end)
        self._damage.cut(end)
        checkpoint = self._checkpoint
        if checkpoint is not None:
            self._checkpoint = msgspec.structs.replace(
                checkpoint,
                synced_through=min(checkpoint.synced_through, end),
                dispatched_through=min(checkpoint.dispatched_through, end),
                queues_synced_through=min(checkpoint.queues_synced_through, end),
                clean=False,
            )
        # The table may be ahead of the log now, even if it covers less, since its rows are newer.
        # Queues can be shortened, except where a topic is missing whose deletion was cut, or
        # where their files may lack pages.
        if table is None or not self._same_boot:
            return None
        return None if any(at >= end for at in table.deletions.values()) else table

    def _may_have_lost(self) -> bool:
        """Return True when records may be lost without a trace: the system died, or may have."""
        checkpoint = self._checkpoint
        return checkpoint is None or not (checkpoint.clean or self._same_boot)

    @property
    def store_id(self) -> int:
        """Identity of the store; a new one while neither checkpoint nor log has one."""
        known = self._scanner.store_id
        return self._new_store_id if known is None else known

    def _rebuild(self, table: QueueTable | None) -> int:
        if table is not None:
            self._queues.deletions.update(table.deletions)
        if table is not None and self._checkpoint is not None:
            try:
                end = self._scan(self._load(table, self._checkpoint))
                topic = self._incomplete_topic()
                if topic is None:
                    return end
                reason = f"queues of topic {topic!r} lack entries"
            except CorruptRecord as error:
                reason = str(error)
            log.error("%s, all queues are made anew", reason)
        self._queues.clear()
        self._states.load([])
        self._applier.is_complete = False
        self._applier.gaps.clear()
        self._applier.rewritten = None
        self._epoch = 0
        self._queues_synced_through = self._segments.first.start
        return self._scan(self._segments.first.start)

    def _incomplete_topic(self) -> str | None:
        """Return a topic with fewer entries than the table or the log says; None if all fit."""
        for topic in self._applier.gaps:
            return topic
        lost = self._queues.lost()
        return None if lost is None else lost.topic

    def _load(self, table: QueueTable, checkpoint: Checkpoint) -> int:
        """Loads the table; returns the commit-log offset from which the log must be read."""
        for row in table.queues:
            self._queues.add(row.topic, row.queue_id, first=row.first, end=row.end)
        self._states.load(table.producers)
        cut = self._tail_cut.end_offset
        if cut is not None:
            shorten(self._queues, self._states, self._files, self._scanner, end_offset=cut)
        self._queues_synced_through = checkpoint.queues_synced_through
        start = min(table.head.through, checkpoint.dispatched_through)
        if start == table.head.through:
            self._epoch = table.head.epoch
        # Nor are pages of queues trusted that a sync may have failed for.
        trusted = self._same_boot and checkpoint.clean and not checkpoint.tails_left
        if checkpoint.queues_synced_through < table.head.through:
            if trusted:
                # The stop left them to the next round, which otherwise syncs only its own writes.
                doubt_files(self._queues)
            else:
                start = min(start, checkpoint.queues_synced_through)
                self._applier.rewritten = set()
                self._epoch = 0
        self._applier.is_complete = start >= table.head.through
        start = max(start, self._segments.first.start)
        if not self._epochs.is_known:
            self._learn_epochs(start)
        return start

    def _learn_epochs(self, stop: int) -> None:
        """Reads the log up to an offset only for its epochs."""
        log.warning("the log is read from its beginning, since its epochs are not known")
        for found in self._scanner.walk(
            self._segments.first.start,
            epoch=0,
            beyond=self._beyond_damage,
            stop=stop,
            is_lost=self._is_lost,
        ):
            if not isinstance(found, Damaged) and found.epoch > self._epochs.newest:
                self._epochs.learn(found.epoch, found.start)

    def _scan(self, start: int) -> int:
        """Reads and applies records; returns where the log ends."""
        position = reported_at = saved = group_end = start
        total = max(0, self._last_byte() - start)
        walk = self._scanner.walk(
            start, epoch=self._epoch, beyond=self._beyond_damage, is_lost=self._is_lost
        )
        for number, found in enumerate(walk, 1):
            position = found.end
            if isinstance(found, Damaged):
                # From here on queues may have gaps.
                self._applier.is_complete = False
                self._damage.add(found.start, found.end, found.reason, self._clock.wall_ms())
                continue
            if begins_group(found):
                group_end = RecordGroup(found).end
            self._epoch = found.epoch
            self._applier.apply(found)
            self._applier.make_room()
            if (
                position - reported_at >= PROGRESS_EVERY_BYTES
                or number % PROGRESS_EVERY_RECORDS == 0
            ):
                reported_at = position
                self._report("reading the log", position - start, total)
            # Not inside of a group: a recovery that goes on there would accept the rest of the
            # group.
            may_save = position >= group_end and self._applier.rewritten is None
            if position - saved >= SAVE_EVERY_BYTES and may_save:
                saved = position
                self._damage.save()
                self._save_progress(position, self._epoch)
        self._read_bytes += position - start
        if position > start:
            self._report("the end of the log is found", position - start, position - start)
        return position

    def _last_byte(self) -> int:
        last = self._segments.last
        synced = self._checkpoint.synced_through if self._checkpoint else 0
        return max(synced, last.start if len(self._segments) > 1 else last.end)

    def _report(self, step: str, done: int, total: int) -> None:
        self._on_progress(RecoveryProgress(step, done, max(done, total)))

    def _beyond_damage(self, position: int, epoch: int) -> int | None:
        """Return where the log goes on behind a bad record; None if it ends there."""
        checkpoint = self._checkpoint
        synced = 0 if checkpoint is None else checkpoint.synced_through
        if position < synced:
            return self._scanner.resync(position, synced, epoch=epoch) or synced
        if checkpoint is None or (self._same_boot and not checkpoint.clean):
            # It is unknown which bytes were synced, or it does not matter: the death of a process
            # tears only its last write. A bad record with good ones behind it is damage.
            return self._scanner.resync(position, EVERYTHING, epoch=epoch)
        return None

    def _is_lost(self, start: int) -> bool:
        """Return True for a group that is not whole and that the system may have died in."""
        is_doubtful = self._checkpoint is None and start >= self._first_doubtful()
        return is_doubtful or self._damage.begins_at(start)

    def _first_doubtful(self) -> int:
        """Return the commit-log offset behind which the page cache may differ from the disk."""
        checkpoint, segments = self._checkpoint, self._segments
        if checkpoint is not None:
            return EVERYTHING if checkpoint.clean else checkpoint.synced_through
        # Unknown. A full segment was synced soon after, and one segment is made ahead.
        return min((segment.start for segment in list(segments)[-2:]), default=0)

    def _cut_torn_tail(self, end: int) -> int:
        """Makes sure that bytes behind the end never count as a record.

        Returns:
            Number of bytes from the end to the last one that was not zero, 0 if there were none.
        """
        torn_bytes = self._scanner.last_byte(end) - end
        if torn_bytes:
            log.warning("a torn tail of %d bytes at %d is cut", torn_bytes, end)
            is_wanted = self._tail_cut.end_offset is not None
            self._tail_cut.begin(end)
            self._tail_cut.clear()
            if not is_wanted:
                self._tail_cut.finish()
        return torn_bytes
