"""Simulated clients: command client, hint subscriber, blocking channel."""

from collections.abc import Callable
from functools import partial

from mqmesh.errors import AuthenticationFailed, ClientClosed, EndpointUnreachable
from mqmesh.protocol.codes import ResponseCode, response_error
from mqmesh.protocol.command import Command, decode_frame, encode_frame
from mqmesh.security.guard import Guard
from mqmesh.security.keys import Credentials, KeyRing
from mqmesh.transport.interface import OnDone
from mqmesh.transport.requests import RequestTable, broken, too_late
from mqmesh.transport.simulated.loop import SimulatedLoop
from mqmesh.transport.simulated.network import Network, SimulatedConnection, SimulatedLine
from mqmesh.transport.simulated.node import SimulatedNode


class SimulatedClient:
    """The twin of ``mqmesh.transport.zmq.client.CommandClient``; the same rules hold.

    Args:
        network: The simulated network.
        loop: Loop of the process.
        endpoint: Endpoint of the server.
        on_command: Called with commands that the server sends without a request.
        on_connection: Called when the connection is made (True) and broken (False).
        ring: Keys; None to speak plainly.

    Attributes:
        connected: The connection stands.
        unreachable: The last attempt to connect failed, or the connection broke.
    """

    def __init__(
        self,
        network: Network,
        loop: SimulatedLoop,
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
        self._refused: AuthenticationFailed | None = None
        self._on_connection = on_connection
        self._closed = False
        self._table = RequestTable(loop, endpoint, self._try_send, on_command)
        self._line = SimulatedLine(
            network,
            loop.node,
            endpoint,
            loop.deliver,
            on_frame=self._take,
            on_up=self._up,
            on_down=self._down,
            ring=ring,
        )

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

        Raises:
            ClientClosed, QueueFull, LocalProtocolError: As ``CommandClient.request``.
        """
        self._table.request(code, on_done, parts, header, timeout_ms)
        if self._refused is not None:
            self._loop.call_later(0, self._refuse)

    def oneway(self, code: int, *parts: bytes | memoryview, header: bytes = b"") -> None:
        """Sends a request that gets no answer; it may be lost.

        Raises:
            ClientClosed, QueueFull, LocalProtocolError: As ``CommandClient.oneway``.
        """
        self._table.oneway(code, parts, header)

    def close(self) -> None:
        """Closes the connection; requests without an outcome end with ``ClientClosed``."""
        if not self._closed:
            self._closed = True
            self._line.close()
            self._table.close()

    def _try_send(self, frame: bytes) -> bool:
        if self.connected:
            self._line.send(frame)
        return self.connected

    def _take(self, frame: bytes) -> None:
        self._table.take(decode_frame(memoryview(frame)))

    def _refuse(self) -> None:
        if self._refused is not None and not self._closed:
            self._table.refuse(self._refused)

    def _up(self) -> None:
        self._refused = None
        self.connected, self.unreachable = True, False
        self._table.flush()
        if self._on_connection is not None:
            self._on_connection(True)

    def _down(self, broke: bool, refused: AuthenticationFailed | None) -> None:
        self.connected, self.unreachable = False, True
        self._refused = refused
        self._refuse()
        if not broke:
            return
        self._table.broke()
        if self._on_connection is not None and not self._closed:
            self._on_connection(False)


class SimulatedHintPublisher:
    """The twin of ``mqmesh.transport.zmq.hints.HintPublisher``."""

    def __init__(
        self,
        network: Network,
        node: SimulatedNode,
        own: Credentials | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.node = node
        self.own = own
        self.guard = guard
        self._network = network
        self._hearers: dict[SimulatedConnection, None] = {}

    def bind(self, endpoint: str) -> str:
        """Listens on an endpoint; returns it with the real port.

        Raises:
            OSError: The endpoint is in use.
        """
        return self._network.bind(endpoint, self)

    def accept(self, connection: SimulatedConnection) -> None:
        """Take a subscriber's connection."""
        self._hearers[connection] = None
        connection.on_server_lost = lambda: self._hearers.pop(connection, None) and None

    def publish(self, hint: bytes) -> None:
        """Sends a hint to all subscribers connected now."""
        for connection in list(self._hearers):
            connection.answer(hint)

    def review(self) -> None:
        """End all connections, so that listeners prove themselves: the access list changed."""
        for connection in list(self._hearers):
            connection.close_server()

    def close(self) -> None:
        """Stops listening."""
        self._network.unbind(self)
        for connection in list(self._hearers):
            connection.close_server()


class SimulatedHintSubscriber:
    """The twin of ``mqmesh.transport.zmq.hints.HintSubscriber``."""

    def __init__(
        self,
        network: Network,
        loop: SimulatedLoop,
        endpoint: str,
        *,
        on_hint: Callable[[bytes], None],
        on_connected: Callable[[], None] | None = None,
        ring: KeyRing | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._on_connected = on_connected
        self._line = SimulatedLine(
            network,
            loop.node,
            endpoint,
            loop.deliver,
            on_frame=on_hint,
            on_up=self._up,
            on_down=lambda broke, refused: None,
            ring=ring,
        )

    def close(self) -> None:
        """Closes the connection."""
        self._line.close()

    def _up(self) -> None:
        if self._on_connected is not None:
            self._on_connected()


class SimulatedChannel:
    """The twin of ``mqmesh.transport.zmq.channel.BlockingChannel``: a wait runs the simulation."""

    def __init__(
        self, network: Network, node: SimulatedNode, endpoint: str, ring: KeyRing | None = None
    ) -> None:
        self.endpoint = endpoint
        self._refused: AuthenticationFailed | None = None
        self._node = node
        self._opaque = 0
        self._breaks_before = 0
        self._deadline_ms = 0
        self._callback: Callable[[], None] | None = None
        self._connected = False
        self._breaks = 0
        self._stopped = False
        self._answers: dict[int, Command] = {}
        self._line = SimulatedLine(
            network,
            node,
            endpoint,
            self._deliver,
            on_frame=self._take,
            on_up=self._up,
            on_down=self._down,
            ring=ring,
        )

    def request(
        self, code: int, *parts: bytes | memoryview, header: bytes = b"", timeout_ms: int
    ) -> Command:
        """Sends a request and waits for its response; errors as ``BlockingChannel.request``."""
        self._check_open()
        end_ms = self._node.simulation.now_ms + timeout_ms
        self._node.wait_until(
            lambda: self._connected or self._stopped or self._refused is not None, timeout_ms
        )
        left_ms = max(end_ms - self._node.simulation.now_ms, 0)
        self.post(code, *parts, header=header, timeout_ms=left_ms)
        self._node.wait_until(lambda: self._is_over, left_ms)
        answer = self.take()
        if answer is None:
            raise too_late(self.endpoint)
        return answer

    def is_connected(self) -> bool:
        """Return True when ``post`` finds a connection; errors as of ``request``."""
        self._check_open()
        if self._refused is not None:
            raise self._refused
        return self._connected

    def post(
        self, code: int, *parts: bytes | memoryview, header: bytes = b"", timeout_ms: int
    ) -> bool:
        """Sends a request whose response ``take`` returns; arguments and errors as ``request``."""
        if not self.is_connected():
            raise EndpointUnreachable(f"no connection to {self.endpoint} in time")
        self._opaque += 1
        self._breaks_before = self._breaks
        self._deadline_ms = self._node.simulation.now_ms + timeout_ms
        self._line.send(encode_frame(code, self._opaque, *parts, header=header))
        return False

    def take(self) -> Command | None:
        """Return the response to the last request, if it is there; errors as of ``request``."""
        answer = self._answers.pop(self._opaque, None)
        if answer is not None:
            if answer.code != ResponseCode.SUCCESS:
                raise response_error(answer)
            return answer
        self._check_open()
        if self._breaks != self._breaks_before:
            raise broken(self.endpoint)
        if self._node.simulation.now_ms >= self._deadline_ms:
            raise too_late(self.endpoint)
        return None

    def fileno(self) -> int:
        """Return -1: there is no descriptor."""
        return -1

    def watch(self, callback: Callable[[], None]) -> None:
        """Calls back once when ``take`` may find a response."""
        self._callback = callback
        if self._is_over:
            self._call_back()

    @property
    def _is_over(self) -> bool:
        is_broken = self._breaks != self._breaks_before
        return self._opaque in self._answers or is_broken or self._stopped

    def _call_back(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    def cancel(self) -> None:
        """Makes a request that is waiting, and all later ones, fail soon."""
        self._stopped = True

    def close(self) -> None:
        """Closes the connection."""
        self._stopped = True
        self._line.close()

    def _deliver(self, callback: Callable[..., None], *arguments: object) -> None:
        self._node.after(0, partial(callback, *arguments))

    def _check_open(self) -> None:
        if self._stopped:
            raise ClientClosed(f"the channel to {self.endpoint} is closed")

    def _up(self) -> None:
        self._connected, self._refused = True, None

    def _down(self, broke: bool, refused: AuthenticationFailed | None) -> None:
        self._connected, self._refused = False, refused
        self._breaks += broke
        self._call_back()

    def _take(self, frame: bytes) -> None:
        command = decode_frame(memoryview(frame))
        if command.is_response:
            self._answers = {command.opaque: command}  # drops late answers to earlier requests
            self._call_back()
