"""Heartbeats, leaving, and who the members of a group are."""

from collections.abc import Callable, Mapping

from mqmesh.errors import GroupNotFound, NoPermission
from mqmesh.metrics import gauge
from mqmesh.protocol.command import EMPTY_REPLY, Reply, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import check_client_group
from mqmesh.protocol.membership import (
    ConsumerData,
    ConsumerIdsChanged,
    ConsumerList,
    ConsumerListRequest,
    HeartbeatRequest,
    HeartbeatResponse,
    UnregisterClientRequest,
)
from mqmesh.protocol.request import Peer, Request
from mqmesh.roles.broker.auto_creation import AutoCreation
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.group_state.consumer_groups import (
    ConsumerGroups,
    check_heartbeat,
)
from mqmesh.roles.broker.group_state.group_table import GroupTable
from mqmesh.roles.broker.group_state.queue_locks import QueueLocks
from mqmesh.roles.broker.group_state.used_groups import UsedGroups
from mqmesh.roles.dispatch import Handler


class MembershipFeature(Feature):
    """Members of consumer and producer groups: heartbeats, leaving, lists of members."""

    works_at_followers = True

    def __init__(
        self,
        core: Core,
        groups: ConsumerGroups,
        group_table: GroupTable,
        locks: QueueLocks,
        auto_creation: AutoCreation,
        used: UsedGroups,
        on_subscriptions: Callable[[ConsumerData], None],
    ) -> None:
        self._clock = core.clock
        self._instance_id = core.instance_id
        self._groups = groups
        self._group_table = group_table
        self._locks = locks
        self._auto_creation = auto_creation
        self._used = used
        self._on_subscriptions = on_subscriptions

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {
            RequestCode.HEART_BEAT: self.heart_beat,
            RequestCode.UNREGISTER_CLIENT: self.unregister_client,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: self.get_consumer_list,
        }

    def tick(self, now_ms: int) -> None:
        """Forget clients that were silent for too long."""
        self._groups.tick(now_ms)

    def client_gone(self, peer: Peer, now_ms: int) -> None:
        """Mark a client as lost."""
        self._groups.on_disconnect(peer, now_ms)
        self._auto_creation.forget(peer)

    def topic_deleted(self, topic: str) -> None:
        """Forget the owners of a topic's queues."""
        self._groups.claims.remove_topic(topic)

    def group_deleted(self, group: str) -> None:
        """Forget the owners of a group's queues."""
        self._groups.claims.forget_group(group)

    def heart_beat(self, request: Request, heartbeat: HeartbeatRequest) -> HeartbeatResponse:
        """A client says that it is there, and what it belongs to.

        Raises:
            NoPermission: A client of another namespace has this id.
        """
        check_heartbeat(heartbeat)
        client_id = heartbeat.client_id
        if self._groups.is_of_others(client_id, request.peer.principal.namespace):
            raise NoPermission(
                f"client id {client_id!r} is that of a client of another namespace; this one needs "
                "another instance_name"
            )
        for data in heartbeat.consumers:
            self._used.note(request, data.group, data.delivery)
        self._groups.on_heartbeat(request.peer, heartbeat, self._clock.monotonic_ms())
        for data in heartbeat.consumers:
            self._on_subscriptions(data)
        groups = self._groups
        return HeartbeatResponse(
            self._instance_id, groups.memberships(client_id), groups.warnings(client_id)
        )

    def unregister_client(self, request: Request, leaving: UnregisterClientRequest) -> Reply:
        """A client leaves all its groups; leaving twice does no harm.

        Nothing happens if its heartbeats come by another connection: a gateway says so late of one
        that came back by another gateway. Nor does it for a client of another namespace.
        """
        if self._groups.is_of_others(leaving.client_id, request.peer.principal.namespace):
            return EMPTY_REPLY
        if self._groups.peer_of(leaving.client_id) not in (None, request.peer):
            return EMPTY_REPLY
        self._locks.on_leave(leaving.client_id, request.peer)
        self._groups.on_unregister(leaving.client_id)
        return EMPTY_REPLY

    def get_consumer_list(self, request: Request, query: ConsumerListRequest) -> ConsumerList:
        """The members of a group, as this broker sees them.

        Raises:
            GroupNotFound: None is registered here; not the same as "you are alone". Or this master
                was just elected without copies and does not know them all yet: what each has it
                keeps so long.
        """
        check_client_group(query.group)
        if self._clock.monotonic_ms() < self._groups.settled_ms:
            raise GroupNotFound(f"members of consumer group {query.group!r} are still coming back")
        group = self._groups.group(query.group)
        return ConsumerList(
            sorted(group.members), group.generation, self._groups.owners(query.group)
        )

    def send_notices(self) -> None:
        """Notify the members of changed groups; the end of each tick."""
        for notice in self._groups.take_notices():
            config = self._group_table.get(notice.group)
            if config is not None and not config.notify_consumer_ids_changed_enable:
                continue
            header = encode_header(ConsumerIdsChanged(notice.group, notice.generation))
            notice.peer.notify(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, header)

    metrics = (
        gauge(
            "clients", "clients that are registered", lambda feature: feature._groups.client_count
        ),
        gauge(
            "consumer_groups",
            "consumer groups with members",
            lambda feature: feature._groups.group_count,
        ),
        gauge(
            "producer_connections",
            "clients of producer groups",
            lambda feature: feature._groups.producer_counts,
            labels=("language", "version"),
            rocketmq_name="rocketmq_producer_connections",
        ),
    )
