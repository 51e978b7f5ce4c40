"""The followers of a master: how much of the log each was sent, and has. Pure.

It decides who may be sent how much, and how far the log is safe with followers. Double write of
RocketMQ (``SYNC_MASTER``): a put is safe when one of them has it, as long as there is one that
could; a master whose followers are gone, or too far behind, goes on alone and says so.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from mqmesh.errors import InvalidArgument
from mqmesh.protocol.replication import MAX_CHUNK_BYTES, MAX_REPLICA_ID, ReplicaStatus
from mqmesh.protocol.request import Peer
from mqmesh.roles.broker.replica_metrics import ReplicaCounts
from mqmesh.token_bucket import TokenBucket
from mqmesh.units import MAX_OFFSET

TURN_BYTES: Final = 4 * MAX_CHUNK_BYTES
"""Sent to one follower in a turn of the loop, at most and beside one record."""

SILENT_MS: Final = 3_000
"""Followers speak each 200 ms; one that was silent for so long hangs, and is not waited for."""


class Follower(msgspec.Struct, eq=False):
    """One that is connected.

    Attributes:
        peer: Its connection.
        replica_id: Its broker id.
        sent: Commit-log offset; chunks were sent up to there.
        written: It has written so far.
        synced: And synced so far.
        last_seen_ms: Its last word, monotonic clock.
        notified_ms: When it was sent something, last.
        notified_confirmed: Confirmed commit-log offset that it was sent then.
        zone: Where it stands.
        serves_reads: It says that it answers reads.
        catches_up: It was sent so little of the log yet that a window is not all of the rest.
        wish: Its retention waits for what keeps the log up to this commit-log offset.
    """

    peer: Peer
    replica_id: int
    sent: int
    written: int
    synced: int
    last_seen_ms: int
    notified_ms: int
    notified_confirmed: int = 0
    zone: str = ""
    serves_reads: bool = True
    catches_up: bool = False
    wish: int = 0


class FollowerTable:
    """Followers that are connected.

    Args:
        window_bytes: Most bytes of log that a follower is sent before it has written them.
        fall_behind_bytes: Sends do not wait for a follower that lacks more.
        retain_ms: Time for which the log is kept for a follower that is gone.
        counts_synced: A put is with a follower once it is on its disk, not when it is written.
        counts: Of the process.
        began_ms: Since when followers may come, monotonic clock.

    Attributes:
        counts, began_ms: See above.
        by_peer: Followers by their connections.
        position: Everything before this commit-log offset is with a follower. It never goes back.
        catch_up_rate: Bytes that all who catch up are sent together; None for as much as they take.
            Those who lack no more than a window are not held up: sends wait for them.
    """

    def __init__(
        self,
        *,
        window_bytes: int,
        fall_behind_bytes: int,
        retain_ms: int = 600_000,
        counts_synced: bool = False,
        counts: ReplicaCounts | None = None,
        began_ms: int = 0,
    ) -> None:
        self.counts = counts or ReplicaCounts()
        self.began_ms = began_ms
        self._window_bytes = window_bytes
        self._fall_behind_bytes = fall_behind_bytes
        self._counts_synced = counts_synced
        self._retain_ms = retain_ms
        self.catch_up_rate: TokenBucket | None = None
        self.by_peer: dict[Peer, Follower] = {}
        # By replica: the place from which on retention keeps the log, and its last sign of life.
        self._kept: dict[int, tuple[int, int]] = {}
        self.position = 0

    def __len__(self) -> int:
        return len(self.by_peer)

    def __iter__(self) -> Iterator[Follower]:
        return iter(list(self.by_peer.values()))

    @property
    def was_used(self) -> bool:
        """False until there was a follower."""
        return bool(self._kept)

    @property
    def wish(self) -> int:
        """Commit-log offset up to which retention of one would remove its log; 0 for nothing.

        It is not beyond what the follower has written.
        """
        return max((min(one.wish, one.written) for one in self.by_peer.values()), default=0)

    def is_available(self, log_end: int) -> bool:
        """Return whether there is a follower that may soon have what is written.

        Args:
            log_end: Where the log ends.
        """
        enough = log_end - self._fall_behind_bytes
        return bool(self.by_peer) and max(map(self._has, self.by_peer.values())) >= enough

    def open(
        self,
        peer: Peer,
        replica_id: int,
        *,
        log_end: int,
        offset: int,
        now_ms: int,
        zone: str = "",
        serves_reads: bool = True,
    ) -> list[Follower]:
        """A follower begins, or begins again.

        Args:
            peer: Its connection.
            replica_id: Its broker id.
            log_end: Where the master's log ends.
            offset: Where its own log ends: a beginning of the master's.
            now_ms: Monotonic clock.
            zone, serves_reads: See ``Follower``.

        Returns:
            Earlier connections with the same id, which count no more.

        Raises:
            InvalidArgument: It is ahead of its master.
        """
        if offset > log_end:
            raise InvalidArgument(
                f"replica {replica_id} has the log up to {offset}, its master up to {log_end}"
            )
        assert 1 <= replica_id <= MAX_REPLICA_ID
        earlier = [one for one in self if one.replica_id == replica_id]
        for one in earlier:
            del self.by_peer[one.peer]
        self.by_peer[peer] = Follower(
            peer,
            replica_id,
            offset,
            offset,
            0,
            now_ms,
            now_ms,
            zone=zone,
            serves_reads=serves_reads,
        )
        self._kept[replica_id] = (offset, now_ms)
        return [one for one in earlier if one.peer != peer]

    def acknowledged(self, peer: Peer, written: int, synced: int, now_ms: int) -> bool:
        """A follower says how far it is.

        Args:
            peer: Its connection.
            written: Commit-log offset.
            synced: Commit-log offset.
            now_ms: Monotonic clock.

        Returns:
            True if more is safe with followers now.

        Raises:
            InvalidArgument: No follower has opened by this connection, or its position is
                impossible; the follower counts no more.
        """
        one = self.by_peer.get(peer)
        if one is None:
            raise InvalidArgument("an acknowledgement of a follower that has opened no replication")
        if not one.written <= written <= one.sent or not one.synced <= synced <= written:
            del self.by_peer[peer]
            self.counts.nacks += 1
            raise InvalidArgument(
                f"replica {one.replica_id} says that it has written to {written} and synced to "
                f"{synced}; it had {one.written} and {one.synced}, and was sent {one.sent}"
            )
        one.last_seen_ms = now_ms
        one.written, one.synced = written, synced
        self._kept[one.replica_id] = (written, now_ms)
        has = self._has(one)
        if has <= self.position:
            return False
        self.position = has
        return True

    def of(self, peer: Peer) -> Follower:
        """The follower that has opened by a connection."""
        return self.by_peer[peer]

    def room(self, one: Follower, log_end: int, now_ms: int) -> int:
        """Return how many bytes a follower may be sent now, 0 or less for none.

        Args:
            one: The follower.
            log_end: Where the log ends.
            now_ms: Monotonic clock.
        """
        one.catches_up = log_end - one.sent > self._window_bytes
        if one.catches_up and self.catch_up_rate and self.catch_up_rate.wait_ms(now_ms):
            return 0
        return one.written + self._window_bytes - one.sent

    def sent(self, one: Follower, end_offset: int, confirmed: int, now_ms: int) -> None:
        """Note that a follower was sent the log up to an offset, and the confirmed offset."""
        if one.catches_up and self.catch_up_rate is not None:
            self.catch_up_rate.take(end_offset - one.sent)
        one.sent, one.notified_confirmed, one.notified_ms = end_offset, confirmed, now_ms

    def idle(self, now_ms: int, after_ms: int, confirmed: int) -> list[Follower]:
        """Take followers that were sent nothing for so long, or not the confirmed offset.

        Args:
            now_ms: Monotonic clock.
            after_ms: How long.
            confirmed: The log is confirmed to this commit-log offset.
        """
        found = [
            one
            for one in self
            if now_ms - one.notified_ms >= after_ms or one.notified_confirmed < confirmed
        ]
        for one in found:
            one.notified_ms, one.notified_confirmed = now_ms, confirmed
        return found

    def silent(self, now_ms: int) -> list[Follower]:
        """Takes out those that hang: they were heard too long ago."""
        found = [one for one in self if now_ms - one.last_seen_ms > SILENT_MS]
        for one in found:
            del self.by_peer[one.peer]
        self.counts.slave_timeouts += len(found)
        return found

    def needed(self, now_ms: int) -> list[tuple[int, int]]:
        """From where the log is to be kept for each follower: its id, and a commit-log offset."""
        return [
            (replica_id, offset if now_ms - last_seen_ms <= self._retain_ms else MAX_OFFSET)
            for replica_id, (offset, last_seen_ms) in self._kept.items()
        ]

    def last_seen(self, *, since_ms: int = 0) -> dict[int, tuple[int, int]]:
        """Return the last report of each follower, connected or not, by id.

        Args:
            since_ms: Only those that were heard since then, monotonic clock.

        Returns:
            How far each had written, and when it was heard.
        """
        return {one: reported for one, reported in self._kept.items() if reported[1] >= since_ms}

    def forget(self, peer: Peer) -> Follower | None:
        """A connection broke; returns the follower if it was one's."""
        return self.by_peer.pop(peer, None)

    def status(self, now_ms: int) -> list[ReplicaStatus]:
        """All of them, by id."""
        return [
            ReplicaStatus(
                one.replica_id, one.sent, one.written, one.synced, max(now_ms - one.last_seen_ms, 0)
            )
            for one in sorted(self, key=lambda one: one.replica_id)
        ]

    def _has(self, one: Follower) -> int:
        return one.synced if self._counts_synced else one.written
