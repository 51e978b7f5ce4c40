"""One form of log line for all processes::

    2026-03-01T12:00:00.123Z WARNING mqmesh.transport.zmq.server: malformed frame from a peer

A message is always one line: what would break it, and control characters, are
written as escapes, so that nobody can forge a line by a clever name. A traceback
follows in lines of its own that begin with ``|``.
"""

import logging
import os
import re
import sys
import time
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

from mqmesh.errors import ConfigError
from mqmesh.private_files import make_folder
from mqmesh.units import MIB

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
FILE_BYTES: Final = 16 * MIB
FILES_KEPT: Final = 4
"""Old files beside the current one: a log takes at most five times ``FILE_BYTES``."""
LINE_BYTES: Final = 4_096
"""Longer lines are cut. A pipe takes so much whole or not at all (``PIPE_BUF``)."""

CONTINUATION: Final = "| "
"""Begins the lines of a traceback."""

_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
_LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT[0-9:.]+Z) (?P<level>[A-Z]+) (?P<logger>[\w.]+): (?P<text>.*)\Z"
)


def configure_logging(
    role: str, level: str = "INFO", file: Path | None = None, *, supervised: bool = False
) -> None:
    """Sets up the logging of this process; an earlier setup is replaced.

    Args:
        role: Name of the process, for its own first line.
        level: One of ``LEVELS``.
        file: Log file, None for standard error. It is rotated at ``FILE_BYTES``.
        supervised: Standard error is a pipe to a supervisor: when that does not keep up,
            lines are dropped and counted, because a queue must not wait for its log.

    Raises:
        ConfigError: An unknown level, or a file that cannot be written.
    """
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is none of {', '.join(LEVELS)}")
    handler: logging.Handler
    if file is not None:
        try:
            make_folder(file.parent)
            handler = RotatingFileHandler(
                file, maxBytes=FILE_BYTES, backupCount=FILES_KEPT, encoding="utf-8"
            )
        except OSError as error:
            raise ConfigError(f"log file {file}: {error.strerror or error}") from error
    elif supervised:
        handler = PipeHandler(sys.stderr.fileno())
    else:
        handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    for former in list(root.handlers):
        root.removeHandler(former)
        former.close()
    root.addHandler(handler)
    root.setLevel(level)
    # A failing log is no reason to fill standard error with tracebacks about it.
    logging.raiseExceptions = False
    logging.getLogger(__name__).debug("log of %s, process %d", role, os.getpid())


class LineFormatter(logging.Formatter):
    """Writes records in the form at the head of this module."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's line, and the lines of its traceback."""
        moment = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
        text = one_line(record.getMessage())
        lines = [f"{moment}Z {record.levelname} {record.name}: {text}"]
        if record.exc_info:
            for line in self.formatException(record.exc_info).splitlines():
                lines.append(CONTINUATION + one_line(line))
        return "\n".join(lines)


class PipeHandler(logging.Handler):
    """Writes lines to a pipe without ever waiting for its reader.

    Args:
        descriptor: Write end; it is made non-blocking.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.dropped = 0
        self._descriptor = descriptor
        os.set_blocking(descriptor, False)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record's lines, or counts those that find no room."""
        try:
            lines = self.format(record).split("\n")
        except Exception:
            self.handleError(record)
            return
        if self.dropped and self._write(self._dropped_line()):
            self.dropped = 0
        for line in lines:
            if not self._write(line):
                self.dropped += 1

    def _write(self, line: str) -> bool:
        try:
            os.write(self._descriptor, cut_line(line))
        except OSError:
            return False  # full, or its reader is gone
        return True

    def _dropped_line(self) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
        return f"{moment}.000Z WARNING {__name__}: {self.dropped} log lines were dropped"


def one_line(text: str) -> str:
    """The text with line breaks and control characters as escapes."""
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def cut_line(line: str) -> bytes:
    """A line as UTF-8 with its line break, at most ``LINE_BYTES`` long."""
    data = line.encode(errors="replace")
    if len(data) >= LINE_BYTES:
        data = data[: LINE_BYTES - 16].decode(errors="ignore").encode() + " … (cut)".encode()
    return data + b"\n"


def split_line(line: str) -> tuple[str, str, str, str] | None:
    """Takes a log line apart.

    Returns:
        Time, level, logger and text; None if it has another form.
    """
    match = _LINE.match(line)
    return (
        None if match is None else (match["time"], match["level"], match["logger"], match["text"])
    )
