"""The timetable: what waits, what is due, what is cancelled, what is rolled forward."""

from __future__ import annotations

import struct

import pytest
from harness.sorted_pairs import SortedPairs
from hypothesis import given, settings
from hypothesis import strategies as st

from mqmesh.batch.delayed_batch import RECORD_QUEUE, SCHEDULE_QUEUES
from mqmesh.errors import CorruptRecord
from mqmesh.protocol.schedule import DueStatus, ScheduledEntry
from mqmesh.roles.schedule.chunks import CHUNK_RUNS, cut, decode_chunk, runs_of, without
from mqmesh.roles.schedule.timetable import Found, Timetable

DONE, GONE, NOT_DUE = DueStatus.DONE, DueStatus.GONE, DueStatus.NOT_DUE
BOOT = b"boot"


def entry(place, *times, count=None, producer=7, first=None, group=""):
    count = count or len(times)
    first = place if first is None else first
    due_times = struct.pack(f"<{len(times)}q", *times)
    return ScheduledEntry(place, count, producer, first, due_times, group)


def cursors(records=0):
    return [*([0] * RECORD_QUEUE), records]


def table(*entries, pairs=None):
    made = Timetable(SortedPairs() if pairs is None else pairs)
    made.begin(1, 1, BOOT)
    made.add(entries, [], cursors())
    return made


def drain(made, now_ms):
    """Takes and settles everything that is due; its runs."""
    runs = []
    while (taken := made.take(now_ms)) is not None:
        runs += made.settle(taken, bytes(len(taken.runs)))
    return runs


def test_nothing_waits_in_a_new_table():
    made = table()
    assert (made.next_due_ms(), made.take(10**12), made.lowest_place()) == (None, None, None)
    assert made.state.pending == 0
    assert len(made.state.cursors) == SCHEDULE_QUEUES


def test_a_batch_of_one_level_is_one_run():
    made = table(entry(100, 5_000, count=500))
    assert made.next_due_ms() == 5_000
    assert made.take(4_999) is None
    assert drain(made, 5_000) == [(100, 0, 500)]
    assert (made.next_due_ms(), made.state.pending) == (None, 0)


def test_what_is_being_delivered_is_due_until_it_is_settled():
    made = table(entry(100, 10), entry(200, 5_000))
    taken = made.take(10)
    assert (made.next_due_ms(), made.next_due_ms(also_leaving=True)) == (5_000, 10)
    made.put_back(taken)
    assert drain(made, 5_000)
    assert made.next_due_ms(also_leaving=True) is None


def test_messages_come_in_the_order_of_their_times_and_runs_in_that_of_the_log():
    made = table(entry(200, 30, 10, 20), entry(100, 10, 40))
    assert drain(made, 10) == [(100, 0, 1), (200, 1, 1)]
    assert made.next_due_ms() == 20
    assert drain(made, 35) == [(200, 0, 1), (200, 2, 1)]
    assert drain(made, 100) == [(100, 1, 1)]


def test_what_is_overdue_together_is_one_run_though_due_at_many_times():
    times = [(i * 7919) % 1_000 for i in range(500)]
    made = table(entry(100, *times))
    assert drain(made, 1_000) == [(100, 0, 500)]


def test_what_was_taken_is_not_taken_twice():
    made = table(entry(100, 5), entry(200, 6), entry(300, 7))
    first = made.take(6)
    assert first.runs == [(100, 0, 1), (200, 0, 1)]
    assert made.take(6) is None
    assert made.next_due_ms() == 7
    second = made.take(7)
    assert second.runs == [(300, 0, 1)]
    made.put_back(first)
    assert made.take(9).runs == first.runs
    made.settle(second, b"\0")
    assert made.state.pending == 2


def test_what_the_broker_did_not_look_at_or_finds_too_early_waits_on():
    made = table(entry(100, 1), entry(200, 1), entry(300, 1), entry(400, 1))
    taken = made.take(1)
    assert made.settle(taken, bytes((DONE, NOT_DUE, GONE))) == [(100, 0, 1), (300, 0, 1)]
    assert made.take(1).runs == [(200, 0, 1), (400, 0, 1)]
    assert made.state.pending == 2


def test_new_messages_that_are_due_earlier_come_first():
    made = table(entry(100, 50))
    taken = made.take(60)
    made.add([entry(200, 10)], [], cursors())
    assert made.next_due_ms() == 10
    assert made.take(60).runs == [(200, 0, 1)]
    made.settle(taken, b"\0")


def test_records_of_the_log_remove_what_was_done_also_of_the_same_pull():
    made = table()
    made.add([entry(100, 5, 6, 7, 8)], [[(100, 1, 2)], [(999, 0, 1)]], cursors(2))
    assert made.state.pending == 2
    assert drain(made, 10) == [(100, 0, 1), (100, 3, 1)]
    assert made.state.cursors[RECORD_QUEUE] == 2


