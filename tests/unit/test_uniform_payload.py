"""Messages of one size, encoded and proved at once."""

from __future__ import annotations

import datetime
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.message import Message, StoredMessage
from mqmesh.payload import (
    CODEC_ZSTD,
    MAX_RAW_BYTES,
    decode_payload,
    encode_payload,
)
from mqmesh.uniform_payload import UNIFORM_MESSAGES, encode_uniform, uniform_keys

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


KEYS = [["k"], ["a", "b" * 31], ["c" * 32], ["d" * 100, "e"], [f"{n:02d}" for n in range(16)]]


@pytest.mark.parametrize("count", [UNIFORM_MESSAGES, 40])
@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("keys", KEYS)
def test_keys_of_the_same_sizes_may_differ(keys, kind, count):
    messages = []
    for number in range(count):
        own = kind(key[:-1] + chr(ord("a") + number % 26) for key in keys)
        messages.append(Message("t", b"%0100d" % number, None, own))
    payload = uniform(messages)
    assert payload == encode_payload(messages)
    assert payload.has_keys
    assert [list(one.keys) for one in decode_payload(payload.data)] == [
        list(one.keys) for one in messages
    ]


def keyed_otherwise():
    raw = msgspec.Raw(b"\xa3\xff\xff\xff")
    return {
        "none": (),
        "one": ("abc",),
        "three": ("abc", "def", "g"),
        "longer": ("abcd", "def"),
        "the first longer": ("abcd", "de"),
        "not ASCII": ("abc", "d\xe9"),
        "not ASCII, as many characters": ("abc", "de\xe9"),
        "a surrogate": ("abc", "de\ud800"),
        "empty": ("abcdef", ""),
        "bytes": ("abc", b"de"),
        "raw bytes that are no text": ("abc", raw),
        "None": ("abc", None),
        "a text": "abcdef",
        "no keys at all": None,
    }


@pytest.mark.parametrize("place", [0, 1, 4, 7])
@pytest.mark.parametrize("name", keyed_otherwise())
def test_one_message_with_other_keys_is_enough(name, place):
    messages = [Message("t", b"x" * 100, None, ("abc", "def")) for _ in range(8)]
    assert uniform(messages) is not None
    messages[place] = Message("t", b"x" * 100, None, keyed_otherwise()[name])
    assert uniform(messages) is None


@pytest.mark.parametrize("keys", [["k"] * 65, ["k" * 256], [""], ["k" * 64, "k" * 65]])
def test_keys_that_are_illegal_or_many_are_left_to_others(keys):
    assert uniform([Message("t", b"x" * 100, None, keys) for _ in range(8)]) is None


def test_more_keys_than_a_batch_may_have_are_left_to_others():
    keys = ["k"] * 64
    assert uniform([Message("t", b"x", None, keys) for _ in range(16_385)]) is None


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


# ---- The keys of a payload ---------------------------------------------------------------


class RawMessage(msgspec.Struct, array_like=True):
    topic: msgspec.Raw
    body: msgspec.Raw
    tag: msgspec.Raw
    keys: msgspec.Raw


def decoded_keys(payload):
    """What ``uniform_keys`` must say if it says anything; None where the payload is bad."""
    try:
        messages = msgspec.msgpack.decode(payload, type=list[RawMessage])
    except msgspec.MsgspecError:
        return None
    return b"".join(bytes(message.keys) for message in messages)


@pytest.mark.parametrize("count", [8, 15, 16, 63, 64, 65, 200])
@pytest.mark.parametrize("size", [1, 255, 256, 65_536])
@pytest.mark.parametrize("keys", [[], *KEYS, ["k" * 255] * 3])
def test_keys_are_cut_out(keys, size, count):
    chance = random.Random(size)
    messages = []
    for number in range(count):
        own = [key[:-1] + chr(ord("a") + number % 26) for key in keys]
        more = {"tag": "t", "properties": {"a": "b"}} if count % 2 else {}
        messages.append(Message("t", chance.randbytes(size), keys=own, **more))
    data = encode_payload(messages).data
    assert uniform_keys(memoryview(data), count) == decoded_keys(data)


@pytest.mark.parametrize("place", [0, 1, 4, 7])
@pytest.mark.parametrize(
    "other",
    [
        Message("t", b"x" * 100, None, ("abc", "de")),
        Message("t", b"x" * 99, None, ("abcd", "def")),
        Message("t", b"x" * 99, "a", ("abc", "def")),
        Message("t", b"x" * 100, None, ("ab", "cdef")),
        Message("t", b"x" * 100, None, ("abcdefg",)),
        Message("u", b"x" * 100, None, ("abc", "def")),
        Message("t", b"x" * 100, None, ("abc", "def"), {}),
        Message("t", b"x" * 100, None, ("abc", "def"), None, 5),
        Message("t", b"x" * 100, None, ("abc", "def"), None, 0, "s"),
    ],
)
def test_messages_that_differ_are_left_to_others(place, other):
    messages = [Message("t", b"x" * 100, None, ("abc", "def")) for _ in range(8)]
    assert uniform_keys(encode_payload(messages).data, 8) is not None
    messages[place] = other
    assert uniform_keys(encode_payload(messages).data, 8) is None


@pytest.mark.parametrize(
    "message",
    [
        ["t", b"body"],
        ["t", "body", None, []],
        ["t", b"body", None, "keys"],
        ["t", b"body", None, ["k", 5]],
        ["t", b"body", None, [None]],
        ["t", b"body", None, ["k" * 256]],
        ["t", b"body", None, ["k"], {"p" * 600: "v"}],
        ["t", b"body", None, ["k"], "p" * 5_000],
        ["t", b"body", None, ["k"], *range(20)],
        {"topic": "t"},
        7,
    ],
)
def test_unusual_messages_are_left_to_others(message):
    assert uniform_keys(msgspec.msgpack.encode([message] * 8), 8) is None


def test_few_messages_are_left_to_others():
    data = encode_payload([Message("t", b"x", None, ("k",))] * 7).data
    assert uniform_keys(data, 7) is None


@given(
    st.lists(st.integers(1, 40), max_size=3),
    st.integers(8, 20),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=3),
)
def test_whatever_the_bytes_are_it_agrees_with_decoding_or_says_nothing(sizes, count, changes):
    keys = [["k" * size for size in sizes] for _ in range(count)]
    data = bytearray(encode_payload([Message("t", b"x" * 9, None, own) for own in keys]).data)
    start = 1 if count < 16 else 3  # the number of messages is right: open_payload saw to it
    for place, value in changes:
        data[start + place % (len(data) - start)] = value
    found = uniform_keys(bytes(data), count)
    if found is not None:
        assert found == decoded_keys(bytes(data))
