"""The page docs/storage-format.md and the code say the same about the store's files."""

import re
import struct
from pathlib import Path
from types import ModuleType

import pytest

from mqmesh.storage.commitlog import checkpoint
from mqmesh.storage.log import control_record as log_marker
from mqmesh.storage.log import store_key, tail_cut
from mqmesh.storage.queues import consume_queue

TYPES = {"s": "bytes", "B": "u8", "H": "u16", "I": "u32", "Q": "u64", "q": "i64"}


@pytest.fixture(scope="module")
def page(project_root: Path) -> str:
    return (project_root / "docs" / "storage-format.md").read_text(encoding="utf-8")


def page_table(page: str, heading: str) -> list[list[str]]:
    """Rows of the first table below a heading."""
    rows: list[list[str]] = []
    for line in page.partition(f"{heading}\n")[2].splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.replace("`", "").split("|")[1:-1]])
        elif rows:
            break
    return rows[2:]


def docstring_table(module: ModuleType) -> list[list[str]]:
    """Rows of the byte table at the head of a module."""
    lines = (module.__doc__ or "").splitlines()
    bars = [number for number, line in enumerate(lines) if line.startswith("====")]
    starts = [found.start() for found in re.finditer("=+", lines[bars[0]])]
    ends = [*starts[1:], None]
    return [
        [line[start:end].strip().replace("`", "") for start, end in zip(starts, ends, strict=True)]
        for line in lines[bars[1] + 1 : bars[2]]
    ]


def struct_table(layout: struct.Struct) -> list[list[str]]:
    """Position, size and type of every field of a struct."""
    rows, position = [], 0
    for count, code in re.findall(r"(\d*)([a-zA-Z])", layout.format):
        size = struct.calcsize(f"<{count}{code}")
        rows.append([str(position), str(size), TYPES[code]])
        position += size
    return rows


@pytest.mark.parametrize(
    ("heading", "module", "layout"),
    [
        ("### ControlRecord", log_marker, log_marker._MARKER),
        ("## Consume queue", consume_queue, consume_queue.ENTRY),
        ("## Checkpoint", checkpoint, checkpoint._SLOT),
        ("### Store key", store_key, store_key._LAYOUT),
        ("## Log cut", tail_cut, tail_cut._LAYOUT),
    ],
)
def test_tables_of_page_docstring_and_code_agree(
    page: str, heading: str, module: ModuleType, layout: struct.Struct
) -> None:
    rows = page_table(page, heading)
    assert rows == docstring_table(module)
    fixed = [row[:3] for row in rows if row[1] != "…"]
    assert fixed == struct_table(layout)


def test_kinds_of_markers_are_those_of_the_page(page: str) -> None:
    section = page.partition("### ControlRecord\n")[2].partition("\n##")[0]
    found = re.findall(r"^\| (\d) \| `(\w+)` \|", section, re.MULTILINE)
    assert [(int(number), name) for number, name in found] == [
        (kind.value, kind.name) for kind in log_marker.ControlKind
    ]


def test_slots_are_where_the_page_says(page: str) -> None:
    assert checkpoint.SLOT_POSITIONS == (0, 4096)
    assert "One slot stands at byte 0, one at byte 4096" in page
