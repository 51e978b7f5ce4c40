"""The files of the log."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqmesh.storage.files.chores import Chores
from mqmesh.storage.log.segments import Segments

SIZE = 65_536


@pytest.fixture
def chores() -> Iterator[Chores]:
    chores = Chores("test")
    yield chores
    chores.close()


def listed(directory: Path, chores: Chores, size: int = SIZE) -> Segments:
    return Segments(directory, segment_size=size, chores=chores)


def test_a_segment_has_its_full_size_without_blocks_and_is_named_by_its_start(
    tmp_path: Path, chores: Chores
) -> None:
    segments = listed(tmp_path, chores)
    first = segments.get_or_make(0)
    second = segments.get_or_make(SIZE)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["0" * 20, f"{SIZE:020d}"]
    assert Path(second.path).stat().st_size == SIZE
    assert Path(second.path).stat().st_blocks == 0
    assert (second.allocated_through, segments.disk_bytes) == (SIZE, 0)
    assert segments.find(SIZE - 1) is first
    assert segments.find(SIZE) is second
    assert segments.find(2 * SIZE) is None
    assert segments.get_or_make(SIZE) is second
    assert (segments.first, segments.last, len(segments)) == (first, second, 2)


def test_a_segment_prepared_ahead_is_taken_up(tmp_path: Path, chores: Chores) -> None:
    segments = listed(tmp_path, chores)
    segments.get_or_make(0)
    segments.prepare(SIZE)
    segments.prepare(SIZE)
    assert segments.get_or_make(SIZE).start == SIZE
    assert len(list(tmp_path.iterdir())) == 2


def test_a_segment_that_is_ready_is_listed_without_being_needed(
    tmp_path: Path, chores: Chores
) -> None:
    segments = listed(tmp_path, chores)
    segments.get_or_make(0)
    segments.prepare(SIZE)
    chores.submit(lambda: None).result()
    segments.take_up()
    segments.take_up()
    found = segments.find(SIZE)
    assert found is segments.last is segments.get_or_make(SIZE)


def test_blocks_of_files_that_were_there_before_count(tmp_path: Path, chores: Chores) -> None:
    written = Path(listed(tmp_path, chores).get_or_make(0).path)
    with written.open("r+b") as file:
        file.write(b"x" * 5000)
        os.fsync(file.fileno())
    again = listed(tmp_path, chores)
    assert again.disk_bytes == written.stat().st_blocks * 512 >= 5000
    assert again.first.allocated_through == 0


def test_unfinished_files_of_a_crash_are_removed(tmp_path: Path, chores: Chores) -> None:
    (tmp_path / f"{0:020d}.new").write_bytes(b"x")
    (tmp_path / "notes of the operator").touch()
    assert len(listed(tmp_path, chores)) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["notes of the operator"]


def test_size_of_old_segments_may_differ_from_the_configured(
    tmp_path: Path, chores: Chores
) -> None:
    small = listed(tmp_path, chores)
    small.get_or_make(0)
    small.get_or_make(SIZE)
    large = listed(tmp_path, chores, size=4 * SIZE)
    assert [(segment.start, segment.size) for segment in large] == [(0, SIZE), (SIZE, 4 * SIZE)]
    large.get_or_make(5 * SIZE)
    again = listed(tmp_path, chores)
    assert [segment.start for segment in again] == [0, SIZE, 5 * SIZE]


def test_a_cut_file_keeps_its_place_and_a_lost_one_leaves_a_hole(
    tmp_path: Path, chores: Chores
) -> None:
    segments = listed(tmp_path, chores)
    for number in range(4):
        segments.get_or_make(number * SIZE)
    (tmp_path / f"{0:020d}").write_bytes(bytes(100))
    (tmp_path / f"{2 * SIZE:020d}").unlink()
    again = listed(tmp_path, chores)
    assert [(segment.start, segment.size) for segment in again] == [
        (0, SIZE),
        (SIZE, SIZE),
        (3 * SIZE, SIZE),
    ]
    assert again.find(2 * SIZE + 5) is None
    assert again.after(again.first.start) is again.find(SIZE)
    hole = again.after(list(again)[1].start)
    assert hole is again.last
    assert again.after(again.last.start) is None


def test_segments_of_a_cut_tail_are_removed(tmp_path: Path, chores: Chores) -> None:
    segments = listed(tmp_path, chores)
    for number in range(4):
        segments.get_or_make(number * SIZE)
    assert segments.remove_behind(list(segments)[1].start) == 2
    assert len(segments) == len(list(tmp_path.iterdir())) == 2
    assert segments.find(2 * SIZE) is None
