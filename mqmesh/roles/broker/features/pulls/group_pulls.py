"""What consumer groups were handed out: up to where in each queue, and how quickly. Pure.

It is noted with every pull that found something, so it costs a few dict look-ups and no more.
Nothing of it is kept over a restart: it serves administrators, no decision rests on it.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from mqmesh.roles.broker.stats import Before

WINDOW_S: Final = 10
"""Rates are those of so many whole seconds."""
ACTIVE_MS: Final = 60_000
"""A group that pulled so recently may have a consumer that no heartbeat told of."""


class HandedOut(msgspec.Struct, gc=False):
    """What a group got of a topic.

    Attributes:
        messages: Handed out to it; those of a filter that it did not want are not among them.
        stored_bytes: Their batches' bytes.
        before: What ``messages`` was before.
    """

    messages: int = 0
    stored_bytes: int = 0
    before: Before = msgspec.field(default_factory=Before)


class _PullingGroup:
    __slots__ = ("buckets", "first_s", "handed_out", "offsets", "second", "seen_ms")

    def __init__(self, now_s: int) -> None:
        self.offsets: dict[tuple[str, int], int] = {}
        self.handed_out: dict[str, HandedOut] = {}
        self.buckets = [0] * (WINDOW_S + 1)
        self.second = self.first_s = now_s
        self.seen_ms = 0

    def advance(self, now_s: int) -> None:
        passed = now_s - self.second
        if passed > 0:
            for step in range(min(passed, len(self.buckets))):
                self.buckets[(now_s - step) % len(self.buckets)] = 0
            self.second = now_s


class GroupPulls:
    """What the groups of one broker were handed out since it was started.

    Args:
        most: Queues and groups remembered; beyond it the group known for longest is forgotten.
    """

    def __init__(self, most: int = 1_000_000) -> None:
        self._most = most
        self._groups: dict[str, _PullingGroup] = {}
        self._count = 0

    def note(
        self, group: str, topic: str, queue_id: int, next_offset: int, count: int, now_ms: int
    ) -> None:
        """A pull found something.

        Args:
            group: Consumer group.
            topic: Of the queue.
            queue_id: From 0.
            next_offset: Behind what was handed out or passed over.
            count: Messages handed out.
            now_ms: Monotonic clock.
        """
        now_s = now_ms // 1_000
        one = self._groups.get(group)
        if one is None:
            one = self._groups[group] = _PullingGroup(now_s)
        if now_s != one.second:
            one.advance(now_s)
        one.buckets[now_s % len(one.buckets)] += count
        one.seen_ms = now_ms
        key = (topic, queue_id)
        if key not in one.offsets:
            self._count += 1
        one.offsets[key] = next_offset
        if self._count > self._most and len(self._groups) > 1:
            self.forget(next(name for name in self._groups if name != group))

    def note_bytes(self, group: str, topic: str, count: int, size: int) -> None:
        """Messages that a pull found leave, once it was noted.

        Args:
            group: Consumer group.
            topic: Of the queue.
            count: Messages.
            size: Their batches' bytes.
        """
        handed_out = self._groups[group].handed_out
        one = handed_out.get(topic)
        if one is None:
            one = handed_out[topic] = HandedOut()
        one.messages += count
        one.stored_bytes += size

    def handed_out(self) -> Iterator[tuple[str, str, HandedOut]]:
        """What each group got of each topic: topic, group, and how much.

        Others may come and go meanwhile.
        """
        # Lists of names: very many pairs at once would have all garbage looked for.
        for group in list(self._groups):
            one = self._groups.get(group)
            if one is None:
                continue
            for topic in list(one.handed_out):
                handed_out = one.handed_out.get(topic)
                if handed_out is not None:
                    yield topic, group, handed_out

    def pull_offset(self, group: str, topic: str, queue_id: int) -> int:
        """Behind the last message handed out to a group, -1 for none."""
        one = self._groups.get(group)
        return -1 if one is None else one.offsets.get((topic, queue_id), -1)

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
        one = self._groups.get(group)
        if one is not None and one.offsets.pop((topic, queue_id), None) is not None:
            self._count -= 1

    def forget(self, group: str) -> None:
        """Forgets a group."""
        one = self._groups.pop(group, None)
        if one is not None:
            self._count -= len(one.offsets)

    def forget_topic(self, topic: str) -> None:
        """Forgets the queues of a topic."""
        for one in self._groups.values():
            one.handed_out.pop(topic, None)
            for key in [key for key in one.offsets if key[0] == topic]:
                del one.offsets[key]
                self._count -= 1
