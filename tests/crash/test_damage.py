"""Bits flip: nothing damaged is delivered as good, and nothing else is lost."""

import os
import zlib

import msgspec
import pytest
from harness.store_files import SEGMENT_BYTES, StoreFiles, deliverable, put_bodies, settle

from mqmesh.errors import CorruptRecord, StorageError
from mqmesh.roles.broker.reading.meta_cache import MetaCache
from mqmesh.roles.broker.reading.pull_filter import get_filtered, pull_filter
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.interface import GetStatus
from mqmesh.storage.log.control_record import ControlKind, encode_control_record
from mqmesh.storage.log.store_key import read_store_key
from mqmesh.testing.store_contract import NOW, bodies_in, make_batch

BODIES = [f"body {number}" for number in range(20)]


def all_but(lost: int) -> dict[int, str]:
    return {number: body for number, body in enumerate(BODIES) if number != lost}


def synced_but_not_dispatched(files: StoreFiles) -> tuple[StoreFiles, list[int]]:
    """A crashed store whose log was synced behind what its queues have on disk."""
    store = files.open()
    offsets = put_bodies(store, BODIES)
    settle(store)
    crashed = files.copy()
    # The queue table of the very beginning: the whole log has to be read again.
    for name in ("queue-table", "queue-table.bak"):
        (crashed.directory / name).unlink(missing_ok=True)
    return crashed, offsets


@pytest.mark.parametrize(
    "position", [0, 5, 9, 17, 25, 33, 37, 44, 50, 53, 58, 61, 66, 90, 104, 130]
)
def test_damage_below_the_synced_mark_is_passed_over_and_reported(
    files: StoreFiles, position: int
) -> None:
    crashed, offsets = synced_but_not_dispatched(files)
    crashed.flip(offsets[7] + position, 3)
    recovered = crashed.open()
    assert deliverable(recovered) == all_but(7)
    stats = recovered.stats()
    assert stats.cut_bytes == 0
    (damaged,) = stats.damaged
    assert (damaged.start_offset, damaged.end_offset) == (offsets[7], offsets[8])
    assert put_bodies(recovered, ["new"])
    assert recovered.queue_bounds("topic", 0) == (0, 21)
    crashed.close()
    again = crashed.open()
    assert again.stats().damaged == [damaged]
    assert deliverable(again) == {**all_but(7), 20: "new"}
    crashed.close()


def test_damage_at_the_end_of_what_was_synced_is_not_cut(files: StoreFiles) -> None:
    crashed, offsets = synced_but_not_dispatched(files)
    crashed.flip(offsets[19] + 120)
    recovered = crashed.open()
    assert deliverable(recovered) == all_but(19)
    assert recovered.stats().cut_bytes == 0
    assert recovered.stats().damaged[0].start_offset == offsets[19]
    put_bodies(recovered, ["new"])
    crashed.close()
    assert deliverable(crashed.open())[19] == "new"
    crashed.close()


def crashed_with_an_unsynced_bad_record(files: StoreFiles) -> tuple[StoreFiles, int]:
    """Ten records are synced, ten are not; the 14th of all is bad."""
    store = files.open()
    put_bodies(store, BODIES[:10])
    settle(store)
    offsets = put_bodies(store, BODIES[10:])
    crashed = files.copy()
    crashed.flip(offsets[3] + 120)
    return crashed, offsets[3]


@pytest.mark.usefixtures("another_boot")
def test_when_the_system_died_an_unsynced_bad_record_is_a_torn_tail(files: StoreFiles) -> None:
    crashed, _ = crashed_with_an_unsynced_bad_record(files)
    recovered = crashed.open()
    assert deliverable(recovered) == dict(enumerate(BODIES[:13]))
    assert recovered.stats().cut_bytes > 0
    assert not recovered.stats().damaged
    crashed.close()


def test_when_only_the_process_died_nothing_behind_a_bad_record_is_lost(
    files: StoreFiles,
) -> None:
    crashed, offset = crashed_with_an_unsynced_bad_record(files)
    recovered = crashed.open()
    assert deliverable(recovered) == all_but(13)
    assert recovered.stats().cut_bytes == 0
    assert [damaged.start_offset for damaged in recovered.stats().damaged] == [offset]
    crashed.close()


