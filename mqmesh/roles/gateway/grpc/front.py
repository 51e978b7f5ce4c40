"""The gateway's port for gRPC: its connections and methods, and what they share."""

from collections.abc import Callable
from typing import Final

from mqmesh.clock import Clock
from mqmesh.protocol.command import Command
from mqmesh.roles.gateway.grpc.clients import HEARTBEAT_MS, GrpcClient, GrpcClients
from mqmesh.roles.gateway.grpc.consuming import GrpcConsuming
from mqmesh.roles.gateway.grpc.handles import Handles
from mqmesh.roles.gateway.grpc.leases import TICK_MS, ClientLeases, Reports
from mqmesh.roles.gateway.grpc.producing import GrpcProducing
from mqmesh.roles.gateway.grpc.routing import GrpcRouting
from mqmesh.roles.gateway.grpc.session import GrpcMethod, GrpcSession, path_of
from mqmesh.roles.gateway.messages import Address
from mqmesh.roles.gateway.ports import BrokerPorts
from mqmesh.roles.gateway.sends import Sends
from mqmesh.roles.gateway.session import Output, SessionLimits
from mqmesh.roles.gateway.transactions import GatewayTransactions
from mqmesh.roles.gateway.upstream import Upstream

LATE_MS: Final = 500
"""Interval at which calls are looked at that took too long, and connections that are silent."""


class GrpcFront:
    """All that is served by gRPC.

    Args:
        upstream: Way to the brokers.
        ports: The broker groups that are served.
        sends: Sends to brokers.
        transactions: Sends decisions about half messages.
        key: Of the gateway as a producer.
        clock: Of the loop.
        limits: Of one connection.
        address: Where it listens.
        max_clients: Most clients.
        max_receipts: Most messages that clients have without a report.
        on_broken: Called with a sentence when what came is no gRPC.

    Attributes:
        handles: To be given its secret before the first connection.
    """

    def __init__(
        self,
        upstream: Upstream,
        ports: BrokerPorts,
        sends: Sends,
        transactions: GatewayTransactions,
        *,
        key: bytes,
        clock: Clock,
        limits: SessionLimits,
        address: Address,
        max_clients: int,
        max_receipts: int,
        on_broken: Callable[[str], None],
    ) -> None:
        self._upstream = upstream
        self._clock = clock
        self._limits = limits
        self._on_broken = on_broken
        self.handles = Handles()
        reports = Reports(upstream)
        self._leases = ClientLeases(reports, clock.monotonic_ms, max_receipts)
        self._clients = GrpcClients(upstream, ports.groups, max_clients, self._left)
        routing = GrpcRouting(upstream, ports, self._clients, address)
        self._producing = GrpcProducing(
            upstream, routing, self._clients, sends, transactions, self.handles, key, clock
        )
        self._consuming = GrpcConsuming(
            upstream, self._clients, self._leases, reports, self.handles
        )
        self._methods: dict[str, GrpcMethod] = {
            path_of(name): method
            for part in (self._clients, routing, self._producing, self._consuming)
            for name, method in part.methods().items()
        }
        self._sessions: dict[GrpcSession, None] = {}

    def start(self) -> None:
        """Begin to look at times."""
        loop = self._upstream.loop
        loop.call_every(TICK_MS, self._leases.tick)
        loop.call_every(LATE_MS, self._look)
        loop.call_every(HEARTBEAT_MS, self._clients.tick)

    def accept(self, stream: Output) -> GrpcSession:
        """Serve a connection; return what is to be called with its bytes."""
        session = GrpcSession(
            stream,
            self._methods,
            self._limits,
            self._clock.monotonic_ms,
            self._upstream.post,
            self._clients.meet,
            self._ended,
            self._on_broken,
        )
        self._sessions[session] = None
        return session

    def on_check(self, broker_name: str, command: Command) -> bool:
        """Ask a producer by gRPC how transactions ended; see ``GrpcProducing.on_check``."""
        return self._producing.on_check(broker_name, command)

    def on_broker_up(self, broker_name: str) -> None:
        """Show a broker, which may be another master now, all clients and what they have."""

        def joined(client: GrpcClient) -> None:
            self._leases.show(client.client_id, broker_name)

        self._clients.on_broker_up(broker_name, joined)

    def close(self) -> None:
        """Close all connections."""
        for session in list(self._sessions):
            session.close()

    def leave_all(self) -> None:
        """Have all clients leave: the gateway stops."""
        self._clients.leave_all()

    @property
    def connections(self) -> int:
        """Connections of clients."""
        return len(self._sessions)

    @property
    def clients(self) -> int:
        """Clients, with or without a connection."""
        return len(self._clients)

    @property
    def given_messages(self) -> int:
        """Messages that were given to clients."""
        return self._consuming.messages

    @property
    def held_messages(self) -> int:
        """Messages that clients have without a report."""
        return self._leases.messages

    def _left(self, client: GrpcClient) -> None:
        self._leases.client_left(client.client_id)

    def _ended(self, session: GrpcSession) -> None:
        self._sessions.pop(session, None)
        self._clients.session_ended(session)

    def _look(self) -> None:
        now_ms = self._clock.monotonic_ms()
        for session in list(self._sessions):
            session.tick(now_ms)
