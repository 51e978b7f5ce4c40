"""Asks one server from the caller's own thread over a plain stream: a write, a wait, a read."""

import contextlib
import errno
import os
import select
import socket
import time
from concurrent.futures import Future, wait
from typing import Final

from mqmesh.errors import AuthenticationFailed, RemoteProtocolError
from mqmesh.protocol.codes import ResponseCode, response_error
from mqmesh.protocol.command import (
    MAX_FRAME_BYTES,
    RESPONSE,
    Command,
    decode_frame,
    encode_frame,
)
from mqmesh.transport import zmtp
from mqmesh.transport.descriptors import NONE_LEFT, too_many_open_files
from mqmesh.transport.interface import TRY_AGAIN_MS
from mqmesh.transport.requests import broken, no_connection, too_late
from mqmesh.transport.zmq.busy_poll import BusyPoll
from mqmesh.transport.zmq.channel import SLICE_MS, WaitingChannel
from mqmesh.transport.zmq.descriptors import descriptors_for
from mqmesh.transport.zmq.handshakes import ADVICE, HUNG_UP
from mqmesh.transport.zmq.sockets import (
    CONNECT_TIMEOUT_MS,
    HANDSHAKE_TIMEOUT_MS,
    HEARTBEAT_INTERVAL_MS,
    HEARTBEAT_TIMEOUT_MS,
    RECONNECT_MAX_MS,
    RECONNECT_MS,
)
from mqmesh.transport.zmq.streams import IPC, MOST_READ_BYTES, Address, look_up, prepare
from mqmesh.units import KIB

READ_BYTES: Final = 64 * KIB

_KIND: Final = b"DEALER"
_OPENING: Final = zmtp.opening(_KIND)
_SLICE_S: Final = SLICE_MS / 1_000
_SUCCESS: Final = int(ResponseCode.SUCCESS)


