"""Who supervises a data folder, also after crashes."""

from __future__ import annotations

import os

import pytest

from mqmesh.errors import ConfigError
from mqmesh.roles.supervisor.run_file import (
    LOCK_NAME,
    RUN_NAME,
    DataFolderLock,
    RoleEntry,
    RunRecord,
    end_orphans,
    read_record,
    remove_record,
    stop_supervisor,
    supervisor_pid,
    write_record,
)

RECORD = RunRecord(
    pid=7,
    started_ms=1_000,
    namesrv="127.0.0.1:9876",
    roles=[RoleEntry(role="broker", name="broker-a", pid=8, argv=["a", "b"], restarts=2)],
)


def test_a_lock_names_its_holder_and_refuses_a_second_one(tmp_path):
    lock = DataFolderLock(tmp_path / "data")
    assert supervisor_pid(tmp_path / "data") == os.getpid()
    with pytest.raises(ConfigError, match=rf"running on it already \(process {os.getpid()}\)"):
        DataFolderLock(tmp_path / "data")
    lock.release()
    assert supervisor_pid(tmp_path / "data") == 0


def test_a_removed_lock_file_makes_no_running_cluster_look_stopped(tmp_path):
    lock = DataFolderLock(tmp_path)
    write_record(tmp_path, RECORD)
    (tmp_path / LOCK_NAME).unlink()
    assert supervisor_pid(tmp_path) == RECORD.pid
    with pytest.raises(ConfigError, match=rf"running on it already \(process {RECORD.pid}\)"):
        DataFolderLock(tmp_path)
    lock.release()
    assert supervisor_pid(tmp_path) == 0


def test_a_lock_that_was_released_can_be_taken(tmp_path):
    for _ in range(2):
        DataFolderLock(tmp_path).release()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data folder .*: (File exists|Not a directory)"):
        DataFolderLock(tmp_path / "file" / "data")


def test_the_file_a_crash_left_behind_is_no_running_cluster(tmp_path):
    (tmp_path / LOCK_NAME).write_text("1\n")
    write_record(tmp_path, RECORD)
    assert supervisor_pid(tmp_path) == 0
    assert stop_supervisor(tmp_path, 100) is False


@pytest.mark.parametrize("text", ["", "x", "-1", "99999999999999999999", "\udcff"])
def test_a_broken_lock_file_harms_nobody(tmp_path, text):
    lock = DataFolderLock(tmp_path)
    (tmp_path / LOCK_NAME).write_bytes(text.encode(errors="surrogateescape"))
    assert supervisor_pid(tmp_path) == 0
    lock.release()


def test_without_a_folder_nothing_runs(tmp_path):
    assert supervisor_pid(tmp_path / "nowhere") == 0
    assert read_record(tmp_path / "nowhere") is None


def test_a_record_reads_back(tmp_path):
    write_record(tmp_path, RECORD)
    assert read_record(tmp_path) == RECORD
    assert [path.name for path in tmp_path.iterdir()] == [RUN_NAME]
    remove_record(tmp_path)
    remove_record(tmp_path)
    assert read_record(tmp_path) is None


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"pid": "x"}', b"\xff\xff"])
def test_a_broken_record_is_none(tmp_path, data):
    (tmp_path / RUN_NAME).write_bytes(data)
    assert read_record(tmp_path) is None


def test_a_stranger_with_the_same_number_is_left_alone():
    record = RunRecord(
        pid=1,
        started_ms=0,
        namesrv="",
        roles=[
            RoleEntry(role="broker", name="we", pid=os.getpid(), argv=["another", "program"]),
            RoleEntry(role="broker", name="gone", pid=2**22 + 1, argv=["x"]),
            RoleEntry(role="broker", name="none"),
        ],
    )
    assert end_orphans(record) == []
