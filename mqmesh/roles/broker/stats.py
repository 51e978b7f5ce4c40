"""Totals of a broker, and how much they grew: of late, today and yesterday, in 24 hours. Pure.

Totals count from the broker's start. They are looked at once a second; very many ones, of topics
and groups, once a minute and at midnight (UTC).
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Generic, TypeVar

import msgspec

from mqmesh.protocol.messaging import SendStatus

_Totals = TypeVar("_Totals", bound=msgspec.Struct)

SAMPLE_MS: Final = 1_000
WINDOW_SAMPLES: Final = 10
"""Rates are those of so many of the last samples."""
MINUTE_MS: Final = 60_000
DAY_MS: Final = 24 * 60 * MINUTE_MS
HOURS: Final = 24

Totals = Mapping[str, int]
"""Totals of the whole broker, by name; what has never been counted may be left out."""


class Counters(msgspec.Struct):
    """Totals since the broker was started.

    Attributes:
        send_requests: SEND_MESSAGE requests.
        put_batches: Batches stored.
        put_messages: Messages in them.
        put_bytes: Their size in the log.
        put_duplicates: Batches that had been stored before.
        put_refused: Batches that were refused.
        pull_requests: PULL_MESSAGE requests.
        pulls_held: Pulls that waited for a message.
        get_bytes: Bytes of batches handed out.
        get_messages: Messages handed out.
        busy_refusals: Requests and batches refused with SYSTEM_BUSY.
        offset_commits: Offsets committed.
        replies_pushed: Replies handed to clients that asked.
        replies_undeliverable: Replies whose client was not there, or did not acknowledge.
        sent_back_messages: Messages that consumers sent back.
        dead_letters: Those of them that became dead letters.
        dropped_dead_letters: Messages that failed too often and were dropped.
        expired_messages: Messages that groups did not get because they had expired.
        resent_dead_letters: Dead letters that were sent once more.
        forced_lost_messages: Messages that were removed before their time although a group had not
            consumed them; those of several groups count for each.
    """

    send_requests: int = 0
    put_batches: int = 0
    put_messages: int = 0
    put_bytes: int = 0
    put_duplicates: int = 0
    put_refused: int = 0
    pull_requests: int = 0
    pulls_held: int = 0
    get_bytes: int = 0
    get_messages: int = 0
    busy_refusals: int = 0
    offset_commits: int = 0
    replies_pushed: int = 0
    replies_undeliverable: int = 0
    sent_back_messages: int = 0
    dead_letters: int = 0
    dropped_dead_letters: int = 0
    expired_messages: int = 0
    resent_dead_letters: int = 0
    forced_lost_messages: int = 0


class Stats(Generic[_Totals]):
    """Totals, and how quickly they grew of late.

    Args:
        total: At the beginning.

    Attributes:
        total: The totals; who counts adds to them.
    """

    def __init__(self, total: _Totals) -> None:
        self.total = total
        self._samples: deque[tuple[int, _Totals]] = deque(maxlen=WINDOW_SAMPLES + 1)

    def sample(self, now_ms: int) -> None:
        """Notes the totals; to be called each ``SAMPLE_MS``.

        Args:
            now_ms: Monotonic clock.
        """
        self._samples.append((now_ms, msgspec.structs.replace(self.total)))

    def rate(self, name: str) -> float:
        """Return how much one of the totals grew per second, over the last samples."""
        if len(self._samples) < 2:
            return 0.0
        (first_ms, first), (last_ms, last) = self._samples[0], self._samples[-1]
        grown: int = getattr(last, name) - getattr(first, name)
        return grown * 1_000 / max(last_ms - first_ms, 1)


class BrokerStats(Stats[Counters]):
    """Totals that handlers count.

    Attributes:
        unsafe_answers: Answers to sends that were stored but are not as safe as they should be, by
            status.
    """

    def __init__(self) -> None:
        super().__init__(Counters())
        self.unsafe_answers: dict[SendStatus, int] = {}

    def note_unsafe(self, status: SendStatus) -> None:
        """A send was answered although somebody lacks it who should have it."""
        counts = self.unsafe_answers
        counts[status] = counts.get(status, 0) + 1


class Before(msgspec.Struct, gc=False):
    """Former values of one of very many totals; they stand beside the total.

    Attributes:
        minute: Value at the last look at all totals.
        earlier_minute: Value at the look before.
        midnight: Value when the day began.
    """

    minute: int = 0
    earlier_minute: int = 0
    midnight: int = 0


class Periods:
    """Remembers totals of before, by keys.

    Args:
        now_ms: When all totals were 0, monotonic clock.
    """

    def __init__(self, now_ms: int) -> None:
        self._minutes_ms: deque[int] = deque([now_ms], maxlen=2)
        self._hours: deque[tuple[int, Totals]] = deque([(now_ms, {})], maxlen=HOURS + 1)
        self._day: int | None = None
        self._morning: Totals = {}
        self._morning_before: Totals = {}

    def sample(
        self,
        now_ms: int,
        day: int,
        totals: Callable[[], Totals],
        others: Callable[[], Iterable[tuple[Before, int]]],
    ) -> None:
        """Time went on.

        Args:
            now_ms: Monotonic clock.
            day: Number of the day.
            totals: Returns those of the whole broker; called once an hour.
            others: Returns all others, and what they were; called once a minute.
        """
        if now_ms - self._minutes_ms[-1] >= MINUTE_MS:
            self._minutes_ms.append(now_ms)
            for before, total in others():
                before.earlier_minute, before.minute = before.minute, total
        if now_ms - self._hours[-1][0] >= MINUTE_MS * 60:
            self._hours.append((now_ms, totals()))
        if self._day is None:
            self._day = day
        elif day != self._day:
            self._day = day
            self._morning_before, self._morning = self._morning, totals()
            for before, total in others():
                before.midnight = total

    def per_s(self, before: Before, total: int, now_ms: int) -> float:
        """Growth a second over the last one or two minutes."""
        return _per_s(total - before.earlier_minute, now_ms - self._minutes_ms[0])

    def today(self, name: str, total: int) -> int:
        """Growth since midnight, of a total of the whole broker."""
        return total - self._morning.get(name, 0)

    def yesterday(self, name: str) -> int:
        """Growth of the day before."""
        return self._morning.get(name, 0) - self._morning_before.get(name, 0)

    def per_s_of_day(self, name: str, total: int, now_ms: int) -> float:
        """Growth a second over the last 24 hours."""
        then_ms, totals = self._hours[0]
        return _per_s(total - totals.get(name, 0), now_ms - then_ms)


def _per_s(grown: int, duration_ms: int) -> float:
    return grown * 1_000 / max(duration_ms, 1_000)
