"""Verifying stopped stores, sound and damaged, and making their index anew."""

import errno
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from mqmesh.checksum import crc32
from mqmesh.errors import ConfigError
from mqmesh.log_identity import EpochStart
from mqmesh.storage.backends import open_store
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.files.atomic_file import load_document, save_document
from mqmesh.storage.interface import MessageStore, PutResult, RecoveryProgress, StoreConfig
from mqmesh.storage.lmdb import layout
from mqmesh.storage.lmdb.env import DATA_FILE, LmdbEnv
from mqmesh.storage.log.log_start import write_log_start
from mqmesh.storage.tools.index_rebuild import rebuild_index
from mqmesh.storage.tools.stopped_store import StoppedCommitLog, open_stopped
from mqmesh.storage.tools.verify import VerifyReport, verify_store
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.read_only import refuse_writing
from mqmesh.testing.store_contract import NOW, make_batch, read_queue
from mqmesh.units import KIB, MIB

BACKENDS = ["commitlog", "lmdb"]
CONFIG = StoreConfig(
    mapped_file_size_commit_log=64 * KIB, mapped_file_size_consume_queue=64, disk_reserve_bytes=0
)


def open_backend(backend: str, directory: Path) -> MessageStore:
    return open_store(
        backend,
        directory,
        CONFIG,
        clock=ManualClock(),
        wake=lambda: None,
        on_progress=lambda progress: None,
    )


def fill(backend: str, directory: Path, batches: int = 60) -> list[PutResult]:
    """Batches of 10 messages in 3 queues, a topic deleted and made again; closed in order."""
    store = open_backend(backend, directory)
    results = []
    store.put([make_batch(["x"] * 3, topic="gone", queue_id=1)], NOW)
    store.delete_topic("gone")
    store.put([make_batch(["y"], topic="gone")], NOW)
    for number in range(batches):
        batch = make_batch(["z" * 200] * 10, queue_id=number % 3, first_sequence=10 * number)
        results += store.put([batch], NOW)
    store.close()
    return results


def verify(directory: Path) -> VerifyReport:
    with open_stopped(directory) as store:
        report = verify_store(store, lambda progress: None)
    assert report is not None
    return report


def queues_of(report: VerifyReport) -> list[tuple[str, int, int, int]]:
    return [(one.topic, one.queue_id, one.first, one.end) for one in report.queue_damage]


