"""Assignment of queues to a member: gets the group's members from a broker, and allocates."""

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from mqmesh.errors import GroupNotFound, MQMeshError
from mqmesh.failure_text import error_to_log
from mqmesh.message import MessageQueue
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import ConsumerList, ConsumerListRequest
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.consumer.offset_store import REQUEST_TIMEOUT_MS
from mqmesh.sdk.consumer.rebalance import AllocateStrategy, Average
from mqmesh.sdk.consumer.rebalance_timer import RebalanceTimer

RETRY_MS: Final = 200
RETRY_MAX_MS: Final = 1_000

_log = logging.getLogger(__name__)


class QueueAssignment:
    """The assignment of one consumer, made anew whenever something changes; in the client loop.

    Args:
        group: Consumer group.
        client: The client's engine.
        strategy: Divides queues among members; None when every member reads all queues.
        subscribed: Topics whose queues are to be assigned; none while the consumer closes.
        has_queues: True while the consumer has any.
        on_hindered: Called with the reason why the members are not known, or None.
        apply: Takes the queues of a topic that are the consumer's now, and gives up the others;
            whether no other member can have had them.
    """

    def __init__(
        self,
        group: str,
        client: ClientEngine,
        strategy: AllocateStrategy | None,
        *,
        subscribed: Callable[[], list[str]],
        has_queues: Callable[[], bool],
        on_hindered: Callable[[MQMeshError | None], None],
        apply: Callable[[str, list[MessageQueue], bool], None],
    ) -> None:
        self._group = group
        self._client = client
        self._strategy = strategy
        self._subscribed = subscribed
        self._has_queues = has_queues
        self._on_hindered = on_hindered
        self._apply = apply
        self._timer = RebalanceTimer(client.loop.clock, client.call_later, self._run)
        self._round = 0

    def plan(self, delay_ms: int = 0) -> None:
        """Makes the assignment anew in a moment; many calls make one."""
        self._timer.plan(delay_ms)

    def broker_returned(self) -> None:
        """Note that a broker came back, and perhaps not all members came back to it yet."""
        self._timer.keep_quiet()

    def _run(self) -> None:
        self._round += 1
        routes = self._client.routes
        topics_of: dict[str, list[str]] = defaultdict(list)
        for topic in self._subscribed():
            if self._strategy is None:
                self._apply(topic, list(routes.subscribe_queues(topic)), True)
                continue
            # The same for all members, so that all see the same list.
            connected = filter(self._client.brokers.is_connected, routes.brokers_of(topic))
            broker_name = min(connected, default=None)
            if broker_name is not None:
                topics_of[broker_name].append(topic)
        if self._strategy is not None:
            # One question to a broker, however many topics it answers for.
            for broker_name, topics in topics_of.items():
                self._ask_members(topics, broker_name, self._strategy)

    def _ask_members(self, topics: list[str], broker_name: str, strategy: AllocateStrategy) -> None:
        current = self._round

        def done(answer: Command | MQMeshError) -> None:
            subscribed = set(self._subscribed())
            wanted = [topic for topic in topics if topic in subscribed]
            if current != self._round or not wanted:
                return
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                members = decode_header(ConsumerList, answer.header)
                self._divide(wanted, members, broker_name, strategy)
            except GroupNotFound:
                self._introduce()
            except MQMeshError as error:
                self._on_hindered(error)
                self.plan(RETRY_MAX_MS)
            else:
                self._on_hindered(None)

        self._client.request(
            broker_name,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP,
            done,
            header=encode_header(ConsumerListRequest(self._group)),
            timeout_ms=REQUEST_TIMEOUT_MS,
        )

    def _introduce(self) -> None:
        # The broker does not know us (yet, or any more): we keep our queues until it does.
        if self._has_queues():
            self._timer.keep_quiet()
        self._client.heartbeats.send_all()
        self.plan(RETRY_MS)

    def _divide(
        self,
        topics: list[str],
        members: ConsumerList,
        broker_name: str,
        strategy: AllocateStrategy,
    ) -> None:
        own_id, client_ids = self._client.client_id, sorted(members.client_ids)
        if own_id not in client_ids:
            self._introduce()
            return
        for topic in topics:
            queues = self._client.routes.subscribe_queues(topic)
            mine: list[MessageQueue] = []
            if queues:
                try:
                    if type(strategy) is Average:  # a subclass divides in a way of its own
                        owners = _owners(members, broker_name, topic)
                        mine = strategy.reallocate(own_id, queues, client_ids, owners)
                    else:
                        mine = strategy.allocate(self._group, own_id, queues, client_ids)
                except Exception:
                    _log.error(
                        "group %s: the allocation strategy failed for topic %s",
                        self._group,
                        topic,
                        exc_info=error_to_log(),
                    )
                    continue
            self._timer.divided()
            self._apply(topic, mine, len(client_ids) == 1)


def _owners(members: ConsumerList, broker_name: str, topic: str) -> dict[MessageQueue, str]:
    """Return the owners that a broker named of its queues of a topic."""
    client_ids = members.client_ids
    return {
        MessageQueue(topic, broker_name, queue_id): client_ids[place]
        for queue_id, place in enumerate(members.owners.get(topic, ()))
        if 0 <= place < len(client_ids)
    }
