"""The life of a role's process: signals, ready line, orderly stop, exit code.

A role is one process with one event loop. It ends by SIGTERM or SIGINT, or when
the supervisor that started it is gone: the supervisor holds the write end of a
pipe that is the role's standard input, and the kernel closes it however the
supervisor dies. A second SIGINT kills at once.
"""

import enum
import errno
import faulthandler
import gc
import logging
import os
import re
import signal
import sys
import time
from types import FrameType
from typing import Final, Protocol
from urllib.parse import quote, unquote

import msgspec

from mqmesh.errors import ConfigError, MQMeshError, StorageError, StoreClosed, StoreLocked
from mqmesh.logs import one_line
from mqmesh.roles.health import HealthLoop, HealthPage

PARENT_PIPE: Final = 0
"""Descriptor whose end of file proves that the parent of this process is gone: standard input."""

COLLECT_AT_START: Final = 100_000
"""Objects that a start makes from one collection of garbage to the next."""

_PLAIN: Final = "!\"#$&'()*+,/:;<=>?@[\\]^`{|}"
"""Characters that a ready line shows as they are, beside letters and digits; a ``%`` and text
that would split the line, such as a space in a path, is percent-encoded."""

_READY = re.compile(r"READY role=(\S+) name=(\S+) endpoint=(\S+) pid=(\d+)\Z")
_WRONG_SETTING: Final = frozenset(
    {
        errno.EACCES,
        errno.EADDRINUSE,
        errno.EADDRNOTAVAIL,
        errno.EDQUOT,
        errno.EEXIST,
        errno.EINVAL,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ENODEV,
        errno.ENOENT,
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)
"""Errors of the system that another try does not fix. Too small a disk is one of them: a store
with messages opens on a full disk, so there is no room to begin at all."""

_log = logging.getLogger(__name__)


class ExitCode(enum.IntEnum):
    """Exit codes of mqmesh's processes."""

    OK = 0
    FAILED = 1
    """A crash, or an operation that did not succeed."""
    USAGE = 2
    """Wrong configuration or usage; one line on standard error says which."""
    STORE_STOPPED = 3
    """The store can write no more, as after a failed sync; a start recovers what is on disk."""


class ProcessLoop(HealthLoop, Protocol):
    """Event loop of a process; ``mqmesh.transport.zmq.loop.EventLoop`` is one."""

    def stop(self) -> None:
        """Makes ``run`` return; safe in signal handlers."""

    def run(self) -> None:
        """Serves until ``stop``; raises the error that ends it before."""


class Role(Protocol):
    """Role that a process runs."""

    def start(self) -> str:
        """Opens everything and listens; returns the endpoint."""

    def stop(self) -> None:
        """Closes everything in order, quickly."""


class StoppedEarly(MQMeshError):
    """Raised by a role's ``start`` when the loop was stopped meanwhile: no failure."""


class Ready(msgspec.Struct, frozen=True):
    """Line that a role writes on standard output when it serves.

    Attributes:
        role: ``namesrv``, ``broker``, …
        name: Name of the instance.
        endpoint: Endpoint at which it listens.
        pid: Process id.
    """

    role: str
    name: str
    endpoint: str
    pid: int

    def line(self) -> str:
        """Return the ready line."""
        endpoint = quote(self.endpoint, safe=_PLAIN, errors="surrogateescape")
        return f"READY role={self.role} name={self.name} endpoint={endpoint} pid={self.pid}"


def parse_ready(line: str) -> Ready | None:
    """Reads a ready line; None if it is none."""
    match = _READY.match(line)
    if match is None:
        return None
    endpoint = unquote(match[3], errors="surrogateescape")
    return Ready(match[1], match[2], endpoint, int(match[4]))


def run_role(
    role: str,
    name: str,
    loop: ProcessLoop,
    server: Role,
    *,
    supervised: bool = False,
    health: tuple[str, int] | None = None,
) -> int:
    """Runs a role until it is stopped; call it in the main thread.

    Args:
        role: ``namesrv``, ``broker``, …
        name: Name of the instance.
        loop: Event loop of the process.
        server: The role; it uses that loop.
        supervised: A supervisor holds the other end of standard input.
        health: Host and port of ``GET /healthz``, from readiness to the stop; None for none.

    Returns:
        An ``ExitCode``. If it is not OK, standard error has the reason.
    """
    faulthandler.enable(2)
    _stop_on_signals(loop)
    page: HealthPage | None = None
    try:
        endpoint = _start(server)
        if health is not None:
            page = HealthPage(loop, *health, role, name)
            _log.info("%s %s answers GET /healthz at %s", role, name, page.address)
    except StoppedEarly as reason:
        _log.info("%s %s was stopped before it served: %s", role, name, reason)
        return ExitCode.OK if _end(server) else ExitCode.FAILED
    except Exception as error:
        _end(server)
        return report_failure(name, error)
    if supervised:
        _stop_with_parent(loop)
    # Present objects, modules above all, live as long as the process: full collections need not
    # walk over them, each of which would delay every request for some 10 ms.
    gc.collect()
    gc.freeze()
    _announce(Ready(role, name, endpoint, os.getpid()), loop)
    try:
        loop.run()
    except StoreClosed as error:
        _end(server)
        return report_failure(name, error)
    except Exception:
        _log.exception("%s %s failed", role, name)
        _end(server)
        return ExitCode.FAILED
    began = time.monotonic()
    if page is not None:
        page.close()
    clean = _end(server)
    _log.info("%s %s stopped in %.2f s", role, name, time.monotonic() - began)
    return ExitCode.OK if clean else ExitCode.FAILED


def report_failure(name: str, error: Exception) -> int:
    """Reports on standard error, in one line, why a process cannot go on.

    Args:
        name: Name of the process that cannot.
        error: Reason. An unexpected error is a bug, and is logged with its traceback.

    Returns:
        The exit code: ``USAGE`` when a setting must be changed first, ``STORE_STOPPED`` when
        the store was.
    """
    if isinstance(error, MQMeshError):
        reason = str(error)
    elif isinstance(error, OSError):
        reason = error.strerror or str(error)
        if error.filename is not None:
            reason = f"{error.filename}: {reason}"
    else:
        _log.error("%s failed", name, exc_info=error)
        reason = f"internal error: {type(error).__name__}: {error}"
    print(f"error: {name}: {one_line(reason)}", file=sys.stderr, flush=True)  # noqa: T201
    if isinstance(error, StoreClosed):
        return ExitCode.STORE_STOPPED
    return ExitCode.USAGE if _is_wrong_setting(error) else ExitCode.FAILED


def _is_wrong_setting(error: Exception) -> bool:
    if isinstance(error, ConfigError | StoreLocked):
        return True
    # A store raises an error of its own for a folder that may not be written.
    system = error.__cause__ if isinstance(error, StorageError) else error
    return isinstance(system, OSError) and system.errno in _WRONG_SETTING


def _stop_on_signals(loop: ProcessLoop) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        # A user who presses Ctrl-C again does not want to wait.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        loop.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _stop_with_parent(loop: ProcessLoop) -> None:
    def on_readable() -> None:
        if os.read(PARENT_PIPE, 4_096):
            return  # no process writes there, and it would mean nothing
        loop.remove(PARENT_PIPE)
        _log.warning("who started this process is gone; stopping")
        loop.stop()

    try:
        loop.add(PARENT_PIPE, on_readable)
    except PermissionError:
        _log.warning("standard input is no pipe, so there is no supervisor; stopping")
        loop.stop()


def _start(server: Role) -> str:
    # Objects of a start stay: to look for garbage among them again and again takes a broker with
    # 50,000 topics a tenth of its start. A long recovery may leave some, so now and then.
    thresholds = gc.get_threshold()
    gc.set_threshold(COLLECT_AT_START, *thresholds[1:])
    try:
        return server.start()
    finally:
        gc.set_threshold(*thresholds)


def _announce(ready: Ready, loop: ProcessLoop) -> None:
    _log.info("%s %s serves at %s", ready.role, ready.name, ready.endpoint)
    try:
        print(ready.line(), flush=True)  # noqa: T201
    except BrokenPipeError:
        _log.warning("nobody reads standard output any more; stopping")
        loop.stop()


def _end(server: Role) -> bool:
    try:
        server.stop()
    except Exception:
        _log.exception("the stop was not clean")
        return False
    return True
