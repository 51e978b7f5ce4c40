"""One form of log line for all processes::

    2026-03-01T12:00:00.123Z WARNING mqmesh.transport.zmq.server: malformed frame from a peer

A message is always one line: line breaks and control characters are written as
escapes, so that no client can forge a line by a clever name. A traceback follows
in lines of its own that begin with ``|``. For programs that read logs there is
JSON: each event is one object in one line.
"""

import enum
import logging
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

from mqmesh.errors import ConfigError
from mqmesh.failure_text import CUT
from mqmesh.private_files import make_folder
from mqmesh.units import MIB


class LogLevel(enum.StrEnum):
    """Least level that is logged."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"
    CRITICAL = "CRITICAL"
    AS_STARTED = "as-started"
    """Level that the command line set."""


LEVELS: Final = tuple(one.value for one in LogLevel if one is not LogLevel.AS_STARTED)
LogFormat: TypeAlias = Literal["text", "json"]
FORMAT_VARIABLE: Final = "MQMESH_LOG_FORMAT"
"""Environment variable with the log format, set by a process for its helpers."""
FILE_BYTES: Final = 16 * MIB
FILES_KEPT: Final = 4
"""Old files beside the current one: a log takes at most five times ``FILE_BYTES``."""
LINE_BYTES: Final = 4_096
"""Longer lines are cut. A pipe takes so much whole or not at all (``PIPE_BUF``)."""

CONTINUATION: Final = "| "
"""Begins the lines of a traceback."""

# Delete and C1, line and paragraph separators, marks that turn the direction of text, characters
# without a width, halves of characters that have no UTF-8 form.
_UNSEEN: Final = (
    r"\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    r"\ufff9-\ufffb\U000e0000-\U000e007f"
)
_CONTROLS = re.compile(rf"[\x00-\x08\x0a-\x1f{_UNSEEN}]")
_LEFT_BY_JSON = re.compile(f"[{_UNSEEN}]")
_BEYOND_ASCII = re.compile(r"[^\x00-\x7e]")
_LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT[0-9:.]+Z) (?P<level>[A-Z]+) (?P<logger>[\w.]+): (?P<text>.*)\Z"
)


def configure_logging(
    name: str,
    level: str = "INFO",
    file: Path | None = None,
    *,
    role: str = "",
    form: LogFormat = "text",
    supervised: bool = False,
) -> None:
    """Sets up the logging of this process; an earlier setup is replaced.

    Args:
        name: Name of the process, for its own first line and in each object.
        level: One of ``LEVELS``.
        file: Log file, None for standard error. It is rotated at ``FILE_BYTES``.
        role: Role of the process, in each object: ``broker``, ``namesrv``, …
        form: ``json`` writes an object a line.
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
    handler.setFormatter(JsonFormatter(role, name) if form == "json" else LineFormatter())
    root = logging.getLogger()
    for former in list(root.handlers):
        root.removeHandler(former)
        former.close()
    root.addHandler(handler)
    root.setLevel(level)
    # A failing log is no reason to fill standard error with tracebacks about it.
    logging.raiseExceptions = False
    logging.getLogger(__name__).debug("log of %s, process %d", name, os.getpid())


def root_level() -> str:
    """Return the least level that this process logs."""
    return logging.getLevelName(logging.getLogger().level)


def set_level(level: str) -> None:
    """Logs from this level on: one of ``LEVELS``, or a level that ``root_level`` returned."""
    logging.getLogger().setLevel(level)


class LineFormatter(logging.Formatter):
    """Writes records in the form at the head of this module."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record's line, and the lines of its traceback."""
        line = text_line(_time_of(record), record.levelname, record.name, record.getMessage())
        if not record.exc_info:
            return line
        return "\n".join([line, *traceback_lines(self.formatException(record.exc_info))])


