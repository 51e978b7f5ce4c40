import enum
from collections import OrderedDict, UserString
from typing import Any

import msgspec
import pytest

from mqmesh.batch.record_batch import check_batch, decode_messages, encode_batch
from mqmesh.errors import InvalidArgument
from mqmesh.message import (
    MAX_PROPERTIES_BYTES,
    RESERVED_PROPERTIES,
    RESERVED_TOPICS,
    TRACE_TOPIC,
    BatchInfo,
    Message,
    MessageQueue,
    StoredMessage,
    as_system,
    check_group,
    check_topic,
    dlq_topic,
    format_message_id,
    is_system_topic,
    parse_message_id,
    retry_topic,
    tag_hash,
)
from mqmesh.message_checks import check_messages, is_plain
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs

LIMIT = 1000


def check(*messages: Any, **options: Any) -> list[Message]:
    return check_messages(messages, **({"max_message_size": LIMIT} | options))


def message(**fields: Any) -> Message:
    return Message(**({"topic": "flights", "body": b"body"} | fields))


def stored_message(**fields: Any) -> StoredMessage:
    info = BatchInfo(
        topic="%RETRY%g",
        queue_id=3,
        broker_name="broker-a",
        base_queue_offset=QueueOffset(100),
        commitlog_offset=CommitLogOffset(0xABC),
        store_size=200,
        born_timestamp=TimestampMs(1),
        store_timestamp=TimestampMs(2),
        born_host="host:1",
        store_host="127.0.0.1:10911",
        producer_id=5,
        first_sequence=7,
        payload_crc=9,
    )
    values: dict[str, Any] = {"topic": "flights", "body": b"body"}
    return StoredMessage(**(values | fields), queue_offset=QueueOffset(102), batch=info)


class Text(str):
    """Looks like text, but cannot be encoded."""


class Carrier(enum.StrEnum):
    UA = "UA"


# --- what may be sent


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"topic": "a" * 127},
        {"topic": "aZ09_-%|"},
        {"body": b"x" * LIMIT},
        {"body": b"\0"},
        {"tag": "UA"},
        {"tag": "t" * 255},
        {"tag": "a|b"},
        {"tag": "two words"},
        {"tag": "東京" * 100},
        {"keys": ["k"]},
        {"keys": ("k", "l")},
        {"keys": []},
        {"keys": ["k" * 255] * 64},
        {"properties": {}},
        {"properties": {"name": "", "naïve": "日本"}},
        {"properties": {"p": "v" * (MAX_PROPERTIES_BYTES - 1)}},
        {"properties": {"p": "é" * 16_383}},
        {"flag": 1},
        {"flag": 2**31 - 1},
        {"sharding_key": "s" * 255},
        {"delay_level": 18},
        {"deliver_at_ms": 253_402_300_799_999},
    ],
)
def test_message_within_its_bounds_passes_and_survives_the_way(fields: dict[str, Any]) -> None:
    sent = message(**fields)
    assert check(sent) == [sent]
    assert check(message(topic=sent.topic), sent)[1] is sent
    batch = encode_batch(
        [sent], topic=sent.topic, queue_id=0, producer_id=0, first_sequence=0, born_timestamp=0
    )
    [got] = decode_messages(batch, check_batch(batch))
    assert msgspec.structs.replace(
        got.to_message(), keys=tuple(got.keys)
    ) == msgspec.structs.replace(sent, keys=tuple(sent.keys))


def test_checked_messages_are_a_new_list_in_the_same_order() -> None:
    messages = [message(body=b"%d" % number) for number in range(5)]
    checked = check_messages(messages, max_message_size=LIMIT)
    assert checked == messages
    assert checked is not messages
    messages[3] = message(body=b"3", tag="t")
    assert check_messages(messages, max_message_size=LIMIT) == messages


def test_topics_that_are_equal_but_not_the_same_object_pass() -> None:
    topics = ["".join(["fli", "ghts"]) for _ in range(3)]
    assert len(check(*(message(topic=topic) for topic in topics))) == 3


