"""Hints that may be lost: one publisher, any number of listeners."""

import logging
from collections.abc import Callable
from typing import Final

import zmq

from mqmesh.security.keys import Credentials, KeyRing
from mqmesh.transport.interface import TRY_AGAIN_MS
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.connections import hang_up
from mqmesh.transport.zmq.handshakes import HandshakeWatch
from mqmesh.transport.zmq.loop import EventLoop

HINTS_PER_TICK: Final = 64

_log = logging.getLogger(__name__)


class HintPublisher:
    """Publishes hints to all listeners; a listener that reads too slowly loses some.

    Args:
        context: ZeroMQ context of the process.
        loop: Event loop of the process.
        own: Keys that it proves; None to speak plainly, to every listener.
    """

    def __init__(
        self, context: sockets.Context, loop: EventLoop, own: Credentials | None = None
    ) -> None:
        self._loop = loop
        self._own = own
        self._connections: set[int] = set()
        self._socket = sockets.publisher(context)
        self._monitor = sockets.monitor(self._socket)
        loop.add(self._monitor, self._on_monitor)

    def bind(self, endpoint: str) -> str:
        """Listens on an endpoint.

        Args:
            endpoint: ``tcp://host:port``; port 0 takes a free one.

        Returns:
            The endpoint with the real port.

        Raises:
            OSError: The endpoint is in use or not allowed.
        """
        return sockets.bind(self._socket, endpoint, self._own)

    def publish(self, hint: bytes) -> None:
        """Sends a hint, one frame, to all subscribers connected now."""
        self._socket.send(hint, zmq.NOBLOCK)

    def review(self) -> None:
        """End all connections, so that listeners prove themselves: the access list changed.

        A publisher gets nothing from its listeners, so it cannot tell their connections apart.
        """
        for descriptor in self._connections:
            hang_up(descriptor)

    def close(self) -> None:
        """Stops listening."""
        if not self._monitor.closed:
            self._loop.remove(self._monitor)
        sockets.close(self._socket, self._monitor)

    def _on_monitor(self) -> None:
        for event, descriptor in sockets.read_monitor(self._monitor):
            if event == zmq.EVENT_ACCEPTED:
                self._connections.add(descriptor)
            elif event == zmq.EVENT_DISCONNECTED:
                self._connections.discard(descriptor)
        # ZeroMQ frees the memory of connections, 11 kB each, when the socket is used; hints are
        # rare.
        sockets.settle(self._socket)


class HintSubscriber:
    """Receives the hints of one publisher, in the loop's thread; connects again by itself.

    Args:
        context: ZeroMQ context of the process.
        loop: Event loop of the process.
        endpoint: Endpoint of the publisher.
        on_hint: Called with every hint.
        on_connected: Called when a connection was made. Hints published before it, or without a
            connection, are lost, so a subscriber that relies on hints queries the state now.
        ring: Keys; None to speak plainly.
    """

    def __init__(
        self,
        context: sockets.Context,
        loop: EventLoop,
        endpoint: str,
        *,
        on_hint: Callable[[bytes], None],
        on_connected: Callable[[], None] | None = None,
        ring: KeyRing | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._loop = loop
        self._on_hint = on_hint
        self._on_connected = on_connected
        self._closed = False
        self._context = context
        self._ring = ring
        self._handshakes = HandshakeWatch(endpoint, ring)
        self._open()

    def close(self) -> None:
        """Closes the connection."""
        if not self._closed:
            self._closed = True
            self._drop()

    def _open(self) -> None:
        self._socket = sockets.subscriber(self._context)
        self._monitor = sockets.monitor(self._socket, with_refusals=True)
        self._loop.add(self._socket, self._on_readable)
        self._loop.add(self._monitor, self._on_monitor)
        sockets.connect(self._socket, self.endpoint, self._ring)

    def _drop(self) -> None:
        if not self._socket.closed:
            self._loop.remove(self._socket)
            self._loop.remove(self._monitor)
            sockets.close(self._socket, self._monitor)

    def _try_again(self) -> None:
        if not self._closed:
            self._handshakes = HandshakeWatch(self.endpoint, self._ring)
            self._open()

    def _on_readable(self) -> None:
        for _ in range(HINTS_PER_TICK):
            if self._closed:
                return
            try:
                hint = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if self._socket.getsockopt(zmq.RCVMORE):
                sockets.skip_rest(self._socket)  # a hint has one frame
            else:
                self._on_hint(hint)

    def _on_monitor(self) -> None:
        for event, value in sockets.read_monitor(self._monitor):
            refused = self._handshakes.take(event, value)
            if refused is not None:
                _log.warning("no hints: %s", refused)
                self._drop()
                self._loop.call_later(TRY_AGAIN_MS, self._try_again)
                return
            if self._handshakes.anew:
                self._handshakes.anew = False
                self._drop()
                self._open()
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and self._on_connected is not None:
                self._on_connected()
