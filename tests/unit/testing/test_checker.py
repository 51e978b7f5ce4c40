"""The checker finds a planted violation of each invariant, and no other."""

from __future__ import annotations

import msgspec
import pytest
from harness.checker import (
    ACKED,
    REFUSED,
    RETURNED,
    UNKNOWN,
    Attempt,
    Commit,
    Delivery,
    History,
    check,
)


def attempt(number, **changes):
    one = Attempt("p", number, f"h{number}", ACKED, "sync", "b/0", number, f"id{number}")
    return msgspec.structs.replace(one, **changes)


def delivery(number, **changes):
    one = Delivery("p", number, f"h{number}", "b/0", number, f"id{number}", float(number), "c")
    return msgspec.structs.replace(one, **changes)


def look(offset, time_ms, end=100):
    return Commit("g", "b/0", offset, end, time_ms)


@pytest.fixture
def history():
    """Five messages that went well."""
    return History(
        attempts=[attempt(number) for number in range(5)],
        deliveries=[delivery(number) for number in range(5)],
        stored=[delivery(number) for number in range(5)],
        commits=[look(0, 0), look(3, 10), look(3, 20), look(5, 30)],
    )


def broken(history):
    return check(history).broken


def test_a_good_history_is_good(history):
    report = check(history)
    assert report.good
    assert report.text() == (
        "5 attempted, 5 acked, 0 refused, 0 unknown, 5 stored, 5 delivered, 0 delivered again"
    )


def test_an_empty_history_is_good():
    assert check(History()).good


def test_what_is_unknown_may_be_there_or_not(history):
    history.attempts[3] = attempt(3, outcome=UNKNOWN, queue="", queue_offset=-1, message_id="")
    history.attempts += [attempt(5, outcome=UNKNOWN), attempt(6, outcome=REFUSED)]
    assert check(history).good


def test_c1_an_acknowledged_message_that_is_not_stored(history):
    history.stored.pop()
    assert broken(history) == ["C1"]


def test_c1_an_acknowledged_message_that_is_elsewhere(history):
    history.attempts[4] = attempt(4, queue_offset=7)
    assert broken(history) == ["C1"]


def test_c1_an_acknowledged_message_that_is_not_delivered(history):
    history.deliveries.pop(2)
    report = check(history)
    assert report.broken == ["C1"]
    assert "('p', 2) was acknowledged at ('b/0', 2) and never delivered" in report.text()


def test_c2_a_message_that_nobody_sent(history):
    history.deliveries.append(delivery(9))
    assert broken(history) == ["C2"]


def test_c2_a_stored_message_that_nobody_sent(history):
    history.stored.append(delivery(5))
    assert broken(history) == ["C2"]


def test_c2_a_message_that_was_refused(history):
    history.attempts[3] = attempt(3, outcome=REFUSED)
    assert broken(history) == ["C2"]


def test_c2_another_body(history):
    history.deliveries[1] = delivery(1, body_hash="other")
    assert "C2" in broken(history)


def test_c13_a_send_that_returned_and_is_lost(history):
    history.attempts[4] = attempt(4, outcome=RETURNED)
    report = check(history)
    assert report.good
    assert report.counts["returned"] == 1
    history.stored.pop()
    history.deliveries.pop()
    report = check(history)
    assert report.broken == ["C13"]
    assert "the send of ('p', 4) returned, said that it is at ('b/0', 4)" in report.text()


def test_c13_a_send_that_returned_and_is_elsewhere(history):
    history.attempts[4] = attempt(4, outcome=RETURNED, queue_offset=7)
    assert broken(history) == ["C13"]


def test_c3_two_contents_of_one_place(history):
    history.attempts.append(attempt(5, outcome=UNKNOWN))
    history.deliveries.append(delivery(5, queue_offset=4))
    assert broken(history) == ["C3"]


def test_c3_a_hole_in_a_queue(history):
    history.attempts.append(attempt(6, queue_offset=6))
    history.stored.append(delivery(6))
    history.deliveries.append(delivery(6))
    assert broken(history) == ["C3"]


def test_c4_a_log_out_of_order(history):
    history.attempts[1], history.attempts[2] = (
        attempt(1, queue_offset=2),
        attempt(2, queue_offset=1),
    )
    history.stored[1:3] = [delivery(2, queue_offset=1), delivery(1, queue_offset=2)]
    history.deliveries[1:3] = [delivery(1, queue_offset=2), delivery(2, queue_offset=1)]
    assert broken(history) == ["C4"]


def test_c4_first_deliveries_out_of_order(history):
    history.deliveries[1] = delivery(1, time_ms=2.5)
    assert broken(history) == ["C4"]


def test_c4_is_about_first_deliveries_only(history):
    history.deliveries += [delivery(1, time_ms=7.0), delivery(2, time_ms=6.0)]
    report = check(history)
    assert report.good
    assert report.counts["delivered again"] == 2


def test_c4_knows_no_order_between_queues(history):
    history.attempts[1] = attempt(1, queue="b/1", queue_offset=0)
    history.attempts[2:] = [attempt(n, queue_offset=n - 1) for n in range(2, 5)]
    history.stored[1:] = [delivery(n, queue_offset=n - 1) for n in range(2, 5)]
    history.stored.append(delivery(1, queue="b/1", queue_offset=0))
    history.deliveries = [
        msgspec.structs.replace(one, time_ms=50.0) if one.number == 1 else one
        for one in history.stored
    ]
    assert check(history).good


def test_c5_a_message_that_is_stored_twice(history):
    history.stored.append(delivery(4, queue_offset=5, message_id="id5"))
    assert broken(history) == ["C5"]


def test_c5_an_id_that_is_used_twice(history):
    history.attempts.append(attempt(5, message_id="id4"))
    history.stored.append(delivery(5, message_id="id4"))
    history.deliveries.append(delivery(5, message_id="id4"))
    assert broken(history) == ["C5"]


def test_c6_an_offset_that_goes_back(history):
    history.commits.append(look(4, 40))
    assert broken(history) == ["C6"]


def test_c6_an_offset_beyond_the_end(history):
    history.commits.append(look(6, 40, end=5))
    assert broken(history) == ["C6"]


def test_c6_a_kill_excuses_what_was_committed_shortly_before(history):
    history.kills_ms, history.offset_window_ms = [35.0], 10.0
    history.commits.append(look(3, 40))
    assert check(history).good


def test_c6_a_kill_does_not_excuse_what_was_saved_before(history):
    history.kills_ms, history.offset_window_ms = [35.0], 10.0
    history.commits.append(look(2, 40))
    assert broken(history) == ["C6"]


def test_c6_a_kill_does_not_excuse_what_comes_behind_it(history):
    history.kills_ms, history.offset_window_ms = [25.0], 10.0
    history.commits.append(look(4, 40))
    assert broken(history) == ["C6"]


def test_c6_what_one_kill_excused_stays_excused_after_the_next(history):
    history.kills_ms, history.offset_window_ms = [35.0, 60.0], 10.0
    history.commits += [look(3, 40), look(3, 70)]
    assert check(history).good
