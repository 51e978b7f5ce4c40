"""The audit log: who changed what, and who was refused."""

from __future__ import annotations

import json
import logging
import stat

import pytest
from harness.peers import KeptPeer

from mqmesh.errors import ConfigError, NoPermission
from mqmesh.protocol.command import Principal
from mqmesh.protocol.commands import RequestCode
from mqmesh.roles import audit_log
from mqmesh.roles.audit_log import AuditLog
from mqmesh.testing.clock import ManualClock

DELETE = RequestCode.DELETE_TOPIC_IN_BROKER


def peer_of(user="ann") -> KeptPeer:
    peer = KeptPeer(b"peer", principal=Principal(user))
    peer.address = "10.0.0.7:4711"
    return peer


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def make(tmp_path, clock):
    made = []

    def make(server="broker broker-a"):
        made.append(AuditLog(tmp_path / "audit.jsonl", server, clock))
        return made[-1]

    yield make
    for one in made:
        one.close()


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_who_did_what_to_what_from_where(make, tmp_path):
    make().note(peer_of(), DELETE, ["orders"], [], None, "")
    (line,) = lines_of(tmp_path / "audit.jsonl")
    assert line.pop("time").endswith("Z")
    assert line == {
        "server": "broker broker-a",
        "user": "ann",
        "address": "10.0.0.7:4711",
        "command": "DELETE_TOPIC_IN_BROKER",
        "topics": ["orders"],
        "result": "SUCCESS",
    }
    assert stat.S_IMODE((tmp_path / "audit.jsonl").stat().st_mode) == 0o600


def test_a_line_stays_a_line_and_short(make, tmp_path):
    bad = NoPermission("no\n" * 10_000)
    make().note(peer_of("x" * 255), DELETE, ["t" * 255] * 100, ["g\n" * 200] * 100, bad, "")
    (text,) = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert len(text) < 8_192
    assert json.loads(text)["result"] == "NO_PERMISSION"


def test_refusals_of_a_user_are_limited_and_counted_but_what_is_done_never(make, tmp_path, clock):
    log = make()
    for _ in range(25):
        log.note(peer_of("thief"), DELETE, [], [], NoPermission("no"), "")
    log.note(peer_of("other"), DELETE, [], [], NoPermission("no"), "")
    for _ in range(20):
        log.note(peer_of("ann"), DELETE, [], [], None, "")
    assert len(lines_of(tmp_path / "audit.jsonl")) == 10 + 1 + 20
    clock.advance(1_000)
    log.note(peer_of("thief"), DELETE, [], [], NoPermission("no"), "")
    assert lines_of(tmp_path / "audit.jsonl")[-1]["left_out"] == 15


def test_two_processes_share_the_file_also_when_it_is_full(make, tmp_path, monkeypatch):
    monkeypatch.setattr(audit_log, "FILE_BYTES", 2_000)
    one, two = make("broker a"), make("broker b")
    for number in range(60):
        (one, two)[number % 2].note(peer_of(), DELETE, [f"t{number}"], [], None, "")
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["audit.jsonl"] + [
        f"audit.jsonl.{number}" for number in range(1, 5)
    ]
    kept = [line["topics"][0] for file in reversed(files) for line in lines_of(file)]
    assert kept == [f"t{number}" for number in range(60 - len(kept), 60)]
    assert all(file.stat().st_size < 2_500 for file in files)


def test_a_full_disk_refuses_nobody_and_is_told(make, tmp_path, caplog):
    (tmp_path / "audit.jsonl").symlink_to("/dev/full")
    with caplog.at_level(logging.ERROR):
        make().note(peer_of(), DELETE, ["orders"], [], None, "")
    assert "audit.jsonl lacks a line" in caplog.text
    assert "No space left" in caplog.text


def test_a_file_that_cannot_be_opened_is_said_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"audit log .*Is a directory"):
        (tmp_path / "audit.jsonl").mkdir()
        AuditLog(tmp_path / "audit.jsonl", "broker a", ManualClock())
