"""What is kept of a batch, and how it is found again."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.batch import payload_check
from mqmesh.batch.payload import CODEC_NONE, Payload
from mqmesh.batch.record_batch import batch_parts, check_batch, encode_batch
from mqmesh.errors import CorruptBatch
from mqmesh.message import Message
from mqmesh.storage.index.entries import (
    ENTRY_SIZE,
    WIDTHS,
    distinct_keys,
    distinct_of_raw,
    has_keys,
    id_entries,
    id_hash,
    key_entries,
    key_hash,
    raw_keys,
    width_of,
)

KEYS = st.lists(st.text(min_size=1, max_size=12), max_size=4).map(tuple)


def batch_of(keys: list[tuple[str, ...]], **options):
    messages = [Message("t", b"body", keys=some) for some in keys]
    data = encode_batch(
        messages,
        topic="t",
        queue_id=0,
        producer_id=options.pop("producer_id", 1),
        first_sequence=options.pop("first_sequence", 0),
        born_timestamp=0,
        **options,
    )
    return data, check_batch(data)


def foreign_batch(payload: bytes, count: int):
    parts = batch_parts(
        Payload(payload, CODEC_NONE, len(payload), count, has_keys=True, tag_hashes=b""),
        topic="t",
        queue_id=0,
        producer_id=1,
        first_sequence=0,
        born_timestamp=0,
    )
    data = b"".join(parts)
    return data, check_batch(data)


def test_hashes_on_disk_never_change():
    assert key_hash("orders", "4711").hex() == "9addaf5167068b9dc0d32b8315e44344"
    assert key_hash("%RETRY%g", "schlüssel").hex() == "f05445aee72d80f956952c09cfe3b009"
    assert id_hash(0x0123456789ABCDEF, 1000, 0).hex() == "9592f26dfbfdb0b635841c7363a480b0"
    assert id_hash(1, 1000, 9).hex() == "ca8d713d0716926f17757e716f080e73"


def test_topic_and_key_do_not_run_into_one_another():
    assert key_hash("ab", "c") != key_hash("a", "bc")


@given(
    first=st.integers(0, 2**64 - 65_536),
    count=st.integers(1, 65_536),
    inside=st.floats(0, 1, exclude_max=True),
)
def test_every_id_of_a_batch_has_one_of_its_hashes(first, count, inside):
    _, header = batch_of([()], first_sequence=first)
    header = msgspec.structs.replace(header, message_count=count)
    entries = id_entries(header, 77)
    assert 1 <= len(entries) <= 2
    sequence = first + int(count * inside)
    hashes = [entry[:16] for entry in entries]
    assert id_hash(1, sequence, width_of(count)) in hashes
    assert all(entry[16:] == (77).to_bytes(4, "big") for entry in entries)


def test_widths_reach_from_one_message_to_the_largest_batch():
    assert [width_of(count) for count in (1, 2, 3, 4, 5, 500, 512, 513)] == [
        *(0, 1, 2, 2, 3, 9, 9, 10)
    ]
    assert width_of(65_536) == WIDTHS - 1


@given(st.lists(KEYS, min_size=1, max_size=20), st.booleans())
def test_keys_as_they_are_say_the_same_as_keys_taken_out(keys, compressed):
    data, header = batch_of(keys, compress_over_bytes=1 if compressed else None)
    expected = {key for some in keys for key in some}
    assert has_keys(header) == bool(expected)
    assert distinct_keys(data, header) == expected
    assert distinct_of_raw(*raw_keys(data, header)) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payload_check, "_checker", None)  # as where nothing was compiled
        assert distinct_of_raw(*raw_keys(data, header)) == expected


def test_each_key_has_one_entry():
    entries = key_entries("t", {"a", "b"}, 5)
    assert len(entries) == 2
    assert all(len(entry) == ENTRY_SIZE for entry in entries)
    assert {entry[:16] for entry in entries} == {key_hash("t", "a"), key_hash("t", "b")}


def test_a_batch_with_more_strings_than_one_should_make_is_read_with_care(monkeypatch):
    many = [(f"{number:040}",) for number in range(30_000)]
    data, header = batch_of(many)
    assert header.raw_size > 1 << 20
    monkeypatch.setattr(payload_check, "_checker", None)
    raw, count = raw_keys(data, header)
    assert count == 1
    assert distinct_of_raw(raw, count) == distinct_keys(data, header) == {k for (k,) in many}


def test_messages_that_say_nothing_of_keys_have_none():
    data, header = foreign_batch(msgspec.msgpack.encode([["t", b"a"], ["t", b"b", None]]), 2)
    assert distinct_keys(data, header) == distinct_of_raw(*raw_keys(data, header)) == set()


@pytest.mark.parametrize("keys", [None, 5, "text", ["a", 7], [b"bytes"], {"a": 1}])
def test_keys_that_are_none_are_refused(keys):
    data, header = foreign_batch(msgspec.msgpack.encode([["t", b"body", None, keys]]), 1)
    with pytest.raises(CorruptBatch):
        distinct_keys(data, header)
    with pytest.raises(CorruptBatch):
        distinct_of_raw(*raw_keys(data, header))


@pytest.mark.parametrize("payload", [b"\x91\xc1\xc1\xc1\xc1", b"\x91" + b"\x91" * 2000])
def test_a_payload_that_is_none_is_refused(payload):
    data, header = foreign_batch(payload, 1)
    for read in (distinct_keys, raw_keys):
        with pytest.raises(CorruptBatch):
            read(data, header)
