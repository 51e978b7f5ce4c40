"""One LMDB environment."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqmesh.errors import CorruptRecord, DiskFull, StorageError
from mqmesh.storage.lmdb.env import DATA_FILE, LmdbEnv

SMALL = 64 * 1024


@pytest.fixture
def env(tmp_path: Path) -> Iterator[LmdbEnv]:
    env = LmdbEnv(tmp_path / "env", map_size=SMALL)
    yield env
    env.close()


def numbered(*numbers: int) -> list[tuple[bytes, bytes]]:
    return [(b"k%04d" % number, b"v%d" % number) for number in numbers]


def test_pairs_are_found_by_key_and_by_order(env):
    env.write(numbered(1, 3, 5))
    assert env.get(b"k0003") == b"v3"
    assert env.get(b"k0002") is None
    assert env.at_or_before(b"k0003") == (b"k0003", b"v3")
    assert env.at_or_before(b"k0004") == (b"k0003", b"v3")
    assert env.at_or_before(b"k9") == (b"k0005", b"v5")
    assert env.at_or_before(b"k0000") is None
    assert env.range(b"k0002", b"k0005", most=10) == numbered(3)
    assert env.range(b"", b"z", most=2) == numbered(1, 3)
    assert env.keys(b"", b"z", most=10) == [b"k0001", b"k0003", b"k0005"]


def test_an_empty_environment_has_nothing(env):
    assert env.get(b"a") is None
    assert env.at_or_before(b"a") is None
    assert env.range(b"", b"z", most=1) == env.keys(b"", b"z", most=1) == []


def test_one_write_is_all_or_nothing(env):
    env.write(numbered(1, 2))
    env.write(numbered(3), [b"k0001", b"not there"])
    assert env.keys(b"", b"z", most=9) == [b"k0002", b"k0003"]
    with pytest.raises(StorageError):
        env.write([(b"k0004", b"v"), (b"", b"no key")], [b"k0002"])
    assert env.keys(b"", b"z", most=9) == [b"k0002", b"k0003"]


def test_the_map_grows_by_itself(env):
    env.write([(b"%08d" % number, bytes(1000)) for number in range(1000)])
    assert env.grown >= 3
    assert len(env.keys(b"", b"z", most=9999)) == 1000


def test_what_was_written_is_there_again_whatever_the_map_size(env, tmp_path):
    env.write([(b"%08d" % number, bytes(1000)) for number in range(1000)])
    env.sync()
    env.close()
    again = LmdbEnv(tmp_path / "env", map_size=SMALL)
    assert len(again.keys(b"", b"z", most=9999)) == 1000
    again.write([(b"x", bytes(100_000))])
    again.close()


@pytest.mark.parametrize("size", [1, 100, 4096, 5000])
def test_a_file_that_was_cut_is_refused(env, tmp_path, size):
    env.write([(b"%08d" % number, bytes(1000)) for number in range(100)])
    env.close()
    os.truncate(tmp_path / "env" / DATA_FILE, size)
    with pytest.raises(CorruptRecord):
        LmdbEnv(tmp_path / "env", map_size=SMALL)


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / DATA_FILE).write_bytes(os.urandom(20_000))
    with pytest.raises(CorruptRecord):
        LmdbEnv(tmp_path / "env", map_size=SMALL)


def test_a_full_disk_is_told_apart_and_passes(env):
    env.write(numbered(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (env.file_bytes, hard))
    try:
        with pytest.raises(DiskFull):
            env.write([(b"%08d" % number, bytes(1000)) for number in range(50)])
        assert env.get(b"k0001") == b"v1"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    env.write(numbered(2))
    assert env.keys(b"k", b"l", most=9) == [b"k0001", b"k0002"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError):
        LmdbEnv(tmp_path / "file" / "env", map_size=SMALL)


def test_closing_twice_does_no_harm(env):
    env.close()
    env.close()
    with pytest.raises(StorageError):
        env.get(b"a")
