"""Batches decoded at once are what the careful way makes of them, or left to it."""

from __future__ import annotations

import copy
import gc
import random
import sys
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqmesh.batch import native_decode
from mqmesh.batch.native_decode import decode_at_once, is_compiled
from mqmesh.batch.payload import MAX_MESSAGES, MAX_STRINGS, decode_payload, encode_payload
from mqmesh.batch.record_batch import check_batch, decode_messages, encode_batch
from mqmesh.errors import CorruptBatch
from mqmesh.message import (
    MAX_FLAG,
    MAX_KEY_LENGTH,
    MAX_KEYS,
    MAX_PROPERTIES_BYTES,
    MAX_SHARDING_KEY_LENGTH,
    MAX_TAG_LENGTH,
    NO_KEYS,
    BatchInfo,
    CommitLogOffset,
    Message,
    QueueOffset,
    StoredMessage,
    TimestampMs,
    format_message_id,
)
from mqmesh.units import MAX_TIMESTAMP_MS

FIRST = 1_000


def batch_of(topic: str = "t", first: int = FIRST) -> BatchInfo:
    return BatchInfo(
        topic,
        3,
        "broker-a",
        QueueOffset(first),
        CommitLogOffset(77),
        500,
        TimestampMs(1),
        TimestampMs(2),
        "host:1",
        "host:2",
        5,
        6,
        7,
    )


BATCH = batch_of()


def plain(payload, count, batch=BATCH):
    return decode_at_once(payload, count, batch)


def carefully(payload, count, batch=BATCH):
    """What the careful way gives; None for what it refuses."""
    try:
        messages = decode_payload(payload)
    except CorruptBatch:
        return None
    if len(messages) != count:
        return None
    for place, message in enumerate(messages):
        message.queue_offset, message.batch = batch.base_queue_offset + place, batch
    return messages


def agrees(messages, count=None):
    """The messages as decoded at once, after a look at what the careful way says."""
    data = encode_payload(messages).data
    found = plain(data, len(messages))
    assert found is not None
    assert found == carefully(data, len(messages))
    return found


@pytest.mark.parametrize("size", [0, 1, 31, 32, 128, 255, 256, 65_535, 65_536])
@pytest.mark.parametrize("count", [1, 15, 16, 40])
def test_bodies_of_all_sizes(size, count):
    chance = random.Random(size)
    messages = agrees([Message("t", chance.randbytes(size)) for _ in range(count)])
    assert [message.queue_offset for message in messages] == list(range(FIRST, FIRST + count))
    assert all(type(message) is StoredMessage and message.batch is BATCH for message in messages)
    assert all(message.keys is NO_KEYS for message in messages)


@pytest.mark.parametrize("topic", ["t" * 31, "t" * 32, "%RETRY%" + "g" * 255])
def test_topics_of_all_sizes(topic):
    data = encode_payload([Message(topic, b"x")] * 3).data
    batch = batch_of(topic)
    found = plain(data, 3, batch)
    assert found == carefully(data, 3, batch)
    assert all(message.topic is batch.topic for message in found)


@pytest.mark.parametrize(
    "fields",
    [
        {"tag": "a"},
        {"tag": "a" * MAX_TAG_LENGTH},
        {"keys": ("k",)},
        {"keys": ("k", "l" * 31, "m" * 32, "n" * MAX_KEY_LENGTH)},
        {"keys": tuple(f"{n:02d}" for n in range(15))},
        {"keys": tuple(f"{n:02d}" for n in range(16))},
        {"keys": ("k",) * MAX_KEYS},
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
        {"keys": ("é", "\U0001f680" * MAX_KEY_LENGTH)},
        {"sharding_key": "é" * MAX_SHARDING_KEY_LENGTH},
        {"properties": {}},
        {"properties": {"": ""}},
        {"properties": {"origin": "JFK", "é": "ü"}, "keys": ("é",)},
        {"properties": {f"{n:02d}": "x" for n in range(16)}},
        {"properties": {"n" * 31: "v" * 32, "m" * 255: "w" * MAX_PROPERTIES_BYTES}},
        {"delay_level": 300},
        {"deliver_at_ms": 0x1_0000_0000},
        {"deliver_at_ms": MAX_TIMESTAMP_MS},
        {"tag": "a", "keys": ("k", "l"), "flag": 300, "sharding_key": "s"},
    ],
)
def test_what_else_a_message_may_have(fields):
    agrees([Message("t", b"x"), Message("t", b"yy", **fields), Message("t", b"zzz")])


