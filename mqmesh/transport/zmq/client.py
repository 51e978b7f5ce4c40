"""Requests to one server: many in flight, each with a deadline and one outcome."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

import zmq

from mqmesh.errors import AuthenticationFailed, RemoteProtocolError, TooManyOpenFiles
from mqmesh.protocol.command import MAX_FRAME_BYTES, Command, decode_frame
from mqmesh.security.keys import KeyRing
from mqmesh.transport.interface import TRY_AGAIN_MS, OnDone
from mqmesh.transport.requests import RequestTable
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.handshakes import HandshakeWatch
from mqmesh.transport.zmq.loop import EventLoop

FRAMES_PER_TICK: Final = 256
FORSAKEN_MS: Final = 1_000
"""A connection that broke and is not tried again in that time never will be by ZeroMQ: the server
broke its protocol, with a frame that is too large, for example."""

_NOBLOCK: Final = int(zmq.NOBLOCK)
_IN: Final = int(zmq.POLLIN)
_EVENTS: Final = int(zmq.EVENTS)
_log = logging.getLogger(__name__)


class CommandClient:
    """One connection to one server, used in the loop's thread.

    Every request ends exactly once: with its successful response, or with an error. Without a
    connection, requests wait for one until their deadlines; check ``unreachable`` first if another
    server would do. If the server does not trust the client, or the other way round, requests end
    with ``AuthenticationFailed`` at once; the connection is tried again each 5 s.

    Args:
        context: ZeroMQ context of the process.
        loop: Event loop of the process.
        endpoint: ``tcp://host:port`` or ``ipc://path``.
        on_command: Called with commands that the server sends without a request.
        on_connection: Called when the connection is made (True) and broken (False).
        ring: Keys; None to speak plainly.

    Attributes:
        connected: The connection stands.
        unreachable: The last attempt to connect failed, or the connection broke.
    """

    def __init__(
        self,
        context: sockets.Context,
        loop: EventLoop,
        endpoint: str,
        *,
        on_command: Callable[[Command], None] | None = None,
        on_connection: Callable[[bool], None] | None = None,
        ring: KeyRing | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.connected = False
        self.unreachable = False
        self._loop = loop
        self._on_connection = on_connection
        self._table = RequestTable(loop, endpoint, self._try_send, on_command)
        self._wants_write = False
        self._is_retried = False
        self._closed = False
        self._context = context
        self._ring = ring
        self._refused: AuthenticationFailed | None = None
        self._handshakes = HandshakeWatch(endpoint, ring)
        self._open()

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
        """Sends a request; its outcome comes to ``on_done``, never before this returns.

        Args:
            code: Request code.
            on_done: Called once in the loop's thread, with the response or the error.
            parts: Body, in pieces.
            header: Encoded header.
            timeout_ms: Time for the answer.

        Raises:
            ClientClosed: After ``close``.
            QueueFull: ``MAX_REQUESTS_WAITING`` requests wait already.
            LocalProtocolError: The frame would be too large.
        """
        self._table.request(code, on_done, parts, header, timeout_ms)
        if self._table.has_unsent:
            self._watch_write()
            if self._refused is not None:
                if self._handshakes.has_new_key():
                    self._try_again()
                else:
                    self._loop.call_later(0, self._refuse)

    def oneway(self, code: int, *parts: bytes | memoryview, header: bytes = b"") -> None:
        """Sends a request that gets no answer; it may be lost.

        Raises:
            ClientClosed, QueueFull, LocalProtocolError: As ``request``.
        """
        self._table.oneway(code, parts, header)
        if self._table.has_unsent:
            self._watch_write()

    def close(self) -> None:
        """Closes the connection; requests without an outcome end with ``ClientClosed``."""
        if self._closed:
            return
        self._closed = True
        self._drop()
        self._table.close()

    def _open(self) -> None:
        self._socket = sockets.dealer(self._context)
        self._monitor = sockets.monitor(self._socket, with_refusals=True)
        self._loop.add(self._socket, self._on_ready)
        self._loop.add(self._monitor, self._on_monitor)
        sockets.connect(self._socket, self.endpoint, self._ring)

    def _reopen(self) -> None:
        if self._closed:
            return
        try:
            self._open()
        except TooManyOpenFiles as error:
            _log.warning("%s: %s; trying again in %d ms", self.endpoint, error, TRY_AGAIN_MS)
            self.unreachable = True
            self._loop.call_later(TRY_AGAIN_MS, self._reopen)

    def _drop(self) -> None:
        if not self._socket.closed:
            self._loop.remove(self._socket)
            self._loop.remove(self._monitor)
            sockets.close(self._socket, self._monitor)

    def _give_up(self, refused: AuthenticationFailed) -> None:
        """Drop a connection that ZeroMQ would not try again, or try without end; try later."""
        _log.warning("%s", refused)
        self._refused = refused
        self.unreachable = True
        self._drop()
        self._loop.call_later(TRY_AGAIN_MS, self._try_again)
        self._refuse()

    def _try_again(self) -> None:
        if not self._closed and self._refused is not None:
            self._refused = None
            self._handshakes = HandshakeWatch(self.endpoint, self._ring)
            self._reopen()

    def _open_if_forsaken(self, socket: sockets.Socket) -> None:
        if not (socket.closed or self.connected or self._is_retried):
            _log.warning("%s broke the protocol of ZeroMQ; connecting anew", self.endpoint)
            self._drop()
            self._reopen()

    def _refuse(self) -> None:
        if self._refused is not None and not self._closed:
            self._table.refuse(self._refused)

    def _try_send(self, frame: bytes) -> bool:
        if not self.connected:
            return False  # ZeroMQ would still take it for a moment, and lose it
        self._loop.touch(self._socket)
        try:
            self._socket.send(frame, _NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _flush(self) -> None:
        self._table.flush()
        self._watch_write()

    def _watch_write(self) -> None:
        # Without a connection it is the monitor that says when to go on.
        wanted = self.connected and self._table.has_unsent
        if wanted != self._wants_write:
            self._wants_write = wanted
            self._loop.want_write(self._socket, wanted)

    def _on_ready(self) -> None:
        if self._table.has_unsent:
            self._flush()
        for number in range(FRAMES_PER_TICK):
            if self._closed:
                return
            # One frame is the usual case, and a look at the events costs half as much as a read in
            # vain.
            if number == 1 and not int(self._socket.get(_EVENTS)) & _IN:
                if not self._wants_write:
                    self._loop.untouch(self._socket)
                return
            try:
                frame = self._socket.recv(_NOBLOCK, copy=False)
            except zmq.Again:
                return
            further: tuple[memoryview, ...] | None = ()
            if frame.more:
                further = sockets.receive_rest(self._socket, MAX_FRAME_BYTES - len(frame.buffer))
            if further is None:
                _log.warning("%s sent more frames than it may; ignored", self.endpoint)
                continue
            try:
                command = decode_frame(frame.buffer, further)
            except RemoteProtocolError as error:
                _log.warning("malformed frame from %s: %s", self.endpoint, error)
                continue
            self._table.take(command)

    def _on_monitor(self) -> None:
        for event, value in sockets.read_monitor(self._monitor):
            if self._closed:
                return
            refused = self._handshakes.take(event, value)
            if refused is not None:
                self._give_up(refused)
                return
            if self._handshakes.anew:
                self._handshakes.anew = False
                self._drop()
                self._open()
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = True
                self.unreachable = False
                sockets.settle(self._socket)
                self._loop.touch(self._socket)
                self._flush()
                self._notify(True)
            elif event == zmq.EVENT_DISCONNECTED:
                self.connected = False
                self.unreachable = True
                self._watch_write()
                self._table.broke()
                self._is_retried = False
                forsaken = partial(self._open_if_forsaken, self._socket)
                self._loop.call_later(FORSAKEN_MS, forsaken)
                self._notify(False)
            elif event == zmq.EVENT_CONNECT_RETRIED:
                self.unreachable = self._is_retried = True

    def _notify(self, connected: bool) -> None:
        if self._on_connection is not None and not self._closed:
            self._on_connection(connected)
