"""Methods that clients by gRPC call, which act at brokers with the keys of one user."""

from collections.abc import Callable
from functools import partial
from typing import Final

from mqmesh.clock import Clock
from mqmesh.protocol.command import Command
from mqmesh.protocol.gateway import GatewayClient
from mqmesh.protocol.grpc.messages import GrpcMessage
from mqmesh.roles.gateway.consuming import PullCache
from mqmesh.roles.gateway.grpc.clients import HEARTBEAT_MS, GrpcClient, GrpcClients
from mqmesh.roles.gateway.grpc.consuming import GrpcConsuming
from mqmesh.roles.gateway.grpc.handles import Handles
from mqmesh.roles.gateway.grpc.leases import TICK_MS, ClientLeases, Reports
from mqmesh.roles.gateway.grpc.producing import GrpcProducing
from mqmesh.roles.gateway.grpc.pulling import GrpcPulling
from mqmesh.roles.gateway.grpc.questions import GrpcQuestions
from mqmesh.roles.gateway.grpc.routing import GrpcRouting
from mqmesh.roles.gateway.grpc.session import GrpcMethod, GrpcSession, ServedCall, path_of
from mqmesh.roles.gateway.messages import Address
from mqmesh.roles.gateway.ports import BrokerPorts
from mqmesh.roles.gateway.sends import Sends
from mqmesh.roles.gateway.transactions import GatewayTransactions
from mqmesh.roles.gateway.upstream import Upstream

IN_DOUBT_MS: Final = 10_000
"""Leases given to a connection within this time before it was last heard may not have arrived."""


class GrpcService:
    """Methods of one user's clients.

    Args:
        upstream: Way to the brokers.
        ports: The broker groups that are served.
        sends: Sends to brokers.
        cache: Messages that pulls left.
        transactions: Sends decisions about half messages.
        handles: Makes receipts and ids of transactions.
        key: Key of the gateway as a producer.
        clock: Clock of the loop.
        address: Address at which the gateway listens for gRPC.
        max_clients: Most clients.
        max_receipts: Most messages that clients have without a report.

    Attributes:
        methods: Methods by path.
        questions: Questions to its clients.
    """

    def __init__(
        self,
        upstream: Upstream,
        ports: BrokerPorts,
        sends: Sends,
        cache: PullCache,
        transactions: GatewayTransactions,
        *,
        handles: Handles,
        key: bytes,
        clock: Clock,
        address: Address,
        max_clients: int,
        max_receipts: int,
    ) -> None:
        self._reports = reports = Reports(upstream)
        self._leases = ClientLeases(reports, clock.monotonic_ms, max_receipts)
        self._clients = GrpcClients(upstream, ports.groups, max_clients, self._left, self._replied)
        self.questions = GrpcQuestions(upstream, self._clients)
        routing = GrpcRouting(upstream, ports, self._clients, address)
        self._producing = GrpcProducing(
            upstream, routing, self._clients, sends, transactions, handles, key, clock
        )
        self._consuming = GrpcConsuming(upstream, self._clients, self._leases, reports, handles)
        self._pulling = GrpcPulling(upstream, self._clients, cache)
        self.methods: Final[dict[str, GrpcMethod]] = {
            path_of(name): method
            for part in (self._clients, routing, self._producing, self._consuming, self._pulling)
            for name, method in part.methods().items()
        }
        self._timers = [
            upstream.loop.call_every(TICK_MS, self._leases.tick),
            upstream.loop.call_every(HEARTBEAT_MS, self._clients.tick),
        ]

    def meet(self, call: ServedCall) -> None:
        """Note by which connection a client comes; raises ``RefusedCall`` to refuse it."""
        self._clients.meet(call)

    def session_ended(self, session: GrpcSession) -> None:
        """Have the clients of a connection leave soon, unless they come back."""
        since_ms = session.last_seen_ms - IN_DOUBT_MS
        for client_id in session.client_ids:
            self._leases.source_ended(client_id, session, since_ms)
        self._clients.session_ended(session)

    def on_check(self, broker_name: str, command: Command) -> bool:
        """Ask a producer by gRPC how transactions ended; see ``GrpcProducing.on_check``."""
        return self._producing.on_check(broker_name, command)

    def on_broker_up(self, broker_name: str) -> None:
        """Show a broker, which may be another master now, all clients and what they have."""

        def joined(client: GrpcClient) -> None:
            self._leases.show(client.client_id, broker_name)

        self._clients.on_broker_up(broker_name, joined)

    def leave_all(self) -> None:
        """Have all clients leave, as the service stops."""
        for timer in self._timers:
            timer.cancel()
        self._clients.leave_all()
        self._reports.flush()

    @property
    def clients(self) -> int:
        """Clients, with or without a connection."""
        return len(self._clients)

    @property
    def given_messages(self) -> int:
        """Messages that were given to clients."""
        return self._consuming.messages + self._pulling.messages

    @property
    def held_messages(self) -> int:
        """Messages that clients have without a report."""
        return self._leases.messages

    def knows(self, client_id: str) -> bool:
        """Return True if a client is one by gRPC."""
        return self._clients.find(client_id) is not None

    def rows(self, user: str, now_ms: int) -> dict[str, Callable[[], GatewayClient]]:
        """Return what makes the row of each client in a list for administrators.

        Args:
            user: Access key of the clients; "" for none.
            now_ms: Monotonic clock.
        """
        return {one.client_id: partial(one.row, user, now_ms) for one in self._clients.all()}

    def _left(self, client: GrpcClient) -> None:
        self._leases.client_left(client.client_id)

    def _replied(self, client: GrpcClient, reply: GrpcMessage) -> None:
        self.questions.on_reply(client, reply)
