"""Filtered reads: the right messages, cut batches, bounded work."""

from __future__ import annotations

import msgspec
import pytest
from harness.batches import join_batch
from hypothesis import given, settings
from hypothesis import strategies as st

import mqmesh.roles.broker.reading.pull_filter as module
from mqmesh.batch.payload import encode_payload
from mqmesh.batch.record_batch import (
    Attributes,
    BatchMeta,
    check_batch,
    check_stored,
    decode_messages,
    encode_batch,
)
from mqmesh.errors import CorruptBatch, InvalidArgument, UnsupportedCommand
from mqmesh.filtering.predicate import Predicate
from mqmesh.message import Message, tag_hash
from mqmesh.roles.broker.reading.meta_cache import MetaCache
from mqmesh.roles.broker.reading.pull_filter import EVERYTHING, get_filtered, pull_filter
from mqmesh.storage.interface import BatchToPut, GetStatus, StoreConfig
from mqmesh.storage.memory import MemoryStore
from mqmesh.testing.clock import ManualClock
from mqmesh.units import MIB


class Case:
    """A store with one queue."""

    def __init__(self):
        self.store = MemoryStore(StoreConfig(), clock=ManualClock())
        self.metas = MetaCache()
        self.sequence = 0
        self.messages = []

    def put(self, *messages, compress=None):
        data = encode_batch(
            messages,
            topic="t",
            queue_id=0,
            producer_id=1,
            first_sequence=self.sequence,
            born_timestamp=0,
            compress_over_bytes=compress,
        )
        self.messages += messages
        self.put_bytes(data)

    def put_bytes(self, data):
        header = check_batch(data)
        meta = self.metas.read(memoryview(data), header)
        self.sequence += header.message_count
        self.store.put([BatchToPut("t", 0, header, memoryview(data), meta.tag_hashes)], 0)

    def get(self, expression, language="TAG", offset=0, max_bytes=MIB, most=None):
        wanted = pull_filter(expression, language) or EVERYTHING
        place = "t", 0, offset
        return get_filtered(
            self.store, self.metas, place, wanted, max_bytes=max_bytes, most_messages=most
        )

    def read(self, expression, language="TAG", offset=0, **options):
        """Reads to the end as a consumer does; returns queue offsets, and how many reads."""
        found, reads = [], 0
        while True:
            result = self.get(expression, language, offset, **options)
            if result.status is GetStatus.NO_NEW_MESSAGE:
                return found, reads
            reads += 1
            assert result.next_queue_offset > offset
            some = [m.queue_offset for m in decode_all(result) if m.queue_offset >= offset]
            assert (result.status is GetStatus.FOUND) is bool(some)
            assert result.message_count == len(some) <= (options.get("most") or MIB)
            found += some
            offset = result.next_queue_offset


def decode_all(result):
    data = b"".join(result.data)
    place, found = 0, []
    while place < len(data):
        header = check_stored(data, place)
        found += decode_messages(data, header, position=place)
        place += header.total_size
    return found


def message(number, tag=None):
    return Message("t", b"%d" % number, tag, properties={"n": str(number)})


def test_no_expression_is_no_filter():
    assert pull_filter("*", "TAG") is None
    assert pull_filter(" * ", "TAG") is None


def test_an_expression_is_understood_once():
    assert pull_filter("n > 5", "SQL92") is pull_filter("n > 5", "SQL92")
    assert pull_filter("TAGS = 'A' AND n > 5", "SQL92").tag_hashes == {tag_hash("A")}


@pytest.mark.parametrize(
    ("expression", "language", "error"),
    [
        ("A ||", "TAG", InvalidArgument),
        ("n >", "SQL92", InvalidArgument),
        ("*", "SQL92", InvalidArgument),
        ("x", "PYTHON", UnsupportedCommand),
        ("x", "LUA", UnsupportedCommand),
        ("x", "", UnsupportedCommand),
    ],
)
def test_what_cannot_be_understood_is_refused(expression, language, error):
    with pytest.raises(error):
        pull_filter(expression, language)


@pytest.mark.parametrize(
    ("expression", "language"), [("A", "TAG"), ("n > 3", "SQL92"), ("n > 99", "SQL92")]
)
@pytest.mark.parametrize("compress", [None, 0])
def test_a_damaged_batch_is_neither_cut_nor_left_out(monkeypatch, expression, language, compress):
    case = Case()
    case.put(*(message(n, "AB"[n % 2]) for n in range(9)), compress=compress)
    whole = case.store.get("t", 0, 0, max_bytes=MIB)
    rotten = bytearray(b"".join(whole.data))
    rotten[-2] ^= 1
    answer = msgspec.structs.replace(whole, data=[bytes(rotten)])
    monkeypatch.setattr(case.store, "get", lambda *_, **__: answer)
    result = case.get(expression, language)
    assert result.status is GetStatus.FOUND
    assert b"".join(result.data) == bytes(rotten)  # its reader finds the damage


def test_batches_are_cut_down_to_the_tags_wanted():
    case = Case()
    case.put(*(message(n, "ABC"[n % 3]) for n in range(9)))
    case.put(*(message(n, "C") for n in range(9, 12)))
    case.put(*(message(n, "A") for n in range(12, 15)))
    result = case.get("A || B")
    assert [m.queue_offset for m in decode_all(result)] == [0, 1, 3, 4, 6, 7, 12, 13, 14]
    assert (result.message_count, result.next_queue_offset) == (9, 15)
    headers = [check_stored(data) for data in split(result)]
    assert [bool(h.attributes & Attributes.SPARSE) for h in headers] == [True, False]


