"""Consumer groups, their members, and the clients that are connected.

Pure: callers report heartbeats, broken connections and the time. Clients to
notify of changed members are gathered until ``take_notices``, so a thousand
members that come at once are notified once, not a thousand times.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from mqmesh.errors import GroupNotFound, InvalidArgument, StaleGeneration, SystemBusy
from mqmesh.filtering.python_filter import check_filter_id
from mqmesh.message import check_topic
from mqmesh.namespaces import is_within
from mqmesh.protocol.delivery import DeliveryMode
from mqmesh.protocol.groups import check_client_group
from mqmesh.protocol.membership import (
    ConsumeFromWhere,
    ConsumerData,
    HeartbeatRequest,
    Membership,
    MessageModel,
    TopicConsumption,
)
from mqmesh.protocol.pulling import ExpressionType
from mqmesh.protocol.request import Peer
from mqmesh.roles.broker.group_state.queue_ownership import (
    NO_GENERATION,
    QueueOwnership,
)
from mqmesh.roles.broker.group_state.subscription_check import (
    SubscriptionCheck,
)
from mqmesh.roles.broker.reading.pull_filter import pull_filter

MAX_CLIENT_ID_LENGTH: Final = 255

_log = logging.getLogger(__name__)


class GroupClient(msgspec.Struct):
    """One registered client.

    Attributes:
        peer: Its connection; None for one that has not come back since the election.
        heartbeat: Its last heartbeat, without statistics.
        last_seen_ms: Time of the last heartbeat, monotonic.
        lost_at_ms: When its connection broke; None while it stands.
        stats: Statistics of its consumers in the last heartbeat.
    """

    peer: Peer | None
    heartbeat: HeartbeatRequest
    last_seen_ms: int
    lost_at_ms: int | None = None
    stats: list[TopicConsumption] = []

    def is_of(self, namespace: str) -> bool:
        """Return True for a client with a group of a namespace, or whose user is confined to it."""
        if self.peer is not None and self.peer.principal.namespace == namespace:
            return True
        beat = self.heartbeat
        groups = [*beat.producer_groups, *(data.group for data in beat.consumers)]
        return any(is_within(namespace, one) for one in groups)


class Group(msgspec.Struct):
    """One consumer group with at least one member.

    Attributes:
        generation: Grows whenever its members change.
        members: Last heartbeat of each member about the group, by client id.
        joined: Generation that the coming of each member made.
        check: Whether they subscribe alike.
        divided: Generation that was last asked for, and the owners of queues then.
        ends: Where members acknowledge each message: ends of the queues of each topic when the
            first of them subscribed to it; none if it was not there.
    """

    generation: int
    members: dict[str, ConsumerData]
    joined: dict[str, int]
    check: SubscriptionCheck = msgspec.field(default_factory=SubscriptionCheck)
    divided: tuple[int, dict[str, list[int]]] = (-1, {})
    ends: dict[str, list[int]] = {}

    def forget_ends(self) -> None:
        """Forget the ends of topics that no member names any more."""
        named = {one.topic for data in self.members.values() for one in data.subscriptions}
        for topic in self.ends.keys() - named:
            del self.ends[topic]


class Notice(msgspec.Struct, frozen=True):
    """Notice for a member that its group changed.

    Attributes:
        peer: Connection of the member.
        group: Consumer group.
        generation: Of the group now.
    """

    peer: Peer
    group: str
    generation: int


class ConsumerGroups:
    """Clients and groups of one broker.

    Args:
        grace_ms: How long a client whose connection broke stays a member.
        expiry_ms: How long a silent client stays one.
        most_clients: Clients allowed.
        first_generation: Below every generation to come, above all of earlier epochs, so
            that a member never takes an old one for a new one.
        busy_retry_after_ms: Retry delay of clients when there are too many.

    Attributes:
        settled_ms: Monotonic time until which members of before are still coming back.
        changed: Groups whose members get a notice.
        returned: Clients that get one of each of their groups, by id.
        claims: Which member was given which queue.
        on_member: Called with group and client id when a member came, changed or left.
    """

    def __init__(
        self,
        *,
        grace_ms: int,
        expiry_ms: int,
        most_clients: int,
        first_generation: int = 0,
        busy_retry_after_ms: int = 100,
    ) -> None:
        self.settled_ms = 0
        self._grace_ms = grace_ms
        self._expiry_ms = expiry_ms
        self._most_clients = most_clients
        self._busy_retry_after_ms = busy_retry_after_ms
        self.claims = QueueOwnership()
        self.on_member: Callable[[str, str], None] = _ignore_member
        self._generation = first_generation
        self._clients: dict[str, GroupClient] = {}
        self._groups: dict[str, Group] = {}
        self._clients_of_peer: dict[Peer, set[str]] = {}
        self._lost: dict[str, None] = {}
        self.changed: dict[str, None] = {}
        self.returned: dict[str, None] = {}
        self._next_expiry_ms = 0

    @property
    def client_count(self) -> int:
        """Clients registered."""
        return len(self._clients)

    @property
    def group_count(self) -> int:
        """Consumer groups with at least one member."""
        return len(self._groups)

    def client(self, client_id: str) -> GroupClient | None:
        """One client, or None."""
        return self._clients.get(client_id)

    def group(self, name: str) -> Group:
        """One group.

        Raises:
            GroupNotFound: No member of it is connected to this broker.
        """
        group = self._groups.get(name)
        if group is None:
            raise GroupNotFound(f"no member of consumer group {name[:300]!r} is registered here")
        return group

    def peer_of(self, client_id: str) -> Peer | None:
        """Return the connection by which a client's heartbeats come; None if it has none now."""
        client = self._clients.get(client_id)
        return None if client is None or client.lost_at_ms is not None else client.peer

    def is_of_others(self, client_id: str, namespace: str) -> bool:
        """Return whether a client id is held by a client of a user of another namespace.

        Args:
            client_id: Any that a request names.
            namespace: Of the user that asks; "" for one that is confined to none.
        """
        client = self._clients.get(client_id)
        if client is None:
            return False
        if client.peer is not None:
            return client.peer.principal.namespace != namespace
        # It has not come back since the election: only its groups say whose it is.
        return not all(is_within(namespace, data.group) for data in client.heartbeat.consumers)

    def require_member(self, name: str, client_id: str, generation: int | None = None) -> Group:
        """The group of one of its members.

        Args:
            name: Consumer group.
            client_id: The member.
            generation: Generation that the member knows, ``NO_GENERATION`` if none; None for no
                check.

        Raises:
            StaleGeneration: It is no member, or became one after that generation: it was
                removed in between, and others have its queues.
        """
        group = self._groups.get(name)
        joined = None if group is None else group.joined.get(client_id)
        if group is None or joined is None:
            raise StaleGeneration(f"{client_id} is no member of consumer group {name!r} here")
        if generation is not None and NO_GENERATION < generation < joined:
            raise StaleGeneration(
                f"{client_id} was removed from consumer group {name!r} after generation "
                f"{generation}, and came back in {joined}"
            )
        return group

    def owners(self, name: str) -> dict[str, list[int]]:
        """Return the owners of a group's queues when its generation was first asked for.

        Returns:
            For each queue id of a topic the place of the owner among the sorted members, or -1.
            Nothing if a member divides queues by their numbers alone: then all have to.

        Raises:
            GroupNotFound: No member of it is connected to this broker.
        """
        group = self.group(name)
        if any(one.divides_by_number for one in group.members.values()):
            return {}
        if group.divided[0] != group.generation:
            places = {client_id: place for place, client_id in enumerate(sorted(group.members))}
            found: dict[str, list[int]] = {}
            for topic, queue_id, client_id in self.claims.of_group(name):
                owners = found.setdefault(topic, [])
                owners += [-1] * (queue_id + 1 - len(owners))
                owners[queue_id] = places.get(client_id, -1)
            group.divided = group.generation, found
        return group.divided[1]

    def memberships(self, client_id: str) -> list[Membership]:
        """Return a client's memberships in consumer groups."""
        client = self._clients.get(client_id)
        return [
            Membership(data.group, group.joined[client_id], group.generation)
            for data in (client.heartbeat.consumers if client is not None else ())
            if (group := self._groups.get(data.group)) is not None
        ]

    def find(self, name: str) -> Group | None:
        """One group, or None if no member of it is connected to this broker."""
        return self._groups.get(name)

    def model_of(self, name: str) -> str:
        """Message model of a group's first member, "" if it has none."""
        group = self._groups.get(name)
        first = None if group is None else next(iter(group.members.values()), None)
        return "" if first is None else first.message_model

    def names(self) -> list[str]:
        """Groups with members, in no order."""
        return list(self._groups)

    def peers(self, name: str) -> list[Peer]:
        """Connections of the members of a consumer group."""
        group = self._groups.get(name)
        members = () if group is None else group.members
        clients = [self._clients[client_id] for client_id in members]
        return [one.peer for one in clients if one.peer is not None and one.lost_at_ms is None]

    def clients(self, producer_group: str = "") -> list[GroupClient]:
        """All clients, or the members of a producer group, by client id."""
        return [
            self._clients[client_id]
            for client_id in sorted(self._clients)
            if not producer_group
            or producer_group in self._clients[client_id].heartbeat.producer_groups
        ]

    @property
    def producer_counts(self) -> dict[tuple[str, ...], int]:
        """Members of producer groups, by language and version of their clients."""
        found: Counter[tuple[str, ...]] = Counter()
        for client in self._clients.values():
            beat = client.heartbeat
            found[beat.language.lower(), beat.version] += len(beat.producer_groups)
        return found

    def warnings(self, client_id: str) -> list[str]:
        """Return warnings for a client about its groups, a sentence each."""
        client = self._clients.get(client_id)
        found = []
        for data in () if client is None else client.heartbeat.consumers:
            difference = self._groups[data.group].check.difference(client_id)
            if difference:
                found.append(_difference_text(data.group, client_id, difference))
        return found

    def producers(self, group: str) -> list[Peer]:
        """Connections of the members of a producer group."""
        return [
            client.peer
            for client in self._clients.values()
            if client.peer is not None
            and client.lost_at_ms is None
            and group in client.heartbeat.producer_groups
        ]

    def on_heartbeat(self, peer: Peer, heartbeat: HeartbeatRequest, now_ms: int) -> None:
        """A client says that it is there, and what it belongs to.

        Args:
            peer: Its connection.
            heartbeat: Checked by ``check_heartbeat``.
            now_ms: Monotonic clock.

        Raises:
            SystemBusy: There are too many clients.
        """
        client_id = heartbeat.client_id
        # Subscriptions seldom change, statistics always do, so statistics are kept apart.
        own = {(c.group, s.topic) for c in heartbeat.consumers for s in c.subscriptions}
        stats = [one for one in heartbeat.stats if (one.group, one.topic) in own]
        heartbeat = msgspec.structs.replace(heartbeat, stats=[])
        known = self._clients.get(client_id)
        if known is None:
            if len(self._clients) >= self._most_clients:
                raise SystemBusy(
                    f"{self._most_clients} clients are registered, no more may (max_clients)",
                    retry_after_ms=self._busy_retry_after_ms,
                )
            self._clients[client_id] = GroupClient(peer, heartbeat, now_ms, stats=stats)
            _log.info("client %s is there", client_id)
        else:
            if known.peer != peer:
                self._forget_peer(known.peer, client_id)
                # Notices may have missed it while it had no connection, or another one.
                self.returned[client_id] = None
            self._lost.pop(client_id, None)
            known.peer, known.last_seen_ms, known.lost_at_ms = peer, now_ms, None
            known.stats = stats
        self._clients_of_peer.setdefault(peer, set()).add(client_id)
        if known is not None and known.heartbeat == heartbeat:
            return
        self._enter_groups(client_id, heartbeat, known.heartbeat if known else None)
        self._clients[client_id].heartbeat = heartbeat

    def restore(
        self, members: Iterable[tuple[str, str, ConsumerData]], until_ms: int, now_ms: int
    ) -> None:
        """Restore members of an earlier epoch: each is one until it has had time to come back.

        Args:
            members: Group, client id, and its part of the group.
            until_ms: Monotonic time until which they may come back.
            now_ms: Monotonic clock.
        """
        self._generation += 1
        for name, client_id, data in members:
            client = self._clients.get(client_id)
            if client is None:
                lost_at_ms = until_ms - self._grace_ms
                client = GroupClient(None, HeartbeatRequest(client_id), now_ms, lost_at_ms)
                self._clients[client_id] = client
                self._lost[client_id] = None
            consumers = [*client.heartbeat.consumers, data]
            client.heartbeat = msgspec.structs.replace(client.heartbeat, consumers=consumers)
            group = self._groups.setdefault(name, Group(self._generation, {}, {}))
            group.members[client_id] = data
            group.joined[client_id] = self._generation
            group.check.note(client_id, data)

    def on_unregister(self, client_id: str) -> bool:
        """A client leaves; returns False if nobody knew it."""
        return self._remove(client_id, "left")

    def on_disconnect(self, peer: Peer, now_ms: int) -> None:
        """A connection broke; its clients stay members for the time of grace."""
        for client_id in self._clients_of_peer.pop(peer, ()):
            self._clients[client_id].lost_at_ms = now_ms
            self._lost[client_id] = None

    def tick(self, now_ms: int) -> None:
        """Removes those whose time of grace is over, or who were silent for too long."""
        # The lost stand in the order in which they were lost; behind those that have not come back
        # since the election.
        while self._lost:
            client_id = next(iter(self._lost))
            lost_at_ms = self._clients[client_id].lost_at_ms
            assert lost_at_ms is not None
            if now_ms < lost_at_ms + self._grace_ms:
                break
            self._remove(client_id, "lost its connection")
        if now_ms < self._next_expiry_ms:
            return
        self._next_expiry_ms = now_ms + self._expiry_ms // 12
        silent = [
            client_id
            for client_id, client in self._clients.items()
            if now_ms - client.last_seen_ms >= self._expiry_ms
        ]
        for client_id in silent:
            self._remove(client_id, "was silent for too long")

    def take_notices(self) -> list[Notice]:
        """Take the notices of changes since the last call, for all members that are connected."""
        owed: dict[tuple[str, str], None] = {}
        for name in self.changed:
            group = self._groups.get(name)
            if group is not None:
                owed.update(dict.fromkeys((client_id, name) for client_id in group.members))
        for client_id in self.returned:
            if client_id in self._clients:
                consumers = self._clients[client_id].heartbeat.consumers
                owed.update(dict.fromkeys((client_id, data.group) for data in consumers))
        self.changed.clear()
        self.returned.clear()
        return [
            Notice(client.peer, name, self._groups[name].generation)
            for client, name in ((self._clients[client_id], name) for client_id, name in owed)
            if client.peer is not None and client.lost_at_ms is None
        ]

    def _enter_groups(
        self, client_id: str, heartbeat: HeartbeatRequest, before: HeartbeatRequest | None
    ) -> None:
        wanted = {data.group: data for data in heartbeat.consumers}
        for data in () if before is None else before.consumers:
            if data.group not in wanted:
                self._leave_group(client_id, data.group)
        for name, data in wanted.items():
            group = self._groups.setdefault(name, Group(0, {}, {}))
            is_new = client_id not in group.members
            if is_new or group.members[client_id] != data:
                self.on_member(name, client_id)
            group.members[client_id] = data
            group.check.note(client_id, data)
            difference = group.check.difference(client_id)
            if difference:
                _log.warning("%s", _difference_text(name, client_id, difference))
            if is_new:
                self._note_change(name, group)
                group.joined[client_id] = group.generation

    def _leave_group(self, client_id: str, name: str) -> None:
        group = self._groups[name]
        del group.members[client_id]
        del group.joined[client_id]
        group.check.drop(client_id)
        self.on_member(name, client_id)
        if group.members:
            self._note_change(name, group)
        else:
            del self._groups[name]

    def _note_change(self, name: str, group: Group) -> None:
        self._generation += 1
        group.generation = self._generation
        self.changed[name] = None

    def _remove(self, client_id: str, why: str) -> bool:
        client = self._clients.pop(client_id, None)
        if client is None:
            return False
        _log.info("client %s %s", client_id, why)
        self._lost.pop(client_id, None)
        self._forget_peer(client.peer, client_id)
        for data in client.heartbeat.consumers:
            self._leave_group(client_id, data.group)
        return True

    def _forget_peer(self, peer: Peer | None, client_id: str) -> None:
        client_ids = None if peer is None else self._clients_of_peer.get(peer)
        if client_ids is not None and peer is not None:
            client_ids.discard(client_id)
            if not client_ids:
                del self._clients_of_peer[peer]


