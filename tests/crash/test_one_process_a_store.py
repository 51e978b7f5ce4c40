"""A store belongs to one process, whatever happens to the files beside it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.store_files import SEGMENT_BYTES

from mqmesh.errors import ConfigError, StoreClosed, StoreLocked
from mqmesh.storage.backends import open_store
from mqmesh.storage.interface import MessageStore, StoreConfig
from mqmesh.storage.tools.stopped_store import open_stopped
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.store_contract import NOW, make_batch, read_queue

Opener = Callable[[], MessageStore]


@pytest.fixture(params=["commitlog", "lmdb"])
def open_it(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    opened: list[MessageStore] = []

    def opener() -> MessageStore:
        opened.append(
            open_store(
                request.param,
                tmp_path / "store",
                StoreConfig(mapped_file_size_commit_log=SEGMENT_BYTES),
                clock=ManualClock(),
                wake=lambda: None,
                on_progress=lambda progress: None,
            )
        )
        return opened[-1]

    yield opener
    for store in opened:
        store.close()


def test_without_its_lock_file_a_store_still_has_one_process(
    open_it: Opener, tmp_path: Path
) -> None:
    store = open_it()
    store.put([make_batch(["a"])], NOW)
    (tmp_path / "store" / "lock").unlink()
    with pytest.raises(StoreLocked):
        open_it()
    with pytest.raises(ConfigError, match="stop the broker"), open_stopped(tmp_path / "store"):
        pass
    store.tick(0)
    store.put([make_batch(["b"], first_sequence=1)], NOW)
    store.close()
    assert read_queue(open_it()) == ["a", "b"]


def test_a_store_whose_folder_was_replaced_writes_no_more(open_it: Opener, tmp_path: Path) -> None:
    store = open_it()
    (tmp_path / "store").rename(tmp_path / "moved")
    other = open_it()
    other.put([make_batch(["of the other"])], NOW)
    with pytest.raises(StoreClosed, match="moved, removed or replaced"):
        store.tick(0)
    with pytest.raises(StoreClosed, match="moved, removed or replaced"):
        store.put([make_batch(["of the first"])], NOW)
    assert not store.stats().writable
    store.close()
    other.tick(0)
    other.close()
    assert read_queue(open_it()) == ["of the other"]


def test_nobody_else_may_read_a_store(open_it: Opener, tmp_path: Path) -> None:
    def open_paths() -> list[str]:
        paths = (tmp_path / "store").rglob("*")
        return [str(p.relative_to(tmp_path)) for p in paths if p.lstat().st_mode & 0o077]

    former = os.umask(0)
    try:
        store = open_it()
        store.put([make_batch(["a"])], NOW)
        store.close()
        assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
        assert open_paths() == []
        for path in (tmp_path / "store").rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        open_it().close()
        assert open_paths() == []
    finally:
        os.umask(former)
