"""What the measured programs count with."""

import pytest

from mqmesh.message import BatchInfo, StoredMessage
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs
from rows.workload import Report, SequenceCheck, age_us, make_bodies, percentile, stamp_body


def batch_of(first_sequence: int, count: int, base_queue_offset: int = 0) -> list[StoredMessage]:
    info = BatchInfo(
        "bench",
        0,
        "broker-a",
        QueueOffset(base_queue_offset),
        CommitLogOffset(0),
        1,
        TimestampMs(0),
        TimestampMs(0),
        "",
        "",
        7,
        first_sequence,
        0,
    )
    offsets = range(base_queue_offset, base_queue_offset + count)
    return [
        StoredMessage("bench", b"x", queue_offset=QueueOffset(offset), batch=info)
        for offset in offsets
    ]


def test_messages_in_any_order_of_their_batches_are_all_well():
    seen = SequenceCheck()
    for first in (20, 0, 10):
        seen.add(7, first, 10)
    assert seen.faults(30) == []


def test_each_producer_has_sequences_of_its_own():
    seen = SequenceCheck()
    seen.add(1, 100, 5)
    seen.add(2, 0, 5)
    assert seen.faults(10) == []


def test_a_wrong_count_is_a_fault():
    seen = SequenceCheck()
    seen.add(7, 0, 10)
    assert seen.faults(11) == ["10 messages instead of 11"]


def test_a_gap_is_a_fault():
    seen = SequenceCheck()
    seen.add(7, 0, 10)
    seen.add(7, 11, 10)
    assert len(seen.faults(20)) == 1


def test_a_message_that_came_twice_instead_of_another_is_a_fault():
    seen = SequenceCheck()
    for sequence in (0, 1, 1, 3):
        seen.add(7, sequence, 1)
    assert len(seen.faults(4)) == 1


def test_two_repeats_that_keep_the_sum_are_a_fault():
    # 0 + 2 + 2 + 2 + 4 has count and sum of 0 to 4.
    seen = SequenceCheck()
    for sequence in (0, 2, 2, 2, 4):
        seen.add(7, sequence, 1)
    assert len(seen.faults(5)) == 1


@pytest.mark.parametrize("sizes", [[1], [5], [1, 1, 1], [3, 1, 4, 1, 5], [500, 2, 700]])
def test_a_list_of_several_batches_is_taken_apart_at_their_borders(sizes):
    messages: list[StoredMessage] = []
    for size in sizes:
        messages += batch_of(len(messages), size, len(messages))
    seen = SequenceCheck()
    seen.add_messages(messages)
    assert seen.faults(sum(sizes)) == []


def test_a_part_of_a_batch_counts_as_that_part():
    messages = batch_of(50, 10, 1_000)
    seen = SequenceCheck()
    seen.add_messages(messages[4:])
    seen.add_messages(messages[:4])
    assert seen.faults(10) == []


def test_a_hole_inside_a_batch_is_refused():
    messages = batch_of(0, 10)
    del messages[3]
    with pytest.raises(ValueError, match="hole"):
        SequenceCheck().add_messages(messages)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([], 50, 0.0),
        ([3.0], 50, 3.0),
        ([3.0], 99, 3.0),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.0),
        ([4.0, 1.0, 3.0, 2.0], 100, 4.0),
        (list(range(1, 101)), 99, 99),
        (list(range(1, 1_001)), 99, 990),
        (list(range(1, 1_001)), 99.9, 999),
        ([1.0, 2.0], 0, 1.0),
    ],
)
def test_percentiles_are_nearest_ranks(values, percent, expected):
    assert percentile(values, percent) == expected


def test_bodies_differ_and_are_the_same_in_every_run():
    bodies = make_bodies(100, 64)
    assert len(set(bodies)) == 100
    assert {len(body) for body in bodies} == {64}
    assert bodies == make_bodies(100, 64)


def test_a_stamped_body_keeps_its_size_and_knows_its_age():
    body = stamp_body(bytes(128))
    assert len(body) == 128
    assert 0 <= age_us(body) < 60_000_000


def test_a_rate_is_messages_by_seconds():
    report = Report(message_count=100, begin_s=1.0, end_s=3.0, cpu_s=0.5)
    assert report.rate == 50.0
