"""Bodies full of what looks like records, each in the right place: none is ever taken for one."""

import struct
import zlib
from collections.abc import Iterator
from typing import Final

import pytest
from harness.store_files import SEGMENT_BYTES, StoreFiles, deliverable, put_bodies, settle

from mqmesh.batch.record_batch import HEADER_SIZE, read_header
from mqmesh.errors import CorruptRecord
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.index.dispatcher_reader import LogReader
from mqmesh.storage.log.control_record import ControlKind, encode_control_record
from mqmesh.storage.log.scan import LogScanner
from mqmesh.storage.log.segments import FoundSegments
from mqmesh.storage.log.store_key import read_store_key
from mqmesh.storage.tools.stopped_store import open_stopped
from mqmesh.storage.tools.verify import verify_store
from mqmesh.testing.store_contract import NOW, batches_in, make_batch

BODIES: Final = ["one", "two", "three"]
BEHIND: Final = ["four", "five"]
EVERYTHING: Final = 1 << 62
_FRONT = struct.Struct("<QQqII8s")


class Known:
    """What any client can know of a store: it is in the batches that were pulled."""

    def __init__(self, store: CommitLogStore) -> None:
        result = store.get("topic", 0, 0, max_bytes=100_000)
        self.batches = batches_in(result)
        last = read_header(self.batches[-1])
        self.epoch, self.store_id, self.end = last.epoch, last.store_id, last.end_offset


def batch(
    known: Known,
    at: int,
    *,
    base: int = 3,
    epoch: int | None = None,
    check: bytes = bytes(8),
    version: int = 1,
) -> bytes:
    """A forged batch for a place in the log; all checksums are right."""
    data = bytearray(make_batch(["FORGED"]).data)
    data[56] = version
    data[48:52] = struct.pack("<I", zlib.crc32(data[52:]))
    epoch = known.epoch if epoch is None else epoch
    data[8:48] = _FRONT.pack(at, base, NOW, epoch, known.store_id, check)
    data[4:8] = struct.pack("<I", zlib.crc32(data[8:52]))
    return bytes(data)


def marker(known: Known, at: int, kind: int, data: bytes = b"", *, epoch: int = 0) -> bytes:
    """A forged marker for a place in the log."""
    made = bytearray(
        encode_control_record(
            ControlKind.EPOCH,
            commitlog_offset=at,
            epoch=known.epoch + epoch,
            store_id=known.store_id,
            store_timestamp=NOW,
            data=data,
        )
    )
    made[20] = kind
    made[4:8] = struct.pack("<I", zlib.crc32(made[8:]))
    return bytes(made)


def forgeries(known: Known, start: int) -> bytes:
    """One behind the other, from a place in the log on."""
    data = b""
    old = known.batches[0]
    makers = [
        lambda at: batch(known, at),
        lambda at: batch(known, at, epoch=2**31),
        lambda at: batch(known, at, epoch=2**32 - 1),
        lambda at: batch(known, at, base=2**33),
        # The check of a record that was pulled, in its own place no longer.
        lambda at: batch(known, at, check=old[40:48]),
        lambda at: old,
        lambda at: batch(known, at, version=2),
        lambda at: marker(known, at, ControlKind.EPOCH, epoch=1000),
        lambda at: marker(known, at, ControlKind.TOPIC_DELETED, b"topic"),
        lambda at: marker(known, at, 99),
        lambda at: marker(known, at, ControlKind.END),
        lambda at: batch(known, at),
    ]
    for make in makers:
        data += make(start + len(data))
    return data


class Scene:
    """A log with forgeries in the body of its fourth message, and good ones behind it."""

    def __init__(self, files: StoreFiles, *, behind: list[str]) -> None:
        self.store = files.open()
        put_bodies(self.store, BODIES)
        self.known = Known(self.store)
        self.start = self.known.end
        inside = bytes(make_batch([b"#" * 2_200], first_sequence=3).data).index(b"#")
        self.places: list[int] = []
        body = forgeries(self.known, self.start + inside)
        body += b"#" * (2_200 - len(body))
        (result,) = self.store.put([make_batch([body], first_sequence=3)], NOW)
        assert result.commitlog_offset == self.start
        self.end = result.end_offset
        self.forged_at = range(self.start + inside, self.start + inside + len(body.rstrip(b"#")))
        self.behind = put_bodies(self.store, behind)
        self.files = files

    def crashed(self) -> StoreFiles:
        """A copy whose whole log has to be read again."""
        copy = self.files.copy()
        for name in ("queue-table", "queue-table.bak"):
            (copy.directory / name).unlink(missing_ok=True)
        return copy

    def scanner(self, files: StoreFiles) -> Iterator[LogScanner]:
        scanner = LogScanner(
            FoundSegments(files.directory / "commitlog"),
            key=read_store_key(files.directory),
            store_id=self.known.store_id,
        )
        yield scanner
        scanner.close()


