"""What a replay copies together, and when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mqmesh.errors import InvalidArgument
from mqmesh.sdk.admin.replays import ReplayClient
from mqmesh.sdk.admin.searches import Span
from mqmesh.testing.clock import ManualClock

ONE = Span("broker-a", "host:1", 0, 0, 10)
TWO = Span("broker-a", "host:1", 1, 0, 10)


class Chunks(ReplayClient):
    """A client without a network, whose pauses take no time."""

    def __init__(self):
        clock = ManualClock()
        self.begun_ms = clock.monotonic_ms()
        self._transport = SimpleNamespace(
            clock=clock, pause=lambda duration_s: clock.advance(round(duration_s * 1_000))
        )

    def of(self, speed, *parts):
        """Return what is copied together: ms since the begin, and messages by queue id."""
        found = []
        for chunk in self._chunks([iter(part) for part in parts], speed):
            at_ms = self._transport.clock.monotonic_ms() - self.begun_ms
            found.append((at_ms, {span.queue_id: names for span, names in chunk.items()}))
        return found


def test_without_a_speed_queues_are_copied_one_after_the_other():
    found = Chunks().of(0.0, [(5, ONE, "a"), (900, ONE, "b")], [(1, TWO, "c")])
    assert found == [(0, {0: ["a", "b"], 1: ["c"]})]


def test_with_a_speed_gaps_are_kept_over_all_queues():
    parts = [(5, ONE, "a"), (1_005, ONE, "b")], [(25, TWO, "c"), (2_005, TWO, "d")]
    assert Chunks().of(1.0, *parts) == [
        (0, {0: ["a"], 1: ["c"]}),
        (1_000, {0: ["b"]}),
        (2_000, {1: ["d"]}),
    ]
    assert [at_ms for at_ms, _ in Chunks().of(10.0, *parts)] == [0, 100, 200]


def test_not_too_many_are_copied_together():
    found = Chunks().of(0.0, [(1, ONE, str(number)) for number in range(2_500)])
    assert [len(names[0]) for _, names in found] == [1_000, 1_000, 500]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "into a group, or into another topic"),
        ({"group": "g", "into_topic": "u"}, "into a group, or into another topic"),
        ({"into_topic": "t"}, "into a group, or into another topic"),
        ({"group": "a b"}, "a b"),
        ({"group": "g", "speed": 0.0001}, "speed = 0.0001 must be 0, or 0.001 to 1,000,000"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_asked(options, why):
    with pytest.raises(InvalidArgument, match=why):
        Chunks().replay("t", **options)
