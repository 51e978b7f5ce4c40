"""The audit log: changes and refusals with their users, a JSON object a line.

All roles of a machine that have one access list write into one file beside it, ``audit.jsonl``.
Lines are appended whole; a file that is full is renamed by one of them, and the others follow.
"""

import fcntl
import logging
import os
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any, Final

import msgspec

from mqmesh.clock import Clock
from mqmesh.errors import ConfigError, MQMeshError
from mqmesh.private_files import open_private
from mqmesh.protocol.codes import ResponseCode, code_of
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.request import Peer
from mqmesh.units import MIB

AUDIT_FILE: Final = "audit.jsonl"
FILE_BYTES: Final = 16 * MIB
FILES_KEPT: Final = 4
"""Most full files, beside the one that is written."""
LINES_PER_S: Final = 10
"""Limit of written refusals of one user, so that refused requests do not fill the disk."""
MAX_USERS: Final = 10_000
MAX_NAMES: Final = 8
"""Topics and groups of one line each; a name has up to 255 characters."""
MAX_REMARK: Final = 500

_log = logging.getLogger(__name__)


class AuditLine(msgspec.Struct, omit_defaults=True):
    """Fields of a line.

    Attributes:
        time: Time in UTC, to the millisecond.
        server: Role and name of the server.
        user: User that sent the request.
        address: Address of the client, ``host:port``, ``unix`` for a Unix socket, "" for unknown.
        command: Name of the request code.
        topics: Topics that it is about, 8 at most.
        groups: The same of consumer groups.
        result: ``SUCCESS`` when it was done or begun, else the name of the error.
        remark: Error message that the client got.
        left_out: Refusals of this user before this one that were too many to be written.
        what: Change that was made, with old and new values.
    """

    time: str
    server: str
    user: str
    address: str
    command: str
    topics: list[str] = []
    groups: list[str] = []
    result: str = ""
    remark: str = ""
    left_out: int = 0
    what: str = ""


class AuditLog:
    """Writer of the audit log.

    Args:
        path: Path of the file.
        server: Role and name of this process.
        clock: Source of time.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, path: Path, server: str, clock: Clock) -> None:
        try:
            self._file = _SharedFile(path)
        except OSError as error:
            raise ConfigError(f"audit log {path}: {error.strerror or error}") from error
        self._server = server
        self._clock = clock
        self._refusals: dict[str, _Second] = {}

    def note(
        self,
        peer: Peer,
        command: RequestCode,
        topics: list[str],
        groups: list[str],
        error: BaseException | None,
        what: str,
    ) -> None:
        """Writes a line; see ``mqmesh.roles.dispatch.Audit``.

        Args:
            peer: Peer whose request was served, or refused.
            command: Code of the request.
            topics: Topics that it is about.
            groups: The same of consumer groups.
            error: Error that it was answered with; None for success.
            what: Change that it made, if the command does not say it all.
        """
        user = peer.principal.name
        left_out = 0 if error is None else self._left_out(user)
        if left_out is None:
            return
        moment = datetime.fromtimestamp(self._clock.wall_ms() / 1_000, UTC)
        line = AuditLine(
            time=moment.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z",
            server=self._server,
            user=user,
            address=peer.address,
            command=command.name,
            topics=[name[:255] for name in topics[:MAX_NAMES]],
            groups=[name[:255] for name in groups[:MAX_NAMES]],
            result=_result(error),
            remark="" if error is None else str(error)[:MAX_REMARK],
            left_out=left_out,
            what=what[:MAX_REMARK],
        )
        self._file.handle(logging.makeLogRecord({"msg": msgspec.json.encode(line).decode()}))

    def close(self) -> None:
        """Closes the file; lines that a full disk did not take are lost."""
        try:
            self._file.close()
        except OSError as error:
            _log.error("the audit log lacks its last lines: %s", error.strerror or error)

    def _left_out(self, user: str) -> int | None:
        """Return the count of earlier refusals that were not written; None if this one is not,
        either."""
        second = self._clock.monotonic_ms() // 1_000
        known = self._refusals.get(user)
        if known is None:
            if len(self._refusals) >= MAX_USERS:
                self._refusals.clear()
            known = self._refusals[user] = _Second()
        if known.second != second:
            known.second, known.written = second, 0
        if known.written >= LINES_PER_S:
            known.left_out += 1
            return None
        known.written += 1
        left_out, known.left_out = known.left_out, 0
        return left_out


def _result(error: BaseException | None) -> str:
    if error is None:
        return ResponseCode.SUCCESS.name
    return code_of(error).name if isinstance(error, MQMeshError) else type(error).__name__


class _Second:
    """Refusals of one user in one second."""

    __slots__ = ("left_out", "second", "written")

    def __init__(self) -> None:
        self.second = -1
        self.written = 0
        self.left_out = 0


class _SharedFile(WatchedFileHandler):
    """A file that several processes append to; the process that finds it full renames it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self._path = path

    def _open(self) -> Any:
        return open(self.baseFilename, "a", encoding="utf-8", opener=open_private)

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        try:
            if self.stream is not None and os.fstat(self.stream.fileno()).st_size >= FILE_BYTES:
                self._rotate(self.stream.fileno())
        except OSError:
            self.handleError(record)

    def _rotate(self, descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # released when it is closed: at the next line
        if os.stat(self._path).st_ino != os.fstat(descriptor).st_ino:
            return  # another process did it
        for number in range(FILES_KEPT, 0, -1):
            older = Path(f"{self._path}.{number}")
            newer = Path(f"{self._path}.{number - 1}") if number > 1 else self._path
            if newer.exists():
                newer.replace(older)

    def handleError(self, record: logging.LogRecord) -> None:
        """Logs that a line is lost: a full disk never refuses a request."""
        _log.exception("the audit log %s lacks a line: %s", self._path, record.getMessage())
