"""The twins of whoever connects: command client, hint subscriber, blocking channel."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from mqmesh.errors import (
    ClientClosed,
    EndpointUnreachable,
    MQMeshError,
    RequestTimeout,
)
from mqmesh.protocol.codes import RequestCode, ResponseCode, response_error
from mqmesh.protocol.command import ONEWAY, Command, decode_frame, encode_frame
from mqmesh.transport.interface import OnDone, Timer
from mqmesh.transport.simulated.loop import SimulatedLoop
from mqmesh.transport.simulated.network import Network, SimulatedConnection, SimulatedLine
from mqmesh.transport.simulated.node import SimulatedNode

SWEEP_MS: Final = 20

_log = logging.getLogger(__name__)


class _SimulatedRequest(msgspec.Struct):
    on_done: OnDone
    deadline_ms: int
    frame: bytes
    sent: bool


class SimulatedClient:
    """The twin of ``mqmesh.transport.zmq.client.CommandClient``; the same rules hold.

    Args:
        network: Where.
        loop: Of the process.
        endpoint: Of the server.
        on_command: Told of commands that the server sends by itself.
        on_connection: Told when the connection is made (True) and broken (False).

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
    ) -> None:
        self.endpoint = endpoint
        self.connected = False
        self.unreachable = False
        self._loop = loop
        self._on_command = on_command
        self._on_connection = on_connection
        self._waiting: dict[int, _SimulatedRequest] = {}
        self._next_opaque = 1
        self._closed = False
        self._sweep: Timer | None = None
        self._sweep_due_ms = 0
        self._line = SimulatedLine(
            network,
            loop.node,
            endpoint,
            loop.deliver,
            on_frame=self._take,
            on_up=self._up,
            on_down=self._down,
        )

    @property
    def in_flight(self) -> int:
        """Requests without an outcome yet."""
        return len(self._waiting)

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
            ClientClosed: After ``close``.
        """
        self._check_open()
        opaque = self._next_opaque
        self._next_opaque += 1
        frame = encode_frame(code, opaque, *parts, header=header)
        deadline_ms = self._loop.clock.monotonic_ms() + timeout_ms
        waiting = self._waiting[opaque] = _SimulatedRequest(
            on_done, deadline_ms, frame, self.connected
        )
        if waiting.sent:
            self._line.send(frame)
        if self._sweep is None or deadline_ms < self._sweep_due_ms - SWEEP_MS:
            self._plan_sweep(deadline_ms)

    def oneway(self, code: int, *parts: bytes | memoryview, header: bytes = b"") -> None:
        """Sends a request that gets no answer; it may be lost.

        Raises:
            ClientClosed: After ``close``.
        """
        self._check_open()
        self._line.send(encode_frame(code, 0, *parts, header=header, flags=ONEWAY))

    def close(self) -> None:
        """Closes the connection; requests without an outcome end with ``ClientClosed``."""
        if self._closed:
            return
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        self._line.close()
        error = ClientClosed(f"the connection to {self.endpoint} was closed")
        self._fail(list(self._waiting), error)

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed(f"the connection to {self.endpoint} is closed")

    def _up(self) -> None:
        self.connected, self.unreachable = True, False
        for waiting in self._waiting.values():
            if not waiting.sent:
                waiting.sent = True
                self._line.send(waiting.frame)
        if self._on_connection is not None:
            self._on_connection(True)

    def _down(self, broke: bool) -> None:
        self.connected, self.unreachable = False, True
        if not broke:
            return
        error = EndpointUnreachable(
            f"the connection to {self.endpoint} broke; whether the request was carried out is "
            "unknown"
        )
        self._fail([key for key, waiting in self._waiting.items() if waiting.sent], error)
        if self._on_connection is not None and not self._closed:
            self._on_connection(False)

    def _take(self, frame: bytes) -> None:
        command = decode_frame(memoryview(frame))
        if not command.is_response:
            if self._on_command is not None and command.code != RequestCode.PROBE_CLIENT:
                self._on_command(command)
            return
        waiting = self._waiting.pop(command.opaque, None)
        if waiting is not None:
            good = command.code == ResponseCode.SUCCESS
            waiting.on_done(command if good else response_error(command))

    def _fail(self, opaques: list[int], error: MQMeshError) -> None:
        for opaque in opaques:
            waiting = self._waiting.pop(opaque, None)
            if waiting is None:
                continue  # a callback before it closed the client
            try:
                waiting.on_done(error)
            except Exception:
                self._loop.callback_failures += 1
                _log.exception("a callback for an answer of %s failed", self.endpoint)

    def _plan_sweep(self, due_ms: int) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        delay_ms = max(due_ms - self._loop.clock.monotonic_ms(), SWEEP_MS)
        self._sweep_due_ms = self._loop.clock.monotonic_ms() + delay_ms
        self._sweep = self._loop.call_later(delay_ms, self._expire)

    def _expire(self) -> None:
        self._sweep = None
        now_ms = self._loop.clock.monotonic_ms()
        late = [key for key, waiting in self._waiting.items() if waiting.deadline_ms <= now_ms]
        sent = [key for key in late if self._waiting[key].sent]
        unsent = [key for key in late if not self._waiting[key].sent]
        self._fail(sent, _too_late(self.endpoint))
        self._fail(unsent, EndpointUnreachable(f"no connection to {self.endpoint} in time"))
        if self._waiting and not self._closed:
            self._plan_sweep(min(waiting.deadline_ms for waiting in self._waiting.values()))


class SimulatedHintPublisher:
    """The twin of ``mqmesh.transport.zmq.hints.HintPublisher``."""

    def __init__(self, network: Network, node: SimulatedNode) -> None:
        self.node = node
        self._network = network
        self._hearers: dict[SimulatedConnection, None] = {}

    def bind(self, endpoint: str) -> str:
        """Listens on an endpoint; returns it with the real port.

        Raises:
            OSError: It is taken.
        """
        return self._network.bind(endpoint, self)

    def accept(self, connection: SimulatedConnection) -> None:
        """Somebody listens."""
        self._hearers[connection] = None
        connection.on_server_lost = lambda: self._hearers.pop(connection, None) and None

    def publish(self, hint: bytes) -> None:
        """Sends a hint to all who listen now."""
        for connection in list(self._hearers):
            connection.answer(hint)

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
            on_down=lambda broke: None,
        )

    def close(self) -> None:
        """Closes the connection."""
        self._line.close()

    def _up(self) -> None:
        if self._on_connected is not None:
            self._on_connected()


class SimulatedChannel:
    """The twin of ``mqmesh.transport.zmq.channel.BlockingChannel``: a wait runs the simulation."""

    def __init__(self, network: Network, node: SimulatedNode, endpoint: str) -> None:
        self.endpoint = endpoint
        self._node = node
        self._next_opaque = 1
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
        )

    def request(
        self, code: int, *parts: bytes | memoryview, header: bytes = b"", timeout_ms: int
    ) -> Command:
        """Sends a request and waits for its response; errors as there."""
        self._check_open()
        end_ms = self._node.simulation.now_ms + timeout_ms
        opaque = self._next_opaque
        self._next_opaque += 1
        self._node.wait_until(lambda: self._connected or self._stopped, timeout_ms)
        self._check_open()
        if not self._connected:
            raise EndpointUnreachable(f"no connection to {self.endpoint} in time")
        breaks = self._breaks
        self._line.send(encode_frame(code, opaque, *parts, header=header))
        self._node.wait_until(
            lambda: opaque in self._answers or self._breaks != breaks or self._stopped,
            max(end_ms - self._node.simulation.now_ms, 0),
        )
        answer = self._answers.pop(opaque, None)
        if answer is not None:
            if answer.code != ResponseCode.SUCCESS:
                raise response_error(answer)
            return answer
        self._check_open()
        if self._breaks != breaks:
            raise EndpointUnreachable(
                f"the connection to {self.endpoint} broke; whether the request was carried out "
                "is unknown"
            )
        raise _too_late(self.endpoint)

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
        self._connected = True

    def _down(self, broke: bool) -> None:
        self._connected = False
        self._breaks += broke

    def _take(self, frame: bytes) -> None:
        command = decode_frame(memoryview(frame))
        if command.is_response:
            self._answers = {command.opaque: command}  # what came late is nobody's


def _too_late(endpoint: str) -> RequestTimeout:
    return RequestTimeout(
        f"no answer from {endpoint} in time; whether the request was carried out is unknown"
    )
