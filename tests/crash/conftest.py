"""What all crash tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.kill_points import KillPoints
from harness.store_files import StoreFiles

from mqmesh.storage.log.page_window import PageWindow


@pytest.fixture(autouse=True)
def ready_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of the log are ready as soon as they are asked for, and not some time later: all small
    writes but the first are stores into the map, in every run of a test."""
    monkeypatch.setattr(PageWindow, "_bring_in", PageWindow._fill)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[StoreFiles]:
    """An empty directory for a store."""
    files = StoreFiles(tmp_path / "store")
    yield files
    files.close()


@pytest.fixture
def kill_points(monkeypatch: pytest.MonkeyPatch) -> KillPoints:
    """The process dies before every single change of a file."""
    return KillPoints(monkeypatch.setattr)


@pytest.fixture
def another_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every opening the system is a freshly started one."""
    boots = iter(range(1, 1_000_000))
    monkeypatch.setattr(
        "mqmesh.storage.commitlog.opening.read_boot_id", lambda: next(boots).to_bytes(16, "big")
    )
