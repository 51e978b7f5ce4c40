"""Settings and fixtures that every test may use."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# In the background of a shell (`nohup … &`) these are ignored, and every child would inherit that.
for _signal, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _handler)

ROOT = Path(__file__).resolve().parent.parent


def _scope_of(file: str) -> str:
    """Return what has its tests run by one worker: a file, or files that share what costs much."""
    if file.startswith("tests/process/console/"):  # A cluster and a browser.
        return "tests/process/console/"
    # A tree of each source of the project. The others of that folder start programs.
    if file.startswith("tests/tidy/") and not file.endswith(("packaging.py", "types.py")):
        return "tests/tidy/"
    return file


# For the programs of tests/harness and benchmarks/rows, which run in processes of their own.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(ROOT / "tests"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")])
)

# The same examples in every run: a test that fails by luck helps nobody. Whoever hunts for new
# failures runs `pytest --hypothesis-profile=explore`.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=100)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=5000)
hypothesis.settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    """Stop at once, with the remedy, where the package is not installed."""
    if not _is_installed():
        pytest.exit(
            "mqmesh.cli cannot be imported: mqmesh is not installed here. Run `pip install -e .` "
            "in the checkout, or let scripts/test set everything up.",
            returncode=pytest.ExitCode.USAGE_ERROR,
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long some tests are; the defaults are for every day."""
    group = parser.getgroup("mqmesh's own tests")
    group.addoption(
        "--metrics-seconds", type=int, default=1, help="Prometheus looks on for so long."
    )
    group.addoption("--archive-flights", type=int, default=4_000, help="Flights that are sent.")
    group.addoption("--archive-kills", type=int, default=1, help="Ingests that are killed.")
    group.addoption("--archive-seed", type=int, default=1, help="Of the moments of kills.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything under tests/process as slow: it starts real processes."""
    process_tests = ROOT / "tests" / "process"
    for item in items:
        if process_tests in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file together, and those of the console, which share one cluster."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope_of(super()._split_scope(nodeid))

    return Scheduling(config, log)


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("mqmesh.cli") is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(scope="session")
def project_root() -> Path:
    """The top of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder tests/data, which keeps a golden file of every format version for ever."""
    return ROOT / "tests" / "data"


@pytest.fixture
def load_archive_benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Import modules of `benchmarks/archive`, which are not installed, by their short names."""
    folder = ROOT / "benchmarks" / "archive"
    names = [path.stem for path in folder.glob("*.py")]
    monkeypatch.syspath_prepend(str(folder))
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def short_tmp_path() -> Iterator[Path]:
    """An empty folder with a short path.

    An ipc endpoint may have at most 107 bytes, which pytest's own tmp_path can exceed.
    """
    folder = Path(tempfile.mkdtemp(prefix="mq-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
