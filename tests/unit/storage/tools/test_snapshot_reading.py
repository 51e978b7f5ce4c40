"""Reading snapshots: whole, in parts, by time, by the index, and with damage."""

from __future__ import annotations

import msgspec
import pytest
from harness.indexed_store import IndexedStore
from harness.snapshots import take_snapshot
from harness.store_files import SEGMENT_BYTES, StoreFiles, put_bodies

from mqmesh.batch.record_batch import decode_messages
from mqmesh.message import Message
from mqmesh.storage.tools.snapshot import seal_manifest
from mqmesh.storage.tools.snapshot_making import restore_snapshot
from mqmesh.storage.tools.snapshot_reading import Batch, Damage, LogRange, Snapshot, verify_snapshot
from mqmesh.testing.store_contract import NOW

COUNT = 300


@pytest.fixture
def snapshot(tmp_path):
    store = IndexedStore(tmp_path / "store")
    try:
        for number in range(COUNT):
            messages = [
                Message("topic", bytes(500), keys=[f"key-{number}", "all"]),
                Message("topic", str(number).encode(), keys=[f"second-{number}"]),
            ]
            store.put(messages, stored_ms=NOW + number)
            if number == 100:
                store.store.delete_topic("unknown")
        store.catch_up()
        directory, _ = take_snapshot(store, tmp_path / "store", tmp_path / "snapshots")
    finally:
        store.close()
    return Snapshot(directory)


def numbers_in(snapshot, wanted=None):
    return [
        int(decode_messages(found.data, found.header)[1].body)
        for found in snapshot.read(wanted)
        if isinstance(found, Batch)
    ]


def damage_in(snapshot, wanted=None):
    return [found for found in snapshot.read(wanted) if isinstance(found, Damage)]


def flip(snapshot, commitlog_offset):
    segment = snapshot.log.find(commitlog_offset)
    with open(segment.path, "r+b") as file:
        file.seek(commitlog_offset - segment.start)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_all_is_read_in_order(snapshot):
    assert numbers_in(snapshot) == list(range(COUNT))


@pytest.mark.parametrize("most_bytes", [1, 5_000, 40_000, 1 << 30])
def test_ranges_are_all_of_the_log_once(snapshot, most_bytes):
    ranges = snapshot.ranges(most_bytes)
    assert [n for one in ranges for n in numbers_in(snapshot, one)] == list(range(COUNT))
    if most_bytes == 5_000:
        assert all(one.end_offset - one.start_offset < 7_000 for one in ranges)
    if most_bytes == 1 << 30:
        assert len(ranges) == len(list(snapshot.log))


def test_ranges_leave_out_what_was_stored_at_other_times(snapshot):
    ranges = snapshot.ranges(1 << 30, from_ms=NOW + 120, to_ms=NOW + 180)
    assert [n for one in ranges for n in numbers_in(snapshot, one)] == list(range(120, 181))
    assert snapshot.ranges(1 << 30, from_ms=NOW + COUNT) == []


@pytest.mark.parametrize("most_bytes", [5_000, 1 << 30])
def test_a_damaged_batch_is_told_once_and_all_others_are_read(snapshot, most_bytes):
    places = [f.header for f in snapshot.read() if isinstance(f, Batch)]
    # A body, the magic, the size, and a time.
    for number, position in ((20, 200), (150, 0), (200, 52), (250, 24)):
        flip(snapshot, places[number].commitlog_offset + position)
    lost = [20, 150, 200, 250]
    rest = [n for n in range(COUNT) if n not in lost]
    ranges = snapshot.ranges(most_bytes)
    assert [n for one in ranges for n in numbers_in(snapshot, one)] == rest
    damage = [found for one in ranges for found in damage_in(snapshot, one)]
    assert {found.start_offset for found in damage} >= {places[n].commitlog_offset for n in lost}
    report = verify_snapshot(snapshot, lambda progress: None)
    assert not report.sound
    assert [one.start_offset for one in report.damage] == [places[n].commitlog_offset for n in lost]
    assert report.batches == COUNT - 4


