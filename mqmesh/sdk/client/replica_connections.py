"""A client's connections to followers, for reads that their masters would rather not serve."""

import logging
from functools import partial

from mqmesh.errors import ClientClosed, EndpointUnreachable, MQMeshError, NoRoute
from mqmesh.host import host_id
from mqmesh.protocol.command import Command
from mqmesh.sdk.client.broker_connections import CONNECT_PATIENCE_MS, choose_endpoint
from mqmesh.sdk.client.route_cache import RouteCache
from mqmesh.transport.endpoints import learn_keys
from mqmesh.transport.interface import Connection, OnDone, Transport

_Replica = tuple[str, int]

_log = logging.getLogger(__name__)


class ReplicaConnections:
    """The connection to each follower that is read from; in the client loop.

    No request waits for an unreachable follower: the master has all messages.

    Args:
        transport: Of the client.
        routes: Addresses of brokers.
        use_ipc: Reach brokers of this machine by their Unix sockets.

    Attributes:
        clock: Of the client loop.
    """

    def __init__(self, transport: Transport, routes: RouteCache, *, use_ipc: bool) -> None:
        self._transport = transport
        self._routes = routes
        self._host_id = host_id() if use_ipc else None
        self._connections: dict[_Replica, Connection] = {}
        self._used: set[_Replica] = set()
        self._closed = False
        self.clock = transport.loop.clock

    def request(
        self,
        broker_name: str,
        broker_id: int,
        code: int,
        on_done: OnDone,
        *,
        header: bytes,
        timeout_ms: int,
    ) -> None:
        """Asks a follower; every outcome goes to ``on_done``, and never before this returns."""
        replica = broker_name, broker_id

        def done(answer: Command | MQMeshError) -> None:
            if isinstance(answer, ClientClosed) and not self._closed:
                answer = EndpointUnreachable(f"replica {broker_id} of {broker_name} is not there")
            on_done(answer)

        failure: MQMeshError
        try:
            one = self._connection(replica)
            one.request(code, done, header=header, timeout_ms=timeout_ms)
            return
        except MQMeshError as error:
            failure = error
        except Exception as error:
            # No more descriptors, or an address that ZeroMQ does not take.
            failure = EndpointUnreachable(f"replica {broker_id} of {broker_name}: {error}")
        self._transport.loop.call_later(0, lambda: on_done(failure))

    def tidy(self) -> None:
        """Closes connections that were not used since its last call; called periodically."""
        for replica, one in list(self._connections.items()):
            if replica not in self._used and not one.in_flight:
                self._drop(replica, one)
        self._used.clear()

    def close(self) -> None:
        """Closes all."""
        self._closed = True
        for replica, one in list(self._connections.items()):
            self._drop(replica, one)

    def _connection(self, replica: _Replica) -> Connection:
        if self._closed:
            raise ClientClosed("the client is closed")
        address = self._routes.address(*replica)
        if address is None:
            raise NoRoute(f"no address is known of replica {replica[1]} of {replica[0]!r}")
        self._used.add(replica)
        endpoint = choose_endpoint(address, self._host_id)
        one = self._connections.get(replica)
        if one is not None and one.endpoint == endpoint:
            return one
        if one is not None:
            self._drop(replica, one)
        learn_keys(self._transport.ring, [address])
        one = self._transport.connect(endpoint, on_connection=partial(self._changed, replica))
        self._connections[replica] = one
        self._transport.loop.call_later(CONNECT_PATIENCE_MS, partial(self._check, replica, one))
        return one

    def _changed(self, replica: _Replica, up: bool) -> None:
        one = self._connections.get(replica)
        if one is not None and not up:
            self._drop(replica, one)

    def _check(self, replica: _Replica, one: Connection) -> None:
        if not one.connected and self._connections.get(replica) is one:
            self._drop(replica, one)

    def _drop(self, replica: _Replica, one: Connection) -> None:
        _log.info(
            "replica %d of %s (%s) is read from no more", replica[1], replica[0], one.endpoint
        )
        self._connections.pop(replica, None)
        one.close()
