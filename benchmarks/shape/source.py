"""Obstacles of a reader of the source: private words, closures, knots of folders, long papers."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PRODUCT: Final = ("mqmesh", "cli", "spark")
RIDDLES: Final = frozenset(
    ("What", "Who", "Whom", "Whose", "Whether", "How", "Of", "As", "That", "Those")
) | {"It", "They", "See", "There", "Where"}
"""Words that begin a docstring which does not say what a thing is, or does."""
TOLD: Final = re.compile(r"\b(told|tells?)\b")
MANY_CALLABLES: Final = 5
BROKER: Final = "mqmesh/roles/broker"


def product_files(root: Path) -> dict[Path, str]:
    """Return the text of each Python file of the product."""
    return {
        path: path.read_text()
        for folder in PRODUCT
        for path in sorted((root / folder).rglob("*.py"))
    }


def lines_of(root: Path, *folders: str) -> int:
    """Return the lines of the Python files in folders."""
    paths = [path for folder in folders for path in (root / folder).rglob("*.py")]
    return sum(path.read_text().count("\n") for path in paths)


def riddles(sources: dict[Path, str]) -> int:
    """Return the docstrings that begin with a riddle."""
    return sum(
        (ast.get_docstring(node) or "").partition(" ")[0] in RIDDLES
        for source in sources.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    )


def told_lines(sources: dict[Path, str]) -> int:
    """Return the lines with the words told and tells."""
    return sum(
        bool(TOLD.search(line)) for source in sources.values() for line in source.splitlines()
    )


def lambdas_over_self(sources: dict[Path, str]) -> int:
    """Return the lambdas that use ``self``."""
    return sum(
        any(isinstance(one, ast.Name) and one.id == "self" for one in ast.walk(node.body))
        for source in sources.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Lambda)
    )


def callback_bundles(sources: dict[Path, str]) -> list[str]:
    """Return the structs with five callables and more."""
    return [
        node.name
        for source in sources.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        and sum(
            isinstance(one, ast.AnnAssign) and "Callable[" in ast.unparse(one.annotation)
            for one in node.body
        )
        >= MANY_CALLABLES
    ]


def users_of(name: str, sources: dict[Path, str]) -> tuple[int, int]:
    """Return the modules that import a name, and the functions that take one."""
    modules = functions = 0
    for source in sources.values():
        tree = ast.parse(source)
        modules += any(
            isinstance(node, ast.ImportFrom) and any(one.name == name for one in node.names)
            for node in ast.walk(tree)
        )
        functions += sum(
            any(
                one.annotation is not None and name in ast.unparse(one.annotation)
                for one in [*node.args.args, *node.args.kwonlyargs]
            )
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
        )
    return modules, functions


def knots(root: Path) -> list[list[str]]:
    """Return the groups of the broker's folders in which each reaches every other one."""
    below: dict[str, set[str]] = defaultdict(set)
    for path in (root / BROKER).rglob("*.py"):
        here = _folder(path.relative_to(root / BROKER).with_suffix("").parts)
        for name in _imports(path.read_text()):
            parts = name.split(".")
            if parts[:3] == ["mqmesh", "roles", "broker"] and len(parts) > 3:
                there = _folder(_module(root, parts)[3:])
                if there != here:
                    below[here].add(there)
    reached = {one: _reach(one, below) for one in list(below)}
    groups = {
        frozenset(two for two in reached[one] if one in reached.get(two, ())) for one in reached
    }
    return sorted(sorted(group) for group in groups if len(group) > 1)


def words_of(root: Path, *, made: bool) -> int:
    """Return the words of documents: those made by ``scripts/reference``, or the others."""
    pages = (root / "docs").rglob("*.md")
    reference = root / "docs" / "reference"
    return sum(len(one.read_text().split()) for one in pages if (reference in one.parents) is made)


def _imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)


def _module(root: Path, parts: list[str]) -> tuple[str, ...]:
    """Return the parts of a name that are a module: the rest are names in it."""
    while len(parts) > 1:
        path = root.joinpath(*parts)
        if path.with_suffix(".py").exists():
            return tuple(parts)
        if (path / "__init__.py").exists():
            return (*parts, "__init__")
        parts = parts[:-1]
    return tuple(parts)


def _folder(parts: tuple[str, ...]) -> str:
    """Return the folder of a module; a module at the top of the broker stands alone."""
    return "/".join(parts[:-1]) or parts[0]


def _reach(start: str, below: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for one in below.get(waiting.pop(), ()):
            if one not in found:
                found.add(one)
                waiting.append(one)
    return found
