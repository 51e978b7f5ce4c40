"""The coordinator's file: what was written is there, and damage never looks like emptiness."""

import msgspec
import pytest

from mqmesh.checksum import crc32
from mqmesh.errors import CorruptRecord
from mqmesh.host import ProcessMark
from mqmesh.storage.lmdb.coordinator_file import (
    CoordinatorFile,
    KeptChange,
    KeptRecord,
    KeptSession,
)
from mqmesh.storage.lmdb.env import DATA_FILE, LmdbEnv
from mqmesh.units import MIB

SESSION = KeptSession("groups/c/g", 3, 3_000, b"{}", ProcessMark("h", 7, 8))
RECORDS = {f"groups/c/g{number}": KeptRecord(number + 1, b"x" * 300) for number in range(200)}


@pytest.fixture
def written(tmp_path):
    file = CoordinatorFile(tmp_path)
    file.write(KeptChange(RECORDS, {"aa": SESSION, "bb": SESSION}))
    file.write(KeptChange(ended=("bb",)))
    file.close()
    return tmp_path


def contents(directory):
    file = CoordinatorFile(directory)
    file.close()
    return file.records, file.sessions


def tamper(directory, puts=(), deletes=()):
    env = LmdbEnv(directory, map_size=MIB, durable=True)
    env.write(list(puts), deletes)
    env.close()


def test_what_was_written_is_read(written):
    assert contents(written) == (RECORDS, {"aa": SESSION})
    file = CoordinatorFile(written)
    file.write(KeptChange({"groups/c/g0": KeptRecord(9, b"")}))
    file.close()
    assert contents(written)[0] == RECORDS | {"groups/c/g0": KeptRecord(9, b"")}


def test_a_new_file_is_empty_and_stays_readable(tmp_path):
    assert contents(tmp_path) == ({}, {})
    assert contents(tmp_path) == ({}, {})


def test_a_file_that_was_not_made_to_its_end_is_made_anew(tmp_path):
    (tmp_path / DATA_FILE).write_bytes(b"")
    assert contents(tmp_path) == ({}, {})


def test_a_record_that_is_missing_is_damage(written):
    tamper(written, deletes=[b"rgroups/c/g7"])
    with pytest.raises(CorruptRecord, match="199 records of 200"):
        CoordinatorFile(written)


def test_a_head_that_is_missing_is_damage(written):
    tamper(written, deletes=[b"h"])
    with pytest.raises(CorruptRecord, match="head is missing"):
        CoordinatorFile(written)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"rgroups/c/g7", b""),
        (b"rgroups/c/g7", b"\0\0\0\0\1\x92\1\xc4\0"),
        (b"r\xff", b""),
        (b"what", b"is this"),
    ],
)
def test_pairs_that_nobody_wrote_are_damage(written, key, value):
    tamper(written, [(key, value)])
    with pytest.raises(CorruptRecord, match="damaged"):
        CoordinatorFile(written)


@pytest.mark.parametrize(
    ("version", "says"), [(2, "format version 2"), (1, "cannot be understood")]
)
def test_values_of_another_kind_are_refused(written, version, says):
    payload = bytes((version,)) + msgspec.msgpack.encode("other")
    value = crc32(b"h" + payload).to_bytes(4, "little") + payload
    tamper(written, [(b"h", value)])
    with pytest.raises(CorruptRecord, match=says):
        CoordinatorFile(written)


def test_a_file_that_was_cut_is_damage(written):
    path = written / DATA_FILE
    data = path.read_bytes()
    for size in (1, 4_096, len(data) // 2, len(data) - 4_096):
        path.write_bytes(data[:size])
        with pytest.raises(CorruptRecord):
            CoordinatorFile(written)
        assert path.read_bytes() == data[:size], "and it stays as it is"


def test_no_flipped_page_is_taken_for_what_was_written(written):
    path = written / DATA_FILE
    data = path.read_bytes()
    noticed = 0
    for start in range(0, len(data), 4_096):
        damaged = bytearray(data)
        damaged[start : start + 4_096] = bytes(4_096)
        path.write_bytes(damaged)
        try:
            assert contents(written) == (RECORDS, {"aa": SESSION})  # a page that is not in use
        except CorruptRecord:
            noticed += 1
    assert noticed > 5
