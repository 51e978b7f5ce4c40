"""The network between simulated nodes: connections that delay, break, and may be cut one way.

A connection is two pipes, each of which keeps its order; there is no order between pipes. A cut
holds frames of one direction. After ``HEARTBEAT_TIMEOUT_MS`` without a frame each end gives the
connection up by itself, and not at the same time: so a server may count a client as present that
has long come back by another connection.

Keys are names here: a client has the key that it names. The guard decides as with CURVE.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from mqmesh.errors import AuthenticationFailed
from mqmesh.security.guard import Guard
from mqmesh.security.keys import Credentials, KeyRing
from mqmesh.transport.interface import TRY_AGAIN_MS
from mqmesh.transport.simulated.node import SimulatedNode
from mqmesh.transport.simulated.simulation import Simulation

HEARTBEAT_MS: Final = 400
HEARTBEAT_TIMEOUT_MS: Final = 1_200
RECONNECT_MS: Final = 100
MOST_ON_THE_WAY: Final = 200_000
"""Limit of the frames in one pipe."""

Deliver = Callable[..., None]
"""Calls a function, with its arguments, in a node's loop or as a step of the node."""


class NetworkConditions:
    """Latency of frames.

    Attributes:
        least_ms, most_ms: Bounds of the usual latency.
        gust_every: One frame of so many takes up to ``gust_ms``; 0 for none.
    """

    def __init__(self) -> None:
        self.least_ms = 0
        self.most_ms = 2
        self.gust_every = 0
        self.gust_ms = 200


class Listener(Protocol):
    """Server that is bound to an endpoint.

    Attributes:
        node: Process of the server.
        own: Keys that it proves; None to speak plainly.
        guard: Decides who may connect.
    """

    node: SimulatedNode
    own: Credentials | None
    guard: Guard | None

    def accept(self, connection: "SimulatedConnection") -> None:
        """Take a connection that was made."""


