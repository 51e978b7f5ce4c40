"""Metas that were decoded before."""

from __future__ import annotations

import pytest
from harness.batches import join_batch

from mqmesh.batch.record_batch import BatchMeta, check_batch, encode_batch, read_meta
from mqmesh.errors import CorruptBatch
from mqmesh.message import Message
from mqmesh.roles.broker.reading import meta_cache
from mqmesh.roles.broker.reading.meta_cache import MetaCache


def batch(*tags, topic="t", born_host="h:1"):
    messages = [Message(topic, b"x", tag=tag) for tag in tags]
    return encode_batch(
        messages,
        topic=topic,
        queue_id=0,
        producer_id=1,
        first_sequence=1,
        born_timestamp=1,
        born_host=born_host,
    )


def read(cache, data):
    return cache.read(memoryview(data), check_batch(data))


def test_it_reads_what_the_codec_reads():
    cache = MetaCache()
    for data in (batch(None), batch("A"), batch("A", "B"), batch("B"), batch(None, topic="u")):
        for _ in range(2):
            assert read(cache, data) == read_meta(data, check_batch(data))
    assert len(cache) == 4, "hashes for each message are not worth remembering"


def test_metas_for_another_number_of_messages_are_still_checked():
    cache = MetaCache()
    read(cache, batch("A", "B"))
    wrong = join_batch(
        b"\x93" + bytes(60),
        BatchMeta("t", bytes(16), "h:1"),
        raw_size=61,
        message_count=3,
        queue_id=0,
        producer_id=1,
        first_sequence=1,
        born_timestamp=1,
        attributes=0,
    )
    with pytest.raises(CorruptBatch, match="tag hashes"):
        read(cache, wrong)


def test_it_does_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(meta_cache, "MAX_ENTRIES", 3)
    cache = MetaCache()
    for number in range(10):
        read(cache, batch(None, born_host=str(number)))
        assert len(cache) <= 3
    before = len(cache)
    read(cache, batch(*"AB" * 40))
    assert len(cache) == before, "over MAX_KEY_BYTES"


def test_a_meta_that_is_none_is_not_remembered():
    cache = MetaCache()
    data = join_batch(
        b"\x91\x00",
        BatchMeta("../etc", b"", ""),
        raw_size=2,
        message_count=1,
        queue_id=0,
        producer_id=1,
        first_sequence=1,
        born_timestamp=1,
        attributes=0,
    )
    for _ in range(2):
        with pytest.raises(CorruptBatch):
            read(cache, data)
    assert len(cache) == 0
