"""Who may be sent how much of the log, and how far it is safe with followers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import InvalidArgument
from mqmesh.roles.broker.followers.follower_table import FollowerTable
from mqmesh.token_bucket import TokenBucket
from mqmesh.units import MAX_OFFSET

WINDOW = 1_000
LOG_END = 10_000


@pytest.fixture
def table() -> FollowerTable:
    return FollowerTable(window_bytes=WINDOW, fall_behind_bytes=500, retain_ms=60_000)


def opened(table: FollowerTable, peer: bytes = b"a", offset: int = 0, replica_id: int = 1):
    table.open(peer, replica_id, log_end=LOG_END, offset=offset, now_ms=0)
    return next(one for one in table if one.peer == peer)


def test_one_may_be_sent_a_window_more_than_it_has_written(table):
    one = opened(table, offset=100)
    assert table.room(one, LOG_END, 0) == WINDOW
    table.sent(one, 900, 0, 0)
    assert table.room(one, LOG_END, 0) == 200
    table.acknowledged(b"a", 600, 0, 0)
    assert table.room(one, LOG_END, 0) == 700


def test_those_who_catch_up_share_a_rate_and_who_is_nearly_there_is_not_held_up(table):
    table.catch_up_rate = TokenBucket(500)
    first, second = opened(table), opened(table, b"b", replica_id=2)
    near = opened(table, b"c", LOG_END - WINDOW, replica_id=3)
    assert table.room(first, LOG_END, 0) == WINDOW, "a second's worth is there at first"
    table.sent(first, 750, 0, 0)
    for one in first, second:
        assert table.room(one, LOG_END, 499) == 0, "they owe 250 bytes"
    assert table.room(near, LOG_END, 0) == WINDOW
    table.sent(near, LOG_END, 0, 0)
    assert table.room(second, LOG_END, 501) == WINDOW
    table.catch_up_rate = None
    assert table.room(first, LOG_END, 501) == WINDOW - 750


def test_a_rate_is_kept_over_time(table):
    table.catch_up_rate = TokenBucket(2_000)
    one, sent = opened(table), 0
    for now_ms in range(0, 3_000, 10):
        if (room := table.room(one, LOG_END, now_ms)) > 0:
            sent = min(one.sent + min(room, 300), LOG_END)
            table.sent(one, sent, 0, now_ms)
            table.acknowledged(b"a", sent, 0, now_ms)
    assert 8_000 <= sent <= 8_300, "3 s, and the one that was there at first"


def test_one_that_was_ahead_of_its_master_is_refused(table):
    with pytest.raises(InvalidArgument, match="10001"):
        opened(table, offset=10_001)
    assert not len(table)


@pytest.mark.parametrize(
    ("written", "synced"), [(901, 0), (99, 0), (500, 501), (MAX_OFFSET, MAX_OFFSET)]
)
def test_who_says_what_cannot_be_counts_no_more(table, written, synced):
    one = opened(table, offset=100)
    table.sent(one, 900, 0, 0)
    with pytest.raises(InvalidArgument, match=str(written)):
        table.acknowledged(b"a", written, synced, 0)
    assert not len(table)
    assert table.counts.nacks == 1
    assert table.position == 0
    with pytest.raises(InvalidArgument, match="opened no replication"):
        table.acknowledged(b"a", 500, 0, 0)


def test_it_is_safe_with_whoever_has_most_and_that_never_goes_back(table):
    first, second = opened(table), opened(table, b"b", replica_id=2)
    table.sent(first, 900, 0, 0)
    table.sent(second, 900, 0, 0)
    assert table.acknowledged(b"a", 300, 0, 0)
    assert not table.acknowledged(b"b", 200, 0, 0)
    assert table.position == 300
    assert table.acknowledged(b"b", 400, 0, 0)
    table.forget(b"b")
    assert table.position == 400


def test_with_sync_flush_what_counts_is_on_the_disk(table):
    table = FollowerTable(window_bytes=WINDOW, fall_behind_bytes=500, counts_synced=True)
    one = opened(table)
    table.sent(one, 900, 0, 0)
    assert not table.acknowledged(b"a", 900, 0, 0)
    assert table.acknowledged(b"a", 900, 700, 0)
    assert table.position == 700


def test_one_that_lacks_too_much_is_not_waited_for(table):
    assert not table.is_available(0)
    one = opened(table, offset=100)
    assert table.is_available(600)
    assert not table.is_available(601)
    table.sent(one, 400, 0, 0)
    table.acknowledged(b"a", 400, 0, 0)
    assert table.is_available(900)
    assert table.forget(b"a") is one
    assert not table.is_available(900)
    assert table.forget(b"a") is None


def test_a_follower_that_comes_by_another_connection_counts_once(table):
    old = opened(table)
    assert table.open(b"b", 1, log_end=10, offset=5, now_ms=0) == [old]
    assert [one.peer for one in table] == [b"b"]
    assert table.open(b"b", 1, log_end=10, offset=5, now_ms=0) == []


def test_the_log_is_kept_for_one_that_was_heard_lately(table):
    assert not table.was_used
    one = opened(table, offset=100)
    table.sent(one, 900, 0, 0)
    table.acknowledged(b"a", 200, 0, 1_000)
    table.forget(b"a")
    assert table.was_used
    assert table.needed(61_000) == [(1, 200)]
    assert table.needed(61_001) == [(1, MAX_OFFSET)]


def test_one_that_hangs_is_not_waited_for(table):
    one = opened(table)
    assert table.silent(3_000) == []
    table.acknowledged(b"a", 0, 0, 1_000)
    assert table.silent(4_000) == []
    assert table.silent(4_001) == [one]
    assert not len(table)
    assert table.counts.slave_timeouts == 1
    assert table.last_seen() == {1: (0, 1_000)}, "it is known all the same"
    assert table.last_seen(since_ms=1_001) == {}


def test_idle_ones_are_told_now_and_then(table):
    one = opened(table)
    assert table.idle(499, 500, 0) == []
    assert table.idle(500, 500, 0) == [one]
    assert table.idle(999, 500, 0) == []
    table.sent(one, 10, 0, 900)
    assert table.idle(1_000, 500, 0) == []
    assert [status.silent_ms for status in table.status(700)] == [700]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "send", "ack", "forget"]),
            st.integers(0, 2),
            st.integers(0, 50),
        ),
        max_size=60,
    )
)
def test_whatever_comes_position_is_what_somebody_has_said_and_never_goes_back(steps):
    table = FollowerTable(window_bytes=20, fall_behind_bytes=10)
    said = [0]
    before = 0
    for verb, number, offset in steps:
        peer = bytes([number])
        one = next((one for one in table if one.peer == peer), None)
        if verb == "open":
            table.open(peer, number + 1, log_end=50, offset=offset, now_ms=0)
        elif verb == "forget":
            table.forget(peer)
        elif one is not None and verb == "send":
            table.sent(one, min(one.written + 20, max(one.sent, offset)), 0, 0)
            assert 0 <= table.room(one, LOG_END, 0) <= 20
        elif one is not None and verb == "ack":
            try:
                table.acknowledged(peer, offset, 0, 0)
                said.append(offset)
            except InvalidArgument:
                assert peer not in [one.peer for one in table]
        assert before <= table.position in said
        before = table.position


def test_what_is_confirmed_is_told_without_delay_and_once(table):
    one = opened(table)
    assert table.idle(100, 500, 70) == [one]
    assert table.idle(101, 500, 70) == []
    table.sent(one, 90, 80, 102)
    assert table.idle(103, 500, 80) == []
    assert table.idle(104, 500, 81) == [one]
