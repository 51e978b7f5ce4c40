"""Runs of an index part become one, in steps, while it is read and added to."""

from __future__ import annotations

import random

import pytest
from harness.index_parts import next_slice

from mqmesh.errors import CorruptRecord, DiskFull
from mqmesh.storage.index import merge as message_index_merge
from mqmesh.storage.index.blocks import BLOCK_ENTRIES
from mqmesh.storage.index.entries import key_entries
from mqmesh.storage.index.merge import MERGED_AT_ONCE, merge_runs, runs_to_merge, stretches
from mqmesh.storage.index.part import IDS, KEYS, IndexPart, SortedRun
from mqmesh.storage.index.seal import seal_part
from mqmesh.storage.index.texts import TextMaker

KEYS_A_RUN = 300


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch):
    monkeypatch.setattr(message_index_merge, "STEP_ENTRIES", 2 * BLOCK_ENTRIES)


def add_large(part: IndexPart, number: int) -> None:
    """A run of some blocks, with keys of its own, and one that all have."""
    texts = TextMaker()
    keys = [f"{number}-{key}" for key in range(KEYS_A_RUN)]
    data = b"\xdc" + (len(keys) + 1).to_bytes(2, "big")
    for key in [*keys, "all"]:
        data += bytes([0xA0 | len(key)]) + key.encode()
    texts.add("t", data, 1, part.head.through)
    part.append(next_slice(part, texts=texts))
    while part.tidy():
        pass


def places(part: IndexPart, key: str) -> list[int]:
    return part.key_places("t", key, below=2**32 - 1, most=1000)[0]


def check(part: IndexPart, runs: int) -> None:
    assert places(part, "all") == [100 * number for number in reversed(range(runs))]
    for number in range(runs):
        for key in (0, KEYS_A_RUN // 2, KEYS_A_RUN - 1):
            assert places(part, f"{number}-{key}") == [100 * number]
        assert places(part, f"{number}-{KEYS_A_RUN}") == []


def merge_all(part: IndexPart) -> int:
    steps = 0
    while runs := runs_to_merge(part.head.runs):
        for _ in merge_runs(part, runs):
            steps += 1
    return steps


def test_runs_of_one_size_are_merged_when_there_are_enough_the_oldest_first():
    few = MERGED_AT_ONCE - 1
    small = [SortedRun(n, 1 + n, n, n + 1, KEYS) for n in range(few)]
    large = [SortedRun(100 + n, 16 + 16 * n, n, n + 1, KEYS) for n in range(few)]
    other = [SortedRun(200 + n, 256 + n, n, n + 1, KEYS) for n in range(few)]
    assert runs_to_merge([*small, *large, *other]) == []
    some = [*large, SortedRun(150, 255, 90, 91, KEYS), SortedRun(151, 16, 99, 100, IDS)]
    random.Random(1).shuffle(some)
    assert [run.number for run in runs_to_merge([*small, *some, *other])] == [
        *range(100, 100 + few),
        150,
    ]
    more = [*other, SortedRun(250, 256, 90, 91, KEYS)]
    assert runs_to_merge([*large, *more]) == more


def test_everything_is_found_before_meanwhile_and_after(part, tmp_path):
    for number in range(MERGED_AT_ONCE):
        add_large(part, number)
    check(part, MERGED_AT_ONCE)
    runs = runs_to_merge(part.head.runs)
    steps = 0
    for _ in merge_runs(part, runs):
        check(part, MERGED_AT_ONCE)
        steps += 1
    assert steps > 5
    assert [run.count for run in part.head.runs] == [MERGED_AT_ONCE * (KEYS_A_RUN + 1)]
    check(part, MERGED_AT_ONCE)
    part.close()
    again = IndexPart.open(tmp_path / "part", map_size=1 << 20)
    check(again, MERGED_AT_ONCE)
    again.close()


def test_the_blocks_of_merged_runs_are_gone(part):
    for number in range(MERGED_AT_ONCE):
        add_large(part, number)
    runs = runs_to_merge(part.head.runs)
    merge_all(part)
    assert part.reader.lows([run.number for run in runs]) == []


def test_messages_may_be_added_meanwhile(part):
    for number in range(MERGED_AT_ONCE):
        add_large(part, number)
    runs = runs_to_merge(part.head.runs)
    added = MERGED_AT_ONCE
    for _ in merge_runs(part, runs):
        add_large(part, added)
        place = part.head.through
        part.append(next_slice(part, entries=key_entries("t", ["small"], place)))
        added += 2  # it takes a stretch of the log, too
    assert part.head.runs[-1].count == MERGED_AT_ONCE * (KEYS_A_RUN + 1)
    assert places(part, f"{MERGED_AT_ONCE}-5") == [100 * MERGED_AT_ONCE]
    assert len(places(part, "small")) == (added - MERGED_AT_ONCE) // 2
    assert places(part, "3-7") == [300]


def test_what_was_given_up_half_way_does_no_harm(part, tmp_path):
    for number in range(MERGED_AT_ONCE):
        add_large(part, number)
    work = merge_runs(part, runs_to_merge(part.head.runs))
    for _ in range(4):
        next(work)
    work.close()
    part.close()
    again = IndexPart.open(tmp_path / "part", map_size=1 << 20)
    check(again, MERGED_AT_ONCE)
    add_large(again, MERGED_AT_ONCE)
    merge_all(again)
    assert len(again.head.runs) == 2
    check(again, MERGED_AT_ONCE + 1)
    again.append(next_slice(again, complete=True))
    for _ in seal_part(again, tmp_path / "sealed", map_size=1 << 20):
        pass
    again.close()
    sealed = IndexPart.open(tmp_path / "sealed", map_size=1 << 20)
    check(sealed, MERGED_AT_ONCE + 1)
    assert sealed.entry_count == again.entry_count
    assert len(sealed.reader.lows(range(2, 100))) == 0
    sealed.close()


def test_without_room_it_leaves_nothing_behind(part, monkeypatch):
    for number in range(MERGED_AT_ONCE):
        add_large(part, number)
    runs = runs_to_merge(part.head.runs)
    write, calls = part.env.write, []

    def no_room(puts, deletes=()):
        calls.append(len(puts))
        if len(calls) == 4:
            raise DiskFull("no room")
        write(puts, deletes)

    monkeypatch.setattr(part.env, "write", no_room)
    number = part.head.next_run
    with pytest.raises(DiskFull):
        merge_all(part)
    assert part.head.runs == runs
    assert part.reader.lows([number]) == []
    merge_all(part)
    check(part, MERGED_AT_ONCE)
    assert len(part.head.runs) == 1


def test_a_run_that_has_lost_entries_is_noticed(part):
    for number in range(MERGED_AT_ONCE):
        add_large(part, number)
    runs = runs_to_merge(part.head.runs)
    part.env.write([], [part.reader.keys(runs[3].number)[1]])
    with pytest.raises(CorruptRecord):
        merge_all(part)
    assert len(part.head.runs) == MERGED_AT_ONCE


def test_stretches_tile_all_there_is(part):
    for number in range(5):
        add_large(part, number)
    numbers = [run.number for run in part.head.runs]
    found = list(stretches(part.reader, numbers))
    assert [low for low, _, _ in found[1:]] == [high for _, high, _ in found[:-1]]
    entries = [entry for _, _, some in found for entry in some]
    assert entries == sorted(entries)
    assert len(entries) == 5 * (KEYS_A_RUN + 1)
    assert list(stretches(part.reader, [])) == []
