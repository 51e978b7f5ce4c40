"""Snapshots of a store in use, and stores made of snapshots."""

from __future__ import annotations

import errno
import os

import pytest
from harness.indexed_store import IndexedStore
from harness.snapshots import take_snapshot
from harness.store_files import SEGMENT_BYTES, StoreFiles, put_bodies, settle

from mqmesh.errors import ConfigError, CorruptRecord, DiskFull, StorageError
from mqmesh.message import Message
from mqmesh.storage.files.disk_space import Space
from mqmesh.storage.tools import snapshot_making
from mqmesh.storage.tools.snapshot import MANIFEST, UNFINISHED, FileKind, load_manifest
from mqmesh.storage.tools.snapshot_making import (
    Pace,
    begin_snapshot,
    copy_snapshot,
    remove_unfinished,
    restore_snapshot,
)
from mqmesh.storage.tools.snapshot_reading import Snapshot
from mqmesh.testing.store_contract import read_queue

LONG = "x" * 2000


@pytest.fixture
def files(tmp_path):
    files = StoreFiles(tmp_path / "store")
    yield files
    files.close()


def bodies(count, start=0):
    return [f"{number} {LONG}" for number in range(start, start + count)]


def snapshot_of(files, store, tmp_path, **options):
    return take_snapshot(store, files.directory, tmp_path / "snapshots", **options)


def test_full_segments_are_links_and_the_last_one_is_a_copy_to_the_end(files, tmp_path):
    store = files.open()
    put_bodies(store, bodies(100))
    directory, manifest = snapshot_of(files, store, tmp_path)
    segments = sorted((directory / "commitlog").iterdir())
    assert len(segments) > 3
    for path in segments[:-1]:
        assert path.samefile(files.directory / "commitlog" / path.name)
    last = segments[-1]
    assert not last.samefile(files.directory / "commitlog" / last.name)
    assert int(last.name) + last.stat().st_size == store.stats().max_commitlog_offset
    assert manifest.end_offset == store.stats().max_commitlog_offset
    assert load_manifest(directory) == manifest


def no_copy_call(*arguments):
    raise OSError(errno.EXDEV, "elsewhere")


@pytest.mark.parametrize("has_copy_call", [True, False])
def test_what_is_copied_takes_its_time(has_copy_call, files, tmp_path, monkeypatch):
    store = files.open()
    put_bodies(store, bodies(50))
    waits = []
    pace = Pace(10_000, sleep=waits.append)
    if not has_copy_call:
        monkeypatch.setattr(os, "copy_file_range", no_copy_call)
    directory, manifest = snapshot_of(files, store, tmp_path, pace=pace)
    last = manifest.files[-1 + sum(file.kind is FileKind.SEGMENT for file in manifest.files)]
    assert last.size > 2_000
    assert sum(waits) == pytest.approx(last.size / 10_000)
    assert max(waits) == pytest.approx(0.1)
    assert Snapshot(directory).manifest == manifest


def test_a_copy_that_is_ended_leaves_nothing(files, tmp_path):
    store = files.open()
    put_bodies(store, bodies(50))
    answers = [False, False, True]
    pace = Pace(10_000, lambda: answers.pop(0), sleep=lambda seconds: None)
    with pytest.raises(StorageError, match="ended before it was whole"):
        snapshot_of(files, store, tmp_path, pace=pace)
    assert answers == []
    assert list((tmp_path / "snapshots").iterdir()) == []


def test_a_restored_store_has_what_was_there_then_and_nothing_of_later(files, tmp_path):
    store = files.open()
    put_bodies(store, bodies(60))
    settle(store)
    put_bodies(store, bodies(10, 60))
    directory, manifest = snapshot_of(files, store, tmp_path)
    put_bodies(store, bodies(50, 70))
    restore_snapshot(directory, tmp_path / "restored")
    restored = StoreFiles(tmp_path / "restored", files.config)
    again = restored.open()
    assert read_queue(again) == bodies(70)
    stats = again.stats()
    assert stats.store_id == manifest.store_id
    assert stats.epoch > manifest.epoch
    assert not stats.damaged
    put_bodies(again, ["more"])
    assert read_queue(again) == [*bodies(70), "more"]
    assert read_queue(store) == bodies(120)
    restored.close()


def test_a_restored_store_can_be_opened_again_after_a_crash(files, tmp_path):
    store = files.open()
    put_bodies(store, bodies(80))
    directory, _ = snapshot_of(files, store, tmp_path)
    restore_snapshot(directory, tmp_path / "restored")
    restored = StoreFiles(tmp_path / "restored", files.config)
    put_bodies(restored.open(), ["after"])
    crashed = restored.copy()
    assert read_queue(crashed.open()) == [*bodies(80), "after"]
    crashed.close()
    restored.close()


