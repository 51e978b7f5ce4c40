"""H4: each queue is linearizable, judged by the times of calls and answers. Pure.

An acknowledged send gives the place of its message, and a look at a queue how far the queue
goes. So no search for an order is needed, as it is for registers: there is one if and only if
moments can be chosen at which the places of a queue are taken, one behind the other, that lie
within what each send, delivery and look allows.
"""

from collections import defaultdict
from collections.abc import Iterable

from harness.history import ACKED, History, MessageKey, Place

_Bound = tuple[float, str]


def linearizable(history: History) -> Iterable[str]:
    """Finds queues for which no such moments can be chosen; the first place of each that has none.

    Deliveries are judged beside looks, not with them: a follower shows what is confirmed, and its
    leader nothing that its own disk does not have with ``SYNC_FLUSH``, so it may be behind a
    follower for a moment.
    """
    calls, seen = _of_sends(history), _of_sends(history)
    for delivery in history.deliveries:
        seen.by(delivery.place, delivery.time_ms, f"it was delivered to {delivery.consumer}")
    for look in history.looks:
        end = look.queue, look.end_offset
        calls.not_before(end, look.began_ms, f"the queue ended at {look.end_offset} for readers")
        if look.end_offset > 0:
            shown = look.queue, look.end_offset - 1
            calls.by(shown, look.ended_ms, "it was shown to readers")
    yield from dict.fromkeys([*calls.broken(), *seen.broken()])


def _of_sends(history: History) -> "_Bounds":
    bounds = _Bounds()
    # Also of sends whose outcome nobody knows, when they are there.
    places: dict[MessageKey, Place] = {one.key: one.place for one in history.stored}
    for one in history.attempts:
        place = places.get((one.producer, one.number))
        if one.outcome == ACKED:
            place = one.queue, one.queue_offset
            bounds.by(place, one.answered_ms, f"it was acknowledged to {one.producer}")
        if place is not None:
            bounds.not_before(place, one.called_ms, f"{one.producer} began to send {place[1]}")
    return bounds


class _Bounds:
    """Bounds of each place: not taken before a time, and taken by a time."""

    def __init__(self) -> None:
        self._earliest: dict[Place, _Bound] = {}
        self._latest: dict[Place, _Bound] = {}

    def not_before(self, place: Place, at_ms: float, why: str) -> None:
        """Notes that a place is not taken before a time."""
        self._earliest[place] = max(self._earliest.get(place, (at_ms, why)), (at_ms, why))

    def by(self, place: Place, at_ms: float, why: str) -> None:
        """Notes that a place is taken by a time."""
        self._latest[place] = min(self._latest.get(place, (at_ms, why)), (at_ms, why))

    def broken(self) -> Iterable[str]:
        """Returns a sentence for each queue whose bounds contradict each other."""
        queues: dict[str, set[int]] = defaultdict(set)
        for queue, offset in (*self._earliest, *self._latest):
            queues[queue].add(offset)
        for queue, offsets in queues.items():
            after: _Bound = (float("-inf"), "")
            for offset in sorted(offsets):
                after = max(after, self._earliest.get((queue, offset), after))
                before = self._latest.get((queue, offset))
                if before is not None and before[0] < after[0]:
                    late_ms = after[0] - before[0]
                    yield f"{queue} at {offset}: {before[1]}, and {late_ms:.0f} ms later {after[1]}"
                    break
