"""One thing has one name: the glossary of CONTRIBUTING against what docstrings and comments say."""

from __future__ import annotations

import ast
import re

from harness.syntax import walked

ROW = re.compile(r"^\s*\| ([^|]+) \| ([^|]+) \| ([^|]*) \|$", re.MULTILINE)
WHERE = "mqmesh.sdk."
"""The words of the glossary are about clients; a loop of a server is no client loop."""

RIDDLES = frozenset(
    "What Who Whom Whose Whether How Of As That Those It They See There Where".split()  # noqa: SIM905
)
"""Words that begin a sentence which does not say what a thing is, or does."""
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def banned(page: str) -> dict[str, str]:
    """What the glossary says not to say, and what to say for it."""
    glossary = page.partition("| say | for | not |")[2].partition("\n\n")[0]
    return {
        word.strip(): say
        for say, _, words in ROW.findall(glossary)
        for word in words.split(",")
        if word.strip() and "---" not in word
    }


def other_words(files: dict[str, str], words: dict[str, str]) -> list[str]:
    """Find what has another name in the glossary. What users read may speak plainly."""
    found = []
    for path, source in files.items():
        for number, line in enumerate(source.splitlines(), 1):
            if path.startswith(WHERE) and "_log." not in line:
                found += [f"{path}:{number} {one}: {words[one]}" for one in words if one in line]
    return found


def test_docstrings_say_what_the_glossary_says(modules, texts):
    assert other_words(modules, banned(texts["CONTRIBUTING.md"])) == []


def test_another_word_is_found(texts):
    words = banned(texts["CONTRIBUTING.md"])
    assert words["engine's thread"] == "client loop"
    assert other_words({"mqmesh.sdk.a": '"""In the engine\'s thread."""'}, words)
    assert not other_words({"mqmesh.sdk.a": '"""In the client loop."""'}, words)
    assert not other_words({"mqmesh.roles.a": '"""In the loop\'s thread."""'}, words)


def riddles(files: dict[str, str]) -> list[str]:
    """Find docstrings that begin with a word of ``RIDDLES``."""
    found = []
    for path, source in files.items():
        for node in walked(source):
            if isinstance(node, DOCUMENTED):
                first = (ast.get_docstring(node) or "").partition(" ")[0]
                if first in RIDDLES:
                    found.append(f"{path}:{getattr(node, 'lineno', 1)} begins with {first}")
    return found


def test_docstrings_say_what_a_thing_is_or_does(modules):
    assert riddles(modules) == []


def test_a_riddle_is_found():
    assert riddles({"a": 'def f():\n    """What is to be sent."""'}) == ["a:1 begins with What"]
    assert riddles({"a": '"""Whose turn it is."""'}) == ["a:1 begins with Whose"]
    assert not riddles({"a": 'def f():\n    """Return the batch to send."""'})
