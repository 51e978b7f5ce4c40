"""Heartbeats, leaving, and who the members of a group are."""

from mqmesh.errors import GroupNotFound
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import (
    EMPTY_REPLY,
    Reply,
    Request,
    encode_header,
    reply_with,
)
from mqmesh.protocol.groups import check_client_group
from mqmesh.protocol.membership import (
    ConsumerIdsChanged,
    ConsumerList,
    ConsumerListRequest,
    HeartbeatRequest,
    HeartbeatResponse,
    UnregisterClientRequest,
)
from mqmesh.roles.broker.auto_creation import client_of
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.features.groups.consumer_groups import check_heartbeat


def note_used(context: BrokerContext, request: Request, group: str) -> None:
    """A client uses a group: gives it settings if it has none.

    Raises:
        GroupNotFound: Groups get no settings by themselves.
        SystemBusy: There are too many groups, or this client made too many.
    """
    if not context.group_table.makes(group):
        context.group_table.note_used(group)
        return
    client, now_ms = client_of(request), context.clock.monotonic_ms()
    context.auto_creation.groups.check(client, now_ms)
    context.group_table.note_used(group)
    context.auto_creation.groups.note(client, now_ms)


def heart_beat(context: BrokerContext, request: Request, heartbeat: HeartbeatRequest) -> Reply:
    """A client says that it is there, and what it belongs to."""
    check_heartbeat(heartbeat)
    for data in heartbeat.consumers:
        note_used(context, request, data.group)
    context.groups.on_heartbeat(request.peer, heartbeat, context.clock.monotonic_ms())
    groups, client_id = context.groups, heartbeat.client_id
    return reply_with(
        HeartbeatResponse(
            context.instance_id, groups.memberships(client_id), groups.warnings(client_id)
        )
    )


def unregister_client(
    context: BrokerContext, request: Request, leaving: UnregisterClientRequest
) -> Reply:
    """A client leaves all its groups; leaving twice does no harm."""
    context.locks.on_leave(leaving.client_id, request.peer)
    context.groups.on_unregister(leaving.client_id)
    return EMPTY_REPLY


def get_consumer_list(
    context: BrokerContext, request: Request, query: ConsumerListRequest
) -> Reply:
    """The members of a group, as this broker sees them.

    Raises:
        GroupNotFound: None is registered here; not the same as "you are alone". Or this master
            was just elected and does not know them all yet: what each has it keeps so long.
    """
    check_client_group(query.group)
    if context.clock.monotonic_ms() < context.groups.settled_ms:
        raise GroupNotFound(f"members of consumer group {query.group!r} are still coming back")
    group = context.groups.group(query.group)
    return reply_with(ConsumerList(sorted(group.members), group.generation))


def send_notices(context: BrokerContext) -> None:
    """Tells members of changed groups; the end of each tick."""
    for notice in context.groups.take_notices():
        config = context.group_table.get(notice.group)
        if config is not None and not config.notify_consumer_ids_changed_enable:
            continue
        header = encode_header(ConsumerIdsChanged(notice.group, notice.generation))
        context.wire.notify(notice.peer, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, header)
