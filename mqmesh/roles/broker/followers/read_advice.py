"""Choice of the follower that readers of a master are to read from. Pure.

A consumer whose zone has a follower, and not the master, reads from that follower. A consumer so
far behind that the master would read from its disk, and push other pages out of the page cache,
reads from any follower that is in sync.
"""

from collections.abc import Callable
from typing import Final

from mqmesh.batch.record_batch import read_header
from mqmesh.errors import CorruptBatch
from mqmesh.protocol.pulling import PullRequest
from mqmesh.roles.broker.followers.follower_table import Follower, FollowerTable
from mqmesh.roles.broker.ha.leadership import Leadership
from mqmesh.roles.broker.ha_config import HaConfig
from mqmesh.storage.interface import GetResult, GetStatus

NOBODY: Final = 0
"""The master itself."""

_WRONG_PLACES: Final = frozenset((GetStatus.OFFSET_TOO_SMALL, GetStatus.OFFSET_OVERFLOW))


class ReadAdvice:
    """The advice of one master.

    Args:
        ha: Settings.
        followers: Those that are connected.
        leadership: Of a master that was elected.
        log_end: Where the log ends.
        memory_bytes: Of the machine; 0 if that is not known.
    """

    def __init__(
        self,
        ha: HaConfig,
        followers: FollowerTable,
        leadership: Leadership | None,
        log_end: Callable[[], int],
        memory_bytes: int,
    ) -> None:
        self._ha = ha
        self._followers = followers
        self._leadership = leadership
        self._log_end = log_end
        ratio = ha.access_message_in_memory_max_ratio
        self._far_bytes = memory_bytes * ratio // 100

    def replica_for(self, pull: PullRequest, result: GetResult) -> int:
        """Return the follower that a reader is to read from, 0 for none.

        Args:
            pull: Request of the reader.
            result: Result of the store.
        """
        if not len(self._followers) or not self._ha.slave_read_enable:
            return NOBODY  # nearly always: this is asked with every answer
        if result.status in _WRONG_PLACES:
            return NOBODY  # a follower would wait for what it has not got
        log_end = self._log_end()
        good = [one for one in self._followers if self._is_good(one, log_end)]
        if pull.zone and pull.zone != self._ha.zone:
            near = [one for one in good if one.zone == pull.zone]
            if near:
                return _one_of(near, pull.queue_id)
        if good and _behind_bytes(result, log_end) > self._far_bytes:
            return _one_of(good, pull.queue_id)
        return NOBODY

    def _is_good(self, one: Follower, log_end: int) -> bool:
        if not one.serves_reads:
            return False
        if self._leadership is not None:
            return one.replica_id in self._leadership.members
        return log_end - one.written <= self._ha.ha_window_bytes


def _one_of(followers: list[Follower], queue_id: int) -> int:
    ids = sorted(one.replica_id for one in followers)
    return ids[queue_id % len(ids)]


def _behind_bytes(result: GetResult, log_end: int) -> int:
    """Return how many bytes the record found lies before the end of the log; 0 if none was."""
    if result.status is not GetStatus.FOUND:
        return 0
    try:
        return log_end - read_header(result.data[0], 0).commitlog_offset
    except CorruptBatch:
        return 0  # the reader finds that out, too
