"""A backend of another package, found by its entry point, passes the suite.

It is the example of docs/storage-backends.md. Its directory stands for
site-packages: a module, and the ``dist-info`` that an installer makes.
"""

import importlib.metadata
from pathlib import Path

import pytest

from mqmesh.errors import ConfigError, StoreLocked
from mqmesh.storage.backends import open_store
from mqmesh.storage.interface import MessageStore, StoreConfig
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.store_contract import NOW, StoreContract, make_batch, read_queue

SITE_PACKAGES = Path(__file__).parent.parent / "data" / "third_party_backend"


def open_journal(directory: Path, config: StoreConfig) -> MessageStore:
    return open_store(
        "journal",
        directory,
        config,
        clock=ManualClock(),
        wake=lambda: None,
        on_progress=lambda progress: None,
    )


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is installed while a test runs."""
    monkeypatch.syspath_prepend(SITE_PACKAGES)


class TestJournalStore(StoreContract):
    """The example."""

    durable = True

    def open_store(self, directory: Path, config: StoreConfig) -> MessageStore:
        return open_journal(directory, config)

    @pytest.fixture
    def directory(self, tmp_path: Path, installed: None) -> Path:
        return tmp_path / "store"


def test_it_is_found_by_its_entry_point(tmp_path: Path) -> None:
    assert importlib.metadata.version("mqmesh-journal") == "1.0"
    with pytest.raises(ConfigError, match="there are: commitlog, lmdb, memory, journal"):
        open_store(
            "jornal",
            tmp_path,
            StoreConfig(),
            clock=ManualClock(),
            wake=lambda: None,
            on_progress=lambda progress: None,
        )


def test_its_torn_tail_is_cut_and_it_is_locked(tmp_path: Path) -> None:
    store = open_journal(tmp_path, StoreConfig())
    store.put([make_batch(["a"])], NOW)
    store.put(
        [make_batch([body], first_sequence=n, group=1) for n, body in enumerate("bc", 1)], NOW
    )
    with pytest.raises(StoreLocked):
        open_journal(tmp_path, StoreConfig())
    store.close()
    journal = tmp_path / "journal"
    journal.write_bytes(journal.read_bytes()[:-5])
    store = open_journal(tmp_path, StoreConfig())
    store.put([make_batch(["d"], first_sequence=9)], NOW)
    store.close()
    store = open_journal(tmp_path, StoreConfig())
    assert read_queue(store) == ["a", "d"]
    store.close()