def test_messages_side_by_side_share_their_tag():
    tags = ["a", "a", None, "a", "b", "b", "bb"]
    found = agrees([Message("t", b"x", tag) for tag in tags])
    assert [message.tag for message in found] == tags
    assert found[0].tag is found[1].tag is found[3].tag


@pytest.mark.parametrize(
    "message",
    [
        Message("u", b"x"),
        Message("tt", b"x"),
        Message("", b"x"),
        Message("t", b"x", ""),
        Message("t", b"x", "a" * (MAX_TAG_LENGTH + 1)),
        Message("t", b"x", None, ("",)),
        Message("t", b"x", None, ("k" * (MAX_KEY_LENGTH + 1),)),
        Message("t", b"x", None, ("k",) * (MAX_KEYS + 1)),
        Message("t", b"x", flag=MAX_FLAG + 1),
        Message("t", b"x", flag=-1),
        Message("t", b"x", flag=1 << 63),
        Message("t", b"x", sharding_key=""),
        Message("t", b"x", sharding_key="s" * 256),
        Message("t", b"x", flag=True),
        Message("t", b"x", delay_level=MAX_FLAG + 1),
        Message("t", b"x", deliver_at_ms=MAX_TIMESTAMP_MS + 1),
        Message("t", b"x", deliver_at_ms=(1 << 64) - 1),
        Message("t", b"x", properties={"a": "b" * (MAX_PROPERTIES_BYTES + 1)}),
        Message("t", b"x", properties={"a": None}),
        Message("t", b"x", properties=["a"]),
        Message("t", "text"),
        Message("t", None),
        Message(b"t", b"x"),
        StoredMessage("t", b"x"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_one_unusual_message_is_enough(message, place):
    messages = [Message("t", b"x")] * 3
    messages.insert(place, message)
    data = msgspec.msgpack.encode(messages)
    assert plain(data, 4) is None


def references(batch):
    return sys.getrefcount(batch), sys.getrefcount(batch.topic), sys.getrefcount(StoredMessage)


def test_what_was_decoded_before_an_unusual_message_is_let_go():
    batch = batch_of("".join(["a topic", " of its own"]))
    messages = [Message(batch.topic, b"x", "a tag"), Message(batch.topic, b"x", "")]
    data = msgspec.msgpack.encode(messages)
    del messages
    before = references(batch)
    for _ in range(100):
        assert plain(data, 2, batch) is None
    assert references(batch) == before


def test_nothing_is_left_behind_by_messages_that_are_gone():
    batch = batch_of("".join(["a topic", " of its own"]))
    message = Message(batch.topic, b"x", "a", ("k",), {"a": "b"}, flag=500, sharding_key="s")
    data = encode_payload([message] * 50).data
    before = references(batch)
    for _ in range(100):
        found = plain(data, 50, batch)
        assert len([one.message_id for one in found if one.property("a") == "b"]) == 50
        assert found[0].keys == found[1].keys
        del found
    assert references(batch) == before


def test_whoever_the_collector_calls_finds_no_list_with_holes():
    message = Message("t", b"x", None, ("k", "l"))
    data = encode_payload([message] * 4_321).data
    found = []

    def look(phase, info):
        found.extend(
            len(one) for one in gc.get_objects() if type(one) is list and len(one) == 4_321
        )

    before = gc.get_threshold()
    gc.callbacks.append(look)
    try:
        gc.set_threshold(100)
        messages = plain(data, 4_321)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(look)
    assert found == []
    assert gc.is_tracked(messages)


@pytest.mark.parametrize("count", [0, 1, 2, 4, 15, 16, MAX_MESSAGES, -1, 1 << 62])
def test_another_number_of_messages_is_left_to_others(count):
    assert plain(encode_payload([Message("t", b"x")] * 3).data, count) is None


def test_every_cut_is_left_to_others():
    data = encode_payload([Message("t", b"x", "a", ("k",), {"a": "b"}, sharding_key="s")] * 3).data
    for size in range(len(data)):
        assert plain(data[:size], 3) is None
    assert plain(data + b"\0", 3) is None


def test_every_flipped_bit_is_read_as_the_careful_way_reads_it():
    one = Message("t", b"x", "a", ("k", "é"), {"a": "b", "c": ""}, 300, "s", 0, 1 << 33)
    messages = [one] * 2
    data = bytearray(encode_payload(messages).data)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        found = plain(bytes(data), 2)
        if found is not None:
            assert found == carefully(bytes(data), 2)
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_payload_may_be_any_buffer(kind):
    data = encode_payload([Message("t", b"x")] * 3).data
    assert plain(kind(data), 3) == carefully(data, 3)


@pytest.mark.parametrize("count", [MAX_MESSAGES - 1, MAX_MESSAGES])
def test_a_large_array_is_read_as_well(count):
    assert len(plain(encode_payload([Message("t", b"x")] * count).data, count)) == count


def test_more_keys_than_a_batch_may_have_are_left_to_others():
    keys = msgspec.msgpack.encode(Message("t", b"x", None, ("k",) * 64))
    count = MAX_STRINGS // 64 + 1
    assert plain(b"\xdc" + count.to_bytes(2, "big") + keys * count, count) is None
    count -= 1
    assert len(plain(b"\xdc" + count.to_bytes(2, "big") + keys * count, count)) == count


def test_places_end_where_numbers_do():
    data = encode_payload([Message("t", b"x")] * 2).data
    last = (1 << 63) - 3
    assert plain(data, 2, batch_of(first=last))[1].queue_offset == last + 1
    assert plain(data, 2, batch_of(first=last + 2)) is None
    with pytest.raises(OverflowError):
        plain(data, 2, batch_of(first=1 << 63))


def test_without_the_part_in_c_everything_is_left_to_others(monkeypatch):
    monkeypatch.setattr(native_decode, "_decoder", None)
    assert not is_compiled()
    data = encode_batch(
        [Message("t", b"x", "a")] * 3,
        topic="t",
        queue_id=0,
        producer_id=1,
        first_sequence=2,
        born_timestamp=3,
    )
    slow = decode_messages(data, check_batch(data))
    monkeypatch.undo()
    assert is_compiled()
    assert decode_messages(data, check_batch(data)) == slow


@pytest.mark.parametrize(
    "arguments", [(), (b"", 1, "t", 0), (b"", 1, b"t", 0, BATCH), (b"", 1, "t", 0, BATCH, 0)]
)
def test_the_part_in_c_refuses_other_arguments(arguments):
    with pytest.raises(TypeError, match="decode takes"):
        native_decode._decoder.decode(*arguments)


@pytest.mark.parametrize(
    "arguments", [("text", 1, "t", 0, BATCH), (b"", "1", "t", 0, BATCH), (b"", 1, "t", "0", BATCH)]
)
def test_arguments_of_other_kinds_are_errors(arguments):
    with pytest.raises(TypeError):
        native_decode._decoder.decode(*arguments)


def test_a_topic_beyond_ascii_is_left_to_others():
    assert native_decode._decoder.decode(b"\x91", 1, "é", 0, BATCH, "é") is None


class Collected(msgspec.Struct, array_like=True):
    topic: str


def test_the_part_in_c_refuses_classes_it_cannot_fill():
    for kind, words in ((Collected, "collector"), (Message, "topic")):
        with pytest.raises((TypeError, AttributeError), match=words):
            type(native_decode._decoder)(
                message_type=kind,
                batch_type=BatchInfo,
                no_keys=(),
                max_strings=1,
                field_limits=(1,) * 7,
            )


# ---- What is looked at --------------------------------------------------------------------


def fresh(**fields):
    """A message as a consumer gets it, its keys and properties still encoded."""
    (found,) = plain(encode_payload([Message("t", b"x", **fields)]).data, 1)
    return found


def is_encoded(message):
    """Asks msgspec, which looks at the slots themselves."""
    try:
        msgspec.structs.astuple(message)
    except AttributeError:
        return True
    return False


ORDINARY = {"keys": ("k", "é"), "properties": {"a": "b", "é": "ü"}}


def test_names_of_properties_are_shared_and_never_mistaken():
    letters = "abcdefgh"
    names = ["", *(a + b + c for a in letters for b in letters for c in letters)]
    names += ["é" * 3, "n" * 64, "n" * 65, "n" * 64 + "m"]
    found = agrees([Message("t", b"x", properties={name: name}) for name in names * 2])
    assert [one.properties for one in found] == [{name: name} for name in names * 2]
    first, second = ({**fresh(properties={"ab": "v"}).properties}.popitem() for _ in range(2))
    assert first[0] is second[0]


@pytest.mark.parametrize("look", [lambda one: one.keys, lambda one: one.properties, repr])
def test_keys_and_properties_are_made_when_they_are_looked_at(look):
    message = fresh(**ORDINARY)
    assert is_encoded(message)
    look(message)
    assert not is_encoded(message)
    assert (message.keys, message.properties) == (ORDINARY["keys"], ORDINARY["properties"])
    assert message.keys is message.keys
    assert message.properties is message.properties


@pytest.mark.parametrize(
    "fields", [{"keys": ("k",)}, {"properties": {"a": "b"}}, {"properties": {}}, ORDINARY]
)
def test_whatever_there_is_of_them(fields):
    message = fresh(**fields)
    assert is_encoded(message)
    assert message.properties == fields.get("properties")
    assert message.keys == fields.get("keys", NO_KEYS)
    assert not is_encoded(fresh())


def test_one_property_is_found_without_making_the_others():
    message = fresh(**ORDINARY)
    assert message.property("a") == "b"
    assert message.property("é", "none") == "ü"
    assert message.property("k") is None
    assert message.property("missing", "none") == "none"
    assert message.property("\ud800", "none") == "none"
    assert is_encoded(message)
    assert message.property(name="a") == "b"
    assert message.property("missing", default=5) == 5
    assert message.properties is not None
    assert message.property("é") == "ü"
    assert fresh(keys=("k",)).property("a", "none") == "none"
    with pytest.raises(TypeError):
        message.property()
    with pytest.raises(TypeError):
        fresh(**ORDINARY).property(1, 2, 3, 4)
    assert StoredMessage.property(fresh(**ORDINARY), "a") == "b"


def test_the_last_of_two_properties_with_one_name_counts_as_it_does_for_msgspec():
    data = msgspec.msgpack.encode([Message("t", b"x", properties={"a": "1", "b": "2"})])
    data = data.replace(b"\xa1b", b"\xa1a")
    (message,) = plain(data, 1)
    assert message.property("a") == "2"
    assert message.properties == {"a": "2"} == carefully(data, 1)[0].properties


def test_fields_may_be_set_and_deleted():
    message = fresh(**ORDINARY)
    message.keys = ("other",)
    assert (message.keys, message.properties) == (("other",), ORDINARY["properties"])
    message = fresh(**ORDINARY)
    message.properties = None
    assert (message.keys, message.properties) == (ORDINARY["keys"], None)
    message = fresh(**ORDINARY)
    del message.keys
    assert message.properties == ORDINARY["properties"]
    with pytest.raises(AttributeError):
        message.keys  # noqa: B018
    with pytest.raises(AttributeError):
        message.message_id = "x"


def remade(message):
    kind, fields = message.__reduce__()
    return kind(*fields)


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, remade])
def test_copies_are_equal(twin):
    message = fresh(**ORDINARY)
    assert twin(message) == message
    assert twin(fresh(**ORDINARY)).to_message() == Message("t", b"x", **ORDINARY)
    assert message != fresh()
    assert message != Message("t", b"x", **ORDINARY)


@pytest.mark.parametrize("name", ["message_id", *native_decode._OF_BATCH])
def test_facts_of_the_batch_are_those_in_python(name):
    message = fresh()
    in_python = vars(StoredMessage)[name].__wrapped__
    assert getattr(message, name) == in_python.fget(message)
    assert getattr(StoredMessage, name) is in_python
    message.batch = None
    with pytest.raises(AssertionError):
        getattr(message, name)


@pytest.mark.parametrize(
    ("producer_id", "first_sequence", "ordinal"),
    [
        (0, 0, 0),
        (2**64 - 1, 2**64 - 1, 0),
        (0xABCDEF, 0x0123456789, 77),
        (0x0123456789ABCDEF, 0xFEDCBA9876543210, 0),
        (1, 2**64 - 1, 1),
        (1, 5, -1),
        (2**64, 0, 0),
        (-1, 0, 0),
    ],
)
def test_message_ids_of_all_sizes(producer_id, first_sequence, ordinal):
    message = fresh()
    message.batch = msgspec.structs.replace(
        BATCH, producer_id=producer_id, first_sequence=first_sequence
    )
    message.queue_offset = QueueOffset(FIRST + ordinal)
    assert message.message_id == format_message_id(producer_id, first_sequence + ordinal)


def test_a_field_is_made_of_what_it_needs():
    kind = type(vars(StoredMessage)["keys"])
    for arguments in ((5, "keys", property()), (native_decode._decoder, "keys", 5)):
        with pytest.raises(TypeError, match="made of"):
            kind(*arguments)
    with pytest.raises(AttributeError):
        kind(native_decode._decoder, "no such field", property())
    with pytest.raises(TypeError, match="made of"):
        type(vars(StoredMessage)["property"])(5, print)


def test_threads_that_look_at_once_see_the_same():
    data = encode_payload([Message("t", b"x", **ORDINARY)] * 300).data
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(10):
            messages = plain(data, 300)
            seen: list[list[object]] = [[], []]

            def look(into, messages=messages):
                into += [(one.keys, one.properties) for one in messages]

            threads = [threading.Thread(target=look, args=(into,)) for into in seen]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert all(a[0] is b[0] and a[1] is b[1] for a, b in zip(*seen, strict=True))
    finally:
        sys.setswitchinterval(before)


# ---- Whatever comes -----------------------------------------------------------------------

texts = st.text("abé", max_size=40) | st.text("ab", min_size=250, max_size=260)
messages = st.builds(
    Message,
    topic=st.sampled_from(["t", "t", "t", "u"]),
    body=st.binary(max_size=300),
    tag=st.none() | texts,
    keys=st.lists(texts, max_size=20).map(tuple),
    properties=st.none() | st.dictionaries(texts, texts, max_size=3),
    flag=st.integers(0, MAX_FLAG),
    sharding_key=st.none() | texts,
    delay_level=st.sampled_from([0, 0, 0, 1]),
)


@settings(max_examples=300)
@given(st.lists(messages, min_size=1, max_size=10))
def test_it_agrees_with_the_careful_way_whatever_was_sent(batch):
    data = msgspec.msgpack.encode(batch)
    found = plain(data, len(batch))
    if found is not None:
        assert found == carefully(data, len(batch))


PIECES = [
    b"\x91",
    b"\x92",
    b"\x99",
    b"\xa1t",
    b"\xc4\x01x",
    b"\xc0",
    b"\x90",
    b"\x00",
    b"\xa1a",
    b"\x81",
]
pieces = st.lists(st.sampled_from(PIECES) | st.binary(max_size=3), max_size=40).map(b"".join)


@settings(max_examples=500)
@given(pieces | st.binary(max_size=200), st.integers(1, 3))
def test_it_agrees_with_the_careful_way_about_anything(data, count):
    found = plain(data, count)
    if found is not None:
        assert found == carefully(data, count)


def in_namespace(topic: str, *own: str) -> list[StoredMessage]:
    batch = encode_batch(
        [Message(one, b"x", keys=["k"]) for one in own],
        topic=topic,
        queue_id=0,
        producer_id=1,
        first_sequence=0,
        born_timestamp=1,
    )
    return decode_messages(batch, check_batch(batch), namespace="shop")


@pytest.mark.parametrize("is_in_c", [True, False])
@pytest.mark.parametrize(
    ("topic", "own", "shown"),
    [
        ("shop%orders", ["shop%orders"] * 2, ("orders", ["orders"] * 2)),
        ("%RETRY%shop%g", ["shop%a", "shop%b"], ("%RETRY%g", ["a", "b"])),
        ("%DLQ%shop%g", ["shop%a", "bank%b"], ("%DLQ%g", ["a", "bank%b"])),
        ("bank%orders", ["bank%orders"], ("bank%orders", ["bank%orders"])),
        ("shop%orders", ["shop%orders", "other"], ("orders", ["orders"] * 2)),
    ],
)
def test_messages_are_shown_without_their_namespace(monkeypatch, is_in_c, topic, own, shown):
    if not is_in_c:
        monkeypatch.setattr(native_decode, "_decoder", None)
    messages = in_namespace(topic, *own)
    assert (messages[0].message_queue.topic, [one.topic for one in messages]) == shown


def test_messages_of_a_namespace_share_their_topic():
    first, second = in_namespace("shop%orders", "shop%orders", "shop%orders")
    assert first.topic is second.topic or not is_compiled()
