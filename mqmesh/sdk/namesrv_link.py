"""A client's way to the name servers: one at a time, the next when it fails, and hints."""

import logging
import random
from collections.abc import Callable
from typing import Final

import zmq

from mqmesh.errors import MQMeshError, RemoteProtocolError, TransportError
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.route import ClusterInfo, GetClusterRequest, RouteHint
from mqmesh.transport import sockets
from mqmesh.transport.client import CommandClient, OnDone
from mqmesh.transport.loop import EventLoop

HINTS_PER_TICK: Final = 64

_log = logging.getLogger(__name__)


class NamesrvLink:
    """Asks name servers, in the loop's thread.

    Args:
        context: ZeroMQ context of the client.
        loop: Its event loop.
        addresses: ``host:port`` of each name server.
        timeout_ms: For one answer of one name server.
        on_hint: Told of every route change that the name server announces.
        on_connected: Told when a connection to a name server was made.
    """

    def __init__(
        self,
        context: sockets.Context,
        loop: EventLoop,
        addresses: list[str],
        *,
        timeout_ms: int,
        on_hint: Callable[[RouteHint], None],
        on_connected: Callable[[], None],
    ) -> None:
        self._context = context
        self._loop = loop
        self._addresses = random.sample(addresses, len(addresses))
        self._timeout_ms = timeout_ms
        self._on_hint = on_hint
        self._on_connected = on_connected
        self._hints: sockets.Socket | None = None
        self._hint_endpoint = ""
        self._closed = False
        self._client = self._connect()

    def request(self, code: int, header: bytes, on_done: OnDone) -> None:
        """Asks a name server, and when it fails the next, each at most once.

        Args:
            code: Request code.
            header: Encoded header.
            on_done: Told the first answer (also a refusal), or the last failure.
        """
        self._try(code, header, on_done, len(self._addresses))

    def close(self) -> None:
        """Closes the connections."""
        if not self._closed:
            self._closed = True
            self._client.close()
            self._drop_hints()

    def _try(self, code: int, header: bytes, on_done: OnDone, tries_left: int) -> None:
        client = self._client

        def done(answer: Command | MQMeshError) -> None:
            if isinstance(answer, TransportError) and tries_left > 1 and not self._closed:
                if client is self._client:
                    self._next()
                self._try(code, header, on_done, tries_left - 1)
            else:
                on_done(answer)

        # With more servers to ask, an unreachable one is not worth the whole wait.
        hurry = client.unreachable and tries_left > 1
        timeout_ms = 100 if hurry else self._timeout_ms
        client.request(code, done, header=header, timeout_ms=timeout_ms)

    def _next(self) -> None:
        _log.info("name server %s does not answer; asking the next", self._addresses[0])
        self._addresses.append(self._addresses.pop(0))
        old = self._client
        self._client = self._connect()
        # Later, because its other requests fail over to the new one while it closes.
        self._loop.call_later(0, old.close)

    def _connect(self) -> CommandClient:
        client = CommandClient(
            self._context,
            self._loop,
            sockets.zmq_endpoint(self._addresses[0]),
            on_connection=lambda up: self._connection(client, up),
        )
        return client

    def _connection(self, client: CommandClient, up: bool) -> None:
        if client is not self._client or self._closed:
            return
        if not up:
            self._drop_hints()
            return
        self._on_connected()
        client.request(
            RequestCode.GET_BROKER_CLUSTER_INFO,
            self._learn_hints,
            header=encode_header(GetClusterRequest()),
            timeout_ms=self._timeout_ms,
        )

    def _learn_hints(self, answer: Command | MQMeshError) -> None:
        if isinstance(answer, MQMeshError) or self._closed:
            return
        try:
            endpoint = decode_header(ClusterInfo, answer.header).hint_endpoint
        except RemoteProtocolError as error:
            _log.warning("name server %s: %s", self._addresses[0], error)
            return
        if not endpoint or endpoint == self._hint_endpoint:
            return
        self._drop_hints()
        self._hints = sockets.subscriber(self._context)
        self._hints.connect(endpoint)
        self._hint_endpoint = endpoint
        self._loop.add(self._hints, self._read_hints)

    def _drop_hints(self) -> None:
        if self._hints is not None:
            self._loop.remove(self._hints)
            sockets.close(self._hints)
            self._hints = None
            self._hint_endpoint = ""

    def _read_hints(self) -> None:
        for _ in range(HINTS_PER_TICK):
            if self._hints is None:
                return
            try:
                parts = self._hints.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                hint = decode_header(RouteHint, parts[0])
            except RemoteProtocolError as error:
                _log.warning("hint of %s: %s", self._hint_endpoint, error)
                continue
            self._on_hint(hint)
