"""C7 and C9 find what is planted, and nothing else."""

from __future__ import annotations

import msgspec
import pytest
from harness.checker import check
from harness.history import (
    ACKED,
    COMMITTED,
    REFUSED,
    ROLLED_BACK,
    UNDECIDED,
    UNKNOWN,
    DelayedMessage,
    Delivery,
    HalfMessage,
    History,
)


def delivery(number, offset=None, **changes):
    offset = number if offset is None else offset
    one = Delivery("p", number, f"h{number}", "b/0", offset, f"id{number}", 100.0 + number, "c")
    return msgspec.structs.replace(one, **changes)


def half(number, decision=COMMITTED, decided_ms=50.0):
    return HalfMessage("p", number, f"h{number}", decision, decided_ms)


def delayed(number, due_ms=50.0, outcome=ACKED, cancelled=""):
    return DelayedMessage("p", number, f"h{number}", outcome, due_ms, cancelled)


def broken(history):
    return check(history).broken


@pytest.fixture
def halves():
    """Two messages that were committed, one rolled back and one that nobody decided about."""
    return History(
        halves=[half(0), half(1), half(7, ROLLED_BACK), half(8, UNDECIDED)],
        deliveries=[delivery(0), delivery(1), delivery(1)],
        stored=[delivery(0), delivery(1)],
    )


def test_good_transactions_are_good(halves):
    assert check(halves).good


def test_c7_a_message_is_seen_before_its_commit(halves):
    halves.halves[1] = half(1, decided_ms=102.0)
    assert broken(halves) == ["C7"]
    assert "1 ms before its commit" in check(halves).text()


@pytest.mark.parametrize("decision", [ROLLED_BACK, UNDECIDED])
def test_c7_a_message_is_seen_without_a_commit(halves, decision):
    halves.halves[1] = half(1, decision)
    assert broken(halves) == ["C7"]


@pytest.mark.parametrize("number", [7, 8])
def test_c7_a_message_without_a_commit_is_in_the_log(halves, number):
    halves.stored.append(delivery(number, 2))
    assert broken(halves) == ["C7"]


def test_c7_a_committed_message_is_not_delivered(halves):
    del halves.deliveries[0]
    assert broken(halves) == ["C7"]


def test_c7_a_committed_message_is_there_twice_or_not_at_all(halves):
    halves.stored.append(delivery(1, 2, message_id="another"))
    halves.deliveries.append(delivery(1, 2, message_id="another"))
    assert "C7" in broken(halves)
    halves.stored = [delivery(0)]
    assert "C7" in broken(halves)


def test_c2_still_knows_what_was_never_sent(halves):
    halves.deliveries.append(delivery(5, 5))
    assert broken(halves) == ["C2"]


@pytest.fixture
def later():
    """Delayed messages of all fates, all well."""
    return History(
        delayed=[
            delayed(0),
            delayed(1, due_ms=101.0),
            delayed(6, cancelled=ACKED),
            delayed(7, cancelled=UNKNOWN),
            delayed(8, outcome=UNKNOWN),
            delayed(9, outcome=REFUSED),
        ],
        deliveries=[delivery(0), delivery(1)],
        stored=[delivery(0), delivery(1)],
    )


def test_good_delays_are_good(later):
    assert check(later).good


def test_what_is_not_known_may_be_there(later):
    for number, offset in ((7, 2), (8, 3)):
        later.deliveries.append(delivery(number, offset))
        later.stored.append(delivery(number, offset))
    assert check(later).good


def test_c9_too_early(later):
    later.delayed[1] = delayed(1, due_ms=111.0)
    assert broken(later) == ["C9"]
    assert "10 ms too early" in check(later).text()
    later.early_ms = 10.0
    assert check(later).good


def test_c9_too_late(later):
    later.late_ms = 40.0
    assert broken(later) == ["C9"]
    later.late_ms = 50.0
    assert check(later).good


def test_c9_lost(later):
    del later.deliveries[0]
    assert broken(later) == ["C9"]


def test_c9_delivered_after_it_was_cancelled(later):
    later.deliveries.append(delivery(6, 2))
    later.stored.append(delivery(6, 2))
    assert broken(later) == ["C9"]


def test_c9_repeats_are_bounded_and_keep_the_id(later):
    later.stored.append(delivery(1, 2))
    later.deliveries.append(delivery(1, 2))
    assert broken(later) == ["C9"]
    later.delayed_repeats = 1
    assert check(later).good
    later.stored[-1] = delivery(1, 2, message_id="another")
    later.deliveries[-1] = delivery(1, 2, message_id="another")
    assert broken(later) == ["C9"]


def test_c2_a_delayed_message_that_was_refused(later):
    later.stored.append(delivery(9, 2))
    assert "C2" in broken(later)
