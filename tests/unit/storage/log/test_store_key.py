"""The key by which a store knows its own records."""

import stat
from pathlib import Path

import pytest
from harness.store_files import StoreFiles, put_bodies

from mqmesh.batch.store_check import CHECK_SIZE, bears_check
from mqmesh.errors import StorageError
from mqmesh.storage.log.control_record import (
    ControlKind,
    decode_control_record,
    encode_control_record,
)
from mqmesh.storage.log.store_key import NAMES, StoreKey, open_store_key, read_store_key


def keys_of(directory: Path) -> list[bytes]:
    return [(directory / name).read_bytes() for name in NAMES]


def test_a_new_store_gets_a_random_key_in_two_files_that_only_its_owner_reads(
    tmp_path: Path,
) -> None:
    open_store_key(tmp_path, is_new=True)
    first, second = keys_of(tmp_path)
    assert first == second
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in NAMES} == {0o600}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(NAMES)
    other = tmp_path / "other"
    other.mkdir()
    open_store_key(other, is_new=True)
    assert keys_of(other)[0] != first


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("damage", [None, b"", b"\0" * 40])
def test_a_lost_copy_is_made_anew_from_the_other(
    tmp_path: Path, name: str, is_new: bool, damage: bytes | None
) -> None:
    open_store_key(tmp_path, is_new=True)
    before = keys_of(tmp_path)
    path = tmp_path / name
    path.unlink() if damage is None else path.write_bytes(damage)
    assert read_store_key(tmp_path).encode() == before[0]
    assert open_store_key(tmp_path, is_new=is_new).encode() == before[0]
    assert keys_of(tmp_path) == before


def test_without_both_nothing_is_believed_and_nothing_made(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="put one of the files back from a backup"):
        open_store_key(tmp_path, is_new=False)
    with pytest.raises(StorageError, match="the store's key is lost"):
        read_store_key(tmp_path)
    assert not list(tmp_path.iterdir())
    for name in NAMES:
        (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(StorageError, match="the store's key is lost"):
        open_store_key(tmp_path, is_new=True)


def test_two_different_keys_are_told(tmp_path: Path) -> None:
    open_store_key(tmp_path, is_new=True)
    (tmp_path / NAMES[1]).write_bytes(StoreKey.random().encode())
    with pytest.raises(StorageError, match="different keys"):
        open_store_key(tmp_path, is_new=False)


def test_a_store_does_not_start_without_its_key_and_keeps_its_log(tmp_path: Path) -> None:
    files = StoreFiles(tmp_path / "store")
    put_bodies(files.open(), ["one"])
    files.close()
    kept = [path.rename(tmp_path / path.name) for path in (files.directory / n for n in NAMES)]
    before = files.segment().read_bytes()
    with pytest.raises(StorageError, match="the store's key is lost"):
        files.open()
    assert files.segment().read_bytes() == before
    kept[1].rename(files.directory / NAMES[1])
    assert files.open().queue_bounds("topic", 0) == (0, 1)
    files.close()


def test_checks_are_these_bytes_for_ever() -> None:
    key = StoreKey(bytes(range(32)))
    assert key.batch_check(b"fields").hex() == "1d977e2b87080ed1"
    assert key.marker_check(b"fields").hex() == "6dedf7bdeabfd0b9"
    assert len(key.batch_check(b"")) == CHECK_SIZE


def test_every_bit_that_is_covered_matters(tmp_path: Path) -> None:
    files = StoreFiles(tmp_path / "store")
    store = files.open()
    start, end = put_bodies(store, ["one", "two"])
    data = files.read(start, end - start)
    check = read_store_key(files.directory).batch_check
    assert bears_check(data, check)
    assert bears_check(b"xyz" + data, check, 3)
    for bit in range(8 * 8, 56 * 8):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        assert not bears_check(bad, check), bit
    assert not bears_check(data, StoreKey.random().batch_check)
    files.close()


def test_a_marker_of_an_unknown_kind_counts_only_if_the_store_wrote_it() -> None:
    key = StoreKey.random()
    numbers = {"commitlog_offset": 0, "epoch": 1, "store_id": 2, "store_timestamp": 3}
    made = encode_control_record(
        ControlKind.EPOCH, **numbers, data=b"x", store_check=key.marker_check
    )
    assert decode_control_record(made, store_check=key.marker_check).data == b"x"
    with pytest.raises(StorageError, match="this store's check"):
        decode_control_record(made, store_check=StoreKey.random().marker_check)
