"""Plain messages of one size, encoded and proved at once."""

from __future__ import annotations

import datetime
import random

import pytest

from mqmesh.message import Message, StoredMessage
from mqmesh.payload import (
    CODEC_ZSTD,
    MAX_RAW_BYTES,
    UNIFORM_MESSAGES,
    decode_payload,
    encode_payload,
    encode_uniform,
)

MAX_BODY = 4 * 1024 * 1024


def uniform(messages, **options):
    return encode_uniform(messages, **{"max_body_bytes": MAX_BODY} | options)


@pytest.mark.parametrize("size", [1, 31, 32, 128, 255, 256, 65_535, 65_536])
@pytest.mark.parametrize("count", [UNIFORM_MESSAGES, 15, 16, 40])
@pytest.mark.parametrize("topic", ["t", "t" * 31, "t" * 32, "%RETRY%" + "g" * 255])
def test_it_gives_what_encoding_gives(size, count, topic):
    chance = random.Random(size)
    messages = [Message(topic, chance.randbytes(size)) for _ in range(count)]
    payload = uniform(messages)
    assert payload == encode_payload(messages)
    assert [one.body for one in decode_payload(payload.data)] == [one.body for one in messages]


def test_it_compresses_as_encoding_does():
    messages = [Message("t", bytes(5_000)) for _ in range(20)]
    payload = uniform(messages, compress_over_bytes=4_096)
    assert payload.codec == CODEC_ZSTD
    assert payload == encode_payload(messages, compress_over_bytes=4_096)


class Other(Message, array_like=True):
    more: int = 0


def differing():
    body = b"x" * 100
    return {
        "tag": Message("t", body, "a"),
        "empty tag": Message("t", body, ""),
        "keys": Message("t", body, None, ("k",)),
        "properties": Message("t", body, properties={"a": "b"}),
        "no properties": Message("t", body, properties={}),
        "flag": Message("t", body, flag=1),
        "True for a flag": Message("t", body, flag=True),
        "sharding key": Message("t", body, sharding_key="s"),
        "delay level": Message("t", body, delay_level=1),
        "time of delivery": Message("t", body, deliver_at_ms=1),
        "negative time": Message("t", body, deliver_at_ms=-1),
        "other topic": Message("u", body),
        "longer topic": Message("tt", body),
        "bytes for a topic": Message(b"t", body),
        "text for a body": Message("t", "x" * 100),
        "longer body": Message("t", body + b"x"),
        "shorter body": Message("t", body[1:]),
        "empty body": Message("t", b""),
        "no body": Message("t", None),
        "time for a body": Message("t", datetime.datetime(2026, 1, 1)),
        "unknown for a body": Message("t", object()),
        "stored message": StoredMessage("t", body),
        "subclass": Other("t", body),
        "list": ["t", body, None, (), None, 0, None, 0],
        "number": 5,
        "None": None,
    }


@pytest.mark.parametrize("place", [0, 1, 4, 7])
@pytest.mark.parametrize("name", differing())
def test_one_message_that_differs_is_enough(name, place):
    messages = [Message("t", b"x" * 100) for _ in range(8)]
    messages[place] = differing()[name]
    assert uniform(messages) is None


def test_a_body_cannot_feign_a_message():
    # Two bodies that together look like a boundary, in front of a message that is none.
    plain = encode_payload([Message("t", b"x" * 100)]).data[1:]
    messages = [Message("t", plain[:100]) for _ in range(8)]
    messages[3] = Message("t", b"x" * 99, flag=200)
    assert uniform(messages) is None
    assert uniform([Message("t", plain[:100]) for _ in range(8)]) is not None


@pytest.mark.parametrize(
    "messages",
    [
        None,
        5,
        Message("t", b"x"),
        [],
        "text of some length",
        (Message("t", b"x"),) * 8,
        [Message("t", b"x")] * (UNIFORM_MESSAGES - 1),
        [Message("t", b"x")] * 65_537,
        [Message("t", b"x" * 101)] * 8,
    ],
)
def test_what_is_not_for_it_is_left_to_others(messages):
    assert encode_uniform(messages, max_body_bytes=100) is None


def test_a_payload_over_the_bound_is_left_to_others():
    body = bytes(MAX_RAW_BYTES // 8)
    assert encode_uniform([Message("t", body)] * 8, max_body_bytes=MAX_RAW_BYTES) is None


def test_a_body_that_is_no_bytes_but_written_like_them_is_as_good():
    messages = [Message("t", b"x" * 100) for _ in range(8)]
    messages[1] = Message("t", bytearray(b"y" * 100))
    assert decode_payload(uniform(messages).data)[1].body == b"y" * 100
