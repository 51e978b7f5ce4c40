"""`GET /healthz` of a role's process, answered by its event loop: an answer proves that it turns.

For Kubernetes and load balancers. There is no HTTP server behind it: a request has one page, is
bounded, and costs a few calls. Clients do not authenticate, so the answer holds nothing secret.
"""

import logging
import os
import socket
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from mqmesh.errors import ConfigError

PATH: Final = b"/healthz"
MOST_CONNECTIONS: Final = 16
"""Most connections at a time; one more closes the oldest."""
MOST_REQUEST_BYTES: Final = 4_096
"""Longest request with its headers; a longer one is closed."""
PAUSE_MS: Final = 1_000
"""Pause before the next connection is looked for, when there was no descriptor for one."""
MAX_PORT: Final = 65_535

_log = logging.getLogger(__name__)


class HealthLoop(Protocol):
    """The part of an event loop that the page needs."""

    def add(self, source: int, handler: Callable[[], None]) -> None:
        """Calls ``handler`` while the descriptor can be read."""

    def remove(self, source: int) -> None:
        """Stops watching a descriptor."""

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> object:
        """Calls once, not before ``delay_ms``."""


class Health(msgspec.Struct, frozen=True):
    """The answer, as a JSON object.

    Attributes:
        role: ``namesrv``, ``broker``, …
        name: Name of the instance.
        state: ``running``: the page is open from the process's readiness to its stop.
        pid: Process id.
    """

    role: str
    name: str
    state: str
    pid: int


def parse_health_address(text: str) -> tuple[str, int]:
    """Parses the address of the page: ``PORT`` for this machine only, or ``HOST:PORT``.

    Returns:
        Host and port, 0 to 65,535; 0 takes a free one.

    Raises:
        ConfigError: The text is neither.
    """
    host, colon, port = text.rpartition(":")
    if port.isascii() and port.isdecimal() and int(port) <= MAX_PORT and (host or not colon):
        return host.strip("[]") or "127.0.0.1", int(port)
    raise ConfigError(
        f"--health {text!r}: must be a port, for this machine only, or HOST:PORT, "
        "as 0.0.0.0:8086 in a pod"
    )


class HealthPage:
    """The page; it serves until ``close``.

    Args:
        loop: Event loop of the process.
        host: Address to listen at.
        port: TCP port, 0 to 65,535; 0 takes a free one.
        role: Role of the process.
        name: Name of the instance.

    Attributes:
        address: Address at which it listens, ``host:port``.

    Raises:
        ConfigError: The page cannot listen there.
    """

    def __init__(self, loop: HealthLoop, host: str, port: int, role: str, name: str) -> None:
        self._loop = loop
        self._body = msgspec.json.encode(Health(role, name, "running", os.getpid()))
        self._connections: dict[socket.socket, bytes] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(
                f"--health: cannot listen at {host}:{port}: {error.strerror or error}"
            ) from error
        self._listener.setblocking(False)
        self._is_listening = False
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._listener.getsockname()[1]}"
        self._listen()

    def close(self) -> None:
        """Closes the page and all connections: later connections are refused."""
        for connection in list(self._connections):
            self._end(connection)
        if self._is_listening:
            self._loop.remove(self._listener.fileno())
            self._is_listening = False
        self._listener.close()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add(self._listener.fileno(), self._accept)
            self._is_listening = True

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # gone again
        except OSError as error:
            # Without a descriptor every turn would report the same connection.
            _log.warning("nobody can ask for %s now: %s", PATH.decode(), error)
            self._loop.remove(self._listener.fileno())
            self._is_listening = False
            self._loop.call_later(PAUSE_MS, self._listen)
            return
        if len(self._connections) >= MOST_CONNECTIONS:
            self._end(next(iter(self._connections)))
        connection.setblocking(False)
        self._connections[connection] = b""
        self._loop.add(connection.fileno(), lambda: self._read(connection))

    def _read(self, connection: socket.socket) -> None:
        try:
            piece = connection.recv(MOST_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        request = self._connections[connection] + piece
        if piece and b"\r\n\r\n" not in request and len(request) < MOST_REQUEST_BYTES:
            self._connections[connection] = request
            return
        if b"\r\n\r\n" in request:
            self._answer(connection, request)
        self._end(connection)

    def _answer(self, connection: socket.socket, request: bytes) -> None:
        method, _, rest = request.partition(b"\r\n")[0].partition(b" ")
        status, body = b"200 OK", self._body
        if method not in (b"GET", b"HEAD"):
            status, body = b"405 Method Not Allowed", b""
        elif rest.split(b" ")[0].split(b"?")[0] != PATH:
            status, body = b"404 Not Found", b""
        head = (
            b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
            b"Connection: close\r\n\r\n" % (status, len(body))
        )
        try:
            # A few hundred bytes fit into the buffer of a new connection.
            connection.send(head if method == b"HEAD" else head + body)
            connection.shutdown(socket.SHUT_WR)
        except OSError as error:
            _log.debug("an answer about health did not leave: %s", error)

    def _end(self, connection: socket.socket) -> None:
        del self._connections[connection]
        self._loop.remove(connection.fileno())
        connection.close()
