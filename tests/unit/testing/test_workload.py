"""What workers write down is read as the checker wants it."""

from __future__ import annotations

import random

import pytest
from harness.checker import ACKED, REFUSED, UNKNOWN, Attempt, Delivery
from harness.workload import (
    Line,
    Plan,
    Recorder,
    judge,
    make_body,
    read_attempts,
    read_deliveries,
    split_body,
)

from mqmesh.errors import EndpointUnreachable, NoRoute, QueueFull, RequestTimeout, SystemBusy


def test_bodies_say_who_sent_them():
    chance = random.Random(1)
    bodies = [make_body("sync-1", number, chance) for number in range(200)]
    assert [split_body(body) for body in bodies] == [("sync-1", number) for number in range(200)]
    assert len(set(bodies)) == 200


@pytest.mark.parametrize("body", [b"", b"x", b"a|b|c", b"a|1", b"\xff|-1|"])
def test_foreign_bodies_are_nobodys(body):
    assert split_body(body) == ("", -1)


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


def test_deliveries_are_read():
    line = Line("got", 4, hashes=["h"], producer="p", queue="b/0", queue_offset=9)
    line.message_ids, line.time_ms = ["A4"], 12.5
    assert list(read_deliveries("c", [Line("queues", queues=["b/0"]), line])) == [
        Delivery("p", 4, "h", "b/0", 9, "A4", 12.5, "c")
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


def test_lines_are_appended_whole(tmp_path):
    path = tmp_path / "lines"
    Recorder(path).write(Line("send", 1, hashes=["a"]))
    Recorder(path).write(Line("acked", 1), Line("send", 2))
    assert path.read_bytes().count(b"\n") == 3


def test_a_plan_has_no_unknown_keys():
    with pytest.raises(TypeError):
        Plan(name="p", kind="sync", namesrv_addr="a:1", topic="t", file="f", speed=1)
