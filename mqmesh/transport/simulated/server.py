"""The command server's twin."""

import logging
from collections.abc import Callable, Mapping
from functools import partial

from mqmesh.errors import MQMeshError, RemoteProtocolError, UnsupportedCommand
from mqmesh.protocol.codes import ResponseCode, code_of, error_header
from mqmesh.protocol.command import (
    ANYBODY,
    MAX_REMARK_CHARACTERS,
    ONEWAY,
    RESPONSE,
    Principal,
    Reply,
    Request,
    decode_frame,
    encode_frame,
    encode_header,
)
from mqmesh.protocol.commands import not_served
from mqmesh.refusals import Refusals
from mqmesh.security.guard import Guard
from mqmesh.security.keys import Credentials
from mqmesh.transport.simulated.loop import SimulatedLoop
from mqmesh.transport.simulated.network import Network, SimulatedConnection
from mqmesh.transport.simulated.node import SimulatedNode
from mqmesh.units import MIB

ROOM_BYTES = 16 * MIB
"""Limit of an answer; no peer of a simulation reads too slowly."""

_ANSWERS = frozenset(
    {
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.QUERY_NOT_FOUND,
        ResponseCode.CONSUMER_GROUP_NOT_EXIST,
        ResponseCode.CLIENT_NOT_ONLINE,
    }
)

_log = logging.getLogger(__name__)


class SimulatedServer:
    """The twin of ``mqmesh.transport.zmq.server.CommandServer``; the same rules hold.

    Args:
        network: Where.
        loop: Of the process.
        handlers: Handler by request code.
        on_disconnect: Called with the routing id of a peer that sent something and is gone.
        own: Keys that it proves; None to speak plainly, with everybody.
        guard: Decides who may connect; given together with ``own``.

    Attributes:
        node: The process.
        own, guard: As given.
        malformed_frames, hung_up, silent, requests, dropped_replies, held_bytes, refusals,
            readable_ms, drained_ms, tick_ms: As there.
    """

    def __init__(
        self,
        network: Network,
        loop: SimulatedLoop,
        handlers: Mapping[int, Callable[[Request], Reply | None]],
        on_disconnect: Callable[[bytes], None] | None = None,
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
        self._peers: dict[bytes, SimulatedConnection] = {}
        self._silent_peers: dict[SimulatedConnection, None] = {}
        self._closed = False

    @property
    def peer_count(self) -> int:
        """Connections that sent something and are still there."""
        return len(self._peers)

    def bind(self, endpoint: str) -> str:
        """Listens on an endpoint; returns it with the real port.

        Raises:
            OSError: It is taken.
        """
        return self._network.bind(endpoint, self)

    def accept(self, connection: SimulatedConnection) -> None:
        """Take a connection that was made."""
        self._silent_peers[connection] = None
        connection.take_request = partial(self._loop.deliver, self._take, connection)
        connection.on_server_lost = partial(self._loop.deliver, self._lost, connection)

    def reply(self, request: Request, reply: Reply) -> None:
        """Answers a request; nothing is sent for a oneway one."""
        command = request.command
        if not command.flags & ONEWAY:
            frame = encode_frame(
                reply.code, command.opaque, *reply.body, header=reply.header, flags=RESPONSE
            )
            self._send(request.peer, frame)

    def address_of(self, peer: bytes) -> str:
        """Implement ``mqmesh.transport.interface.Server``."""
        return ""

    def review(self) -> None:
        """End the connections of peers that may not connect any more: the access list changed."""
        for connection in [*self._peers.values(), *self._silent_peers]:
            if self._principal(connection) is None:
                connection.close_server()
                self._loop.deliver(self._lost, connection)

    def tick(self, now_ms: int) -> None:
        """Do nothing: simulated connections look after themselves."""

    def room(self, peer: bytes) -> int:
        """Return the number of bytes that an answer to a peer may have now."""
        return ROOM_BYTES if peer in self._peers else 1

    def fail(self, request: Request, error: Exception) -> None:
        """Answers a request with an error."""
        command = request.command
        if isinstance(error, MQMeshError):
            remark = str(error)
        else:
            remark = f"internal error ({type(error).__name__}); see the server's log"
        remark = remark[:MAX_REMARK_CHARACTERS].encode(errors="replace").decode()
        code = vars(error).get("code") or code_of(error)
        if code not in _ANSWERS:
            self.note_refusal(code, remark)
        if command.flags & (ONEWAY | RESPONSE):
            return
        header = encode_header(error_header(error, remark))
        self._send(request.peer, encode_frame(code, command.opaque, header=header, flags=RESPONSE))

    def notify(self, peer: bytes, code: int, header: bytes, *parts: bytes | memoryview) -> None:
        """Sends a peer a oneway command of the server's own."""
        self._send(peer, encode_frame(code, 0, *parts, header=header, flags=ONEWAY))

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
            for connection in [*self._peers.values(), *self._silent_peers]:
                connection.close_server()

    def _send(self, peer: bytes, frame: bytes) -> None:
        connection = self._peers.get(peer)
        if connection is None:
            self.dropped_replies += 1
        else:
            connection.answer(frame)

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
        self._peers[connection.peer] = connection
        request = Request(connection.peer, decode_frame(memoryview(frame)), principal)
        try:
            if request.command.flags & RESPONSE:
                raise RemoteProtocolError("a response to nothing that was asked")
            handler = self._handlers.get(request.command.code)
            if handler is None:
                raise UnsupportedCommand(not_served(request.command.code))
            reply = handler(request)
        except Exception as error:
            if not isinstance(error, MQMeshError):
                self._loop.callback_failures += 1
                _log.exception("request code %d failed", request.command.code)
            self.fail(request, error)
        else:
            if reply is not None:
                self.reply(request, reply)

    def _principal(self, connection: SimulatedConnection) -> Principal | None:
        """Return the principal of a connection; None if it may not connect."""
        return ANYBODY if self.guard is None else self.guard.principal(connection.key)

    def _lost(self, connection: SimulatedConnection) -> None:
        self._silent_peers.pop(connection, None)
        if self._peers.pop(connection.peer, None) is not None and not self._closed:
            if self._on_disconnect is not None:
                self._on_disconnect(connection.peer)
