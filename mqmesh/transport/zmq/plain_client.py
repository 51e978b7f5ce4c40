"""Requests to one server over a plain stream of the own loop: the DEALER of loops that never block.

A request and its answer cost one write and one read, without ZeroMQ's thread between. The price is
that pings come from the loop, too: a loop that stands still for ``LONGEST_PAUSE_MS`` counts as
hanging. So roles use it, and clients, whose listeners may hold the interpreter, do not.
"""

import contextlib
import errno
import logging
import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from mqmesh.errors import AuthenticationFailed, RemoteProtocolError
from mqmesh.protocol.command import (
    MAX_FRAME_BYTES,
    MAX_FURTHER_FRAMES,
    Command,
    decode_frame,
)
from mqmesh.transport import zmtp
from mqmesh.transport.descriptors import NONE_LEFT, too_many_open_files
from mqmesh.transport.interface import TRY_AGAIN_MS, OnDone, Timer
from mqmesh.transport.requests import RequestTable
from mqmesh.transport.zmq.handshakes import ADVICE
from mqmesh.transport.zmq.loop import EventLoop
from mqmesh.transport.zmq.sockets import (
    CONNECT_TIMEOUT_MS,
    HANDSHAKE_TIMEOUT_MS,
    HEARTBEAT_INTERVAL_MS,
    HEARTBEAT_TIMEOUT_MS,
    RECONNECT_MAX_MS,
    RECONNECT_MS,
)
from mqmesh.transport.zmq.streams import COPIED_BYTES, Address, Stream, StreamGroup, look_up

LONGEST_PAUSE_MS: Final = 3_000
"""Longest silence of this side before the server ends the connection."""

_KIND: Final = b"DEALER"
_OPENING: Final = zmtp.opening(_KIND)
_PING: Final = zmtp.ping(LONGEST_PAUSE_MS)
_log = logging.getLogger(__name__)


