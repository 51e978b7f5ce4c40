"""Decides whether a recorded history keeps what mqmesh promises. Pure.

Producers write down each attempt and its outcome; consumers, each delivery;
at the end the whole log is read once more. ``check`` compares these with the invariants:

==== ==================================================================================
C1   every acknowledged message is in the log, where the acknowledgement said, and was
     delivered
C2   nothing is delivered or stored that was never attempted or was refused, and every body
     is the one sent
C3   a place in a queue never has two contents
C4   per queue, the log and the first deliveries keep the order in which a producer sent
C5   the log has every message once; deliveries that repeat are counted
C6   committed offsets never go back, nor beyond the end; a broker that is killed may put
     them back to what they were when it saved them last
C7   half messages: never visible before their commit, never after a rollback, always after
     a commit, once
C8   every lookup by key or id equals a full scan of the log
C9   delayed messages: never early, never lost, never after they were cancelled; what comes
     twice has the same id
C10  memory, descriptors, threads and room on the disk come back to a bound
C11  what was not served is served again within a bound
C12  nothing is refused, cut or set aside silently: there is an error code, a line in the log
     and a counter
C13  a send that returned with another status than SEND_OK is in the log, where its answer
     said, unless that status says that it may be lost
H4   what is acknowledged, delivered or shown is in front of every message that is sent later;
     what is acknowledged or shown is shown to everybody who looks later
==== ==================================================================================
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from harness.checker_later import delayed_messages, half_messages
from harness.checker_order import linearizable
from harness.checker_system import (
    lookups_equal_a_scan,
    nothing_silent,
    resources_return,
    served_again,
)
from harness.history import (
    ACKED,
    REFUSED,
    RETURNED,
    UNKNOWN,
    Attempt,
    Commit,
    DelayedMessage,
    Delivery,
    HalfMessage,
    History,
    MessageKey,
    Place,
)

__all__ = [
    "ACKED",
    "REFUSED",
    "RETURNED",
    "UNKNOWN",
    "Attempt",
    "Commit",
    "Delivery",
    "History",
    "Report",
    "Verdict",
    "check",
]

EXAMPLES: Final = 3
"""Violations of an invariant that a report shows."""


class Verdict(msgspec.Struct, frozen=True):
    """Verdict on one invariant.

    Attributes:
        invariant: ``C1`` to ``C13``, or ``H4``.
        violations: A sentence for each; empty when it holds.
    """

    invariant: str
    violations: list[str]


class Report(msgspec.Struct, frozen=True):
    """Verdicts on a history.

    Attributes:
        verdicts: One for each invariant.
        counts: Messages by outcome, stored, delivered, and deliveries that were repeats.
    """

    verdicts: list[Verdict]
    counts: dict[str, int]

    @property
    def good(self) -> bool:
        """True when every invariant holds."""
        return not any(verdict.violations for verdict in self.verdicts)

    @property
    def broken(self) -> list[str]:
        """The invariants that do not hold."""
        return [verdict.invariant for verdict in self.verdicts if verdict.violations]

    def text(self) -> str:
        """Formats a line of metrics, and lines for broken invariants."""
        lines = [", ".join(f"{count} {name}" for name, count in self.counts.items())]
        for verdict in self.verdicts:
            if verdict.violations:
                lines.append(f"{verdict.invariant} is broken {len(verdict.violations)} times:")
                lines += [f"  {violation}" for violation in verdict.violations[:EXAMPLES]]
        return "\n".join(lines)


def check(history: History) -> Report:
    """Judges a history."""
    rules: dict[str, Callable[[History], Iterable[str]]] = {
        "C1": _delivered,
        "C2": _attempted,
        "C3": _one_content,
        "C4": _in_order,
        "C5": _stored_once,
        "C6": _commits_go_on,
        "C7": half_messages,
        "C8": lookups_equal_a_scan,
        "C9": delayed_messages,
        "C10": resources_return,
        "C11": served_again,
        "C12": nothing_silent,
        "C13": _returned,
        "H4": linearizable,
    }
    outcomes = [attempt.outcome for attempt in history.attempts]
    different = len({(one.key, one.place) for one in history.deliveries})
    return Report(
        [Verdict(name, list(rule(history))) for name, rule in rules.items()],
        {
            "attempted": len(outcomes),
            **{name: outcomes.count(name) for name in (ACKED, REFUSED, UNKNOWN)},
            **({RETURNED: outcomes.count(RETURNED)} if RETURNED in outcomes else {}),
            "stored": len(history.stored),
            "delivered": different,
            "delivered again": len(history.deliveries) - different,
            **({"looked up": len(history.lookups)} if history.lookups else {}),
        },
    )


def _delivered(history: History) -> Iterable[str]:
    stored = {(one.key, one.place, one.message_id) for one in history.stored}
    delivered = {one.key for one in history.deliveries}
    for one in history.attempts:
        if one.outcome != ACKED:
            continue
        key, place = (one.producer, one.number), (one.queue, one.queue_offset)
        if (key, place, one.message_id) not in stored:
            yield f"{key} was acknowledged at {place} and is not there"
        if key not in delivered:
            yield f"{key} was acknowledged at {place} and never delivered"


def _returned(history: History) -> Iterable[str]:
    stored = {(one.key, one.place, one.message_id) for one in history.stored}
    for one in history.attempts:
        key, place = (one.producer, one.number), (one.queue, one.queue_offset)
        if one.outcome == RETURNED and (key, place, one.message_id) not in stored:
            yield f"the send of {key} returned, said that it is at {place}, and it is not there"


def _attempted(history: History) -> Iterable[str]:
    sent: list[Attempt | HalfMessage | DelayedMessage] = [
        *history.attempts,
        *history.halves,
        *history.delayed,
    ]
    attempted = {(one.producer, one.number): one.body_hash for one in sent}
    tried: list[Attempt | DelayedMessage] = [*history.attempts, *history.delayed]
    refused = {(one.producer, one.number) for one in tried if one.outcome == REFUSED}
    for kind, seen in (("delivered", history.deliveries), ("stored", history.stored)):
        for one in seen:
            body_hash = attempted.get(one.key)
            if body_hash is None:
                yield f"{one.key} was {kind} at {one.place} and never sent"
            elif body_hash != one.body_hash:
                yield f"{one.key} was {kind} at {one.place} with another body"
            elif one.key in refused:
                yield f"{one.key} was {kind} at {one.place} though it was refused"


def _one_content(history: History) -> Iterable[str]:
    contents: dict[Place, tuple[str, str]] = {}
    for one in (*history.stored, *history.deliveries):
        content = (one.message_id, one.body_hash)
        if contents.setdefault(one.place, content) != content:
            yield f"{one.place} has two contents: {contents[one.place][0]} and {one.message_id}"
    for queue, offsets in _by_queue(history.stored).items():
        for before, after in itertools.pairwise(offsets):
            if after.queue_offset != before.queue_offset + 1:
                yield f"{queue} has a gap behind offset {before.queue_offset}"


def _in_order(history: History) -> Iterable[str]:
    acked = {(one.producer, one.number) for one in history.attempts if one.outcome == ACKED}
    first: dict[tuple[str, MessageKey], Delivery] = {}
    for one in sorted(history.deliveries, key=lambda one: one.time_ms):
        first.setdefault((one.queue, one.key), one)
    for kind, seen in (("stored", history.stored), ("first delivered", first.values())):
        last: dict[tuple[str, str], int] = {}
        for one in seen:
            if one.key not in acked:
                continue
            before = last.get((one.queue, one.producer), -1)
            if one.number < before:
                yield f"{one.key} was {kind} behind {before}, at {one.place}"
            last[one.queue, one.producer] = max(one.number, before)


def _stored_once(history: History) -> Iterable[str]:
    places: dict[MessageKey, Place] = {}
    ids: dict[str, Place] = {}
    delayed = {one.key for one in history.delayed}
    for one in history.stored:
        if one.key in delayed:
            continue  # see C9
        if places.setdefault(one.key, one.place) != one.place:
            yield f"{one.key} is stored twice: at {places[one.key]} and {one.place}"
        if ids.setdefault(one.message_id, one.place) != one.place:
            yield f"id {one.message_id} is at {ids[one.message_id]} and {one.place}"


def _commits_go_on(history: History) -> Iterable[str]:
    looks: dict[tuple[str, str], list[Commit]] = defaultdict(list)
    highest: dict[tuple[str, str], int] = defaultdict(lambda: -1)
    for look in history.commits:
        if 0 <= look.end_offset < look.queue_offset:
            yield f"{look.group} committed {look.queue_offset} of {look.queue}, beyond its end"
        queue = look.group, look.queue
        before = looks[queue]
        # A commit that is not behind the highest offset that was ever seen needs no excuse.
        if look.queue_offset < highest[queue]:
            if look.queue_offset < _must_be_kept(history, before, look.time_ms):
                yield f"{look.group} went back to {look.queue_offset} in {look.queue}"
        highest[queue] = max(highest[queue], look.queue_offset)
        before.append(look)


def _must_be_kept(history: History, before: list[Commit], now_ms: float) -> int:
    """Returns the largest offset that was seen and that no kill excuses to be forgotten."""
    kept = -1
    for look in before:
        is_excused = any(
            look.time_ms <= kill_ms <= now_ms and kill_ms - history.offset_window_ms < look.time_ms
            for kill_ms in history.kills_ms
        )
        if not is_excused:
            kept = max(kept, look.queue_offset)
    return kept


def _by_queue(stored: list[Delivery]) -> dict[str, list[Delivery]]:
    queues: dict[str, list[Delivery]] = defaultdict(list)
    for one in stored:
        queues[one.queue].append(one)
    return queues
