"""How `mqmesh group` and `mqmesh query track` show what they found."""

from __future__ import annotations

import json

import pytest

from mqmesh.cli import main, render
from mqmesh.cli.admin import group, group_offsets
from mqmesh.cli.messages import track
from mqmesh.message import BatchInfo, StoredMessage
from mqmesh.protocol.groups import (
    ConsumerConnection,
    GroupConfig,
    GroupFailures,
    GroupSummary,
    OffsetChange,
    QueueProgress,
)
from mqmesh.protocol.membership import ConsumerData, Subscription
from mqmesh.sdk.admin.group_admin import GroupProgress, OffsetMove, OffsetMoves, QueueLag
from mqmesh.sdk.admin.tracks import MessageTrack, Track, TrackState

SETTINGS = {
    "consume_enable": True,
    "consume_broadcast_enable": True,
    "retry_max_times": -1,
    "notify_consumer_ids_changed_enable": True,
}


TWO_FAIL = GroupFailures(3, 2, 0.5)


def test_a_group_on_two_brokers_is_one_row():
    one = GroupSummary(GroupConfig("g"), True, 2, "CLUSTERING", ["t"], 5, 1.5, 1, 2, 1, TWO_FAIL)
    two = GroupSummary(GroupConfig("g", consume_enable=False), True, 1, "", ["u"], 7, 1.0, 0, 1, 0)
    (row,) = group._merged({"a": [one], "b": [two]})
    assert row == {
        "group": "g",
        "message_model": "CLUSTERING",
        "members": 2,
        "lag": 12,
        "consume_tps": 2.5,
        "retrying": 1,
        "recent_deliveries": 3,
        "recent_failures": 2,
        "failed_per_s": 0.5,
        "dead": 3,
        "differing": 1,
        "consume_enable": False,
        "topics": ["t", "u"],
        "brokers": [
            {"broker_name": "a", "is_configured": True} | SETTINGS,
            {"broker_name": "b", "is_configured": True} | SETTINGS | {"consume_enable": False},
        ],
    }
    assert str(group._remark(row)) == "1 subscribe differently, may not consume"


@pytest.mark.parametrize(
    ("topics", "shown"), [([], "-"), (["a", "b"], "a, b"), (list("abcde"), "a, b, c and 2 more")]
)
def test_few_topics_are_shown(topics, shown):
    assert group._topics(topics) == shown


@pytest.mark.parametrize(
    ("rate", "shown"), [(0.0, "0"), (0.25, "0.2"), (9.96, "10.0"), (12_345.6, "12,346")]
)
def test_rates(rate, shown):
    assert render.rate(rate) == shown


def test_progress_for_programs_has_everything():
    queues = [
        QueueLag("b", QueueProgress("t", 1, 0, 10, 4, 6, 1, "c"), 7_000),
        QueueLag("b", QueueProgress("%RETRY%g", 0, 0, 2, 1), 0),
    ]
    found = group._progress_dict(
        GroupProgress("g", queues, 2.5, 3, 1, "CLUSTERING", 0, 3, 50, TWO_FAIL)
    )
    assert (found["lag"], found["lag_ms"], found["in_flight"], found["retrying"]) == (
        10,
        7_000,
        2,
        4,
    )
    assert (found["waiting_retries"], found["recent_failures"]) == (3, 2)
    assert (found["consume_tps"], found["dead"], found["members"]) == (2.5, 3, 1)
    assert [one["is_retry"] for one in found["queues"]] == [False, True]
    assert found["queues"][0]["client_id"] == "c"


def test_subscriptions_leave_the_own_retries_out():
    data = ConsumerData(
        "g", "CLUSTERING", "LAST_OFFSET", [Subscription("t", "a || b"), Subscription("%RETRY%g")]
    )
    assert group._subscriptions(data) == "t a || b"
    member = ConsumerConnection("c", "PYTHON", "1", True, 5, data, "differs")
    assert group._member_dict(member)["difference"] == "differs"


def test_a_preview_says_that_nothing_was_changed(capsys):
    moves = [OffsetMove("b", OffsetChange("t", 0, 4, 1, 0, 10))]
    group_offsets._show("g", OffsetMoves(moves, 2, True))
    out = capsys.readouterr().out
    assert "would read 3 messages again and skip 0; 2 members would be told; nothing was" in out
    group_offsets._show("g", OffsetMoves(moves, 2, False))
    assert "group g reads 3 messages again and skips 0; 2 members were told" in (
        capsys.readouterr().out
    )
    (queue,) = group_offsets._as_dict("g", OffsetMoves(moves, 2, True))["queues"]
    assert (queue["old_offset"], queue["new_offset"], queue["reread"]) == (4, 1, 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reset-offset", "g"], "--topic"),
        (["reset-offset", "g", "-t", "t"], "one of --to-time"),
        (["reset-offset", "g", "-t", "t", "--to-first", "--to-last"], "one of --to-time"),
        (["reset-offset", "g", "-t", "t", "--to-time", "soon", "-n"], "'soon': must be a time"),
        (["reset-offset", "g", "-t", "t", "--to-first", "--json"], "look with --dry-run"),
        (["skip", "g", "--json"], "look with --dry-run"),
        (["clone-offset", "g"], "TARGET"),
        (["delete", "g", "--json"], "add --yes"),
        (["update", "g"], "nothing to change"),
        (["create", "g", "--retry-max-times", "-2"], "--retry-max-times"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(capsys, arguments, words):
    assert main.main(["--namesrv", "127.0.0.1:1", "group", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def copy():
    info = BatchInfo("t", 0, "b", 0, 1, 1, 1, 1_000, "h", "127.0.0.1:1", 1, 1, 0)
    return StoredMessage("t", b"x", queue_offset=5, batch=info)


def test_a_track_for_people(capsys):
    tracks = [
        Track("dead", TrackState.DEAD, 1, 16, "ValueError: \x1b[31mno"),
        Track("late", TrackState.RETRYING, 1, 1, due_ms=10**15),
        Track("slow", TrackState.WAITING, 1, messages_before=1_234, client_id="c"),
    ]
    track.show_track(MessageTrack([copy()], 0, tracks))
    out = capsys.readouterr().out
    assert "last failure: ValueError" in out
    assert "\x1b" not in out
    assert "comes again in" in out
    assert "1,234 messages before it; queue with c" in out
    track.show_track(MessageTrack([copy()], 0, []))
    assert "no group reads topic t" in capsys.readouterr().out
    track.show_track(MessageTrack([copy()], 10**15, []))
    assert "it is delayed, and will be delivered in" in capsys.readouterr().out


def test_a_track_for_programs():
    found = MessageTrack([copy()], 0, [Track("g", TrackState.CONSUMED)])
    shown = json.loads(json.dumps(track.track_dict("id", found)))
    assert shown["groups"][0]["state"] == "CONSUMED"
    assert shown["copies"][0]["queue_offset"] == 5
