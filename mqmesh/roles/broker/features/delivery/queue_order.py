"""Queues in which a receive looks: in which order, and where a group begins in each."""

from collections.abc import Iterator

from mqmesh.protocol.delivery import DeliveryMode, ReceiveRequest
from mqmesh.protocol.groups import GroupConfig
from mqmesh.protocol.membership import ConsumeFromWhere, ConsumerData
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.delivery_state.window import DeliveryWindow
from mqmesh.roles.broker.delivery_state.windows import DeliveryWindows, WindowKey
from mqmesh.roles.broker.features.delivery.receive_hold import HeldReceive
from mqmesh.roles.broker.group_state.committed_offsets import CommittedOffsets
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.reading.store_times import store_time
from mqmesh.roles.broker.topic_state.topic_retention import shown_bounds
from mqmesh.roles.broker.topic_state.topic_table import Topic, TopicTable

QueuePlace = tuple[Topic, int, bool]
"""Topic, queue id, and whether it has retries."""


class QueueOrder:
    """Order of the queues in which receives look, and the windows of groups in them.

    Args:
        core: The core of the broker.
        topics: Topics.
        groups: Members of groups.
        offsets: Committed offsets.
        windows: Messages that groups hold.
    """

    def __init__(
        self,
        core: Core,
        topics: TopicTable,
        groups: ConsumerGroups,
        offsets: CommittedOffsets,
        windows: DeliveryWindows,
    ) -> None:
        self._clock = core.clock
        self._store = core.store
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._windows = windows
        self._turns: dict[tuple[str, str], int] = {}
        # Receives that were answered with messages, of groups with priority_fairness.
        self._served: dict[tuple[str, str], int] = {}

    def topic_deleted(self, topic: str) -> None:
        """Note that a topic is gone: members subscribed before another one of its name."""
        for name in self._groups.names():
            group = self._groups.group(name)
            if topic in group.ends:
                group.ends[topic] = []
                group.forget_ends()
        for key in [key for key in self._turns if key[1] == topic]:
            del self._turns[key]
            self._served.pop(key, None)

    def forget_group(self, group: str) -> None:
        """Forget a group."""
        for name in [key for key in self._turns if key[0] == group]:
            del self._turns[name]
            self._served.pop(name, None)

    def note_served(self, held: HeldReceive) -> None:
        """Note that a receive got messages, of a group with ``priority_fairness``."""
        self._served[held.key] = self._served.get(held.key, 0) + 1

    def note_subscriptions(self, data: ConsumerData) -> None:
        """Note where the queues end of topics that a group subscribes to for the first time.

        Args:
            data: Of a member's heartbeat.
        """
        if data.delivery == DeliveryMode.QUEUE:
            return
        group = self._groups.group(data.group)
        new = [one.topic for one in data.subscriptions if one.topic not in group.ends]
        if new:
            group.ends.update((topic, self._ends(topic)) for topic in new)
            group.forget_ends()

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return the first offset of a queue that is shown, and the end."""
        return shown_bounds(self._store, self._topics, self._clock, topic, queue_id)

    def window(self, key: WindowKey, wanted: ReceiveRequest, is_retry: bool) -> DeliveryWindow:
        """Return the window of a group in a queue; it begins with the first receive.

        Raises:
            SystemBusy: There are too many committed offsets.
            StaleGeneration: The member is none any more.
        """
        return self._windows.find(key) or self._begin(key, wanted, is_retry)

    def places(self, held: HeldReceive, config: GroupConfig) -> Iterator[QueuePlace]:
        """Yield the queues in which a receive looks, in order.

        Topic and retries come in turn; of a topic with priorities the higher ones first.
        """
        turn = self._turns.get(held.key, 0)
        self._turns[held.key] = turn + 1
        sides = [
            (known, is_retry)
            for is_retry in ((False, True) if turn % 2 else (True, False))
            if (known := self._topics.get(held.topics[is_retry])) is not None
        ]
        priorities = max((known.config.priorities for known, _ in sides), default=0)
        if not priorities:
            for known, is_retry in sides:
                count = known.readable_queues
                for step in range(count):
                    yield known, (turn // 2 + step) % count, is_retry
            return
        found = [
            (known, queue_id, is_retry)
            for known, is_retry in sides
            for queue_id in range(known.readable_queues)
        ]
        found.sort(key=_priority_of, reverse=True)
        fairness = config.priority_fairness
        if fairness and self._served.get(held.key, 0) % fairness == fairness - 1:
            yield from self._oldest(held.wanted, found, config.max_unsettled)
        yield from found

    def _oldest(
        self, wanted: ReceiveRequest, places: list[QueuePlace], max_unsettled: int
    ) -> list[QueuePlace]:
        """Return the queue whose first message was stored first; none if none has a message."""
        oldest: list[QueuePlace] = []
        oldest_ms = 0
        for place in places:
            topic, queue_id = place[0].config.topic, place[1]
            key = (wanted.group, topic, queue_id)
            window = self.window(key, wanted, place[2])
            run = window.due()
            if run is None and window.unsettled >= max_unsettled:
                continue
            first = window.next_offset if run is None else run.low
            stored_ms = store_time(self._store, topic, queue_id, first)
            if stored_ms and (not oldest or stored_ms < oldest_ms):
                oldest, oldest_ms = [place], stored_ms
        return oldest

    def _begin(self, key: WindowKey, wanted: ReceiveRequest, is_retry: bool) -> DeliveryWindow:
        """Make the window of a group that receives from a queue for the first time.

        With ``LAST_OFFSET`` all queues of a topic begin together, where they ended when the first
        member subscribed: others may be quicker to receive. Queues, and topics, that came later
        are read from their first messages.
        """
        group, topic, queue_id = key
        start: int = self._offsets.query(group, topic, queue_id)
        if start < 0:
            known = self._groups.require_member(group, wanted.member)
            where = known.members[wanted.member].consume_from_where
            is_last = where == ConsumeFromWhere.LAST_OFFSET and not is_retry
            if is_last and not wanted.is_earlier and topic not in self._offsets.topics(group):
                ends = known.ends.get(topic)
                for other, end in enumerate(self._ends(topic) if ends is None else ends):
                    if other == queue_id:
                        start = end
                    else:
                        self._begin_at((group, topic, other), end)
        return self._begin_at(key, start)

    def _begin_at(self, key: WindowKey, start: int) -> DeliveryWindow:
        low, high = self.bounds(*key[1:])
        return self._windows.begin(key, min(max(start, low), high))

    def _ends(self, topic: str) -> list[int]:
        known = self._topics.get(topic)
        queues = 0 if known is None else known.readable_queues
        return [self.bounds(topic, queue_id)[1] for queue_id in range(queues)]


def _priority_of(place: QueuePlace) -> int:
    return place[1]
