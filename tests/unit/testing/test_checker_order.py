"""H4 says the same as a search through all orders, and finds what is planted."""

from __future__ import annotations

import itertools

import pytest
from harness.checker import check
from harness.checker_order import linearizable
from harness.history import ACKED, UNKNOWN, Attempt, Delivery, History, Look
from hypothesis import given
from hypothesis import strategies as st

END = float("inf")


def sent(offset, called_ms, answered_ms=END, outcome=ACKED):
    place = ("b/0", offset) if outcome == ACKED else ("", -1)
    return Attempt("p", offset, "h", outcome, "sync", *place, f"id{offset}", called_ms, answered_ms)


def stored(count, times_ms=()):
    times = dict(enumerate(times_ms))
    return [
        Delivery("p", one, "h", "b/0", one, f"id{one}", times.get(one, 0.0), "c")
        for one in range(count)
    ]


def judged(*attempts, looks=(), deliveries=()):
    history = History(
        attempts=list(attempts),
        stored=stored(len(attempts)),
        looks=[Look("b/0", *look) for look in looks],
        deliveries=list(deliveries),
    )
    return list(linearizable(history))


@pytest.mark.parametrize(
    "attempts",
    [
        [sent(0, 1, 2), sent(1, 3, 4)],
        [sent(0, 1, 5), sent(1, 0, 2)],  # both on their way at once
        [sent(0, 9, outcome=UNKNOWN), sent(1, 1, 10)],
    ],
)
def test_places_in_the_order_of_time_are_good(attempts):
    assert judged(*attempts) == []


def test_a_send_in_front_of_what_was_acknowledged_before_it_is_found():
    assert judged(sent(0, 5, 6), sent(1, 1, 4)) == [
        "b/0 at 1: it was acknowledged to p, and 1 ms later p began to send 0"
    ]


def test_so_is_one_whose_outcome_nobody_knows():
    assert judged(sent(0, 5, outcome=UNKNOWN), sent(1, 1, 4))


def test_a_leader_that_does_not_show_what_was_acknowledged_is_found():
    told = judged(sent(0, 1, 2), looks=[(0, 3, 3)])
    assert told == [
        "b/0 at 0: it was acknowledged to p, and 1 ms later the queue ended at 0 for readers"
    ]
    assert judged(sent(0, 1, 3), looks=[(0, 3, 3), (1, 4, 4)]) == []


def test_a_queue_that_becomes_shorter_is_found():
    assert judged(sent(0, 1), looks=[(1, 2, 3), (0, 4, 5)])


def test_a_delivery_before_what_was_sent_in_front_of_it_is_found():
    seen = stored(2, times_ms=(20, 4))
    assert judged(sent(0, 5, 9), sent(1, 1, 9), deliveries=seen)


def test_a_whole_history_tells_it():
    history = History(attempts=[sent(0, 5, 6), sent(1, 1, 4)], stored=stored(2))
    assert "H4" in check(history).broken


times = st.integers(0, 6)
sends = st.tuples(times, times, st.booleans())
looks = st.tuples(st.integers(0, 3), times, times)


def some_order_explains(attempts, looks):
    """Wing and Gong: some order of the calls, each of which agrees with those in front of it."""
    calls = [("append", one.number, one.called_ms, one.answered_ms) for one in attempts]
    calls += [("look", *look) for look in looks]
    for order in itertools.permutations(calls):
        length, latest = 0, 0
        for kind, value, began, ended in order:
            latest = max(latest, began)
            if value != length or latest > ended:
                break
            length += kind == "append"
        else:
            return True
    return False


@given(st.lists(sends, max_size=3), st.lists(looks, max_size=3))
def test_it_is_what_a_search_through_all_orders_finds(sends, some_looks):
    attempts = [
        sent(offset, began, max(began, ended) if is_acked else END, ACKED if is_acked else UNKNOWN)
        for offset, (began, ended, is_acked) in enumerate(sends)
    ]
    # Nobody looks behind what is there in the end: C1 finds that.
    some_looks = [
        (end, min(began, ended), max(began, ended))
        for end, began, ended in some_looks
        if end <= len(attempts)
    ]
    found = judged(*attempts, looks=some_looks)
    assert bool(found) is not some_order_explains(attempts, some_looks)
