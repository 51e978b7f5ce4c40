"""Nobody else reads what mqmesh writes."""

from __future__ import annotations

import os
import stat

import pytest

from mqmesh.private_files import APPEND, make_folder, make_private, open_private


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture(autouse=True)
def open_umask():
    """Whatever the system's default is, it is not what these tests see."""
    former = os.umask(0)
    yield
    os.umask(former)


def test_folders_and_files_are_made_private(tmp_path):
    make_folder(tmp_path / "a" / "b")
    os.close(open_private(str(tmp_path / "a" / "file"), APPEND))
    assert mode(tmp_path / "a" / "b") == 0o700
    assert mode(tmp_path / "a" / "file") == 0o600


def test_a_folder_that_is_there_stays_as_it_is(tmp_path):
    (tmp_path / "shared").mkdir(mode=0o755)
    make_folder(tmp_path / "shared")
    assert mode(tmp_path / "shared") == 0o755


def test_what_was_open_is_closed_with_all_that_is_in_it(tmp_path):
    store = tmp_path / "store"
    (store / "commitlog").mkdir(parents=True, mode=0o755)
    segment = store / "commitlog" / "0"
    segment.touch(mode=0o644)
    tool = store / "tool"
    tool.touch(mode=0o755)
    outside = tmp_path / "outside"
    outside.touch(mode=0o644)
    (store / "link").symlink_to(outside)
    make_private(store, outside.with_name("nothing"))
    assert [mode(one) for one in (store, store / "commitlog", segment, tool)] == [
        *(0o700, 0o700, 0o600, 0o700)
    ]
    assert mode(outside) == 0o644


def test_what_belongs_to_somebody_else_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "theirs").touch(mode=0o644)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    make_private(tmp_path / "theirs")
    assert mode(tmp_path / "theirs") == 0o644


def test_what_cannot_be_closed_is_told_and_stops_nobody(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch(mode=0o644)

    def refuse(path, mode, **options):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "chmod", refuse)
    make_private(tmp_path / "file")
    assert f"others may read {tmp_path / 'file'}" in caplog.text
