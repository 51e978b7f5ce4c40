"""Hints that may be lost: one publisher, any number of listeners."""

from collections.abc import Callable
from typing import Final

import zmq

from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.loop import EventLoop

HINTS_PER_TICK: Final = 64


class HintPublisher:
    """Publishes hints to whoever listens; a listener that reads too slowly loses some.

    Args:
        context: ZeroMQ context of the process.
    """

    def __init__(self, context: sockets.Context) -> None:
        self._socket = sockets.publisher(context)

    def bind(self, endpoint: str) -> str:
        """Listens on an endpoint.

        Args:
            endpoint: ``tcp://host:port``; port 0 takes a free one.

        Returns:
            The endpoint with the real port.

        Raises:
            OSError: It is taken or may not be used.
        """
        return sockets.bind(self._socket, endpoint)

    def publish(self, hint: bytes) -> None:
        """Sends a hint, one frame, to all who listen now."""
        self._socket.send(hint, zmq.NOBLOCK)

    def close(self) -> None:
        """Stops listening."""
        sockets.close(self._socket)


class HintSubscriber:
    """Hears the hints of one publisher, in the loop's thread; connects again by itself.

    Args:
        context: ZeroMQ context of the process.
        loop: Its event loop.
        endpoint: The publisher's.
        on_hint: Told every hint.
        on_connected: Told when a connection was made: what was published before it, or while
            there was none, is lost, so whoever relies on hints asks for the state now.
    """

    def __init__(
        self,
        context: sockets.Context,
        loop: EventLoop,
        endpoint: str,
        *,
        on_hint: Callable[[bytes], None],
        on_connected: Callable[[], None] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._loop = loop
        self._on_hint = on_hint
        self._on_connected = on_connected
        self._closed = False
        self._socket = sockets.subscriber(context)
        self._monitor = sockets.monitor(self._socket)
        loop.add(self._socket, self._on_readable)
        loop.add(self._monitor, self._on_monitor)
        sockets.connect(self._socket, endpoint)

    def close(self) -> None:
        """Closes the connection."""
        if not self._closed:
            self._closed = True
            self._loop.remove(self._socket)
            self._loop.remove(self._monitor)
            sockets.close(self._socket, self._monitor)

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
        for event, _ in sockets.read_monitor(self._monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and self._on_connected is not None:
                self._on_connected()
