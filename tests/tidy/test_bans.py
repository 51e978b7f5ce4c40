"""What must not stand in the project, and why."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest
from harness.syntax import parsed, walked

# The first rule reads every file, which takes a while on a loaded machine.
pytestmark = pytest.mark.timeout(300)

# Bytes from outside must never become code or objects of any class.
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
UNSAFE_CALLS = {"eval", "exec", "__import__"}
UNSAFE_METHODS = {"recv_pyobj", "send_pyobj"}
# Filters that consumers upload are code. This file runs them, within a process that has locked
# itself in, and a test holds that nothing else imports it.
CONFINED_CODE = "mqmesh/sandbox/runtime.py"

# The streams, what draws on them, the program's ends, and a worker whose output is a pipe.
MAY_PRINT = {
    "cli/streams.py",
    "cli/render.py",
    "cli/entry.py",
    "cli/main.py",
    "cli/bench/worker.py",
}

BROAD = {"Exception", "BaseException"}

# The first of them parses all sources.
pytestmark = pytest.mark.timeout(180)

# Written in pieces, so that this file does not find itself.
UNFINISHED = re.compile(r"\b(TO" + "DO|FIX" + "ME|XX" + r"X)\b")
PRIVATE = re.compile(
    r"\.\./sha" + r"red|/work/(sha" + r"red|tmp|main)\b|\bfa" + r"rm\b", re.IGNORECASE
)


def called_name(node: ast.AST) -> str:
    """Name what a call calls: `f(…)` -> f, `a.b.f(…)` -> a.b.f, `f().g(…)` -> .g, else empty."""
    if not isinstance(node, ast.Call):
        return ""
    name, called = "", node.func
    while isinstance(called, ast.Attribute):
        name, called = f".{called.attr}{name}", called.value
    return called.id + name if isinstance(called, ast.Name) else name


def unsafe_decoding(source: str) -> Iterator[int]:
    """Yield lines that turn bytes into code or objects."""
    for node in walked(source):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        if any(name.partition(".")[0] in UNSAFE_MODULES for name in names):
            yield node.lineno
        if called_name(node) in UNSAFE_CALLS:
            yield node.lineno
        if isinstance(node, ast.Attribute) and node.attr in UNSAFE_METHODS:
            yield node.lineno


def swallowed_errors(source: str) -> Iterator[int]:
    """Yield lines that make every error vanish: a bare except, or a broad one that does nothing."""
    for node in walked(source):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield node.lineno
                continue
            types = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if BROAD & {ast.unparse(t) for t in types} and all(map(_does_nothing, node.body)):
                yield node.lineno
        elif isinstance(node, ast.Call) and called_name(node).endswith("suppress"):
            if BROAD & {ast.unparse(argument) for argument in node.args}:
                yield node.lineno


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass | ast.Continue)


def flushed_maps(source: str) -> Iterator[int]:
    """Yield calls of flush in files that use mmap.

    msync holds the GIL in Python's mmap, so one flush would stop the whole broker; fdatasync on the
    file does the same work without it.
    """
    if "mmap" not in source:
        return
    tree = parsed(source)
    uses_mmap = any(
        (isinstance(node, ast.Import) and any(alias.name == "mmap" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module == "mmap")
        for node in ast.walk(tree)
    )
    for node in ast.walk(tree):
        if uses_mmap and called_name(node).endswith(".flush"):
            yield node.lineno


def unfinished_work(source: str) -> Iterator[int]:
    """Yield comments that promise work, and code that refuses to do it."""
    if UNFINISHED.search(source):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT and UNFINISHED.search(token.string):
                yield token.start[0]
    if "NotImplementedError" in source:
        for node in walked(source):
            if isinstance(node, ast.Name) and node.id == "NotImplementedError":
                yield node.lineno


def sleeping_tests(source: str) -> Iterator[int]:
    """Yield sleeps. A test waits for the event itself; `asyncio.sleep(0)` only yields the loop."""
    if "sleep" not in source:
        return
    for node in walked(source):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            if any(alias.name == "sleep" for alias in node.names):
                yield node.lineno
        elif isinstance(node, ast.Call) and called_name(node).endswith(".sleep"):
            if called_name(node) == "asyncio.sleep" and ast.unparse(node.args[0]) == "0":
                continue
            if called_name(node) in {"time.sleep", "asyncio.sleep"}:
                yield node.lineno


def excused_tests(source: str) -> Iterator[int]:
    """Yield skips and expected failures: a test that does not run proves nothing."""
    for node in walked(source):
        if isinstance(node, ast.Attribute) and node.attr in {
            "importorskip",
            "skip",
            "skipif",
            "xfail",
        }:
            if ast.unparse(node.value) in {"pytest", "pytest.mark"}:
                yield node.lineno


def other_ways_out(source: str) -> Iterator[int]:
    """Yield lines of the command line that print past its output module.

    That one escapes texts of others, and knows what a terminal's encoding can hold.
    """
    for node in walked(source):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.stdout":
            yield node.lineno
        elif called_name(node) in {"Console", "print", "click.echo", "click.secho"}:
            if "stderr=True" not in ast.unparse(node):
                yield node.lineno


def private_words(text: str) -> Iterator[int]:
    """Yield lines that speak of the place where the project was written."""
    for number, line in enumerate(text.splitlines(), start=1):
        if PRIVATE.search(line):
            yield number


def complaints(rule, files: dict[str, str]) -> list[str]:
    return [f"{path}:{line}" for path, source in files.items() for line in rule(source)]


@pytest.mark.parametrize(
    "rule",
    [unsafe_decoding, swallowed_errors, flushed_maps, unfinished_work],
    ids=lambda rule: rule.__name__,
)
def test_no_python_file_has(rule, python_files):
    if rule is unsafe_decoding:
        python_files = {p: text for p, text in python_files.items() if p != CONFINED_CODE}
    assert complaints(rule, python_files) == []


def test_only_the_confined_worker_runs_the_code_of_others(modules):
    importers = {
        name
        for name, source in modules.items()
        if "sandbox.runtime" in source or "sandbox import runtime" in source
    }
    assert importers == {"mqmesh.sandbox.worker"}


@pytest.mark.parametrize("rule", [sleeping_tests, excused_tests], ids=lambda rule: rule.__name__)
def test_the_tests_have_no(rule, python_files):
    tests = {
        path: text
        for path, text in python_files.items()
        # The harness is no test: it paces its loads.
        if path.startswith("tests/") and not path.startswith("tests/harness/")
    }
    assert complaints(rule, tests) == []


def test_commands_print_through_one_module(python_files):
    commands = {
        path: text
        for path, text in python_files.items()
        if path.startswith("cli/") and path not in MAY_PRINT
    }
    assert len(commands) > 40
    assert complaints(other_ways_out, commands) == []


def test_nothing_speaks_of_the_place_where_it_was_written(texts):
    assert complaints(private_words, texts) == []


def test_bash_scripts_stop_at_the_first_error(texts):
    scripts = {
        path: text
        for path, text in texts.items()
        if text.startswith("#!") and "bash" in text.partition("\n")[0]
    }
    assert scripts
    assert [p for p, text in scripts.items() if "\nset -euo pipefail\n" not in text] == []


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (unsafe_decoding, "import pickle"),
        (unsafe_decoding, "from marshal import loads"),
        (unsafe_decoding, "import shelve as s"),
        (unsafe_decoding, "def f():\n    eval('1')"),
        (unsafe_decoding, "exec(code)"),
        (unsafe_decoding, "socket.recv_pyobj()"),
        (swallowed_errors, "try:\n    f()\nexcept:\n    raise"),
        (swallowed_errors, "try:\n    f()\nexcept Exception:\n    pass"),
        (swallowed_errors, "try:\n    f()\nexcept (OSError, BaseException) as e:\n    ..."),
        (
            swallowed_errors,
            "while 1:\n    try:\n        f()\n    except Exception:\n        continue",
        ),
        (swallowed_errors, "with contextlib.suppress(Exception):\n    f()"),
        (flushed_maps, "import mmap\nview.flush()"),
        (flushed_maps, "from mmap import mmap\nself._map.flush(0, 4096)"),
        (unfinished_work, "x = 1  # TO" + "DO: more"),
        (unfinished_work, "raise NotImplementedError"),
        (unfinished_work, "raise NotImplementedError('later')"),
        (sleeping_tests, "from time import sleep"),
        (sleeping_tests, "time.sleep(0.1)"),
        (sleeping_tests, "async def f():\n    await asyncio.sleep(1)"),
        (excused_tests, "@pytest.mark.skip\ndef f(): ..."),
        (excused_tests, "pytest.xfail('later')"),
        (other_ways_out, "print(name)"),
        (other_ways_out, "click.echo(name)"),
        (other_ways_out, "sys.stdout.buffer.write(body)"),
        (other_ways_out, "Console(highlight=False).print(name)"),
        (private_words, "see ../sha" + "red/spec"),
        (private_words, "a server fa" + "rm"),
    ],
)
def test_a_ban_finds_a_planted_fault(rule, source):
    assert list(rule(source))


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (unsafe_decoding, "import msgspec\nmodel.eval()\nevaluate(1)"),
        (swallowed_errors, "try:\n    f()\nexcept FileNotFoundError:\n    pass"),
        (swallowed_errors, "try:\n    f()\nexcept Exception:\n    log()"),
        (flushed_maps, "import sys\nsys.stdout.flush()"),
        (flushed_maps, "import mmap\ndef flush():\n    os.fdatasync(fd)"),
        (unfinished_work, "x = 1  # why"),
        (sleeping_tests, "async def f():\n    await asyncio.sleep(0)\n    clock.sleep(3)"),
        (excused_tests, "self.skip(3)"),
        (other_ways_out, "say(name)\nprint_table(heads, rows)\nConsole(stderr=True)"),
        (private_words, "shared by all; farmers; a/shared/b"),
    ],
)
def test_a_ban_leaves_good_code_alone(rule, source):
    assert not list(rule(source))
