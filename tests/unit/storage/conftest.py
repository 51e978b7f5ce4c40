"""An index part to be filled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqmesh.storage.index.part import IndexPart
from mqmesh.testing.index_parts import empty_part


@pytest.fixture
def part(tmp_path: Path) -> Iterator[IndexPart]:
    part = empty_part(tmp_path / "part")
    yield part
    part.close()
