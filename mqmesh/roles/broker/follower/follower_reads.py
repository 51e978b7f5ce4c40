"""Reads from a follower: how much of the log it shows, and whether it answers now. Pure.

Where masters are elected it shows what is confirmed, and nothing before it knows that all it
began with is: part of that may be taken back. Elsewhere it shows what it has.
"""

from mqmesh.units import MAX_OFFSET


class FollowerReads:
    """A follower's reads, from when its log was read until it is cut or replaced.

    Args:
        log_end: Where its log ends now, as a commit-log offset.
        now_ms: Monotonic clock.
        enabled: ``ha.slave_read_enable``.
        elects: Masters are elected (``ha.mode`` is ``auto``).
        lag_max_ms: A follower that was not caught up with its leader for so long answers no reads.

    Attributes:
        lag_max_ms: As given; it may be changed.
        confirmed: No failover takes back what ends at this commit-log offset, as far as is known.
    """

    def __init__(
        self, log_end: int, now_ms: int, *, enabled: bool, elects: bool, lag_max_ms: int
    ) -> None:
        self._begun_end = log_end
        self._enabled = enabled
        self._elects = elects
        self.lag_max_ms = lag_max_ms
        # The leader's log ended here at that time; once this replica has it, it was caught up then.
        self._goal: tuple[int, int] | None = None
        self._caught_up_ms = now_ms
        self.confirmed = 0

    def shown_to(self) -> int:
        """Readers are shown what ends at this commit-log offset or before."""
        return max(self.confirmed, self._begun_end) if self._elects else MAX_OFFSET

    def kept_to(self, log_end: int) -> int | None:
        """Return how much of a log that ends at a commit-log offset may be derived for good.

        None while that is not known: it was more before this life of the follower.
        """
        if not self._elects:
            return log_end
        return min(self.confirmed, log_end) if self.confirmed >= self._begun_end else None

    def begin_leader(self, now_ms: int) -> None:
        """Follow another leader from now on, or nobody; monotonic clock."""
        self._goal, self._caught_up_ms = None, now_ms

    def note_leader(self, leader_end: int, confirmed: int, now_ms: int) -> None:
        """The leader says where its log ends, and to where that is confirmed.

        Args:
            leader_end: Commit-log offset.
            confirmed: Commit-log offset.
            now_ms: Monotonic clock.
        """
        self.confirmed = max(self.confirmed, confirmed)
        # An end that was never there is never reached.
        if self._goal is None or leader_end < self._goal[0]:
            self._goal = (leader_end, now_ms)

    def has(self, log_end: int) -> None:
        """The follower's own log ends at a commit-log offset."""
        if self._goal is not None and log_end >= self._goal[0]:
            self._caught_up_ms = self._goal[1]
            self._goal = None

    def lag_ms(self, now_ms: int) -> int:
        """Return how many ms ago it had all that its leader had then; monotonic clock."""
        return 0 if self._goal is None else max(now_ms - self._caught_up_ms, 0)

    def answers(self, now_ms: int, *, streaming: bool, is_damaged: bool = False) -> bool:
        """Return whether the follower answers reads now.

        Args:
            now_ms: Monotonic clock.
            streaming: Its leader sends. Without a leader it serves what it has.
            is_damaged: Records of its log are lost, until its leader has given them again.
        """
        if not self._enabled or (self._elects and self.confirmed < self._begun_end):
            return False
        is_behind = self._goal is not None and now_ms - self._caught_up_ms > self.lag_max_ms
        return not (streaming and (is_behind or is_damaged))