def test_a_last_segment_that_was_cut_is_made_whole_again(files: StoreFiles) -> None:
    store = files.open()
    put_bodies(store, BODIES)
    end = store.stats().max_commitlog_offset
    store.close()
    with open(files.segment(), "r+b") as file:
        file.truncate(end)
    again = files.open()
    assert files.segment().stat().st_blocks * 512 >= SEGMENT_BYTES
    put_bodies(again, ["new"])
    assert deliverable(again) == {**dict(enumerate(BODIES)), 20: "new"}


def test_without_a_checkpoint_damage_is_not_taken_for_the_end(files: StoreFiles) -> None:
    crashed, offsets = synced_but_not_dispatched(files)
    (crashed.directory / "checkpoint").unlink()
    crashed.flip(offsets[7] + 120)
    recovered = crashed.open()
    assert deliverable(recovered) == all_but(7)
    assert len(recovered.stats().damaged) == 1
    assert not recovered.stats().started_clean
    crashed.close()


def test_one_bad_checkpoint_slot_is_no_harm(files: StoreFiles) -> None:
    store = files.open()
    put_bodies(store, BODIES)
    settle(store)
    for position in (0, 4096):
        crashed = files.copy()
        checkpoint = crashed.directory / "checkpoint"
        content = bytearray(checkpoint.read_bytes())
        content[position + 30] ^= 1
        checkpoint.write_bytes(content)
        recovered = crashed.open()
        assert deliverable(recovered) == dict(enumerate(BODIES))
        assert recovered.stats().store_id == store.stats().store_id
        crashed.close()


def test_a_whole_damaged_segment_costs_only_itself(files: StoreFiles) -> None:
    store = files.open()
    body = "x" * 20_000
    put_bodies(store, [body] * 9)
    settle(store)
    crashed = files.copy()
    (crashed.directory / "queue-table").unlink()
    (crashed.directory / "queue-table.bak").unlink(missing_ok=True)
    crashed.segment(1).write_bytes(bytes(SEGMENT_BYTES))
    recovered = crashed.open()
    assert deliverable(recovered) == dict.fromkeys((0, 1, 2, 6, 7, 8), body)
    (damaged,) = recovered.stats().damaged
    assert (damaged.start_offset, damaged.end_offset) == (SEGMENT_BYTES, 2 * SEGMENT_BYTES)
    crashed.close()


def test_a_lost_segment_is_reported_after_the_segment_size_was_changed(files: StoreFiles) -> None:
    store = files.open()
    body = "x" * 20_000
    put_bodies(store, [body] * 9)
    settle(store)
    crashed = files.copy()
    crashed.config = msgspec.structs.replace(
        crashed.config, mapped_file_size_commit_log=2 * SEGMENT_BYTES
    )
    (crashed.directory / "queue-table").unlink()
    (crashed.directory / "queue-table.bak").unlink(missing_ok=True)
    crashed.segment(1).unlink()
    recovered = crashed.open()
    assert deliverable(recovered) == dict.fromkeys((0, 1, 2, 6, 7, 8), body)
    assert [(one.start_offset, one.end_offset) for one in recovered.stats().damaged] == [
        (SEGMENT_BYTES, 2 * SEGMENT_BYTES)
    ]
    crashed.close()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_lost_segment_costs_only_itself(files: StoreFiles, number: int) -> None:
    store = files.open()
    body = "x" * 20_000
    put_bodies(store, [body] * 9)
    settle(store)
    crashed = files.copy()
    (crashed.directory / "queue-table").unlink()
    (crashed.directory / "queue-table.bak").unlink(missing_ok=True)
    crashed.segment(number).unlink()
    recovered = crashed.open()
    lost = range(3 * number, 3 * number + 3)
    assert deliverable(recovered) == {n: body for n in range(9) if n not in lost}
    put_bodies(recovered, ["new"])
    crashed.close()
    assert "new" in deliverable(crashed.open()).values()
    crashed.close()


def test_a_store_whose_whole_log_is_gone_is_not_taken_for_an_empty_one(files: StoreFiles) -> None:
    store = files.open()
    put_bodies(store, BODIES)
    settle(store)
    crashed = files.copy()
    for segment in (crashed.directory / "commitlog").iterdir():
        segment.unlink()
    with pytest.raises(StorageError, match="gone"):
        crashed.open()


