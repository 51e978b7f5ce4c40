"""Entries of consume queues are shown as they are, and what is wrong with them."""

import struct

from harness.store_files import StoreFiles

from mqmesh.message import tag_hash
from mqmesh.testing.store_contract import NOW, make_batch

ENTRY = struct.Struct("<QIQ")


def filled(files: StoreFiles):
    """A store with ten batches of three messages, in files; and where the batches begin."""
    store = files.open()
    results = []
    for number in range(10):
        batch = make_batch(["a", "b", "c"], first_sequence=3 * number)
        results += store.put([batch], NOW)
    store.close()
    return [int(one.commitlog_offset) for one in results]


def queue_file(files: StoreFiles):
    (path,) = (one for one in files.directory.rglob("0-*") if one.is_file())
    return path


def test_entries_say_where_their_batches_are(files: StoreFiles) -> None:
    offsets = filled(files)
    store = files.open()
    try:
        found = store.inspector.entries("topic", 0, 4, 5)
        assert [one.queue_offset for one in found] == [4, 5, 6, 7, 8]
        assert [one.commitlog_offset for one in found] == [
            offsets[number // 3] for number in range(4, 9)
        ]
        assert {one.problem for one in found} == {""}
        assert {one.tag_hash for one in found} == {0}
        assert len(store.inspector.entries("topic", 0, 0, 1_000)) == 30
        assert store.inspector.entries("topic", 0, 30, 1) == []
        assert store.inspector.entries("topic", 0, 2**62, 1) == []
        assert store.inspector.entries("topic", 7, 0, 1) == []
    finally:
        store.close()


def test_tags_are_shown_by_their_hashes_also_before_they_are_in_files(files: StoreFiles) -> None:
    store = files.open()
    try:
        store.put([make_batch(["a"], tags=["red"])], NOW)
        (one,) = store.inspector.entries("topic", 0, 0, 9)
        assert (one.tag_hash, one.problem) == (tag_hash("red"), "")
    finally:
        store.close()


def test_damaged_entries_are_shown_as_such_and_are_no_error(files: StoreFiles) -> None:
    offsets = filled(files)
    store = files.open()
    try:
        path = queue_file(files)
        data = bytearray(path.read_bytes())
        place, extent, _ = ENTRY.unpack_from(data, 0)
        ENTRY.pack_into(data, 0, place, extent, 4_711)  # of a whole batch: its check fails
        place, extent, tag = ENTRY.unpack_from(data, 7 * 20)
        ENTRY.pack_into(data, 7 * 20, place ^ 1 << 40, extent, tag)
        ENTRY.pack_into(data, 10 * 20, 2**64 - 1, 0, 0)
        place, extent, tag = ENTRY.unpack_from(data, 12 * 20)
        ENTRY.pack_into(data, 15 * 20, place, extent, tag)  # of another batch
        path.write_bytes(data[: 28 * 20])
        problems = {
            one.queue_offset: one.problem
            for one in store.inspector.entries("topic", 0, 0, 30)
            if one.problem
        }
        assert set(problems) == {0, 1, 2, 7, 10, 15, 28, 29}
        assert "tag hashes" in problems[0]
        assert "no such batch" in problems[7]
        assert problems[10].startswith("lost")
        assert "other queue offsets" in problems[15]
        assert "missing" in problems[28]
        assert offsets
    finally:
        path.write_bytes(data)
        store.close()