class PlainChannel(WaitingChannel):
    """One request at a time over a connection of its own; the twin of ``BlockingChannel``.

    May be used from several threads one after the other, under a lock of the owner's. Nothing is
    done between two requests: a connection that broke meanwhile is found by the next one.

    Args:
        endpoint: ``tcp://host:port`` or ``ipc://path``.
        busy_poll: How to wait for answers; None to sleep at once.
    """

    def __init__(self, endpoint: str, *, busy_poll: BusyPoll | None = None) -> None:
        super().__init__(endpoint, busy_poll)
        self._process = os.getpid()
        self._address: Future[tuple[int, Address]] | None = None
        self._connection: socket.socket | None = None
        self._is_local = endpoint.startswith(IPC)
        self._connected = False
        self._reader = zmtp.FrameReader(_KIND, MAX_FRAME_BYTES)
        self._within = False
        self._unsent = memoryview(b"")
        self._last_seen = 0.0
        self._pinged_at = 0.0
        self._refused: AuthenticationFailed | None = None
        self._greeted = self._opened = self._hung_up = False
        self._began = self._retry_at = 0.0
        self._retry_ms = RECONNECT_MS
        with descriptors_for(f"a connection to {endpoint}"):
            self._poll = select.epoll()
        try:
            self._connect()
        except BaseException:
            self._poll.close()
            raise

    def post(
        self, code: int, *parts: bytes | memoryview, header: bytes = b"", timeout_ms: int
    ) -> bool:
        """Implement ``WaitingChannel.post``; the descriptor shows whatever comes."""
        if self._closed or self._cancelled:
            self._check_open()
        if self._unsent:
            self._break()  # the last request was given up: nothing can follow half a frame
        now = time.monotonic()
        self._deadline = now + timeout_ms / 1_000
        self._opaque += 1
        frame = encode_frame(code, self._opaque, *parts, header=header)
        # A break before this request is not its concern. A local connection that broke takes
        # nothing, so it need not be asked before.
        if not self._connected or (not self._is_local and self._poll.poll(0)):
            self._wait_for_connection(self._deadline)
        data = zmtp.head(len(frame)) + frame
        self._last_seen = now
        self._pinged_at = 0.0
        connection = self._connection
        assert connection is not None
        try:
            sent = connection.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._break()
            self._wait_for_connection(self._deadline)
            sent = 0
        if sent < len(data):
            self._unsent = memoryview(data)[sent:]
            self._poll.modify(self._socket(), select.EPOLLIN | select.EPOLLOUT)
        return False

    def is_connected(self) -> bool:
        """Return True when ``post`` need not wait for a connection; errors as of ``request``."""
        self._check_open()
        self._look()
        return self._connected

    def take(self) -> Command | None:
        """Return the response to the last request, if it is there; errors as of ``request``."""
        if self._unsent:
            self._send_rest()
        connection, reader = self._connection, self._reader
        if connection is None:
            self._check_open()
            raise broken(self.endpoint)
        if not reader.rest:
            try:
                data = connection.recv(max(READ_BYTES, min(reader.missing, MOST_READ_BYTES)))
            except BlockingIOError:
                self._check()
                return None
            except OSError:
                data = b""
            if not data:
                self._break()
                raise broken(self.endpoint)
            reader.feed(data)
        answer = self._find_answer()
        if answer is None:
            self._last_seen = time.monotonic()
            self._pinged_at = 0.0
            self._check()
        elif answer.code != _SUCCESS:
            raise response_error(answer)
        return answer

    def _find_answer(self) -> Command | None:
        try:
            while (found := self._reader.take()) is not None:
                flags, frame = found
                if flags & ~zmtp.LONG or self._within:
                    self._take_unusual(flags, frame)
                    continue
                command = decode_frame(frame)
                # Answers to requests given up are skipped.
                if command.flags & RESPONSE and command.opaque == self._opaque:
                    return command
        except RemoteProtocolError:
            self._break()
            raise
        return None

    def close(self) -> None:
        """Closes the connection."""
        if not self._closed:
            self._closed = True
            self._drop()
            self._poll.close()

    # ---- The connection -----------------------------------------------------------------------

    def _has_come(self) -> bool:
        return False

    def _socket(self) -> socket.socket:
        assert self._connection is not None
        return self._connection

    def _connect(self) -> None:
        """Begins to connect; sets the time of the next attempt if that is in vain."""
        if self._address is None:
            self._address = look_up(self.endpoint)
        if not self._address.done():
            return
        found, self._address = self._address, None
        self._retry_at = time.monotonic() + self._retry_ms / 1_000
        self._retry_ms = min(2 * self._retry_ms, RECONNECT_MAX_MS)
        try:
            family, address = found.result()
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            if error.errno in NONE_LEFT:
                raise too_many_open_files(
                    f"a connection to {self.endpoint}", error.errno
                ) from error
            return  # the name is unknown now
        with contextlib.suppress(OSError):
            number = connection.connect_ex(address)
            if number in (0, errno.EINPROGRESS):
                self._connection = connection
                self._reader = zmtp.FrameReader(_KIND, MAX_FRAME_BYTES)
                self._within = False
                self._began = time.monotonic()
                self._greeted = self._opened = False
                self._poll.register(connection, select.EPOLLIN | select.EPOLLOUT)
                return
        self._hung_up = False  # nobody listens
        connection.close()

    def _look(self) -> None:
        """Goes on with the connection as far as that is possible without waiting."""
        if self._refused is not None:
            if time.monotonic() < self._retry_at:
                raise self._refused
            self._refused = None
        if self._connection is None:
            if time.monotonic() < self._retry_at:
                return
            self._connect()
        connection = self._connection
        if connection is None:
            return
        try:
            if not self._greeted:
                if not self._poll.poll(0):
                    self._give_up_if_late(CONNECT_TIMEOUT_MS)
                    return
                prepare(connection)
                # A server that wants keys says so, and hangs up on clients without them.
                connection.send(_OPENING[: zmtp.VERSION_BYTES])
                self._greeted = True
                self._poll.modify(connection, select.EPOLLIN)
            self._read_ahead(connection)
        except BlockingIOError:
            if not self._connected:
                self._give_up_if_late(HANDSHAKE_TIMEOUT_MS)
        except OSError:
            self._hung_up = self._greeted and not self._connected
            self._break()

    def _read_ahead(self, connection: socket.socket) -> None:
        """Take what comes before a request: the handshake, pings, late answers, the end."""
        data = connection.recv(READ_BYTES)
        if not data:
            raise ConnectionResetError
        self._reader.feed(data)
        try:
            while (found := self._reader.take()) is not None:
                self._take_unusual(*found)
        except zmtp.WrongMechanism:
            self._break()
            self._refused = AuthenticationFailed(f"{self.endpoint} wants CURVE; {ADVICE}")
            self._retry_at = time.monotonic() + TRY_AGAIN_MS / 1_000
            raise self._refused from None
        except RemoteProtocolError:
            self._break()
            return
        if self._reader.is_greeted and not self._opened:
            connection.send(_OPENING[zmtp.VERSION_BYTES :])
            self._opened = True
        if self._reader.is_open and not self._connected:
            # By the ping a server knows that this side may be silent for long, and does not ask
            # whether it lives: between two requests nobody would read that.
            connection.send(zmtp.PING)
            self._connected = True
            self._hung_up = False
            self._retry_ms = RECONNECT_MS

    def _take_unusual(self, flags: int, frame: memoryview) -> None:
        if flags & zmtp.COMMAND:
            name, data = zmtp.take_command(frame)
            if name == b"PING" and not self._unsent:
                with contextlib.suppress(OSError):
                    self._socket().send(zmtp.pong(data))
        else:
            self._within = bool(flags & zmtp.MORE)

    def _send_rest(self) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            self._unsent = self._unsent[connection.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._break()
            return
        if not self._unsent:
            self._poll.modify(connection, select.EPOLLIN)

    def _wait_for_connection(self, deadline: float) -> None:
        self._look()
        while not self._connected:
            self._check_open()
            now = time.monotonic()
            if now >= deadline:
                raise no_connection(self.endpoint, HUNG_UP if self._hung_up else "")
            wait_s = min(_SLICE_S, deadline - now)
            if self._address is not None:
                wait((self._address,), wait_s)
            elif self._connection is None:
                time.sleep(min(wait_s, max(self._retry_at - now, 0.001)))
            else:
                self._poll.poll(wait_s)
            self._look()

    def _give_up_if_late(self, limit_ms: int) -> None:
        if time.monotonic() - self._began > limit_ms / 1_000:
            self._break()

    def _break(self) -> None:
        """Lets go of a connection that is no good any more."""
        self._drop()
        self._unsent = memoryview(b"")

    def _drop(self) -> None:
        self._connected = False
        if self._connection is not None:
            if os.getpid() == self._process:
                # Where a forked child holds the connection, its close alone does not do that.
                with contextlib.suppress(OSError):
                    self._poll.unregister(self._connection)
            self._connection.close()
            self._connection = None

    def _check(self) -> None:
        """Looks after a request that is not answered yet."""
        self._check_open()
        now = time.monotonic()
        if now >= self._deadline:
            if self._unsent:
                self._break()  # nothing can follow half a frame
            raise too_late(self.endpoint)
        if (now - self._last_seen) * 1_000 < HEARTBEAT_INTERVAL_MS:
            return
        if not self._pinged_at:
            # No ping fits behind half of a frame: the rest has to leave in its time.
            if not self._unsent:
                with contextlib.suppress(OSError):
                    self._socket().send(zmtp.PING)
            self._pinged_at = now
        elif (now - self._pinged_at) * 1_000 >= HEARTBEAT_TIMEOUT_MS:
            self._break()
            raise broken(self.endpoint)
