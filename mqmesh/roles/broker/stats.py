"""What a broker counts, and the rates of the last seconds."""

from collections import deque
from typing import Final, Generic, TypeVar

import msgspec

from mqmesh.protocol.messaging import SendStatus

_Totals = TypeVar("_Totals", bound=msgspec.Struct)

SAMPLE_MS: Final = 1_000
WINDOW_SAMPLES: Final = 10
"""Rates are those of so many of the last samples."""


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
        """How much one of the totals grew per second, over the last samples."""
        if len(self._samples) < 2:
            return 0.0
        (first_ms, first), (last_ms, last) = self._samples[0], self._samples[-1]
        grown: int = getattr(last, name) - getattr(first, name)
        return grown * 1_000 / max(last_ms - first_ms, 1)


class BrokerStats(Stats[Counters]):
    """What handlers count.

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
