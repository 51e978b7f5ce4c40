"""A file system of 64 MiB, filled to its last byte."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from mqmesh.errors import DiskFull
from mqmesh.storage.commitlog.machine import Machine
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.files.atomic_file import load_document, save_document
from mqmesh.storage.files.disk_space import Space, system_space
from mqmesh.storage.interface import StoreConfig
from mqmesh.storage.log.epochs import EpochTable
from mqmesh.storage.log.mapped_file import MappedFile
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.store_contract import NOW, make_batch, read_queue
from mqmesh.units import GIB, KIB, MIB

SIZE = 64 * MIB
BODY = "x" * 100_000
CONFIG = StoreConfig(
    mapped_file_size_commit_log=1 * MIB,
    mapped_file_size_consume_queue=64,
    checkpoint_interval_ms=100,
    disk_reserve_bytes=2 * MIB,
    clean_file_forcibly_enable=False,
)


class SmallDisk:
    """A directory with room for 64 MiB."""

    def __init__(self, path: Path, *, mounted: bool) -> None:
        self.path = path
        self.mounted = mounted
        self._filler = path / "filler"

    def space_of(self, directory: Path) -> Space:
        """The room as the store sees it; told by the blocks of files without a mount."""
        if self.mounted:
            return system_space(directory)
        used = 0
        for root, _, names in os.walk(self.path):
            for name in names:
                path = Path(root, name)
                used += path.stat().st_blocks * 512 if path.exists() else 0
        return Space(min(used, SIZE), max(SIZE - used, 0))

    def fill(self) -> None:
        """Takes all the room that is left."""
        with open(self._filler, "ab", buffering=0) as file:
            while (room := self.space_of(self.path).available) > 0:
                try:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, room)
                except OSError:
                    break

    def free(self) -> None:
        """Gives that back."""
        self._filler.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(mount, capture_output=True, timeout=20).returncode == 0
    except OSError:
        mounted = False
    yield SmallDisk(path, mounted=mounted)
    if mounted:
        subprocess.run(["umount", str(path)], check=True, timeout=20)


Opener = Callable[..., CommitLogStore]


@pytest.fixture
def open_store(small_disk: SmallDisk) -> Iterator[Opener]:
    stores: list[CommitLogStore] = []

    def opener(config: StoreConfig = CONFIG) -> CommitLogStore:
        store = CommitLogStore.open(
            small_disk.path / "store",
            config,
            clock=ManualClock(),
            wake=lambda: None,
            on_progress=lambda progress: None,
            machine=Machine(space_of=small_disk.space_of),
        )
        stores.append(store)
        return store

    yield opener
    for store in stores:
        store.close()


def put_until_refused(store: CommitLogStore, first: int) -> int:
    """Stores messages until there is no room; returns how many were stored."""
    for number in range(first, first + 2 * SIZE // len(BODY)):
        try:
            store.put([make_batch([f"{number:06d}{BODY}"], first_sequence=number)], NOW)
        except DiskFull:
            return number - first
        store.tick(number * 1000)
        store.wait_for_chores()
    pytest.fail("the disk is never full")


def numbers(store: CommitLogStore) -> list[int]:
    return [int(body[:6]) for body in read_queue(store)]


def log_path(disk: SmallDisk) -> Path:
    return disk.path / "store" / "commitlog" / f"{0:020d}"


def taken_bytes(disk: SmallDisk) -> int:
    return sum(path.stat().st_blocks * 512 for path in (disk.path / "store").rglob("*"))


def log_files(disk: SmallDisk) -> list[str]:
    return sorted(path.name for path in (disk.path / "store" / "commitlog").glob("0*"))


def test_the_log_leaves_its_reserve(small_disk: SmallDisk, open_store: Opener) -> None:
    store = open_store(msgspec.structs.replace(CONFIG, disk_space_warning_level_ratio=100))
    stored = put_until_refused(store, 0)
    # All but the reserve, the queues' files and part of the last segments.
    assert stored * len(BODY) > SIZE - 8 * MIB
    assert small_disk.space_of(small_disk.path).available > 1 * MIB
    assert numbers(store) == list(range(stored))


def test_the_marks_refuse_before_that(small_disk: SmallDisk, open_store: Opener) -> None:
    store = open_store()
    stored = put_until_refused(store, 0)
    with pytest.raises(DiskFull, match="disk_space_warning_level_ratio"):
        store.put([make_batch([BODY], first_sequence=stored)], NOW)
    assert 89 <= small_disk.space_of(small_disk.path).used_percent <= 93
    assert numbers(store) == list(range(stored))


def test_filled_to_the_last_byte(small_disk: SmallDisk, open_store: Opener) -> None:
    config = msgspec.structs.replace(CONFIG, disk_space_warning_level_ratio=100)
    store = open_store(config)
    for number in range(50):
        store.put([make_batch([f"{number:06d}{BODY}"], first_sequence=number)], NOW)
        store.tick(number)
    store.wait_for_chores()
    small_disk.fill()
    # What was allocated ahead is still written; then nothing, again and again.
    stored = 50 + put_until_refused(store, 50)
    assert stored < 50 + 4 * 10
    for now_ms in range(1_000, 60_000, 100):
        store.tick(now_ms)
        with pytest.raises(DiskFull):
            store.put([make_batch([BODY], first_sequence=stored)], NOW)
    assert numbers(store) == list(range(stored))
    before = log_files(small_disk)
    store.close()

    # A restart on the full disk deletes nothing and reads everything.
    store = open_store(config)
    for now_ms in range(0, 60_000, 100):
        store.tick(now_ms)
    assert [name for name in log_files(small_disk) if name in before] == before
    assert numbers(store) == list(range(stored))
    with pytest.raises(DiskFull):
        store.put([make_batch([BODY * 5], first_sequence=stored)], NOW)

    # With room again it goes on by itself.
    small_disk.free()
    store.tick(61_000)
    for number in range(stored, stored + 30):
        store.put([make_batch([f"{number:06d}{BODY}"], first_sequence=number)], NOW)
    assert numbers(store) == list(range(stored + 30))
    store.close()
    assert numbers(open_store(config)) == list(range(stored + 30))


def test_stores_fill_what_was_taken_to_the_last_block_without_a_signal(
    small_disk: SmallDisk, open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[int] = []
    store_into = MappedFile.store

    def noting(mapped: MappedFile, position: int, pieces: list[bytes]) -> None:
        store_into(mapped, position, pieces)
        stored.append(position)

    monkeypatch.setattr(MappedFile, "store", noting)
    store = open_store(
        msgspec.structs.replace(CONFIG, disk_reserve_bytes=0, disk_space_warning_level_ratio=100)
    )
    body = "y" * 20_000
    number = 0
    with pytest.raises(DiskFull):
        while True:
            store.put([make_batch([f"{number:06d}{body}"], first_sequence=number)], NOW)
            number += 1
            if number == 100:
                store.wait_for_chores()
                small_disk.fill()
    assert number > 100  # the rest of what was taken
    # All were, but for the first of each segment, which finds no page ready.
    assert len(stored) >= number - 2 * len(log_files(small_disk))
    assert numbers(store) == list(range(number))


def test_a_topic_can_be_deleted_on_a_full_disk(small_disk: SmallDisk, open_store: Opener) -> None:
    store = open_store()
    for number in range(15):
        store.put([make_batch([f"{number:06d}{BODY}"], first_sequence=number)], NOW)
    store.wait_for_chores()
    small_disk.fill()
    store.tick(1_000)
    with pytest.raises(DiskFull, match="disk_space_warning_level_ratio"):
        store.put([make_batch([BODY], first_sequence=15)], NOW)
    store.delete_topic("topic")
    assert store.topics() == []


def test_a_store_without_messages_takes_little(small_disk: SmallDisk, open_store: Opener) -> None:
    store = open_store(StoreConfig())
    assert os.stat(log_path(small_disk)).st_size == GIB
    assert taken_bytes(small_disk) <= store.stats().disk_bytes + 1 * MIB == 17 * MIB


def test_a_disk_that_is_too_small_refuses_writes_until_there_is_room(
    small_disk: SmallDisk, open_store: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    config = msgspec.structs.replace(CONFIG, disk_reserve_bytes=SIZE)
    store = open_store(config)
    for _ in range(3):
        with pytest.raises(DiskFull, match=f"{SIZE} bytes stay free .disk_reserve_bytes"):
            store.put([make_batch(["a"])], NOW)
        store.tick(0)
        store.wait_for_chores()
    assert store.stats().disk_full
    assert [r.getMessage() for r in caplog.records if "writes are refused" in r.getMessage()] == [
        caplog.records[0].getMessage()
    ]
    store.close()
    store = open_store()
    store.put([make_batch(["a"])], NOW)
    assert read_queue(store) == ["a"]
    assert not store.stats().disk_full


def test_what_is_written_has_its_blocks_before(small_disk: SmallDisk, open_store: Opener) -> None:
    config = msgspec.structs.replace(
        CONFIG,
        mapped_file_size_commit_log=8 * MIB,
        allocate_ahead_bytes=64 * KIB,
        disk_reserve_bytes=0,
        disk_space_warning_level_ratio=100,
    )
    store = open_store(config)
    stored = 0
    while store.stats().max_commitlog_offset < 3 * MIB:
        store.put([make_batch([f"{stored:06d}{BODY}"], first_sequence=stored)], NOW)
        stored += 1
        store.tick(stored)
    for _ in range(2):
        store.wait_for_chores()
        store.tick(stored)
    segment = next(iter(store._log.segments))
    end = store.stats().max_commitlog_offset
    room = segment.allocated_through - end
    assert end // 3 < room <= end
    small_disk.fill()
    # All of that room can be used, nothing behind it.
    more = 0
    with pytest.raises(DiskFull, match="disk_reserve_bytes"):
        while True:
            number = stored + more
            store.put([make_batch([f"{number:06d}{BODY}"], first_sequence=number)], NOW)
            more += 1
    assert more == room // (len(BODY) + 200)
    assert numbers(store) == list(range(stored + more))


def test_a_store_that_cannot_even_begin_names_the_setting(
    small_disk: SmallDisk, open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "mkdir", no_room)
    with pytest.raises(DiskFull, match=r"store_path_root_dir\) cannot be opened: No space left"):
        open_store()


def test_a_document_that_grows_is_saved_on_a_disk_that_became_full(small_disk: SmallDisk) -> None:
    path = small_disk.path / "offsets"
    assert save_document(path, b"a" * KIB, room_bytes=64 * KIB)
    small_disk.fill()
    # Where it is not known by a mount that all is taken, there is room still.
    has_more = save_document(path, b"b" * 60 * KIB, room_bytes=64 * KIB)
    assert has_more is not small_disk.mounted
    assert load_document(path) == b"b" * 60 * KIB
    assert path.stat().st_size < 61 * KIB
    small_disk.free()
    assert save_document(path, b"c", room_bytes=64 * KIB)
    assert load_document(path) == b"c"


def test_an_epoch_is_noted_on_a_disk_that_became_full(small_disk: SmallDisk) -> None:
    path = small_disk.path / "epochs"
    EpochTable(path).begin(2, 500)
    small_disk.fill()
    EpochTable(path).begin(3, 700)
    found = EpochTable(path)
    assert [found.lost_since(epoch) for epoch in (1, 2, 3)] == [500, 700, None]
    # From here on there may be no room any more; that keeps no store from opening.
    found.begin(4, 900)
    assert found.lost_since(3) == 900
