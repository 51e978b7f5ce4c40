"""Plain streams between simulated nodes: bytes arrive in other pieces than they were written."""

from collections.abc import Callable
from functools import partial
from typing import Final

from mqmesh.security.guard import Guard
from mqmesh.security.keys import Credentials
from mqmesh.transport.interface import ByteStream, StreamHandler
from mqmesh.transport.simulated.loop import SimulatedLoop
from mqmesh.transport.simulated.network import Network, SimulatedConnection

WHOLE_BYTES: Final = 64
"""Limit below which pieces arrive whole, most of the time."""


class SimulatedStream:
    """The twin of ``mqmesh.transport.zmq.streams.Stream``, one end of a connection.

    Args:
        network: The simulated network.
        loop: Loop of the process that has this end.
        peer: Address of the other end.
        send: Sends a piece of bytes.
        close: Closes this end.

    Attributes:
        peer: See above.
        waiting_bytes: 0: the network takes everything.
        is_closed: True when no more bytes are written or arrive.
    """

    def __init__(
        self,
        network: Network,
        loop: SimulatedLoop,
        peer: str,
        send: Callable[[bytes], None],
        close: Callable[[], None],
    ) -> None:
        self._network = network
        self._loop = loop
        self._send = send
        self._close = close
        self._handler: StreamHandler | None = None
        self._came: list[bytes] = []
        self._paused = False
        self.peer = peer
        self.waiting_bytes = 0
        self.is_closed = False

    def start(self, handler: StreamHandler) -> None:
        """Give arriving bytes to this handler."""
        self._handler = handler
        self._loop.deliver(self._give)

    def write(self, *parts: bytes | memoryview) -> None:
        """Write bytes, which arrive cut at random positions."""
        data = b"".join(parts)
        while data and not self.is_closed:
            below = self._network.simulation.below
            size = len(data) if below(4) else 1 + below(min(len(data), WHOLE_BYTES))
            self._send(data[:size])
            data = data[size:]

    def pause(self) -> None:
        """Keep arriving bytes until ``resume``."""
        self._paused = True

    def resume(self) -> None:
        """Give the bytes that arrived meanwhile."""
        self._paused = False
        self._loop.deliver(self._give)

    def close(self) -> None:
        """End the connection; written bytes arrive before the end."""
        if not self.is_closed:
            self.is_closed = True
            self._close()

    def take(self, data: bytes) -> None:
        """Take bytes that arrived."""
        self._came.append(data)
        self._give()

    def lose(self) -> None:
        """Note that the other end is gone."""
        if not self.is_closed:
            self.is_closed = True
            if self._handler is not None:
                self._handler.on_closed()

    def _give(self) -> None:
        while self._came and self._handler is not None and not (self._paused or self.is_closed):
            self._handler.on_bytes(self._came.pop(0))


class SimulatedStreamListener:
    """The twin of ``mqmesh.transport.zmq.streams.StreamListener``.

    Args:
        network: The simulated network.
        loop: Loop of the process that listens.
        accept: Called with each stream, which it starts or closes.

    Attributes:
        node: The process.
        own, guard: None: streams have no keys.
    """

    own: Credentials | None = None
    guard: Guard | None = None

    def __init__(
        self, network: Network, loop: SimulatedLoop, accept: Callable[[ByteStream], None]
    ) -> None:
        self._network = network
        self._loop = loop
        self._accept = accept
        self.node = loop.node

    def bind(self, endpoint: str, *, shares_port: bool = False) -> str:
        """Listens on an endpoint, alone.

        Raises:
            OSError: The endpoint has a listener.
        """
        return self._network.bind(endpoint, self)

    def close(self) -> None:
        """Stops listening."""
        self._network.unbind(self)

    def accept(self, connection: SimulatedConnection) -> None:
        """Take a connection that was made."""
        deliver = self._loop.deliver
        stream = SimulatedStream(
            self._network,
            self._loop,
            connection.client.name,
            connection.answer,
            connection.close_server,
        )
        connection.take_request = partial(deliver, stream.take)
        connection.on_server_lost = partial(deliver, stream.lose)
        deliver(self._accept, stream)


def dial(network: Network, loop: SimulatedLoop, endpoint: str) -> SimulatedStream:
    """Connect to a listener of streams, as a foreign client would.

    Args:
        network: The simulated network.
        loop: Loop of the client's process.
        endpoint: Endpoint of the listener.

    Returns:
        The client's end.

    Raises:
        ConnectionRefusedError: The endpoint has no listener.
    """
    listener = network.listener(endpoint)
    if listener is None or not listener.node.alive:
        raise ConnectionRefusedError(f"nobody listens at {endpoint}")
    ends: list[SimulatedStream] = []
    connection = SimulatedConnection(
        network, loop.node, listener.node, lambda: loop.deliver(ends[0].lose), ""
    )
    stream = SimulatedStream(network, loop, endpoint, connection.ask, connection.close_client)
    ends.append(stream)
    connection.take_answer = partial(loop.deliver, stream.take)
    listener.accept(connection)
    return stream
