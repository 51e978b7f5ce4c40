"""Requests to one server from the caller's own thread: the shortest way of a single request."""

import select
import time
from abc import ABC, abstractmethod
from typing import Final

import zmq

from mqmesh.errors import AuthenticationFailed, ClientClosed, TooManyOpenFiles
from mqmesh.protocol.codes import ResponseCode, response_error
from mqmesh.protocol.command import RESPONSE, Command, decode_frame, encode_frame
from mqmesh.security.keys import KeyRing
from mqmesh.transport.interface import TRY_AGAIN_MS
from mqmesh.transport.requests import broken, too_late
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.busy_poll import BusyPoll
from mqmesh.transport.zmq.descriptors import descriptors_for
from mqmesh.transport.zmq.handshakes import HandshakeWatch

SLICE_MS: Final = 50
"""Duration of a wait before the connection is checked again."""
_SLICE_S: Final = SLICE_MS / 1_000

_EVENTS: Final = int(zmq.EVENTS)
_IN: Final = int(zmq.POLLIN)
_NOBLOCK: Final = int(zmq.NOBLOCK)
_SUCCESS: Final = int(ResponseCode.SUCCESS)


class WaitingChannel(ABC):
    """Base of the channels with and without keys: a request waits for its answer.

    Args:
        endpoint: ``tcp://host:port`` or ``ipc://path``.
        busy_poll: Way to wait for answers; None to sleep at once.
    """

    _poll: select.epoll

    def __init__(self, endpoint: str, busy_poll: BusyPoll | None) -> None:
        self.endpoint = endpoint
        self._opaque = 0
        self._deadline = 0.0
        self._closed = False
        self._cancelled = False
        self._busy_poll = busy_poll or BusyPoll(0)

    def request(
        self, code: int, *parts: bytes | memoryview, header: bytes = b"", timeout_ms: int
    ) -> Command:
        """Sends a request and waits for its response.

        Args:
            code: Request code.
            parts: Body, in pieces.
            header: Encoded header.
            timeout_ms: Time for the connection, if there is none yet, and the answer together.

        Raises:
            RequestTimeout: No answer in time; the outcome is unknown.
            EndpointUnreachable: No connection in time, or it broke before the answer.
            AuthenticationFailed: The server does not trust the client, or the other way round.
            BrokerError: The server refused.
            ClientClosed: After ``close``.
            LocalProtocolError, RemoteProtocolError: A frame that breaks the protocol.
        """
        is_there = self.post(code, *parts, header=header, timeout_ms=timeout_ms)
        while True:
            if not is_there:
                self._busy_poll.wait(self._poll, _SLICE_S)
            answer = self.take()
            if answer is not None:
                return answer
            is_there = self._has_come()

    @abstractmethod
    def post(
        self, code: int, *parts: bytes | memoryview, header: bytes = b"", timeout_ms: int
    ) -> bool:
        """Sends a request whose response ``take`` returns; arguments and errors as of ``request``.

        Returns:
            True when ``take`` may find a response already, which ``fileno`` may not show any more.
        """

    @abstractmethod
    def take(self) -> Command | None:
        """Return the response to the last request, if it is there; errors as of ``request``."""

    @abstractmethod
    def _has_come(self) -> bool:
        """Return True when ``take`` may find a response that ``fileno`` may not show."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when ``take`` may find a response."""
        return self._poll.fileno()

    def cancel(self) -> None:
        """Makes a request that is waiting, and all later ones, fail soon; from any thread."""
        self._cancelled = True

    def _check_open(self) -> None:
        if self._closed or self._cancelled:
            raise ClientClosed(f"the channel to {self.endpoint} is closed")