def test_a_cut_segment_costs_only_what_was_cut(files: StoreFiles) -> None:
    store = files.open()
    body = "x" * 20_000
    put_bodies(store, [body] * 6)
    settle(store)
    crashed = files.copy()
    (crashed.directory / "queue-table").unlink()
    (crashed.directory / "queue-table.bak").unlink(missing_ok=True)
    with open(crashed.segment(0), "r+b") as file:
        file.truncate(30_000)
    recovered = crashed.open()
    assert deliverable(recovered) == dict.fromkeys((0, 3, 4, 5), body)
    crashed.close()


def test_a_record_of_a_later_version_is_left_alone(files: StoreFiles) -> None:
    crashed, offsets = synced_but_not_dispatched(files)

    start, end = offsets[5], offsets[6]
    record = bytearray(crashed.read(start, end - start))
    record[56] = 2
    record[48:52] = zlib.crc32(record[52:]).to_bytes(4, "little")
    key = read_store_key(crashed.directory)
    record[40:48] = key.batch_check(bytes(record[8:40] + record[48:56]))
    record[4:8] = zlib.crc32(record[8:52]).to_bytes(4, "little")
    crashed.write(start, bytes(record))
    before = crashed.segment().read_bytes()
    with pytest.raises(StorageError, match="version 2"):
        crashed.open()
    assert crashed.segment().read_bytes() == before


def test_a_marker_of_a_later_program_is_left_alone(files: StoreFiles) -> None:
    crashed, offsets = synced_but_not_dispatched(files)
    kind = ControlKind.EPOCH
    marker = bytearray(
        encode_control_record(
            kind,
            commitlog_offset=offsets[5],
            epoch=1,
            store_id=int.from_bytes(crashed.read(offsets[5] + 36, 4), "little"),
            store_timestamp=0,
        )
    )
    marker[20] = 99
    marker[40:48] = read_store_key(crashed.directory).marker_check(bytes(marker[8:40]))
    marker[4:8] = zlib.crc32(marker[8:]).to_bytes(4, "little")
    crashed.write(offsets[5], bytes(marker))
    with pytest.raises(StorageError, match="kind 99"):
        crashed.open()


def test_a_batch_inside_of_a_body_is_never_taken_for_a_record(files: StoreFiles) -> None:
    store = files.open()
    offsets = put_bodies(store, BODIES)
    inner = files.read(offsets[3], offsets[4] - offsets[3])
    (result,) = store.put([make_batch([inner], first_sequence=99)], NOW)
    put_bodies(store, ["last"])
    settle(store)
    crashed = files.copy()
    (crashed.directory / "queue-table").unlink()
    (crashed.directory / "queue-table.bak").unlink(missing_ok=True)
    crashed.flip(result.commitlog_offset + 60)
    recovered = crashed.open()
    assert deliverable(recovered) == {**dict(enumerate(BODIES)), 21: "last"}
    crashed.close()


def test_damage_of_a_running_stores_log_is_passed_by_consumers(files: StoreFiles) -> None:
    store = files.open()
    offsets = put_bodies(store, BODIES)
    now_ms = settle(store)
    files.flip(offsets[7] + 17)
    # What stands before comes at once; then the queue is compared with the log.
    result = store.get("topic", 0, 0, max_bytes=100_000)
    assert (result.status, result.next_queue_offset) == (GetStatus.FOUND, 7)
    with pytest.raises(CorruptRecord):
        store.get("topic", 0, 7, max_bytes=100_000)
    while store.tick(now_ms):
        pass
    assert deliverable(store) == all_but(7)
    assert store.stats().damaged[0].start_offset == offsets[7]


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_damaged_body_is_passed_once_a_reader_has_found_it(
    files: StoreFiles, in_memory: bool
) -> None:
    store = files.open()
    offsets = put_bodies(store, BODIES)
    now_ms = 0 if in_memory else settle(store)  # entries of the queue that are not in files yet
    files.flip(offsets[8] - 3)
    # A read looks at no body, unless its reader says that it found damage.
    assert store.get("topic", 0, 0, max_bytes=100_000).message_count == 20
    result = store.get("topic", 0, 0, max_bytes=100_000, verify=True)
    assert (result.status, result.next_queue_offset) == (GetStatus.FOUND, 7)
    assert result.message_count == 7
    with pytest.raises(CorruptRecord, match="offset 7 of queue 0"):
        store.get("topic", 0, 7, max_bytes=100_000, verify=True)
    while store.tick(now_ms):
        pass
    assert deliverable(store) == all_but(7)
    assert store.stats().damaged[0].start_offset == offsets[7]
    result = store.get("topic", 0, 8, max_bytes=100_000, verify=True)
    assert (result.message_count, result.next_queue_offset) == (12, 20)


