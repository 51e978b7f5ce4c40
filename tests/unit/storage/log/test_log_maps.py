"""Which segments are mapped, and who keeps a map alive."""

import os
from pathlib import Path

import pytest

from mqmesh.errors import StorageError
from mqmesh.storage.log.mapped_file import PAGE
from mqmesh.storage.log.maps import LogMaps
from mqmesh.storage.log.segments import Segment

SIZE = 4 * PAGE


@pytest.fixture
def segments(tmp_path: Path) -> list[Segment]:
    found = []
    for number in range(6):
        path = tmp_path / str(number)
        path.write_bytes(bytes([number]) * SIZE)
        found.append(Segment(number * SIZE, SIZE, str(path)))
    return found


def test_the_map_unused_for_longest_goes(segments: list[Segment]) -> None:
    maps = LogMaps(most=3)
    first, second = maps.get(segments[0]), maps.get(segments[1])
    maps.get(segments[2])
    assert maps.get(segments[0]) is first
    maps.get(segments[3])
    assert len(maps) == 3
    assert maps.get(segments[0]) is first
    assert maps.get(segments[1]) is not second


def test_views_of_given_up_maps_are_counted_until_they_are_gone(segments: list[Segment]) -> None:
    maps = LogMaps()
    views = []
    for segment in segments[:3]:
        mapped = maps.get(segment)
        assert mapped is not None
        views.append(mapped.view(0, 100, stop=SIZE))
    del mapped
    assert (maps.views, maps.held_bytes) == (3, 0)
    for segment in segments[:3]:
        os.unlink(segment.path)
        maps.forget(segment)
    assert (maps.views, maps.held_bytes, len(maps)) == (3, 3 * SIZE, 0)
    assert views[2] == b"\2" * 100
    views.pop()
    assert (maps.views, maps.held_bytes) == (2, 2 * SIZE)
    views.clear()
    assert (maps.views, maps.held_bytes) == (0, 0)


def test_a_sealed_segment_that_is_cut_is_not_mapped_any_more(
    segments: list[Segment], caplog: pytest.LogCaptureFixture
) -> None:
    maps = LogMaps()
    for segment in segments:
        maps.get(segment)
    os.truncate(segments[1].path, PAGE)
    os.unlink(segments[2].path)
    maps.check(segments[5])
    assert "was cut from outside" in caplog.text
    assert "was removed from outside" in caplog.text
    assert maps.get(segments[1]) is None
    assert maps.get(segments[2]) is None
    assert maps.get(segments[3]) is not None
    caplog.clear()
    maps.check(segments[5])
    assert not caplog.records


@pytest.mark.parametrize("mapped", [True, False])
def test_nothing_more_may_be_written_to_a_segment_that_is_cut_or_removed(
    segments: list[Segment], mapped: bool
) -> None:
    maps = LogMaps()
    if mapped:
        maps.get(segments[5])
    maps.check(segments[5])
    os.truncate(segments[5].path, SIZE - 1)
    with pytest.raises(StorageError, match="was cut from outside: it has"):
        maps.check(segments[5])
    os.unlink(segments[5].path)
    with pytest.raises(StorageError, match="was removed from outside"):
        maps.check(segments[5])


def test_a_file_that_is_missing_is_not_mapped(segments: list[Segment]) -> None:
    maps = LogMaps()
    os.unlink(segments[0].path)
    os.truncate(segments[1].path, 0)
    assert maps.get(segments[0]) is None
    assert maps.get(segments[1]) is None


def test_closing_gives_up_all_maps(segments: list[Segment]) -> None:
    maps = LogMaps()
    mapped = maps.get(segments[0])
    assert mapped is not None
    view = mapped.view(0, 1, stop=SIZE)
    del mapped
    maps.close()
    assert view == b"\0"
    assert (len(maps), maps.held_bytes) == (0, SIZE)
