"""What identifies a machine, and its place for sockets."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from mqmesh.errors import ConfigError
from mqmesh.host import MAX_SOCKET_PATH_BYTES, host_id, socket_directory, socket_path


@pytest.fixture
def temporary(short_tmp_path, monkeypatch):
    """Another temporary directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_tmp_path))
    return short_tmp_path


def test_a_machine_has_one_identity():
    assert host_id() == host_id()
    assert len(host_id()) == 16


def test_only_we_may_look_into_the_directory(temporary):
    directory = socket_directory()
    assert directory.parent == temporary
    assert directory.stat().st_mode & 0o777 == 0o700
    assert socket_directory() == directory


def test_a_directory_that_others_may_enter_is_not_used(temporary):
    socket_directory().chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        socket_directory()


def test_a_link_is_not_followed(temporary):
    target = temporary / "target"
    target.mkdir(mode=0o700)
    (temporary / f"mqmesh-{os.getuid()}").symlink_to(target)
    with pytest.raises(ConfigError, match="no directory of ours"):
        socket_directory()


def test_each_store_has_its_socket_whatever_the_way_to_it(temporary, monkeypatch):
    monkeypatch.chdir(temporary)
    assert socket_path(Path("a")) == socket_path(temporary / "x" / ".." / "a")
    assert socket_path(Path("a")) != socket_path(Path("b"))


def test_a_path_too_long_for_a_socket_is_none(temporary, monkeypatch):
    deep = temporary / ("x" * MAX_SOCKET_PATH_BYTES)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert socket_path(Path("a")) is None
