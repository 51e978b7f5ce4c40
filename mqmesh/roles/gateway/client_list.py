"""List of the clients of a gateway, for administrators. Pure."""

from collections.abc import Callable, Iterable

from mqmesh.namespaces import is_within
from mqmesh.protocol.command import encode_header
from mqmesh.protocol.gateway import (
    MAX_ANSWER_BYTES,
    MAX_GATEWAY_CLIENTS,
    GatewayClient,
    GatewayClients,
    GatewayClientsRequest,
    shown_names,
)
from mqmesh.protocol.names import NameKind, names_in, renamed
from mqmesh.roles.gateway.backend import GatewayBackend
from mqmesh.roles.gateway.members import GatewayMember


def list_clients(
    query: GatewayClientsRequest,
    backends: Iterable[tuple[str, GatewayBackend]],
    now_ms: int,
    namespace: str = "",
) -> GatewayClients:
    """Return a page of the clients.

    Args:
        query: Request with the beginning of the list.
        backends: User and backend; "" for anonymous clients.
        now_ms: Monotonic clock.
        namespace: Only clients with names in this namespace, and only those names; "" for all.
    """

    def own(kind: NameKind, name: str) -> str | None:
        return name if is_within(namespace, name) else None

    found: dict[tuple[str, str], Callable[[], GatewayClient]] = {}
    members: dict[tuple[str, str], list[GatewayMember]] = {}
    for user, backend in backends:
        for member in backend.members.all():
            if member.is_known:  # its heartbeat was checked
                members.setdefault((member.client_id, user), []).append(member)
        if backend.grpc is not None:
            found |= {
                (client_id, user): row for client_id, row in backend.grpc.rows(user, now_ms).items()
            }
    after = (query.after_client_id, query.after_user)
    keys = sorted(key for key in {*found, *members} if key > after)
    page: list[GatewayClient] = []
    looked_at = size = 0
    for key in keys:
        if len(page) == MAX_GATEWAY_CLIENTS or size > MAX_ANSWER_BYTES:
            break
        looked_at += 1
        row = _member_row(*key, members[key], now_ms) if key in members else found[key]()
        if namespace:
            row = renamed(row, own)
            if not names_in(row):
                continue
        page.append(row)
        size += len(encode_header(row))
    return GatewayClients(page, len(keys) > looked_at)


def _member_row(
    client_id: str, user: str, members: list[GatewayMember], now_ms: int
) -> GatewayClient:
    """Return the row of a client by remoting, which is a member at several broker groups."""
    newest = max(members, key=lambda one: one.session.last_seen_ms)
    connected = [one for one in members if not one.session.is_closed]
    consumers = [one for member in members for one in member.heartbeat.consumers]
    return GatewayClient(
        client_id,
        user,
        "remoting",
        newest.session.peer if connected else "",
        newest.heartbeat.language,
        newest.heartbeat.version,
        bool(connected),
        now_ms - newest.session.last_seen_ms,
        shown_names({group for member in members for group in member.heartbeat.producer_groups}),
        shown_names({one.group for one in consumers}),
        shown_names({one.topic for consumer in consumers for one in consumer.subscriptions}),
        sorted(member.broker_name for member in members),
    )
