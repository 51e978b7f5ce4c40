"""What a payload may hold when a broker stores it, and where its keys are."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqmesh.batch import payload_check
from mqmesh.batch.payload import MAX_MESSAGES, MAX_STRINGS, decode_payload, encode_payload
from mqmesh.batch.payload_check import check_payload, keys_in
from mqmesh.errors import CorruptBatch, MessageIllegal
from mqmesh.message import (
    MAX_FLAG,
    MAX_KEY_LENGTH,
    MAX_KEYS,
    MAX_PROPERTIES_BYTES,
    MAX_SHARDING_KEY_LENGTH,
    MAX_TAG_LENGTH,
    Message,
)
from mqmesh.units import MAX_TIMESTAMP_MS

LIMIT = 100
ONE = Message("t", b"x", "a", ("k", "é"), {"a": "b", "é": ""}, 300, "s", 5, 1 << 40)


def encode(*messages: object) -> bytes:
    return msgspec.msgpack.encode(list(messages))


def fields(**changed: object) -> list[object]:
    """A message as an array, to be made into anything."""
    return list((msgspec.structs.asdict(ONE) | changed).values())


@pytest.fixture(params=["in C", "in Python"])
def way(request, monkeypatch):
    if request.param == "in Python":
        monkeypatch.setattr(payload_check, "_checker", None)
    else:
        assert payload_check._checker is not None


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"body": bytes(LIMIT)},
        {"tag": None, "keys": (), "properties": None, "sharding_key": None},
        {"tag": "é" * MAX_TAG_LENGTH, "sharding_key": "\U0001f680" * MAX_SHARDING_KEY_LENGTH},
        {"keys": ("k" * MAX_KEY_LENGTH,) * MAX_KEYS},
        {"properties": {}},
        {"properties": {"a": "é" * (MAX_PROPERTIES_BYTES // 2 - 1), "b": ""}},
        {"flag": MAX_FLAG, "delay_level": MAX_FLAG, "deliver_at_ms": MAX_TIMESTAMP_MS},
    ],
)
@pytest.mark.usefixtures("way")
def test_what_a_producer_sends_passes(changed):
    for count in (1, 16):
        check_payload(encode(*[fields(**changed)] * count), count, "t", LIMIT)


ILLEGAL = {
    "another topic": fields(topic="u"),
    "no topic": fields(topic=None),
    "empty body": fields(body=b""),
    "body too large": fields(body=bytes(LIMIT + 1)),
    "text for a body": fields(body="x"),
    "empty tag": fields(tag=""),
    "tag too long": fields(tag="é" * (MAX_TAG_LENGTH + 1)),
    "number for a tag": fields(tag=5),
    "too many keys": fields(keys=["k"] * (MAX_KEYS + 1)),
    "empty key": fields(keys=["k", ""]),
    "key too long": fields(keys=["k" * (MAX_KEY_LENGTH + 1)]),
    "None for keys": fields(keys=None),
    "None for a key": fields(keys=[None]),
    "property without a name": fields(properties={"": "b"}),
    "too much of a property": fields(properties={"a": "b" * MAX_PROPERTIES_BYTES}),
    "too much of properties": fields(properties={"a": "é" * (MAX_PROPERTIES_BYTES // 2)}),
    "number for a property": fields(properties={"a": 5}),
    "list for properties": fields(properties=["a", "b"]),
    "flag too large": fields(flag=MAX_FLAG + 1),
    "negative flag": fields(flag=-1),
    "True for a flag": fields(flag=True),
    "None for a flag": fields(flag=None),
    "sharding key too long": fields(sharding_key="s" * (MAX_SHARDING_KEY_LENGTH + 1)),
    "delay level too large": fields(delay_level=MAX_FLAG + 1),
    "time too late": fields(deliver_at_ms=MAX_TIMESTAMP_MS + 1),
    "a field less": fields()[:8],
    "a field more": [*fields(), 1],
    "with a place and no batch": [*fields(), 1, None],
    "no array": {"topic": "t", "body": b"x"},
    "no message": 5,
    "nothing": None,
}


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("name", ILLEGAL)
@pytest.mark.usefixtures("way")
def test_one_illegal_message_is_enough(name, place):
    messages: list[object] = [fields()] * 3
    messages[place] = ILLEGAL[name]
    with pytest.raises(MessageIllegal):
        check_payload(encode(*messages), 3, "t", LIMIT)


@pytest.mark.usefixtures("way")
def test_texts_that_are_no_utf8_are_refused():
    for place in (b"\xa1t", b"\xa1a", b"\xa1k", b"\xa1b", b"\xa1s"):
        data = encode(fields(keys=["k"], properties={"p": "b"}))
        assert place in data
        with pytest.raises(MessageIllegal):
            check_payload(data.replace(place, b"\xa1\xff"), 1, "t", LIMIT)


@pytest.mark.usefixtures("way")
def test_nothing_may_be_missing_and_nothing_may_follow():
    data = encode(fields(), fields())
    check_payload(data, 2, "t", LIMIT)
    for size in range(len(data)):
        with pytest.raises(MessageIllegal):
            check_payload(data[:size], 2, "t", LIMIT)
    with pytest.raises(MessageIllegal):
        check_payload(data + b"\0", 2, "t", LIMIT)
    for count in (0, 1, 3, MAX_MESSAGES):
        with pytest.raises(MessageIllegal):
            check_payload(data, count, "t", LIMIT)


@pytest.mark.usefixtures("way")
def test_a_batch_has_only_so_many_texts():
    one = fields(keys=["k"] * MAX_KEYS, properties=None)
    count = MAX_STRINGS // MAX_KEYS
    check_payload(encode(*[one] * count), count, "t", LIMIT)
    with pytest.raises(MessageIllegal, match="keys and properties"):
        check_payload(encode(*[one] * (count + 1)), count + 1, "t", LIMIT)


@pytest.mark.usefixtures("way")
def test_it_is_said_which_message_is_wrong_and_what_would_be_right():
    data = encode(fields(), fields(topic="secret"))
    with pytest.raises(MessageIllegal, match="message 1 of 2: topic 'secret' differs from 't'"):
        check_payload(data, 2, "t", LIMIT)
    with pytest.raises(MessageIllegal, match=r"body of 101 bytes.*max_message_size"):
        check_payload(encode(fields(body=bytes(101))), 1, "t", LIMIT)


# ---- Keys ---------------------------------------------------------------------------------


def test_keys_are_found_as_they_stand_there():
    messages = [
        Message("t", b"x" * size, tag, keys, properties)
        for size, tag, keys, properties in [
            (1, None, ("k",), None),
            (300, "é", (), {"a": "b"}),
            (70_000, "tag" * 20, ["é", "l" * 255], {}),
            (5, None, ["m"] * MAX_KEYS, {f"{n}": "v" for n in range(20)}),
        ]
    ]
    raw, count = keys_in(encode_payload(messages).data, 4)
    assert count == 3
    lists = msgspec.msgpack.decode(b"\x93" + raw)
    assert lists == [list(one.keys) for one in messages if one.keys]


def test_what_is_no_payload_is_left_to_others():
    data = encode(fields(), fields())
    assert keys_in(data, 2) is not None
    for size in range(len(data)):
        assert keys_in(data[:size], 2) is None
    assert keys_in(data + b"\0", 2) is None
    for count in (0, 1, 3, -1):
        assert keys_in(data, count) is None


def test_more_keys_than_a_batch_may_have_are_left_to_others():
    one = fields(keys=["k"] * MAX_KEYS)
    count = MAX_STRINGS // MAX_KEYS
    assert keys_in(encode(*[one] * count), count)[1] == count
    assert keys_in(encode(*[one] * (count + 1)), count + 1) is None


# ---- Whatever comes -----------------------------------------------------------------------

texts = st.text("abé", max_size=40) | st.text("ab", min_size=250, max_size=260)
anything = st.none() | st.booleans() | st.integers(-1, 1 << 40) | texts | st.binary(max_size=5)
arrays = st.tuples(
    st.just("t") | anything,
    st.binary(max_size=LIMIT + 1) | anything,
    st.none() | texts | anything,
    st.lists(texts, max_size=3) | anything,
    st.none() | st.dictionaries(texts, texts, max_size=3) | anything,
    st.integers(0, MAX_FLAG) | anything,
    st.none() | texts | anything,
    st.just(0) | anything,
    st.just(0) | anything,
).map(list)


def passes(data: bytes, count: int) -> bool:
    try:
        check_payload(data, count, "t", LIMIT)
    except MessageIllegal:
        return False
    return True


def agree(data: bytes, count: int) -> None:
    """Both ways say the same, and what passes can be decoded, and its keys are found."""
    checker = payload_check._checker
    in_c = checker.check(data, count, "t", LIMIT)
    payload_check._checker = None
    try:
        in_python = passes(data, count)
    finally:
        payload_check._checker = checker
    if in_c:
        assert in_python
        messages = decode_payload(data)
        raw, found = keys_in(data, count)
        keys = [list(one.keys) for one in messages if one.keys]
        assert msgspec.msgpack.decode(b"\xdd" + found.to_bytes(4, "big") + raw) == keys
    elif in_python:
        # msgspec reads numbers and lengths that are longer than they need to be, and so on.
        assert encode(*(one.to_message() for one in decode_payload(data))) != data


@settings(max_examples=500)
@given(st.lists(arrays, min_size=1, max_size=4))
def test_both_ways_agree_about_any_fields(messages):
    agree(encode(*messages), len(messages))


@settings(max_examples=500)
@given(st.data())
def test_both_ways_agree_about_damage(data):
    whole = bytearray(encode(fields(deliver_at_ms=0), fields(keys=[], properties=None)))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    agree(bytes(whole), 2)


def test_damage_of_any_bit():
    whole = bytearray(encode(fields(), fields(keys=[], properties=None)))
    for bit in range(8 * len(whole)):
        whole[bit // 8] ^= 1 << bit % 8
        agree(bytes(whole), 2)
        whole[bit // 8] ^= 1 << bit % 8


def test_arguments_of_other_kinds_are_errors():
    for arguments in ((), (b"", 1, "t"), ("", 1, "t", 5), (b"", "1", "t", 5), (b"", 1, None, 5)):
        with pytest.raises(TypeError):
            payload_check._checker.check(*arguments)
    with pytest.raises(TypeError):
        payload_check._checker.keys(b"")
    with pytest.raises(CorruptBatch):
        decode_payload(b"\x91")
