"""What `mqmesh dlq` refuses before it asks anybody, and how it shows a dead letter."""

from __future__ import annotations

from collections import Counter

import pytest

from mqmesh.cli import main
from mqmesh.cli.messages import dlq
from mqmesh.cli.render import Table
from mqmesh.message import BatchInfo, StoredMessage
from mqmesh.protocol.retries import ResendStatus
from mqmesh.sdk.admin.dead_letters import DeadLetter
from mqmesh.sdk.admin.views.messages import dead_letter_view, resent_view

INFO = BatchInfo("%DLQ%billing", 0, "broker-a", 40, 4096, 500, 1, 2, "vm:1", "h:1", 1, 2, 3)


MESSAGE = StoredMessage(
    "orders",
    b"body",
    properties={"LAST_FAILURE": "ValueError: \x1b[31mred", "RECONSUME_TIMES": "17"},
    queue_offset=41,
    batch=INFO,
)
LETTER = DeadLetter("broker-a", 41, MESSAGE, resent_ms=1_600_000_000_000)
UNDECODABLE = DeadLetter("broker-a", 50, None, undecodable=b"MQB1...", count=3)
MESSAGE_ID = "0C6A9F0E5D3B7A12000000000000002A"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["resend", "billing"], "say which ones"),
        (["resend", "billing", "--all", "--tag", "x"], "exclude each other"),
        (["resend", "billing", MESSAGE_ID, "--all"], "exclude each other"),
        (["resend", "billing", "no-id"], "32 hex digits"),
        (["show", "billing", "no-id"], "32 hex digits"),
        (["list", "billing", "--from", "1h", "--to", "2h"], "--from is behind --to"),
        (["list", "billing", "--from", "soon"], "must be a time"),
        (["list", "no group"], "group"),
        (["list", "billing", "--topic", "no topic"], "topic"),
        (["list", "billing", "--max", "0"], "--max"),
    ],
)
def test_wrong_wishes_are_refused_in_a_line(capsys, arguments, words):
    assert main.main(["dlq", *arguments, "--namesrv", "127.0.0.1:1"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_nothing_can_command_the_terminal(capsys):
    Table(dlq._LETTERS, [dead_letter_view(LETTER), dead_letter_view(UNDECODABLE)]).print()
    dlq._print_letter(LETTER)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "orders" in shown
    assert "3 messages at broker-a@50" in shown


def test_a_failure_is_cut_with_a_mark_and_without_its_module():
    shown = dlq.short_reason(f"a.b.Bad: {'x' * 90}")
    assert (shown[:6], len(shown), shown[-2:]) == ("Bad: x", dlq.REASON_WIDTH, "x…")
    assert dlq.short_reason("it said a.b: no") == "it said a.b: no"


def test_what_became_of_a_resend_is_told(capsys):
    counts = Counter({ResendStatus.RESENT: 5, ResendStatus.ALREADY_RESENT: 2, ResendStatus.GONE: 1})
    problems = [(UNDECODABLE, "it cannot be decoded")]
    dlq._print_resent(resent_view(counts, problems, dry_run=True))
    printed = capsys.readouterr()
    assert "5 would be resent, 2 resent before" in printed.out
    assert "1 gone meanwhile, 1 refused" in printed.out
    assert "broker-a@50: it cannot be decoded" in printed.err
