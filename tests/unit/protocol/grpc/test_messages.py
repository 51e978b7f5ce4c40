"""Messages of RocketMQ 5's protocol: golden bytes, as the official Java client writes them."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError

from mqmesh.protocol.grpc.messages import CLASSES, check_send
from mqmesh.units import MIB


def test_a_message_has_rocketmqs_numbers():
    message = CLASSES["Message"](
        topic=CLASSES["Resource"](name="t"),
        user_properties=[CLASSES["UserProperty"](key="a", value="b")],
        system_properties=CLASSES["SystemProperties"](
            keys=["k"], message_id="1", delivery_attempt=2, queue_offset=3, message_group="g"
        ),
        body=b"x",
    )
    assert message.SerializeToString() == (
        b"\x0a\x03\x12\x01t"  # topic.name
        b"\x12\x06\x0a\x01a\x12\x01b"
        b"\x1a\x0f\x12\x01k\x1a\x011\x70\x03\x80\x01\x02\x8a\x01\x01g"
        b"\x22\x01x"
    )


def test_lists_of_enums_are_packed_as_rocketmqs_are():
    queue = CLASSES["MessageQueue"](id=-1, accept_message_types=[1, 2])
    assert queue.SerializeToString() == b"\x10" + b"\xff" * 9 + b"\x01\x2a\x02\x01\x02"


def test_none_and_zero_differ_where_that_matters():
    system = CLASSES["SystemProperties"]
    assert system.FromString(b"\xb0\x01\x00").HasField("priority")
    assert not system.FromString(b"").HasField("priority")


def test_unknown_fields_are_passed_over_and_rubbish_is_an_error():
    kind = CLASSES["Resource"]
    assert kind.FromString(b"\x12\x01t\xfa\x01\x01x").name == "t"
    for data in b"\x12\x05t", b"\x12\x01\xff", b"\x07":
        with pytest.raises(DecodeError):
            kind.FromString(data)


def _request(*messages: object) -> bytes:
    return CLASSES["SendMessageRequest"](messages=messages).SerializeToString()


def test_a_send_may_be_long_by_its_bodies_only():
    topic, system = CLASSES["Resource"](name="t"), CLASSES["SystemProperties"](message_id="x")
    message = CLASSES["Message"](topic=topic, system_properties=system, body=bytes(9_000))
    check_send(_request(*[message] * 1_000))
    message.body = bytes(4 * MIB)
    check_send(_request(message))
    message.system_properties.trace_context = "x" * MIB
    with pytest.raises(ValueError, match="bytes beside bodies"):
        check_send(_request(message))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x12\x00" * MIB, "more than 32768 fields"),
        (b"\x0a\x80\x80\x80\x01" + b"\x12\x00" * MIB, "more than 32768 fields"),
        (b"\x0a\xff\xff\xff\x7f" + bytes(MIB), "cut off"),
        (b"\xff" * (MIB + 1), "cut off"),
        (b"\x0f" * (MIB + 1), "a field of kind 7"),
    ],
    ids=["many", "properties", "length", "number", "kind"],
)
def test_a_long_send_of_many_fields_is_refused_before_it_is_read(data, text):
    with pytest.raises(ValueError, match=text):
        check_send(data)
