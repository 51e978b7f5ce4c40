"""The lock of a store, for who writes and for who only looks."""

import errno
import fcntl
import os
import shutil
import stat
from pathlib import Path

import pytest

from mqmesh.errors import StorageError, StoreLocked
from mqmesh.storage.files.store_lock import StoreLock
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


def test_a_removed_lock_file_lets_nobody_in(tmp_path: Path) -> None:
    holder = StoreLock(tmp_path)
    (tmp_path / "lock").unlink()
    for to_write in (True, False):
        with pytest.raises(StoreLocked, match=f"{tmp_path} is open in another process"):
            StoreLock(tmp_path, to_write=to_write)
    holder.check()
    holder.release()
    StoreLock(tmp_path).release()


def test_where_nothing_can_be_written_readers_keep_writers_out_without_a_file(
    tmp_path: Path,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        refuse_writing(patch, errno.EROFS)
        readers = [StoreLock(tmp_path, to_write=False) for _ in range(2)]
    with pytest.raises(StoreLocked):
        StoreLock(tmp_path)
    for reader in readers:
        reader.release()


@pytest.mark.parametrize("then", ["moved", "removed", "replaced"])
def test_who_lost_the_folder_learns_it(tmp_path: Path, then: str) -> None:
    store = tmp_path / "store"
    store.mkdir()
    lock = StoreLock(store)
    lock.check()
    store.rename(tmp_path / "elsewhere")
    if then != "moved":
        shutil.rmtree(tmp_path / "elsewhere")
    if then == "replaced":
        store.mkdir()
    with pytest.raises(StoreLocked, match="moved, removed or replaced"):
        lock.check()
    lock.release()


@pytest.fixture
def no_locks_of_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("no_locks_of_directories")
def test_where_directories_are_not_locked_the_file_is(tmp_path: Path) -> None:
    holder = StoreLock(tmp_path)
    with pytest.raises(StoreLocked, match=f"pid {os.getpid()}"):
        StoreLock(tmp_path)
    holder.check()
    (tmp_path / "lock").unlink()
    with pytest.raises(StoreLocked, match="its lock file was removed or replaced"):
        holder.check()
    StoreLock(tmp_path).release()
    with pytest.raises(StoreLocked, match="its lock file was removed or replaced"):
        holder.check()
    holder.release()
