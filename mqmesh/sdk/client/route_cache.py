"""Cache of routes. Pure: routes in, queues and addresses out."""

from collections.abc import Iterable

import msgspec

from mqmesh.errors import NotMaster
from mqmesh.hosts import is_address
from mqmesh.message import MessageQueue
from mqmesh.protocol.route import BrokerAddress, BrokerData, Perm, TopicRoute

MASTER_ID = 0


class RouteCache:
    """Topic routes, and the queues that follow from them.

    A route that was known once is never forgotten because a name server does not know it:
    a restarted name server is empty, and an empty registry does not mean that there are no
    topics. Brokers themselves say when a topic is gone. Of two masters of a group the one of the
    later epoch counts, whichever name server or replica reports last.
    """

    def __init__(self) -> None:
        self._routes: dict[str, TopicRoute] = {}
        self._publish: dict[str, tuple[MessageQueue, ...]] = {}
        self._subscribe: dict[str, tuple[MessageQueue, ...]] = {}
        self._brokers: dict[str, BrokerData] = {}
        self._topics_of: dict[str, set[str]] = {}

    def update(self, route: TopicRoute) -> bool:
        """Takes a fresh route.

        Returns:
            True when it differs from the one known.
        """
        brokers = [self._newer(one) for one in route.brokers]
        if brokers != route.brokers:
            route = msgspec.structs.replace(route, brokers=brokers)
        for broker in route.brokers:
            self._brokers[broker.broker_name] = broker
        if self._routes.get(route.topic) == route:
            return False
        self._drop(route.topic)
        self._routes[route.topic] = route
        for broker in route.brokers:
            self._topics_of.setdefault(broker.broker_name, set()).add(route.topic)
        masters = {one.broker_name for one in route.brokers if MASTER_ID in one.addresses}
        self._publish[route.topic] = tuple(
            MessageQueue(route.topic, data.broker_name, queue_id)
            for data in sorted(route.queues, key=lambda one: one.broker_name)
            if data.perm & Perm.WRITE and (data.broker_name in masters or route.order)
            for queue_id in range(data.write_queue_nums)
        )
        known = {one.broker_name for one in route.brokers}
        self._subscribe[route.topic] = tuple(
            MessageQueue(route.topic, data.broker_name, queue_id)
            for data in sorted(route.queues, key=lambda one: one.broker_name)
            if data.perm & Perm.READ and (data.broker_name in known or route.order)
            for queue_id in range(data.read_queue_nums)
        )
        return True

    def learn(self, brokers: Iterable[BrokerData]) -> bool:
        """Take broker groups as a name server lists them; return True if one is another now."""
        has_changed = False
        for broker in brokers:
            newer = self._newer(broker)
            if self._brokers.get(broker.broker_name) == newer:
                continue
            has_changed = True
            self._brokers[broker.broker_name] = newer
            for topic in self.topics_of(broker.broker_name):
                self.update(self._routes[topic])
        return has_changed

    def follow(self, refusal: NotMaster, broker_name: str) -> bool:
        """Note the master that a replica names in its refusal.

        Args:
            refusal: Its refusal.
            broker_name: Broker group.

        Returns:
            True if that is a change: the group's master is there now, for all routes.
        """
        known = self._brokers.get(broker_name)
        if known is None or not is_address(refusal.master) or refusal.epoch <= known.epoch:
            return False
        addresses = known.addresses.values()
        master = next((one for one in addresses if one.tcp == refusal.master), None)
        if master is None:
            if any(one.server_key for one in addresses):
                return False  # name servers have the key that it has to prove
            master = BrokerAddress(refusal.master)
        moved = msgspec.structs.replace(
            known, addresses={**known.addresses, MASTER_ID: master}, epoch=refusal.epoch
        )
        self._brokers[broker_name] = moved
        for topic in self.topics_of(broker_name):
            self.update(self._routes[topic])
        return True

    def _drop(self, topic: str) -> None:
        for broker_name in self.brokers_of(topic):
            self._topics_of[broker_name].discard(topic)
        self._routes.pop(topic, None)

    def _newer(self, newer: BrokerData) -> BrokerData:
        known = self._brokers.get(newer.broker_name)
        return newer if known is None or newer.epoch >= known.epoch else known

    def forget(self, topic: str) -> None:
        """Drops a topic that a broker said does not exist."""
        self._drop(topic)
        self._publish.pop(topic, None)
        self._subscribe.pop(topic, None)

    def route(self, topic: str) -> TopicRoute | None:
        """Return the route of a topic, if known."""
        return self._routes.get(topic)

    def publish_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """Return queues that may be written, by broker name and queue id; () if none is known."""
        return self._publish.get(topic, ())

    def subscribe_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """Return queues that may be read, by broker name and queue id; () if none is known."""
        return self._subscribe.get(topic, ())

    def priorities(self, topic: str) -> int:
        """Return the number of priorities of a topic; 0 for one without, or without a route."""
        route = self._routes.get(topic)
        return 0 if route is None else max((one.priorities for one in route.queues), default=0)

    def address(
        self, broker_name: str, broker_id: int = MASTER_ID, *, stand_in: bool = False
    ) -> BrokerAddress | None:
        """Return a broker's address, if known.

        Args:
            broker_name: Broker group.
            broker_id: Id of the replica.
            stand_in: While it is not there the follower with the lowest id will do, unless another
                one takes the master's place: that one is waited for.
        """
        data = self._brokers.get(broker_name)
        if data is None:
            return None
        if stand_in and data.addresses and not data.is_elected:
            broker_id = min(data.addresses)
        return data.addresses.get(broker_id)

    def epoch(self, broker_name: str) -> int:
        """Return the epoch of a group's master; 0 where no other replica can take its place."""
        data = self._brokers.get(broker_name)
        return 0 if data is None else data.epoch

    def elects(self, broker_name: str) -> bool:
        """Return True if another replica takes the place of a group's master by itself."""
        data = self._brokers.get(broker_name)
        return data is not None and data.is_elected

    def brokers_of(self, topic: str) -> list[str]:
        """Names of the broker groups that carry a topic."""
        route = self._routes.get(topic)
        return [] if route is None else [one.broker_name for one in route.brokers]

    def is_used(self, broker_name: str) -> bool:
        """Return True while a broker group carries a known topic."""
        return bool(self._topics_of.get(broker_name))

    def topics_of(self, broker_name: str) -> list[str]:
        """Return the known topics that a broker group carries."""
        return list(self._topics_of.get(broker_name, ()))


def why_not_writable(route: TopicRoute) -> str:
    """Return why a topic cannot be written to; "" where it can, or where that may pass soon.

    A broker group that waits for its master is not written to either, but only until then.
    """
    masters = {one.broker_name for one in route.brokers if MASTER_ID in one.addresses}
    if any(one.perm & Perm.WRITE or one.broker_name not in masters for one in route.queues):
        return ""
    perm = "r" if any(one.perm & Perm.READ for one in route.queues) else "none"
    brokers = ", ".join(sorted(one.broker_name for one in route.queues))
    return (
        f"topic {route.topic!r} may not be written to, its permission is {perm}; `mqmesh topic "
        f"update {route.topic} --perm rw` allows it, or `mqmesh broker undrain` if {brokers} was "
        "drained"
    )
