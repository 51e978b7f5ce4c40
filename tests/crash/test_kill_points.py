"""The process dies before every single system call that changes a file, recovery included."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from harness.kill_points import KillPoints
from harness.store_files import SEGMENT_BYTES, StoreFiles, deliverable, put_bodies, settle

from mqmesh.storage.interface import FlushDiskType, PutStatus, StoreConfig
from mqmesh.testing.store_contract import NOW, make_batch


@pytest.fixture
def files(tmp_path: Path) -> Iterator[StoreFiles]:
    files = StoreFiles(
        tmp_path / "store",
        StoreConfig(
            flush_disk_type=FlushDiskType.ASYNC_FLUSH,
            flush_interval_commitlog_ms=10,
            mapped_file_size_commit_log=SEGMENT_BYTES,
            mapped_file_size_consume_queue=16,
            checkpoint_interval_ms=100,
        ),
    )
    yield files
    files.close()


def recover(files: StoreFiles) -> tuple[dict[int, str], dict[int, str], int]:
    """Opens, looks, and closes; what two queues hold, and where the log ends."""
    store = files.open()
    found = deliverable(store), deliverable(store, "other", 1), store.stats().epoch
    assert not store.stats().damaged
    store.close()
    return found


class Workload:
    """Puts, rolls, a deleted topic, checkpoints and a clean stop, and what was acknowledged."""

    def __init__(self) -> None:
        self.acknowledged: list[str] = []
        self.attempted: list[str] = []

    def run(self, files: StoreFiles) -> None:
        store = files.open()
        now_ms = 0
        for number in range(16):
            body = f"{number}:" + "x" * 9000
            self.attempted.append(body)
            put_bodies(store, [body], topic="other", queue_id=1)
            self.acknowledged.append(body)
            if number % 6 == 3:
                put_bodies(store, ["gone"])
                store.delete_topic("topic")
            for _ in range(5):
                now_ms += 30
                store.tick(now_ms)
        settle(store, now_ms)
        store.close()


def test_what_was_acknowledged_survives_at_every_kill_point(
    files: StoreFiles, kill_points: KillPoints
) -> None:
    workload = Workload()
    files.directory.mkdir()
    kill_points.start(files, lambda: len(workload.acknowledged))
    workload.run(files)
    assert kill_points.stores > 50
    for copy, acknowledged in kill_points.stop():
        _, found, _ = recover(copy)
        bodies = list(found.values())
        assert list(found) == list(range(len(found)))
        assert len(bodies) >= acknowledged
        assert bodies == workload.attempted[: len(bodies)]


@pytest.mark.usefixtures("another_boot")
def test_a_recovery_that_dies_anywhere_is_recovered_from(
    files: StoreFiles, kill_points: KillPoints
) -> None:
    # By checkpoints only: what is damaged below must not have been synced.
    files.config = msgspec.structs.replace(files.config, flush_interval_commitlog_ms=600_000)
    store = files.open()
    put_bodies(store, ["x" * 9000] * 5, topic="other", queue_id=1)
    settle(store)
    offsets = put_bodies(store, ["y" * 9000] * 12, topic="other", queue_id=1)
    store.put([make_batch(["gone"])], NOW)
    store.delete_topic("topic")
    crashed = files.copy()
    crashed.flip(offsets[9] + 5000)
    reference = recover(crashed.copy())
    assert len(reference[1]) == 14

    kill_points.start(crashed, tuple)
    recovered = crashed.open()
    for copy, _ in kill_points.stop():
        topic, other, _ = recover(copy)
        assert (topic, other) == reference[:2]
        again = copy.open()
        assert again.stats().cut_bytes == 0
    assert deliverable(recovered, "other", 1) == reference[1]
    crashed.close()


def test_a_repeated_send_is_recognised_after_every_kill_point(
    files: StoreFiles, kill_points: KillPoints
) -> None:
    stored = 0
    files.directory.mkdir()
    kill_points.start(files, lambda: stored)
    store = files.open()
    for number in range(8):
        batch = make_batch([f"{number}"], producer_id=77, first_sequence=number)
        store.put([batch], NOW)
        stored += 1
        store.tick(number * 60)
    settle(store, 1000)
    store.close()
    for copy, stored_then in kill_points.stop():
        recovered = copy.open()
        # Five are remembered, and one more may be in the log that was not acknowledged yet.
        for number in range(max(0, stored_then - 4), stored_then):
            again = make_batch([f"{number}"], producer_id=77, first_sequence=number)
            (result,) = recovered.put([again], NOW)
            assert result.status is PutStatus.DUPLICATE
            assert result.base_queue_offset == number
