"""Messages that wait for a retry in the schedule topic, by consumer group. Pure.

The schedule service counts them, and reports what changed. While it is away the broker itself
counts what came since.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from mqmesh.batch.delayed_batch import RECORD_QUEUE
from mqmesh.batch.record_batch import read_header
from mqmesh.errors import CorruptBatch, CorruptRecord, OffsetOutOfRange
from mqmesh.protocol.schedule import PullScheduleRequest, ScheduledEntry, WaitingRetries
from mqmesh.storage.interface import MessageStore
from mqmesh.units import CommitLogOffset

MAX_GROUPS: Final = 100_000
"""Groups that are counted one by one; messages of others are in no number of a group."""


class RetryBoard:
    """Messages that wait for a retry, as far as they are known.

    Attributes:
        is_current: The schedule service is here, and has reported what it knows.
        cursors: Next offset of each queue of the schedule topic behind what is counted; empty
            before the first report.
    """

    def __init__(self) -> None:
        self.is_current = False
        self.cursors: list[int] = []
        self._reported_to: list[int] = []
        self._reported: dict[str, WaitingRetries] = {}
        self._since: dict[str, WaitingRetries] = {}

    def report(self, header: PullScheduleRequest) -> None:
        """Take over what the service reports when it has caught up."""
        if header.is_anew:
            self._reported.clear()
        for one in header.retries:
            if not one.count:
                self._reported.pop(one.group, None)
            elif one.group in self._reported or len(self._reported) < MAX_GROUPS:
                self._reported[one.group] = one
        self._since.clear()
        self.cursors = self._reported_to = list(header.cursors)
        self.is_current = True

    def count(self, entries: Iterable[ScheduledEntry], cursors: Sequence[int]) -> None:
        """Count batches that came while the service is away.

        Args:
            entries: Those behind ``cursors``.
            cursors: Where they end.
        """
        for one in entries:
            known = self._since.get(one.retry_group)
            if known is not None:
                grown = known.count + one.message_count
                self._since[one.retry_group] = WaitingRetries(
                    known.group, grown, known.oldest_offset
                )
            elif one.retry_group and len(self._since) < MAX_GROUPS:
                self._since[one.retry_group] = WaitingRetries(
                    one.retry_group, one.message_count, one.commitlog_offset
                )
        self.cursors = list(cursors)

    def unreported(self, ends: Sequence[int]) -> int:
        """Return how many messages came into the schedule topic since the last report.

        Args:
            ends: Next offset of each of its queues.
        """
        pairs = zip(ends[:RECORD_QUEUE], self._reported_to, strict=False)
        return sum(max(end - cursor, 0) for end, cursor in pairs)

    def of(self, group: str) -> WaitingRetries:
        """Return what waits for the retries of a group."""
        none = WaitingRetries(group, 0)
        reported, since = self._reported.get(group, none), self._since.get(group, none)
        oldest = reported.oldest_offset if reported.count else since.oldest_offset
        return WaitingRetries(group, reported.count + since.count, oldest)

    def total(self) -> int:
        """Return what waits for retries of all groups."""
        return sum(one.count for part in (self._reported, self._since) for one in part.values())


def waiting_retries(store: MessageStore, board: RetryBoard, group: str) -> tuple[int, int]:
    """Return how many messages of a group wait for a retry, and since when the oldest does.

    Args:
        store: Messages.
        board: Known messages that wait for a retry.
        group: Consumer group.

    Returns:
        The number, and when the oldest was sent back last, ms since 1970; 0 if that is not known.
    """
    found = board.of(group)
    if found.oldest_offset < 0:
        return found.count, 0
    try:
        header = read_header(store.read_at(CommitLogOffset(found.oldest_offset)))
    except (CorruptBatch, CorruptRecord, OffsetOutOfRange):
        return found.count, 0  # the number is of use all the same
    return found.count, header.store_timestamp