class PlainClient:
    """One connection to one server, used in the loop's thread; the twin of ``CommandClient``.

    Args:
        loop: Event loop of the process.
        endpoint: ``tcp://host:port`` or ``ipc://path``.
        on_command: Called with commands that the server sends without a request.
        on_connection: Called when the connection is made (True) and broken (False).

    Attributes:
        connected: The connection stands.
        unreachable: The last attempt to connect failed, or the connection broke.
    """

    def __init__(
        self,
        loop: EventLoop,
        endpoint: str,
        *,
        on_command: Callable[[Command], None] | None = None,
        on_connection: Callable[[bool], None] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.connected = self.unreachable = False
        self._loop = loop
        self._on_connection = on_connection
        self._table = RequestTable(loop, endpoint, self._try_send, on_command)
        self._group = StreamGroup()
        self._connecting: socket.socket | None = None
        self._stream: Stream | None = None
        self._reader = zmtp.FrameReader(_KIND, MAX_FRAME_BYTES)
        self._is_opened = False
        self._frames: list[memoryview] = []
        self._timer: Timer | None = None
        self._last_seen_ms = 0
        self._retry_ms = RECONNECT_MS
        self._refused: AuthenticationFailed | None = None
        self._closed = False
        self._connect()

    @property
    def in_flight(self) -> int:
        """Requests without an outcome yet."""
        return len(self._table)

    def request(
        self,
        code: int,
        on_done: OnDone,
        *parts: bytes | memoryview,
        header: bytes = b"",
        timeout_ms: int = 3_000,
    ) -> None:
        """Sends a request; arguments, outcome and errors are those of ``CommandClient.request``."""
        self._table.request(code, on_done, parts, header, timeout_ms)
        if self._refused is not None:
            self._loop.call_later(0, self._refuse)

    def oneway(self, code: int, *parts: bytes | memoryview, header: bytes = b"") -> None:
        """Sends a request that gets no answer; it may be lost.

        Raises:
            ClientClosed, QueueFull, LocalProtocolError: As ``request``.
        """
        self._table.oneway(code, parts, header)

    def close(self) -> None:
        """Closes the connection; requests without an outcome end with ``ClientClosed``."""
        if self._closed:
            return
        self._closed = True
        self._drop()
        self._table.close()

    # ---- Connecting --------------------------------------------------------------------------

    def _connect(self) -> None:
        self._refused = None
        address = look_up(self.endpoint)
        if address.done():
            self._connect_to(address)
        else:
            soon = self._loop.call_soon_threadsafe
            address.add_done_callback(lambda found: soon(lambda: self._connect_to(found)))

    def _connect_to(self, found: "Future[tuple[int, Address]]") -> None:
        if self._closed:
            return
        try:
            family, address = found.result()
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except (OSError, ValueError) as error:  # ValueError: no name can have this form
            retry_ms = 0
            if isinstance(error, OSError) and error.errno in NONE_LEFT:
                _log.warning(
                    "%s", too_many_open_files(f"a connection to {self.endpoint}", error.errno)
                )
                retry_ms = TRY_AGAIN_MS
            self._failed(retry_ms)
            return
        try:
            number = connection.connect_ex(address)
        except OSError:
            number = errno.EINVAL
        self._connecting = connection
        if number not in (0, errno.EINPROGRESS):
            self._failed()
            return
        # First: whatever fails from here on, another attempt follows.
        self._plan(CONNECT_TIMEOUT_MS, self._failed)
        self._loop.add(connection.fileno(), self._on_connectable)
        self._loop.want_write(connection.fileno(), True)

    def _on_connectable(self) -> None:
        connection, self._connecting = self._connecting, None
        assert connection is not None
        self._loop.remove(connection.fileno())
        try:
            number = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                raise OSError(number, "no connection")
            self._stream = Stream(self._loop, connection, self._group)
        except OSError:
            connection.close()
            self._failed()
            return
        self._reader = zmtp.FrameReader(_KIND, MAX_FRAME_BYTES)
        self._is_opened = False
        self._frames.clear()
        self._stream.start(self)
        # A server that requires keys announces it, and hangs up on clients without them.
        self._stream.write(_OPENING[: zmtp.VERSION_BYTES])
        self._plan(HANDSHAKE_TIMEOUT_MS, self._failed)

    def _failed(self, retry_ms: int = 0) -> None:
        """Try again, later."""
        self._drop()
        self.unreachable = True
        if not retry_ms:
            retry_ms = self._retry_ms
            self._retry_ms = min(2 * retry_ms, RECONNECT_MAX_MS)
        self._plan(retry_ms, self._connect)

    def _plan(self, delay_ms: int, callback: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_ms, callback)

    def _drop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._connecting is not None:
            with contextlib.suppress(KeyError):
                self._loop.remove(self._connecting.fileno())
            self._connecting.close()
            self._connecting = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    # ---- The connection ----------------------------------------------------------------------

    def on_bytes(self, data: bytes) -> None:
        """Implement ``StreamHandler.on_bytes``."""
        self._last_seen_ms = self._loop.turn_ns // 1_000_000
        self._reader.feed(data)
        stream = self._stream
        try:
            while self._reader.rest and (found := self._reader.take()) is not None:
                self._take(*found)
                if self._stream is not stream:
                    return  # a callback closed it
        except zmtp.WrongMechanism:
            self._give_up(AuthenticationFailed(f"{self.endpoint} wants CURVE; {ADVICE}"))
            return
        except RemoteProtocolError as error:
            _log.warning("the connection to %s is ended: %s", self.endpoint, error)
            self._broke()
            return
        except Exception:
            # A callback failed; bytes behind its frame are read in the next turn.
            if self._stream is stream and stream is not None and self._reader.rest:
                stream.again()
            raise
        if not self.connected:
            self._shake()

    def _shake(self) -> None:
        assert self._stream is not None
        if self._reader.is_greeted and not self._is_opened:
            self._stream.write(_OPENING[zmtp.VERSION_BYTES :])
            self._is_opened = True
        if self._reader.is_open:
            self.connected, self.unreachable = True, False
            self._retry_ms = RECONNECT_MS
            self._beat()
            self._table.flush()
            self._report(True)

    def _take(self, flags: int, frame: memoryview) -> None:
        if flags & zmtp.COMMAND:
            name, data = zmtp.take_command(frame)
            if name == b"PING":
                self._write(zmtp.pong(data))
            return
        self._frames.append(frame)
        if flags & zmtp.MORE:
            if len(self._frames) > MAX_FURTHER_FRAMES or _size(self._frames) > MAX_FRAME_BYTES:
                raise RemoteProtocolError("a message has more frames than it may, or longer ones")
            return
        first, *further = self._frames
        self._frames.clear()
        try:
            command = decode_frame(first, tuple(further))
        except RemoteProtocolError as error:
            _log.warning("malformed frame from %s: %s", self.endpoint, error)
            return
        self._table.take(command)

    def on_stuck(self) -> None:
        """Implement ``StreamHandler.on_stuck``; requests wait, from now on."""

    def on_drained(self) -> None:
        """Implement ``StreamHandler.on_drained``."""
        if self.connected:
            self._table.flush()

    def on_closed(self) -> None:
        """Implement ``StreamHandler.on_closed``."""
        self._broke()

    def _try_send(self, frame: bytes) -> bool:
        stream = self._stream
        if not self.connected or stream is None or stream.is_stuck:
            return False
        head = zmtp.head(len(frame))
        if len(frame) <= COPIED_BYTES:
            stream.write(head + frame)
        else:
            stream.write(head, frame)
        return True

    def _write(self, data: bytes) -> None:
        if self._stream is not None and not self._stream.is_stuck:
            self._stream.write(data)

    def _beat(self) -> None:
        """Send a ping, and check that the other side lives."""
        now_ms = self._loop.clock.monotonic_ms()
        silent_ms = now_ms - self._last_seen_ms
        if silent_ms >= HEARTBEAT_TIMEOUT_MS + HEARTBEAT_INTERVAL_MS:
            # This loop may have stood still while the server sent bytes.
            if self._stream is None or not self._stream.has_come():
                _log.warning("nothing came from %s for %d ms", self.endpoint, silent_ms)
                self._broke()
                return
        self._write(_PING)
        self._plan(HEARTBEAT_INTERVAL_MS, self._beat)

    def _broke(self) -> None:
        was_connected, self.connected = self.connected, False
        self._failed()
        if was_connected:
            self._table.broke()
            self._report(False)

    def _give_up(self, refused: AuthenticationFailed) -> None:
        _log.warning("%s", refused)
        self._refused = refused
        self._failed(TRY_AGAIN_MS)
        self._refuse()

    def _refuse(self) -> None:
        if self._refused is not None and not self._closed:
            self._table.refuse(self._refused)

    def _report(self, connected: bool) -> None:
        if self._on_connection is not None and not self._closed:
            self._on_connection(connected)


def _size(frames: list[memoryview]) -> int:
    return sum(map(len, frames))
