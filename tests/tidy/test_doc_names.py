"""Pages name files and tests that are there."""

from __future__ import annotations

import re

import pytest

FOLDERS = "mqmesh|cli|spark|tests|scripts|conf|examples|benchmarks"


def missing(text, root, tests):
    """Return the files of folders of the project and the tests that a page names in vain."""
    files = re.findall(rf"`((?:{FOLDERS})/[\w/.-]+)`", text)
    named = re.findall(r"`(test_\w+)(?:\[[^`]*)?`", text)
    return sorted(
        {one for one in files if not (root / one).exists()}
        | {one for one in named if one not in tests}
    )


@pytest.fixture(scope="module")
def tests(project_root):
    sources = [path.read_text() for path in (project_root / "tests").rglob("test_*.py")]
    return {name for text in sources for name in re.findall(r"def (test_\w+)\(", text)}


def test_pages_name_what_is_there(project_root, tests):
    pages = [project_root / "README.md", *sorted((project_root / "docs").rglob("*.md"))]
    found = {page.name: missing(page.read_text(), project_root, tests) for page in pages}
    assert {name: names for name, names in found.items() if names} == {}


def test_what_is_missing_is_found(project_root):
    text = "`mqmesh/errors.py`, `mqmesh/no_file.py`, `test_no_such_thing[a case]`, `test_it`"
    assert missing(text, project_root, {"test_it"}) == ["mqmesh/no_file.py", "test_no_such_thing"]


def test_each_decision_has_a_number_of_its_own(project_root):
    pages = sorted((project_root / "docs/decisions").glob("[0-9]*.md"))
    numbers = [int(page.name[:4]) for page in pages]
    assert [page.read_text().split(".")[0] for page in pages] == [f"# {at}" for at in numbers]
    assert len(set(numbers)) == len(numbers)
