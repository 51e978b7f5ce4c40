"""Batches encoded at once are what the careful way makes of them, or left to it."""

from __future__ import annotations

import datetime
import random
import sys
import threading
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqmesh.batch import native_encode
from mqmesh.batch.native_encode import MAX_KNOWN_TAGS, encode_at_once, is_compiled
from mqmesh.batch.payload import (
    CODEC_ZSTD,
    MAX_MESSAGES,
    MAX_RAW_BYTES,
    MAX_STRINGS,
    decode_payload,
    encode_payload,
    pick_messages,
)
from mqmesh.errors import MQMeshError
from mqmesh.message import (
    FIELD_LIMITS,
    MAX_FLAG,
    MAX_KEY_LENGTH,
    MAX_KEYS,
    MAX_PROPERTIES_BYTES,
    MAX_SHARDING_KEY_LENGTH,
    MAX_TAG_LENGTH,
    Message,
    StoredMessage,
    as_plain,
)
from mqmesh.message_checks import check_messages
from mqmesh.units import MAX_TIMESTAMP_MS

MAX_BODY = 4 * 1024 * 1024


def plain(messages, **options):
    defaults = {"max_body_bytes": MAX_BODY, "is_one": False}
    return encode_at_once(messages, **(defaults | options))


def carefully(messages, **options):
    """What the careful way gives; None for what it refuses."""
    try:
        return encode_payload(check_messages(messages, max_message_size=MAX_BODY), **options)
    except MQMeshError:
        return None


@pytest.mark.parametrize("size", [1, 31, 32, 128, 255, 256, 65_535, 65_536])
@pytest.mark.parametrize("count", [1, 15, 16, 40])
@pytest.mark.parametrize("topic", ["t", "t" * 31, "t" * 32, "%RETRY%" + "g" * 255])
def test_bodies_and_topics_of_all_sizes(size, count, topic):
    chance = random.Random(size)
    messages = [Message(topic, chance.randbytes(size)) for _ in range(count)]
    payload = plain(messages)
    assert payload == encode_payload(messages)
    assert [one.body for one in decode_payload(payload.data)] == [one.body for one in messages]


@pytest.mark.parametrize("compress", [None, 1])
@pytest.mark.parametrize("with_places", [False, True])
def test_some_messages_of_a_payload_are_picked(compress, with_places):
    messages = [Message("t", b"x" * n, f"tag{n}", ("k",) * (n % 3)) for n in range(1, 400)]
    payload = plain(messages, compress_over_bytes=compress, with_places=with_places)
    assert payload is not None
    assert bool(payload.places) is with_places
    assert (payload.codec == CODEC_ZSTD) is (compress is not None)
    for chosen in ([], [0], [7, 8, 200], [398], range(399)):
        assert pick_messages(payload, chosen) == [as_plain(messages[at]) for at in chosen]


@pytest.mark.parametrize("count", [65_535, MAX_MESSAGES])
def test_as_many_messages_as_a_batch_may_have(count):
    messages = [Message("t", b"x")] * count
    assert plain(messages) == encode_payload(messages)


