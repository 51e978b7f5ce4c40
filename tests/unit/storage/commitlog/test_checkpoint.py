"""The two slots of the checkpoint."""

import os
from pathlib import Path

import msgspec
import pytest

from mqmesh.storage.commitlog.checkpoint import (
    MARK_POSITION,
    SLOT_POSITIONS,
    SLOT_SIZE,
    Checkpoint,
    CheckpointFile,
    read_boot_id,
)


def checkpoint(number: int) -> Checkpoint:
    return Checkpoint(
        store_id=0xDEADBEEF,
        epoch=3,
        synced_through=1000 + number,
        dispatched_through=900 + number,
        queues_synced_through=800 + number,
        clean=bool(number % 2),
        boot_id=bytes(range(16)),
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def save(path: Path, *numbers: int) -> None:
    file = CheckpointFile(path, sync=os.fsync)
    for number in numbers:
        file.save(checkpoint(number))
    file.close()


def load(path: Path) -> Checkpoint | None:
    file = CheckpointFile(path, sync=os.fsync)
    file.close()
    return file.newest


def test_a_new_file_holds_nothing(path: Path) -> None:
    assert load(path) is None
    assert path.stat().st_size == 12288
    assert load(path) is None


def test_the_newest_counts_also_after_opening_again(path: Path) -> None:
    for number in range(5):
        save(path, number)
        assert load(path) == checkpoint(number)


def test_a_slot_is_these_bytes_for_ever(path: Path) -> None:
    save(path, 1)
    slot = path.read_bytes()[SLOT_POSITIONS[1] :][:SLOT_SIZE]
    assert slot.hex() == (
        "4d514331"
        "21a86db7"
        "0100000000000000"
        "efbeadde"
        "03000000"
        "e903000000000000"
        "8503000000000000"
        "2103000000000000"
        "01000000"
        "00000000"
        "000102030405060708090a0b0c0d0e0f"
    )


def test_damage_of_the_newest_slot_leaves_the_one_before(path: Path) -> None:
    save(path, 1, 2, 3)
    content = path.read_bytes()
    for position in range(SLOT_SIZE):
        bad = bytearray(content)
        bad[SLOT_POSITIONS[1] + position] ^= 0x10
        path.write_bytes(bad)
        assert load(path) == checkpoint(2)
    path.write_bytes(content[:100])
    assert load(path) == checkpoint(2)
    path.write_bytes(bytes(8192))
    assert load(path) is None


def test_a_sync_that_fails_is_told_and_not_believed(path: Path) -> None:
    save(path, 1)

    def refuse(fd: int) -> None:
        raise OSError(5, "refused")

    file = CheckpointFile(path, sync=refuse)
    with pytest.raises(OSError, match="refused"):
        file.save(checkpoint(2))
    assert file.newest == checkpoint(1)
    file.close()


def test_boot_id_is_the_systems() -> None:
    assert len(read_boot_id()) == 16
    assert read_boot_id() == read_boot_id() != bytes(16)


def note(path: Path, store_id: int, synced_through: int) -> None:
    file = CheckpointFile(path, sync=os.fsync)
    file.note_synced(store_id, synced_through)
    file.close()


def test_the_synced_mark_moves_what_is_synced_forward_only(path: Path) -> None:
    save(path, 0)
    note(path, 0xDEADBEEF, 5000)
    assert load(path) == msgspec.structs.replace(checkpoint(0), synced_through=5000)
    note(path, 0xDEADBEEF, 10)
    assert load(path) == checkpoint(0)


@pytest.mark.parametrize("flipped", [0, 4, 9, 16, 23])
def test_a_damaged_synced_mark_counts_for_nothing(path: Path, flipped: int) -> None:
    save(path, 0)
    note(path, 0xDEADBEEF, 5000)
    data = bytearray(path.read_bytes())
    data[MARK_POSITION + flipped] ^= 1
    path.write_bytes(data)
    assert load(path) == checkpoint(0)


def test_the_synced_mark_of_another_store_counts_for_nothing(path: Path) -> None:
    save(path, 0)
    note(path, 0xDEADBEEE, 5000)
    assert load(path) == checkpoint(0)


def test_a_file_without_a_synced_mark_is_good(path: Path) -> None:
    save(path, 0)
    os.truncate(path, MARK_POSITION)
    assert load(path) == checkpoint(0)
