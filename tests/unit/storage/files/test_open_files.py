"""The bounded set of descriptors."""

import errno
import os
from pathlib import Path

import pytest

from mqmesh.storage.files.open_files import OpenFiles


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_file_unused_for_longest_is_closed_first(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}") for number in range(3)]
    for path in paths:
        Path(path).touch()
    files = OpenFiles(2)
    first, second = files.get(paths[0]), files.get(paths[1])
    assert files.get(paths[0]) == first
    third = files.get(paths[2])
    assert is_open(first)
    # The number of the one that was closed is free again.
    assert third == second
    assert len(files) == 2
    files.close()
    assert not is_open(first)
    assert len(files) == 0


def test_files_of_one_directory_can_be_closed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "ab").mkdir()
    files = OpenFiles(8)
    inside = files.get(str(tmp_path / "a" / "x"), flags=os.O_RDWR | os.O_CREAT)
    beside = files.get(str(tmp_path / "ab" / "x"), flags=os.O_RDWR | os.O_CREAT)
    files.close_under(str(tmp_path / "a"))
    assert not is_open(inside)
    assert is_open(beside)
    files.close()


def test_missing_file_is_an_error_and_takes_no_room(tmp_path: Path) -> None:
    files = OpenFiles(1)
    with pytest.raises(FileNotFoundError):
        files.get(str(tmp_path / "nothing"))
    assert len(files) == 0


def test_own_files_are_closed_when_the_process_is_out_of_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(tmp_path / f"{number}") for number in range(3)]
    for path in paths:
        Path(path).touch()
    files = OpenFiles(8)
    held = [files.get(path) for path in paths[:2]]
    real_open = os.open

    def scarce(path: str, flags: int, mode: int = 0o777) -> int:
        if is_open(held[0]):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", scarce)
    assert files.get(paths[2]) == held[0]
    assert is_open(held[1])
    assert len(files) == 2
    files.close()


def test_want_of_descriptors_is_an_error_when_none_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(path: str, flags: int, mode: int = 0o777) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        OpenFiles(8).get(str(tmp_path / "x"))
