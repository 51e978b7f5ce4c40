"""The command server's twin."""

import logging
from collections.abc import Callable, Mapping
from functools import partial

from mqmesh.errors import MQMeshError, RemoteProtocolError, UnsupportedCommand
from mqmesh.protocol.command import (
    ANYBODY,
    ONEWAY,
    RESPONSE,
    Principal,
    Reply,
    decode_frame,
    encode_frame,
)
from mqmesh.protocol.commands import not_served
from mqmesh.protocol.request import Request
from mqmesh.refusals import Refusals
from mqmesh.security.guard import Guard
from mqmesh.security.keys import Credentials
from mqmesh.transport.error_frames import error_frame
from mqmesh.transport.interface import OnDisconnect
from mqmesh.transport.simulated.loop import SimulatedLoop
from mqmesh.transport.simulated.network import Network, SimulatedConnection
from mqmesh.transport.simulated.node import SimulatedNode
from mqmesh.units import MIB

ROOM_BYTES = 16 * MIB
"""Limit of an answer; no peer of a simulation reads too slowly."""

_log = logging.getLogger(__name__)


class SimulatedPeer:
    """The peer of one connection, as handlers see it; see ``mqmesh.protocol.request.Peer``.

    Args:
        server: Server that it is connected to.
        connection: The connection.
        principal: User that it proves.
    """

    def __init__(
        self, server: "SimulatedServer", connection: SimulatedConnection, principal: Principal
    ) -> None:
        self._server = server
        self._connection = connection
        self.principal = principal
        self.is_gone = False

    @property
    def address(self) -> str:
        """Implement ``Peer.address``."""
        return ""

    def reply(self, opaque: int, flags: int, reply: Reply) -> None:
        """Implement ``Peer.reply``."""
        if not flags & ONEWAY:
            self._send(
                encode_frame(reply.code, opaque, *reply.body, header=reply.header, flags=RESPONSE)
            )

    def fail(self, opaque: int, flags: int, error: Exception) -> None:
        """Implement ``Peer.fail``."""
        frame = error_frame(opaque, flags, error, self._server.note_refusal)
        if frame is not None:
            self._send(frame)

    def notify(self, code: int, header: bytes, *parts: bytes | memoryview) -> None:
        """Implement ``Peer.notify``."""
        self._send(encode_frame(code, 0, *parts, header=header, flags=ONEWAY))

    def room(self) -> int:
        """Implement ``Peer.room``."""
        return 1 if self.is_gone else ROOM_BYTES

    def _send(self, frame: bytes) -> None:
        if self.is_gone:
            self._server.dropped_replies += 1
        else:
            self._connection.answer(frame)


class SimulatedServer:
    """The twin of ``mqmesh.transport.zmq.server.CommandServer``; the same rules hold.

    Args:
        network: The simulated network.
        loop: Loop of the process.
        handlers: Handler by request code.
        on_disconnect: Called with a peer that sent a frame and is gone.
        own: Keys that it proves; None to speak plainly, with every client.
        guard: Decides who may connect; given together with ``own``.

    Attributes:
        node: The process.
        own, guard: As given.
        malformed_frames, hung_up, silent, requests, dropped_replies, held_bytes, refusals,
            readable_ms, drained_ms, tick_ms: As in ``CommandServer``.
    """

    def __init__(
        self,
        network: Network,
        loop: SimulatedLoop,
        handlers: Mapping[int, Callable[[Request], Reply | None]],
        on_disconnect: OnDisconnect | None = None,
        *,
        own: Credentials | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.node: SimulatedNode = loop.node
        self.own = own
        self.guard = guard
        self.malformed_frames = self.hung_up = self.silent = self.requests = 0
        self.dropped_replies = self.held_bytes = 0
        self.refusals = Refusals()
        self.readable_ms = self.tick_ms = 0
        self.drained_ms: int | None = 0
        self._network = network
        self._loop = loop
        self._handlers = handlers
        self._on_disconnect = on_disconnect
        self._peers: dict[SimulatedConnection, SimulatedPeer] = {}
        self._silent_peers: dict[SimulatedConnection, None] = {}
        self._closed = False

    @property
    def peer_count(self) -> int:
        """Connections that sent a frame and still exist."""
        return len(self._peers)

    def bind(self, endpoint: str) -> str:
        """Listens on an endpoint; returns it with the real port.

        Raises:
            OSError: The endpoint is in use.
        """
        return self._network.bind(endpoint, self)

    def accept(self, connection: SimulatedConnection) -> None:
        """Take a connection that was made."""
        self._silent_peers[connection] = None
        connection.take_request = partial(self._loop.deliver, self._take, connection)
        connection.on_server_lost = partial(self._loop.deliver, self._lost, connection)

    def review(self) -> None:
        """End the connections of peers that may not connect any more: the access list changed."""
        for connection in [*self._peers, *self._silent_peers]:
            if self._principal(connection) is None:
                connection.close_server()
                self._loop.deliver(self._lost, connection)

    def tick(self, now_ms: int) -> None:
        """Do nothing: simulated connections need no maintenance."""

    def note_refusal(self, code: int, remark: str) -> None:
        """Counts a refusal, and logs it."""
        self.refusals.note(str(code), remark)
        for line in self.refusals.take_lines():
            _log.warning("%s", line)

    def close(self) -> None:
        """Stops listening and closes all connections; closing twice does no harm."""
        if not self._closed:
            self._closed = True
            self._network.unbind(self)
            for connection in [*self._peers, *self._silent_peers]:
                connection.close_server()
            for peer in self._peers.values():
                peer.is_gone = True

    def _take(self, connection: SimulatedConnection, frame: bytes) -> None:
        if self._closed:
            return
        self.readable_ms = self.drained_ms = self._loop.clock.monotonic_ms()
        principal = self._principal(connection)
        if principal is None:
            connection.close_server()
            self._lost(connection)
            return
        self.requests += 1
        self._silent_peers.pop(connection, None)
        peer = self._peers.get(connection)
        if peer is None:
            peer = self._peers[connection] = SimulatedPeer(self, connection, principal)
        peer.principal = principal
        command = decode_frame(memoryview(frame))
        try:
            if command.flags & RESPONSE:
                raise RemoteProtocolError("a response to nothing that was asked")
            handler = self._handlers.get(command.code)
            if handler is None:
                raise UnsupportedCommand(not_served(command.code))
            reply = handler(Request(peer, command))
        except Exception as error:
            if not isinstance(error, MQMeshError):
                self._loop.callback_failures += 1
                _log.exception("request code %d failed", command.code)
            peer.fail(command.opaque, command.flags, error)
        else:
            if reply is not None:
                peer.reply(command.opaque, command.flags, reply)

    def _principal(self, connection: SimulatedConnection) -> Principal | None:
        """Return the principal of a connection; None if it may not connect."""
        return ANYBODY if self.guard is None else self.guard.principal(connection.key)

    def _lost(self, connection: SimulatedConnection) -> None:
        self._silent_peers.pop(connection, None)
        peer = self._peers.pop(connection, None)
        if peer is None:
            return
        peer.is_gone = True
        if self._on_disconnect is not None and not self._closed:
            self._on_disconnect(peer)