class Network:
    """All endpoints, connections, and cuts.

    Args:
        simulation: The simulation, for time and chance.

    Attributes:
        weather: Present latency of frames.
        connections: Connections that exist, at least for one end.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.weather = NetworkConditions()
        self.connections: dict[SimulatedConnection, None] = {}
        self._bound: dict[str, Listener] = {}
        self._cut: set[tuple[str, str]] = set()
        self._next_port = 40_000

    def bind(self, endpoint: str, listener: Listener) -> str:
        """Listens on an endpoint; port 0 or ``*`` takes a free one.

        Raises:
            OSError: The endpoint has a listener.
        """
        head, _, port = endpoint.rpartition(":")
        if endpoint.startswith("tcp://") and port in ("0", "*"):
            self._next_port += 1
            endpoint = f"{head}:{self._next_port}"
        holder = self._bound.get(endpoint)
        if holder is not None and holder.node.alive:
            raise OSError(98, f"{endpoint} is taken")
        self._bound[endpoint] = listener
        return endpoint

    def unbind(self, listener: Listener) -> None:
        """Stops listening; connections stay until they are closed."""
        for endpoint in [key for key, one in self._bound.items() if one is listener]:
            del self._bound[endpoint]

    def listener(self, endpoint: str) -> Listener | None:
        """Return the listener that is bound to an endpoint; None if there is none."""
        return self._bound.get(endpoint)

    def latency_ms(self) -> int:
        """Draw the latency of the next frame."""
        weather, below = self.weather, self.simulation.below
        least_ms, most_ms = weather.least_ms, weather.most_ms
        if weather.gust_every and below(weather.gust_every) == 0:
            least_ms, most_ms = weather.most_ms, weather.gust_ms
        return least_ms + below(most_ms - least_ms + 1)

    def is_open(self, source: SimulatedNode, target: SimulatedNode) -> bool:
        """Return True if frames pass in this direction."""
        return not self._cut or (source.name, target.name) not in self._cut

    def cut(self, source: SimulatedNode, target: SimulatedNode) -> None:
        """Hold all frames from one node to another until ``heal``."""
        self._cut.add((source.name, target.name))
        for connection in list(self.connections):
            if connection.joins(source, target):
                connection.doubt()

    def heal(self) -> None:
        """Let all frames pass again."""
        self._cut.clear()
        for connection in list(self.connections):
            connection.flow()

    def stall(self, node: SimulatedNode) -> None:
        """Doubt the connections of a node that stands still: its peers receive no frames."""
        for connection in list(self.connections):
            if node in (connection.client, connection.server):
                connection.doubt()

    def break_connections(self, one: SimulatedNode, other: SimulatedNode | None = None) -> None:
        """Breaks connections of a node, or those between two; both ends are notified."""
        for connection in list(self.connections):
            ends = (connection.client, connection.server)
            if one in ends and (other is None or other in ends):
                connection.abort()


class Pipe:
    """One direction of a connection.

    Args:
        network: The simulated network.
        source: The sender.
        target: The receiver.

    Attributes:
        source: See above.
        closed: True when no more frames pass.
    """

    def __init__(self, network: Network, source: SimulatedNode, target: SimulatedNode) -> None:
        self._network = network
        self.source = source
        self._target = target
        self._frames: deque[tuple[int, Callable[..., None], tuple[bytes, ...]]] = deque()
        self._last_ms = 0
        self._planned = False
        self.closed = False

    def send(self, arrive: Callable[..., None], *frame: bytes) -> None:
        """Sends a frame, which arrives by a call."""
        if self.closed:
            return
        assert len(self._frames) < MOST_ON_THE_WAY, "a pipe has no limit but this one"
        network = self._network
        self._last_ms = max(self._last_ms, network.simulation.now_ms + network.latency_ms())
        self._frames.append((self._last_ms, arrive, frame))
        if not self._planned:
            self.flow()

    def flow(self) -> None:
        """Delivers waiting frames, unless the way is cut."""
        if self._planned or not self._frames or self.closed:
            return
        if not self._network.is_open(self.source, self._target):
            return
        self._planned = True
        self._network.simulation.at(self._frames[0][0], self._arrive)

    def _arrive(self) -> None:
        self._planned = False
        if self.closed or not self._network.is_open(self.source, self._target):
            return
        now_ms = self._network.simulation.now_ms
        while self._frames and self._frames[0][0] <= now_ms and not self.closed:
            _, arrive, frame = self._frames.popleft()
            arrive(*frame)
        if self._frames:
            self.flow()

    def close(self) -> None:
        """Ends the pipe; frames on the way are lost."""
        self.closed = True
        self._frames.clear()


class SimulatedConnection:
    """One connection, from a client's to a server's end.

    Args:
        network: The simulated network.
        client, server: The nodes.
        on_client_lost: Called when the client's end is gone, unless the client closed it.
        key: Public key of the client, "" without security.

    Attributes:
        key: As given.
        on_server_lost: Called when the server's end is gone; set by the listener.
        take_request, take_answer: Handlers of arriving frames; set by the ends.
    """

    def __init__(
        self,
        network: Network,
        client: SimulatedNode,
        server: SimulatedNode,
        on_client_lost: Callable[[], None],
        key: str,
    ) -> None:
        self.key = key
        self.client = client
        self.server = server
        self.on_server_lost: Callable[[], None] = _nothing
        self.take_request: Callable[[bytes], None] = _ignore
        self.take_answer: Callable[[bytes], None] = _ignore
        self._on_client_lost = on_client_lost
        self._network = network
        self._there = Pipe(network, client, server)
        self._back = Pipe(network, server, client)
        self._client_open = True
        self._server_open = True
        network.connections[self] = None

    def joins(self, one: SimulatedNode, other: SimulatedNode) -> bool:
        """Return True for a connection between these two nodes."""
        return {one, other} == {self.client, self.server}

    def ask(self, frame: bytes) -> None:
        """Sends a frame to the server."""
        self._there.send(self.take_request, frame)

    def answer(self, frame: bytes) -> None:
        """Sends a frame to the client."""
        self._back.send(self.take_answer, frame)

    def flow(self) -> None:
        """Let held frames go on."""
        self._there.flow()
        self._back.flow()

    def close_client(self) -> None:
        """Closes the client's end; the server is notified behind the frames sent before."""
        if self._client_open:
            self._client_open = False
            self._back.close()
            self._there.send(self._lose_server)
            self._forget()

    def close_server(self) -> None:
        """Closes the server's end; the client is notified behind the frames sent before."""
        if self._server_open:
            self._server_open = False
            self._there.close()
            self._back.send(self._lose_client)
            self._forget()

    def abort(self) -> None:
        """Break the connection: lose frames on the way, and notify each end if a way is open."""
        for pipe, lose in ((self._there, self._lose_server), (self._back, self._lose_client)):
            pipe._frames.clear()
            pipe.send(lose)

    def doubt(self) -> None:
        """Let each end give the connection up in its own time, unless a frame arrives by then."""
        chance = self._network.simulation.random
        for lose in (self._lose_client, self._lose_server):
            wait_ms = HEARTBEAT_TIMEOUT_MS + chance.randrange(2 * HEARTBEAT_MS)
            self._network.simulation.after(wait_ms, lambda lose=lose: self._give_up(lose))  # type: ignore[misc]

    def _give_up(self, lose: Callable[[], None]) -> None:
        client, server, network = self.client, self.server, self._network
        is_open = network.is_open(client, server) and network.is_open(server, client)
        if not is_open or client.paused or server.paused:
            lose()

    def _lose_client(self) -> None:
        if self._client_open:
            self._client_open = False
            self._back.close()
            if not self._there.closed:
                self._there.send(self._lose_server)
            self._on_client_lost()
            self._forget()

    def _lose_server(self) -> None:
        if self._server_open:
            self._server_open = False
            self._there.close()
            if not self._back.closed:
                self._back.send(self._lose_client)
            self.on_server_lost()
            self._forget()

    def _forget(self) -> None:
        if not self._client_open and not self._server_open:
            self._network.connections.pop(self, None)


