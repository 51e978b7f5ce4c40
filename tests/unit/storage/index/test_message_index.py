"""The index of keys and message ids: what it finds is what a scan of the log finds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.indexed_store import IndexedStore
from harness.store_files import SEGMENT_BYTES

from mqmesh.batch.record_batch import Attributes
from mqmesh.errors import DiskFull, StoreLocked
from mqmesh.message import Message
from mqmesh.storage.index import merge as message_index_merge
from mqmesh.storage.index.blocks import BLOCK_ENTRIES
from mqmesh.storage.index.merge import MERGED_AT_ONCE, runs_to_merge
from mqmesh.storage.index.message_index import MessageIndex
from mqmesh.storage.index.search import IdQuery, KeyQuery, Search
from mqmesh.testing.store_contract import NOW


@pytest.fixture
def indexed(tmp_path: Path) -> Iterator[IndexedStore]:
    """A store with an index, both empty."""
    indexed = IndexedStore(tmp_path / "store")
    yield indexed
    indexed.close()


def message(*keys: str, topic: str = "topic", body: bytes = b"body") -> Message:
    return Message(topic, body, keys=keys)


def fill_segments(indexed: IndexedStore, count: int) -> None:
    """Store batches with keys until so many segments are full."""
    number = 0
    while indexed.store.stats().max_commitlog_offset < count * SEGMENT_BYTES:
        some = [message(f"k{number}", f"common{number % 7}", body=bytes(300)) for _ in range(5)]
        indexed.put(some, stored_ms=NOW + number)
        number += 1


def test_a_message_is_found_by_each_of_its_keys(indexed):
    first = indexed.put([message("a", "b"), message("b")])
    second = indexed.put([message("b", "a")])
    indexed.catch_up()
    older, newer = first.commitlog_offset, second.commitlog_offset
    assert indexed.by_key("a") == [(newer, 0), (older, 0)]
    assert indexed.by_key("b") == [(newer, 0), (older, 1), (older, 0)]
    assert indexed.by_key("c") == []


def test_a_key_belongs_to_its_topic(indexed):
    put = indexed.put([message("a", topic="one")])
    indexed.put([message("a", topic="two")])
    indexed.catch_up()
    assert indexed.by_key("a", "one") == [(put.commitlog_offset, 0)]
    assert indexed.by_key("a", "three") == []


def test_a_retried_message_is_found_under_its_physical_topic_only(indexed):
    retried = indexed.put([message("a", topic="t")], topic="%RETRY%g")
    indexed.catch_up()
    assert indexed.by_key("a", "%RETRY%g") == [(retried.commitlog_offset, 0)]
    assert indexed.by_key("a", "t") == []


def test_every_message_of_a_batch_is_found_by_its_id(indexed):
    put = indexed.put([message() for _ in range(1000)], producer_id=9, first_sequence=700)
    indexed.catch_up()
    for sequence in (700, 701, 1023, 1024, 1025, 1699):
        assert indexed.by_id(9, sequence) == [(put.commitlog_offset, sequence - 700)]
    assert indexed.by_id(9, 699) == indexed.by_id(9, 1700) == indexed.by_id(8, 700) == []


def test_an_id_finds_the_original_and_what_was_stored_again_under_it(indexed):
    first = indexed.put([message()] * 10, producer_id=3, first_sequence=5)
    again = indexed.put(
        [message()],
        producer_id=3,
        first_sequence=8,
        topic="%RETRY%g",
        attributes=Attributes.REDELIVERED,
    )
    indexed.catch_up()
    assert indexed.by_id(3, 8) == [(again.commitlog_offset, 0), (first.commitlog_offset, 3)]


def test_ids_reach_the_ends_of_their_range(indexed):
    last = (1 << 64) - 1
    put = indexed.put([message(), message()], producer_id=last, first_sequence=last - 1)
    indexed.catch_up()
    assert indexed.by_id(last, last) == [(put.commitlog_offset, 1)]


def test_compressed_batches_are_found_by_their_keys(indexed):
    put = indexed.put([message(f"k{n}", body=bytes(500)) for n in range(50)], compress_over_bytes=1)
    assert put.end_offset - put.commitlog_offset < 5_000
    indexed.catch_up()
    assert indexed.by_key("k49") == [(put.commitlog_offset, 49)]


def test_a_time_window_holds_for_both_its_ends(indexed):
    puts = [indexed.put([message("a")], stored_ms=NOW + n) for n in range(5)]
    indexed.catch_up()
    expected = [(puts[n].commitlog_offset, 0) for n in (3, 2, 1)]
    assert indexed.by_key("a", from_ms=NOW + 1, to_ms=NOW + 3) == expected
    assert indexed.by_key("a", from_ms=NOW + 5) == []


def test_a_time_window_is_right_even_if_the_clock_jumped(indexed):
    for number in range(200):
        indexed.put([message("a", body=bytes(2000))], stored_ms=NOW + (number * 37) % 200)
    indexed.catch_up()
    found = indexed.by_key("a", from_ms=NOW + 50, to_ms=NOW + 60)
    times = {int(m.commitlog_offset): m.store_timestamp for m in indexed.scan()}
    expected = [offset for offset in sorted(times, reverse=True) if 50 <= times[offset] - NOW <= 60]
    assert [offset for offset, _ in found] == expected
    assert len(found) == 11


def test_a_search_stops_when_it_has_enough(indexed):
    for _ in range(10):
        indexed.put([message("a", body=bytes(100))])
    indexed.catch_up()
    some = indexed.search(KeyQuery("topic", "a"), most_messages=3)
    assert (len(some.messages), some.more) == (3, True)
    exactly = indexed.search(KeyQuery("topic", "a"), most_messages=10)
    assert (len(exactly.messages), exactly.more) == (10, False)
    small = indexed.search(KeyQuery("topic", "a"), most_bytes=250)
    assert (len(small.messages), small.more) == (2, True)
    least = indexed.search(KeyQuery("topic", "a"), most_bytes=1)
    assert (len(least.messages), least.more) == (1, True)


def test_a_key_of_very_many_batches_is_found_in_all_of_them(indexed):
    for _ in range(1500):
        indexed.put([message("hot")])
    indexed.catch_up()
    assert len(indexed.by_key("hot")) == 1500
    indexed.check()


def test_the_index_equals_a_scan_over_many_segments(indexed):
    fill_segments(indexed, 5)
    indexed.catch_up()
    assert [indexed.index.is_sealed(start) for start in indexed.index.starts] == [True] * 5 + [
        False
    ]
    assert indexed.dispatcher.missing_bytes == 0
    indexed.check()


def test_reopened_it_goes_on_where_it_was(indexed):
    fill_segments(indexed, 2)
    indexed.catch_up()
    indexed.reopen()
    assert indexed.catch_up() == 0
    fill_segments(indexed, 3)
    indexed.catch_up()
    assert indexed.index.discarded == 0
    indexed.check()


def test_what_is_not_visible_yet_is_not_indexed(indexed):
    put = indexed.put([message("a")])
    indexed.catch_up()
    indexed.put([message("a")])
    while indexed.step():
        assert indexed.dispatcher.position <= put.end_offset
    assert indexed.by_key("a") == [(put.commitlog_offset, 0)]


def test_messages_of_a_deleted_topic_are_not_found(indexed):
    indexed.put([message("a")])
    indexed.put([message("a", topic="other")])
    indexed.store.delete_topic("topic")
    indexed.catch_up()
    assert indexed.by_key("a") == []
    assert indexed.by_id(1, 0) == []
    again = indexed.put([message("a")])
    indexed.catch_up()
    assert indexed.by_key("a") == [(again.commitlog_offset, 0)]
    indexed.reopen()
    indexed.catch_up()
    indexed.check()


def test_half_messages_are_not_found(indexed):
    indexed.put([message("a")], topic="RMQ_SYS_TRANS_HALF_TOPIC")
    indexed.catch_up()
    assert indexed.by_key("a", "RMQ_SYS_TRANS_HALF_TOPIC") == indexed.by_id(1, 0) == []


def test_an_index_that_is_lost_is_made_again(indexed, tmp_path):
    fill_segments(indexed, 3)
    indexed.catch_up()
    indexed.close_index()
    indexed.restore_index(_empty(tmp_path / "empty"))
    indexed.open_index()
    indexed.tell()
    assert indexed.dispatcher.missing_bytes > 3 * SEGMENT_BYTES
    indexed.catch_up()
    indexed.check()


def test_new_messages_are_found_while_old_segments_still_wait(indexed, tmp_path):
    fill_segments(indexed, 4)
    indexed.close_index()
    indexed.restore_index(_empty(tmp_path / "empty"))
    indexed.open_index()
    put = indexed.put([message("new")])
    indexed.tell()
    while indexed.dispatcher.lag_bytes:
        indexed.step()
    assert indexed.by_key("new") == [(put.commitlog_offset, 0)]
    assert indexed.dispatcher.missing_bytes > 0
    old = indexed.search(KeyQuery("topic", "common1"))
    assert old.missing_bytes == indexed.dispatcher.missing_bytes
    indexed.catch_up()
    assert indexed.dispatcher.missing_bytes == 0


def test_the_index_of_a_segment_goes_with_it(indexed):
    fill_segments(indexed, 3)
    indexed.catch_up()
    (oldest, *_) = indexed.index.starts
    key = indexed.scan()[0].keys[0]
    assert indexed.by_key(key)
    indexed.files.segment(0).unlink()
    indexed.dispatcher.advance(indexed.dispatcher.visible, SEGMENT_BYTES, indexed.now_ms)
    search = indexed.search(KeyQuery("topic", key))
    assert (search.messages, search.mismatches) == ([], 0)
    indexed.now_ms += 10_000
    indexed.dispatcher.advance(indexed.dispatcher.visible, SEGMENT_BYTES, indexed.now_ms)
    assert oldest not in indexed.index.starts
    indexed.check()


def test_without_room_it_waits_and_then_goes_on(indexed, caplog):
    indexed.has_room = False
    fill_segments(indexed, 1)
    indexed.tell()
    assert indexed.dispatcher.step(0) == 1000
    assert "the disk is full" in indexed.dispatcher.stats().waiting
    assert indexed.dispatcher.step(500) == 500
    indexed.has_room = True
    assert indexed.dispatcher.step(999) == 1
    indexed.now_ms = 1000
    assert indexed.dispatcher.step(1000) == 0
    indexed.catch_up()
    assert indexed.dispatcher.stats().waiting == ""
    assert ["indexing waits" in record.message for record in caplog.records].count(True) == 1
    indexed.check()


def test_sealing_that_fails_is_not_tried_again_at_once(indexed, monkeypatch):
    tries = []

    def seal(start):
        tries.append(indexed.now_ms)
        raise DiskFull("no room")
        yield

    fill_segments(indexed, 1)
    indexed.tell()
    while indexed.dispatcher.missing_bytes or indexed.dispatcher.stats().waiting:
        indexed.step()
    monkeypatch.setattr(indexed.index, "seal", seal)
    while len(tries) < 3:
        assert indexed.step()
    assert tries[2] - tries[1] >= 30_000
    monkeypatch.undo()
    indexed.catch_up()
    assert indexed.index.is_sealed(0)


@pytest.mark.parametrize("end", ["lose", "remove"])
@pytest.mark.parametrize("steps", range(1, 5))
def test_sealing_is_given_up_when_the_part_is_removed_meanwhile(indexed, end, steps, caplog):
    fill_segments(indexed, 1)
    indexed.tell()
    while not list(indexed.index_directory.glob("*.new")):
        assert indexed.step()
    for _ in range(1, steps):
        indexed.step()
    if indexed.index.is_sealed(0):
        return
    if end == "lose":
        indexed.dispatcher.lose(0, "a search found damage")
    else:
        indexed.index.remove(0)  # as retention does with its segment
    for _ in range(3):  # on a busy machine some steps are pauses
        if list(indexed.index_directory.glob("*.new")):
            indexed.step()
    assert not list(indexed.index_directory.glob("*.new"))
    assert not list(indexed.index_directory.glob("*.sealed"))
    if end == "lose":
        indexed.catch_up()
        assert indexed.index.is_sealed(0)
        indexed.check()
    assert "indexing waits" not in caplog.text


def test_a_small_map_grows(tmp_path):
    indexed = IndexedStore(tmp_path / "store", map_size=64 * 1024, step_bytes=64 * 1024)
    for number in range(40):
        indexed.put([message(*(f"{number}-{n}-{k}" for k in range(60))) for n in range(4)])
    indexed.catch_up()
    assert any(path.stat().st_size > 64 * 1024 for path in indexed.data_files())
    indexed.check()
    indexed.close()


def test_runs_are_merged_when_there_is_nothing_else_to_do(indexed):
    for number in range(600):
        indexed.put([message(f"k{number}")])
        indexed.tell()
        while indexed.dispatcher.lag_bytes:
            indexed.step()
    indexed.catch_up()
    assert indexed.dispatcher.stats().at_rest
    part = indexed.index.part(0)
    assert part is not None
    assert runs_to_merge(part.head.runs) == []
    assert len(part.head.runs) < 3 * MERGED_AT_ONCE
    indexed.check()
    indexed.put([message("one more")])
    indexed.tell()
    assert not indexed.dispatcher.stats().at_rest


def test_files_that_are_none_of_its_own_are_left_alone(indexed):
    stranger = indexed.index_directory / "notes.new"
    stranger.write_text("of the operator")
    (indexed.index_directory / f"{0:020d}.new").mkdir()
    indexed.reopen()
    assert stranger.exists()
    assert not (indexed.index_directory / f"{0:020d}.new").exists()


def test_one_process_at_a_time(indexed):
    with pytest.raises(StoreLocked):
        MessageIndex(indexed.index_directory, map_size=1 << 20, most_open=4)


def test_a_search_goes_on_while_the_index_changes(indexed):
    fill_segments(indexed, 2)
    indexed.put([message("a")] * 3)
    indexed.tell()
    expected = [m for m in indexed.scan() if "common3" in m.keys]
    while indexed.dispatcher.missing_bytes:
        indexed.step()
    assert not any(map(indexed.index.is_sealed, indexed.index.starts))
    search = Search(
        indexed.index,
        indexed.dispatcher,
        KeyQuery("topic", "common3"),
        most_messages=10_000,
        most_bytes=1 << 30,
    )
    while not search.step():
        indexed.step()
    assert len(search.messages) == len(expected)
    assert indexed.index.discarded == 0
    assert any(map(indexed.index.is_sealed, indexed.index.starts))


@pytest.mark.parametrize("seed", range(16))
def test_after_any_history_the_index_equals_a_scan(tmp_path, seed, monkeypatch):
    chance = random.Random(seed)
    if seed % 2:  # runs are merged often, in many steps
        monkeypatch.setattr(message_index_merge, "MERGED_AT_ONCE", 2)
        monkeypatch.setattr(message_index_merge, "STEP_ENTRIES", 2 * BLOCK_ENTRIES)
    indexed = IndexedStore(
        tmp_path / "store",
        map_size=chance.choice([64 * 1024, 1 << 20]),
        step_bytes=chance.choice([1 << 10, 1 << 14, 1 << 20]),
        most_open=chance.choice([2, 5]),
    )
    for _ in range(150):
        act = chance.random()
        if act < 0.75:
            count = chance.choice([1, 1, 3, 40])
            topic = chance.choice(["t1", "t2"])
            keys = [f"k{chance.randrange(60)}" for _ in range(chance.randrange(4))]
            some = [message(*keys, topic=topic, body=bytes(chance.randrange(1, 900)))] * count
            indexed.put(
                some,
                stored_ms=NOW + chance.randrange(1000),
                producer_id=chance.randrange(3),
                compress_over_bytes=chance.choice([None, 1]),
            )
        elif act < 0.90:
            indexed.catch_up(steps=chance.choice([1, 3, 1000]))
        elif act < 0.94:
            indexed.reopen(suspect=chance.random() < 0.3)
        elif act < 0.96:
            indexed.reopen_store()
        elif act < 0.97:
            indexed.store.delete_topic("t2")
        else:
            indexed.by_key("k7", "t1")
            indexed.search(IdQuery(1, indexed.sequence // 2))
    indexed.catch_up()
    indexed.check(each=5)  # ids: of 40 in one batch, 8
    indexed.close()


def _empty(path: Path) -> Path:
    path.mkdir()
    return path
