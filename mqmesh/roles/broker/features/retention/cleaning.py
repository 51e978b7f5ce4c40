"""The pass of retention that an administrator has asked for."""

from collections import defaultdict

from mqmesh.errors import BrokerNotAvailable, StorageError, SystemBusy
from mqmesh.protocol.admin import (
    MAX_CLEANED_TOPICS,
    CleanedSegment,
    CleanedTopic,
    CleanResult,
)
from mqmesh.protocol.request import PendingReply
from mqmesh.storage.interface import CleaningReport, QueueMove, Retention

Answer = tuple[PendingReply, CleanResult | Exception]


class Cleaning:
    """At most one pass at a time, which its asker waits for."""

    def __init__(self) -> None:
        self._job: tuple[PendingReply, CleaningReport] | None = None

    def begin(self, pending: PendingReply, retention: Retention, *, dry_run: bool) -> None:
        """Begins a pass.

        Raises:
            SystemBusy: One is under way, begun by a request or not.
        """
        report = None if self._job is not None else retention.clean(dry_run=dry_run)
        if report is None:
            raise SystemBusy("a pass of retention is under way", retry_after_ms=1_000)
        self._job = (pending, report)

    def take_answer(self) -> Answer | None:
        """Return what is to be answered now, and the answer; None if there is none."""
        if self._job is None or not self._job[1].finished:
            return None
        (pending, report), self._job = self._job, None
        if report.error:
            return pending, StorageError(f"retention stopped: {report.error}")
        return pending, result_of(report)

    def give_up(self) -> Answer | None:
        """Return what waits, and its error: the broker stops."""
        if self._job is None:
            return None
        (pending, _), self._job = self._job, None
        return pending, BrokerNotAvailable("this broker stops; its next pass does the rest")


def result_of(report: CleaningReport) -> CleanResult:
    """A report for the wire, by topics."""
    moves: defaultdict[str, list[QueueMove]] = defaultdict(list)
    for move in report.moves:
        moves[move.topic].append(move)
    topics = [
        CleanedTopic(
            topic,
            len(queues),
            sum(one.first - one.first_before for one in queues),
            min(one.first_before for one in queues),
            min(one.first for one in queues),
        )
        for topic, queues in moves.items()
    ]
    topics.sort(key=lambda one: (-one.messages, one.topic))
    return CleanResult(
        [CleanedSegment(one.commitlog_offset, one.size) for one in report.segments],
        report.reason,
        report.forced,
        topics[:MAX_CLEANED_TOPICS],
        len(topics[MAX_CLEANED_TOPICS:]),
    )
