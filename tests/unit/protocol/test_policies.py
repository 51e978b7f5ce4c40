"""Policies of consumer groups."""

from __future__ import annotations

import pytest

from mqmesh.errors import InvalidArgument
from mqmesh.message import MAX_DELAY_MS
from mqmesh.protocol.groups import GroupConfig
from mqmesh.protocol.policies import (
    FOREVER_MS,
    check_group_policies,
    parse_retry_delays,
    paused,
    paused_until,
)


def delays(text, count=6, message_id="1"):
    found = parse_retry_delays(text)
    return [found.delay_ms(times, message_id) for times in range(count)]


def test_steps_are_taken_in_order_and_the_last_one_stays():
    assert delays("10s 30s 1m") == [10_000, 30_000, 60_000, 60_000, 60_000, 60_000]
    assert parse_retry_delays("") is None


def test_growing_delays_end_at_their_maximum():
    assert delays("exp 1s x2 max 10s") == [1_000, 2_000, 4_000, 8_000, 10_000, 10_000]
    assert delays("exp 100ms x1.5 max 2h", 3) == [100, 150, 225]
    longest = parse_retry_delays("exp 1s x100 max 14640d")
    assert longest.delay_ms(1_000_000, "1") == MAX_DELAY_MS


def test_jitter_is_within_its_share_and_the_same_on_a_repeat():
    found = [delays("10s 10s jitter 20%", 50, str(number)) for number in range(50)]
    assert found == [delays("10s 10s jitter 20%", 50, str(number)) for number in range(50)]
    every = [delay for one in found for delay in one]
    assert min(every) >= 8_000
    assert max(every) <= 12_000
    assert len(set(every)) > 1_000
    assert 9_900 < sum(every) / len(every) < 10_100


@pytest.mark.parametrize("first", ["orders/0/", "E7F9298A44C1BEEF0000000000000"])
@pytest.mark.parametrize("times", [0, 3])
def test_jitter_takes_messages_apart_that_were_sent_one_after_the_other(first, times):
    found = [delays("10s jitter 20%", 4, f"{first}{number:03X}")[times] for number in range(16)]
    assert max(found) - min(found) > 2_000


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("soon", "'soon' is no delay"),
        ("10s 0s", "'0s' is no delay"),
        ("10s, 20s", "'10s,' is no delay"),
        (" ", "no delay"),
        ("1s " * 65, "65 delays; 1 to 64"),
        ("exp 1s x0.5 max 2h", "x0.5 is not between 1 and 100"),
        ("exp 1s x101 max 2h", "x101 is not between"),
        ("exp 1h x2 max 1s", "max 1s is under the first delay 1h"),
        ("exp 1s x2", "'exp' is no delay"),
        ("1s jitter 51%", "jitter 51% is over 50%"),
        ("jitter 20%", "'jitter' is no delay"),
    ],
)
def test_other_schedules_are_refused_with_what_is_wrong(text, why):
    with pytest.raises(InvalidArgument, match="retry_delays") as raised:
        check_group_policies(GroupConfig("g", retry_delays=text))
    assert why in str(raised.value)


@pytest.mark.parametrize("name", ["keep", "drop", "orders-dead"])
def test_dead_letters_are_kept_dropped_or_sent_to_a_topic(name):
    check_group_policies(GroupConfig("g", dead_letter=name))


@pytest.mark.parametrize("name", ["", "a b", "%RETRY%g", "%DLQ%h", "SCHEDULE_TOPIC_XXXX"])
def test_dead_letters_go_to_no_reserved_topic(name):
    with pytest.raises(InvalidArgument, match="dead_letter"):
        check_group_policies(GroupConfig("g", dead_letter=name))


def test_a_pause_is_of_all_topics_or_of_one():
    one = paused(GroupConfig("g"), 50, "orders", 10)
    assert (paused_until(one, "orders"), paused_until(one, "other")) == (50, 0)
    both = paused(one, FOREVER_MS, "", 20)
    assert paused_until(both, "orders") == paused_until(both, "other") == FOREVER_MS
    assert paused(both, 0, "", 30) == GroupConfig("g")
    assert paused(one, 0, "orders", 30) == GroupConfig("g")
    # What is over is left out.
    assert paused(one, 90, "other", 51).paused_topics == {"other": 90}


def test_there_is_an_end_of_paused_topics():
    topics = {f"t{number}": 1 for number in range(257)}
    with pytest.raises(InvalidArgument, match="257 topics; 256 are allowed"):
        check_group_policies(GroupConfig("g", paused_topics=topics))