class BlockingChannel(WaitingChannel):
    """One request at a time over a connection of its own.

    No other thread takes part, so a small request costs what a bare ZeroMQ echo costs.
    May be used from several threads one after the other, under a lock of the owner's.

    Args:
        context: ZeroMQ context of the client.
        endpoint: ``tcp://host:port`` or ``ipc://path``.
        busy_poll: Way to wait for answers; None to sleep at once.
        ring: Keys; None to speak plainly.
    """

    def __init__(
        self,
        context: sockets.Context,
        endpoint: str,
        *,
        busy_poll: BusyPoll | None = None,
        ring: KeyRing | None = None,
    ) -> None:
        super().__init__(endpoint, busy_poll)
        self._context = context
        self._ring = ring
        self._refused: AuthenticationFailed | None = None
        self._refused_until = 0.0
        self._handshakes = HandshakeWatch(endpoint, ring)
        self._open()

    def post(
        self, code: int, *parts: bytes | memoryview, header: bytes = b"", timeout_ms: int
    ) -> bool:
        """Implement ``WaitingChannel.post``."""
        if self._closed or self._cancelled:
            self._check_open()
        if self._refused is not None:
            self._try_again(self._refused)
        self._deadline = time.monotonic() + timeout_ms / 1_000
        self._opaque += 1
        frame = encode_frame(code, self._opaque, *parts, header=header)
        if self._poll.poll(0):
            self._look()  # a break before this request is not its concern
        if not self._connected:
            self._wait_for_connection(self._deadline)
        try:
            self._socket.send(frame, _NOBLOCK)
        except zmq.Again:
            self._send(frame, self._deadline)
        # The descriptor signals changes only; a response that has arrived must be read without it.
        return self._has_come()

    def is_connected(self) -> bool:
        """Return True when ``post`` need not wait for a connection; errors as of ``request``."""
        self._check_open()
        if self._poll.poll(0):
            self._look()
        return self._connected

    def take(self) -> Command | None:
        """Return the response to the last request, if it is there; errors as of ``request``."""
        try:
            while True:
                answer = self._socket.recv(_NOBLOCK, copy=False)
                command = decode_frame(answer.buffer)
                is_own = command.flags & RESPONSE and command.opaque == self._opaque
                # Answers to requests given up, and pieces of illegal messages, are skipped.
                if is_own and not answer.more:
                    break
        except zmq.Again:
            self._check(self._deadline)
            return None
        if command.code != _SUCCESS:
            raise response_error(command)
        return command

    def close(self) -> None:
        """Closes the connection."""
        if not self._closed:
            self._closed = True
            self._drop()

    def _has_come(self) -> bool:
        return bool(int(self._socket.get(_EVENTS)) & _IN)

    def _open(self) -> None:
        self._connected = False
        self._socket = sockets.dealer(self._context)
        self._socket.setsockopt(zmq.SNDTIMEO, SLICE_MS)
        self._monitor = sockets.monitor(self._socket, with_refusals=True)
        try:
            with descriptors_for(f"a connection to {self.endpoint}"):
                self._poll = select.epoll()
        except TooManyOpenFiles:
            sockets.close(self._socket, self._monitor)
            raise
        for watched in (self._socket, self._monitor):
            self._poll.register(int(watched.get(zmq.FD)), select.EPOLLIN)
        sockets.connect(self._socket, self.endpoint, self._ring)

    def _drop(self) -> None:
        self._poll.close()
        sockets.close(self._socket, self._monitor)

    def _try_again(self, refused: AuthenticationFailed) -> None:
        """Begins anew if the last attempt was some time ago: the access list may have changed."""
        if time.monotonic() < self._refused_until and not self._handshakes.has_new_key():
            raise refused
        self._refused = None
        self._handshakes = HandshakeWatch(self.endpoint, self._ring)
        self._drop()
        self._open()

    def _send(self, frame: bytes, deadline: float) -> None:
        while True:
            try:
                self._socket.send(frame)
            except zmq.Again:
                self._check_open()
                if time.monotonic() >= deadline:
                    raise self._handshakes.no_connection() from None
            else:
                return

    def _look(self) -> bool:
        """Reads the events of the connection; True if it broke, even if there is a new one."""
        broke = False
        for event, value in sockets.read_monitor(self._monitor):
            self._refused = self._handshakes.take(event, value)
            if self._refused is not None:
                self._refused_until = time.monotonic() + TRY_AGAIN_MS / 1_000
                raise self._refused
            if self._handshakes.anew:
                self._handshakes.anew = False
                self._drop()
                self._open()
                return True
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
                sockets.settle(self._socket)
            elif event == zmq.EVENT_DISCONNECTED:
                self._connected = False
                broke = True
        return broke

    def _wait_for_connection(self, deadline: float) -> None:
        while not self._connected:
            self._check_open()
            if time.monotonic() >= deadline:
                raise self._handshakes.no_connection()
            self._monitor.poll(SLICE_MS)
            self._look()

    def _check(self, deadline: float) -> None:
        self._check_open()
        if self._look():
            raise broken(self.endpoint)
        if time.monotonic() >= deadline:
            raise too_late(self.endpoint)
