"""How long things may be, and what must have a docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from harness.syntax import parsed, walked

# The first rule reads every file, which takes a while on a loaded machine.
pytestmark = pytest.mark.timeout(300)

FUNCTION_LINES_MAX = 70

Function = ast.FunctionDef | ast.AsyncFunctionDef


def long_functions(files: dict[str, str]) -> list[str]:
    """Find functions above the limit. A docstring is not counted: nobody shall save on it."""
    found = []
    for path, source in files.items():
        for node in walked(source):
            if isinstance(node, Function):
                length = _end(node) - node.lineno + 1
                if ast.get_docstring(node):
                    length -= _end(node.body[0]) - node.body[0].lineno + 1
                if length > FUNCTION_LINES_MAX:
                    found.append(f"{path}:{node.lineno} {node.name}: {length} lines")
    return found


def _end(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno


def missing_docstrings(files: dict[str, str]) -> list[str]:
    """Find public modules, classes, functions and methods without a docstring.

    A method that overrides one of the project's own, documented methods needs none: the
    specification stands at the interface.
    """
    trees = {path: parsed(source) for path, source in files.items()}
    documented = _documented_methods(trees)
    found = []
    for path, tree in trees.items():
        if not ast.get_docstring(tree):
            found.append(f"{path}: the module")
        for node in tree.body:
            found += [f"{path}:{n.lineno} {n.name}" for n in _undocumented(node, documented)]
    return found


def _undocumented(
    node: ast.stmt, documented: dict[str, tuple[list[str], set[str]]]
) -> Iterator[ast.ClassDef | Function]:
    if not isinstance(node, ast.ClassDef | Function) or node.name.startswith("_"):
        return
    if not ast.get_docstring(node) and not node.name.startswith("test_"):
        yield node
    if isinstance(node, ast.ClassDef):
        for member in node.body:
            if isinstance(member, Function) and (
                _is_exempt(member) or _is_inherited(node.name, member.name, documented)
            ):
                continue
            yield from _undocumented(member, documented)


def _is_exempt(function: Function) -> bool:
    decorators = {ast.unparse(d).rpartition(".")[2] for d in function.decorator_list}
    return bool(decorators & {"overload", "override", "setter", "deleter"})


def _documented_methods(
    trees: dict[str, ast.Module],
) -> dict[str, tuple[list[str], set[str]]]:
    """Map each class to the names of its bases and of its methods that have a docstring."""
    classes = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = [
                    ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases
                ]
                methods = {
                    member.name
                    for member in node.body
                    if isinstance(member, Function) and ast.get_docstring(member)
                }
                classes[node.name] = (bases, methods)
    return classes


def _is_inherited(
    class_name: str, method: str, documented: dict[str, tuple[list[str], set[str]]]
) -> bool:
    waiting, seen = [class_name], {class_name}
    while waiting:
        for base in documented.get(waiting.pop(), ([], set()))[0]:
            if method in documented.get(base, ([], set()))[1]:
                return True
            if base not in seen:
                seen.add(base)
                waiting.append(base)
    return False


def test_no_function_is_too_long(python_files):
    assert long_functions(python_files) == []


def repeated_classes(files: dict[str, str]) -> list[str]:
    """Find classes that have one name in two modules.

    The classes of ``mqmesh.aio`` are twins of those they stand for and have their names.
    """
    where: dict[str, list[str]] = {}
    for path, source in files.items():
        if path.startswith("mqmesh.sdk.aio."):
            continue
        for node in parsed(source).body:
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in where.items() if len(paths) > 1]


def test_no_two_classes_have_one_name(modules):
    assert repeated_classes(modules) == []


def test_a_repeated_class_is_found():
    assert repeated_classes({"a": "class Run: ...", "b": "class Run: ..."})
    assert not repeated_classes({"a": "class Run: ...", "mqmesh.sdk.aio.b": "class Run: ..."})


def test_every_public_name_has_a_docstring(modules):
    assert missing_docstrings(modules) == []


def test_a_long_function_is_found():
    body = "    x = 1\n" * (FUNCTION_LINES_MAX - 1)
    docstring = '    """A.\n\n    B.\n    """\n'
    assert long_functions({"m": "def f():\n" + docstring + body}) == []
    assert long_functions({"m": "class A:\n  async def f():\n" + body + "    y = 1\n"})


@pytest.mark.parametrize(
    "source",
    [
        "x = 1",
        '"""M."""\ndef f(): ...',
        '"""M."""\nasync def f(): ...',
        '"""M."""\nclass C: ...',
        '"""M."""\nclass C:\n    """C."""\n    def f(self): ...',
        '"""M."""\nclass C(Unknown):\n    """C."""\n    def f(self): ...',
        '"""M."""\nclass B:\n    """B."""\n    def f(self): ...\nclass C(B):\n    """C."""',
    ],
)
def test_a_missing_docstring_is_found(source):
    assert missing_docstrings({"m": source})


@pytest.mark.parametrize(
    "source",
    [
        '"""M."""\ndef _f(): ...',
        '"""M."""\nclass _C:\n    def f(self): ...',
        '"""M."""\nclass C:\n    """C."""\n    def __init__(self): ...\n    def _f(self): ...',
        '"""M."""\ndef f():\n    """F."""\n    def inner(): ...',
        (
            '"""M."""\nclass B:\n    """B."""\n    def f(self):\n        """F."""\n'
            'class D(B):\n    """D."""\nclass C(m.D):\n    """C."""\n    def f(self): ...'
        ),
    ],
)
def test_a_docstring_is_not_asked_for_where_it_says_nothing(source):
    assert missing_docstrings({"m": source}) == []
