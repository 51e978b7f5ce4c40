"""Applies records of the log to everything that is derived from it.

All records take this way: a batch that was put, a record that recovery reads, or one from a
leader's log. So queues, producers' last batches and deletions are the same on every path, and a
copy of the log is a copy of everything.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from mqmesh.batch.payload import MAX_MESSAGES
from mqmesh.batch.record_batch import HEADER_SIZE, Attributes, BatchHeader, read_meta
from mqmesh.clock import Clock
from mqmesh.errors import CorruptBatch
from mqmesh.storage.commitlog.damage import DamageList
from mqmesh.storage.interface import BatchToPut, PutResult, PutStatus
from mqmesh.storage.log.control_record import ControlKind
from mqmesh.storage.log.epochs import EpochTable
from mqmesh.storage.log.record import Record
from mqmesh.storage.queues.consume_queue import ConsumeQueue
from mqmesh.storage.queues.consume_queues import ConsumeQueues
from mqmesh.storage.queues.placement import Placed
from mqmesh.storage.queues.producer_states import ProducerStates, stored_batch
from mqmesh.units import CommitLogOffset

MOST_TAILS_AT_ONCE: Final = 256
MOST_LOST_UNSEEN: Final = 1 << 20
"""Messages that a queue may lack without known damage; their void entries take 20 MiB."""
_REDELIVERED: Final = int(Attributes.REDELIVERED)


class LogApplier:
    """Brings queues and producers' last batches up to a record of the log.

    Attributes:
        is_complete: Nothing is missing in front of the records, so that a skipped queue offset
            means that the queue is wrong.
        gaps: Topics with such queues.
        shows_later: Consumers see only the part of the log that ``see`` has set.
        rewritten: Queues whose entries are written anew from the first batch that is met, because
            their files may lack pages. None: trust the files.
    """

    def __init__(
        self,
        queues: ConsumeQueues,
        states: ProducerStates,
        epochs: EpochTable,
        damage: DamageList,
        *,
        clock: Clock,
        remove: Callable[[str], None],
        shows_later: bool = False,
    ) -> None:
        """Takes the structures that are derived from the log.

        Args:
            queues: Consume queues.
            states: Last batches of producers.
            epochs: Epochs of the log.
            damage: List to which records are added that no queue can have.
            clock: Clock for the labels of damage.
            remove: Removes an unused directory.
            shows_later: Consumers see only the part of the log that ``see`` has set.
        """
        self._queues = queues
        self._states = states
        self._epochs = epochs
        self._damage = damage
        self._clock = clock
        self._remove = remove
        self.shows_later = shows_later
        # Queue ends that become visible when the log may be seen to an offset.
        self._unseen: deque[tuple[int, ConsumeQueue, int]] = deque()
        self.is_complete = False
        self.gaps: set[str] = set()
        self.rewritten: set[ConsumeQueue] | None = None

    def apply(self, record: Record) -> None:
        """Applies a record; all before it were applied, and it may have been, too.

        Raises:
            StorageError: A gap in a queue is so wide that it must be written, and cannot be.
        """
        if record.epoch > self._epochs.newest:
            self._epochs.learn(record.epoch, record.start)
        if record.batch is not None:
            self._apply_batch(record, record.batch)
        elif record.marker is not None and record.marker.kind is ControlKind.TOPIC_DELETED:
            topic = record.marker.data.decode("utf-8", "replace")
            # If the deletion is known, the known state of the topic is newer.
            if record.start > self._queues.deletions.get(topic, -1):
                self.delete_topic(topic, record.start)

    def make_room(self) -> None:
        """Writes consume queues if they have used up their memory; to be called before a record.

        Raises:
            StorageError: The queues cannot be written.
        """
        if self._queues.full:
            self._queues.write_large()
            self._queues.write_oldest(MOST_TAILS_AT_ONCE)

    def add(self, placed: Iterable[Placed[ConsumeQueue]]) -> int:
        """Adds batches that are in the log now to their queues.

        Args:
            placed: Batches from ``Placement``, which has noted them for their producers.

        Returns:
            Number of messages in them.
        """
        append, shows_later = self._queues.append, self.shows_later
        added = 0
        for batch, queue, result in placed:
            header = batch.header
            start, count = result.commitlog_offset, header.message_count
            append(queue, start, header.total_size, count, batch.tag_hashes)
            added += count
            if shows_later:
                self._unseen.append((result.end_offset, queue, queue.end))
            else:
                queue.visible = queue.end
        return added

    def see(self, shown_to: int) -> None:
        """Lets consumers see the log up to a commit-log offset."""
        unseen = self._unseen
        while unseen and unseen[0][0] <= shown_to:
            _, queue, end = unseen.popleft()
            queue.visible = end

    def delete_topic(self, topic: str, deleted_at: int) -> None:
        """Forgets a topic.

        Args:
            topic: Physical topic.
            deleted_at: Commit-log offset of the control record of the deletion.
        """
        # The queue table's entry may belong to a later topic of the same name.
        self.gaps.discard(topic)
        self._states.forget_topic(topic)
        unused = self._queues.drop_topic(topic, deleted_at)
        if unused is not None:
            self._remove(unused)

    def _apply_batch(self, record: Record, header: BatchHeader) -> None:
        try:
            meta = read_meta(record.data, header)
        except CorruptBatch as error:
            # Its checksums are right, so it was stored like that; no queue can have it.
            self._damage.add(record.start, record.end, str(error), self._clock.wall_ms())
            return
        topic, queue_id = meta.topic, header.queue_id
        if self._queues.is_deleted(topic, record.start):
            return
        base = header.base_queue_offset
        queue = self._queues.find(topic, queue_id)
        missing = 0 if queue is None else base - queue.end
        if queue is not None and missing > 0 and missing > self._most_lost_messages():
            reason = f"queue offset {base} after {queue.end}: so many messages cannot be lost"
            self._damage.add(record.start, record.end, reason, self._clock.wall_ms())
            return
        if self.is_complete and base > (queue.end if queue else 0):
            self.gaps.add(topic)
        if queue is None:
            queue = self._queues.add(topic, queue_id, first=base, end=base)
            if self.rewritten is not None:
                self.rewritten.add(queue)
        elif self.rewritten is not None and queue not in self.rewritten:
            self.rewritten.add(queue)
            queue.rewind(base)
        if base >= queue.end:
            self._queues.skip_to(queue, base)
            batch = BatchToPut(topic, queue_id, header, record.data, meta.tag_hashes)
            ok, start, end = PutStatus.PUT_OK, header.commitlog_offset, CommitLogOffset(record.end)
            result = PutResult(ok, header.base_queue_offset, start, end, header.store_timestamp)
            self.add([(batch, queue, result)])
        if not header.attributes & _REDELIVERED:
            self._states.note(topic, queue_id, header.producer_id, stored_batch(header))

    def _most_lost_messages(self) -> int:
        """Return the most messages that may be missing at a queue's end, by the damaged bytes.

        Void entries take room on the disk, so only damage may cause them.
        """
        lost_bytes = sum(one.end_offset - one.start_offset for one in self._damage.ranges)
        return MOST_LOST_UNSEEN + lost_bytes // HEADER_SIZE * MAX_MESSAGES