class LogObject(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event of a log in JSON.

    Attributes:
        time: In UTC, ISO 8601 with milliseconds.
        level: One of ``LEVELS``.
        logger: Module that wrote it.
        text: The whole sentence.
        role: Role of the process.
        name: Name of the process.
        event: The sentence without its values, the same for all events of a kind.
        values: The values of the sentence, in its order; numbers are JSON numbers.
        traceback: Lines of an exception's traceback.
    """

    time: str
    level: str
    logger: str
    text: str
    role: str = ""
    name: str = ""
    event: str = ""
    values: list[Any] | dict[str, Any] = []
    traceback: str = ""


class JsonFormatter(logging.Formatter):
    """Writes each record as a ``LogObject``, no longer than a pipe takes at once.

    Args:
        role: Role of the process.
        name: Name of the process.
    """

    def __init__(self, role: str, name: str) -> None:
        super().__init__()
        self._role = role
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        """Format the record's line."""
        args = record.args
        return json_line(
            LogObject(
                _time_of(record),
                record.levelname,
                record.name,
                _valid(record.getMessage()),
                self._role,
                self._name,
                _valid(record.msg) if args else "",
                {_valid(key): _plain(args[key]) for key in args}
                if isinstance(args, Mapping)
                else [_plain(value) for value in args or ()],
                _valid(self.formatException(record.exc_info)) if record.exc_info else "",
            )
        )


def text_line(moment: str, level: str, logger: str, text: str) -> str:
    """Format a line in the form at the head of this module."""
    return f"{moment} {level} {logger}: {one_line(text)}"


def traceback_lines(traceback: str) -> list[str]:
    """Return the lines that follow a record's own."""
    return [CONTINUATION + one_line(line) for line in traceback.splitlines()]


def json_line(event: LogObject) -> str:
    """Format an event as one line of at most ``LINE_BYTES``; a longer one loses values and text."""
    line = _encoded(event)
    room = LINE_BYTES
    while len(line.encode()) >= LINE_BYTES:
        room //= 2
        event = msgspec.structs.replace(
            event,
            event="",
            values=[],
            text=event.text if len(event.text) <= room else event.text[:room] + CUT,
            traceback=event.traceback[-room:],
        )
        line = _encoded(event)
    return line


def _encoded(event: LogObject) -> str:
    return escape_json(msgspec.json.encode(event).decode())


def _valid(text: object) -> str:
    # A lone half of a character is no UTF-8.
    return str(text).encode(errors="replace").decode()


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return int(value)
    return _valid(value)


def _time_of(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


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
        text = f"{self.dropped} log lines were dropped"
        return self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, text, (), None))


def one_line(text: str) -> str:
    """Returns a text in a form that a terminal or a log can show as one line.

    Line breaks, control characters, marks that turn the direction of text and invisible characters
    become escapes. Tabs stay.
    """
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def escape_json(text: str, *, ascii_only: bool = False) -> str:
    """Returns the same JSON with escapes for characters that break lines or move a cursor.

    Args:
        text: JSON, as ``msgspec`` or ``json`` write it.
        ascii_only: Escape all that is not ASCII.
    """
    return (_BEYOND_ASCII if ascii_only else _LEFT_BY_JSON).sub(_json_escape, text)


def _json_escape(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def cut_line(line: str) -> bytes:
    """Return a line as UTF-8 with its line break, at most ``LINE_BYTES`` long."""
    data = line.encode(errors="replace")
    if len(data) >= LINE_BYTES:
        data = data[: LINE_BYTES - 16].decode(errors="ignore").encode() + f" {CUT}".encode()
    return data + b"\n"


def split_line(line: str) -> LogObject | None:
    """Takes a log line of either form apart.

    Returns:
        Time, level, logger and text, and other fields of JSON; None if it has another form.
    """
    if line.startswith("{"):
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(line, type=LogObject)
    match = _LINE.match(line)
    return None if match is None else msgspec.convert(match.groupdict(), LogObject)
