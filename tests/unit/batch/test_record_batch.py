import runpy
import struct
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness.batches import decode_sent, encode_flights, join_batch, split_batches, stored_batch

from mqmesh.batch.payload import CODEC_NONE, CODEC_ZSTD, MAX_MESSAGES, MAX_STRINGS
from mqmesh.batch.record_batch import (
    HEADER_SIZE,
    MAX_BATCH_BYTES,
    Attributes,
    BatchMeta,
    check_batch,
    check_stored,
    decode_messages,
    encode_batch,
    read_header,
    read_meta,
)
from mqmesh.batch.store_check import bears_check
from mqmesh.errors import CorruptBatch, LocalProtocolError
from mqmesh.message import BatchInfo, Message, tag_hash

CASES = (
    "no-tags",
    "uniform-tag",
    "mixed-tags",
    "keys",
    "properties",
    "everything",
    "zstd",
)


def facts(message: Message) -> tuple[Any, ...]:
    return (
        message.topic,
        message.body,
        message.tag,
        list(message.keys),
        message.properties,
        message.flag,
        message.sharding_key,
        message.delay_level,
        message.deliver_at_ms,
    )


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    folder = Path(__file__).resolve().parents[2] / "data"
    return runpy.run_path(str(folder / "make_golden.py"))


# --- the format stays what it was


def test_every_golden_case_is_tested(golden: dict[str, Any]) -> None:
    assert tuple(golden["CASES"]) == CASES


@pytest.mark.parametrize("case", CASES)
def test_golden_file_decodes_to_the_fields_that_were_written(
    golden: dict[str, Any], case: str
) -> None:
    written = golden["CASES"][case]
    batch = golden["path_of"](case).read_bytes()
    header = check_batch(batch)
    meta = read_meta(batch, header)
    messages = decode_messages(batch, header)
    assert list(map(facts, messages)) == list(map(facts, written["messages"]))
    assert header.message_count == len(written["messages"])
    assert header.codec == (CODEC_ZSTD if case == "zstd" else CODEC_NONE)
    assert meta.topic == written["topic"]
    assert meta.born_host == written.get("born_host", "")
    for field in ("queue_id", "producer_id", "first_sequence", "born_timestamp"):
        assert getattr(header, field) == written[field]


@pytest.mark.parametrize("case", [*(case for case in CASES if case != "zstd"), "stored"])
def test_encoding_still_gives_the_golden_bytes(golden: dict[str, Any], case: str) -> None:
    assert golden["encode_case"](case) == golden["path_of"](case).read_bytes()


def test_golden_stored_batch_carries_the_brokers_fields(golden: dict[str, Any]) -> None:
    batch = golden["path_of"]("stored").read_bytes()
    header = check_stored(batch)
    stamped = dict(golden["STAMP"])
    check = stamped.pop("store_check")
    for field, value in stamped.items():
        assert getattr(header, field) == value
    assert bears_check(batch, check)
    assert header.attributes == 4 | 32 | 64 | Attributes.HAS_KEYS | Attributes.HAS_TAGS


def test_golden_tag_hashes_are_those_of_version_1(golden: dict[str, Any]) -> None:
    batch = golden["path_of"]("mixed-tags").read_bytes()
    hashes = read_meta(batch, read_header(batch)).tag_hashes
    assert hashes.hex() == ("dbbd007e3c8d98ba" + "0000000000000000" + "51de9b5796ee4c58")
    batch = golden["path_of"]("uniform-tag").read_bytes()
    assert read_meta(batch, read_header(batch)).tag_hashes.hex() == "dbbd007e3c8d98ba"


def test_first_bytes_of_a_batch_are_these() -> None:
    batch = encode_flights(
        Message("t", b"b"), topic="t", queue_id=2, producer_id=3, first_sequence=4
    )
    assert batch[:48] == b"MQB1" + bytes(44)
    assert batch[52:HEADER_SIZE] == struct.pack(
        "<IBBHIIIIIQQq", len(batch), 1, 0, 0, 1, 2, 6, 14, 14, 3, 4, 1_700_000_000_000
    )
    assert (
        batch[HEADER_SIZE:]
        == b"\x93\xa1t\xc4\x00\xa0" + b"\x91\x99\xa1t\xc4\x01b\xc0\x90\xc0\0\xc0\0\0"
    )


# --- what goes in comes out


