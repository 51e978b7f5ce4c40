"""An index part to be filled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.index_parts import empty_part

from mqmesh.storage.index.part import IndexPart


@pytest.fixture
def part(tmp_path: Path) -> Iterator[IndexPart]:
    part = empty_part(tmp_path / "part")
    yield part
    part.close()
