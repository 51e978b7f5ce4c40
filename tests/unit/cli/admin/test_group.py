"""How `mqmesh group` and `mqmesh query track` show what they found."""

from __future__ import annotations

import pytest

from mqmesh.cli import main, render
from mqmesh.cli.admin import group, group_offsets
from mqmesh.cli.messages import track
from mqmesh.message import BatchInfo, StoredMessage
from mqmesh.protocol.groups import GroupConfig, GroupSummary, OffsetChange
from mqmesh.protocol.membership import Subscription
from mqmesh.protocol.policies import FOREVER_MS
from mqmesh.sdk.admin.group_admin import OffsetMove, OffsetMoves
from mqmesh.sdk.admin.tracks import MessageTrack, Track, TrackState
from mqmesh.sdk.admin.views.groups import group_settings_view, group_views, offset_moves_view
from mqmesh.sdk.admin.views.messages import track_view


def test_a_group_says_what_is_unusual():
    one = GroupSummary(GroupConfig("g"), differing=1)
    two = GroupSummary(GroupConfig("g", consume_enable=False))
    (row,) = group_views({"a": [one], "b": [two]})
    assert str(group._remark(row)) == "1 subscribe differently, may not consume"


def test_settings_say_the_policies_that_were_made():
    plain = GroupConfig("g")
    made = GroupConfig(
        "g",
        retry_delays="10s 30s",
        dead_letter="drop",
        paused_until=FOREVER_MS,
        paused_topics={"orders": 1_700_000_000_000},
        max_messages_per_s=1_000,
    )
    single = GroupConfig("g", delivery="message", priority_fairness=10)
    views = group_settings_view("g", {"a": plain, "b": made, "c": single})
    first, second, third = group._setting_lines("g", views.brokers)
    assert first == "group g on a: may consume, may broadcast, retries as each consumer says"
    assert second.removeprefix(first.replace(" a:", " b:")) == (
        ", retry delays 10s 30s, dead letters: drop, at most 1,000 messages/s, paused until it is "
        "resumed, orders paused until 2023-11-14T22:13:20.000Z"
    )
    assert "may broadcast, 16 retries, acknowledges each message" in third
    assert third.endswith(", one of 10 receives begins with the oldest message")


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


def test_subscriptions_leave_the_own_retries_out():
    subscriptions = [Subscription("t", "a || b"), Subscription("%RETRY%g")]
    assert group._subscriptions("g", subscriptions) == "t a || b"


def test_a_preview_says_that_nothing_was_changed(capsys):
    moves = [OffsetMove("b", OffsetChange("t", 0, 4, 1, 0, 10))]
    group_offsets._print_moves(offset_moves_view("g", OffsetMoves(moves, 2, True)))
    out = capsys.readouterr().out
    assert "would read 3 messages again and skip 0; 2 members would be notified; nothing was" in out
    group_offsets._print_moves(offset_moves_view("g", OffsetMoves(moves, 2, False)))
    assert "group g reads 3 messages again and skips 0; 2 members were notified" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reset-offset", "g"], "--topic"),
        (["pause", "g", "--until", "soon"], "must be a duration like 2h"),
        (["pause", "g", "--until", "2020-01-01T00:00"], "must be later than now"),
        (["create", "g", "--retry-delays", "10s, 30s"], "'10s,' is no delay of 1ms to 40 years"),
        (["create", "g", "--dead-letter", "%RETRY%g"], "the topic is reserved"),
        (["update", "g"], "nothing to change"),
        (["reset-offset", "g", "-t", "t"], "one of --to-time"),
        (["reset-offset", "g", "-t", "t", "--to-first", "--to-last"], "one of --to-time"),
        (["reset-offset", "g", "-t", "t", "--to-time", "soon", "-n"], "'soon': must be a time"),
        (["reset-offset", "g", "-t", "t", "--to-first", "--json"], "look with --dry-run"),
        (["skip", "g", "--json"], "look with --dry-run"),
        (["clone-offset", "g"], "TARGET"),
        (["delete", "g", "--json"], "add --yes"),
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
    track.print_track(track_view("id", MessageTrack([copy()], 0, tracks)))
    out = capsys.readouterr().out
    assert "last failure: ValueError" in out
    assert "\x1b" not in out
    assert "comes again in" in out
    assert "1,234 messages before it; queue with c" in out
    track.print_track(track_view("id", MessageTrack([copy()], 0, [])))
    assert "no group reads topic t" in capsys.readouterr().out
    track.print_track(track_view("id", MessageTrack([copy()], 10**15, [])))
    assert "it is delayed, and will be delivered in" in capsys.readouterr().out
