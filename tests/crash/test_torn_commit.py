"""The write of a decision is cut at any byte: what it commits is there once, or is asked about."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from harness.store_files import StoreFiles, settle

from mqmesh.batch.half_batch import half_parts
from mqmesh.batch.payload import encode_payload
from mqmesh.batch.record_batch import check_stored, decode_messages, read_header, read_meta
from mqmesh.message import TRANS_HALF_TOPIC, Message
from mqmesh.roles.broker.features.transactions.check_timetable import TransactionSettings
from mqmesh.roles.broker.features.transactions.half_messages import PendingHalfMessages
from mqmesh.roles.broker.features.transactions.op_records import Op, OpKind, encode_ops
from mqmesh.roles.broker.features.transactions.transaction_recovery import copy_of
from mqmesh.storage.interface import BatchToPut, MessageStore
from mqmesh.testing.store_contract import NOW

pytestmark = pytest.mark.timeout(240)

SEGMENT_BYTES = 1 << 16
STEP = 23


def to_put(data: bytes) -> BatchToPut:
    header = read_header(data)
    meta = read_meta(data, header)
    return BatchToPut(meta.topic, header.queue_id, header, data, meta.tag_hashes)


def half(bodies: list[bytes], first_sequence: int, queue_id: int) -> bytes:
    messages = [Message("orders", body) for body in bodies]
    parts = half_parts(
        encode_payload(messages),
        producer_group="pg",
        real_topic="orders",
        real_queue_id=queue_id,
        has_immunity=False,
        producer_id=7,
        first_sequence=first_sequence,
        born_timestamp=1,
    )
    return b"".join(parts)


def visible(store: MessageStore) -> list[bytes]:
    """What consumers of all queues see."""
    found: list[bytes] = []
    for queue_id in (0, 1):
        offset = 0
        while (result := store.get("orders", queue_id, offset, max_bytes=1 << 20)).data:
            for data in result.data:
                position = 0
                while position < len(data):
                    header = check_stored(data, position)
                    found += [one.body for one in decode_messages(data, header, position=position)]
                    position += header.total_size
            offset = result.next_queue_offset
    return sorted(found)


def recover(store: MessageStore) -> PendingHalfMessages:
    half_messages = PendingHalfMessages(TransactionSettings(), Random(1))
    half_messages.recover(
        store,
        None,
        lambda topic, queue_id: True,
        wall_ms=NOW,
        now_ms=0,
        segment_bytes=SEGMENT_BYTES,
    )
    return half_messages


@pytest.fixture
def written(files: StoreFiles) -> tuple[StoreFiles, int, list[int]]:
    """Half messages, and decisions about some in one write: where it begins, and its batches."""
    store = files.open()
    halves = [half([b"a1", b"a2", b"a3"], 0, 0), half([b"b"], 3, 1)]
    store.put([to_put(one) for one in halves], NOW)
    settle(store)
    ops = [
        Op(0, 0, 2, OpKind.COMMIT),
        Op(0, 2, 1, OpKind.ROLLBACK),
        Op(3, 0, 1, OpKind.COMMIT),
    ]
    copies = []
    for op in ops:
        data = store.get(TRANS_HALF_TOPIC, 0, op.base, max_bytes=1).data[0]
        copies.append(copy_of(op, read_header(data), bytes(data)))
    record = encode_ops(ops, producer_id=1, first_sequence=0, born_timestamp=1)
    batches = [to_put(one) for one in (record, *copies) if one is not None]
    results = store.put(batches, NOW)
    assert visible(store) == [b"a1", b"a2", b"b"]
    return files, results[0].commitlog_offset, [one.end_offset for one in results]


def test_whatever_is_left_of_the_write_ends_in_one_decision(written):
    files, start, ends = written
    good = files.read(start, ends[-1] - start)
    boundaries = [end - start for end in ends]
    positions = sorted({*range(0, len(good), STEP), *boundaries, *(one - 1 for one in boundaries)})
    for position in positions:
        crashed = files.copy()
        torn = good[:position] + bytes(len(good) - position)
        crashed.write(start, torn + bytes(200))
        store = crashed.open()
        half_messages = recover(store)
        # A last byte may have been zero anyway.
        whole = [torn[:end] == good[:end] for end in boundaries]
        decided, lost = whole[0], whole[1:].count(False)
        assert len(half_messages.torn) == (lost if decided else 0)
        assert half_messages.table.pending_count == (0 if decided else 4), "they are asked about"
        if half_messages.torn:
            store.put([to_put(one) for one in half_messages.torn], NOW)
        assert visible(store) == ([b"a1", b"a2", b"b"] if decided else [])
        store.close()
        store = crashed.open()
        assert recover(store).torn == [], "nothing is written a third time"
        assert visible(store) == ([b"a1", b"a2", b"b"] if decided else [])
        crashed.close()


def test_writing_again_may_itself_be_cut_off(written):
    files, start, ends = written
    crashed = files.copy()
    crashed.write(ends[0], bytes(ends[-1] - ends[0] + 200))
    store = crashed.open()
    torn = recover(store).torn
    assert len(torn) == 2
    for one in itertools.islice(torn, 1):
        store.put([to_put(one)], NOW)
    dead = crashed.copy()
    store = dead.open()
    half_messages = recover(store)
    assert len(half_messages.torn) == 1
    store.put([to_put(one) for one in half_messages.torn], NOW)
    assert visible(store) == [b"a1", b"a2", b"b"]
    assert recover(store).torn == []
    dead.close()
    crashed.close()
    assert start < ends[0]
