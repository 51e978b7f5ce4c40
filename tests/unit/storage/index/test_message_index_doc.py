"""The page docs/storage-format.md and the code say the same about the index."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from mqmesh.storage.index import blocks as message_index_blocks
from mqmesh.storage.index import entries as message_index_entries
from mqmesh.storage.index import part as message_index_part
from mqmesh.storage.index import texts as message_index_texts


@pytest.fixture(scope="module")
def page(project_root: Path) -> str:
    return (project_root / "docs" / "storage-format.md").read_text(encoding="utf-8")


def page_table(page: str, heading: str) -> list[list[str]]:
    """Rows of the first table below a heading, without empty cells."""
    rows: list[list[str]] = []
    for line in page.partition(f"### {heading}\n")[2].splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.replace("`", "").split("|")[1:-1]]
            rows.append([cell for cell in cells if cell])
        elif rows:
            break
    return rows[2:]


def docstring_table(module: ModuleType) -> list[list[str]]:
    """Rows of the byte table at the head of a module; a row may go over several lines."""
    lines = (module.__doc__ or "").splitlines()
    bars = [number for number, line in enumerate(lines) if line.startswith("====")]
    starts = [found.start() for found in re.finditer("=+", lines[bars[0]])]
    ends = [*starts[1:], None]
    rows: list[list[str]] = []
    for line in lines[bars[1] + 1 : bars[2]]:
        cells = [line[start:end].strip() for start, end in zip(starts, ends, strict=True)]
        if cells[0]:
            rows.append([cell for cell in cells if cell])
        else:
            rows[-1][-1] += " " + cells[-1]
    return rows


@pytest.mark.parametrize(
    ("heading", "module"),
    [
        ("Index entry", message_index_entries),
        ("Index block", message_index_blocks),
        ("Index text", message_index_texts),
    ],
)
def test_tables_of_page_and_docstring_agree(page, heading, module):
    assert page_table(page, heading) == docstring_table(module)
    assert len(docstring_table(module)) >= 2


def test_sizes_are_those_of_the_page(page):
    assert message_index_entries.ENTRY_SIZE == 20
    assert message_index_entries.HASH_SIZE == 16
    assert f"1 to {message_index_blocks.BLOCK_ENTRIES}" in page_table(page, "Index block")[-1][-1]
    assert message_index_part.SPAN_BYTES == 4 << 20


def test_fields_of_the_head_are_those_of_the_page(page):
    rows = page_table(page, "Index head")
    fields = [field.name for field in msgspec.structs.fields(message_index_part.PartHead)]
    assert [row[:2] for row in rows] == [[str(n), name] for n, name in enumerate(fields)]
    assert rows[0][2] == str(message_index_part.FORMAT_VERSION)


def test_names_of_directories_are_those_of_the_page(page):
    chapter = page.partition("\n## Index\n")[2].partition("\n## ")[0]
    for suffix in (".live/", ".sealed/", ".new/"):
        assert f"`<segment>{suffix}`" in chapter
