"""Replies under way."""

from __future__ import annotations

import pytest
from harness.peers import KeptPeer

from mqmesh.errors import SystemBusy
from mqmesh.protocol.request import PendingReply
from mqmesh.roles.broker.open_replies import (
    ACKNOWLEDGE_TIMEOUT_MS,
    ReplyTable,
)

MOST = 3


def pending(opaque: int, asked_ms: int = 0) -> PendingReply:
    deadline_ms = asked_ms + ACKNOWLEDGE_TIMEOUT_MS
    return PendingReply(KeptPeer(b"replier"), 324, opaque, 0, deadline_ms)


def test_an_acknowledged_reply_answers_its_replier_once():
    table = ReplyTable()
    asked = pending(1)
    token = table.open(asked, b"asker", MOST)
    assert table.on_acknowledged(b"asker", token) is asked
    assert table.on_acknowledged(b"asker", token) is None
    assert len(table) == 0


def test_nobody_but_the_client_that_asked_acknowledges():
    table = ReplyTable()
    token = table.open(pending(1), b"asker", MOST)
    assert table.on_acknowledged(b"somebody", token) is None
    assert table.on_acknowledged(b"asker", token + 1) is None
    assert len(table) == 1


def test_a_broken_connection_gives_up_its_replies_only():
    table = ReplyTable()
    first, second, other = pending(1), pending(2), pending(3)
    table.open(first, b"asker", MOST)
    table.open(other, b"other", MOST)
    table.open(second, b"asker", MOST)
    assert table.on_disconnect(b"asker") == [first, second]
    assert table.on_disconnect(b"asker") == []
    assert len(table) == 1


def test_what_is_not_acknowledged_expires():
    table = ReplyTable()
    first, second = pending(1), pending(2, 10)
    table.open(first, b"asker", MOST)
    table.open(second, b"asker", MOST)
    assert table.expire(ACKNOWLEDGE_TIMEOUT_MS - 1) == []
    assert table.expire(ACKNOWLEDGE_TIMEOUT_MS) == [first]
    assert table.expire(ACKNOWLEDGE_TIMEOUT_MS + 10) == [second]
    assert table.on_disconnect(b"asker") == []


def test_the_table_is_bounded():
    table = ReplyTable()
    for n in range(MOST):
        table.open(pending(n), b"asker", MOST)
    with pytest.raises(SystemBusy, match="max_open_replies"):
        table.open(pending(9), b"asker", MOST)
