"""The `lmdb` backend, beyond what the contract says."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from mqmesh.errors import CorruptRecord, DiskFull, StorageError, StoreClosed, StoreLocked
from mqmesh.storage.interface import FlushDiskType, PutStatus, StoreConfig
from mqmesh.storage.lmdb import layout
from mqmesh.storage.lmdb.env import LmdbEnv, Pair
from mqmesh.storage.lmdb.opening import load
from mqmesh.storage.lmdb.store import LmdbStore
from mqmesh.storage.queues.producer_states import ProducerStates
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.store_contract import NOW, make_batch, read_queue
from mqmesh.units import MIB

ASYNC = StoreConfig(mapped_file_size_commit_log=MIB, disk_reserve_bytes=0)
SYNC = msgspec.structs.replace(ASYNC, flush_disk_type=FlushDiskType.SYNC_FLUSH)


def open_store(directory: Path, config: StoreConfig = SYNC) -> LmdbStore:
    return LmdbStore.open(
        directory,
        config,
        clock=ManualClock(),
        wake=lambda: None,
        on_progress=lambda progress: None,
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    store = open_store(tmp_path)
    yield store
    store.close()


def kinds(directory: Path) -> str:
    """Letters of all keys, one a pair."""
    env = LmdbEnv(directory / "lmdb", map_size=MIB)
    try:
        keys = env.keys(b"\0", b"\xff", most=1_000_000)
    finally:
        env.close()
    return "".join(chr(key[0]) for key in keys)


def change(directory: Path, puts: Sequence[Pair] = (), deletes: Sequence[bytes] = ()) -> None:
    env = LmdbEnv(directory / "lmdb", map_size=MIB, durable=True)
    env.write(puts, deletes)
    env.close()


def fail_writes(monkeypatch: pytest.MonkeyPatch, error: StorageError) -> None:
    def write(self: LmdbEnv, puts: Sequence[Pair], deletes: Sequence[bytes] = ()) -> None:
        raise error

    monkeypatch.setattr(LmdbEnv, "write", write)


def test_with_sync_flush_a_put_is_durable_when_it_returns(store: LmdbStore) -> None:
    (result,) = store.put([make_batch()], NOW)
    assert store.durable_offset() == result.end_offset
    assert store.stats().flushes == 1


def test_with_async_flush_it_is_so_after_a_sync(tmp_path: Path) -> None:
    store = open_store(tmp_path, msgspec.structs.replace(ASYNC, flush_interval_commitlog_ms=60_000))
    (result,) = store.put([make_batch()], NOW)
    assert store.durable_offset() < result.end_offset
    store.close()
    again = open_store(tmp_path)
    assert again.durable_offset() == result.end_offset
    again.close()


def test_all_batches_of_a_put_share_one_commit(store: LmdbStore) -> None:
    store.put([make_batch(first_sequence=number) for number in range(64)], NOW)
    assert store.stats().flushes == 1


def test_one_process_at_a_time(store: LmdbStore, tmp_path: Path) -> None:
    with pytest.raises(StoreLocked):
        open_store(tmp_path)


def test_the_pairs_of_a_deleted_topic_go_slice_by_slice(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(0, 1200, 100):
        store.put([make_batch(first_sequence=number + one) for one in range(100)], NOW)
    store.put([make_batch(topic="other")], NOW)
    store.delete_topic("topic")
    store.close()
    assert kinds(tmp_path).count("E") == 1201
    store = open_store(tmp_path)
    assert store.topics() == ["other"]
    assert store.put([make_batch(["new"])], NOW)[0].base_queue_offset == 0
    ticks = 1
    while store.tick(0):
        ticks += 1
    assert ticks == 3
    assert read_queue(store) == ["new"]
    store.close()
    found = kinds(tmp_path)
    assert (found.count("D"), found.count("E"), found.count("Q"), found.count("P")) == (0, 2, 2, 2)
    assert found.count("L") == 1200 + 3


def test_a_topic_deleted_at_the_end_keeps_its_id_taken(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put([make_batch(["old"])], NOW)
    store.delete_topic("topic")
    while store.tick(0):
        pass
    store.close()
    store = open_store(tmp_path)
    store.put([make_batch(["new"])], NOW)
    assert read_queue(store) == ["new"]
    store.close()


def test_producers_that_are_forgotten_leave_the_environment(tmp_path: Path) -> None:
    config = msgspec.structs.replace(SYNC, max_producer_states=16, producer_state_min_age_ms=0)
    store = open_store(tmp_path, config)
    for number in range(40):
        store.put([make_batch(producer_id=number)], NOW)
        while store.tick(0):
            pass
    assert store.put([make_batch(producer_id=39)], NOW)[0].status is PutStatus.DUPLICATE
    store.close()
    assert 16 <= kinds(tmp_path).count("P") <= 32
    store = open_store(tmp_path, config)
    assert store.put([make_batch(producer_id=39)], NOW)[0].status is PutStatus.DUPLICATE
    assert store.put([make_batch(producer_id=1)], NOW)[0].status is PutStatus.PUT_OK
    store.close()


def test_the_map_grows_when_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqmesh.storage.lmdb.opening.FIRST_MAP_BYTES", 128 * 1024)
    store = open_store(tmp_path, ASYNC)
    bodies = [str(number) * 50_000 for number in range(10, 40)]
    for number, body in enumerate(bodies):
        store.put([make_batch([body], first_sequence=number)], NOW)
    assert read_queue(store) == bodies
    store.close()


def test_without_room_nothing_is_stored_and_a_later_put_succeeds(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put([make_batch(["a"])], NOW)
    with monkeypatch.context() as patch:
        fail_writes(patch, DiskFull("no room"))
        with pytest.raises(DiskFull):
            store.put([make_batch(["b"], first_sequence=1)], NOW)
    assert read_queue(store) == ["a"]
    (result,) = store.put([make_batch(["b"], first_sequence=1)], NOW)
    assert (result.status, result.base_queue_offset) == (PutStatus.PUT_OK, 1)


def test_a_full_map_is_a_full_disk(store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqmesh.storage.lmdb.env.MOST_MAP_BYTES", MIB)
    monkeypatch.setattr(LmdbStore, "_check_room", lambda self, wanted: None)
    store._env._env.set_mapsize(MIB)
    store.put([make_batch(["a"])], NOW)
    large = "x" * 900_000
    with pytest.raises(DiskFull):
        store.put([make_batch([large], first_sequence=n) for n in range(1, 4)], NOW)
    store.put([make_batch(["b"], first_sequence=9)], NOW)
    assert read_queue(store) == ["a", "b"]


def test_the_reserve_is_left_to_others(tmp_path: Path) -> None:
    everything = os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    store = open_store(tmp_path, msgspec.structs.replace(SYNC, disk_reserve_bytes=everything))
    with pytest.raises(DiskFull, match="reserve"):
        store.put([make_batch()], NOW)
    assert store.stats().writable
    store.close()


def test_any_other_failed_commit_stops_the_store(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put([make_batch(["a"])], NOW)
    with monkeypatch.context() as patch:
        fail_writes(patch, StorageError("input/output error"))
        with pytest.raises(StorageError):
            store.put([make_batch(["b"], first_sequence=1)], NOW)
    calls = [
        lambda: store.put([], NOW),
        lambda: store.delete_topic("topic"),
        lambda: store.tick(0),
    ]
    for call in calls:
        with pytest.raises(StoreClosed, match="input/output error"):
            call()
    assert read_queue(store) == ["a"]
    assert not store.stats().writable
    assert store.stats().flush_errors == 1


def test_a_damaged_batch_is_never_given_out(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    results = store.put([make_batch(["a"], first_sequence=n) for n in range(3)], NOW)
    store.close()
    place = layout.log_key(results[1].commitlog_offset)
    change(tmp_path, [(place, b"rotten")])
    store = open_store(tmp_path)
    good = store.get("topic", 0, 0, max_bytes=MIB)
    assert (good.message_count, good.next_queue_offset) == (1, 1)
    with pytest.raises(CorruptRecord, match="offset 1 of queue 0"):
        store.get("topic", 0, 1, max_bytes=MIB)
    with pytest.raises(CorruptRecord):
        store.read_at(results[1].commitlog_offset)
    assert store.get("topic", 0, 2, max_bytes=MIB).message_count == 1
    store.close()


def test_a_damaged_body_is_found_when_it_is_looked_for(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    results = store.put([make_batch(["a"], first_sequence=n) for n in range(3)], NOW)
    data = bytes(store.read_at(results[1].commitlog_offset))
    store.close()
    change(tmp_path, [(layout.log_key(results[1].commitlog_offset), data[:-1] + b"\xff")])
    store = open_store(tmp_path)
    assert store.get("topic", 0, 0, max_bytes=MIB).message_count == 3
    good = store.get("topic", 0, 0, max_bytes=MIB, verify=True)
    assert (good.message_count, good.next_queue_offset) == (1, 1)
    with pytest.raises(CorruptRecord, match="offset 1 of queue 0"):
        store.get("topic", 0, 1, max_bytes=MIB, verify=True)
    store.close()


def test_a_missing_entry_is_noticed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put([make_batch(["a"], first_sequence=n) for n in range(3)], NOW)
    store.close()
    change(tmp_path, deletes=[layout.entry_key(1, 0, 1)])
    store = open_store(tmp_path)
    assert store.get("topic", 0, 0, max_bytes=MIB).next_queue_offset == 1
    with pytest.raises(CorruptRecord, match="its entry is missing"):
        store.get("topic", 0, 1, max_bytes=MIB)
    store.close()


@pytest.mark.parametrize("config", [ASYNC, SYNC])
def test_after_a_power_cut_what_was_not_synced_is_checked(
    tmp_path: Path, config: StoreConfig
) -> None:
    store = open_store(tmp_path, config)
    first, _ = store.put([make_batch(["a"]), make_batch(["b"], first_sequence=1)], NOW)
    store.close()
    env = LmdbEnv(tmp_path / "lmdb", map_size=MIB)
    head = load(env, ProducerStates(16)).head
    env.close()
    unclean = msgspec.structs.replace(
        head,
        clean=False,
        durable=config.flush_disk_type is FlushDiskType.SYNC_FLUSH,
        boot_id=b"another boot",
    )
    rotten = bytes(first.end_offset - first.commitlog_offset)
    place = layout.log_key(first.commitlog_offset)
    change(tmp_path, [(layout.HEAD_KEY, msgspec.msgpack.encode(unclean)), (place, rotten)])
    store = open_store(tmp_path, config)
    stats = store.stats()
    assert not stats.started_clean
    if config is SYNC:
        assert (stats.epoch, stats.recovered_bytes) == (3, 0)
    else:
        assert (stats.epoch, stats.recovered_bytes) == (3, stats.max_commitlog_offset)
        assert [(one.start_offset, one.end_offset) for one in stats.damaged] == [
            (first.commitlog_offset, first.end_offset)
        ]
    store.close()


def test_a_foreign_environment_is_left_alone(tmp_path: Path) -> None:
    change(tmp_path, [(b"x", b"y")])
    with pytest.raises(CorruptRecord, match="it is no store's"):
        open_store(tmp_path)


def test_a_later_format_is_left_alone(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    env = LmdbEnv(tmp_path / "lmdb", map_size=MIB)
    later = msgspec.structs.replace(load(env, ProducerStates(16)).head, format=3)
    env.close()
    change(tmp_path, [(layout.HEAD_KEY, msgspec.msgpack.encode(later))])
    with pytest.raises(CorruptRecord, match="format 3"):
        open_store(tmp_path)