@pytest.mark.parametrize(
    "fields",
    [
        {"tag": "a"},
        {"tag": "a" * MAX_TAG_LENGTH},
        {"keys": ("k",)},
        {"keys": ["k", "l" * 31, "m" * 32, "n" * MAX_KEY_LENGTH]},
        {"keys": [f"{n:02d}" for n in range(15)]},
        {"keys": tuple(f"{n:02d}" for n in range(16))},
        {"keys": ["k"] * MAX_KEYS},
        {"keys": []},
        {"flag": 1},
        {"flag": 127},
        {"flag": 128},
        {"flag": 255},
        {"flag": 256},
        {"flag": 65_535},
        {"flag": 65_536},
        {"flag": MAX_FLAG},
        {"sharding_key": "s"},
        {"sharding_key": "s" * MAX_SHARDING_KEY_LENGTH},
        {"tag": "é" * MAX_TAG_LENGTH},
        {"tag": "\U0001f680" * MAX_TAG_LENGTH},
        {"keys": ["é", "\U0001f680" * MAX_KEY_LENGTH]},
        {"sharding_key": "é" * MAX_SHARDING_KEY_LENGTH},
        {"properties": {}},
        {"properties": {"origin": "JFK", "é": "ü"}},
        {"properties": {"empty": ""}},
        {"properties": {f"{n:02d}": "x" for n in range(15)}},
        {"properties": {f"{n:02d}": "x" for n in range(16)}},
        {"properties": {"n" * 31: "v" * 32, "m" * 255: "w" * 256}},
        {"properties": {"n": "v" * (MAX_PROPERTIES_BYTES - 1)}},
        {"properties": {"n": "é" * (MAX_PROPERTIES_BYTES // 2 - 1)}},
        {"delay_level": 1},
        {"delay_level": MAX_FLAG},
        {"deliver_at_ms": 1},
        {"deliver_at_ms": 0xFFFF_FFFF},
        {"deliver_at_ms": 0x1_0000_0000},
        {"deliver_at_ms": MAX_TIMESTAMP_MS},
        {"tag": "a", "keys": ("k", "l"), "flag": 300, "sharding_key": "s"},
    ],
)
def test_what_else_a_message_may_have(fields):
    messages = [Message("t", b"x"), Message("t", b"yy", **fields), Message("t", b"zzz")]
    payload = plain(messages)
    assert payload == carefully(messages)
    assert payload.has_keys == bool(fields.get("keys"))
    assert bool(payload.tag_hashes) == ("tag" in fields)


@pytest.fixture
def no_tags_known(monkeypatch):
    before = dict(native_encode._hashes)
    native_encode._hashes.clear()
    yield
    native_encode._hashes.clear()
    native_encode._hashes.update(before)


@pytest.mark.usefixtures("no_tags_known")
def test_tags_that_differ_and_tags_that_do_not():
    for tags in (["a", "a"], ["a", "b"], [None, "b"], ["a", None], ["é", "é", None, "".join("ab")]):
        messages = [Message("t", b"x", tag) for tag in tags]
        for _ in range(2):  # the second time its tags are known
            assert plain(messages) == encode_payload(messages)


@pytest.mark.usefixtures("no_tags_known")
def test_of_many_tags_only_so_many_are_kept():
    many = [Message("t", b"x", f"tag-{n}") for n in range(MAX_KNOWN_TAGS + 1)]
    for _ in range(2):
        assert plain(many) == encode_payload(many)
        assert len(native_encode._hashes) == MAX_KNOWN_TAGS
    other = [Message("t", b"x", "another")]
    assert plain(other) == encode_payload(other)
    assert list(native_encode._hashes) == ["another"]


@pytest.mark.usefixtures("no_tags_known")
def test_a_hash_that_is_none_is_not_used():
    messages = [Message("t", b"x", "a")]
    for hash_of_a in (b"short", 5):
        native_encode._hashes["a"] = hash_of_a
        assert plain(messages) == encode_payload(messages)


def test_it_compresses_as_the_careful_way_does():
    messages = [Message("t", bytes(5_000)) for _ in range(20)]
    payload = plain(messages, compress_over_bytes=4_096)
    assert payload.codec == CODEC_ZSTD
    assert payload == encode_payload(messages, compress_over_bytes=4_096)


class Text(str):
    """No plain str: what it says of itself may be anything."""


class Other(Message, array_like=True):
    more: int = 0


class Properties(dict):
    """No plain dict."""


def many_properties():
    return {f"{n:07d}": "v" for n in range(MAX_PROPERTIES_BYTES // 8 + 1)}


def unusual():
    body = b"x" * 100
    return {
        "empty tag": Message("t", body, ""),
        "tag too long": Message("t", body, "a" * (MAX_TAG_LENGTH + 1)),
        "tag with a bar": Message("t", body, "a|b"),
        "tag with a blank before": Message("t", body, " a"),
        "tag with a tab behind": Message("t", body, "a\t"),
        "tag of another class": Message("t", body, Text("a")),
        "bytes for a tag": Message("t", body, b"a"),
        "key of a surrogate": Message("t", body, None, ("\ud800",)),
        "key of another class": Message("t", body, None, (Text("k"),)),
        "empty key": Message("t", body, None, ("k", "")),
        "key too long": Message("t", body, None, ("k" * (MAX_KEY_LENGTH + 1),)),
        "too many keys": Message("t", body, None, ["k"] * (MAX_KEYS + 1)),
        "raw bytes for a key": Message("t", body, None, (msgspec.Raw(b"\xa1k"),)),
        "None for a key": Message("t", body, None, (None,)),
        "a text for keys": Message("t", body, None, "abc"),
        "a set for keys": Message("t", body, None, {"k"}),
        "None for keys": Message("t", body, None, None),
        "tag with a wide blank before": Message("t", body, "\u3000a"),
        "tag of a surrogate": Message("t", body, "\ud800"),
        "sharding key of a surrogate": Message("t", body, sharding_key="\ud800"),
        "list for properties": Message("t", body, properties=[("a", "b")]),
        "another dict for properties": Message("t", body, properties=Properties(a="b")),
        "property without a name": Message("t", body, properties={"": "b"}),
        "property of a surrogate": Message("t", body, properties={"a": "\ud800"}),
        "property of bytes": Message("t", body, properties={"a": b"b"}),
        "property of another class": Message("t", body, properties={"a": Text("b")}),
        "property name of another class": Message("t", body, properties={Text("a"): "b"}),
        "number for a property": Message("t", body, properties={"a": 5}),
        "too much of a property": Message("t", body, properties={"a": "b" * MAX_PROPERTIES_BYTES}),
        "too many properties": Message("t", body, properties=many_properties()),
        "level and time": Message("t", body, delay_level=1, deliver_at_ms=1),
        "delay level too large": Message("t", body, delay_level=MAX_FLAG + 1),
        "time too late": Message("t", body, deliver_at_ms=MAX_TIMESTAMP_MS + 1),
        "True for a flag": Message("t", body, flag=True),
        "False for a flag": Message("t", body, flag=False),
        "a flag too large": Message("t", body, flag=MAX_FLAG + 1),
        "a flag beyond all bounds": Message("t", body, flag=1 << 80),
        "a negative flag": Message("t", body, flag=-1),
        "None for a flag": Message("t", body, flag=None),
        "empty sharding key": Message("t", body, sharding_key=""),
        "sharding key too long": Message("t", body, sharding_key="s" * 256),
        "False for a delay level": Message("t", body, delay_level=False),
        "negative time": Message("t", body, deliver_at_ms=-1),
        "other topic": Message("u", body),
        "longer topic": Message("tt", body),
        "topic of another class": Message(Text("t"), body),
        "bytes for a topic": Message(b"t", body),
        "None for a topic": Message(None, body),
        "text for a body": Message("t", "x" * 100),
        "bytearray for a body": Message("t", bytearray(body)),
        "empty body": Message("t", b""),
        "no body": Message("t", None),
        "time for a body": Message("t", datetime.datetime(2026, 1, 1)),
        "unknown for a body": Message("t", object()),
        "body too large": Message("t", bytes(101)),
        "stored message": StoredMessage("t", body),
        "subclass": Other("t", body),
        "list": ["t", body, None, (), None, 0, None, 0],
        "something like it": SimpleNamespace(topic="t", body=body),
        "number": 5,
        "None": None,
    }


@pytest.mark.parametrize("place", [0, 1, 4, 7])
@pytest.mark.parametrize("name", unusual())
def test_one_unusual_message_is_enough(name, place):
    messages = [Message("t", b"x" * 100) for _ in range(8)]
    messages[place] = unusual()[name]
    assert plain(messages, max_body_bytes=100) is None


def test_a_field_that_was_deleted():
    for name in Message.__struct_fields__:
        messages = [Message("t", b"x") for _ in range(3)]
        delattr(messages[1], name)
        assert plain(messages) is None
        assert plain(messages[1:], is_one=True) is None


def test_sharding_keys_may_differ_unless_they_must_not():
    same = [Message("t", b"x", sharding_key="ab"), Message("t", b"y", sharding_key="a" + chr(98))]
    assert plain(same, is_one=True) == encode_payload(same)
    for other in (None, "ac", "abc"):
        differing = [*same, Message("t", b"z", sharding_key=other)]
        assert plain(differing, is_one=True) is None
        assert plain(differing[::-1], is_one=True) is None
        assert plain(differing) == encode_payload(differing)


def test_reserved_properties_are_left_to_others_where_users_may_have_set_them():
    messages = [Message("t", b"x", properties={"a": "b", "RECONSUME_TIMES": "5"})]
    assert plain(messages, is_one=True) is None
    assert plain(messages) == encode_payload(messages)


def test_delays_may_differ_unless_they_must_not():
    at_times = [Message("t", b"x", deliver_at_ms=5), Message("t", b"y", deliver_at_ms=1 << 40)]
    levels = [Message("t", b"x", delay_level=300), Message("t", b"y", delay_level=300)]
    for same in (at_times, levels):
        assert plain(same, is_one=True) == carefully(same)
        for other in ({}, {"delay_level": 2}, {"deliver_at_ms": 6 if same is levels else 0}):
            differing = [*same, Message("t", b"z", **other)]
            assert plain(differing, is_one=True) is None
            assert plain(differing[::-1], is_one=True) is None
            assert plain(differing) == carefully(differing)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        5,
        Message("t", b"x"),
        [],
        "a text",
        (Message("t", b"x"),) * 8,
        [Message("t", b"x")] * (MAX_MESSAGES + 1),
        [Message("t" * 300, b"x")],
        [Message("", b"x")],
        [Message("é", b"x")],
        [Message("t", bytes(MAX_BODY))] * 4,
        [Message("t", b"x", None, ["k"] * 64)] * (MAX_STRINGS // 64 + 1),
    ],
)
def test_what_is_not_for_it_is_left_to_others(messages):
    assert plain(messages) is None


def test_a_payload_of_the_most_bytes():
    size = MAX_RAW_BYTES // 4
    fits = [Message("t", bytes(size - 20)) for _ in range(4)]
    payload = plain(fits, max_body_bytes=size)
    room = MAX_RAW_BYTES - payload.raw_size
    fits[0] = Message("t", bytes(size - 20 + room))
    assert plain(fits, max_body_bytes=MAX_RAW_BYTES).raw_size == MAX_RAW_BYTES
    fits[0] = Message("t", bytes(size - 20 + room + 1))
    assert plain(fits, max_body_bytes=MAX_RAW_BYTES) is None


def test_without_the_part_in_c_everything_is_left_to_others(monkeypatch):
    monkeypatch.setattr(native_encode, "_encoder", None)
    assert not is_compiled()
    assert plain([Message("t", b"x")]) is None


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ([],),
        ([], 5, True, True),
        ([], 5, 1, True, ""),
        ([], "5", True, True, ""),
        ([], 5, True, 0, ""),
        ([], 5, True, True, 0),
        ([], 5, True, True, "", 0),
    ],
)
def test_the_part_in_c_refuses_other_arguments(arguments):
    with pytest.raises(TypeError, match="encode takes"):
        native_encode._encoder.encode(*arguments)
    with pytest.raises(OverflowError):
        native_encode._encoder.encode([], 1 << 80, True, False, "")


@pytest.mark.parametrize("place", [0, 1, 3, 4, 6, 7, 8])
def test_the_part_in_c_refuses_limits_that_cannot_be_written(place):
    limits = [10] * 11
    limits[place] = 1 << 33
    with pytest.raises(ValueError, match="beyond"):
        type(native_encode._encoder)(
            message_type=Message,
            hashes={},
            reserved=frozenset(),
            limits=tuple(limits[:4]),
            field_limits=tuple(limits[4:]),
        )


def test_the_part_in_c_refuses_classes_without_slots():
    with pytest.raises(TypeError, match="no slot"):
        type(native_encode._encoder)(
            message_type=SlotlessMessage,
            hashes={},
            reserved=frozenset(),
            limits=(10,) * 4,
            field_limits=FIELD_LIMITS,
        )


def test_a_list_that_another_thread_changes_makes_whole_batches():
    """Each of them is a batch that the list was at some time; nothing is read that was freed."""
    short, long = [Message("t", b"s", "a")], [Message("t", b"l" * 300, "bb", ("k",))] * 50
    batch = list(short)
    done = threading.Event()

    def change():
        while not done.is_set():
            batch[:] = long
            batch[0].properties = {"a": "b" * 40}
            batch[0].keys = ["k"] * 9
            batch[:] = short
            long[0].properties = None
            long[0].keys = ("k",)

    before = sys.getswitchinterval()
    changer = threading.Thread(target=change)
    sys.setswitchinterval(1e-6)
    changer.start()
    try:
        for _ in range(3_000):
            payload = native_encode._encoder.encode(batch, MAX_BODY, False, True, "")
            bodies = {one.body[:1] for one in decode_payload(payload[0])}
            assert len(bodies) == 1
    finally:
        done.set()
        changer.join()
        sys.setswitchinterval(before)


class SlotlessMessage:
    topic = "t"


texts = st.text(st.characters(codec="utf-8"), max_size=40) | st.text("ab|é\t ", max_size=3)
messages = st.builds(
    Message,
    topic=st.just("t") | st.sampled_from(["t", "u"]),
    body=st.binary(max_size=300),
    tag=st.none() | texts,
    keys=st.lists(texts, max_size=20) | st.lists(texts, max_size=3).map(tuple),
    properties=st.none() | st.dictionaries(texts, texts, max_size=2),
    flag=st.integers(-1, MAX_FLAG + 1),
    sharding_key=st.none() | texts,
    delay_level=st.sampled_from([0, 0, 0, 1]),
    deliver_at_ms=st.sampled_from([0, 0, 0, 5]),
)


@settings(max_examples=400)
@given(st.lists(messages, min_size=1, max_size=20))
def test_it_agrees_with_the_careful_way_whatever_comes(batch):
    payload = plain(batch)
    if payload is not None:
        assert payload == carefully(batch)


easy = st.text("abcé\u20ac", min_size=1, max_size=300)
easy_messages = st.builds(
    Message,
    topic=st.just("t"),
    body=st.binary(min_size=1, max_size=300),
    tag=st.none() | easy.map(lambda text: text[:255]),
    keys=st.lists(easy.map(lambda text: text[:255]), max_size=20),
    properties=st.none() | st.dictionaries(easy, st.just("") | easy, max_size=20),
    flag=st.integers(0, MAX_FLAG),
    deliver_at_ms=st.just(0) | st.integers(0, MAX_TIMESTAMP_MS),
    sharding_key=st.none() | easy.map(lambda text: text[:255]),
)


@settings(max_examples=200)
@given(st.lists(easy_messages, min_size=1, max_size=40))
def test_nothing_legal_is_left_to_others(batch):
    payload = plain(batch)
    assert payload is not None
    assert payload == carefully(batch)


@pytest.mark.parametrize("topic", ["t", "x" * 26, "x" * 122, "x" * 251])
def test_a_prefix_stands_in_front_of_each_topic(topic):
    messages = [Message(topic, b"x", tag="a", keys=["k"]), Message(topic, b"yy")]
    whole = encode_payload(
        [msgspec.structs.replace(one, topic=f"shop%{topic}") for one in messages]
    )
    assert encode_payload(messages, prefix="shop%") == whole
    assert plain(messages, prefix="shop%") in (None, whole)
    assert is_compiled() == (plain(messages, prefix="shop%") is not None)
    assert [one.topic for one in messages] == [topic, topic]


def test_a_topic_is_too_long_with_its_prefix():
    longest = "x" * native_encode.LONGEST_TOPIC
    assert plain([Message(longest, b"x")]) is not None or not is_compiled()
    assert plain([Message(longest, b"x")], prefix="%") is None