def test_messages_get_consecutive_ids_and_offsets() -> None:
    batch = stored_batch(encode_flights(*(Message("flights", b"%d" % n) for n in range(3))))
    messages = decode_messages(
        batch, check_stored(batch), broker_name="a", store_host="127.0.0.1:10911"
    )
    assert [m.queue_offset for m in messages] == [50, 51, 52]
    assert [m.ordinal for m in messages] == [0, 1, 2]
    assert [m.message_id for m in messages] == [f"{5:016X}{n:016X}" for n in (7, 8, 9)]
    assert messages[2].offset_message_id == "127.0.0.1:10911#3E8#2"
    assert messages[0].batch is messages[2].batch
    info = messages[0].info
    assert (info.topic, info.queue_id, info.broker_name) == ("flights", 3, "a")
    assert (info.commitlog_offset, info.store_size) == (1000, len(batch))
    assert (info.born_timestamp, info.store_timestamp) == (1_700_000_000_000, 1_700_000_000_001)


def test_batch_is_read_at_a_position_and_from_any_buffer() -> None:
    batch = encode_flights()
    padded = b"\xff" * 13 + batch + b"\xff" * 5
    for buffer in (padded, bytearray(padded), memoryview(padded)):
        header = check_batch(buffer, 13)
        assert read_meta(buffer, header, 13).topic == "flights"
        assert decode_messages(buffer, header, position=13)[0].body == b"body"


@pytest.mark.parametrize("compress", [None, 0])
def test_only_messages_with_some_bytes_are_decoded(compress: int | None) -> None:
    messages = [
        Message("flights", b"x" * 50, keys=(f"key-{number % 4}",), properties={"n": str(number)})
        for number in range(40)
    ]
    batch = encode_flights(*messages, compress_over_bytes=compress)
    header = read_header(batch)
    everything = decode_messages(batch, header, broker_name="b")
    some = decode_messages(batch, header, broker_name="b", containing=b"key-3")
    assert some == everything[3::4]
    assert [one.message_id for one in some] == [one.message_id for one in everything[3::4]]
    assert decode_messages(batch, header, containing=b"key-5") == []


def test_header_tells_where_the_next_batch_begins() -> None:
    batch = stored_batch(encode_flights(Message("flights", b"a"), Message("flights", b"b")))
    header = check_stored(batch)
    assert header.next_queue_offset == 52
    assert header.end_offset == 1000 + len(batch)


def test_largest_count_of_messages_makes_the_round_trip() -> None:
    messages = [Message("flights", b"x")] * MAX_MESSAGES
    decoded = decode_sent(encode_flights(*messages))
    assert len(decoded) == MAX_MESSAGES
    assert decoded[-1].ordinal == MAX_MESSAGES - 1


def test_tag_hashes_are_kept_as_few_times_as_needed() -> None:
    def hashes(*tags: str | None) -> bytes:
        batch = encode_flights(*(Message("flights", b"b", tag) for tag in tags))
        header = check_batch(batch)
        assert bool(header.attributes & Attributes.HAS_TAGS) == any(tags)
        return read_meta(batch, header).tag_hashes

    assert hashes(None, None) == b""
    assert hashes("a", "a") == tag_hash("a").to_bytes(8, "little")
    assert hashes("a", None, "b") == struct.pack("<3Q", tag_hash("a"), 0, tag_hash("b"))


def test_attributes_tell_of_keys() -> None:
    assert not read_header(encode_flights()).attributes & Attributes.HAS_KEYS
    keyed = encode_flights(Message("flights", b"a"), Message("flights", b"a", keys=["k"]))
    assert read_header(keyed).attributes == Attributes.HAS_KEYS


def test_given_attributes_are_kept() -> None:
    batch = encode_flights(attributes=Attributes.REDELIVERED)
    assert read_header(batch).attributes == Attributes.REDELIVERED


def test_large_bodies_are_compressed_small_ones_are_not() -> None:
    large = Message("flights", b"x" * 5000)
    assert read_header(encode_flights(large)).codec == CODEC_NONE
    assert read_header(encode_flights(large, compress_over_bytes=6000)).codec == CODEC_NONE
    batch = encode_flights(large, compress_over_bytes=4096)
    header = check_batch(batch)
    assert header.codec == CODEC_ZSTD
    assert header.payload_size < 100 < 5000 < header.raw_size
    assert decode_sent(batch)[0].body == large.body


def test_compression_that_does_not_help_is_not_used() -> None:
    noise = b"".join(zlib.crc32(b"%d" % n).to_bytes(4, "big") for n in range(2000))
    assert (
        read_header(encode_flights(Message("flights", noise), compress_over_bytes=0)).codec
        == CODEC_NONE
    )


