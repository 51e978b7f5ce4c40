"""Stores by name."""

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from mqmesh.errors import ConfigError, StorageError
from mqmesh.storage.backends import open_store
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.interface import MessageStore, StoreConfig
from mqmesh.storage.lmdb.store import LmdbStore
from mqmesh.storage.memory import MemoryStore
from mqmesh.testing.clock import ManualClock


def open_backend(backend: str, directory: Path) -> MessageStore:
    return open_store(
        backend,
        directory,
        StoreConfig(mapped_file_size_commit_log=1 << 20),
        clock=ManualClock(),
        wake=lambda: None,
        on_progress=lambda progress: None,
    )


@pytest.mark.parametrize(
    ("name", "kind"), [("commitlog", CommitLogStore), ("lmdb", LmdbStore), ("memory", MemoryStore)]
)
def test_built_in_stores(tmp_path: Path, name: str, kind: type[MessageStore]) -> None:
    store = open_backend(name, tmp_path / "deep" / "store")
    assert type(store) is kind
    assert store.stats().backend == name
    store.close()


def test_an_unknown_backend_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'tape' is unknown; there are: commitlog, lmdb, memory"):
        open_backend("tape", tmp_path)


def test_other_packages_may_offer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ThirdPartyStore(MemoryStore):
        @classmethod
        def open(cls, directory: Path, config: StoreConfig, **others: Any) -> MessageStore:
            assert sorted(others) == ["clock", "on_progress", "wake"]
            return cls(config, clock=others["clock"])

    class Point:
        name = "tape"

        def load(self) -> Any:
            return ThirdPartyStore.open

    def entry_points(*, group: str, name: str = "") -> list[Point]:
        assert group == "mqmesh.storage"
        return [Point()] if name in ("", "tape") else []

    monkeypatch.setattr("mqmesh.storage.backends.entry_points", entry_points)
    assert type(open_backend("tape", tmp_path)) is ThirdPartyStore
    with pytest.raises(ConfigError, match="commitlog, lmdb, memory, tape"):
        open_backend("wax", tmp_path)
    assert importlib.metadata.entry_points is not entry_points


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be opened: Not a directory"):
        open_backend("commitlog", tmp_path / "file" / "store")


@pytest.mark.parametrize(("first", "second"), [("commitlog", "lmdb"), ("lmdb", "commitlog")])
def test_a_store_is_not_opened_by_another_backend(tmp_path: Path, first: str, second: str) -> None:
    open_backend(first, tmp_path).close()
    with pytest.raises(StorageError, match=f"holds a store of the backend '{first}'"):
        open_backend(second, tmp_path)
    open_backend(first, tmp_path).close()
