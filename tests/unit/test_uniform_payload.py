"""The keys of messages of one size, cut out at once."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.message import Message
from mqmesh.payload import encode_payload
from mqmesh.uniform_payload import uniform_keys

KEYS = [["k"], ["a", "b" * 31], ["c" * 32], ["d" * 100, "e"], [f"{n:02d}" for n in range(16)]]


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
