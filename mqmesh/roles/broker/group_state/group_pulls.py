"""Pull progress of consumer groups: offsets handed out in each queue, and rates. Pure.

It is noted with every pull that found something, so it costs a few dict look-ups and no more.
Nothing of it is kept over a restart: it serves administrators, no decision rests on it.
"""

from array import array
from collections.abc import Iterator
from typing import Final

import msgspec

from mqmesh.roles.broker.stats import Before

WINDOW_S: Final = 10
"""Rates are those of so many whole seconds."""
ACTIVE_MS: Final = 60_000
"""A group that pulled so recently may have a consumer that no heartbeat reported."""


class HandedOut(msgspec.Struct, gc=False):
    """Messages of a topic that were handed out to a group.

    Attributes:
        messages: Handed out to it; those of a filter that it did not want are not among them.
        stored_bytes: Their batches' bytes.
        offsets: By queue id, behind the last one handed out or passed over; -1 for none.
        before: Former values of ``messages``.
    """

    messages: int = 0
    stored_bytes: int = 0
    offsets: list[int] = []
    before: Before = msgspec.field(default_factory=Before)


class _PullingGroup:
    __slots__ = ("buckets", "first_s", "second", "seen_ms", "topics")

    def __init__(self, now_s: int) -> None:
        self.topics: dict[str, HandedOut] = {}
        self.buckets = array("I", bytes(4 * (WINDOW_S + 1)))
        self.second = self.first_s = now_s
        self.seen_ms = 0

    def advance(self, now_s: int) -> None:
        passed = now_s - self.second
        if passed > 0:
            for step in range(min(passed, len(self.buckets))):
                self.buckets[(now_s - step) % len(self.buckets)] = 0
            self.second = now_s


class GroupPulls:
    """Pull progress of the groups of one broker since it was started.

    Args:
        most: Queues and groups remembered; beyond it the group known for longest is forgotten.
    """

    def __init__(self, most: int = 1_000_000) -> None:
        self._most = most
        self._groups: dict[str, _PullingGroup] = {}
        self._count = 0

    def note(
        self,
        group: str,
        topic: str,
        queue_id: int,
        next_offset: int,
        count: int,
        size: int,
        now_ms: int,
    ) -> None:
        """A pull found something.

        Args:
            group: Consumer group.
            topic: Of the queue.
            queue_id: From 0.
            next_offset: Behind what was handed out or passed over.
            count: Messages handed out.
            size: Their batches' bytes.
            now_ms: Monotonic clock.
        """
        now_s = now_ms // 1_000
        one = self._groups.get(group)
        if one is None:
            one = self._groups[group] = _PullingGroup(now_s)
        if now_s != one.second:
            one.advance(now_s)
        one.buckets[now_s % (WINDOW_S + 1)] += count
        one.seen_ms = now_ms
        handed_out = one.topics.get(topic)
        if handed_out is None:
            handed_out = one.topics[topic] = HandedOut()
        handed_out.messages += count
        handed_out.stored_bytes += size
        offsets = handed_out.offsets
        if queue_id >= len(offsets):
            self._make_room(group, offsets, queue_id + 1)
        offsets[queue_id] = next_offset

    def _make_room(self, group: str, offsets: list[int], count: int) -> None:
        grown = count - len(offsets)
        offsets += [-1] * grown
        self._count += grown
        if self._count > self._most and len(self._groups) > 1:
            self.forget(next(name for name in self._groups if name != group))

    def handed_out(self) -> Iterator[tuple[str, str, HandedOut]]:
        """Yield topic, group and handed out messages, for each topic of each group.

        Others may come and go meanwhile.
        """
        # Lists of names: very many pairs at once would have all garbage looked for.
        for group in list(self._groups):
            one = self._groups.get(group)
            if one is None:
                continue
            for topic in list(one.topics):
                handed_out = one.topics.get(topic)
                if handed_out is not None and handed_out.messages:
                    yield topic, group, handed_out

    def pull_offset(self, group: str, topic: str, queue_id: int) -> int:
        """Behind the last message handed out to a group, -1 for none."""
        offsets = self._offsets(group, topic)
        return offsets[queue_id] if queue_id < len(offsets) else -1

    def _offsets(self, group: str, topic: str) -> list[int]:
        one = self._groups.get(group)
        handed_out = None if one is None else one.topics.get(topic)
        return [] if handed_out is None else handed_out.offsets

    def rate(self, group: str, now_ms: int) -> float:
        """Messages handed out a second, over the last whole seconds."""
        one = self._groups.get(group)
        if one is None:
            return 0.0
        now_s = now_ms // 1_000
        one.advance(now_s)
        # The second that runs does not count, unless it is the only one.
        whole = min(now_s - one.first_s, WINDOW_S)
        if not whole:
            return float(one.buckets[now_s % len(one.buckets)])
        return (sum(one.buckets) - one.buckets[now_s % len(one.buckets)]) / whole

    def is_active(self, group: str, now_ms: int) -> bool:
        """True when the group pulled of late."""
        one = self._groups.get(group)
        return one is not None and now_ms - one.seen_ms < ACTIVE_MS

    def forget_queue(self, group: str, topic: str, queue_id: int) -> None:
        """The group goes on elsewhere in a queue."""
        offsets = self._offsets(group, topic)
        if queue_id < len(offsets):
            offsets[queue_id] = -1

    def forget(self, group: str) -> None:
        """Forgets a group."""
        one = self._groups.pop(group, None)
        if one is not None:
            self._count -= sum(len(topic.offsets) for topic in one.topics.values())

    def forget_topic(self, topic: str) -> None:
        """Forgets the queues of a topic."""
        for one in self._groups.values():
            handed_out = one.topics.pop(topic, None)
            if handed_out is not None:
                self._count -= len(handed_out.offsets)