def test_a_record_may_come_before_the_answer_that_it_tells_of():
    made = table(entry(100, 5, 6, 50), entry(200, 5))
    taken = made.take(6)
    made.add([], [[(100, 0, 2)], [(200, 0, 1)]], cursors(2))
    assert made.state.pending == 1
    assert made.settle(taken, bytes(2)) == [(100, 0, 2), (200, 0, 1)]
    assert made.state.pending == 1
    assert drain(made, 100) == [(100, 2, 1)]
    assert made.state.pending == 0


def retries_of(made):
    return {one.group: (one.count, one.oldest_offset) for one in made.retries.report(100)}


def test_what_waits_for_a_retry_is_counted_by_group_at_every_step():
    pairs = SortedPairs()
    made = table(
        entry(100, 5, count=3, group="g"),
        entry(200, 5, 7, group="g"),
        entry(300, 5, group="other"),
        entry(400, 5, count=9),
        pairs=pairs,
    )
    assert retries_of(made) == {"g": (5, 100), "other": (1, 300)}
    assert retries_of(made) == {}, "nothing changed since"
    assert retries_of(Timetable(pairs)) == {"g": (5, 100), "other": (1, 300)}
    made.add([entry(500, 60, group="g")], [[(100, 0, 1), (300, 0, 1), (400, 0, 1)]], cursors(1))
    assert retries_of(made) == {"g": (5, 100), "other": (0, -1)}
    drain(made, 5)
    assert retries_of(Timetable(pairs)) == retries_of(made) == {"g": (2, 200)}
    made.remove([(200, 0, 2), (500, 0, 1)])
    assert retries_of(made) == {"g": (0, -1)}
    assert (made.state.pending, retries_of(Timetable(pairs))) == (0, {})


def test_few_groups_are_reported_at_once_and_the_others_later():
    made = table(*[entry(100 + number, 5, group=f"g{number}") for number in range(5)])
    assert sorted(len(made.retries.report(2)) for _ in range(4)) == [0, 1, 2, 2]


def test_own_records_need_not_be_read():
    made = table()
    made.remove([], 1)
    assert (made.state.cursors[RECORD_QUEUE], made.state.settled) == (0, 2)
    made.remove([], 0)
    assert (made.state.cursors[RECORD_QUEUE], made.state.settled) == (1, 2)


def test_an_answer_and_its_record_are_one_change():
    pairs = SortedPairs()
    made = table(entry(100, 5), pairs=pairs)
    made.settle(made.take(5), b"\0", 0)
    state = Timetable(pairs).state
    assert (state.pending, state.cursors[RECORD_QUEUE], state.settled) == (0, 1, 1)


def test_a_pull_that_was_asked_before_a_record_does_not_take_the_cursor_back():
    made = table(entry(100, 5))
    made.settle(made.take(5), b"\0", 0)
    made.add([], [], cursors(0))
    assert made.state.cursors[RECORD_QUEUE] == 1


def test_everything_survives_the_process():
    pairs = SortedPairs()
    made = table(entry(100, 5, 6), entry(200, 9), pairs=pairs)
    made.settle(made.take(5), b"\0")
    made.take(100)
    again = Timetable(pairs)
    assert again.begin(1, 1, BOOT) == ""
    assert again.state.pending == 2
    assert drain(again, 100) == [(100, 1, 1), (200, 0, 1)]


@pytest.mark.parametrize(
    ("store_id", "epoch", "boot_id", "clean", "why"),
    [
        (1, 1, BOOT, False, ""),
        (1, 1, b"other", True, ""),
        (1, 1, b"other", False, "the machine went down"),
        (2, 1, BOOT, True, "it is of store 1, not 2"),
        (1, 2, BOOT, True, ""),
    ],
)
def test_a_table_belongs_to_one_store(store_id, epoch, boot_id, clean, why):
    pairs = SortedPairs()
    table(entry(1, 1), pairs=pairs).mark(clean=clean)
    again = Timetable(pairs)
    found = again.begin(store_id, epoch, boot_id)
    assert found.startswith(why)
    assert bool(found) == bool(why)
    assert again.state.epoch == 1, "the broker compares it with its log's epochs"


def test_changes_take_the_mark_of_a_clean_stop_away():
    pairs = SortedPairs()
    made = table(pairs=pairs)
    made.mark(clean=True)
    made.add([entry(1, 1)], [], cursors())
    assert not Timetable(pairs).state.clean


