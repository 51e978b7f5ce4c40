"""The project's own sources, as the tidy tests want them.

A rule is a function from sources to a list of complaints. Every rule is applied to the project
(there must be no complaint) and to planted faults (there must be one), so that a rule which has
gone blind is noticed.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.syntax import walked

# Where the folders of the checkout are installed.
PACKAGES = {"mqmesh": "mqmesh", "cli": "mqmesh.cli", "spark": "mqmesh.spark"}

FOLDER = Path(__file__).parent
GENERATED = {"__pycache__", "build", "dist", "mqmesh-data"}


def _files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in GENERATED
            and not name.endswith(".egg-info")
            and (not name.startswith(".") or name == ".ci")
        ]
        for name in names:
            if not name.startswith(".") or name == ".gitignore":
                yield Path(folder, name)


@pytest.fixture(scope="session")
def texts(project_root: Path) -> dict[str, str]:
    """Every text file of the project: path from the root -> content."""
    found = {}
    for path in sorted(_files(project_root)):
        try:
            found[path.relative_to(project_root).as_posix()] = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # binary data, or a temporary file that is gone already
    return found


@pytest.fixture(scope="session")
def python_files(texts: dict[str, str]) -> dict[str, str]:
    """Every Python file, scripts without a suffix included: path from the root -> source."""
    return {
        path: text
        for path, text in texts.items()
        if path.endswith(".py") or (text.startswith("#!") and "python" in text.partition("\n")[0])
    }


@pytest.fixture(scope="session")
def modules(python_files: dict[str, str]) -> dict[str, str]:
    """Every module that is installed: dotted name (`….__init__` for a package) -> source."""
    found = {}
    for path, text in python_files.items():
        top, _, rest = path.partition("/")
        if rest and top in PACKAGES:
            found[f"{PACKAGES[top]}.{rest.removesuffix('.py').replace('/', '.')}"] = text
    return found


def pytest_runtest_setup() -> None:
    """Keeps trees while the rules are applied: half a GiB, in which nobody looks for cycles."""
    gc.disable()


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Frees the trees behind the last rule: tests of other folders run in this process, too."""
    if nextitem is None or FOLDER not in nextitem.path.parents:
        gc.enable()
        walked.cache_clear()