def test_queues_whose_messages_are_gone_keep_their_offsets_in_a_restored_store(files, tmp_path):
    store = files.open()
    put_bodies(store, ["old"], topic="quiet")
    put_bodies(store, bodies(100))
    settle(store)
    # As retention does it: the first segments go.
    store.close()
    for number in range(2):
        files.segment(number).unlink()
    (files.directory / "log-beginning").unlink()
    store = files.open()
    assert store.queue_bounds("quiet", 0) == (1, 1)
    settle(store, 10)
    directory, manifest = snapshot_of(files, store, tmp_path)
    assert manifest.start_offset == 2 * SEGMENT_BYTES
    restore_snapshot(directory, tmp_path / "restored")
    restored = StoreFiles(tmp_path / "restored", files.config)
    again = restored.open()
    assert again.queue_bounds("quiet", 0) == (1, 1)
    assert again.queue_bounds("topic", 0) == store.queue_bounds("topic", 0)
    assert read_queue(again) == read_queue(store)
    restored.close()


def test_a_topic_that_was_deleted_stays_deleted_in_a_restored_store(files, tmp_path):
    store = files.open()
    put_bodies(store, ["old"], topic="gone")
    put_bodies(store, bodies(40))
    store.delete_topic("gone")
    put_bodies(store, ["new"], topic="gone")
    directory, _ = snapshot_of(files, store, tmp_path)
    restore_snapshot(directory, tmp_path / "restored")
    restored = StoreFiles(tmp_path / "restored", files.config)
    assert read_queue(restored.open(), "gone") == ["new"]
    restored.close()


def test_a_snapshot_never_shares_a_file_with_the_store_that_is_restored_of_it(files, tmp_path):
    store = files.open()
    put_bodies(store, bodies(100))
    directory, manifest = snapshot_of(files, store, tmp_path)
    restore_snapshot(directory, tmp_path / "restored")
    for file in manifest.files:
        assert not (tmp_path / "restored" / file.path).samefile(directory / file.path)


def test_a_store_is_only_restored_into_an_empty_directory(files, tmp_path):
    store = files.open()
    put_bodies(store, ["one"])
    directory, _ = snapshot_of(files, store, tmp_path)
    with pytest.raises(ConfigError, match="not empty"):
        restore_snapshot(directory, files.directory)


def test_damaged_documents_are_not_restored(files, tmp_path):
    store = files.open()
    put_bodies(store, ["one"])
    settle(store)
    directory, _ = snapshot_of(files, store, tmp_path)
    path = directory / "queue-table"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptRecord, match="queue-table fails its checksum"):
        restore_snapshot(directory, tmp_path / "restored")


def test_a_flipped_bit_in_the_log_is_not_restored_without_a_word(files, tmp_path):
    store = files.open()
    put_bodies(store, ["one", "two", "three"])
    settle(store)
    directory, manifest = snapshot_of(files, store, tmp_path)
    path = directory / next(f.path for f in manifest.files if f.kind is FileKind.SEGMENT)
    data = bytearray(path.read_bytes())
    data[data.index(b"two")] ^= 1
    path.unlink()  # the store has it, too
    path.write_bytes(data)
    with pytest.raises(CorruptRecord, match=r"is damaged from \d+ to \d+ .*--damaged"):
        restore_snapshot(directory, tmp_path / "restored")
    assert not (tmp_path / "restored").exists()
    restore_snapshot(directory, tmp_path / "restored", damaged=True)
    restored = StoreFiles(tmp_path / "restored", files.config)
    assert "three" in read_queue(restored.open())
    restored.close()


def test_the_copies_of_the_key_are_for_their_owner_only(files, tmp_path):
    store = files.open()
    put_bodies(store, ["one"])
    directory, manifest = snapshot_of(files, store, tmp_path)
    assert "store-key" in [file.path for file in manifest.files]
    restore_snapshot(directory, tmp_path / "restored")
    for path in (directory / "store-key", tmp_path / "restored" / "store-key"):
        assert path.read_bytes() == (files.directory / "store-key").read_bytes()
        assert path.stat().st_mode & 0o777 == 0o600


def test_an_empty_store_has_a_snapshot_too(files, tmp_path):
    directory, manifest = snapshot_of(files, files.open(), tmp_path)
    assert manifest.log_bytes == 0
    restore_snapshot(directory, tmp_path / "restored")
    restored = StoreFiles(tmp_path / "restored", files.config)
    put_bodies(restored.open(), ["first"])
    restored.close()