@pytest.mark.parametrize("state", [b"", b"\xc0", b"\x91\x01"])
def test_what_is_no_timetable_is_told(state):
    pairs = SortedPairs()
    pairs.write([(b"s", state)])
    with pytest.raises(CorruptRecord):
        Timetable(pairs)


def test_a_message_is_found_by_its_id_until_the_log_forgets_it():
    made = table(entry(100, 5, 9, first=1_000), entry(200, 9, first=1_002))
    assert made.find(7, 1_001) == (Found.WAITS, [(100, 1, 1)], [(100, 0)])
    assert made.find(7, 1_002)[1] == [(200, 0, 1)]
    assert made.find(7, 1_003)[0] is Found.UNKNOWN
    assert made.find(8, 1_001)[0] is Found.UNKNOWN
    taken = made.take(5)
    assert made.find(7, 1_001)[0] is Found.LEAVING  # its chunk is on its way
    made.settle(taken, b"\0")
    assert made.find(7, 1_000)[0] is Found.OVER
    assert made.find(7, 1_001)[0] is Found.WAITS
    made.remove([(100, 1, 1)])
    assert made.find(7, 1_001)[0] is Found.OVER
    assert not made.forget_before(150)
    assert made.find(7, 1_001)[0] is Found.UNKNOWN
    assert made.find(7, 1_002)[0] is Found.WAITS


def test_what_is_held_is_not_taken():
    made = table(entry(100, 5), entry(200, 5))
    made.hold([(100, 0)])
    assert made.find(7, 100)[0] is Found.LEAVING
    assert drain(made, 9) == [(200, 0, 1)]
    made.release([(100, 0)])
    assert drain(made, 9) == [(100, 0, 1)]


def test_the_old_is_rolled_forward_and_found_at_its_new_place():
    made = table(entry(100, 50, 60, 70, first=1_000), entry(200, 80, first=1_003))
    assert made.lowest_place() == 100
    runs, chunk_ids = made.to_roll(150)
    assert (runs, chunk_ids) == ([(100, 0, 3)], [(100, 0)])
    made.hold(chunk_ids)
    assert made.to_roll(150) == ([], [])
    made.add([entry(900, 50, 60, 70, first=1_000)], [], cursors())
    made.remove(runs)
    made.release(chunk_ids)
    assert made.lowest_place() == 200
    assert made.find(7, 1_001)[1] == [(900, 1, 1)]
    assert drain(made, 100) == [(200, 0, 1), (900, 0, 3)]


def test_ids_are_forgotten_a_slice_at_a_time():
    made = table(*(entry(place, 5, first=place) for place in range(5_000)))
    slices = 1
    while made.forget_before(4_999):
        slices += 1
    assert slices == 3
    assert made.find(7, 4_998)[0] is Found.UNKNOWN
    assert made.find(7, 4_999)[0] is Found.WAITS


def test_chunks_are_small_and_a_damaged_one_is_told():
    runs = runs_of(list(range(1_000, 0, -1)), 1_000)
    assert runs[0] == (1, 999, 1)
    assert max(map(len, cut(runs))) == CHUNK_RUNS
    for data in (b"", b"x", bytes(17)):
        with pytest.raises(CorruptRecord):
            decode_chunk(data)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_runs_hold_each_message_once(times, data):
    runs = runs_of(times, len(times))
    ordinals = {first + i: due for due, first, count in runs for i in range(count)}
    assert [ordinals[i] for i in range(len(times))] == times
    first = data.draw(st.integers(0, len(times) - 1))
    count = data.draw(st.integers(1, len(times) - first))
    left = {first_ + i for _, first_, size in without(runs, first, count) for i in range(size)}
    assert left == set(range(len(times))) - set(range(first, first + count))


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=90), max_size=8), st.data())
def test_every_message_leaves_once_when_it_is_due(batches, data):
    pairs = SortedPairs()
    made = table(*(entry(i * 1_000, *times) for i, times in enumerate(batches, 1)), pairs=pairs)
    left: dict[tuple[int, int], int] = {
        (i * 1_000, ordinal): due
        for i, times in enumerate(batches, 1)
        for ordinal, due in enumerate(times)
    }
    for now_ms in range(0, 31, 3):
        while (taken := made.take(now_ms)) is not None:
            size = data.draw(st.integers(1, len(taken.runs)))
            statuses = data.draw(
                st.lists(st.sampled_from((DONE, GONE)), min_size=size, max_size=size)
            )
            for place, first, count in made.settle(taken, bytes(statuses)):
                for ordinal in range(first, first + count):
                    assert left.pop((place, ordinal)) <= now_ms
        assert all(due > now_ms for due in left.values())
        assert made.state.pending == len(left)
        if data.draw(st.booleans()):
            made = Timetable(pairs)
            made.begin(1, 1, BOOT)
    assert not left
