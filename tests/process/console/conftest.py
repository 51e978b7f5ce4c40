"""The scene of the console's tasks: one cluster and one browser for all; none without Chromium."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.browser import MISSING, Browser
from harness.console_scene import ConsoleScene

HERE = Path(__file__).parent

collect_ignore_glob = ["test_*.py"] if MISSING else []
if MISSING:
    print(f"tests in a browser are left out: there is no {MISSING}", file=sys.stderr)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tasks; the first of them starts the cluster."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.timeout(240))


@pytest.fixture(scope="session")
def scene() -> Iterator[ConsoleScene]:
    """The cluster with its clients."""
    folder = Path(tempfile.mkdtemp(prefix="mq-"))
    scene = ConsoleScene(folder)
    yield scene
    scene.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def session_of_admin(scene: ConsoleScene) -> Browser:
    """A browser in which ``admin`` is logged in."""
    return scene.browser()


@pytest.fixture
def browser(session_of_admin: Browser) -> Iterator[Browser]:
    """The administrator's browser; after the test its log must be empty."""
    session_of_admin.log()
    yield session_of_admin
    assert session_of_admin.log() == []