# --- what may not


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"topic": None}, "topic must be a str, not NoneType None"),
        ({"topic": b"flights"}, "topic must be a str, not bytes"),
        ({"topic": ""}, "topic name is empty; 1 to 127"),
        ({"topic": "t" * 128}, "topic name of 128 characters is too long (limit 127)"),
        ({"topic": "a/b"}, "topic name 'a/b' has a character outside"),
        ({"topic": "a\n"}, "has a character outside"),
        ({"topic": "flüge"}, "has a character outside"),
        ({"topic": Text("flights")}, "topic must be a str, not Text"),
        ({"topic": "."}, "topic name '.' has a character outside"),
        ({"topic": ".."}, "or is '.' or '..'"),
        ({"body": None}, "body must be bytes, bytearray or memoryview, not NoneType"),
        ({"body": "text"}, "body must be bytes, bytearray or memoryview, not str 'text'"),
        ({"body": {"json": 1}}, "body must be bytes, bytearray or memoryview, not dict"),
        ({"body": b""}, "body is empty"),
        ({"body": bytearray()}, "body is empty"),
        ({"body": bytearray(LIMIT + 1)}, "body of 1001 bytes is over the limit"),
        ({"properties": {"a": "b", "TTL": "1"}}, "property 'TTL' is reserved"),
        (
            {"body": b"x" * (LIMIT + 1)},
            "body of 1001 bytes is over the limit (max_message_size = 1000)",
        ),
        ({"tag": ""}, "tag is empty; 1 to 255"),
        ({"tag": "t" * 256}, "tag of 256 characters is too long (limit 255)"),
        ({"tag": b"UA"}, "tag must be a str, not bytes"),
        ({"tag": 5}, "tag must be a str, not int 5"),
        ({"tag": Carrier.UA}, "tag must be a str, not Carrier"),
        ({"tag": "a||b"}, "may not contain '||'"),
        ({"tag": "|a"}, "nor begin or end with '|'"),
        ({"tag": "a|"}, "nor begin or end with '|'"),
        ({"tag": " "}, "white space"),
        ({"tag": "\u3000"}, "white space"),
        ({"tag": " a"}, "white space"),
        ({"tag": "a\n"}, "white space"),
        ({"tag": "\ud800"}, "tag '\\ud800' has a lone surrogate at 0"),
        ({"keys": "N14228"}, "keys must be a list or tuple of str, not str 'N14228'"),
        ({"keys": None}, "keys must be a list or tuple of str, not NoneType"),
        ({"keys": {"k"}}, "keys must be a list or tuple of str, not set"),
        ({"keys": {"k": 1}}, "keys must be a list or tuple of str, not dict"),
        ({"keys": ["k"] * 65}, "65 keys are too many (limit 64)"),
        ({"keys": ["k", ""]}, "key is empty"),
        ({"keys": ["k" * 256]}, "key of 256 characters is too long (limit 255)"),
        ({"keys": [1545]}, "key must be a str, not int 1545"),
        ({"keys": [None]}, "key must be a str, not NoneType"),
        ({"keys": [Text("k")]}, "key must be a str, not Text"),
        ({"keys": ["a\udfff"]}, "key 'a\\udfff' has a lone surrogate at 1"),
        ({"properties": [("a", "b")]}, "properties must be a dict of str to str, not list"),
        ({"properties": "a=b"}, "properties must be a dict of str to str, not str"),
        ({"properties": False}, "properties must be a dict of str to str, not bool"),
        (
            {"properties": OrderedDict(a="b")},
            "properties must be a dict of str to str, not Ordered",
        ),
        ({"properties": {"": "v"}}, "empty name"),
        ({"properties": {1: "v"}}, "property name must be a str, not int 1"),
        ({"properties": {"p": 1}}, "property value must be a str, not int 1"),
        ({"properties": {"p": None}}, "property value must be a str, not NoneType"),
        ({"properties": {"p": UserString("v")}}, "property value must be a str, not UserString"),
        ({"properties": {"p": "\udc80"}}, "property value '\\udc80' has a lone surrogate"),
        ({"properties": {"\udc80": "v"}}, "property name '\\udc80' has a lone surrogate"),
        (
            {"properties": {"p": "v" * MAX_PROPERTIES_BYTES}},
            "properties of 32769 bytes as UTF-8 are over the limit of 32768",
        ),
        ({"properties": {"p": "é" * 16_384}}, "properties of 32769 bytes"),
        ({"flag": -1}, "flag must be an int of 0 to 2147483647, not int -1"),
        ({"flag": 2**31}, "flag must be an int of 0 to 2147483647, not int 2147483648"),
        ({"flag": False}, "flag must be an int of 0 to 2147483647, not bool False"),
        ({"flag": None}, "not NoneType None"),
        ({"flag": 0.0}, "not float 0.0"),
        ({"sharding_key": ""}, "sharding_key is empty"),
        ({"sharding_key": 7}, "sharding_key must be a str, not int 7"),
        ({"sharding_key": "s" * 256}, "sharding_key of 256 characters is too long (limit 255)"),
        ({"sharding_key": "\ud83d"}, "lone surrogate"),
        ({"delay_level": -1}, "delay_level must be an int of 0"),
        ({"delay_level": "3"}, "delay_level must be an int of 0 to 2147483647, not str '3'"),
        ({"deliver_at_ms": -1}, "deliver_at_ms must be an int of 0"),
        ({"deliver_at_ms": 253_402_300_800_000}, "deliver_at_ms must be an int of 0"),
        ({"deliver_at_ms": 1.5e12}, "deliver_at_ms must be an int of 0"),
        (
            {"delay_level": 3, "deliver_at_ms": 9},
            "delay_level = 3 and deliver_at_ms = 9 exclude each other",
        ),
    ],
)
def test_message_out_of_bounds_is_refused_by_name_value_and_limit(
    fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidArgument) as alone:
        check(message(**fields))
    assert text in str(alone.value)
    if "topic" not in fields:
        with pytest.raises(InvalidArgument) as among:
            check(message(), message(tag="t"), message(**fields), message())
        assert str(among.value) == f"message 2 of 4: {alone.value}"