def test_stored_batch_moves_to_another_topic_without_decoding() -> None:
    old = encode_flights(Message("flights", b"x" * 5000, "UA"), compress_over_bytes=0)
    header = check_batch(old)
    meta = read_meta(old, header)
    payload = old[HEADER_SIZE + header.meta_size :]
    new = join_batch(
        payload,
        BatchMeta("%RETRY%g", meta.tag_hashes, meta.born_host),
        raw_size=header.raw_size,
        codec=header.codec,
    )
    [message] = decode_sent(new)
    assert message.info.topic == "%RETRY%g"
    assert (message.topic, message.tag) == ("flights", "UA")


def test_extra_fields_of_a_message_neither_harm_nor_spoof() -> None:
    info = {
        name: "spoof" if type_ is str else 1 for name, type_ in BatchInfo.__annotations__.items()
    }
    fields: list[Any] = ["flights", b"b", None, [], None, 0, None, 0, 0, 999]
    for extra in ([], [None], [info], [info, "more", [{"and": "more"}]]):
        [message] = decode_sent(join_batch(msgspec.msgpack.encode([[*fields, *extra]])))
        assert message.queue_offset == 0
        assert message.info.topic == "flights"
        assert message.info.producer_id == 5


# --- what may not be sent


def test_batch_without_or_with_too_many_messages_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="1 to 65536 messages, not 0"):
        encode_batch([], topic="t", queue_id=0, producer_id=0, first_sequence=0, born_timestamp=0)
    with pytest.raises(LocalProtocolError, match="not 65537"):
        encode_flights(*[Message("flights", b"x")] * (MAX_MESSAGES + 1))


def test_batch_over_the_size_limit_is_refused_even_if_it_compresses() -> None:
    half = Message("flights", bytes(MAX_BATCH_BYTES // 2))
    with pytest.raises(LocalProtocolError, match="is over 16777216"):
        encode_flights(half, half)
    with pytest.raises(LocalProtocolError, match="is over 16777216"):
        encode_flights(half, half, compress_over_bytes=0)
    with pytest.raises(LocalProtocolError, match="a batch of"):
        encode_flights(Message("flights", bytes(MAX_BATCH_BYTES - HEADER_SIZE)))


def test_batch_of_too_many_strings_is_refused() -> None:
    message = Message("flights", b"b", keys=["kk"] * 64)
    with pytest.raises(LocalProtocolError, match="1048640 keys and properties"):
        encode_flights(*[message] * (MAX_STRINGS // 64 + 1))
    properties = {f"{n:04}": "" for n in range(MAX_STRINGS // 4)}
    with pytest.raises(LocalProtocolError, match="1048578 keys and properties"):
        encode_flights(
            *[Message("flights", b"b", properties=properties)] * 2,
            Message("flights", b"b", properties={"a": ""}),
        )


# --- several batches in one request


def test_batches_are_split_where_they_join() -> None:
    batches = [encode_flights(Message("flights", b"x" * size)) for size in (1, 200, 3)]
    found = split_batches(b"".join(batches), most=3)
    assert [position for position, _ in found] == [
        0,
        len(batches[0]),
        len(batches[0]) + len(batches[1]),
    ]
    assert [header.total_size for _, header in found] == list(map(len, batches))


def test_split_refuses_none_too_many_and_rubbish_between() -> None:
    batch = encode_flights()
    with pytest.raises(CorruptBatch, match="without a batch"):
        split_batches(b"", most=3)
    with pytest.raises(CorruptBatch, match="more than 2"):
        split_batches(batch * 3, most=2)
    with pytest.raises(CorruptBatch):
        split_batches(batch + b"\0" + batch, most=3)
    with pytest.raises(CorruptBatch):
        split_batches(batch + batch[:-1], most=3)


def test_the_topic_of_a_message_is_its_batchs_but_where_the_broker_keeps_those_of_others() -> None:
    def topics_in(topic: str) -> list[str]:
        batch = encode_batch(
            [Message(name, b"x") for name in (topic, "elsewhere", "RMQ_SYS_TRANS_HALF_TOPIC")],
            topic=topic,
            queue_id=0,
            producer_id=1,
            first_sequence=0,
            born_timestamp=1,
        )
        return [message.topic for message in decode_messages(batch, check_batch(batch))]

    assert topics_in("t") == ["t"] * 3
    for topic in ("%RETRY%g", "%DLQ%g", "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC"):
        assert topics_in(topic) == [topic, "elsewhere", "RMQ_SYS_TRANS_HALF_TOPIC"]
