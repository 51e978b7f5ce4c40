"""When delayed messages are due, as batches say it."""

from __future__ import annotations

import struct

import msgspec
import pytest

from mqmesh.batch.delayed_batch import (
    DEFAULT_DELAY_LEVELS,
    DelayedMeta,
    check_wish,
    due_times,
    pack_due_times,
    parse_delay_levels,
    read_delayed_meta,
    scheduled_batch,
)
from mqmesh.batch.payload import encode_payload
from mqmesh.batch.record_batch import (
    Attributes,
    batch_parts,
    check_batch,
    decode_messages,
    encode_batch,
    read_header,
    read_meta,
)
from mqmesh.errors import ConfigError, CorruptBatch, LocalProtocolError, MessageIllegal
from mqmesh.message import SCHEDULE_TOPIC, Message

MESSAGES = [Message("t", b"0", "A", ["k"]), Message("t", b"1" * 500), Message("t", b"2")]


def wished(meta, messages=MESSAGES):
    return b"".join(
        batch_parts(
            encode_payload(messages, compress_over_bytes=1),
            topic=meta.topic,
            queue_id=3,
            producer_id=7,
            first_sequence=40,
            born_timestamp=5,
            attributes=Attributes.HAS_DELAY,
            meta=meta,
        )
    )


def test_the_usual_levels_are_rocketmqs():
    levels = parse_delay_levels(DEFAULT_DELAY_LEVELS)
    assert len(levels) == 18
    assert levels[:5] == (1_000, 5_000, 10_000, 30_000, 60_000)
    assert levels[-1] == 7_200_000


@pytest.mark.parametrize(
    "text", ["", "1", "s", "0s", "-1s", "1x", "1.5s", "1 s", "99999999d", " ".join(["1s"] * 65)]
)
def test_what_is_no_level_is_refused(text):
    with pytest.raises(ConfigError, match="message_delay_level"):
        parse_delay_levels(text)


def test_days_and_many_levels_are_allowed():
    assert parse_delay_levels("2d") == (172_800_000,)
    assert len(parse_delay_levels(" ".join(["1s"] * 64))) == 64


def test_a_meta_comes_back_and_plain_readers_pass_over_the_rest():
    meta = DelayedMeta("t", b"", "host:1", 0, pack_due_times([5, 6, 7]), "real", 9, 0)
    data = wished(meta)
    header = check_batch(data)
    assert read_delayed_meta(data, header) == meta
    plain = read_meta(data, header)
    assert (plain.topic, plain.born_host) == ("t", "host:1")


def test_a_plain_meta_reads_as_no_delay():
    data = encode_batch(
        MESSAGES, topic="t", queue_id=0, producer_id=1, first_sequence=0, born_timestamp=0
    )
    meta = read_delayed_meta(data, read_header(data))
    assert (meta.level, meta.due_times) == (0, b"")
    with pytest.raises(MessageIllegal, match="need a level"):
        check_wish(meta)


@pytest.mark.parametrize(
    ("level", "times"),
    [(0, b""), (1, struct.pack("<q", 5)), (0, struct.pack("<q", 0)), (0, struct.pack("<q", -1))],
)
def test_wishes_that_make_no_sense_are_refused(level, times):
    with pytest.raises(MessageIllegal):
        check_wish(DelayedMeta("t", level=level, due_times=times))


@pytest.mark.parametrize("size", [1, 7, 16, 32])
def test_due_times_of_another_number_of_messages_are_refused(size):
    data = wished(DelayedMeta("t", due_times=bytes(size)))
    with pytest.raises(CorruptBatch, match="due times"):
        read_delayed_meta(data, read_header(data))


def test_a_scheduled_batch_keeps_ids_times_and_payload():
    wish = DelayedMeta("t", level=2, born_host="host:1")
    data = wished(wish)
    header = check_batch(data)
    meta = msgspec.structs.replace(
        wish, topic=SCHEDULE_TOPIC, real_topic="t", real_queue_id=3, delay_ms=5_000
    )
    stored = scheduled_batch(data, header, meta, queue_id=1)
    after = check_batch(stored)
    assert (after.queue_id, after.producer_id, after.first_sequence) == (1, 7, 40)
    assert after.born_timestamp == 5
    assert after.attributes & Attributes.HAS_DELAY
    assert after.codec == header.codec == 1
    messages = decode_messages(stored, after)
    assert [(one.topic, one.body) for one in messages] == [
        ("t", b"0"),
        ("t", b"1" * 500),
        ("t", b"2"),
    ]
    assert read_delayed_meta(stored, after).real_queue_id == 3


def test_tags_and_times_that_do_not_fit_together_are_refused_where_they_are_made():
    times = pack_due_times(list(range(1, 65_537)))
    with pytest.raises(LocalProtocolError, match="tags and times"):
        wished(DelayedMeta("t", times, due_times=times))


def test_due_times_count_from_the_store_time_or_are_as_written():
    header = read_header(wished(DelayedMeta("t")))
    header = msgspec.structs.replace(header, store_timestamp=1_000)
    assert due_times(DelayedMeta("t", delay_ms=5), header) == (1_005,)
    assert due_times(DelayedMeta("t", due_times=pack_due_times([9, 8, 9])), header) == (9, 8, 9)
    assert due_times(DelayedMeta("t", due_times=pack_due_times([9, 9, 9])), header) == (9,)
