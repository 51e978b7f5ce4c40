"""Routes: which broker carries which topic, and which is gone. Pure: events in, effects out.

A broker process is a *member* of its broker group, known by its broker id. It is
in the table from its first REGISTER_BROKER until it unregisters, its connection
breaks, or it is silent for too long; ``instance_id`` distinguishes the lives of
a process. The topics of a group are those of its lowest member that has registered
them, which is the master while there is one.

A group without members is in no route. One thing stays behind: the queues of
ordered topics, because a key must go to the same queue while a broker is down.
They stay until the broker returns, or the topic is deleted at the name server.

The states and events are drawn in ``docs/state-machines.md``.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from mqmesh.errors import (
    BrokerError,
    InvalidArgument,
    NoPermission,
    StaleEpoch,
    SystemBusy,
    TopicNotFound,
)
from mqmesh.message import DLQ_PREFIX, RETRY_PREFIX, check_group, check_topic
from mqmesh.metrics import Measured, gauge
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.request import Peer
from mqmesh.protocol.route import (
    MAX_TOPICS_PER_BROKER,
    BrokerAddress,
    BrokerData,
    DataVersion,
    Perm,
    QueueData,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    TopicConfig,
    TopicQueues,
    TopicRoute,
    TopicRoutes,
    UnregisterBrokerRequest,
    WipeWritePermRequest,
    WipeWritePermResponse,
    check_address,
)
from mqmesh.roles.namesrv.effects import Announce, Effect, Persist

MASTER_ID: Final = 0
MAX_MEMBERS_PER_GROUP: Final = 64
MAX_HINT_TOPICS: Final = 256
"""Limit of topics in a hint; for more it names none, and every client queries its routes."""
MAX_ROUTE_QUEUES: Final = 50_000
"""Pairs of topic and broker group in one answer, about 2 MB; clients ask again for the rest."""
RETRY_AFTER_CONFLICT_MS: Final = 1_000

_Table = dict[str, TopicConfig]
_Changes = Mapping[str, tuple[TopicConfig | None, TopicConfig | None]]
"""Changes by topic: its former and its new state; None where it did or does not exist."""


class _Member(msgspec.Struct):
    address: BrokerAddress
    data_version: DataVersion
    instance_id: int
    perm: int
    peer: Peer
    last_seen_ms: int
    topics: _Table | None


class _BrokerGroup(msgspec.Struct):
    cluster_name: str
    members: dict[int, _Member]
    indexed: _Table
    """Topics of this group in the index of topics."""
    epoch: int = 0
    """The highest of its masters so far."""
    is_elected: bool = False
    """Its replicas elect their master."""


class OrderedTopics(msgspec.Struct, array_like=True, frozen=True):
    """Ordered topics of one broker group, as they are saved."""

    broker_name: str
    topics: list[TopicConfig]


class RouteTable:
    """Brokers, their topics, and the routes that follow.

    Args:
        broker_expire_ms: A member silent for so long is dropped.
        max_brokers: Limit of broker groups.
        max_topic_entries: Limit of the topics of all members together.
        drained: Broker groups without write permission, as saved.
        ordered: Ordered topics of groups that are not here yet, as saved.

    Attributes:
        broker_expire_ms: May be changed.
    """

    def __init__(
        self,
        *,
        broker_expire_ms: int,
        max_brokers: int,
        max_topic_entries: int,
        drained: Iterable[str] = (),
        ordered: Iterable[OrderedTopics] = (),
    ) -> None:
        self.broker_expire_ms = broker_expire_ms
        self._max_brokers = max_brokers
        self._max_topic_entries = max_topic_entries
        self._groups: dict[str, _BrokerGroup] = {}
        self._index: dict[str, dict[str, TopicConfig]] = {}
        self._keys_of_peer: dict[Peer, set[tuple[str, int]]] = {}
        self._drained = set(drained)
        self._absent: dict[str, _Table] = {}
        for one in ordered:
            self._keep(one.broker_name, {config.topic: config for config in one.topics})

    # ---- Events ----------------------------------------------------------------------

    def on_register(
        self, request: RegisterBrokerRequest, peer: Peer, now_ms: int
    ) -> tuple[RegisterBrokerResponse, list[Effect]]:
        """Takes a broker's heartbeat.

        Args:
            request: The heartbeat.
            peer: Connection that it came by.
            now_ms: Monotonic time.

        Raises:
            InvalidArgument: An illegal name, or an address that no client can connect to.
            NoPermission: Another live process has this broker name and id, or the group
                belongs to another cluster.
            StaleEpoch: A master of a later epoch was here.
            SystemBusy: A limit is reached.
        """
        name, broker_id = request.broker_name, request.broker_id
        group = self._groups.get(name)
        member = group.members.get(broker_id) if group is not None else None
        known = _known_table(request, member)
        topics = _table_of(request, member)
        self._check(request, peer, group, member, topics)
        if group is None:
            # The index still has the remains of an ordered topic.
            group = _BrokerGroup(request.cluster_name, {}, self._absent.pop(name, {}))
            self._groups[name] = group
        before = _appearance(group)
        version = request.data_version
        need_topics = False
        changes: _Changes = {}
        if topics is None:
            topics = known
            has_version = version if request.since is None else request.since
            if known is None or member is None or member.data_version != has_version:
                # The version is forgotten, not believed, until the topics have come.
                need_topics, version = True, DataVersion(-1, -1)
            elif request.since is not None:
                changes = _change(known, request)
        if member is not None:
            self._forget_peer(member.peer, (name, broker_id))
        self._keys_of_peer.setdefault(peer, set()).add((name, broker_id))
        group.cluster_name = request.cluster_name
        if broker_id == MASTER_ID:
            group.epoch, group.is_elected = request.epoch, request.is_elected
        group.members[broker_id] = _Member(
            request.address, version, request.instance_id, request.perm, peer, now_ms, topics
        )
        if topics is not _leading_table(group):
            changes = {}  # clients get the master's topics
        response = RegisterBrokerResponse(need_topics, name in self._drained)
        return response, self._changes(name, group, before, changes)

    def on_unregister(self, request: UnregisterBrokerRequest) -> list[Effect]:
        """Removes a broker that closes cleanly; another life of it changes nothing."""
        group = self._groups.get(request.broker_name)
        member = group.members.get(request.broker_id) if group is not None else None
        if member is None or member.instance_id != request.instance_id:
            return []
        return self._remove([(request.broker_name, request.broker_id)])

    def on_disconnect(self, peer: Peer) -> list[Effect]:
        """Removes the brokers that registered last by a connection that broke."""
        return self._remove(sorted(self._keys_of_peer.pop(peer, ())))

    def tick(self, now_ms: int) -> list[Effect]:
        """Drops brokers that were silent for ``broker_expire_ms``."""
        silent = [
            (name, broker_id)
            for name, group in self._groups.items()
            for broker_id, member in group.members.items()
            if now_ms - member.last_seen_ms >= self.broker_expire_ms
        ]
        return self._remove(silent)

    def on_delete_topic(self, topic: str) -> list[Effect]:
        """Forgets a topic; a broker that still has it brings it back with its next heartbeat."""
        entries = self._index.pop(topic, None)
        if entries is None:
            return []
        for name in entries:
            group = self._groups.get(name)
            if group is None:
                del self._absent[name][topic]
                if not self._absent[name]:
                    del self._absent[name]
                continue
            group.indexed = _without(group.indexed, topic)
            for member in group.members.values():
                if member.topics is not None and topic in member.topics:
                    member.topics = _without(member.topics, topic)
                    member.data_version = DataVersion(-1, -1)
        effects: list[Effect] = [Announce(frozenset(entries), frozenset((topic,)))]
        if any(config.order for config in entries.values()):
            effects.append(Persist())
        return effects

    def on_wipe_write_perm(
        self, request: WipeWritePermRequest
    ) -> tuple[WipeWritePermResponse, list[Effect]]:
        """Drains a broker group, or with ``restore`` ends that.

        Raises:
            BrokerError: With QUERY_NOT_FOUND, no broker has this name.
        """
        name = request.broker_name
        group = self._groups.get(name)
        drained = name in self._drained
        if group is None and not drained:
            known = ", ".join(sorted(self._groups)) or "none"
            raise BrokerError(
                f"no broker group {name[:255]!r}; there are {known}",
                code=ResponseCode.QUERY_NOT_FOUND,
            )
        topics = group.indexed if group is not None else {}
        response = WipeWritePermResponse(len(topics))
        if drained != request.restore:
            return response, []
        if request.restore:
            self._drained.discard(name)
        else:
            self._drained.add(name)
        return response, [*_announce(name, topics), Persist()]

    # ---- Answers ---------------------------------------------------------------------

    def route(self, topic: str, hint_endpoint: str) -> TopicRoute:
        """Return the route of a topic; costs in proportion to the brokers that carry it.

        Raises:
            TopicNotFound: No broker carries it.
        """
        found = self._queues(topic)
        if found is None:
            raise TopicNotFound(f"no topic {topic[:255]!r}{self._advice(topic)}")
        names = [data.broker_name for data in found.queues]
        return TopicRoute(topic, found.queues, self._named(names), hint_endpoint, found.order)

    def routes(self, topics: Iterable[str], hint_endpoint: str) -> TopicRoutes:
        """Return the routes of several topics; the rest is left out behind ``MAX_ROUTE_QUEUES``."""
        found: list[TopicQueues] = []
        missing: list[str] = []
        names: set[str] = set()
        size = 0
        for topic in topics:
            one = self._queues(topic)
            if one is None:
                missing.append(topic)
                continue
            found.append(one)
            names.update(data.broker_name for data in one.queues)
            size += len(one.queues)
            if size >= MAX_ROUTE_QUEUES:
                break
        return TopicRoutes(found, self._named(sorted(names)), missing, hint_endpoint)

    def brokers(self) -> list[BrokerData]:
        """Return all broker groups, by name."""
        return [_broker_data(name, group) for name, group in sorted(self._groups.items())]

    def topics(self) -> list[str]:
        """Names of all topics that have a route, sorted."""
        return sorted(self._index)

    def drained(self) -> list[str]:
        """Return the broker groups without write permission, to be saved."""
        return sorted(self._drained)

    def ordered(self) -> list[OrderedTopics]:
        """Return the ordered topics of every group, here or not, to be saved."""
        tables = {name: group.indexed for name, group in self._groups.items()} | self._absent
        kept = [
            OrderedTopics(name, [config for config in table.values() if config.order])
            for name, table in sorted(tables.items())
        ]
        return [one for one in kept if one.topics]

    # ---- Helpers ---------------------------------------------------------------------

    def _queues(self, topic: str) -> TopicQueues | None:
        entries = self._index.get(topic)
        if not entries:
            return None
        # Sorted, because producers of one key must see the queues in one order everywhere.
        queues = [
            QueueData(
                name,
                config.read_queue_nums,
                config.write_queue_nums,
                self._perm(name, self._groups.get(name), config),
                config.priorities,
            )
            for name, config in sorted(entries.items())
        ]
        return TopicQueues(topic, queues, any(config.order for config in entries.values()))

    def _named(self, names: Iterable[str]) -> list[BrokerData]:
        return [_broker_data(name, self._groups[name]) for name in names if name in self._groups]

    def _advice(self, topic: str) -> str:
        """Return advice about a topic that no broker carries."""
        if not self._groups:
            return ": no broker runs that this name server knows of"
        if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
            return ""  # users do not make them by hand
        return f" on a broker that runs; `mqmesh topic create {topic[:255]!r}` makes it"

    def _check(
        self,
        request: RegisterBrokerRequest,
        peer: Peer,
        group: _BrokerGroup | None,
        member: _Member | None,
        topics: _Table | None,
    ) -> None:
        check_group(request.broker_name)
        check_group(request.cluster_name)
        check_address(request.address)
        who = f"broker {request.broker_name!r} with id {request.broker_id}"
        newest = 0 if group is None else group.epoch
        if request.broker_id == MASTER_ID and request.epoch < newest:
            raise StaleEpoch(
                f"{who} is of epoch {request.epoch}; the group has had a master of epoch {newest}. "
                "Let this one follow (broker_id, ha.master_addr)"
            )
        is_newer = request.broker_id == MASTER_ID and request.epoch > newest
        if member is not None and member.instance_id != request.instance_id and not is_newer:
            # A process that died has no connection any more, so this one lives.
            if member.peer != peer:
                raise NoPermission(
                    f"{who} is another live process, at {member.address.tcp}; stop it, or give "
                    "this one another broker_name",
                    retry_after_ms=RETRY_AFTER_CONFLICT_MS,
                )
        if group is not None and group.cluster_name != request.cluster_name:
            if any(key != request.broker_id for key in group.members):
                raise NoPermission(
                    f"{who} says cluster {request.cluster_name!r}, its group is in "
                    f"{group.cluster_name!r}"
                )
        if group is None and len(self._groups) >= self._max_brokers:
            raise SystemBusy(f"no room for {who} (max_brokers = {self._max_brokers})")
        if group is not None and member is None and len(group.members) >= MAX_MEMBERS_PER_GROUP:
            raise SystemBusy(f"{who} is one too many; a group has {MAX_MEMBERS_PER_GROUP} members")
        if topics is not None or request.changed:
            known = (member.topics if member is not None else None) or {}
            new = sum(config.topic not in known for config in request.changed)
            self._check_room(who, len(known) + new if topics is None else len(topics), member)

    def _check_room(self, who: str, own: int, member: _Member | None) -> None:
        count = sum(
            len(one.topics or ())
            for group in self._groups.values()
            for one in group.members.values()
            if one is not member
        ) + sum(map(len, self._absent.values()))
        if count + own > self._max_topic_entries:
            raise SystemBusy(
                f"no room for the {own} topics of {who} beside {count} of others "
                f"(max_topic_entries = {self._max_topic_entries})"
            )
        if own > MAX_TOPICS_PER_BROKER:
            raise SystemBusy(f"{who} has {own} topics; at most {MAX_TOPICS_PER_BROKER} are taken")

    def _remove(self, keys: Iterable[tuple[str, int]]) -> list[Effect]:
        effects: list[Effect] = []
        for name, broker_id in keys:
            group = self._groups[name]
            before = _appearance(group)
            member = group.members.pop(broker_id)
            self._forget_peer(member.peer, (name, broker_id))
            if group.members:
                effects += self._changes(name, group, before)
            else:
                effects += self._vanish(name, group)
        return effects

    def _vanish(self, name: str, group: _BrokerGroup) -> list[Effect]:
        topics = group.indexed
        kept = {topic: config for topic, config in topics.items() if config.order}
        self._reindex(name, group, kept)
        del self._groups[name]
        effects = _announce(name, topics)
        if kept:
            if len(self._absent) >= self._max_brokers:
                self._forget_absent(next(iter(self._absent)))
                effects.append(Persist())
            self._absent[name] = kept
        return effects

    def _changes(
        self,
        name: str,
        group: _BrokerGroup,
        before: dict[int, tuple[BrokerAddress, int, bool]],
        changes: _Changes = MappingProxyType({}),
    ) -> list[Effect]:
        """Brings the index up to date; returns what clients must be notified of.

        Args:
            name: Broker group.
            group: The same.
            before: Appearance of the group before the event.
            changes: Topics that were changed within the table of one of its members.
        """
        old, leading = group.indexed, _leading_table(group)
        changed = self._reindex(name, group, leading)
        if leading is old:
            # Only what changed is looked at, however many topics there are.
            for topic, (_, config) in changes.items():
                if config is None:
                    self._drop_entry(topic, name)
                else:
                    self._index.setdefault(topic, {})[name] = config
            changed = list(changes)
        effects: list[Effect] = []
        if _appearance(group) != before:
            effects += _announce(name, old | group.indexed | dict.fromkeys(changes))
        else:
            effects += _announce(name, changed)
        is_ordered = any(
            _is_ordered(table, topic) for topic in changed for table in (old, group.indexed)
        )
        if is_ordered or any(
            one is not None and one.order for pair in changes.values() for one in pair
        ):
            effects.append(Persist())
        return effects

    def _reindex(self, name: str, group: _BrokerGroup, table: _Table | None) -> list[str]:
        """Makes the index hold ``table`` for a group; returns the topics that changed."""
        old = group.indexed
        if table is None or table is old:
            return []
        changed = [topic for topic, config in table.items() if old.get(topic) != config]
        for topic in changed:
            self._index.setdefault(topic, {})[name] = table[topic]
        gone = [topic for topic in old if topic not in table]
        for topic in gone:
            self._drop_entry(topic, name)
        group.indexed = table
        return changed + gone

    def _drop_entry(self, topic: str, name: str) -> None:
        entries = self._index[topic]
        del entries[name]
        if not entries:
            del self._index[topic]

    def _keep(self, name: str, table: _Table) -> None:
        self._absent[name] = table
        for topic, config in table.items():
            self._index.setdefault(topic, {})[name] = config

    def _forget_absent(self, name: str) -> None:
        for topic in self._absent.pop(name):
            self._drop_entry(topic, name)

    def _forget_peer(self, peer: Peer, key: tuple[str, int]) -> None:
        keys = self._keys_of_peer.get(peer)
        if keys is not None:
            keys.discard(key)
            if not keys:
                del self._keys_of_peer[peer]

    def _perm(self, name: str, group: _BrokerGroup | None, config: TopicConfig) -> int:
        perm = config.perm
        if group is not None:
            leader = group.members[min(group.members)]
            perm &= leader.perm
            # An ordered topic keeps its queues: a send to this one fails, but none moves.
            if MASTER_ID not in group.members and not config.order:
                perm &= ~Perm.WRITE
        if name in self._drained:
            perm &= ~Perm.WRITE
        return int(perm)


def _table_of(request: RegisterBrokerRequest, member: _Member | None) -> _Table | None:
    known = (member.topics if member is not None else None) or {}
    for config in request.changed:
        if config.topic not in known:
            check_topic(config.topic)
    if request.topics is None:
        return None
    table = {config.topic: config for config in request.topics}
    if len(table) != len(request.topics):
        raise InvalidArgument(
            f"broker {request.broker_name!r} names {len(request.topics) - len(table)} topics twice"
        )
    # Of ten thousand topics one may be new; the names of the others were checked before.
    for topic in table.keys() - known.keys():
        check_topic(topic)
    return table


def _known_table(request: RegisterBrokerRequest, member: _Member | None) -> _Table | None:
    """Return the topics that are known of this life of a broker."""
    if member is None or member.instance_id != request.instance_id:
        return None
    return member.topics


def _change(table: _Table, request: RegisterBrokerRequest) -> _Changes:
    """Makes a table what it is at the broker now; returns what that changed."""
    changes: dict[str, tuple[TopicConfig | None, TopicConfig | None]] = {}
    for topic in request.deleted:
        old = table.pop(topic, None)
        if old is not None:
            changes[topic] = old, None
    for config in request.changed:
        old = table.get(config.topic)
        if old != config:
            table[config.topic] = config
            changes[config.topic] = changes.get(config.topic, (old, None))[0], config
    return changes


def _leading_table(group: _BrokerGroup) -> _Table | None:
    for _, member in sorted(group.members.items()):
        if member.topics is not None:
            return member.topics
    return None


def _appearance(group: _BrokerGroup) -> dict[int, tuple[BrokerAddress, int, bool]]:
    """Return the part of a group that clients see beside its topics."""
    return {
        broker_id: (member.address, member.perm, member.topics is not None)
        for broker_id, member in group.members.items()
    }


def _broker_data(name: str, group: _BrokerGroup) -> BrokerData:
    addresses = {broker_id: group.members[broker_id].address for broker_id in sorted(group.members)}
    return BrokerData(group.cluster_name, name, addresses, group.epoch, group.is_elected)


def _announce(name: str, topics: Iterable[str]) -> list[Effect]:
    names = frozenset(topics)
    if not names:
        return []  # a hint without topics would mean: too many to list
    return [Announce(frozenset((name,)), names if len(names) <= MAX_HINT_TOPICS else frozenset())]


def _is_ordered(table: _Table, topic: str) -> bool:
    config = table.get(topic)
    return config is not None and config.order


def _without(table: _Table, topic: str) -> _Table:
    return {name: config for name, config in table.items() if name != topic}


ROUTE_METRICS: Final[tuple[Measured[RouteTable], ...]] = (
    gauge("broker_groups", "broker groups that are registered", lambda table: len(table.brokers())),
    gauge("topics", "topics that they carry", lambda table: len(table.topics())),
    gauge("drained_brokers", "broker groups that are drained", lambda table: len(table.drained())),
)
