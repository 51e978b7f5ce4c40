"""What the metrics about groups and resets come to."""

from __future__ import annotations

import msgspec
import pytest

from mqmesh.protocol.groups import OffsetChange, QueueProgress
from mqmesh.sdk.admin.group_admin import GroupProgress, OffsetMove, OffsetMoves, QueueLag


def lag(topic="t", low=0, high=10, done=4, pulled=-1, waits_ms=0):
    return QueueLag("b", QueueProgress(topic, 0, low, high, done, pulled), waits_ms)


@pytest.mark.parametrize(
    ("queue", "messages", "in_flight"),
    [
        (lag(), 6, 0),
        (lag(pulled=7), 6, 3),
        (lag(pulled=2), 6, 0),  # it went back
        (lag(pulled=99), 6, 6),
        (lag(done=10), 0, 0),
        (lag(done=12), 0, 0),  # the broker lost its tail
        (lag(low=8), 2, 0),  # what was there before is gone
        (lag(low=8, pulled=9), 2, 1),
        (lag(done=-1), 10, 0),
        (lag(done=-1, low=3, pulled=5), 7, 2),
    ],
)
def test_lag_of_a_queue(queue, messages, in_flight):
    assert (queue.lag, queue.in_flight) == (messages, in_flight)


def test_retries_are_lag_and_counted_apart_too():
    queues = [lag(waits_ms=5), lag("u", waits_ms=9), lag("%RETRY%g", done=7, waits_ms=99)]
    progress = GroupProgress("g", queues, 0.0, 0, 0, "", 0)
    assert (progress.lag, progress.lag_ms, progress.retrying) == (15, 99, 3)
    waits = msgspec.structs.replace(progress, waiting_retries=4, waiting_retries_ms=200)
    assert (waits.lag, waits.lag_ms, waits.retrying) == (19, 200, 7)
    assert GroupProgress("g", [], 0.0, 0, 0, "", 0).lag_ms == 0


@pytest.mark.parametrize(
    ("old", "new", "low", "reread", "skipped"),
    [
        (4, 4, 0, 0, 0),
        (4, 0, 0, 4, 0),
        (4, 10, 0, 0, 6),
        (4, 10, 8, 0, 2),  # four to seven are gone in any case
        (-1, 10, 0, 0, 10),
        (-1, 0, 0, 0, 0),
        (-1, 10, 8, 0, 2),
    ],
)
def test_what_a_move_comes_to(old, new, low, reread, skipped):
    move = OffsetMove("b", OffsetChange("t", 0, old, new, low, 10))
    assert (move.reread, move.skipped) == (reread, skipped)
    moves = OffsetMoves([move, move], 0, True)
    assert (moves.reread, moves.skipped) == (2 * reread, 2 * skipped)
