"""What workers write down is read as the checker wants it."""

from __future__ import annotations

import pytest
from harness.checker import ACKED, REFUSED, UNKNOWN, Attempt
from harness.workload import Line, judge, read_attempts

from mqmesh.errors import EndpointUnreachable, NoRoute, QueueFull, RequestTimeout, SystemBusy


def test_an_attempt_is_unknown_until_its_outcome_is_written():
    lines = [
        Line("send", 0, 2, ["a", "b"], time_ms=5.0),
        Line("send", 2, 1, ["c"], time_ms=6.0),
        Line("send", 3, 1, ["d"]),
        Line("acked", 0, 2, queue="b/1", queue_offset=7, message_ids=["A0", "A1"], time_ms=9.0),
        Line("refused", 3, why="SystemBusy"),
    ]
    assert list(read_attempts("p", lines)) == [
        Attempt("p", 0, "a", ACKED, "batch", "b/1", 7, "A0", 5.0, 9.0),
        Attempt("p", 1, "b", ACKED, "batch", "b/1", 8, "A1", 5.0, 9.0),
        Attempt("p", 2, "c", UNKNOWN, "single", called_ms=6.0),
        Attempt("p", 3, "d", REFUSED, "single"),
    ]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RequestTimeout("x"), UNKNOWN),
        (EndpointUnreachable("x"), UNKNOWN),
        (SystemBusy("x"), REFUSED),
        (QueueFull("x"), REFUSED),
        (NoRoute("x"), REFUSED),
    ],
)
def test_errors_tell_what_may_have_become_of_a_message(error, outcome):
    assert judge(error) == outcome
