"""How far each consumer group has come in each message queue.

Kept as a JSON document, group by topic by queue. Only groups that changed are
encoded anew when it is saved, so many groups that rest cost nothing. Of groups whose
offsets were moved it tells, too, from where on marks of what they sent back count
(``sent_back_marks``): both are true at once, or neither is.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from mqmesh.errors import CorruptRecord, SystemBusy
from mqmesh.message import SENT_BACK_TOPIC
from mqmesh.roles.broker.features.retries.sent_back_marks import MARKS_QUEUE, MAX_MARKS
from mqmesh.units import QueueOffset

DOCUMENT_VERSION: Final = 3

_Queues = dict[int, QueueOffset]
_Topics = dict[str, _Queues]


class _OffsetsDocument(msgspec.Struct, frozen=True):
    version: int
    epoch: int
    groups: dict[str, dict[str, dict[str, int]]]
    sent_back_from: dict[str, int]


class _DocumentToSave(msgspec.Struct, frozen=True):
    version: int
    epoch: int
    groups: dict[str, msgspec.Raw]
    sent_back_from: dict[str, int]


class CommittedOffsets:
    """Committed offsets of all groups.

    Args:
        most: Offsets allowed, one a group and queue.
        busy_retry_after_ms: What clients are told to wait when there are too many.

    Attributes:
        changes: Counts changes.
        epoch: Of the log in which all offsets are right; saved beside them.
    """

    def __init__(self, most: int, busy_retry_after_ms: int = 100) -> None:
        self._most = most
        self._busy_retry_after_ms = busy_retry_after_ms
        self._groups: dict[str, _Topics] = {}
        self._encoded: dict[str, msgspec.Raw] = {}
        self._sent_back_from: dict[str, int] = {}
        self._count = 0
        self.changes = 0
        self.epoch = 0

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
            if self._count >= self._most:
                raise SystemBusy(
                    f"this broker keeps {self._most} consumer offsets, no more "
                    "(max_consumer_offsets)",
                    retry_after_ms=self._busy_retry_after_ms,
                )
            self._count += 1
            topics = self._groups.setdefault(group, {})
            queues = topics.setdefault(topic, {})
        assert queues is not None
        queues[queue_id] = queue_offset
        self._note_change(group)

    def remove_group(self, group: str) -> int:
        """Forgets all offsets of a group; returns how many."""
        topics = self._groups.pop(group, {})
        removed = sum(map(len, topics.values()))
        if removed:
            self._count -= removed
            self._note_change(group)
        return removed

    def remove_topic(self, topic: str) -> int:
        """Forgets all offsets in a topic; returns how many."""
        removed = 0
        for group in [name for name, topics in self._groups.items() if topic in topics]:
            removed += len(self._groups[group].pop(topic))
            if not self._groups[group]:
                del self._groups[group]
            self._note_change(group)
        self._count -= removed
        return removed

    def sent_back_from(self, group: str) -> int:
        """Queue offset among the marks of what was sent back from which on a group's count."""
        return self._sent_back_from.get(group, 0)

    def forget_sent_back(self, group: str, queue_offset: int) -> None:
        """A group's marks before a queue offset, the end of their queue, do not count any more."""
        moved = self._sent_back_from
        moved[group] = queue_offset
        # Nobody reads marks that are as old as that.
        for old in [name for name, at in moved.items() if at <= queue_offset - MAX_MARKS]:
            del moved[old]
        self.changes += 1

    def dump(self) -> bytes:
        """All offsets as a JSON document."""
        for group, topics in self._groups.items():
            if group not in self._encoded:
                self._encoded[group] = msgspec.Raw(msgspec.json.encode(topics))
        return msgspec.json.encode(
            _DocumentToSave(DOCUMENT_VERSION, self.epoch, self._encoded, self._sent_back_from)
        )

    def load(self, document: bytes) -> None:
        """Takes over what ``dump`` wrote.

        Raises:
            CorruptRecord: It is not that.
        """
        try:
            saved = msgspec.json.decode(document, type=_OffsetsDocument)
            groups = {
                group: {
                    topic: {int(queue_id): QueueOffset(at) for queue_id, at in queues.items()}
                    for topic, queues in topics.items()
                }
                for group, topics in saved.groups.items()
            }
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise CorruptRecord(f"the consumer offsets cannot be read: {error}") from error
        if saved.version != DOCUMENT_VERSION:
            raise CorruptRecord(
                f"the consumer offsets have version {saved.version}; this broker reads version "
                f"{DOCUMENT_VERSION}"
            )
        self._groups = groups
        self._sent_back_from = saved.sent_back_from
        self.epoch = saved.epoch
        self._encoded.clear()
        self._count = sum(len(q) for topics in groups.values() for q in topics.values())

    def bound(self, end_of: Callable[[str, int], int], epoch: int) -> int:
        """Moves offsets back that stand behind what is there: the log lost its end.

        Args:
            end_of: Of a topic and queue, the largest offset that may be committed.
            epoch: Of the log now; all offsets are right in it afterwards.

        Returns:
            How many were moved.
        """
        moved = 0
        ends: dict[tuple[str, int], int] = {}
        for group, topics in self._groups.items():
            for topic, queues in topics.items():
                for queue_id, at in queues.items():
                    end = ends.get((topic, queue_id))
                    if end is None:
                        end = ends[topic, queue_id] = end_of(topic, queue_id)
                    if at > end:
                        queues[queue_id] = QueueOffset(end)
                        self._note_change(group)
                        moved += 1
        if self._sent_back_from:
            end = end_of(SENT_BACK_TOPIC, MARKS_QUEUE)
            for group, marks_from in self._sent_back_from.items():
                if marks_from > end:
                    self._sent_back_from[group] = end
                    self.changes += 1
        if epoch != self.epoch:
            self.epoch = epoch
            self.changes += 1
        return moved

    def _note_change(self, group: str) -> None:
        self._encoded.pop(group, None)
        self.changes += 1