def found_behind(scene: Scene, files: StoreFiles, *, epoch: int) -> int | None:
    """What a search behind the outer batch finds, and that it is no record any more."""
    for scanner in scene.scanner(files):
        with pytest.raises(CorruptRecord):
            scanner.read(scene.start, epoch=epoch)
        return scanner.resync(scene.start, EVERYTHING, epoch=epoch)
    raise AssertionError


def test_whichever_bit_of_the_outer_batch_flips_the_next_record_is_the_real_one(
    files: StoreFiles,
) -> None:
    scene = Scene(files, behind=BEHIND)
    copy = scene.crashed()
    for place in range(scene.start, scene.end):
        copy.flip(place, place % 8)
        # The epoch is not always known.
        epoch = scene.known.epoch if place % 2 else 0
        assert found_behind(scene, copy, epoch=epoch) == scene.behind[0], place
        copy.flip(place, place % 8)


def test_wherever_the_outer_batch_is_torn_no_record_is_found(files: StoreFiles) -> None:
    scene = Scene(files, behind=[])
    copy = scene.crashed()
    whole = copy.read(scene.start, scene.end - scene.start)
    for size in range(len(whole) - 1, 0, -1):
        if any(whole[size:]):
            copy.write(scene.start + size, bytes(len(whole) - size))
            assert found_behind(scene, copy, epoch=size % 2) is None, size


@pytest.mark.parametrize("number", range(24))
def test_a_store_whose_last_write_was_torn_starts_with_what_was_acknowledged(
    files: StoreFiles, number: int
) -> None:
    scene = Scene(files, behind=[])
    crashed = scene.crashed()
    size = (scene.end - scene.start) * (number + 1) // 25
    crashed.write(scene.start + size, bytes(scene.end - scene.start - size))
    recovered = crashed.open()
    assert deliverable(recovered) == dict(enumerate(BODIES))
    stats = recovered.stats()
    assert (stats.topics, stats.damaged) == (1, [])
    assert stats.max_commitlog_offset - scene.start <= 48
    assert stats.epoch == scene.known.epoch + 1
    assert put_bodies(recovered, ["new"])
    assert deliverable(recovered) == dict(enumerate([*BODIES, "new"]))
    crashed.close()


@pytest.mark.parametrize("lost", [(), ("checkpoint",)])
@pytest.mark.parametrize("position", [0, 9, 40, 47, 50, 53, 58, 110, 300])
def test_a_flipped_bit_loses_the_outer_batch_only(
    files: StoreFiles, position: int, lost: tuple[str, ...]
) -> None:
    scene = Scene(files, behind=BEHIND)
    settle(scene.store)
    crashed = scene.crashed()
    for name in lost:
        (crashed.directory / name).unlink()
    crashed.flip(scene.start + position)
    recovered = crashed.open()
    assert deliverable(recovered) == {**dict(enumerate(BODIES)), 4: "four", 5: "five"}
    (damaged,) = recovered.stats().damaged
    assert (damaged.start_offset, damaged.end_offset) == (scene.start, scene.behind[0])
    assert recovered.topics() == ["topic"]
    # Without the checkpoint nobody knows whether more was there, so a new epoch begins.
    assert recovered.stats().epoch == scene.known.epoch + len(lost)
    crashed.close()
    with open_stopped(crashed.directory) as stopped:
        report = verify_store(stopped, lambda progress: None)
    assert report is not None
    assert [(one.start_offset, one.end_offset) for one in report.log_damage] == [
        (scene.start, scene.behind[0])
    ]
    assert (report.batches, report.messages) == (5, 5)