def test_segments_that_retention_takes_meanwhile_leave_no_gap(files, tmp_path, monkeypatch):
    store = files.open()
    put_bodies(store, bodies(150))
    linked = []
    link = snapshot_making._link_or_copy

    def link_and_remove(source, target, pace):
        linked.append(source)
        if len(linked) == 2:
            # Retention takes the oldest ones, also the one that comes next.
            for number in range(int(source.name) // SEGMENT_BYTES):
                files.segment(number).unlink()
        link(source, target, pace)

    monkeypatch.setattr(snapshot_making, "_link_or_copy", link_and_remove)
    _, manifest = snapshot_of(files, store, tmp_path)
    starts = [int(f.path[-20:]) for f in manifest.files if f.kind is FileKind.SEGMENT]
    assert len(starts) == 3
    assert starts[0] == manifest.start_offset > 0
    assert starts == list(range(starts[0], manifest.end_offset, SEGMENT_BYTES))


@pytest.mark.parametrize("step", ["_take_segments", "_take_index", "_listed", "_write"])
def test_what_fails_in_the_middle_leaves_nothing(files, tmp_path, monkeypatch, step):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    store = files.open()
    put_bodies(store, ["one"])
    monkeypatch.setattr(snapshot_making, step, fail)
    with pytest.raises(DiskFull):
        snapshot_of(files, store, tmp_path)
    assert list((tmp_path / "snapshots").iterdir()) == []


@pytest.mark.parametrize("step", ["_take_segments", "_take_index", "_listed", "_write"])
def test_what_a_killed_broker_left_is_no_snapshot_and_goes_with_its_next_start(
    files, tmp_path, monkeypatch, step
):
    class Killed(BaseException):
        pass

    def die(*arguments):
        raise Killed

    store = files.open()
    put_bodies(store, ["one"])
    with monkeypatch.context() as patched:
        patched.setattr(snapshot_making, step, die)
        with pytest.raises(Killed):
            snapshot_of(files, store, tmp_path)
    (left,) = (tmp_path / "snapshots").iterdir()
    assert left.name.endswith(UNFINISHED)
    assert not (left / MANIFEST).exists()
    remove_unfinished(tmp_path / "snapshots", "broker-b")
    assert left.exists()
    remove_unfinished(tmp_path / "snapshots", "broker-a")
    assert not left.exists()


def test_a_snapshot_that_would_fill_the_disk_is_not_begun(tmp_path, files):
    put_bodies(files.open(), ["one"])
    with pytest.raises(DiskFull, match="a snapshot needs 165536 bytes"):
        begin_snapshot(
            files.directory,
            tmp_path / "snapshots",
            "broker-a.x.0",
            reserve_bytes=100_000,
            space_of=lambda path: Space(1, 100_000),
        )
    assert list((tmp_path / "snapshots").iterdir()) == []


def test_only_the_newest_snapshots_of_a_broker_are_kept(files, tmp_path):
    store = files.open()
    put_bodies(store, ["one"])
    root = tmp_path / "snapshots"
    snapshot_of(files, store, tmp_path, name="broker-b.1.0", broker_name="broker-b")
    for number in range(4):
        snapshot_of(files, store, tmp_path, name=f"broker-a.{number}.0", keep=2)
    assert sorted(path.name for path in root.iterdir()) == [
        "broker-a.2.0",
        "broker-a.3.0",
        "broker-b.1.0",
    ]


def test_brokers_with_dots_in_their_names_do_not_remove_snapshots_of_each_other(files, tmp_path):
    store = files.open()
    put_bodies(store, ["one"])
    for broker_name in ("eu", "eu.1", "eu.2"):
        for number in range(2):
            snapshot_of(
                files,
                store,
                tmp_path,
                name=f"{broker_name}.{number}.0",
                broker_name=broker_name,
                keep=1,
            )
    names = sorted(path.name for path in (tmp_path / "snapshots").iterdir())
    assert names == ["eu.1.0", "eu.1.1.0", "eu.2.1.0"]


def test_a_secret_stays_one_and_the_manifest_tells_nothing_of_it(files, tmp_path):
    store = files.open()
    put_bodies(store, ["one"])
    secret = files.directory / "store-key"
    if not secret.exists():
        secret.write_bytes(bytes(40))
    secret.chmod(0o600)
    directory, manifest = snapshot_of(files, store, tmp_path)
    restore_snapshot(directory, tmp_path / "restored")
    for path in (directory / "store-key", tmp_path / "restored" / "store-key"):
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.read_bytes() == secret.read_bytes()
    assert [file.crc32 for file in manifest.files if file.path == "store-key"] == [None]


def test_a_copy_of_a_snapshot_is_a_snapshot(files, tmp_path):
    store = files.open()
    put_bodies(store, bodies(50))
    directory, manifest = snapshot_of(files, store, tmp_path)
    copy_snapshot(directory, tmp_path / "copy")
    assert load_manifest(tmp_path / "copy") == manifest
    with pytest.raises(ConfigError, match="exists already"):
        copy_snapshot(directory, tmp_path / "copy")


def test_a_sealed_index_is_linked_and_a_live_one_copied(tmp_path):
    store = IndexedStore(tmp_path / "store")
    try:
        for number in range(300):
            store.put([Message("topic", bytes(1000), keys=[f"key-{number}"])])
        store.catch_up()
        directory, _ = take_snapshot(store, tmp_path / "store", tmp_path / "snapshots")
        parts = sorted(path.name for path in (directory / "index").iterdir())
        assert [name[20:] for name in parts] == [".sealed"] * (len(parts) - 1) + [".live"]
        sealed = directory / "index" / parts[0] / "data.mdb"
        assert sealed.samefile(store.index_directory / parts[0] / "data.mdb")
        restore_snapshot(directory, tmp_path / "restored")
        restored = IndexedStore(tmp_path / "restored")
        assert restored.index.starts == [int(name[:20]) for name in parts[:-1]]
        restored.catch_up()
        restored.check()
        restored.close()
    finally:
        store.close()
