"""Recent consumption by topic: rates from sampled totals. Pure."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from mqmesh.protocol.membership import TopicConsumption

SAMPLE_MS: Final = 5_000
WINDOW_SAMPLES: Final = 7
"""Rates are of half a minute."""
FAILURE_SAMPLE_MS: Final = 60_000
HOUR_SAMPLES: Final = 61
RECENT_SAMPLES: Final = 11
"""Number of samples that span the last ten minutes, in which most retries come again."""

_NS_PER_MS: Final = 1_000_000


class TopicTotals(msgspec.Struct, frozen=True):
    """Totals of a topic since the consumer was made.

    Attributes:
        calls: Of the listener, begun.
        ok: Messages that were done.
        failed: Messages whose call failed.
        busy_ns: Time with the listener.
        pulled: Messages that came.
        pulls: Answers that brought some.
        waited_ms: From these pulls to their answers.
    """

    calls: int = 0
    ok: int = 0
    failed: int = 0
    busy_ns: int = 0
    pulled: int = 0
    pulls: int = 0
    waited_ms: int = 0


class _Sample(msgspec.Struct, frozen=True):
    at_ms: int
    totals: Mapping[str, TopicTotals]


class Consumption:
    """Rates of one consumer.

    Args:
        group: Consumer group.
        totals: Returns the totals so far, by topic.
        held: Looks at messages and bytes that are cached, by topic.
    """

    def __init__(
        self,
        group: str,
        totals: Callable[[], Mapping[str, TopicTotals]],
        held: Callable[[], Mapping[str, tuple[int, int]]],
    ) -> None:
        self._group = group
        self._totals = totals
        self._held = held
        self._samples: deque[_Sample] = deque(maxlen=WINDOW_SAMPLES)
        self._failures: deque[_Sample] = deque(maxlen=HOUR_SAMPLES)

    def sample(self, now_ms: int) -> None:
        """Notes the totals; each ``SAMPLE_MS``, by the monotonic clock."""
        one = _Sample(now_ms, self._totals())
        self._samples.append(one)
        if not self._failures or now_ms - self._failures[-1].at_ms >= FAILURE_SAMPLE_MS:
            self._failures.append(one)

    def stats(self, now_ms: int) -> list[TopicConsumption]:
        """Return recent consumption by topic; by the monotonic clock."""
        totals, held = self._totals(), self._held()
        first = self._samples[0] if self._samples else _Sample(now_ms, {})
        hour = self._failures[0].totals if self._failures else {}
        recent = (
            self._failures[-min(RECENT_SAMPLES, len(self._failures))] if self._failures else first
        )
        spent_s = max(now_ms - first.at_ms, 1) / 1_000
        found = []
        for topic in sorted(totals.keys() | held.keys()):
            now, before = totals.get(topic, _NONE), first.totals.get(topic, _NONE)
            then = recent.totals.get(topic, _NONE)
            calls, pulls = now.calls - before.calls, now.pulls - before.pulls
            busy_ms = (now.busy_ns - before.busy_ns) / _NS_PER_MS
            found.append(
                TopicConsumption(
                    self._group,
                    topic,
                    ok_per_s=max(now.ok - before.ok, 0) / spent_s,
                    failed_per_s=(now.failed - before.failed) / spent_s,
                    failed_last_hour=now.failed - hour.get(topic, _NONE).failed,
                    # A call that hangs shows as an average that grows.
                    handling_ms=busy_ms / max(calls, 1),
                    pulled_per_s=(now.pulled - before.pulled) / spent_s,
                    pull_wait_ms=(now.waited_ms - before.waited_ms) / max(pulls, 1),
                    cached_messages=held.get(topic, (0, 0))[0],
                    cached_bytes=held.get(topic, (0, 0))[1],
                    recent_ok=max(now.ok - then.ok, 0),
                    recent_failed=max(now.failed - then.failed, 0),
                    recent_ms=max(now_ms - recent.at_ms, 1),
                )
            )
        return found


_NONE: Final = TopicTotals()
