"""Lines from a pipe, their level, and files of bounded size."""

from __future__ import annotations

import os

import pytest

from mqmesh.logs import LINE_BYTES
from mqmesh.roles.supervisor.log_lines import LineParser, LineReader, RotatedFile

NOW = "2026-01-01T00:00:00.000Z"


@pytest.fixture
def pipe():
    read, write = os.pipe()
    ends = {write}

    def end():
        ends.clear()
        os.close(write)

    yield read, write, end
    os.close(read)
    for descriptor in ends:
        os.close(descriptor)


def test_lines_come_whole(pipe):
    read, write, _ = pipe
    reader = LineReader(read)
    os.write(write, b"one\ntw")
    assert reader.read() == ["one"]
    os.write(write, b"o\n\nthree\n")
    assert reader.read() == ["two", "", "three"]
    assert reader.read() == []


def test_the_last_line_needs_no_line_break(pipe):
    read, write, end = pipe
    os.write(write, b"one\nlast words")
    end()
    reader = LineReader(read)
    assert reader.read_all() == ["one", "last words"]
    assert not reader.is_open


def test_everything_is_read_however_much_it_is(pipe):
    read, write, _ = pipe
    reader = LineReader(read)
    os.write(write, b"x\n" * 30_000)
    assert len(reader.read_all()) == 30_000
    assert reader.is_open


def test_a_line_without_end_is_cut(pipe):
    read, write, _ = pipe
    reader = LineReader(read)
    os.write(write, b"x" * (LINE_BYTES + 1))
    assert reader.read() == ["x" * (LINE_BYTES + 1)]


def test_bytes_that_are_no_text_are_shown_somehow(pipe):
    read, write, _ = pipe
    os.write(write, b"\xff\n")
    assert LineReader(read).read() == ["\ufffd"]


def test_a_log_line_keeps_its_time_and_level():
    line = LineParser("broker-a").parse("2026-01-01T12:00:00.123Z WARNING a.b: oh", NOW)
    assert (line.time, line.name, line.level) == (
        "2026-01-01T12:00:00.123Z",
        "broker-a",
        "WARNING",
    )
    assert line.text == "a.b: oh"


def test_a_traceback_has_the_level_of_its_record():
    parser = LineParser("broker-a")
    parser.parse("2026-01-01T12:00:00.123Z CRITICAL a.b: oh", NOW)
    line = parser.parse("| Traceback (most recent call last):", NOW)
    assert (line.level, line.time) == ("CRITICAL", NOW)


def test_what_is_no_log_line_is_an_error_and_steers_no_terminal():
    line = LineParser("broker-a").parse("Fatal Python error: \x1b[2J", NOW)
    assert (line.level, line.text) == ("ERROR", r"Fatal Python error: \x1b[2J")


def test_a_full_file_is_renamed_and_the_oldest_goes(tmp_path):
    file = RotatedFile(tmp_path / "logs" / "a.log", max_bytes=10, kept=2)
    for number in range(8):
        file.write(f"line{number}")
    file.close()
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert names == ["a.log", "a.log.1", "a.log.2"]
    together = "".join((tmp_path / "logs" / name).read_text() for name in reversed(names))
    assert together.split() == ["line5", "line6", "line7"]


def test_a_file_goes_on_where_it_was(tmp_path):
    for text in ("first", "second"):
        file = RotatedFile(tmp_path / "a.log")
        file.write(text)
        file.close()
    assert (tmp_path / "a.log").read_text() == "first\nsecond\n"


def test_a_closed_file_opens_again(tmp_path):
    file = RotatedFile(tmp_path / "a.log")
    file.write("first")
    file.close()
    file.write("second")
    file.close()
    assert (tmp_path / "a.log").read_text() == "first\nsecond\n"


def test_a_folder_that_cannot_be_costs_lines_only(tmp_path):
    (tmp_path / "logs").write_text("a file")
    file = RotatedFile(tmp_path / "logs" / "a.log")
    file.write("first")
    assert file.lost_lines == 1
    file.close()


def test_a_full_disk_costs_lines_only(tmp_path):
    # A link: a rotation by mistake, as root, would rename the device.
    (tmp_path / "a.log").symlink_to("/dev/full")
    file = RotatedFile(tmp_path / "a.log")
    file.write("first")
    assert file.lost_lines == 1
    file.close()
