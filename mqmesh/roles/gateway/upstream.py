"""Way of the gateway to name servers and brokers: an ordinary client on the role's own loop."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from mqmesh.errors import (
    EndpointUnreachable,
    MQMeshError,
    RemoteProtocolError,
    TopicNotFound,
    TransportError,
)
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.route import (
    BrokerData,
    ClusterInfo,
    GetClusterRequest,
    RouteHint,
    TopicRoute,
)
from mqmesh.sdk.client.broker_connections import BrokerConnections
from mqmesh.sdk.client.master_requests import MasterRequests
from mqmesh.sdk.client.namesrv_link import NamesrvLink
from mqmesh.sdk.client.options import ClientOptions
from mqmesh.sdk.client.route_cache import MASTER_ID, RouteCache
from mqmesh.sdk.client.route_finder import OnRoute, RouteFinder
from mqmesh.transport.endpoints import endpoint_of, learn_keys, usable_brokers
from mqmesh.transport.interface import Connection, OnDone, Transport

CLUSTER_MS: Final = 5_000
"""Interval at which the broker groups are queried."""
TIDY_MS: Final = 30_000

_log = logging.getLogger(__name__)


class Upstream:
    """Routes and connections of the gateway.

    Args:
        transport: Transport of the process.
        namesrv_addr: Name servers, ``host:port`` each.
        use_ipc: Reach brokers of this machine by their Unix sockets.
        on_groups: Called with the broker groups after each query.
        on_command: Called with commands that a broker sends by itself, with the broker's name.
        on_broker: Called when the connection to a broker was made or broke.

    Attributes:
        loop: Loop of the process.
        routes: Cache of routes.
        groups: Broker groups, as a name server listed them last.
        brokers: The connections to masters.
        closed: No more requests are sent.
        request: Asks a broker group's master; see ``MasterRequests.request``.
    """

    def __init__(
        self,
        transport: Transport,
        namesrv_addr: list[str],
        *,
        use_ipc: bool,
        on_groups: Callable[[list[BrokerData]], None],
        on_command: Callable[[str, Command], None],
        on_broker: Callable[[str, bool], None],
    ) -> None:
        options = ClientOptions(namesrv_addr=namesrv_addr, use_ipc=use_ipc)
        self._transport = transport
        self._options = options
        self._on_groups = on_groups
        self._on_broker = on_broker
        self._link: NamesrvLink | None = None
        self.loop = transport.loop
        self.closed = False
        self.routes = RouteCache()
        self.groups: list[BrokerData] = []
        self.brokers = BrokerConnections(
            transport,
            self.routes,
            use_ipc=use_ipc,
            stand_ins=False,
            closed=lambda: self.closed,
            on_command=on_command,
            on_up=self._came,
            on_down=self._went,
        )
        self._finder = RouteFinder(
            transport,
            list(namesrv_addr),
            options,
            self.routes,
            on_changed=self._routes_changed,
            lost=self.brokers.unreachable,
            closed=lambda: self.closed,
        )
        self.request = MasterRequests(
            self.loop, self.routes, self.brokers, lambda: self.closed
        ).request

    def start(self) -> None:
        """Connect to a name server, and begin to look for broker groups."""
        self._finder.start()
        self._link = NamesrvLink(
            self._transport,
            list(self._options.namesrv_addresses()),
            timeout_ms=self._options.namesrv_timeout_ms,
            on_hint=self._on_hint,
            on_connected=self.look,
        )
        self.loop.call_every(CLUSTER_MS, self.look)
        self.loop.call_every(TIDY_MS, self.brokers.tidy)

    def close(self, farewell: Callable[[], None]) -> None:
        """Close all connections; closing twice does no harm.

        Args:
            farewell: Called first, to send what brokers are to know.
        """
        if self.closed:
            return
        farewell()
        self.closed = True
        for _, connection in self.brokers.connected():
            connection.close()
        self._finder.close()
        if self._link is not None:
            self._link.close()

    def find_route(self, topic: str, on_done: OnRoute) -> None:
        """Find the route of a topic, which is kept fresh from now on.

        Args:
            topic: Topic.
            on_done: Called with the route, or why there is none; maybe before this returns.
        """
        known = self.routes.route(topic)
        if known is not None:
            on_done(known)
            return

        def done(found: TopicRoute | MQMeshError) -> None:
            if isinstance(found, TopicNotFound):
                # Clients try again; names that a client makes up are not looked up meanwhile.
                self._finder.forget(topic)
            on_done(found)

        self._finder.find(topic, done)

    def refresh(self, topic: str) -> None:
        """Ask for a route again: a broker refused what it says."""
        self._finder.refresh([topic])

    def ask(self, broker_name: str, code: int, header: bytes, on_done: OnDone) -> None:
        """Ask a broker group's master within the usual time."""
        self.request(broker_name, code, on_done, header=header, timeout_ms=REQUEST_MS)

    def ask_namesrv(self, code: int, header: bytes, on_done: OnDone) -> None:
        """Ask a name server, and when it fails the next one."""
        if self._link is None:
            self.loop.call_later(0, lambda: on_done(EndpointUnreachable("no name server yet")))
        else:
            self._link.request(code, header, on_done)

    def ask_namesrvs(self, code: int, header: bytes, on_done: OnDone) -> None:
        """Ask every name server, each by a connection of its own; for changes.

        Args:
            code: Request code.
            header: Encoded header.
            on_done: Called once all have an outcome: with a refusal if there is one, else with the
                answer of one, else with the failure of one; never before this returns.
        """
        addresses = self._options.namesrv_addresses()
        outcomes: list[Command | MQMeshError] = []

        def done(connection: Connection | None, answer: Command | MQMeshError) -> None:
            if connection is not None:
                self.loop.call_later(0, connection.close)
            outcomes.append(answer)
            if len(outcomes) == len(addresses):
                on_done(min(outcomes, key=_rank))

        for address in addresses:
            connection: Connection | None = None
            try:
                connection = self._transport.connect(endpoint_of(address))
                answered = partial(done, connection)
                connection.request(code, answered, header=header, timeout_ms=NAMESRV_MS)
            except MQMeshError as error:
                self.loop.call_later(0, partial(done, connection, error))

    def oneway(self, broker_name: str, code: int, header: bytes, body: bytes = b"") -> None:
        """Send something to a broker group's master that needs no answer."""
        try:
            self.brokers.connection(broker_name).oneway(code, body, header=header)
        except MQMeshError as error:
            _log.info("nothing can be sent to broker %s: %s", broker_name, error)

    def post(self, callback: Callable[[], None]) -> None:
        """Call back in the loop, soon."""
        self.loop.call_later(0, callback)

    def look(self) -> None:
        """Look for broker groups now."""
        if self._link is not None and not self.closed:
            header = encode_header(GetClusterRequest())
            self._link.request(RequestCode.GET_BROKER_CLUSTER_INFO, header, self._take_cluster)

    def _on_hint(self, hint: RouteHint) -> None:
        # A new broker group, or its first master, is served at once: a cluster that has just
        # started is used.
        known = {one.broker_name for one in self.groups if MASTER_ID in one.addresses}
        if not hint.topics or not known.issuperset(hint.brokers):
            self.look()

    def _take_cluster(self, answer: Command | MQMeshError) -> None:
        if isinstance(answer, MQMeshError) or self.closed:
            return
        try:
            cluster = decode_header(ClusterInfo, answer.header)
        except RemoteProtocolError as error:
            _log.warning("a name server cannot be understood: %s", error)
            return
        brokers = usable_brokers(cluster.brokers, _log.warning)
        for group in brokers:
            learn_keys(self._transport.ring, group.addresses.values())
        self.groups = brokers
        if self.routes.learn(brokers):
            self.brokers.follow_routes()
        self._on_groups(brokers)

    def _routes_changed(self, topics: set[str]) -> None:
        self.brokers.follow_routes()

    def _came(self, broker_name: str, connection: Connection) -> None:
        self._on_broker(broker_name, True)

    def _went(self, broker_name: str) -> None:
        for topic in self.routes.topics_of(broker_name):
            self._finder.refresh([topic])
        self._on_broker(broker_name, False)


def _rank(outcome: Command | MQMeshError) -> int:
    """Return a low number for what is to be reported first."""
    if isinstance(outcome, Command):
        return 1
    return 2 if isinstance(outcome, TransportError) else 0


REQUEST_MS: Final = 3_000
"""Time for one answer of a broker."""
NAMESRV_MS: Final = 1_000
"""Time for one answer of a name server to a change."""