class SimulatedLine:
    """A client's line to an endpoint: connects, and connects again after each break.

    Args:
        network: The simulated network.
        node: Node of the client.
        endpoint: Endpoint of the server.
        deliver: Takes events and frames of the connection, called in the client's loop.
        on_frame: Called with each frame.
        on_up: Called when the connection is made.
        on_down: Called when the connection broke, or could not be made; with True if it had been
            made, and with the reason if one end does not trust the other. A later attempt follows.
        ring: Keys; None to speak plainly.
    """

    def __init__(
        self,
        network: Network,
        node: SimulatedNode,
        endpoint: str,
        deliver: Deliver,
        *,
        on_frame: Callable[[bytes], None],
        on_up: Callable[[], None],
        on_down: Callable[[bool, AuthenticationFailed | None], None],
        ring: KeyRing | None,
    ) -> None:
        self._network = network
        self._node = node
        self._endpoint = endpoint
        self._deliver = deliver
        self._on_frame = on_frame
        self._on_up = on_up
        self._on_down = on_down
        self._ring = ring
        self._connection: SimulatedConnection | None = None
        self._closed = False
        network.simulation.after(network.latency_ms(), self._connect)

    def send(self, frame: bytes) -> None:
        """Sends a frame by the connection; drops it if there is none."""
        if self._connection is not None:
            self._connection.ask(frame)

    def close(self) -> None:
        """Closes the line, behind the frames sent before."""
        self._closed = True
        if self._connection is not None:
            self._connection.close_client()
            self._connection = None

    def _connect(self) -> None:
        if self._closed or not self._node.alive:
            return
        network, node = self._network, self._node
        listener = network.listener(self._endpoint)
        server = listener.node if listener is not None else None
        if listener is None or server is None or not server.alive:
            self._failed(notify=True)  # the connection is refused
        elif (
            node.paused
            or server.paused
            or not network.is_open(node, server)
            or not network.is_open(server, node)
        ):
            self._failed(notify=False)  # no end answers, and the client only notices by a timeout
        elif (refused := _distrust(self._ring, listener, self._endpoint)) is not None:
            self._call_soon(lambda: self._on_down(False, refused))
            network.simulation.after(TRY_AGAIN_MS, self._connect)
        else:
            key = "" if self._ring is None else self._ring.own.public_key
            self._stand(listener, SimulatedConnection(network, node, server, self._lost, key))

    def _stand(self, listener: Listener, connection: SimulatedConnection) -> None:
        connection.take_answer = partial(self._deliver, self._take, connection)
        listener.accept(connection)
        self._connection = connection
        self._call_soon(lambda: connection is self._connection and self._on_up())

    def _take(self, connection: SimulatedConnection, frame: bytes) -> None:
        if connection is self._connection and not self._closed:
            self._on_frame(frame)

    def _failed(self, *, notify: bool) -> None:
        if notify:
            self._call_soon(lambda: self._on_down(False, None))
        self._network.simulation.after(RECONNECT_MS, self._connect)

    def _lost(self) -> None:
        connection = self._connection

        def down() -> None:
            if connection is self._connection:
                self._connection = None
                self._on_down(True, None)

        if not self._closed:
            self._call_soon(down)
            self._network.simulation.after(RECONNECT_MS, self._connect)

    def _call_soon(self, callback: Callable[[], object]) -> None:
        def call() -> None:
            if not self._closed:
                callback()

        self._deliver(call)


def _distrust(
    ring: KeyRing | None, listener: Listener, endpoint: str
) -> AuthenticationFailed | None:
    """Return the reason why a handshake fails; None if it does not."""
    if listener.own is None and ring is None:
        return None
    if ring is None:
        return AuthenticationFailed(f"{endpoint} wants CURVE; pass credentials")
    if listener.own is None or listener.guard is None:
        return AuthenticationFailed(f"{endpoint} speaks no CURVE")
    tried: set[str] = set()
    while (key := ring.server_key(endpoint)) != listener.own.public_key:
        if key in tried or not ring.try_another(endpoint, key):
            return AuthenticationFailed(f"{endpoint} does not have the server key {key}")
        tried.add(key)
    if listener.guard.principal(ring.own.public_key) is None:
        return AuthenticationFailed(f"{endpoint} does not accept the key {ring.own.public_key}")
    return None


def _nothing() -> None:
    """Do nothing: the server's end does not exist yet."""


def _ignore(frame: bytes) -> None:
    """Drop a frame: the end does not read yet."""
