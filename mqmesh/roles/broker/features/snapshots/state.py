"""The snapshot that a broker is making: one at a time, step by step.

Copying and linking is done by a helper thread, the copy of the index by the index process; the
broker's loop only begins the next step. The order makes sure that nothing in a snapshot is ahead
of its log: the small files first, then the index, then the end of the log as it was when these
two were done, as soon as it is durable.
"""

from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Final

import msgspec

from mqmesh.errors import SystemBusy
from mqmesh.protocol.request import PendingReply
from mqmesh.roles.broker.helper_thread import RunAside

SYNC_WAIT_MS: Final = 2_000
"""After so long a snapshot ends with what is durable then."""


class SnapshotStep(Enum):
    """Step of a snapshot that is being waited for; each follows the one before."""

    BEGIN = "small files are copied"
    INDEX = "the index is copied"
    SYNC = "the log becomes durable"
    FINISH = "segments are linked"


class SnapshotJob(msgspec.Struct, eq=False):
    """A snapshot that is being made.

    Attributes:
        pending: Answer that its client waits for.
        began_ms: When it came, monotonic clock.
        step: Step that is under way.
        new: Its directory under a temporary name, None before there is one.
        wanted_offset: Commit-log offset that must become durable; known from ``SYNC`` on.
        deadline_ms: When that is waited for no more.
        messages: In all queues when the end was known.
        archive: Archive that it is for; empty for none.
    """

    pending: PendingReply
    began_ms: int
    step: SnapshotStep = SnapshotStep.BEGIN
    new: Path | None = None
    wanted_offset: int = 0
    deadline_ms: int = 0
    messages: int = 0
    archive: str = ""


class SnapshotJobs:
    """Has at most one job.

    Attributes:
        job: It, or None.
        made: Snapshots made since the broker was started.
        failed: Those that were not.
    """

    def __init__(self, run_aside: RunAside | None = None, root: Path | None = None) -> None:
        """Starts without a job.

        Args:
            run_aside: None where nothing can be done aside, so no snapshot made.
            root: Directory of the broker's store.
        """
        self.run_aside = run_aside
        self.store_root = root
        self.job: SnapshotJob | None = None
        self.made = 0
        self.failed = 0
        self._given_up = False

    def give_up(self) -> None:
        """The broker stops, and does not wait for long copies."""
        self._given_up = True

    def is_given_up(self) -> bool:
        """True once the broker stops; the helper thread asks."""
        return self._given_up

    def begin(self, pending: PendingReply, now_ms: int, archive: str = "") -> SnapshotJob:
        """Takes a request in.

        Raises:
            SystemBusy: A snapshot is being made already.
        """
        if self.job is not None:
            raise SystemBusy(
                f"this broker is making a snapshot already ({self.job.step.value})",
                retry_after_ms=1_000,
            )
        self.job = SnapshotJob(pending, now_ms, archive=archive)
        return self.job

    def wait_for_log(self, end_offset: int, now_ms: int) -> None:
        """Index and small files are there: now the log must be durable as far as it goes."""
        assert self.job is not None
        self.job.step = SnapshotStep.SYNC
        self.job.wanted_offset = end_offset
        self.job.deadline_ms = now_ms + SYNC_WAIT_MS

    def ready_offset(self, durable_offset: int, now_ms: int) -> int | None:
        """Return the end of the snapshot, once it is durable; else None."""
        job = self.job
        if job is None or job.step is not SnapshotStep.SYNC:
            return None
        if durable_offset < job.wanted_offset and now_ms < job.deadline_ms:
            return None
        job.step = SnapshotStep.FINISH
        return durable_offset

    def end(self, *, made: bool) -> None:
        """The job is over."""
        self.job = None
        self.made += made
        self.failed += not made


def snapshot_name(broker_name: str, wall_ms: int, commitlog_offset: int) -> str:
    """Name of a snapshot's directory; those of a broker sort by time."""
    moment = datetime.fromtimestamp(wall_ms / 1_000, UTC).strftime("%Y%m%dT%H%M%S%f")[:-3]
    return f"{broker_name}.{moment}Z.{commitlog_offset}"
