"""The commit point, when a put is safe: how far the log may be acknowledged, and seen by consumers.

The one place that decides it, from how far each holder of the log has come. With
``SYNC_FLUSH`` the disk is such a holder, with ``ASYNC_FLUSH`` nobody is: everything is
safe as soon as the store has it. A put is safe when all holders have it. Pure: holders
say where they are, callers say the time and carry out what is returned.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from mqmesh.errors import SystemBusy
from mqmesh.metrics import LATENCY_BOUNDS_MS, Histogram
from mqmesh.protocol.messaging import SendStatus
from mqmesh.units import MAX_OFFSET

QueueKey = tuple[str, int]
"""Topic and queue id."""

Waiter = TypeVar("Waiter")


class AckParticipant(msgspec.Struct, frozen=True):
    """Disk or follower that must have a put before the put is safe.

    Attributes:
        name: For people: "the disk".
        position: The holder has everything before this commit-log offset. It never goes back.
        status: Status of a put that was answered because the holder was late.
        setting: Name of the setting of that time limit.
        is_there: Puts do not wait for an absent holder: they get ``absent_status``, and count as
            safe.
        absent_status: Status of a put that an absent holder lacks.
        limits_readers: Messages that the holder lacks are not shown to consumers.
    """

    name: str
    position: Callable[[], int]
    status: SendStatus
    setting: str = "sync_flush_timeout_ms"
    is_there: Callable[[], bool] = lambda: True
    absent_status: SendStatus = SendStatus.SEND_OK
    limits_readers: bool = True


class _Wait(msgspec.Struct, Generic[Waiter], frozen=True, eq=False):
    waiter: Waiter
    end_offset: int
    deadline_ms: int


class CommitPoint(Generic[Waiter]):
    """Commit point of the log: how far it is safe, puts that wait for that, and the high watermark.

    Args:
        holders: Disk and followers that must have a put; none by default.
        timeout_ms: After so long a put is answered with the status of the holder that is late.
        most_waits: Puts that may wait at a time.
        retry_after_ms: Retry delay of a producer that is refused when so many wait.
        confirmed: Messages behind this commit-log offset are not shown, acknowledged or not: a
            failover may take them back. By default all acknowledged messages are shown.
        admit: Raises for puts that the broker group refuses now.

    Attributes:
        is_immediate: Puts are safe, and may be shown, as soon as the store has them: there are no
            holders, and no put waits.
        waits_ms: Waiting times of puts.
    """

    def __init__(
        self,
        holders: Sequence[AckParticipant] = (),
        *,
        timeout_ms: int = 5_000,
        most_waits: int = 10_000,
        retry_after_ms: int = 0,
        confirmed: Callable[[], int] | None = None,
        admit: Callable[[], None] | None = None,
    ) -> None:
        self._holders = tuple(holders)
        self._limits = tuple(holder for holder in holders if holder.limits_readers)
        self._confirmed = confirmed
        self._admit = admit
        self.is_immediate = not holders and confirmed is None and admit is None
        self.timeout_ms = timeout_ms
        self._most_waits = most_waits
        self._retry_after_ms = retry_after_ms
        self._waits: deque[_Wait[Waiter]] = deque()
        self._arrivals: dict[QueueKey, int] = {}
        self.waits_ms = Histogram(LATENCY_BOUNDS_MS)

    @property
    def waiting_count(self) -> int:
        """Puts that wait."""
        return len(self._waits)

    def offset(self) -> int:
        """Return the commit-log offset up to which records may be acknowledged."""
        return _least(self._holders) if self._holders else MAX_OFFSET

    def high_watermark(self) -> int:
        """Return the commit-log offset up to which records may be seen."""
        offset = _least(self._limits) if self._limits else MAX_OFFSET
        return offset if self._confirmed is None else min(offset, self._confirmed())

    def status_of(self, end_offset: int) -> SendStatus:
        """Return the status of a safe put: SEND_OK, or that of an absent holder that lacks it."""
        for holder in self._holders:
            if holder.position() < end_offset and not holder.is_there():
                return holder.absent_status
        return SendStatus.SEND_OK

    def is_safe(self, end_offset: int) -> bool:
        """Return whether a record that ends at a commit-log offset may be acknowledged and seen."""
        return end_offset <= min(self.offset(), self.high_watermark())

    def visible(self, log_end: int) -> int:
        """Return how far a log that ends at a commit-log offset may be shown."""
        return min(log_end, self.high_watermark())

    def check_room(self) -> None:
        """To be called before a put that may have to wait.

        Raises:
            SystemBusy: Too many wait.
            BrokerNotAvailable: Too few replicas are there.
        """
        if self._admit is not None:
            self._admit()
        if len(self._waits) >= self._most_waits:
            raise SystemBusy(
                f"{len(self._waits)} sends wait for {self._late_name()}, no more may "
                "(max_sync_flush_waits)",
                retry_after_ms=self._retry_after_ms,
            )

    def wait(self, waiter: Waiter, end_offset: int, now_ms: int) -> None:
        """Lets a put wait until it is safe, or the time for that is over.

        Args:
            waiter: Given back by ``confirmed``, ``expired`` or ``take_all``, once.
            end_offset: Where it ends in the log.
            now_ms: Monotonic clock; never before that of the call before.
        """
        self._waits.append(_Wait(waiter, end_offset, now_ms + self.timeout_ms))

    def note_arrival(self, key: QueueKey, end_offset: int) -> None:
        """A queue got a batch that consumers see once it is safe."""
        self._arrivals[key] = end_offset

    def confirmed(self, now_ms: int) -> list[Waiter]:
        """Puts that are safe now, in the order in which they came.

        A duplicate of something that is safe already may stand behind others for a moment.

        Args:
            now_ms: Monotonic clock.
        """
        found: list[Waiter] = []
        waits = self._waits
        offset = self.offset()
        while waits and waits[0].end_offset <= offset:
            found.append(self._end(waits.popleft(), now_ms))
        return found

    def arrivals(self) -> list[QueueKey]:
        """Queues in which more may be seen now than when this was called last."""
        found = list(self._arrivals)
        offset = self.high_watermark()
        for key in found:
            if self._arrivals[key] <= offset:
                del self._arrivals[key]
        return found

    def expired(self, now_ms: int) -> list[tuple[Waiter, AckParticipant | None]]:
        """Puts that waited for too long, each with who is late: None if it is safe by now.

        When several are late it is the one that is furthest behind.
        """
        found: list[tuple[Waiter, AckParticipant | None]] = []
        waits = self._waits
        while waits and waits[0].deadline_ms <= now_ms:
            wait = waits.popleft()
            last = self._last()
            is_late = last is not None and last.position() < wait.end_offset
            found.append((self._end(wait, now_ms), last if is_late else None))
        return found

    def take_all(self) -> list[Waiter]:
        """Return all puts that wait, safe or not, in the order in which they came."""
        found = [wait.waiter for wait in self._waits]
        self._waits.clear()
        return found

    def _end(self, wait: _Wait[Waiter], now_ms: int) -> Waiter:
        self.waits_ms.observe(now_ms - wait.deadline_ms + self.timeout_ms)
        return wait.waiter

    def _last(self) -> AckParticipant | None:
        there = [holder for holder in self._holders if holder.is_there()]
        return min(there, key=lambda holder: holder.position(), default=None)

    def _late_name(self) -> str:
        last = self._last()
        return "nobody" if last is None else last.name


def _least(holders: Sequence[AckParticipant]) -> int:
    least = MAX_OFFSET
    for one in holders:
        position = one.position()
        if position < least and one.is_there():
            least = position
    return least