def test_error_stays_short_whatever_was_given() -> None:
    for fields in (
        {"topic": "t" * 10**6},
        {"body": "b" * 10**6},
        {"tag": "t" * 10**6},
        {"keys": "k" * 10**6},
        {"keys": ["k" * 10**6]},
        {"properties": {"p" * 10**6: "\ud800" * 10**6}},
        {"sharding_key": "\ud800" * 10**6},
    ):
        with pytest.raises(InvalidArgument) as caught:
            check(message(**fields))
        assert len(str(caught.value)) < 600


def test_messages_of_several_topics_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="message 1 of 2: topic 'other' differs from 'fl"):
        check(message(), message(topic="other"))
    for topic in (None, 5, Text("flights"), b"flights"):
        with pytest.raises(InvalidArgument, match="message 1 of 2: topic must be a str"):
            check(message(), message(topic=topic))


@pytest.mark.parametrize("nothing", [[], (), "", None, b""])
def test_no_messages_are_refused(nothing: Any) -> None:
    with pytest.raises(InvalidArgument, match="at least one"):
        check_messages(nothing, max_message_size=LIMIT)


@pytest.mark.parametrize("strange", ["text", b"bytes", ("flights", b"body"), None, 5])
def test_things_that_are_no_messages_are_refused(strange: Any) -> None:
    with pytest.raises(InvalidArgument, match="Message"):
        check(strange)
    with pytest.raises(InvalidArgument, match="message 1 of 2: must be a Message, not"):
        check(message(), strange)


def test_one_message_outside_of_a_sequence_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="sequence"):
        check_messages(message(), max_message_size=LIMIT)  # type: ignore[arg-type]


@pytest.mark.parametrize("topic", [*sorted(RESERVED_TOPICS - {TRACE_TOPIC}), "%RETRY%g", "%DLQ%g"])
def test_system_topics_are_for_the_system(topic: str) -> None:
    with pytest.raises(InvalidArgument, match="reserved"):
        check(message(topic=topic))
    assert check(message(topic=topic), allow_system=True)


def test_subclasses_become_plain_messages() -> None:
    stored = stored_message(tag="UA", keys=["k"], properties={"p": "v"}, flag=3)
    for checked in (check(stored)[0], check(message(), stored, message())[1]):
        assert type(checked) is Message
        assert checked == Message("flights", b"body", "UA", ["k"], {"p": "v"}, 3)
    with pytest.raises(InvalidArgument, match="body is empty"):
        check(stored_message(body=b""))


@pytest.mark.parametrize(
    "body", [bytearray(b"body"), memoryview(b"body"), memoryview(bytearray(b"b.o.d.y."))[::2]]
)
def test_bodies_of_other_kinds_are_copied(body: bytearray | memoryview) -> None:
    for sent in (message(body=body, tag="t"), message(body=body)):
        before = bytes(body)
        for checked in (check(sent)[0], check(message(), sent)[1]):
            assert type(checked.body) is bytes
            assert checked == Message("flights", before, sent.tag)
        assert sent.body is body


def test_a_memoryview_that_was_released_is_refused() -> None:
    body = memoryview(b"body")
    sent = message(body=body)
    body.release()
    with pytest.raises(InvalidArgument, match="body cannot be read"):
        check(sent)


@pytest.mark.parametrize("name", sorted(RESERVED_PROPERTIES))
def test_users_cannot_set_what_mqmesh_tells_of_a_message(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"property '{name}' is reserved"):
        check(message(properties={"own": "1", name: "2"}))
    came = stored_message(properties={"own": "1", name: "2"})
    assert check(came)[0].properties == came.to_message().properties == {"own": "1"}
    assert came.property(name) == "2"
    alone = stored_message(properties={name: "2"})
    assert check(alone)[0].properties is alone.to_message().properties is None
    assert check(as_system(message(), {name: "2"}))[0].properties == {name: "2"}


@pytest.mark.parametrize("name", ["orders.eu.v1", ".hidden", "a..b", "..."])
def test_names_may_hold_dots(name: str) -> None:
    assert check_topic(name) == check_group(name) == name
    assert check(message(topic=name))


