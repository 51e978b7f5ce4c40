"""Committed offsets: how far each consumer group has come in each message queue.

Kept in the log, see ``state_log``, behind the messages that they count. Of groups whose offsets
were moved the log says, too, from where on marks of what they sent back count
(``sent_back_marks``): in one write, so that both are true at once, or neither is.
"""

from collections.abc import Callable, Iterator
from typing import Final

from mqmesh.errors import SystemBusy
from mqmesh.roles.broker.state_log import PlannedChange
from mqmesh.roles.broker.state_records import OffsetsRecord, SentBackRecord, in_parts
from mqmesh.units import QueueOffset

MOST_QUEUES_PER_RECORD: Final = 2_000

_Queues = dict[int, QueueOffset]
_Topics = dict[str, _Queues]
MAX_MARKS: Final = 200_000
"""Marks of messages that were sent back which a broker remembers, the newest; some 250 bytes of
memory each."""


class CommittedOffsets:
    """Committed offsets of all groups.

    Args:
        most: Offsets allowed, one a group and queue.
        busy_retry_after_ms: Retry delay of clients when there are too many.

    Attributes:
        changed: Groups and topics whose offsets are to be written into the log.
        sent_back: From where on marks of what groups sent back count.
    """

    def __init__(self, most: int, busy_retry_after_ms: int = 100) -> None:
        self._most = most
        self._busy_retry_after_ms = busy_retry_after_ms
        self._groups: dict[str, _Topics] = {}
        # Queues before whose offset messages have outputs that are stored.
        self._processed: dict[tuple[str, str], set[int]] = {}
        self._count = 0
        self.changed: dict[tuple[str, str], None] = {}
        self.sent_back = SentBackStarts()

    def __len__(self) -> int:
        return self._count

    def groups(self) -> list[str]:
        """Groups with at least one offset, sorted."""
        return sorted(self._groups)

    def topics(self, group: str) -> dict[str, dict[int, QueueOffset]]:
        """Offsets of a group, by topic and queue; not to be changed."""
        return self._groups.get(group, {})

    def groups_of_topic(self, topic: str) -> list[str]:
        """Groups with an offset in a topic, sorted."""
        return sorted(group for group, topics in self._groups.items() if topic in topics)

    def query(self, group: str, topic: str, queue_id: int) -> QueueOffset:
        """The next offset a group wants to read of a queue, -1 for none."""
        return self._groups.get(group, {}).get(topic, {}).get(queue_id, QueueOffset(-1))

    def commit(self, group: str, topic: str, queue_id: int, queue_offset: QueueOffset) -> None:
        """Notes where a group goes on in a queue; forward or, when it seeks, back.

        Args:
            group: Consumer group.
            topic: Of the queue.
            queue_id: From 0.
            queue_offset: From 0, checked against the queue's end.

        Raises:
            SystemBusy: There are too many offsets.
        """
        topics = self._groups.get(group)
        queues = None if topics is None else topics.get(topic)
        known = None if queues is None else queues.get(queue_id)
        if known == queue_offset:
            return
        if known is None:
            self.check_room(1)
            self._count += 1
            topics = self._groups.setdefault(group, {})
            queues = topics.setdefault(topic, {})
        assert queues is not None
        queues[queue_id] = queue_offset
        self.changed[group, topic] = None

    def check_room(self, count: int) -> None:
        """Check that so many more offsets may be kept.

        Raises:
            SystemBusy: There are too many offsets.
        """
        if self._count + count > self._most:
            raise SystemBusy(
                f"this broker keeps {self._most} consumer offsets, no more (max_consumer_offsets)",
                retry_after_ms=self._busy_retry_after_ms,
            )

    def place(self, group: str, topic: str, queue_id: int, queue_offset: QueueOffset) -> None:
        """Note where a group goes on in a queue, of which the log has a record by itself."""
        queues = self._groups.setdefault(group, {}).setdefault(topic, {})
        self._count += queue_id not in queues
        queues[queue_id] = queue_offset

    def plan_processed(
        self, group: str, topic: str, offsets: dict[int, QueueOffset]
    ) -> PlannedChange:
        """Return the change that moves a group behind messages whose outputs are stored with it.

        Args:
            group: Consumer group.
            topic: Of the queues.
            offsets: Where it goes on, by queue.
        """

        def apply() -> None:
            for queue_id, queue_offset in offsets.items():
                self.place(group, topic, queue_id, queue_offset)
            self._processed.setdefault((group, topic), set()).update(offsets)

        record = OffsetsRecord(group, topic, dict(offsets), True, list(offsets))
        return PlannedChange([record], apply)

    def is_processed(self, group: str, topic: str, queue_id: int) -> bool:
        """Return whether outputs are stored of messages before a group's offset in a queue.

        It goes back only where somebody moves it on purpose.
        """
        return queue_id in self._processed.get((group, topic), ())

    def move(self, group: str, topic: str, queue_id: int, queue_offset: QueueOffset) -> None:
        """Do as ``commit``, for an administrator: messages may be processed once more.

        Raises:
            SystemBusy: There are too many offsets.
        """
        self.commit(group, topic, queue_id, queue_offset)
        processed = self._processed.get((group, topic))
        if processed and queue_id in processed:
            processed.remove(queue_id)
            self.changed[group, topic] = None

    def remove_group(self, group: str) -> int:
        """Forgets all offsets of a group; returns how many."""
        topics = self._groups.pop(group, {})
        for topic in topics:
            self._processed.pop((group, topic), None)
            self.changed[group, topic] = None
        removed = sum(map(len, topics.values()))
        self._count -= removed
        return removed

    def remove_topic(self, topic: str) -> int:
        """Forgets all offsets in a topic; returns how many."""
        removed = 0
        for group in [name for name, topics in self._groups.items() if topic in topics]:
            removed += len(self._groups[group].pop(topic))
            if not self._groups[group]:
                del self._groups[group]
            self._processed.pop((group, topic), None)
            self.changed[group, topic] = None
        self._count -= removed
        return removed

    def bound(self, end_of: Callable[[str, int], int]) -> int:
        """Moves offsets back that stand behind what is there.

        Args:
            end_of: Of a topic and queue, the largest offset that may be committed.

        Returns:
            How many were moved.
        """
        moved = 0
        for group, topics in self._groups.items():
            for topic, queues in topics.items():
                for queue_id, at in queues.items():
                    end = end_of(topic, queue_id)
                    if at > end:
                        queues[queue_id] = QueueOffset(end)
                        self.changed[group, topic] = None
                        moved += 1
        return moved

    def state_keys(self) -> list[tuple[str, str]]:
        """Groups, each with its topics."""
        return [(group, topic) for group, topics in self._groups.items() for topic in topics]

    def records_of(self, key: tuple[str, str]) -> Iterator[OffsetsRecord]:
        """Yield the state records of a group and a topic."""
        group, topic = key
        queues = self._groups.get(group, {}).get(topic)
        # A copy: the queues go on while others are written.
        yield from in_parts(
            OffsetsRecord(
                group,
                topic,
                None if queues is None else dict(queues),
                processed=sorted(self._processed.get(key, ())),
            ),
            MOST_QUEUES_PER_RECORD,
        )

    def apply(self, record: OffsetsRecord) -> None:
        """Takes over what a record says."""
        topics, key = self._groups.setdefault(record.group, {}), (record.group, record.topic)
        if not record.adds:
            self._count -= len(topics.pop(record.topic, {}))
            self._processed.pop(key, None)
        if record.processed:
            self._processed.setdefault(key, set()).update(record.processed)
        if record.offsets:
            queues = topics.setdefault(record.topic, {})
            self._count -= len(queues)
            queues.update((queue_id, QueueOffset(at)) for queue_id, at in record.offsets.items())
            self._count += len(queues)
        if not topics:
            del self._groups[record.group]


