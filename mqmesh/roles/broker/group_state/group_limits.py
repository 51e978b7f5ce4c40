"""Limits of what groups are handed out: pauses, and messages a second."""

from mqmesh.clock import Clock
from mqmesh.protocol.groups import GroupConfig
from mqmesh.protocol.policies import paused_until
from mqmesh.token_bucket import TokenBucket

PARTS_A_SECOND = 10
"""One answer has at most such a part of a second's messages, so that queues take turns."""


class GroupLimits:
    """Pauses of groups, and what they were handed out of late, at this broker.

    Args:
        clock: Wall clock for pauses, monotonic clock for rates.

    Attributes:
        held_back: Pulls that had to wait for the end of a pause, or because of a rate.
    """

    def __init__(self, clock: Clock) -> None:
        self.held_back = 0
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}

    def is_held(self, config: GroupConfig, topic: str) -> bool:
        """Return whether a group gets nothing of a topic just now.

        Args:
            config: Its settings.
            topic: Physical topic.
        """
        until_ms = paused_until(config, topic)
        if until_ms and until_ms > self._clock.wall_ms():
            return True
        bucket = self._bucket(config)
        return bucket is not None and bucket.wait_ms(self._clock.monotonic_ms()) > 0

    def is_paused(self, config: GroupConfig) -> bool:
        """Return whether a group gets nothing just now of all topics, or of one."""
        now_ms = self._clock.wall_ms()
        return any(
            until > now_ms for until in (config.paused_until, *config.paused_topics.values())
        )

    def most_messages(self, config: GroupConfig) -> int | None:
        """Return how many messages one answer may have; None for any number."""
        rate = config.max_messages_per_s
        return max(rate // PARTS_A_SECOND, 1) if rate else None

    def note(self, config: GroupConfig, count: int) -> None:
        """Count messages that were handed out to a group."""
        bucket = self._bucket(config)
        if bucket is not None:
            bucket.take(count)

    def forget(self, group: str) -> None:
        """Forget a group, which was deleted."""
        self._buckets.pop(group, None)

    def _bucket(self, config: GroupConfig) -> TokenBucket | None:
        bucket = self._buckets.get(config.group)
        rate = config.max_messages_per_s
        if bucket is None or bucket.rate != rate:
            self._buckets.pop(config.group, None)
            bucket = None
            if rate:
                bucket = self._buckets[config.group] = TokenBucket(rate)
        return bucket
