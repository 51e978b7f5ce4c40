"""Lines that processes write: taken off their pipes, kept in files of bounded size."""

import os
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from mqmesh.logs import (
    CONTINUATION,
    FILE_BYTES,
    FILES_KEPT,
    LINE_BYTES,
    cut_line,
    one_line,
    split_line,
    traceback_lines,
)
from mqmesh.private_files import APPEND, make_folder, open_private

READ_BYTES: Final = 64 * 1024


class LogLine(msgspec.Struct, frozen=True):
    """One line of the common log stream.

    Attributes:
        time: As in the line, or when it was read.
        name: Process that wrote it.
        level: Level of the record that it belongs to.
        text: The rest.
        raw: The whole line as it was written.
    """

    time: str
    name: str
    level: str
    text: str
    raw: str


class LineReader:
    """Reader of a pipe in whole lines.

    Args:
        descriptor: Read end; it is made non-blocking.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_open = True
        self._rest = b""
        os.set_blocking(descriptor, False)

    def read(self) -> list[str]:
        """Return the lines that are there; at the end of the file also one without a line break."""
        try:
            data = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.is_open = False
            data = b"\n" if self._rest else b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in lines]

    def read_all(self) -> list[str]:
        """Return the lines that are there, however many reads that takes."""
        found = self.read()
        while self.is_open:
            more = self.read()
            if not more:
                break
            found += more
        return found


class LineParser:
    """Parser that gives each line of a process its time and level; a traceback has its record's.

    Args:
        name: Name of the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._level = "INFO"

    def parse(self, line: str, now: str) -> LogLine:
        """Makes a log line of what a process wrote.

        Args:
            line: Without its line break.
            now: Time for lines that have none.
        """
        parts = split_line(line)
        if parts is None:
            # A line that is no log line of mqmesh comes from the interpreter or a library: an
            # error.
            level = self._level if line.startswith(CONTINUATION) else "ERROR"
            return LogLine(now, self._name, level, one_line(line), line)
        self._level = parts.level
        lines = [f"{parts.logger}: {one_line(parts.text)}", *traceback_lines(parts.traceback)]
        return LogLine(parts.time, self._name, parts.level, "\n".join(lines), line)


class RotatedFile:
    """A file of lines that is renamed to ``.1``, ``.2``, … when it is full.

    A disk that is full, or a folder that is gone, costs lines and nothing else.

    Args:
        path: The current file.
        max_bytes: Size at which a new one is begun.
        kept: Old files beside it.
    """

    def __init__(self, path: Path, max_bytes: int = FILE_BYTES, kept: int = FILES_KEPT) -> None:
        self.lost_lines = 0
        self._path = path
        self._max_bytes = max_bytes
        self._kept = kept
        self._size = 0
        self._file: BinaryIO | None = None

    def write(self, line: str) -> None:
        """Appends a line."""
        # A line that is no log line of mqmesh may hold any characters.
        data = cut_line(one_line(line))
        try:
            if self._file is not None and self._size + len(data) > self._max_bytes:
                self._rotate()
            if self._file is None:
                self._open()
            assert self._file is not None
            self._file.write(data)
        except OSError:
            self.lost_lines += 1
        else:
            self._size += len(data)

    def close(self) -> None:
        """Closes the file; a later line opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        make_folder(self._path.parent)
        self._file = os.fdopen(open_private(str(self._path), APPEND), "ab", buffering=0)
        self._size = self._file.tell()

    def _rotate(self) -> None:
        self.close()
        for number in range(self._kept, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            newer = self._path if number == 1 else older.with_suffix(f".{number - 1}")
            if newer.exists():
                newer.replace(older)
