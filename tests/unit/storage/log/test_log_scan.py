"""Reading the log record by record."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.store_files import SEGMENT_BYTES, StoreFiles, put_bodies
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mqmesh.batch.record_batch import HEADER_SIZE
from mqmesh.errors import CorruptRecord
from mqmesh.storage.files.chores import Chores
from mqmesh.storage.log.control_record import (
    CONTROL_RECORD_SIZE,
    ControlKind,
    encode_control_record,
)
from mqmesh.storage.log.record import MOST_EPOCHS_AT_ONCE
from mqmesh.storage.log.scan import WINDOW_BYTES, LogScanner
from mqmesh.storage.log.segments import FoundSegments, Segments
from mqmesh.storage.log.store_key import StoreKey
from mqmesh.testing.store_contract import make_batch

STORE_ID = 0xABCD1234
KEY = StoreKey(bytes(range(32)))


@pytest.fixture
def chores() -> Iterator[Chores]:
    chores = Chores("test")
    yield chores
    chores.close()


@pytest.fixture
def scanner(tmp_path: Path, chores: Chores) -> Iterator[LogScanner]:
    """A scanner of one empty segment in ``tmp_path``."""
    segments = Segments(tmp_path, segment_size=SEGMENT_BYTES, chores=chores)
    segments.get_or_make(0)
    scanner = LogScanner(segments, key=KEY, store_id=STORE_ID)
    yield scanner
    scanner.close()


def write(directory: Path, position: int, data: bytes) -> None:
    with open(directory / ("0" * 20), "r+b") as file:
        file.seek(position)
        file.write(data)


def void(position: int, *, epoch: int = 5, store_id: int = STORE_ID, key: StoreKey = KEY) -> bytes:
    return encode_control_record(
        ControlKind.EPOCH,
        commitlog_offset=position,
        epoch=epoch,
        store_id=store_id,
        store_timestamp=0,
        store_check=key.marker_check,
    )


def test_zeros_are_no_record(scanner: LogScanner) -> None:
    with pytest.raises(CorruptRecord):
        scanner.read(0, epoch=0)
    with pytest.raises(CorruptRecord, match="no file"):
        scanner.read(SEGMENT_BYTES, epoch=0)
    assert scanner.resync(0, 1 << 40, epoch=0) is None


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (void(40), "belongs at 40"),
        (void(0, store_id=7), "store 0x7"),
        (void(0, epoch=4), "epoch 4 after epoch 5"),
        (void(0)[:-1] + b"\1", "checksum"),
        (void(0, epoch=6 + MOST_EPOCHS_AT_ONCE), "after epoch 5"),
        (void(0, key=StoreKey(bytes(32))), "this store's check"),
        (bytes(make_batch().data), "this store's check"),
    ],
)
def test_what_does_not_belong_there_is_no_record(
    tmp_path: Path, scanner: LogScanner, record: bytes, reason: str
) -> None:
    write(tmp_path, 0, record)
    with pytest.raises(CorruptRecord, match=reason):
        scanner.read(0, epoch=5)


def test_a_scanner_without_an_id_takes_that_of_the_first_record(
    tmp_path: Path, scanner: LogScanner
) -> None:
    scanner = LogScanner(FoundSegments(tmp_path), key=KEY, store_id=None)
    write(tmp_path, 0, void(0, store_id=9) + void(48, store_id=8))
    assert scanner.read(0, epoch=0).end == 48
    with pytest.raises(CorruptRecord, match="store 0x8, not 0x9"):
        scanner.read(48, epoch=0)


@given(place=st.integers(1, SEGMENT_BYTES - CONTROL_RECORD_SIZE), noise=st.binary(max_size=300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_the_next_good_record_is_found_wherever_it_is(
    tmp_path: Path, chores: Chores, place: int, noise: bytes
) -> None:
    # Examples share the directory.
    (tmp_path / ("0" * 20)).unlink(missing_ok=True)
    segments = Segments(tmp_path, segment_size=SEGMENT_BYTES, chores=chores)
    segments.get_or_make(0)
    fakes = b"MQM1MQB1" + noise + void(7) + make_batch(["MQM1"]).data
    write(tmp_path, 0, (fakes * (place // len(fakes) + 1))[:place])
    write(tmp_path, place, void(place))
    scanner = LogScanner(segments, key=KEY, store_id=STORE_ID)
    assert scanner.resync(0, SEGMENT_BYTES, epoch=0) == place
    assert scanner.resync(0, place, epoch=0) is None
    assert scanner.resync(0, SEGMENT_BYTES, epoch=6) is None
    scanner.close()


def test_records_over_the_edge_of_a_window_are_read(tmp_path: Path) -> None:
    files = StoreFiles(tmp_path / "store")
    files.config = type(files.config)(mapped_file_size_commit_log=4 * WINDOW_BYTES)
    store = files.open()
    sizes = [700_000, 5, 2 * WINDOW_BYTES, 400_000, 1, WINDOW_BYTES - 200, 3]
    put_bodies(store, ["x" * size for size in sizes])
    scanner = LogScanner(store._log.segments, key=store._log.key, store_id=None)
    position, found = 0, []
    while position < store.stats().max_commitlog_offset:
        record = scanner.read(position, epoch=0)
        if record.batch is not None:
            # The header has random bytes.
            found.append(bytes(record.data[HEADER_SIZE:]).count(b"x"))
        position = record.end
    assert found == sizes
    scanner.close()
    files.close()


def test_a_search_through_the_log_can_be_ended_at_every_piece(
    tmp_path: Path, chores: Chores
) -> None:
    segments = Segments(tmp_path, segment_size=4 * WINDOW_BYTES, chores=chores)
    segments.get_or_make(0)
    write(tmp_path, 0, b"\xff" * (3 * WINDOW_BYTES))
    told: list[int] = []
    scanner = LogScanner(segments, key=KEY, store_id=STORE_ID, on_piece=told.append)
    assert scanner.resync(0, 4 * WINDOW_BYTES, epoch=0) is None
    assert len(told) >= 3
    assert told == sorted(told)

    def stop(offset: int) -> None:
        raise LookupError(offset)

    stopped = LogScanner(segments, key=KEY, store_id=STORE_ID, on_piece=stop)
    with pytest.raises(LookupError):
        stopped.resync(0, 4 * WINDOW_BYTES, epoch=0)
