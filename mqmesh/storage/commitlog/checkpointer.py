"""Saves, in steps beside all other work, the extent of everything that the store has.

One round: write the entries that consume queues hold in memory; collect the queue table; sync the
log as far as the table covers it; save table and checkpoint; sync the consume queue files, and note
this in the checkpoint. A round is a generator, so every step of it is short and the event loop goes
on in between; steps that wait for the disk are done by the chores thread.
"""

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final

from mqmesh.clock import Clock
from mqmesh.errors import DiskFull, StorageError, TooManyOpenFiles
from mqmesh.storage.commitlog.checkpoint import Checkpoint, CheckpointFile
from mqmesh.storage.files.atomic_file import save_document, storage_error
from mqmesh.storage.files.chores import Chores
from mqmesh.storage.log.commitlog import CommitLog
from mqmesh.storage.log.flush import Flusher, Sync
from mqmesh.storage.queues.consume_queues import ConsumeQueues
from mqmesh.storage.queues.producer_states import ProducerStates
from mqmesh.storage.queues.queue_table import QueueTableHead, encode_table
from mqmesh.units import KIB

log = logging.getLogger(__name__)

TAILS_PER_STEP: Final = 32
FILES_PER_CHORE: Final = 64
WORK_SHARE: Final = 20
"""With many queues a round is much work; then the pause behind it is so many times as long."""
MOST_INTERVALS: Final = 4
"""... but at most so many intervals, because a restart reads the log from the last round."""
MOST_SYNCED_AT_CLOSE: Final = 64
"""Consume queue files synced by a stop; more would make it slow, and the log can replace them."""
MOST_TAILS_AT_CLOSE: Final = 1_000
"""Tails that a stop writes in any case; for more, see ``LOG_BYTES_A_TAIL``."""
LOG_BYTES_A_TAIL: Final = 4 * KIB
"""Bytes of the log whose reading takes as long as making the file that a tail is written to."""


