"""Properties of RocketMQ's messages, and what they are at mqmesh."""

from base64 import urlsafe_b64decode, urlsafe_b64encode

import pytest

from mqmesh.batch.record_batch import decode_messages, encode_batch, read_header
from mqmesh.errors import InvalidArgument
from mqmesh.message import Message, format_message_id
from mqmesh.message_checks import check_messages
from mqmesh.protocol.remoting.records import decode_properties
from mqmesh.roles.gateway.messages import (
    Address,
    log_offset,
    offset_message_id,
    read_recall_handle,
    recall_handle,
    split_trace,
    tag_expression,
    to_message,
    to_record,
)

ADDRESS = Address("10.0.0.1", 20_911)


def stored(message: Message, topic: str = ""):
    data = encode_batch(
        [message],
        topic=topic or message.topic,
        queue_id=3,
        producer_id=1,
        first_sequence=2,
        born_timestamp=1_000,
    )
    return decode_messages(data, read_header(data))[0]


def properties_of(message: Message, topic: str = "") -> dict[str, str]:
    record = to_record(stored(message, topic), ADDRESS)
    return decode_properties(
        record[record.index((topic or message.topic).encode()) :][2:]
        .decode(errors="replace")
        .partition("\x00")[2][1:]
    )


def test_a_clients_message_has_its_tag_keys_and_id():
    properties = {
        "TAGS": "new",
        "KEYS": "k1 k2 k1",
        "UNIQ_KEY": "FD01",
        "__SHARDINGKEY": "s",
        "WAIT": "true",
        "RECONSUME_TIMES": "7",
        "to": "FR",
    }
    found = to_message("orders", b"b", properties, 5, 0)
    assert (found.tag, found.sharding_key, found.flag) == ("new", "s", 5)
    assert found.keys == ("k1", "k2", "FD01")
    assert found.properties == {"KEYS": "k1 k2 k1", "UNIQ_KEY": "FD01", "to": "FR"}


@pytest.mark.parametrize(
    ("properties", "delay"),
    [
        ({"DELAY": "3"}, (3, 0)),
        ({"TIMER_DELIVER_MS": "9000"}, (0, 9_000)),
        ({"TIMER_DELAY_MS": "500"}, (0, 1_500)),
        ({"TIMER_DELAY_SEC": "2"}, (0, 3_000)),
        ({}, (0, 0)),
    ],
)
def test_delays_are_levels_or_points_in_time(properties, delay):
    found = to_message("orders", b"b", properties, 0, 1_000)
    assert (found.delay_level, found.deliver_at_ms) == delay
    assert found.properties is None


def test_a_delay_that_is_no_number_is_refused():
    with pytest.raises(InvalidArgument, match="DELAY must be a number"):
        to_message("orders", b"b", {"DELAY": "-1"}, 0, 0)


def test_what_a_client_sent_it_reads_again():
    sent = {"TAGS": "new", "KEYS": "k1 k2", "UNIQ_KEY": "FD01", "to": "FR"}
    added = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true", "CLUSTER": ""}
    assert properties_of(to_message("orders", b"b", sent, 0, 0)) == sent | added
    del sent["KEYS"]  # the id is a key of mqmesh's, and none of the user's
    assert properties_of(to_message("orders", b"b", sent, 0, 0)) == sent | added


def test_a_message_of_mqmesh_has_its_own_id_and_its_keys():
    found = properties_of(Message("orders", b"b", keys=("a", "b"), sharding_key="s"))
    assert found["KEYS"] == "a b"
    assert found["__SHARDINGKEY"] == "s"
    assert found["UNIQ_KEY"] == stored(Message("orders", b"b")).message_id


def test_a_retried_message_names_its_topic():
    found = properties_of(Message("orders", b"b"), "%RETRY%billing")
    assert found["RETRY_TOPIC"] == "orders"


def test_a_property_that_would_be_read_as_several_is_left_out():
    own = {"a": "1\x02b\x012", "c": "3", "d": "4\x015"}
    found = properties_of(Message("orders", b"b", properties=own))
    assert "a" not in found
    assert "b" not in found
    assert (found["c"], found["d"]) == ("3", "4\x015")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("*", "*"),
        ("a||b", "a||b"),
        ("a || * || b", "a || b"),
        ("a || ", "a"),
        ("|| a ||", "a"),
        ("||", "||"),
    ],
)
def test_what_rocketmq_passes_over_in_tags_is_left_out(text, wanted):
    assert tag_expression(text) == wanted
    assert tag_expression(text, "SQL92") == text


def test_ids_have_address_and_offset():
    assert offset_message_id(ADDRESS, log_offset(0x12, 3)) == "0A000001000051AF0000000000120003"


def test_a_trace_message_with_many_keys_is_divided_by_its_records():
    records = [b"Pub\x01id%d\x01key%d\x02" % (number, number) for number in range(100)]
    keys = " ".join(f"id{number} key{number}" for number in range(100))
    whole = to_message("RMQ_SYS_TRACE_TOPIC", b"".join(records), {"KEYS": keys}, 0, 0)
    parts = split_trace(whole)
    assert b"".join(one.body for one in parts) == whole.body
    assert {key for one in parts for key in one.keys} == set(whole.keys)
    for one in check_messages(parts, max_message_size=1 << 20, allow_system=True):
        assert one.property("KEYS") == " ".join(one.keys)
        assert all(key.encode() in one.body for key in one.keys)
    assert len(parts) < 8
    small = to_message("RMQ_SYS_TRACE_TOPIC", b"a\x02", {"KEYS": "a"}, 0, 0)
    assert split_trace(small) == [small]


def test_a_trace_message_of_one_record_with_too_many_keys_loses_some():
    keys = [f"k{number:03}" for number in range(100)]
    record = " ".join(keys).encode() + b"\x02"
    (part,) = split_trace(to_message("RMQ_SYS_TRACE_TOPIC", record, {"KEYS": " ".join(keys)}, 0, 0))
    assert part.keys == tuple(keys[:64])
    huge = to_message("t", b"\x02".join([b"x"] * 20_000), {"KEYS": " ".join(keys)}, 0, 0)
    assert split_trace(huge) == [huge], "it costs too much, and is refused"


def test_a_recall_handle_names_the_message_to_client_and_broker():
    message = to_message("t", b"x", {"UNIQ_KEY": "0A1B", "TIMER_DELIVER_MS": "5000"}, 0, 0)
    message_id = format_message_id(2**64 - 1, 7)
    handle = recall_handle("broker-a", message, message_id)
    fields = urlsafe_b64decode(handle).decode().split(" ")
    assert fields == ["v1", "t", "broker-a", "5000", "0A1B", message_id]
    assert read_recall_handle(handle, "t", "broker-a") == ("0A1B", 2**64 - 1, 7)


@pytest.mark.parametrize("text", ["v1 t b 0 U", "v2 t b 0 U 0", "v1 u b 0 U 0", "v1 t b 0 U 0", ""])
def test_another_recall_handle_is_refused(text):
    with pytest.raises(InvalidArgument):
        read_recall_handle(urlsafe_b64encode(text.encode()).decode(), "t", "b")
    with pytest.raises(InvalidArgument):
        read_recall_handle(text + "\udc80", "t", "b")