def test_the_repair_of_a_queue_takes_no_forged_record(files: StoreFiles) -> None:
    scene = Scene(files, behind=BEHIND)
    now_ms = settle(scene.store)
    files.flip(scene.start + 60)
    with pytest.raises(CorruptRecord):
        scene.store.get("topic", 0, 3, max_bytes=100_000, verify=True)
    while scene.store.tick(now_ms):
        pass
    assert deliverable(scene.store) == {**dict(enumerate(BODIES)), 4: "four", 5: "five"}
    assert scene.store.topics() == ["topic"]


def test_only_where_a_record_begins_is_one_read(files: StoreFiles) -> None:
    scene = Scene(files, behind=[])
    reader = LogReader(
        FoundSegments(files.directory / "commitlog"),
        key=read_store_key(files.directory),
        store_id=scene.known.store_id,
    )
    for place in scene.forged_at:
        with pytest.raises(CorruptRecord):
            scene.store.read_at(place)  # type: ignore[arg-type]
        with pytest.raises(CorruptRecord):
            reader.read_batch(place)
    assert reader.read_batch(scene.start)[1] == scene.store.read_at(scene.start)  # type: ignore[arg-type]
    reader.close()


def test_the_index_passes_over_forged_records(files: StoreFiles) -> None:
    scene = Scene(files, behind=BEHIND)
    files.flip(scene.start + 60)
    segments = FoundSegments(files.directory / "commitlog")
    reader = LogReader(segments, key=read_store_key(files.directory), store_id=scene.known.store_id)
    position, epoch, batches, skipped = 0, 0, 0, 0
    end = scene.store.stats().max_commitlog_offset
    while position < end:
        learned = reader.read_slice(
            segments._list[0], position, end, epoch=epoch, most_bytes=SEGMENT_BYTES
        )
        position, epoch = learned.stop, learned.epoch
        batches += learned.batches
        skipped += learned.skipped_bytes
        assert learned.deletions == []
    assert (batches, skipped) == (5, scene.end - scene.start)
    reader.close()


def test_a_record_of_an_earlier_epoch_is_not_taken_in_its_own_place_again(
    files: StoreFiles,
) -> None:
    """Whoever pulled a batch has all of its bytes; a cut makes its place free for others."""
    store = files.open()
    put_bodies(store, BODIES)
    pulled = Known(store).batches[2]
    place = read_header(pulled).commitlog_offset
    crashed = files.copy()
    # Torn: the third message is cut off, and the log goes on with a body that holds it.
    crashed.write(place + HEADER_SIZE, bytes(len(pulled) - HEADER_SIZE))
    store = crashed.open()
    assert deliverable(store) == {0: "one", 1: "two"}
    assert store.stats().max_commitlog_offset == place
    pad = b"#" * 200
    (result,) = store.put([make_batch([pad + pulled], first_sequence=9)], NOW)
    assert result.commitlog_offset > place
    for name in ("queue-table", "queue-table.bak"):
        (crashed.directory / name).unlink(missing_ok=True)
    again = crashed.copy()
    # As if the disk had put the old record back.
    again.flip(result.commitlog_offset + 60)
    recovered = again.open()
    assert deliverable(recovered) == {0: "one", 1: "two"}
    again.close()


def test_a_leap_of_queue_offsets_that_no_damage_explains_writes_no_void_entries(
    files: StoreFiles,
) -> None:
    scene = Scene(files, behind=BEHIND)
    crashed = scene.crashed()
    # By whoever has the key: a mistake of a program, say.
    record = bytearray(crashed.read(scene.behind[0], scene.behind[1] - scene.behind[0]))
    record[16:24] = struct.pack("<Q", 2**33)
    key = read_store_key(crashed.directory)
    record[40:48] = key.batch_check(bytes(record[8:40] + record[48:56]))
    record[4:8] = struct.pack("<I", zlib.crc32(record[8:52]))
    crashed.write(scene.behind[0], bytes(record))
    recovered = crashed.open()
    (damaged,) = recovered.stats().damaged
    assert damaged.start_offset == scene.behind[0]
    assert "so many messages cannot be lost" in damaged.reason
    assert recovered.queue_bounds("topic", 0) == (0, 6)
    crashed.close()
