"""Members of groups and their connections, for administrators."""

from collections.abc import Iterable, Mapping

from mqmesh.namespaces import is_within
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import (
    MAX_CLIENTS_PER_ANSWER,
    AllClients,
    AllClientsRequest,
    ClientInfo,
    ConsumerConnection,
    ConsumerConnections,
    ConsumerConnectionsRequest,
    GroupFailures,
    ProducerConnection,
    ProducerConnections,
    ProducerConnectionsRequest,
    check_client_group,
)
from mqmesh.protocol.request import Request
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups, GroupClient
from mqmesh.roles.dispatch import Handler


class ConnectionsFeature(Feature):
    """Members of groups and their connections, for administrators."""

    def __init__(self, core: Core, groups: ConsumerGroups) -> None:
        self._clock = core.clock
        self._groups = groups

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {
            RequestCode.GET_CONSUMER_CONNECTION_LIST: self.get_consumer_connections,
            RequestCode.GET_PRODUCER_CONNECTION_LIST: self.get_producer_connections,
            RequestCode.GET_ALL_CLIENTS: self.get_all_clients,
        }

    def get_consumer_connections(
        self, request: Request, query: ConsumerConnectionsRequest
    ) -> ConsumerConnections:
        """The members of a group, and how each differs from it."""
        name = check_client_group(query.group)
        generation = self._groups.group(name).generation
        return ConsumerConnections(
            connections_of(self._groups, name, self._clock.monotonic_ms()), generation
        )

    def get_producer_connections(
        self, request: Request, query: ProducerConnectionsRequest
    ) -> ProducerConnections:
        """The members of a producer group."""
        check_client_group(query.group)
        now_ms = self._clock.monotonic_ms()
        clients = self._groups.clients(query.group)
        return ProducerConnections(
            [ProducerConnection(*_connection(one, now_ms)) for one in clients]
        )

    def get_all_clients(self, request: Request, query: AllClientsRequest) -> AllClients:
        """Everybody who is registered, in pages."""
        namespace = request.peer.principal.namespace or query.namespace
        now_ms, after = self._clock.monotonic_ms(), query.after_client_id
        clients = [
            one
            for one in self._groups.clients()
            if one.heartbeat.client_id > after and (not namespace or one.is_of(namespace))
        ]
        found = [
            ClientInfo(
                *_connection(one, now_ms),
                _within(namespace, one.heartbeat.producer_groups),
                _within(namespace, (data.group for data in one.heartbeat.consumers)),
            )
            for one in clients[:MAX_CLIENTS_PER_ANSWER]
        ]
        return AllClients(found, len(found) < len(clients))


def connections_of(groups: ConsumerGroups, name: str, now_ms: int) -> list[ConsumerConnection]:
    """The members of a group, by client id; none if it has none."""
    group = groups.find(name)
    if group is None:
        return []
    members = []
    for client_id in sorted(group.members):
        client = groups.client(client_id)
        assert client is not None
        members.append(
            ConsumerConnection(
                *_connection(client, now_ms),
                group.members[client_id],
                group.check.difference(client_id),
                [one for one in client.stats if one.group == name],
            )
        )
    return members


def failures_of(members: Iterable[ConsumerConnection]) -> GroupFailures:
    """Return what the members of a group did in the last ten minutes, as of their heartbeats."""
    ok = failed = 0
    per_s = 0.0
    for member in members:
        for one in member.stats:
            ok += one.recent_ok
            failed += one.recent_failed
            per_s += one.recent_failed * 1_000 / max(one.recent_ms, 1)
    return GroupFailures(ok + failed, failed, per_s)


def _within(namespace: str, groups: Iterable[str]) -> list[str]:
    return sorted(one for one in groups if is_within(namespace, one))


def _connection(client: GroupClient, now_ms: int) -> tuple[str, str, str, bool, int]:
    beat = client.heartbeat
    silent_ms = max(now_ms - client.last_seen_ms, 0)
    return beat.client_id, beat.language, beat.version, client.lost_at_ms is None, silent_ms
