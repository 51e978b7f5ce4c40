"""What identifies a machine, and its place for sockets."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from mqmesh.errors import ConfigError
from mqmesh.host import MAX_SOCKET_PATH_BYTES, claim_port, host_id, socket_directory, socket_path
from mqmesh.hosts import check_listen, is_address


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


def test_a_store_has_its_sockets_in_its_own_folder(short_tmp_path, temporary):
    store = short_tmp_path / "store"
    store.mkdir()
    (store / "sock").write_text("left by one that was killed")
    assert socket_path(store) == store / "sock"
    assert socket_path(store, "index.sock") == store / "index.sock"
    assert list(store.iterdir()) == []


def test_where_that_does_not_do_the_sockets_are_in_the_temporary_directory(temporary, monkeypatch):
    monkeypatch.chdir(temporary)
    deep = temporary / ("x" * MAX_SOCKET_PATH_BYTES)
    deep.mkdir()
    unclear = temporary / "\udcff"
    unclear.mkdir()
    tabbed = temporary / "a\tb"
    tabbed.mkdir()
    assert {socket_path(unclear).parent, socket_path(tabbed).parent} == {socket_directory()}
    paths = {socket_path(deep), socket_path(deep, "index.sock"), socket_path(Path("a"))}
    assert len(paths) == 3
    assert {path.parent for path in paths} == {socket_directory()}
    assert socket_path(Path("a")) == socket_path(temporary / "x" / ".." / "a")


def test_a_file_system_that_takes_no_sockets_is_not_used(temporary, monkeypatch):
    class Refusing:
        def __init__(self, family):
            raise OSError(95, "Operation not supported")

    monkeypatch.setattr("mqmesh.host.socket.socket", Refusing)
    assert socket_path(temporary).parent == socket_directory()


def test_without_any_place_for_a_socket_it_is_said_what_to_do(temporary, monkeypatch):
    deep = temporary / ("x" * MAX_SOCKET_PATH_BYTES)
    deep.mkdir()
    unclear = temporary / "\udcff"
    unclear.mkdir()
    assert socket_path(unclear).parent == socket_directory()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="shorter data folder or a shorter TMPDIR"):
        socket_path(Path("a"))


def test_a_host_that_clients_are_told_must_be_one():
    for host in ("10.0.0.7", "a_b-c.example", "::1", "[::1]"):
        check_listen("broker", "127.0.0.1", host, allow_insecure_bind=False)
    for host in ("two words", "h:1", "tcp://h", "-h", "h" * 256, "a\x1bb"):
        with pytest.raises(ConfigError, match="advertised_host"):
            check_listen("broker", "127.0.0.1", host, allow_insecure_bind=False)
    assert is_address("h:1")
    assert not is_address("h:+1")


def test_a_port_is_shared_by_the_workers_of_one_folder_only(tmp_path):
    host = f"test-{os.getpid()}"
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    claims = [claim_port(host, 19_876, own, worker) for worker in (1, 2)]
    with pytest.raises(OSError, match="store_path_root_dir listen at port 19876; namesrv_port"):
        claim_port(host, 19_876, other, 1)
    for more in claim_port(host, 9_876, other, 1), claim_port("another", 19_876, other, 1):
        more.close()
    for claim in claims:
        claim.close()
    claim_port(host, 19_876, other, 1).close()
