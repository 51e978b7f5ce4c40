"""Replies under way."""

from __future__ import annotations

import pytest

from mqmesh.errors import SystemBusy
from mqmesh.protocol.command import Request, decode_frame, encode_frame
from mqmesh.roles.broker.features.request_reply.open_requests import (
    ACKNOWLEDGE_TIMEOUT_MS,
    ReplyTable,
)

MOST = 3


def request(opaque: int) -> Request:
    return Request(b"replier", decode_frame(encode_frame(324, opaque)))


def test_an_acknowledged_reply_answers_its_replier_once():
    table = ReplyTable()
    asked = request(1)
    token = table.open(asked, b"asker", 0, MOST)
    assert table.on_acknowledged(b"asker", token) is asked
    assert table.on_acknowledged(b"asker", token) is None
    assert len(table) == 0


def test_nobody_but_the_client_that_asked_acknowledges():
    table = ReplyTable()
    token = table.open(request(1), b"asker", 0, MOST)
    assert table.on_acknowledged(b"somebody", token) is None
    assert table.on_acknowledged(b"asker", token + 1) is None
    assert len(table) == 1


def test_a_broken_connection_gives_up_its_replies_only():
    table = ReplyTable()
    first, second, other = request(1), request(2), request(3)
    table.open(first, b"asker", 0, MOST)
    table.open(other, b"other", 0, MOST)
    table.open(second, b"asker", 0, MOST)
    assert table.on_disconnect(b"asker") == [first, second]
    assert table.on_disconnect(b"asker") == []
    assert len(table) == 1


def test_what_is_not_acknowledged_expires():
    table = ReplyTable()
    first, second = request(1), request(2)
    table.open(first, b"asker", 0, MOST)
    table.open(second, b"asker", 10, MOST)
    assert table.expire(ACKNOWLEDGE_TIMEOUT_MS - 1) == []
    assert table.expire(ACKNOWLEDGE_TIMEOUT_MS) == [first]
    assert table.expire(ACKNOWLEDGE_TIMEOUT_MS + 10) == [second]
    assert table.on_disconnect(b"asker") == []


def test_the_table_is_bounded():
    table = ReplyTable()
    for n in range(MOST):
        table.open(request(n), b"asker", 0, MOST)
    with pytest.raises(SystemBusy, match="max_open_replies"):
        table.open(request(9), b"asker", 0, MOST)
