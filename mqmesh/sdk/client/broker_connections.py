"""A client's connections to the masters of broker groups."""

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Final

from mqmesh.errors import (
    ClientClosed,
    EndpointUnreachable,
    MQMeshError,
    NoRoute,
    NotMaster,
    TooManyOpenFiles,
    TransportError,
)
from mqmesh.host import host_id
from mqmesh.protocol.command import Command
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.route import BrokerAddress
from mqmesh.sdk.client.route_cache import RouteCache
from mqmesh.transport.endpoints import endpoint_of, learn_keys
from mqmesh.transport.interface import Connection, Transport

CONNECT_PATIENCE_MS: Final = 1_000
"""A broker that cannot be connected to for so long is taken for unreachable."""

_log = logging.getLogger(__name__)


class BrokerConnections:
    """The connection to each broker group's master; in the client loop, unless it says otherwise.

    Args:
        transport: Of the client.
        routes: Addresses of brokers.
        use_ipc: Reach brokers of this machine by their Unix sockets.
        stand_ins: Connect to a follower where the master is gone and no other one is elected.
        closed: True when nothing may be connected to any more.
        on_command: Called with commands that a broker sends by itself, with the broker's name.
        on_up: Called when the connection to a broker was made.
        on_down: Called when it broke.

    Attributes:
        failures: Why connections could not even be tried last, by broker.
    """

    def __init__(
        self,
        transport: Transport,
        routes: RouteCache,
        *,
        use_ipc: bool,
        stand_ins: bool = False,
        closed: Callable[[], bool],
        on_command: Callable[[str, Command], None],
        on_up: Callable[[str, Connection], None],
        on_down: Callable[[str], None],
    ) -> None:
        self._transport = transport
        self._routes = routes
        self._host_id = host_id() if use_ipc else None
        self._stand_ins = stand_ins
        self._closed = closed
        self._on_command = on_command
        self._on_up = on_up
        self._on_down = on_down
        self._clock = transport.loop.clock
        self._connections: dict[str, Connection] = {}
        self._places: dict[str, BrokerAddress] = {}
        self._connecting_ms: dict[str, int] = {}
        self.failures: dict[str, TransportError] = {}

    def connection(self, broker_name: str) -> Connection:
        """Return the connection to a broker group's master, made if there is none.

        Raises:
            NoRoute: The group, or its master, is not known.
            EndpointUnreachable, TooManyOpenFiles: No connection can even be tried.
            ClientClosed: The client is closed.
        """
        if self._closed():
            raise ClientClosed("the client is closed")
        address = self._address(broker_name)
        if address is None:
            raise NoRoute(f"no address is known of the master of broker group {broker_name!r}")
        one = self._connections.get(broker_name)
        if one is None or one.unreachable or self._places[broker_name] != address:
            endpoint = choose_endpoint(address, self._host_id)
            if one is None or one.endpoint != endpoint:
                learn_keys(self._transport.ring, [address])
                one = self._connect(broker_name, endpoint)
            self._places[broker_name] = address
        return one

    def connected(self) -> list[tuple[str, Connection]]:
        """Return the connections that stand, with the names of their brokers."""
        return [(name, one) for name, one in self._connections.items() if one.connected]

    def unreachable(self) -> list[str]:
        """Return brokers whose connection broke or could not be made."""
        return [name for name, one in self._connections.items() if one.unreachable]

    def is_current(self, broker_name: str, connection: Connection) -> bool:
        """Return True while a broker has no other connection than this one."""
        return self._connections.get(broker_name) is connection

    def is_connected(self, broker_name: str) -> bool:
        """Return True while the connection to a broker stands."""
        one = self._connections.get(broker_name)
        return one is not None and one.connected

    def is_unreachable(self, broker_name: str) -> bool:
        """Return True when the connection to a broker broke or could not be made."""
        one = self._connections.get(broker_name)
        return one is not None and one.unreachable

    def live_endpoint(self, broker_name: str) -> str | None:
        """Return the endpoint that reaches a broker's master now, or None; from any thread."""
        one = self._connections.get(broker_name)
        return one.endpoint if one is not None and one.connected else None

    def may_come(self, broker_name: str) -> bool:
        """Return False when waiting for a broker's connection promises little: try another one."""
        one = self._connections.get(broker_name)
        if one is None:
            return self._address(broker_name) is not None
        if one.connected:
            return True
        waited_ms = self._clock.monotonic_ms() - self._connecting_ms[broker_name]
        # A machine that is off does not even refuse.
        return not one.unreachable and waited_ms < CONNECT_PATIENCE_MS

    def follow(self, refusal: NotMaster, broker_name: str) -> bool:
        """Connect to the master that a refusal names; return True if it was not known."""
        has_changed = self._routes.follow(refusal, broker_name)
        if has_changed:
            self.follow_routes()
        return has_changed

    def follow_routes(self) -> None:
        """Routes have changed: connects to brokers where they are now."""
        for name in list(self._connections):
            if self._address(name) is not None:
                self.connection(name)

    def tidy(self) -> None:
        """Closes unneeded connections, and reconnects those that have a better endpoint again."""
        for name, one in list(self._connections.items()):
            address = self._address(name)
            if one.in_flight or address is None:
                continue
            best = choose_endpoint(address, self._host_id)
            if not one.connected and not self._routes.is_used(name):
                del self._connections[name]
                one.close()
            elif one.connected and best != one.endpoint:
                self._connect(name, best)  # its Unix socket is there again

    def leave(self, header: bytes) -> None:
        """Closes all, after a last request for brokers to forget the client.

        Args:
            header: Of that request.
        """
        for one in self._connections.values():
            if one.connected:
                try:
                    one.oneway(RequestCode.UNREGISTER_CLIENT, header=header)
                except MQMeshError as error:
                    _log.warning("could not take leave of %s: %s", one.endpoint, error)
            one.close()

    def _address(self, broker_name: str) -> BrokerAddress | None:
        return self._routes.address(broker_name, stand_in=self._stand_ins)

    def _connect(self, broker_name: str, endpoint: str) -> Connection:
        try:
            one = self._transport.connect(
                endpoint,
                on_command=partial(self._on_command, broker_name),
                on_connection=partial(self._changed, broker_name),
            )
        except TooManyOpenFiles as error:
            self.failures[broker_name] = error
            raise
        except Exception as error:
            # An address that ZeroMQ does not take.
            failure = EndpointUnreachable(f"cannot connect to {endpoint}: {error}")
            self.failures[broker_name] = failure
            raise failure from error
        self.failures.pop(broker_name, None)
        self._connecting_ms[broker_name] = self._clock.monotonic_ms()
        old = self._connections.get(broker_name)
        self._connections[broker_name] = one
        if old is not None:
            # The broker came back elsewhere. The new connection stands in the table already,
            # because what waited for the old place may be sent again while it closes.
            _log.info("broker %s moved from %s to %s", broker_name, old.endpoint, endpoint)
            old.close()
        return one

    def _changed(self, broker_name: str, up: bool) -> None:
        one = self._connections.get(broker_name)
        if one is None or self._closed():
            return
        if up:
            self._on_up(broker_name, one)
        else:
            _log.info("the connection to broker %s (%s) broke", broker_name, one.endpoint)
            self._on_down(broker_name)


def choose_endpoint(address: BrokerAddress, own_host_id: str | None) -> str:
    """Return the endpoint to reach a broker by.

    Args:
        address: Addresses that the broker announced.
        own_host_id: This machine, or None to avoid Unix sockets.

    Returns:
        Its Unix socket if it is on this machine and may be written to, else its TCP endpoint.
    """
    if address.ipc and address.host_id == own_host_id and os.access(address.ipc, os.W_OK):
        return f"ipc://{address.ipc}"
    return endpoint_of(address.tcp)
