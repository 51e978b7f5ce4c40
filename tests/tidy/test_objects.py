"""Modules that are too short to stand alone, and tests that reach into what is private."""

from __future__ import annotations

import ast
from collections import defaultdict

from harness.syntax import walked

SCRAP_LINES = 60

SCRAPS = {"mqmesh.roles.schedule.broker_clock"}
"""Those that were there; it only ever becomes shorter."""

PRIVATE_IN_TESTS = 335
"""So often tests reach into what is private, at most; it only ever becomes lower."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def scraps(modules):
    """Short modules that only their neighbour imports."""
    importers = defaultdict(set)
    for path, source in modules.items():
        for node in walked(source):
            if isinstance(node, ast.ImportFrom) and node.module:
                importers[node.module].add(path)
                for alias in node.names:
                    importers[f"{node.module}.{alias.name}"].add(path)
    for path, source in modules.items():
        room, _, name = path.rpartition(".")
        (only, *others) = importers[path] or {""}
        if (
            not others
            and only.startswith(f"{room}.")
            and name not in {"__init__", "feature", "main"}
            and len(source.splitlines()) < SCRAP_LINES
        ):
            yield path


def test_no_module_is_a_scrap_of_its_neighbour(modules):
    assert set(scraps(modules)) <= SCRAPS


def private_accesses(source):
    """Attributes that belong to somebody else, by their lines."""
    return [
        node.lineno
        for node in walked(source)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and not (isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super")
    ]


def test_tests_reach_into_objects_ever_less(python_files):
    tests = [text for path, text in python_files.items() if path.startswith("tests/")]
    found = sum(len(private_accesses(text)) for text in tests)
    assert found <= PRIVATE_IN_TESTS


def test_a_private_access_is_found():
    assert private_accesses("a.b\nself._b\nsuper()._b()\na._b\nself.a._b()\na.__name__\n") == [4, 5]


def test_a_planted_scrap_is_found():
    planted = {"m.a": "x = 1\n"}
    assert list(scraps(planted | {"m.b": "from m.a import A\n", "n.c": ""})) == ["m.a"]
    assert list(scraps(planted | {"m.b": "import x\n", "n.c": "from m.a import A\n"})) == []