def test_short_way_is_only_for_messages_of_nothing_but_topic_and_body() -> None:
    assert is_plain(message(), LIMIT)
    assert is_plain(message(body=b"x" * LIMIT), LIMIT)
    assert not is_plain(stored_message(), LIMIT)
    assert not is_plain("message", LIMIT)  # type: ignore[arg-type]
    strange: list[dict[str, Any]] = [
        {"topic": None},
        {"topic": Text("flights")},
        {"body": b""},
        {"body": "text"},
        {"body": bytearray(b"b")},
        {"body": b"x" * (LIMIT + 1)},
        {"tag": "UA"},
        {"keys": ["k"]},
        {"keys": ""},
        {"properties": {}},
        {"flag": 1},
        {"flag": False},
        {"sharding_key": "s"},
        {"delay_level": 1},
        {"delay_level": None},
        {"deliver_at_ms": 0.0},
    ]
    for fields in strange:
        assert not is_plain(message(**fields), LIMIT), fields


# --- a stored message


def test_stored_message_knows_where_it_stands() -> None:
    stored = stored_message()
    assert stored.ordinal == 2
    assert stored.queue_id == 3
    assert stored.broker_name == "broker-a"
    assert stored.message_queue == MessageQueue("%RETRY%g", "broker-a", 3)
    assert stored.message_id == "0000000000000005" + "0000000000000009"
    assert stored.offset_message_id == "127.0.0.1:10911#ABC#2"
    assert stored.commitlog_offset == 0xABC
    assert stored.store_size == 200
    assert (stored.born_timestamp, stored.store_timestamp) == (1, 2)
    assert (stored.born_host, stored.store_host) == ("host:1", "127.0.0.1:10911")


def test_property_is_found_or_has_a_default() -> None:
    assert message(properties={"a": "b"}).property("a") == "b"
    assert message(properties={"a": "b"}).property("c") is None
    assert message().property("a", "default") == "default"


@pytest.mark.parametrize(
    ("text", "times"),
    [
        (None, 0),
        ("0", 0),
        ("16", 16),
        ("", 0),
        ("-1", 0),
        ("many", 0),
        ("1e9", 0),
        ("²", 0),
        ("9" * 5000, 0),
    ],
)
def test_reconsume_times_survive_any_property(text: str | None, times: int) -> None:
    properties = None if text is None else {"RECONSUME_TIMES": text}
    assert stored_message(properties=properties).reconsume_times == times


# --- names and ids


def test_message_ids_are_32_digits_there_and_back() -> None:
    for pair in ((0, 0), (1, 2**64 - 1), (2**64 - 1, 7)):
        text = format_message_id(*pair)
        assert len(text) == 32
        assert parse_message_id(text) == parse_message_id(text.lower()) == pair


@pytest.mark.parametrize(
    "text", ["", None, b"0" * 32, "0" * 31, "0" * 33, "g" * 32, "+" + "0" * 31, "٣" * 32]
)
def test_what_is_no_message_id_is_refused(text: Any) -> None:
    with pytest.raises(InvalidArgument, match="32 hex digits") as refused:
        parse_message_id(text)
    if isinstance(text, str):
        assert str(refused.value) == f"message id {text!r} is not 32 hex digits"


def test_tag_hashes_never_change() -> None:
    assert tag_hash(None) == 0
    assert tag_hash("UA") == 0xBA988D3C7E00BDDB
    assert tag_hash("Zürich 東京") == 0x584CEE96579BDE51


def test_retry_and_dead_letter_topics_are_system_topics() -> None:
    assert retry_topic("g") == "%RETRY%g"
    assert dlq_topic("g") == "%DLQ%g"
    assert is_system_topic(retry_topic("g"))
    assert is_system_topic(dlq_topic("g"))
    assert all(map(is_system_topic, RESERVED_TOPICS))
    assert not is_system_topic("flights")


def test_longest_group_has_a_retry_topic() -> None:
    group = "g" * 255
    assert check_group(group) == group
    assert check_topic(retry_topic(group))
    assert check_topic(dlq_topic(group))
    with pytest.raises(InvalidArgument, match="limit 255"):
        check_group(group + "g")
    for topic in (retry_topic(group + "g"), dlq_topic(group + "g")):
        with pytest.raises(InvalidArgument, match="too long"):
            check_topic(topic)


@pytest.mark.parametrize("name", ["", "a b", "a/b", ".", "..", "a\0", "ä", "a\n", None, 5, b"a"])
def test_illegal_names_are_refused(name: Any) -> None:
    with pytest.raises(InvalidArgument):
        check_topic(name)
    with pytest.raises(InvalidArgument):
        check_group(name)
