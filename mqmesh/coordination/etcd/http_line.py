"""One HTTP connection to one member of etcd, for the thread that waits for it."""

import http.client
import select
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import msgspec

from mqmesh.coordination.etcd.members import host_and_port
from mqmesh.errors import EndpointUnreachable, RemoteProtocolError, RequestTimeout
from mqmesh.units import MIB

MAX_ANSWER_BYTES: Final = 2 * MIB
"""Longest answer: 64 presences and a state are a fifth of it."""
MAX_EVENT_BYTES: Final = 4 * MIB
"""Longest line of a stream; etcd divides its events at 1.5 MiB, as base64 a third more."""

_HEADERS: Final = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


class HttpAnswer(msgspec.Struct, frozen=True):
    """Answer to an HTTP request.

    Attributes:
        status: Status of HTTP.
        body: Whole body.
    """

    status: int
    body: bytes


class HttpLine:
    """A connection that is kept, and made anew when it broke.

    Only ``interrupt`` may be called from another thread.

    Args:
        address: Address of the member, ``host:port``.
    """

    def __init__(self, address: str) -> None:
        self._host, self._port = host_and_port(address)
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None

    def post(self, path: str, body: bytes, timeout_ms: int) -> HttpAnswer:
        """Sends a request and waits for its answer.

        Args:
            path: Path of the call.
            body: JSON.
            timeout_ms: Time for the connection, and then for each piece of the answer.

        Raises:
            EndpointUnreachable: There is no connection: nothing was sent.
            RequestTimeout: No answer in time; whether the member did it is unknown.
            RemoteProtocolError: The answer is malformed, or it broke off; unknown as well.
        """
        connection = self._connected(timeout_ms)
        try:
            connection.request("POST", path, body, _HEADERS)
            response = connection.getresponse()
            data = response.read(MAX_ANSWER_BYTES + 1)
        except TimeoutError as error:
            self.close()
            raise RequestTimeout(f"no answer within {timeout_ms} ms") from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise RemoteProtocolError(f"the connection broke: {error!r}") from error
        if len(data) > MAX_ANSWER_BYTES:
            self.close()
            raise RemoteProtocolError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        if response.will_close:
            self.close()
        return HttpAnswer(response.status, data)

    def stream(self, path: str, body: bytes, timeout_ms: int) -> Iterator[bytes]:
        """Sends requests and yields the lines of the answer as they arrive; closes behind them.

        Args:
            path: Path of the call.
            body: JSON, several requests one behind the other.
            timeout_ms: Time for the connection, and then for each line.

        Raises:
            EndpointUnreachable: There is no connection.
            RequestTimeout: No line arrived in time.
            RemoteProtocolError: The stream broke off, or is malformed.
        """
        connection = self._connected(timeout_ms)
        try:
            connection.request("POST", path, body, _HEADERS)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise RemoteProtocolError(f"HTTP {response.status}: {response.read(200)!r}")
            while line := response.readline(MAX_EVENT_BYTES + 1):
                if len(line) > MAX_EVENT_BYTES:
                    raise RemoteProtocolError(f"an event of more than {MAX_EVENT_BYTES} bytes")
                if line.strip():
                    yield line
            raise RemoteProtocolError("the stream ended")
        except TimeoutError as error:
            raise RequestTimeout(f"nothing came for {timeout_ms} ms") from error
        except (OSError, http.client.HTTPException) as error:
            raise RemoteProtocolError(f"the connection broke: {error!r}") from error
        finally:
            self.close()

    def interrupt(self) -> None:
        """Ends the wait of another thread, which gets an error."""
        held = self._socket
        if held is not None:
            with suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection; the next request makes another one."""
        if self._connection is not None:
            self._connection.close()
        self._connection = self._socket = None

    def _connected(self, timeout_ms: int) -> http.client.HTTPConnection:
        timeout_s = timeout_ms / 1_000
        if self._socket is not None and _has_ended(self._socket):
            self.close()  # a request would be lost with it, and its outcome unknown
        if self._connection is None or self._socket is None:
            made = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
            try:
                made.connect()
            except OSError as error:
                made.close()
                raise EndpointUnreachable(f"no connection: {error}") from error
            self._connection, self._socket = made, made.sock
        self._socket.settimeout(timeout_s)
        return self._connection


def _has_ended(held: socket.socket) -> bool:
    """Return True if the connection has ended: before a request nothing else can be read."""
    poll = select.poll()
    poll.register(held, select.POLLIN)
    return bool(poll.poll(0))
