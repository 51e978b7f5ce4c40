"""The note of a cut that is going on, and what it leaves of the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqmesh.storage.files.chores import Chores
from mqmesh.storage.log.segments import Segments
from mqmesh.storage.log.tail_cut import NAME, TailCut, read_log_cut
from mqmesh.units import KIB

SIZE = 64 * KIB


@pytest.fixture
def segments(tmp_path: Path):
    chores = Chores("test-chores")
    segments = Segments(tmp_path, segment_size=SIZE, chores=chores)
    for number in range(3):
        Path(segments.get_or_make(number * SIZE).path).write_bytes(b"x" * SIZE)
    yield segments
    chores.close()


def test_the_note_is_these_bytes_for_ever(tmp_path: Path, segments: Segments) -> None:
    cut = TailCut(tmp_path / NAME, segments)
    assert (tmp_path / NAME).read_bytes().hex() == "4d5154311cdf4421ffffffffffffffff"
    cut.begin(70_000)
    assert (tmp_path / NAME).read_bytes().hex() == "4d515431260a87c37011010000000000"
    assert TailCut(tmp_path / NAME, segments).end_offset == 70_000
    assert read_log_cut(tmp_path / NAME) == 70_000
    cut.finish()
    assert TailCut(tmp_path / NAME, segments).end_offset is None
    assert read_log_cut(tmp_path / NAME) is None


@pytest.mark.parametrize("end", [0, 1, SIZE - 1, SIZE, SIZE + 5_000, 2 * SIZE, 3 * SIZE - 1])
def test_behind_the_end_nothing_is_left(tmp_path: Path, segments: Segments, end: int) -> None:
    cut = TailCut(tmp_path / NAME, segments)
    cut.begin(end)
    for _ in range(2):  # a second time changes nothing
        cut.clear()
        data = b"".join(Path(segment.path).read_bytes() for segment in segments)
        assert data.rstrip(b"\0") == b"x" * end
        assert len(data) == (end // SIZE + 1) * SIZE


def test_of_a_damaged_note_nothing_is_believed(tmp_path: Path, segments: Segments) -> None:
    TailCut(tmp_path / NAME, segments).begin(70_000)
    good = (tmp_path / NAME).read_bytes()
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        (tmp_path / NAME).write_bytes(bytes(bad))
        assert TailCut(tmp_path / NAME, segments).end_offset is None
