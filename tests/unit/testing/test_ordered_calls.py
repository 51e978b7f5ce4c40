"""The judge of ordered consumption finds what is wrong, and nothing else."""

from __future__ import annotations

import pytest
from harness.ordered_calls import (
    Call,
    CallLog,
    find_disorder,
    find_overlaps,
    find_shared,
    find_skips,
    handovers_s,
    parse_call,
)

KEYS = ["a", "b", "a", "", "b", "a"]


def call(number, began, ended=None, *, member="m1", queue="q:0", offset=None, generation=1):
    offset = number if offset is None else offset
    return Call(member, queue, offset, number, generation, began, ended or began + 1)


@pytest.fixture
def good():
    """Six messages in order, the last two by another member."""
    return [
        call(n, n * 10, member="m1" if n < 4 else "m2", generation=1 if n < 4 else 2)
        for n in range(6)
    ]


def all_faults(calls):
    found = find_skips(calls), find_overlaps(calls), find_shared(calls), find_disorder(calls, KEYS)
    return [
        name
        for name, some in zip(["skip", "overlap", "shared", "disorder"], found, strict=True)
        if some
    ]


def test_order_is_no_fault(good):
    assert all_faults(good) == []


def test_repeats_after_a_crash_are_no_fault(good):
    again = [call(n, 35 + n, member="m2", generation=2) for n in (2, 3)]
    assert all_faults(good[:4] + again + [call(4, 40), call(5, 50)]) == []


def test_a_skip_is_found_even_if_the_message_comes_later(good):
    good[4], good[5] = call(5, 40), call(4, 50)
    assert "skip" in all_faults(good)


def test_two_calls_at_once_are_found(good):
    good[3] = call(3, 30, 45)
    assert all_faults(good) == ["overlap"]


def test_a_queue_may_be_given_back_and_go_to_another_member_in_one_generation(good):
    good[5] = call(5, 50, member="m3", generation=2)
    assert all_faults(good) == []


@pytest.mark.parametrize(
    "more",
    [
        [call(4, 45, member="m3", generation=2)],
        [call(5, 44, member="m3", generation=2), call(4, 46, member="m2", generation=2)],
    ],
)
def test_two_owners_in_one_generation_are_found(good, more):
    assert all_faults(good[:5] + more + good[5:]) == ["shared"]


def test_the_rest_of_a_queue_between_two_members_is_measured(good):
    assert handovers_s(good) == [9e-9]
    assert handovers_s(good[:4]) == []


def test_two_keys_may_overtake_each_other_but_not_two_messages_of_one(good):
    swapped = [call(0, 10), call(2, 20), call(1, 30), *good[3:]]
    assert find_disorder(swapped, KEYS) == []
    swapped = [call(2, 0), call(1, 10), call(0, 20), *good[3:]]
    assert find_disorder(swapped, KEYS) == ["key a: [2, 0, 5]… instead of [0, 2, 5]…"]


def test_a_message_with_a_key_that_never_came_is_found(good):
    assert find_disorder(good[:5], KEYS) == ["key a: [0, 2]… instead of [0, 2, 5]…"]


def test_calls_are_read_from_files_that_grow(tmp_path, good):
    log = CallLog(tmp_path)
    log.read()
    path = tmp_path / "m1.calls"
    path.write_bytes(good[0].line() + good[1].line()[:-4])
    log.read()
    assert log.calls == good[:1]
    path.write_bytes(good[0].line() + good[1].line())
    (tmp_path / "m2.calls").write_bytes(good[5].line())
    log.read()
    assert log.calls == [good[0], good[1], good[5]]
    assert log.numbers == {0, 1, 5}
    assert parse_call(good[2].line()) == good[2]
