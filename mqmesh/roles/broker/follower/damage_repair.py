"""A follower's damage: looked for beside all else, and put right with its leader's bytes. Pure.

Only what is confirmed is asked for: the rest may be cut, here or there. While the leader's log is
streamed the two are one history, so bytes at one place are the same.
"""

import logging
from collections.abc import Callable
from typing import Final

from mqmesh.clock import Clock
from mqmesh.errors import MQMeshError
from mqmesh.protocol.command import Command, decode_header
from mqmesh.protocol.replication import ReplicateLog
from mqmesh.roles.broker.replica_metrics import ReplicaCounts
from mqmesh.storage.interface import DamagedRange, LogChunk, ReplicableLog
from mqmesh.units import CommitLogOffset

RETRY_MS: Final = 10_000
"""After the leader could not help: it may be another one then."""

OnRead = Callable[[Command | MQMeshError], None]
ReadLog = Callable[[int, int, OnRead], None]
"""Asks for records between two commit-log offsets, answered with ``ReplicateLog``."""

_log = logging.getLogger(__name__)


class DamageRepair:
    """The repair of a follower's log.

    Args:
        log: The log as it is now.
        counts: Counts what is repaired.
        on_repaired: Called when nothing is damaged any more.
        clock: Source of time.
    """

    def __init__(
        self,
        log: Callable[[], ReplicableLog],
        counts: ReplicaCounts,
        *,
        on_repaired: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._log = log
        self._counts = counts
        self._on_repaired = on_repaired
        self._clock = clock
        self._is_requested = self._is_closed = False
        self._retry_ms = 0

    def tick(self, now_ms: int, read_log: ReadLog, confirmed: int) -> None:
        """Looks at a slice of the log, and asks for a damaged range; while the leader sends.

        Args:
            now_ms: Monotonic clock.
            read_log: Asks the leader.
            confirmed: Nothing behind this commit-log offset is asked for.
        """
        repair = self._log().repair
        repair.look()
        if self._is_requested or now_ms < self._retry_ms:
            return
        found = [one for one in repair.damaged() if one.end_offset <= confirmed]
        if not found:
            return
        first = found[0]
        self._is_requested = True
        try:
            read_log(first.start_offset, first.end_offset, lambda got: self._on_read(first, got))
        except MQMeshError as error:
            self._on_read(first, error)

    def close(self) -> None:
        """Ignore answers that come from now on."""
        self._is_closed = True

    def _on_read(self, damaged: DamagedRange, outcome: Command | MQMeshError) -> None:
        if self._is_closed:
            return
        self._is_requested = False
        start, end = damaged.start_offset, damaged.end_offset
        repair = self._log().repair
        try:
            if isinstance(outcome, MQMeshError):
                raise outcome
            header = decode_header(ReplicateLog, outcome.header)
            repair.put_back(
                LogChunk(
                    CommitLogOffset(header.start),
                    CommitLogOffset(header.end),
                    header.segment_end,
                    header.epoch,
                    outcome.body,
                )
            )
        except MQMeshError as error:
            self._retry_ms = self._clock.monotonic_ms() + RETRY_MS
            _log.error("bytes %d to %d of the log stay damaged: %s", start, end, error)
            return
        self._counts.repaired_bytes += len(outcome.body)
        _log.warning("bytes %d to %d of the log are the leader's again", header.start, header.end)
        if not repair.damaged():
            self._on_repaired()
