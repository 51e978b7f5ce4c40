"""The lock of a store, for who writes and for who only looks."""

import errno
import os
from pathlib import Path

import pytest

from mqmesh.errors import StorageError, StoreLocked
from mqmesh.storage.store_lock import StoreLock
from mqmesh.testing.read_only import refuse_writing


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES])
def test_a_reader_needs_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    (tmp_path / "lock").write_text("77\n")
    refuse_writing(monkeypatch, error)
    with pytest.raises(StorageError, match=os.strerror(error)):
        StoreLock(tmp_path)
    one, another = StoreLock(tmp_path, to_write=False), StoreLock(tmp_path, to_write=False)
    assert (tmp_path / "lock").read_text() == "77\n"
    monkeypatch.undo()
    with pytest.raises(StoreLocked):
        StoreLock(tmp_path)
    one.release()
    another.release()
    StoreLock(tmp_path).release()


def test_where_nobody_can_write_no_lock_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_writing(monkeypatch, errno.EROFS)
    StoreLock(tmp_path, to_write=False).release()
    assert not list(tmp_path.iterdir())


def test_a_reader_is_kept_out_by_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = StoreLock(tmp_path)
    refuse_writing(monkeypatch, errno.EACCES)
    with pytest.raises(StoreLocked, match=f"pid {os.getpid()}"):
        StoreLock(tmp_path, to_write=False)
    writer.release()


def test_a_lock_that_cannot_even_be_read_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lock").write_text("")
    refuse_writing(monkeypatch, errno.EACCES, unreadable=(tmp_path / "lock",))
    with pytest.raises(StorageError, match="cannot be opened"):
        StoreLock(tmp_path, to_write=False)
