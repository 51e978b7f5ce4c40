"""Messages as clients by gRPC send and read them."""

from __future__ import annotations

import gzip
from typing import Any

import pytest

from mqmesh.errors import InvalidArgument
from mqmesh.message import MAX_KEYS, BatchInfo, StoredMessage
from mqmesh.protocol.grpc.codes import BodyEncoding, MessageType, RefusedCall, ReplyCode
from mqmesh.protocol.grpc.messages import CLASSES
from mqmesh.roles.gateway.grpc.converting import (
    MAX_BODY_BYTES,
    MOST_PROPERTIES,
    read_message,
    timestamp,
    write_message,
)


def sent(body: bytes = b"x", properties: dict[str, str] | None = None, **system: Any) -> Any:
    system.setdefault("message_id", "ID")
    return CLASSES["Message"](
        topic=CLASSES["Resource"](name="t"),
        body=body,
        user_properties=[
            CLASSES["UserProperty"](key=key, value=value)
            for key, value in (properties or {}).items()
        ],
        system_properties=CLASSES["SystemProperties"](**system),
    )


def stored(message: Any) -> StoredMessage:
    info = BatchInfo(
        *("t", 1, "broker-a", 40, 4_096, 100, 1_000_001, 2_000_002, "host:1", "127.0.0.1:1"),
        *(7, 8, 0),
        attempt=2,
    )
    fields = [getattr(message, name) for name in message.__struct_fields__]
    return StoredMessage(*fields, 42, info)


def test_what_is_sent_is_read_again():
    message = read_message(
        sent(b"body", {"to": "größe"}, tag="new", keys=["k1", "k2"], message_group="g"), 0
    )
    assert (message.tag, message.keys, message.sharding_key) == ("new", ("k1", "k2", "ID"), "g")
    read = write_message(stored(message), {"receipt_handle": "r", "delivery_attempt": 2})
    system = read.system_properties
    assert (read.topic.name, read.body) == ("t", b"body")
    assert {one.key: one.value for one in read.user_properties} == {"to": "größe"}
    assert (system.tag, list(system.keys), system.message_id) == ("new", ["k1", "k2"], "ID")
    assert (system.message_group, system.message_type) == ("g", MessageType.FIFO)
    assert (system.queue_id, system.queue_offset, system.receipt_handle) == (1, 42, "r")
    assert (system.born_timestamp.seconds, system.born_timestamp.nanos) == (1_000, 1_000_000)
    assert system.body_digest.checksum == "841A2D689AD86BD1611447453C22C6FC"
    assert system.body_encoding == BodyEncoding.IDENTITY


def test_times_and_compressed_bodies_are_read():
    message = read_message(sent(delivery_timestamp=timestamp(1_500_000_000_123)), 0)
    assert message.deliver_at_ms == 1_500_000_000_123
    zipped = sent(gzip.compress(b"y" * 1_000), body_encoding=BodyEncoding.GZIP)
    assert read_message(zipped, 0).body == b"y" * 1_000


@pytest.mark.parametrize(
    "body",
    [gzip.compress(b"x")[:-9], gzip.compress(b"x")[:12], gzip.compress(b"x") + b"more"],
    ids=["no trailer", "no end", "more"],
)
def test_bodies_that_are_cut_off_or_go_on_are_refused(body):
    with pytest.raises(InvalidArgument, match="cut off, or goes on"):
        read_message(sent(body, body_encoding=BodyEncoding.GZIP), 0)


def test_a_body_is_decompressed_only_as_far_as_there_is_room():
    zipped = sent(gzip.compress(b"y" * 1_000), body_encoding=BodyEncoding.GZIP)
    assert len(read_message(zipped, 0, 1_000).body) == 1_000
    with pytest.raises(RefusedCall) as caught:
        read_message(zipped, 0, 999)
    assert caught.value.code is ReplyCode.MESSAGE_BODY_TOO_LARGE


@pytest.mark.parametrize(
    "message",
    [
        sent(properties={str(number): "" for number in range(MOST_PROPERTIES + 1)}),
        sent(keys=["k"] * (MAX_KEYS + 1)),
    ],
)
def test_too_many_properties_or_keys_are_refused(message):
    with pytest.raises(InvalidArgument, match="may be"):
        read_message(message, 0)


def test_a_topic_is_shown_as_its_reader_names_it():
    message = stored(read_message(sent(), 0))
    message.topic = "space%t"
    for space, expected in ("space", ("space", "t")), ("", ("", "space%t")):
        topic = write_message(message, {}, space).topic
        assert (topic.resource_namespace, topic.name) == expected


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (sent(message_id=""), ReplyCode.ILLEGAL_MESSAGE_ID),
        (sent(b""), ReplyCode.MESSAGE_BODY_EMPTY),
        (sent(bytes(MAX_BODY_BYTES + 1)), ReplyCode.MESSAGE_BODY_TOO_LARGE),
        (
            sent(gzip.compress(bytes(MAX_BODY_BYTES + 1)), body_encoding=BodyEncoding.GZIP),
            ReplyCode.MESSAGE_BODY_TOO_LARGE,
        ),
        (sent(properties={"KEYS": "x"}), ReplyCode.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (sent(properties={"RECONSUME_TIMES": "1"}), ReplyCode.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (sent(message_type=MessageType.FIFO), ReplyCode.ILLEGAL_MESSAGE_GROUP),
        (sent(message_type=MessageType.LITE), ReplyCode.NOT_IMPLEMENTED),
    ],
)
def test_wrong_messages_are_refused(message, code):
    with pytest.raises(RefusedCall) as caught:
        read_message(message, 0)
    assert caught.value.code is code
