"""What `mqmesh dlq` refuses before it asks anybody, and how it shows a dead letter."""

from __future__ import annotations

import json
from collections import Counter

import msgspec
import pytest

from mqmesh.cli import main
from mqmesh.cli.messages import dlq
from mqmesh.message import BatchInfo, StoredMessage
from mqmesh.protocol.retries import ResendStatus
from mqmesh.sdk.admin.dead_letters import DeadLetter

INFO = BatchInfo("%DLQ%billing", 0, "broker-a", 40, 4096, 500, 1, 2, "vm:1", "h:1", 1, 2, 3)


def with_failure(text: str) -> StoredMessage:
    return StoredMessage("orders", b"", properties={"LAST_FAILURE": text}, batch=INFO)


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


def test_a_dead_letter_for_programs_has_its_reason_and_all_fields():
    found = msgspec.json.decode(msgspec.json.encode(dlq.as_dict(LETTER)))
    assert found["reason"].startswith("ValueError: ")
    assert (found["broker_name"], found["dlq_offset"]) == ("broker-a", 41)
    assert found["resent_timestamp"] == 1_600_000_000_000
    assert (found["topic"], found["physical_topic"]) == ("orders", "%DLQ%billing")
    assert (found["body"], found["reconsume_times"]) == ("body", 17)


def test_what_cannot_be_decoded_is_exported_as_it_is():
    found = dlq.as_dict(UNDECODABLE)
    assert (found["message_count"], found["batch_base64"]) == (3, "TVFCMS4uLg==")


def test_nothing_can_command_the_terminal(capsys):
    assert "\x1b" not in "".join(map(str, dlq._row(LETTER)))
    assert "3 messages" in str(dlq._row(UNDECODABLE)[0])
    dlq._print_letter(LETTER)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "orders" in shown


def test_a_failure_is_cut_with_a_mark_and_without_its_module():
    long = msgspec.structs.replace(LETTER, message=with_failure(f"a.b.Bad: {'x' * 90}"))
    shown = dlq.short_reason(long)
    assert (shown[:6], len(shown), shown[-2:]) == ("Bad: x", dlq.REASON_WIDTH, "x…")
    short = msgspec.structs.replace(LETTER, message=with_failure("it said a.b: no"))
    assert dlq.short_reason(short) == "it said a.b: no"


def test_what_became_of_a_resend_is_told(capsys):
    counts = Counter({ResendStatus.RESENT: 5, ResendStatus.ALREADY_RESENT: 2, ResendStatus.GONE: 1})
    problems = [(UNDECODABLE, "it cannot be decoded")]
    dlq._show_resent(counts, problems, dry_run=True, as_json=False)
    told = capsys.readouterr()
    assert "5 would be resent, 2 resent before" in told.out
    assert "1 gone meanwhile, 1 refused" in told.out
    assert "broker-a@50: it cannot be decoded" in told.err
    dlq._show_resent(counts, problems, dry_run=False, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["resent"], found["already_resent"], found["gone"]) == (5, 2, 1)
    assert found["problems"][0]["message_id"] is None