def overwrite(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def change(directory: Path, puts: Sequence[tuple[bytes, bytes]], *deletes: bytes) -> None:
    env = LmdbEnv(directory / "lmdb", map_size=MIB, durable=True)
    env.write(puts, deletes)
    env.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sound_store(tmp_path: Path, backend: str) -> None:
    fill(backend, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    report = verify(tmp_path)
    assert report.sound
    assert report.clean_stop
    assert (report.batches, report.messages, report.queues) == (62, 604, 4)
    assert (report.backend, report.start_offset, report.torn_bytes) == (backend, 0, 0)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_store_is_sound(tmp_path: Path, backend: str) -> None:
    open_backend(backend, tmp_path).close()
    assert verify(tmp_path).sound


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_damaged_batch_is_told_with_its_range_and_messages(tmp_path: Path, backend: str) -> None:
    result = fill(backend, tmp_path)[5]
    start, end = result.commitlog_offset, result.end_offset
    if backend == "lmdb":
        change(tmp_path, [(layout.log_key(start), bytes(end - start))])
    else:
        overwrite(tmp_path / "commitlog" / f"{0:020d}", start + 300, b"\xff")
    report = verify(tmp_path)
    assert not report.sound
    assert [(one.start_offset, one.end_offset) for one in report.log_damage] == [(start, end)]
    assert report.batches == 61
    assert queues_of(report) == [("topic", 2, 10, 20)]
    assert "no good batch" in report.queue_damage[0].reason


def test_a_lost_segment_is_damage(tmp_path: Path) -> None:
    fill("commitlog", tmp_path)
    (tmp_path / "commitlog" / f"{64 * KIB:020d}").unlink()
    report = verify(tmp_path)
    assert [one.end_offset for one in report.log_damage] == [128 * KIB]
    assert report.log_damage[0].start_offset <= 64 * KIB
    assert report.queue_damage


def test_segments_that_retention_has_removed_are_no_damage(tmp_path: Path) -> None:
    fill("commitlog", tmp_path)
    write_log_start(tmp_path / "log-beginning", 64 * KIB)
    (tmp_path / "commitlog" / f"{0:020d}").unlink()
    report = verify(tmp_path)
    assert report.sound
    assert report.start_offset == 64 * KIB
    assert 0 < report.batches < 60


def test_queues_that_were_removed_are_made_anew(tmp_path: Path) -> None:
    fill("commitlog", tmp_path)
    shutil.rmtree(tmp_path / "consumequeue")
    assert not verify(tmp_path).sound
    for path in tmp_path.glob("queue-table*"):
        path.unlink()
    store = open_backend("commitlog", tmp_path)
    assert [len(read_queue(store, queue_id=queue_id)) for queue_id in range(3)] == [200] * 3
    store.close()
    assert verify(tmp_path).sound


def test_damaged_consume_queues_are_told(tmp_path: Path) -> None:
    fill("commitlog", tmp_path)
    name = hashlib.blake2b(b"topic", digest_size=16).hexdigest()
    queue = tmp_path / "consumequeue" / name
    overwrite(queue / f"0-{0:020d}", 25 * 20, b"\xff" * 20)
    overwrite(queue / f"0-{0:020d}", 33 * 20, b"\xff" * 20)
    os.truncate(queue / f"1-{64 * 20:020d}", 0)
    (queue / f"2-{0:020d}").unlink()
    report = verify(tmp_path)
    assert not report.log_damage
    assert sorted(queues_of(report)) == [
        ("topic", 0, 20, 40),
        ("topic", 1, 60, 130),
        ("topic", 2, 0, 70),
    ]


def test_damaged_entries_of_an_environment_are_told(tmp_path: Path) -> None:
    fill("lmdb", tmp_path)
    env = LmdbEnv(tmp_path / "lmdb", map_size=MIB)
    first, stop = layout.of_kind(layout.ENTRY)
    keys = [key for key in env.keys(first, stop, most=1000) if key[-1] == 10]
    env.close()
    assert len(keys) == 3
    change(tmp_path, [(keys[0], b"rotten")], keys[1])
    report = verify(tmp_path)
    assert not report.log_damage
    assert queues_of(report) == [("topic", 0, 10, 20), ("topic", 1, 10, 20)]


def test_a_torn_tail_is_no_damage(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    store = open_backend("commitlog", source)
    results = store.put([make_batch([str(n)], first_sequence=n) for n in range(3)], NOW)
    data = (source / "commitlog" / f"{0:020d}").read_bytes()
    copy.mkdir()
    (copy / "commitlog").mkdir()
    for name in ("checkpoint", "store-key"):
        (copy / name).write_bytes((source / name).read_bytes())
    store.close()
    torn = results[2].commitlog_offset + 50
    (copy / "commitlog" / f"{0:020d}").write_bytes(data[:torn] + bytes(len(data) - torn))
    report = verify(copy)
    assert report.sound
    assert not report.clean_stop
    assert report.batches == 2
    assert report.end_offset == results[2].commitlog_offset
    assert 0 < report.torn_bytes <= 50


def test_a_lost_beginning_is_damage_and_a_cleaned_one_is_not(tmp_path: Path) -> None:
    fill("commitlog", tmp_path)
    first = tmp_path / "commitlog" / f"{0:020d}"
    first.unlink()
    report = verify(tmp_path)
    assert not report.sound
    assert (report.log_damage[0].start_offset, report.log_damage[0].end_offset) == (0, 64 * KIB)
    assert "retention did not remove" in report.log_damage[0].reason
    write_log_start(tmp_path / "log-beginning", 64 * KIB)
    assert verify(tmp_path).sound
    # Killed after the note and before the removal of the second segment.
    write_log_start(tmp_path / "log-beginning", 128 * KIB)
    assert verify(tmp_path).sound
    (tmp_path / "log-beginning").unlink()
    assert verify(tmp_path).sound, "as in stores that were made before there was a note"


def test_a_store_that_opens_reports_a_lost_beginning(tmp_path: Path) -> None:
    fill("commitlog", tmp_path)
    (tmp_path / "commitlog" / f"{0:020d}").unlink()
    for _ in range(2):
        store = open_backend("commitlog", tmp_path)
        (lost,) = store.stats().damaged
        assert (lost.start_offset, lost.end_offset) == (0, 64 * KIB)
        store.close()


def test_it_can_be_stopped_and_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill("commitlog", tmp_path)
    monkeypatch.setattr("mqmesh.storage.tools.verify.PROGRESS_EVERY_BYTES", KIB)
    told: list[RecoveryProgress] = []
    with open_stopped(tmp_path) as store:
        assert verify_store(store, told.append, lambda: len(told) == 3) is None
    assert [one.done_bytes for one in told] == sorted(one.done_bytes for one in told)
    assert told[0].total_bytes >= told[-1].done_bytes > 0


def test_what_is_no_stopped_store_is_refused(tmp_path: Path) -> None:
    def refusal(directory: Path) -> str:
        with pytest.raises(ConfigError) as caught, open_stopped(directory):
            raise AssertionError("it was opened")
        return str(caught.value)

    assert "is not there" in refusal(tmp_path / "nowhere")
    assert "holds no store" in refusal(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "lmdb").mkdir()
    assert f"holds no {DATA_FILE}" in refusal(tmp_path)
    store = open_backend("memory", tmp_path)
    store.close()
    for backend in BACKENDS:
        running = open_backend(backend, tmp_path / backend)
        assert f"pid {os.getpid()}" in refusal(tmp_path / backend)
        running.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES])
def test_a_store_on_read_only_media_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, error: int
) -> None:
    fill(backend, tmp_path)
    sound = verify(tmp_path)
    for missing in ([], ["lock"]):
        for name in missing:
            (tmp_path / name).unlink()
        refuse_writing(monkeypatch, error)
        assert verify(tmp_path) == sound
        monkeypatch.undo()