class Checkpointer:
    """Runs rounds, and the last one when the store is closed.

    Attributes:
        finished: Number of the last completed round.
    """

    def __init__(
        self,
        *,
        table_path: Path,
        file: CheckpointFile,
        commitlog: CommitLog,
        queues: ConsumeQueues,
        states: ProducerStates,
        flusher: Flusher,
        chores: Chores,
        sync: Sync,
        clock: Clock,
        interval_ms: int,
        boot_id: bytes,
        dispatched_through: int,
        queues_synced_through: int,
    ) -> None:
        """Starts between two rounds.

        Args:
            table_path: Document of the queue table.
            file: File of the checkpoint's two slots.
            commitlog: The log.
            queues: Consume queues.
            states: Last batches of producers.
            flusher: Reports how far the log is durable.
            chores: Thread for saving and syncing.
            sync: Makes a descriptor's data durable.
            clock: Clock that measures how long work takes.
            interval_ms: Time from the end of a round to the next.
            boot_id: Boot id of the running system.
            dispatched_through: Value in the last checkpoint.
            queues_synced_through: Value in the last checkpoint.
        """
        self._table_path = table_path
        self._file = file
        self._log = commitlog
        self._queues = queues
        self._states = states
        self._flusher = flusher
        self._chores = chores
        self._sync = sync
        self._clock = clock
        self._interval_ms = interval_ms
        self._boot_id = boot_id
        self._dispatched_through = dispatched_through
        self._queues_synced_through = queues_synced_through
        self._round: Iterator[bool] | None = None
        self._next_ms: int | None = None
        self._worked_ns = 0
        self._begun = 0
        self._wanted = 0
        self.finished = 0

    @property
    def queues_synced_through(self) -> int:
        """Commit-log offset before which everything derived from the log is on disk."""
        return self._queues_synced_through

    def tick(self, now_ms: int) -> bool:
        """Does a step of a round, or begins one when it is time and there is something to save.

        Returns:
            True when the next step need not wait for anything.

        Raises:
            StorageError: A sync failed; the store must stop.
        """
        if self._round is None:
            if self._next_ms is None:
                self._next_ms = now_ms + self._interval_ms
            changed = self._log.end != self._dispatched_through or self._wanted > self.finished
            if now_ms < self._next_ms or not changed:
                return False
            self._begun += 1
            self._round = self._steps()
            self._worked_ns = 0
        start_ns = self._clock.monotonic_ns()
        try:
            more = next(self._round)
            self._worked_ns += self._clock.monotonic_ns() - start_ns
            return more
        except StopIteration:
            self.finished = self._begun
        except (DiskFull, TooManyOpenFiles) as error:
            # This loses nothing: the log is there, and a restart reads more of it.
            log.warning("the checkpoint has to wait: %s", error)
        self._round = None
        pause_ms = self._worked_ns // 1_000_000 * WORK_SHARE
        self._next_ms = now_ms + min(
            max(self._interval_ms, pause_ms), MOST_INTERVALS * self._interval_ms
        )
        return False

    def request(self) -> int:
        """Requests a round that begins after now, even if the log has nothing new.

        Returns:
            Number of the round, to compare with ``finished``.
        """
        self._wanted = self._begun + 1
        return self._wanted

    def close(self) -> None:
        """Saves everything and notes the clean stop; before it the log is synced to its end, and
        the chores are done.

        If a start left thousands of tails to the following rounds, a stop soon after leaves them,
        too: the next start reads the same part of the log once more.

        Raises:
            DiskFull: No room; the stop is then not a clean one.
            StorageError: A sync failed.
        """
        end = self._log.end
        tails = self._queues.dirty_count
        if tails > MOST_TAILS_AT_CLOSE and (
            end - self._queues_synced_through <= tails * LOG_BYTES_A_TAIL
        ):
            self._save(None, self._checkpoint(clean=True, tails_left=True))
            return
        while self._queues.dirty_count:
            self._queues.write_oldest(TAILS_PER_STEP)
        changed = self._queues.changed
        if self._round is None and len(changed) <= MOST_SYNCED_AT_CLOSE:
            sync_paths(sorted(changed), self._sync)
            self._queues_synced_through = end
        table = self._table(end, self._log.recorded_epoch)
        self._dispatched_through = end
        self._save(b"".join(table), self._checkpoint(clean=True))

    def save_now(self) -> None:
        """Saves everything, as after recovery; before it the log is synced to its end."""
        end = self._log.end
        while self._queues.dirty_count:
            self._queues.write_oldest(TAILS_PER_STEP)
        table = self._table(end, self._log.recorded_epoch)
        self._dispatched_through = end
        self._save(b"".join(table), self._checkpoint(clean=False))

    def note_start(self) -> None:
        """Notes that the store is in use: from now on a stop without a note is a crash."""
        self._save(None, self._checkpoint(clean=False))

    def _steps(self) -> Iterator[bool]:
        """Run one round. Yields True for "go on when you like", False for "waiting"."""
        through, epoch = self._log.end, self._log.recorded_epoch
        queues = self._queues
        remaining = queues.dirty_count
        while remaining > 0 and queues.dirty_count:
            dirty = queues.dirty_count
            queues.write_oldest(TAILS_PER_STEP)
            # It may have written fewer, being slow; a tail left out would never be found again.
            remaining -= dirty - queues.dirty_count
            yield True
        frames = []
        for frame in self._table(through, epoch):
            frames.append(frame)
            yield True
        covered = self._log.end
        self._log.retire(self._flusher.durable_offset)
        self._flusher.written(covered, self._log.unsynced_fds, urgent=True)
        while self._flusher.durable_offset < covered:
            yield False
        document = b"".join(frames)
        self._dispatched_through = through
        checkpoint = self._checkpoint(clean=False)
        yield from self._wait(partial(self._save, document, checkpoint))
        changed, queues.changed = list(queues.changed), set()
        try:
            for first in range(0, len(changed), FILES_PER_CHORE):
                some = changed[first : first + FILES_PER_CHORE]
                yield from self._wait(lambda some=some: sync_paths(some, self._sync))  # type: ignore[misc]
        except TooManyOpenFiles:
            queues.changed.update(changed)  # the next round syncs them
            raise
        self._queues_synced_through = through
        synced = self._checkpoint(clean=False)
        yield from self._wait(partial(self._save, None, synced))

    def _table(self, through: int, epoch: int) -> Iterator[bytes]:
        # Read before the rows, which may have later beginnings of queues but never earlier ones,
        # and may have topics made since these deletions but never deleted ones.
        start = self._log.start
        head, deletions = QueueTableHead(through, epoch, start), self._queues.live_deletions(start)
        return encode_table(head, list(self._queues), self._states.dump(), deletions)

    def _wait(self, task: Callable[[], None]) -> Iterator[bool]:
        future: Future[None] = self._chores.submit(task)
        while not future.done():
            yield False
        future.result()

    def _checkpoint(self, *, clean: bool, tails_left: bool = False) -> Checkpoint:
        return Checkpoint(
            store_id=self._log.store_id,
            epoch=self._log.epoch,
            synced_through=self._flusher.durable_offset,
            dispatched_through=self._dispatched_through,
            queues_synced_through=self._queues_synced_through,
            clean=clean,
            boot_id=self._boot_id,
            tails_left=tails_left,
        )

    def _save(self, table: bytes | None, checkpoint: Checkpoint) -> None:
        if table is not None:
            save_document(self._table_path, table)
        try:
            self._file.save(checkpoint)
        except OSError as error:
            raise StorageError(f"the checkpoint cannot be saved: {error}") from error


def sync_paths(paths: list[str], sync: Sync) -> None:
    """Makes files and directories durable; one that was removed needs no sync.

    Raises:
        TooManyOpenFiles: Some were not synced, for want of descriptors.
        StorageError: A sync failed.
    """
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise storage_error(error, f"{path} cannot be opened") from error
        try:
            sync(fd)
        except OSError as error:
            # Never DiskFull, even if the system reports it: after a failed sync the content of the
            # file is unknown, and trying again would not show it.
            raise StorageError(f"{path} cannot be synced: {error}") from error
        finally:
            os.close(fd)