def split(result):
    data, found, place = b"".join(result.data), [], 0
    while place < len(data):
        size = check_stored(data, place).total_size
        found.append(data[place : place + size])
        place += size
    return found


def test_nothing_wanted_is_nothing_sent():
    case = Case()
    case.put(*(message(n, "A") for n in range(9)))
    for expression, language in (("B", "TAG"), ("n > 99", "SQL92"), ("TAGS = 'B'", "SQL92")):
        result = case.get(expression, language)
        assert (result.status, result.next_queue_offset) == (GetStatus.NO_MATCHED_MESSAGE, 9)
        assert not result.data


def test_a_read_may_begin_within_a_batch():
    case = Case()
    case.put(*(message(n, "AB"[n % 2]) for n in range(10)))
    assert case.read("A", offset=5)[0] == [6, 8]
    assert case.read("n > 3 AND n <> 7", "SQL92", offset=5)[0] == [5, 6, 8, 9]


def test_tags_with_the_same_hash_are_told_apart_by_the_consumer(monkeypatch):
    monkeypatch.setattr(module, "expression_hashes", lambda text: frozenset([tag_hash("B")]))
    case = Case()
    case.put(message(0, "A"), message(1, "B"), message(2, "A"))
    # To the broker the expression A has the hash of B: what it sends is not A's.
    assert [m.tag for m in decode_all(case.get("A"))] == ["B"]


@pytest.mark.parametrize("compress", [None, 0])
def test_work_is_bounded_even_within_one_batch(monkeypatch, compress):
    monkeypatch.setattr(module, "MAX_LOOKS", 600)
    monkeypatch.setattr(module, "LOOKS_A_BATCH", 0)
    case = Case()
    case.put(*(message(n) for n in range(1_000)), compress=compress)
    case.put(*(message(n) for n in range(1_000, 1_200)), compress=compress)
    found, reads = case.read("n IN (3, 99, 100, 101, 850, 1100)", "SQL92")
    assert found == [3, 99, 100, 101, 850, 1100]
    assert reads == 12  # 100 messages each: a message costs four looks, and two for n
    assert case.read("FALSE", "SQL92") == ([], 8)
    assert case.read("TRUE", "SQL92")[0] == list(range(1_200))


@pytest.mark.parametrize(("expression", "language"), [("A", "TAG"), ("n >= 0", "SQL92")])
def test_many_small_batches_are_work_too(monkeypatch, expression, language):
    monkeypatch.setattr(module, "MAX_LOOKS", 1_000)
    case = Case()
    for n in range(50):
        case.put(message(n, "A"))
    found, reads = case.read(expression, language)
    assert found == list(range(50))
    assert 4 < reads < 10


def test_what_inflates_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_RAW_BYTES", 10_000)
    case = Case()
    for n in range(0, 40, 4):
        some = [Message("t", b"x" * 2_000, "AB"[n % 2]) for n in range(n, n + 4)]
        case.put(*some, compress=0)
    assert case.read("TAGS = 'A'", "SQL92") == (list(range(0, 40, 2)), 5)
    assert case.read("A") == (list(range(0, 40, 2)), 5)


def test_a_batch_that_no_one_can_read_is_not_left_out():
    case = Case()
    case.put(message(0))
    payload = b"\x92\x01\x02"
    case.put_bytes(
        join_batch(
            payload + bytes(20),
            BatchMeta("t"),
            raw_size=23,
            message_count=2,
            queue_id=0,
            producer_id=2,
            first_sequence=0,
            born_timestamp=0,
            attributes=0,
        )
    )
    case.put(message(3))
    result = case.get("n >= 0", "SQL92")
    assert result.next_queue_offset == 3
    good, bad = split(result)
    assert check_stored(good).base_queue_offset == 0
    with pytest.raises(CorruptBatch):
        decode_messages(bad, check_stored(bad))
    assert case.read("n >= 0", "SQL92", offset=3)[0] == [3]


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.sampled_from(["A", "B", None]), min_size=1, max_size=9), max_size=9),
    st.sampled_from(["TAGS = 'A'", "n < 9 OR TAGS IS NULL", "NOT (n > 4 AND TAGS = 'B')"]),
    st.integers(0, 20),
    st.integers(1, 400),
    st.integers(4, 60),
    st.none() | st.integers(1, 12),
)
def test_every_way_to_read_finds_the_same(batches, expression, offset, max_bytes, looks, most):
    case = Case()
    number = 0
    for tags in batches:
        case.put(*(message(number + at, tag) for at, tag in enumerate(tags)))
        number += len(tags)
    offset = min(offset, number)
    predicate = Predicate(expression)
    expected = [
        at
        for at, one in enumerate(case.messages)
        if at >= offset and predicate.select(payload_of(one), 0, 1, 1) == b"\x01"
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_LOOKS", looks)
        limits = {"max_bytes": max_bytes, "most": most}
        assert case.read(expression, "SQL92", offset, **limits)[0] == expected
        by_tag = [
            at for at, one in enumerate(case.messages) if at >= offset and one.tag in ("A", "X")
        ]
        assert case.read("A || X", offset=offset, **limits)[0] == by_tag
        assert case.read("*", offset=offset, **limits)[0] == list(range(offset, number))


def payload_of(one):
    return encode_payload([one]).data