class SentBackStarts:
    """From which queue offset on the marks of what a group sent back count; 0 unless it says.

    Attributes:
        changed: Groups of which that is to be written into the log.
    """

    def __init__(self) -> None:
        self.changed: dict[str, None] = {}
        self._starts: dict[str, int] = {}

    def counts_from(self, group: str) -> int:
        """Return the queue offset from which marks of a group count."""
        return self._starts.get(group, 0)

    def forget(self, group: str, queue_offset: int) -> None:
        """A group's marks before a queue offset, the end of their queue, do not count any more."""
        starts = self._starts
        starts[group] = queue_offset
        self.changed[group] = None
        # Marks that old are never read.
        for old in [name for name, at in starts.items() if at <= queue_offset - MAX_MARKS]:
            del starts[old]
            self.changed[old] = None

    def state_keys(self) -> list[str]:
        """Groups of which it says something."""
        return list(self._starts)

    def records_of(self, group: str) -> tuple[SentBackRecord]:
        """Return the state record of a group."""
        return (SentBackRecord(group, self._starts.get(group)),)

    def apply(self, record: SentBackRecord) -> None:
        """Takes over what a record says."""
        if record.counts_from is None:
            self._starts.pop(record.group, None)
        else:
            self._starts[record.group] = record.counts_from
