"""What can be said of queries without a broker."""

from __future__ import annotations

import pytest

from mqmesh.errors import InvalidArgument
from mqmesh.message import BatchInfo, Message, StoredMessage
from mqmesh.protocol.queries import decode_found, encode_found
from mqmesh.sdk.admin.queries import QueryClient, parse_offset_message_id


@pytest.fixture
def client():
    with QueryClient("127.0.0.1:1") as client:
        yield client


def test_offset_message_ids_are_taken_apart():
    assert parse_offset_message_id("host.name:10911#1F40#A") == ("host.name:10911", 8000, 10)
    assert parse_offset_message_id("[::1]:1#0#ffff") == ("[::1]:1", 0, 65535)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host#1#1",
        "host:1#1",
        "host:1#x#1",
        "host:1#1#",
        "host:1#1#1#1",
        "host:1#FFFFFFFFFFFFFFFF#0",
        "host:123456#1#1",
        "ho st:1#1#1",
        "host:1#1#1\n",
    ],
)
def test_what_is_none_is_refused(text):
    with pytest.raises(InvalidArgument, match="host:port#OFFSET#ORDINAL"):
        parse_offset_message_id(text)


def test_bounds_are_checked_before_anybody_is_asked(client):
    for ask in (
        lambda: client.by_id("no id"),
        lambda: client.by_id("0" * 32, max_count=0),
        lambda: client.by_id("0" * 32, max_count=1_025),
        lambda: client.by_key("a topic", "k"),
        lambda: client.by_key("t", ""),
        lambda: client.by_key("t", "k" * 256),
        lambda: client.by_key("t", "k\udcff"),
        lambda: client.by_key("t", "k", from_ms=-1),
        lambda: client.by_key("t", "k", max_count=0),
        lambda: client.by_offset("t", -1, 0),
        lambda: client.by_offset("t", 0, 1 << 63),
        lambda: client.by_offset_id("x"),
    ):
        with pytest.raises(InvalidArgument):
            ask()


def test_found_messages_come_back_with_all_that_is_known_of_them():
    batch = BatchInfo("%RETRY%g", 1, "", 2, 3, 4, 5, 6, "h:1", "", 7, 8, 9)
    message = StoredMessage(
        "t", b"body", "tag", ("k",), {"p": "v"}, 1, "shard", 2, 0, queue_offset=3, batch=batch
    )
    (found,) = decode_found(encode_found([message]), broker_name="b", store_host="h:2")
    assert found.to_message() == message.to_message()
    assert type(found) is StoredMessage
    assert (found.queue_offset, found.ordinal) == (3, 1)
    assert (found.broker_name, found.store_host) == ("b", "h:2")
    assert found.info.topic == "%RETRY%g"
    assert found.offset_message_id == "h:2#3#1"
    assert isinstance(found.to_message(), Message)
