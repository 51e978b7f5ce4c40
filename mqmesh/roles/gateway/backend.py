"""Handlers of clients' requests, which act at brokers with the keys of one user."""

import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mqmesh.clock import Clock
from mqmesh.errors import ClientClosed, CorruptBatch, ProtocolError
from mqmesh.producer_key import new_key
from mqmesh.protocol.command import Command
from mqmesh.protocol.commands import RequestCode
from mqmesh.roles.gateway.admin.brokers import BrokerJobs
from mqmesh.roles.gateway.admin.clients import ClientJobs
from mqmesh.roles.gateway.admin.groups import GroupJobs
from mqmesh.roles.gateway.admin.jobs import job_handler
from mqmesh.roles.gateway.admin.namesrv import NamesrvJobs
from mqmesh.roles.gateway.admin.topics import TopicJobs
from mqmesh.roles.gateway.config import GatewayConfig
from mqmesh.roles.gateway.consuming import Consuming, PullCache
from mqmesh.roles.gateway.members import GatewayMembers
from mqmesh.roles.gateway.ports import BrokerPorts
from mqmesh.roles.gateway.producing import Producing
from mqmesh.roles.gateway.queries import Queries
from mqmesh.roles.gateway.replies import GatewayReplies
from mqmesh.roles.gateway.routing import Routing
from mqmesh.roles.gateway.send_backs import GatewaySendBacks
from mqmesh.roles.gateway.sends import MAX_REQUESTS_IN_FLIGHT, Sends
from mqmesh.roles.gateway.session import Handler
from mqmesh.roles.gateway.transactions import GatewayTransactions
from mqmesh.roles.gateway.upstream import Upstream
from mqmesh.sdk.client.options import born_host
from mqmesh.sdk.client.outbox import RequestOutbox

if TYPE_CHECKING:
    # It needs packages of an extra.
    from mqmesh.roles.gateway.grpc.service import GrpcService

STOPPING: Final = "the gateway stops"

OnCommand = Callable[[str, Command], None]
"""Taker of commands that a broker sends by itself, with the broker's name."""
OnBroker = Callable[[str, bool], None]
"""Listener to connections to brokers that are made (True) and broken (False)."""

_log = logging.getLogger(__name__)


class GatewayBackend:
    """Handlers of one user's clients, with connections of their own to brokers.

    Args:
        config: Settings.
        connect: Makes the way to the brokers, whose keys are the user's. Called with what takes
            commands of brokers, and what is notified of their connections.
        clock: Source of time.
        ports: Addresses of broker groups.
        chance: Source of chance for keys and ids.

    Attributes:
        handlers: Handlers by request code.
        members: Clients at broker groups.
        sends: Sends to brokers.
        cache: Messages that pulls left.
        consuming: Handlers of consumers.
        transactions: Half messages.
        upstream: Way to the brokers.
        key: Key of the gateway as a producer.
        grpc: Serves clients by gRPC with the same keys; None for none.
    """

    def __init__(
        self,
        config: GatewayConfig,
        connect: Callable[[OnCommand, OnBroker], Upstream],
        clock: Clock,
        ports: BrokerPorts,
        chance: random.Random,
    ) -> None:
        self.grpc: GrpcService | None = None
        self.upstream = upstream = connect(self._take_command, self._broker_changed)
        self.members = GatewayMembers(upstream, config.max_connections)
        self.key = key = new_key(chance)
        self.sends = Sends(
            lambda source: RequestOutbox(upstream, source, MAX_REQUESTS_IN_FLIGHT),
            clock,
            key,
            born_host(),
            upstream.brokers.follow,
            config.max_waiting_bytes,
        )
        self.cache = PullCache(config.pull_cache_bytes, clock.monotonic_ms)
        self.consuming = Consuming(upstream, self.members, ports, self.cache)
        self.transactions = GatewayTransactions(
            upstream, self.members, ports, self.sends.producer_id, key
        )
        send_backs = GatewaySendBacks(upstream)
        producing = Producing(upstream, self.sends, ports, self.transactions, send_backs, clock)
        routing = Routing(upstream, ports, lambda group: bool(self.members.consumers(group)))
        self._clients = ClientJobs(upstream, self.members, ports)
        self._replies = GatewayReplies(upstream, self.members, ports, clock, chance)
        jobs = {
            **NamesrvJobs(ports).jobs(),
            **TopicJobs().jobs(),
            **GroupJobs(self.members.address_of, ports.address, clock.wall_ms).jobs(),
            **BrokerJobs(clock.wall_ms).jobs(),
            **self._clients.jobs(),
        }
        self.handlers: dict[int, Handler] = {
            **routing.handlers(),
            **producing.handlers(),
            **self.consuming.handlers(),
            **self.members.handlers(),
            **self.transactions.handlers(),
            **send_backs.handlers(),
            **self._replies.handlers(),
            **Queries(upstream, ports).handlers(),
            **{code: job_handler(upstream, handle) for code, handle in jobs.items()},
        }

    @property
    def given_messages(self) -> int:
        """Messages that were given to clients."""
        return self.consuming.messages + (self.grpc.given_messages if self.grpc else 0)

    def start(self) -> None:
        """Connect to a name server, and begin to look for broker groups."""
        self.upstream.start()

    def stop(self) -> None:
        """End what is under way, have the clients leave, and close all connections to brokers."""
        stopping = ClientClosed(STOPPING)
        self.sends.close(stopping)
        self.transactions.close(stopping)
        self.upstream.close(self._leave_all)

    def _leave_all(self) -> None:
        self.members.leave_all()
        if self.grpc is not None:
            self.grpc.leave_all()

    def _take_command(self, broker_name: str, command: Command) -> None:
        try:
            if command.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED:
                self.members.on_changed(broker_name, command)
            elif command.code == RequestCode.CHECK_TRANSACTION_STATE:
                if self.grpc is None or not self.grpc.on_check(broker_name, command):
                    self.transactions.on_check(broker_name, command)
            elif command.code == RequestCode.RESET_CONSUMER_CLIENT_OFFSET:
                self._clients.on_reset(broker_name, command)
            elif command.code == RequestCode.ASK_CLIENT:
                self._clients.on_ask(broker_name, command, self.grpc)
            elif command.code == RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
                self._replies.on_push(broker_name, command)
        except (ProtocolError, CorruptBatch) as error:
            _log.warning("broker %s cannot be understood: %s", broker_name, error)

    def _broker_changed(self, broker_name: str, up: bool) -> None:
        self.cache.drop_broker(broker_name)
        if up:
            self.members.on_broker_up(broker_name)
            if self.grpc is not None:
                self.grpc.on_broker_up(broker_name)
