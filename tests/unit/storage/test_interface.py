"""Settings of a store."""

import msgspec
import pytest

from mqmesh.storage.interface import FlushDiskType, StoreConfig


def test_defaults_are_within_their_bounds() -> None:
    default = StoreConfig()
    assert msgspec.convert(msgspec.to_builtins(default), StoreConfig) == default
    assert default.flush_disk_type is FlushDiskType.ASYNC_FLUSH
    assert default.mapped_file_size_commit_log == 1 << 30
    assert default.mapped_file_size_consume_queue == 300_000
    assert default.flush_interval_commitlog_ms == 500
    assert default.max_batch_bytes > 16 << 20


@pytest.mark.parametrize(
    "bad",
    [
        {"flush_disk_type": "SOMETIMES"},
        {"flush_interval_commitlog_ms": 9},
        {"mapped_file_size_commit_log": 65_535},
        {"mapped_file_size_consume_queue": 15},
        {"max_open_files": 7},
        {"disk_reserve_bytes": -1},
        {"unknown": 1},
    ],
)
def test_settings_out_of_bounds_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(bad, StoreConfig)
