"""Plain words: the glossary of CONTRIBUTING in docstrings, no private words in pages and names."""

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


HEADLESS = re.compile(
    r"""(?:^\s*|[.:;]\s|\"\"\"|\#\s)
    (?P<word>Who|What|Whom|Whose|Whoever|Whatever|Whichever|Nobody|Somebody|Anybody)\s[^?\n]*$""",
    re.MULTILINE | re.VERBOSE,
)
"""A sentence of a docstring or comment whose subject is no noun; questions may begin so."""


def headless(files: dict[str, str]) -> list[str]:
    """Find sentences without a noun for their subject."""
    return [
        f"{path}:{source.count(chr(10), 0, found.start('word')) + 1} begins with {found['word']}"
        for path, source in files.items()
        for found in HEADLESS.finditer(source)
    ]


def test_sentences_name_their_subjects(modules):
    assert headless(modules) == []


def test_a_sentence_without_a_subject_is_found():
    assert headless({"a": 'x = 1\n"""A log. What is left goes."""'}) == ["a:2 begins with What"]
    assert headless({"a": "# Nobody asks."}) == ["a:1 begins with Nobody"]
    assert headless({"a": '    """Do.\n\n    Args:\n        a: Who asks.'}) == [
        "a:4 begins with Who"
    ]
    assert not headless({"a": '"""Return what is left. What is it?"""'})


PRIVATE_WORDS = {
    "whoever": "the noun: client, user, program",
    "told": "notified, reported, returned",
    "tells": "reports, shows, returns",
    "news": "change, event, notification",
    "map of the rooms": "folders",
}
"""Words that no page for users has, and what to say for them."""
PAGES = re.compile(r"(?:README|CONTRIBUTING|CHANGELOG)\.md|docs/[\w/-]+\.md|conf/.*|examples/.*")
NO_PAGES = ("docs/decisions/",)

PRIVATE_NAMES = {
    "told": "reported, response, outcome",
    "tell": "notify, report",
    "tells": "notifies, reports",
    "asked": "request, header, arguments",
    "said": "text, reason, given",
    "heard": "last_seen",
    "news": "changes",
    "figures": "readings",
}
"""Words that are no part of a name in ``CLEAN``, and nouns to take in place of them."""
CLEAN = (
    "mqmesh.batch.",
    "mqmesh.cli.",
    "mqmesh.config.",
    "mqmesh.console.",
    "mqmesh.coordination.",
    "mqmesh.filtering.",
    "mqmesh.metrics.",
    "mqmesh.protocol.",
    "mqmesh.roles.",
    "mqmesh.sdk.",
    "mqmesh.security.",
    "mqmesh.spark.",
    "mqmesh.sql.",
    "mqmesh.storage.",
    "mqmesh.transport.",
)
"""Modules whose names were made plain; others follow."""
PUBLIC_NAMES = frozenset(("is_asked", "has_news"))
"""Part of the JSON of the console; the loop's, which producers use."""


def private_words(files: dict[str, str]) -> list[str]:
    """Find words of ``PRIVATE_WORDS`` in pages for users."""
    banned = re.compile(rf"\b({'|'.join(PRIVATE_WORDS)})\b", re.IGNORECASE)
    return [
        f"{path}:{text.count(chr(10), 0, match.start()) + 1} {match[0]}: "
        f"{PRIVATE_WORDS[match[0].lower()]}"
        for path, text in files.items()
        if PAGES.fullmatch(path) and not path.startswith(NO_PAGES)
        for match in banned.finditer(text)
    ]


def test_pages_for_users_have_no_private_words(texts):
    assert private_words(texts) == []


def test_a_private_word_is_found():
    found = private_words({"docs/a.md": "One.\nWhoever asks.", "docs/decisions/a.md": "He told."})
    assert found == ["docs/a.md:2 Whoever: the noun: client, user, program"]


def bound_names(source: str) -> dict[str, int]:
    """Return the names that a source binds, each with its first line."""
    names: dict[str, int] = {}
    for node in walked(source):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.id, node.lineno)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.attr, node.lineno)
        elif isinstance(node, ast.arg):
            names.setdefault(node.arg, node.lineno)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.setdefault(node.name, node.lineno)
    return names


def private_names(files: dict[str, str]) -> list[str]:
    """Find names in ``CLEAN`` of which a part is one of ``PRIVATE_NAMES``."""
    return [
        f"{path}:{line} {name}: {PRIVATE_NAMES[part]}"
        for path, source in files.items()
        if f"{path}.".startswith(CLEAN)
        for name, line in bound_names(source).items()
        if name not in PUBLIC_NAMES
        for part in PRIVATE_NAMES.keys() & name.lower().split("_")
    ]


def test_names_are_plain_nouns(modules):
    assert private_names(modules) == []


def test_a_private_name_is_found():
    assert private_names({"mqmesh.storage.a": "def f(asked):\n    told_ms = 1"}) == [
        "mqmesh.storage.a:1 asked: request, header, arguments",
        "mqmesh.storage.a:2 told_ms: reported, response, outcome",
    ]
    assert not private_names({"mqmesh.a": "told = 1", "mqmesh.storage.b": "story = retold = 1"})