def test_verifying_changes_nothing(tmp_path: Path) -> None:
    fill("commitlog", tmp_path)
    (tmp_path / "queue-table").write_bytes(b"garbled")
    (tmp_path / "checkpoint").unlink()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert verify(tmp_path).batches
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    lock = tmp_path / "lock"
    assert {**before, lock: 0} == {**after, lock: 0}


def test_an_index_is_made_anew(tmp_path: Path) -> None:
    results = fill("commitlog", tmp_path)
    index = tmp_path / "index"

    def rebuild() -> int:
        with open_stopped(tmp_path) as store:
            assert isinstance(store, StoppedCommitLog)
            return rebuild_index(
                store, index, clock=ManualClock(), on_progress=lambda progress: None
            )

    assert rebuild() == results[-1].end_offset
    parts = sorted(path.name for path in index.iterdir() if path.is_dir())
    assert parts
    for path in index.rglob(DATA_FILE):
        path.write_bytes(b"rotten")
    assert rebuild() == results[-1].end_offset
    assert sorted(path.name for path in index.iterdir() if path.is_dir()) == parts
    assert all(path.stat().st_size > 1000 for path in index.rglob(DATA_FILE))
    store = open_backend("commitlog", tmp_path)
    assert len(read_queue(store)) == 200
    store.close()


def test_epochs_are_compared_with_the_log(tmp_path: Path) -> None:
    fill("commitlog", tmp_path)
    store = open_backend("commitlog", tmp_path)
    assert isinstance(store, CommitLogStore)
    place = store.stats().max_commitlog_offset
    store.begin_epoch(5)
    store.close()
    assert verify(tmp_path).sound
    save_document(tmp_path / "epochs", b"[[1,0],[5,10]]")
    report = verify(tmp_path)
    assert not report.sound
    assert report.epoch_damage == [EpochStart(5, place)]
    for name in ("epochs", "epochs.bak"):
        (tmp_path / name).unlink()
    # The next start reads them from the log.
    assert verify(tmp_path).sound
    open_backend("commitlog", tmp_path).close()
    assert verify(tmp_path).sound
    assert load_document(tmp_path / "epochs") == b"[[1,0],[5,%d]]" % place


def test_a_log_that_is_being_cut_ends_there(tmp_path: Path) -> None:
    results = fill("commitlog", tmp_path)
    number = results[40].commitlog_offset.to_bytes(8, "little")
    (tmp_path / "log-cut").write_bytes(b"MQT1" + crc32(number).to_bytes(4, "little") + number)
    report = verify(tmp_path)
    assert report.end_offset == results[40].commitlog_offset
    torn_end = report.end_offset + report.torn_bytes
    assert results[-1].commitlog_offset < torn_end <= results[-1].end_offset
    assert report.sound


def test_reports_are_json() -> None:
    report = VerifyReport(
        sound=True,
        backend="lmdb",
        clean_stop=True,
        start_offset=0,
        end_offset=0,
        torn_bytes=0,
        batches=0,
        messages=0,
        queues=0,
        log_damage=[],
        queue_damage=[],
    )
    assert msgspec.json.decode(msgspec.json.encode(report), type=VerifyReport) == report
