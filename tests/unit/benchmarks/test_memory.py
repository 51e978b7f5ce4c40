"""Memory that is taken and given back before a run."""

import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rows import memory
from rows.memory import WRITE_BYTES, level_memory


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what is written into files; these are no files."""
    sizes: list[int] = []

    class Sink(io.RawIOBase):
        def write(self, data: Any) -> int:
            sizes.append(len(data))
            return len(data)

    monkeypatch.setattr(memory, "TemporaryFile", lambda **_: Sink())
    monkeypatch.setattr(memory, "LEVEL_BYTES", 8 * WRITE_BYTES)
    return sizes


def test_a_file_of_the_size_that_the_scale_says_is_written(
    tmp_path: Path, written: list[int]
) -> None:
    level_memory(0.5, tmp_path)
    assert written == [WRITE_BYTES] * 4


def test_half_of_the_disk_is_left(
    tmp_path: Path, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    space = SimpleNamespace(f_bavail=5 * WRITE_BYTES, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: space)
    level_memory(1.0, tmp_path)
    assert written == [WRITE_BYTES] * 2


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LEVEL_BYTES", 2 * WRITE_BYTES)
    level_memory(1.0, tmp_path)
    assert not list(tmp_path.iterdir())
