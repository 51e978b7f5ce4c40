"""C7 and C9: messages that are to be seen later, or never. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from harness.history import ACKED, COMMITTED, ROLLED_BACK, UNKNOWN, Delivery, History, MessageKey


def half_messages(history: History) -> Iterable[str]:
    """C7: what is wrong with the messages of transactions."""
    delivered = _first_ms(history.deliveries)
    stored = Counter(one.key for one in history.stored)
    for half in history.halves:
        key, first_ms, count = half.key, delivered.get(half.key), stored[half.key]
        if half.decision == COMMITTED:
            if first_ms is None:
                yield f"{key} was committed and never delivered"
            elif first_ms < half.decided_ms:
                yield f"{key} was delivered {half.decided_ms - first_ms:.0f} ms before its commit"
            if count != 1:
                yield f"{key} was committed and is stored {count} times"
        elif first_ms is not None or count:
            decided = "was rolled back" if half.decision == ROLLED_BACK else "was never decided"
            yield f"{key} {decided} and is visible"


def delayed_messages(history: History) -> Iterable[str]:
    """C9: what is wrong with the messages for later."""
    delivered = _first_ms(history.deliveries)
    ids: dict[MessageKey, set[str]] = defaultdict(set)
    places: dict[MessageKey, set[tuple[str, int]]] = defaultdict(set)
    for one in (*history.stored, *history.deliveries):
        ids[one.key].add(one.message_id)
        places[one.key].add(one.place)
    repeats = 0
    for message in history.delayed:
        key, first_ms = message.key, delivered.get(message.key)
        is_there = key in places
        if message.cancelled == ACKED:
            if is_there:
                yield f"{key} was cancelled and is there"
            continue
        if first_ms is None:
            if message.outcome == ACKED and message.cancelled != UNKNOWN:
                yield f"{key} was accepted for later and never delivered"
            continue
        if first_ms < message.due_ms - history.early_ms:
            yield f"{key} was delivered {message.due_ms - first_ms:.0f} ms too early"
        if history.late_ms and first_ms > message.due_ms + history.late_ms:
            yield f"{key} was delivered {first_ms - message.due_ms:.0f} ms after it was due"
        if len(ids[key]) > 1:
            yield f"{key} has several ids: {', '.join(sorted(ids[key]))}"
        repeats += len(places[key]) - 1
    if repeats > history.delayed_repeats:
        yield f"{repeats} delayed messages are stored again; {history.delayed_repeats} may be"


def _first_ms(deliveries: list[Delivery]) -> dict[MessageKey, float]:
    first: dict[MessageKey, float] = {}
    for one in deliveries:
        first[one.key] = min(one.time_ms, first.get(one.key, one.time_ms))
    return first