def test_a_sound_snapshot_is_said_to_be_one(snapshot):
    report = verify_snapshot(snapshot, lambda progress: None)
    assert report.sound
    assert report.messages == 2 * COUNT


def test_a_lost_segment_is_damage(snapshot, tmp_path):
    files = [f for f in snapshot.manifest.files if not f.path.endswith(f"{SEGMENT_BYTES:020d}")]
    manifest = msgspec.structs.replace(snapshot.manifest, files=files)
    (snapshot.directory / "manifest.json").write_bytes(seal_manifest(msgspec.json.encode(manifest)))
    again = Snapshot(snapshot.directory)
    (lost,) = damage_in(again)
    assert (lost.start_offset, lost.end_offset) == (SEGMENT_BYTES, 2 * SEGMENT_BYTES)
    assert len(numbers_in(again)) < COUNT


def found_at(snapshot, places):
    return [
        number
        for place in places
        if (batch := snapshot.batch_at(place)) is not None
        for number in [int(decode_messages(batch.data, batch.header)[1].body)]
    ]


def test_keys_and_ids_are_found_by_the_index(snapshot):
    places, unknown = snapshot.places_of_key("topic", "second-33")
    assert (found_at(snapshot, places), unknown) == ([33], [])
    places, unknown = snapshot.places_of_key("topic", "all")
    assert (found_at(snapshot, places), unknown) == (list(range(COUNT)), [])
    assert snapshot.places_of_key("topic", "nobody's") == ([], [])
    places, unknown = snapshot.places_of_id(1, 2 * 77 + 1)
    assert 77 in found_at(snapshot, places)
    assert unknown == []


def test_a_flipped_bit_in_an_index_has_the_log_read_instead(snapshot):
    for file in snapshot.manifest.files:
        if file.path.endswith("data.mdb"):
            path = snapshot.directory / file.path
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 4
            # The store shares the file.
            path.unlink()
            path.write_bytes(data)
    places, unknown = snapshot.places_of_key("topic", "second-33")
    assert places == []
    assert [n for one in unknown for n in numbers_in(snapshot, one)] == list(range(COUNT))
    report = verify_snapshot(snapshot, lambda progress: None)
    assert len(report.damaged_files) == len(list(snapshot.log))


def test_without_an_index_the_log_is_read(tmp_path):
    files = StoreFiles(tmp_path / "store")
    store = files.open()
    put_bodies(store, ["one", "two"])
    directory, manifest = take_snapshot(store, files.directory, tmp_path / "snapshots")
    files.close()
    places, unknown = Snapshot(directory).places_of_key("topic", "k")
    assert (places, unknown) == ([], [LogRange(0, manifest.end_offset)])


def test_a_log_that_went_otherwise_is_told_from_the_one_that_went_on(tmp_path):
    files = StoreFiles(tmp_path / "store")
    store = files.open()
    put_bodies(store, ["one", "two"])
    root = tmp_path / "snapshots"
    early, _ = take_snapshot(store, files.directory, root, name="a.1.0", broker_name="a")
    put_bodies(store, ["three"])
    middle, manifest = take_snapshot(store, files.directory, root, name="a.2.0", broker_name="a")
    put_bodies(store, ["four"])
    late, _ = take_snapshot(store, files.directory, root, name="a.3.0", broker_name="a")
    restore_snapshot(early, tmp_path / "restored")
    other = StoreFiles(tmp_path / "restored", files.config)
    restored = other.open()
    put_bodies(restored, ["drei", "vier", "fünf"])
    elsewhere, _ = take_snapshot(restored, other.directory, root, name="a.4.0", broker_name="a")
    place, mark = Snapshot(middle).last_mark(manifest.end_offset)
    assert place > 0
    assert not Snapshot(late).went_otherwise(place, mark)
    assert not Snapshot(middle).went_otherwise(place, mark)
    assert Snapshot(elsewhere).went_otherwise(place, mark)
    flip(Snapshot(late), place + 110)
    assert not Snapshot(late).went_otherwise(place, mark)
    files.close()
    other.close()