def test_damage_of_a_running_stores_queue_is_put_right(files: StoreFiles) -> None:
    store = files.open()
    put_bodies(store, BODIES)
    now_ms = settle(store)
    good = files.queue_files()
    (path,) = good
    root = files.directory / "consumequeue"
    # But for the byte of the check alone: who reads without tags does not need it.
    for position in (*range(7 * 20, 7 * 20 + 7), *range(7 * 20 + 8, 7 * 20 + 12)):
        with open(root / path, "r+b") as file:
            file.seek(position)
            file.write(bytes([good[path][position] ^ 1]))
        with pytest.raises(CorruptRecord):
            for queue_offset in range(20):
                store.get("topic", 0, queue_offset, max_bytes=100_000)
        while store.tick(now_ms):
            pass
        assert deliverable(store) == dict(enumerate(BODIES))
        assert files.queue_files() == good
    assert not store.stats().damaged


TAGGED = [["red"] * 3, ["red", "blue", None], ["blue"], [None] * 2, ["blue", "blue"], ["red"]]


def read_by_tag(store: CommitLogStore, tag: str, now_ms: int) -> list[str]:
    """Bodies of a tag, as a broker finds them; what is to be repaired on the way is."""
    wanted = pull_filter(tag, "TAG")
    assert wanted is not None
    bodies: list[str] = []
    place = 0
    failures = 0
    while place < 12:
        try:
            found = get_filtered(
                store, MetaCache(), ("topic", 0, place), wanted, max_bytes=100_000, verify=True
            )
        except CorruptRecord:
            failures += 1
            assert failures < 3
        else:
            cut = msgspec.structs.replace(found, data=[b"".join(found.data)])
            bodies += bodies_in(cut, place)
            place = found.next_queue_offset
        while store.tick(now_ms):
            pass
    return bodies


@pytest.mark.parametrize("part", range(4))
def test_no_flipped_bit_of_a_queue_hides_a_message_from_its_tag(
    files: StoreFiles, part: int
) -> None:
    store = files.open()
    expected: dict[str, list[str]] = {"red": [], "blue": []}
    sequence = 0
    for tags in TAGGED:
        bodies = [f"body {sequence + number}" for number in range(len(tags))]
        store.put([make_batch(bodies, tags=tags, first_sequence=sequence)], NOW)
        sequence += len(tags)
        for body, tag in zip(bodies, tags, strict=True):
            if tag is not None:
                expected[tag].append(body)
    now_ms = settle(store)
    good = files.queue_files()
    (path,) = good
    fd = os.open(files.directory / "consumequeue" / path, os.O_RDWR)
    repaired = 0
    for bit in range(part, len(good[path]) * 8, 4):
        os.pwrite(fd, bytes([good[path][bit // 8] ^ 1 << bit % 8]), bit // 8)
        assert {tag: read_by_tag(store, tag, now_ms) for tag in expected} == expected
        if files.queue_files() == good:
            repaired += 1
        else:  # nobody had to look
            os.pwrite(fd, good[path], 0)
    os.close(fd)
    assert repaired > len(good[path])
    assert not store.stats().damaged


def test_a_lost_queue_file_of_a_running_store_is_written_again(files: StoreFiles) -> None:
    store = files.open()
    put_bodies(store, BODIES)
    now_ms = settle(store)
    good = files.queue_files()
    store._files.close()
    for path in good:
        (files.directory / "consumequeue" / path).unlink()
    with pytest.raises(CorruptRecord):
        store.get("topic", 0, 0, max_bytes=1)
    while store.tick(now_ms):
        pass
    assert deliverable(store) == dict(enumerate(BODIES))
    assert files.queue_files() == good


def test_read_at_tells_damage(files: StoreFiles) -> None:
    store = files.open()
    offsets = put_bodies(store, BODIES)
    files.flip(offsets[7] + 130)
    with pytest.raises(CorruptRecord):
        store.read_at(offsets[7])
    assert store.read_at(offsets[8])
