"""Blocks for the log: taken ahead, and never more than may be."""

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqmesh.errors import DiskFull
from mqmesh.storage.files.chores import Chores
from mqmesh.storage.files.disk_space import Space
from mqmesh.storage.log.room import LogRoom
from mqmesh.storage.log.segments import Segment, Segments
from mqmesh.units import MIB

SIZE = 8 * MIB
AHEAD = 1 * MIB
FREE = 2 * MIB


class Disk:
    """A disk whose room the test says."""

    def __init__(self) -> None:
        self.available = 100 * MIB

    def space_of(self, directory: Path) -> Space:
        return Space(0, self.available)


@pytest.fixture
def chores() -> Iterator[Chores]:
    chores = Chores("test")
    yield chores
    chores.close()


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def room(tmp_path: Path, chores: Chores, disk: Disk) -> LogRoom:
    return LogRoom(
        tmp_path, ahead_bytes=AHEAD, keep_free_bytes=FREE, chores=chores, space_of=disk.space_of
    )


@pytest.fixture
def segment(tmp_path: Path, chores: Chores) -> Segment:
    return Segments(tmp_path, segment_size=SIZE, chores=chores).get_or_make(0)


def blocks(segment: Segment) -> int:
    return os.stat(segment.path).st_blocks * 512


@pytest.mark.parametrize(
    ("held", "ahead"), [(0, AHEAD), (AHEAD, AHEAD), (3 * MIB, 3 * MIB), (9 * MIB, SIZE)]
)
def test_as_much_is_taken_ahead_as_the_log_holds(room: LogRoom, held: int, ahead: int) -> None:
    assert room.bytes_ahead(held, SIZE) == ahead


def test_what_is_needed_is_taken_and_a_step_more(room: LogRoom, segment: Segment) -> None:
    room.take(segment, 100)
    assert segment.allocated_through == segment.disk_bytes == blocks(segment) == AHEAD
    room.take(segment, AHEAD)
    assert blocks(segment) == AHEAD
    room.take(segment, 4 * MIB)
    assert segment.allocated_through == blocks(segment) == 4 * MIB
    room.take(segment, SIZE)
    assert os.stat(segment.path).st_size == blocks(segment) == SIZE


def test_what_shall_stay_free_stays_free(
    room: LogRoom, segment: Segment, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.available = FREE + 4096
    room.take(segment, 100)
    assert segment.allocated_through == 4096
    disk.available = FREE + 50
    for _ in range(2):
        with pytest.raises(DiskFull, match=rf"{FREE} bytes stay free \(disk_reserve_bytes\)"):
            room.take(segment, 4096 + 51)
    assert blocks(segment) == 4096
    assert room.refusal is not None
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    disk.available = 100 * MIB
    room.take(segment, 4096 + 51)
    assert room.refusal is None
    assert "there is room for the log again" in caplog.text


def test_a_helper_thread_takes_no_more_than_a_part_of_the_room(
    room: LogRoom, segment: Segment, disk: Disk, chores: Chores
) -> None:
    disk.available = FREE + 12 * MIB
    room.ask(segment, SIZE)
    room.ask(segment, SIZE)
    assert segment.allocated_through == 0
    chores.submit(lambda: None).result()
    assert blocks(segment) == 3 * MIB
    room.poll()
    assert segment.allocated_through == 3 * MIB


def test_nothing_is_asked_for_that_is_less_than_a_step(
    room: LogRoom, segment: Segment, disk: Disk, chores: Chores
) -> None:
    disk.available = FREE + AHEAD - 1
    room.ask(segment, SIZE)
    chores.submit(lambda: None).result()
    room.poll()
    assert blocks(segment) == segment.allocated_through == 0
    assert room.refusal is None


def test_where_others_were_quicker_what_is_needed_is_tried(
    room: LogRoom, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.posix_fallocate

    def nearly_full(fd: int, start: int, size: int) -> None:
        if size > 4096:
            raise OSError(errno.ENOSPC, "full")
        real(fd, start, size)

    monkeypatch.setattr(os, "posix_fallocate", nearly_full)
    room.take(segment, 4096)
    assert segment.allocated_through == blocks(segment) == 4096
    with pytest.raises(DiskFull):
        room.take(segment, 9000)
    assert segment.allocated_through == 4096


def test_what_an_earlier_run_took_may_be_written_on_a_full_disk(
    room: LogRoom, segment: Segment, tmp_path: Path, chores: Chores, disk: Disk
) -> None:
    room.take(segment, 100)
    again = Segments(tmp_path, segment_size=SIZE, chores=chores).first
    disk.available = 0
    room.take(again, 5000)
    assert again.allocated_through == AHEAD
    with pytest.raises(DiskFull):
        room.take(again, AHEAD + 1)
