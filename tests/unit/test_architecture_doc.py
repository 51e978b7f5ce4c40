"""The page docs/architecture.md names files that there are."""

import re
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def rows(project_root: Path) -> list[tuple[str, str]]:
    """Questions and answers of the table."""
    page = (project_root / "docs" / "architecture.md").read_text(encoding="utf-8")
    chapter = page.partition("\n## Where is it decided?\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| (.+\?) \| (.+) \|$", chapter, re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_every_room_is_named(page: str, project_root: Path) -> None:
    text = (project_root / page).read_text(encoding="utf-8")
    code = [*(project_root / "mqmesh").glob("*/*.py"), *(project_root / "mqmesh").glob("*/*.c")]
    rooms = {path.parent.name for path in code}
    assert len(rooms) >= 13
    assert {room for room in rooms if not re.search(rf"`(mqmesh/)?{room}/?`", text)} == set()


def test_every_question_is_answered_with_files_or_folders_of_the_tree(
    rows: list[tuple[str, str]], project_root: Path
) -> None:
    package = project_root / "mqmesh"
    answers = {question: re.findall(r"`([^`]+)`", answer) for question, answer in rows}
    # These are names of functions and attributes.
    missing = {
        question: [
            name
            for name in names
            if name not in ("commands", "due_times", "metrics") and not (package / name).exists()
        ]
        for question, names in answers.items()
    }
    assert len(answers) >= 15
    assert all(answers.values()), answers
    assert not any(missing.values()), missing
