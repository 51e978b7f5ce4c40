"""A client's way to the name servers: one at a time, the next when it fails, and hints."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from mqmesh.errors import (
    AuthenticationFailed,
    ClientClosed,
    EndpointUnreachable,
    MQMeshError,
    RemoteProtocolError,
    TransportError,
)
from mqmesh.hosts import is_address
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.route import ClusterInfo, GetClusterRequest, RouteHint
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.transport.interface import TRY_AGAIN_MS, Connection, OnDone, Subscriber, Transport

HURRY_MS: Final = 100
"""Longest wait for an unreachable name server, while there are others to ask."""

_log = logging.getLogger(__name__)


class NamesrvLink:
    """Link to the name servers, for the client loop.

    Args:
        transport: Of the client; its loop is the one whose thread this is for.
        addresses: ``host:port`` of each name server.
        timeout_ms: For one answer of one name server.
        on_hint: Called with every route change that the name server announces.
        on_connected: Called when a connection to a name server, or to its hints, was made: what
            changed before is not hinted at any more.
    """

    def __init__(
        self,
        transport: Transport,
        addresses: list[str],
        *,
        timeout_ms: int,
        on_hint: Callable[[RouteHint], None],
        on_connected: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._loop = transport.loop
        self._addresses = transport.random.sample(addresses, len(addresses))
        self._timeout_ms = timeout_ms
        self._on_hint = on_hint
        self._on_connected = on_connected
        self._hints: Subscriber | None = None
        self._refused_until_ms: dict[str, int] = {}
        self._closed = False
        self._client = self._connect()

    def request(self, code: int, header: bytes, on_done: OnDone) -> None:
        """Asks a name server, and when it fails the next, each at most once.

        Args:
            code: Request code.
            header: Encoded header.
            on_done: Called with the first answer (also a refusal), or the last failure; never
                before this returns.
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
            if isinstance(answer, ClientClosed) and not self._closed:
                # Another request found out first that this name server does not answer.
                answer = EndpointUnreachable(f"name server {client.endpoint} was given up")
            if isinstance(answer, AuthenticationFailed) and self._is_refused_next(client):
                on_done(answer)
            elif isinstance(answer, TransportError) and tries_left > 1 and not self._closed:
                if client is self._client:
                    self._next()
                self._try(code, header, on_done, tries_left - 1)
            else:
                on_done(answer)

        # With more servers to ask, an unreachable one is not worth the whole wait.
        hurry = client.unreachable and tries_left > 1
        timeout_ms = HURRY_MS if hurry else self._timeout_ms
        try:
            client.request(code, done, header=header, timeout_ms=timeout_ms)
        except MQMeshError as error:
            self._loop.call_later(0, lambda error=error: done(error))  # type: ignore[misc]

    def _is_refused_next(self, client: Connection) -> bool:
        """Note that a name server refuses the client; return True if the next one just did, too."""
        now_ms = self._loop.clock.monotonic_ms()
        self._refused_until_ms[client.endpoint] = now_ms + TRY_AGAIN_MS
        following = endpoint_of(self._addresses[1 % len(self._addresses)])
        return self._refused_until_ms.get(following, 0) > now_ms

    def _next(self) -> None:
        _log.info("name server %s does not answer; asking the next", self._addresses[0])
        self._addresses.append(self._addresses.pop(0))
        old = self._client
        self._client = self._connect()
        # Later, because its other requests fail over to the new one while it closes.
        self._loop.call_later(0, old.close)

    def _connect(self) -> Connection:
        client = self._transport.connect(
            endpoint_of(self._addresses[0]),
            on_connection=lambda up: self._connection(client, up),
        )
        return client

    def _connection(self, client: Connection, up: bool) -> None:
        if client is not self._client or self._closed:
            return
        if not up:
            self._drop_hints()
            if len(self._addresses) > 1:
                self._next()  # without hints, changes would have to wait for the poll
            return
        self._on_connected()
        client.request(
            RequestCode.GET_BROKER_CLUSTER_INFO,
            partial(self._learn_hints, client),
            header=encode_header(GetClusterRequest()),
            timeout_ms=self._timeout_ms,
        )

    def _learn_hints(self, client: Connection, answer: Command | MQMeshError) -> None:
        if isinstance(answer, MQMeshError) or client is not self._client or self._closed:
            return
        try:
            endpoint = decode_header(ClusterInfo, answer.header).hint_endpoint
        except RemoteProtocolError as error:
            _log.warning("name server %s: %s", self._addresses[0], error)
            return
        if not is_address(endpoint.removeprefix("tcp://")):
            if endpoint:
                _log.warning(
                    "name server %s publishes hints at %.255r, which is no endpoint; its routes "
                    "are asked for now and then",
                    self._addresses[0],
                    endpoint,
                )
            return
        if self._hints is not None and endpoint == self._hints.endpoint:
            return
        self._drop_hints()
        ring = self._transport.ring
        if ring is not None:
            ring.learn(endpoint, ring.server_key(client.endpoint))  # it is the same process
        self._hints = self._transport.subscribe(
            endpoint,
            on_hint=self._read_hint,
            on_connected=self._on_connected,
        )

    def _drop_hints(self) -> None:
        if self._hints is not None:
            self._hints.close()
            self._hints = None

    def _read_hint(self, data: bytes) -> None:
        try:
            hint = decode_header(RouteHint, data)
        except RemoteProtocolError as error:
            _log.warning("hint of name server %s: %s", self._addresses[0], error)
            return
        self._on_hint(hint)
