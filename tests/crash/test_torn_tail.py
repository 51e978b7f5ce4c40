"""The last record is cut, zeroed or garbled at every byte: the log ends before it."""

from collections.abc import Callable

import pytest
from harness.store_files import StoreFiles, deliverable, put_bodies, settle

from mqmesh.storage.interface import PutStatus
from mqmesh.testing.store_contract import NOW, make_batch

GARBAGE = bytes((7 * index + 3) % 255 + 1 for index in range(4096))


def cut(good: bytes, position: int) -> bytes:
    """The file ended there and was filled up again, as when a size was not yet on disk."""
    return good[:position] + bytes(len(good) - position)


def garble(good: bytes, position: int) -> bytes:
    """Something else stands there."""
    return good[:position] + GARBAGE[: len(good) - position]


def lose_one_byte(good: bytes, position: int) -> bytes:
    """One byte is not what it was."""
    return good[:position] + bytes([good[position] ^ 0xFF]) + good[position + 1 :]


@pytest.mark.parametrize("damage", [cut, garble, lose_one_byte])
def test_log_ends_exactly_before_a_torn_record(
    files: StoreFiles, damage: Callable[[bytes, int], bytes]
) -> None:
    store = files.open()
    put_bodies(store, ["a", "b"])
    settle(store)
    (offset,) = put_bodies(store, ["c"])
    end = store.stats().max_commitlog_offset
    good = files.read(offset, end - offset)
    crashed = files.copy()
    for position in range(len(good)):
        torn = damage(good, position)
        if torn == good:
            continue
        crashed.write(offset, torn + bytes(200))
        recovered = crashed.open()
        stats = recovered.stats()
        assert deliverable(recovered) == {0: "a", 1: "b"}
        assert not stats.damaged
        assert stats.epoch >= 1
        (result,) = recovered.put([make_batch(["d"], first_sequence=9)], NOW)
        assert (result.status, result.base_queue_offset) == (PutStatus.PUT_OK, 2)
        recovered.close()
        if position % 8 == 0:
            again = crashed.open()
            assert deliverable(again) == {0: "a", 1: "b", 2: "d"}
            assert (again.stats().cut_bytes, again.stats().recovered_bytes) == (0, 0)
            again.close()
        crashed = files.copy()


def test_second_recovery_changes_nothing(files: StoreFiles) -> None:
    store = files.open()
    offsets = put_bodies(store, ["a", "b", "c"])
    crashed = files.copy()
    crashed.write(offsets[2] + 120, b"torn")
    recovered = crashed.open()
    assert recovered.stats().cut_bytes > 0
    # It dies before it does anything; the files are what the first recovery left.
    dead = crashed.copy()
    again = dead.open()
    assert deliverable(again) == {0: "a", 1: "b"}
    assert again.stats().cut_bytes == 0
    assert again.stats().epoch == recovered.stats().epoch
    assert again.stats().max_commitlog_offset == recovered.stats().max_commitlog_offset
    dead.close()
    crashed.close()


@pytest.mark.usefixtures("another_boot")
def test_stale_records_behind_a_cut_never_come_back(files: StoreFiles) -> None:
    store = files.open()
    put_bodies(store, ["a"])
    offsets = put_bodies(store, ["bbbb", "cccc", "dddd"])
    crashed = files.copy()
    tail = crashed.read(offsets[1], 1000)
    crashed.flip(offsets[0] + 130)
    recovered = crashed.open()
    assert deliverable(recovered) == {0: "a"}
    # The disk gives back what was there before the cut, behind the mark of the cut ...
    crashed.write(offsets[1], tail)
    # ... and what is stored next ends exactly where an old record begins.
    end = recovered.stats().max_commitlog_offset
    room = offsets[1] - end
    small = len(make_batch([""]).data)
    if room >= small:
        recovered.put([make_batch(["x" * (room - small)], first_sequence=50)], NOW)
    dead = crashed.copy()
    again = dead.open()
    assert set(deliverable(again).values()) <= {"a", "x" * max(0, room - small)}
    dead.close()
    crashed.close()


def test_a_system_that_does_not_tell_its_boots_may_have_restarted(
    files: StoreFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mqmesh.storage.commitlog.opening.read_boot_id", lambda: bytes(16))
    store = files.open()
    offsets = put_bodies(store, ["a", "b", "c"])
    crashed = files.copy()
    crashed.flip(offsets[1] + 130)
    recovered = crashed.open()
    assert deliverable(recovered) == {0: "a"}
    assert not recovered.stats().damaged
    crashed.close()


@pytest.mark.usefixtures("another_boot")
def test_a_record_that_ends_a_segment_may_be_torn(files: StoreFiles) -> None:
    store = files.open()
    body = "x" * 20_000
    put_bodies(store, [body] * 2)
    settle(store)
    (third,) = put_bodies(store, [body])
    (fourth,) = put_bodies(store, [body])
    assert fourth == 65536
    for position in (third, third + 60, third + 10_000):
        crashed = files.copy()
        crashed.write(position, b"\0\1\2\3")
        recovered = crashed.open()
        assert deliverable(recovered) == {0: body, 1: body}
        # The next segment held nothing but the cut tail.
        put_bodies(recovered, ["new", body, body])
        assert deliverable(recovered) == {0: body, 1: body, 2: "new", 3: body, 4: body}
        crashed.close()
        again = crashed.open()
        assert deliverable(again) == {0: body, 1: body, 2: "new", 3: body, 4: body}
        crashed.close()


@pytest.mark.usefixtures("another_boot")
def test_a_lost_end_marker_of_an_unsynced_segment_ends_the_log(files: StoreFiles) -> None:
    store = files.open()
    body = "x" * 20_000
    put_bodies(store, [body] * 3)
    end = store.stats().max_commitlog_offset
    put_bodies(store, [body])
    crashed = files.copy()
    crashed.write(end, bytes(40))
    recovered = crashed.open()
    assert deliverable(recovered) == {0: body, 1: body, 2: body}
    put_bodies(recovered, ["new"])
    crashed.close()
    assert deliverable(crashed.open()) == {0: body, 1: body, 2: body, 3: "new"}
    crashed.close()


def test_a_prepared_segment_full_of_old_records_is_harmless(files: StoreFiles) -> None:
    store = files.open()
    body = "x" * 20_000
    put_bodies(store, [body] * 3)
    crashed = files.copy()
    crashed.segment(1).write_bytes(crashed.segment(0).read_bytes())
    recovered = crashed.open()
    assert deliverable(recovered) == {0: body, 1: body, 2: body}
    put_bodies(recovered, [body, body])
    crashed.close()
    assert len(deliverable(crashed.open())) == 5
    crashed.close()