def check_heartbeat(heartbeat: HeartbeatRequest) -> None:
    """Checks what a client says of itself, before anything of it is believed.

    Raises:
        InvalidArgument: A name, model or expression that makes no sense, with its place.
        UnsupportedCommand: An expression language that this broker does not know.
    """
    if not 0 < len(heartbeat.client_id) <= MAX_CLIENT_ID_LENGTH:
        raise InvalidArgument(f"a client id has 1 to {MAX_CLIENT_ID_LENGTH} characters")
    for name in heartbeat.producer_groups:
        check_client_group(name)
    for data in heartbeat.consumers:
        check_client_group(data.group)
        if data.message_model not in tuple(MessageModel):
            raise InvalidArgument(
                f"group {data.group!r}: message model {data.message_model!r} is none of "
                f"{', '.join(MessageModel)}"
            )
        if data.consume_from_where not in tuple(ConsumeFromWhere):
            raise InvalidArgument(
                f"group {data.group!r}: consume_from_where {data.consume_from_where!r} is none "
                f"of {', '.join(ConsumeFromWhere)}"
            )
        if data.delivery not in tuple(DeliveryMode):
            raise InvalidArgument(
                f"group {data.group!r}: delivery {data.delivery!r} is none of "
                f"{', '.join(DeliveryMode)}"
            )
        for subscription in data.subscriptions:
            check_topic(subscription.topic)
            if subscription.expression_type == ExpressionType.PYTHON:
                check_filter_id(subscription.expression)
            else:
                pull_filter(subscription.expression, subscription.expression_type)
    if len({data.group for data in heartbeat.consumers}) != len(heartbeat.consumers):
        raise InvalidArgument("a heartbeat names a consumer group twice")


def _difference_text(name: str, client_id: str, difference: str) -> str:
    return (
        f"consumer group {name}: member {client_id} subscribes differently from the group and "
        f"will miss messages: {difference}"
    )


def _ignore_member(group: str, client_id: str) -> None:
    """Ignore that a member came or left, where members are not kept."""


GROUPS_SETTLE_MS: Final = 1_500
"""After an election without copies no group is divided anew for so long: its members come one after
the other."""
