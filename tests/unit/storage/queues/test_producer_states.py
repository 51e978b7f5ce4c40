"""What is remembered of producers."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.storage.interface import PutStatus
from mqmesh.storage.queues import producer_states
from mqmesh.storage.queues.producer_states import WINDOW, ProducerStates, StoredBatch
from mqmesh.testing.store_contract import make_batch
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs


def header_of(first_sequence: int, count: int = 1, producer_id: int = 1, body: str = "body"):
    return make_batch([body] * count, first_sequence=first_sequence, producer_id=producer_id).header


def stored(first_sequence: int, place: int, count: int = 1, at_ms: int = 0) -> StoredBatch:
    return StoredBatch(
        first_sequence,
        count,
        QueueOffset(place),
        CommitLogOffset(place * 100),
        CommitLogOffset(place * 100 + 50),
        TimestampMs(at_ms),
        header_of(first_sequence, count).producer_crc,
    )


def status(states: ProducerStates, header, *, queue_id: int = 0, now: int = 0):
    known = states.known("topic", queue_id, header, TimestampMs(now))
    return None if known is None else known.status


def find(states: ProducerStates, first_sequence: int, producer_id: int = 1) -> int | None:
    """Queue offset that a repetition is told, None if it is new."""
    header = header_of(first_sequence, producer_id=producer_id)
    # The stored ones are of producer 1; only the checksum is to fit.
    header = msgspec.structs.replace(header, producer_crc=header_of(first_sequence).producer_crc)
    known = states.known("topic", 0, header, TimestampMs(0))
    if known is None:
        return None
    assert known.status is PutStatus.DUPLICATE
    return known.base_queue_offset


def test_last_batches_of_a_producer_are_found() -> None:
    states = ProducerStates(10)
    for number in range(WINDOW + 2):
        states.note("topic", 0, 1, stored(number, number))
    assert [find(states, number) for number in range(WINDOW + 2)] == [
        None,
        None,
        *range(2, WINDOW + 2),
    ]
    assert find(states, 3, producer_id=2) is None


def test_other_content_under_known_sequences_is_refused() -> None:
    states = ProducerStates(10)
    states.note("topic", 0, 1, stored(4, 0, count=4))
    assert status(states, header_of(4, 4)) is PutStatus.DUPLICATE
    assert status(states, header_of(4, 4, body="other")) is PutStatus.SEQUENCE_CONFLICT
    for first, count in ((4, 3), (3, 2), (7, 1), (7, 9), (5, 2), (0, 30)):
        assert status(states, header_of(first, count)) is PutStatus.SEQUENCE_CONFLICT
    for first, count in ((3, 1), (0, 4), (8, 1)):
        assert status(states, header_of(first, count)) is None


def test_a_producer_forgets_its_own_queues_before_it_takes_more_than_its_room(monkeypatch) -> None:
    monkeypatch.setattr(producer_states, "QUEUES_OF_PRODUCER", 3)
    states = ProducerStates(100, min_age_ms=1_000)
    states.note("topic", 0, 9, stored(0, 0))
    for queue_id in (0, 1, 2, 0, 3, 4):
        states.note("topic", queue_id, 1, stored(queue_id * 10, queue_id + 1))
    assert [key for key, _ in states.dump()] == [
        ("topic", 0, 9),
        ("topic", 0, 1),
        ("topic", 3, 1),
        ("topic", 4, 1),
    ]


def test_new_producers_are_refused_rather_than_others_forgotten_too_early() -> None:
    states = ProducerStates(2, min_age_ms=1_000)
    states.note("topic", 0, 1, stored(0, 0, at_ms=5_000))
    states.note("topic", 0, 2, stored(0, 1, at_ms=5_500))
    new = header_of(0, producer_id=3)
    assert status(states, new, now=5_999) is PutStatus.TOO_MANY_PRODUCERS
    assert status(states, header_of(1), now=5_999) is None
    assert status(states, header_of(0), now=5_999) is PutStatus.DUPLICATE
    assert status(states, header_of(0), queue_id=1, now=5_999) is PutStatus.TOO_MANY_PRODUCERS
    assert status(states, new, now=6_000) is None
    # A clock that was set back must not shut producers out for as long.
    assert status(states, new, now=4_999) is None


def test_one_at_its_limit_needs_no_room_of_others(monkeypatch) -> None:
    monkeypatch.setattr(producer_states, "QUEUES_OF_PRODUCER", 1)
    states = ProducerStates(2, min_age_ms=1_000)
    states.note("topic", 0, 1, stored(0, 0))
    states.note("topic", 0, 2, stored(0, 1))
    assert status(states, header_of(5), queue_id=7) is None
    states.note("topic", 7, 1, stored(5, 2))
    assert [key for key, _ in states.dump()] == [("topic", 0, 2), ("topic", 7, 1)]


def test_noting_a_stretch_again_changes_nothing() -> None:
    states = ProducerStates(10)
    for number in range(9):
        states.note("topic", 0, 1, stored(number, number))
    before = list(states.dump())
    for number in range(2, 9):
        states.note("topic", 0, 1, stored(number, number))
    assert list(states.dump()) == before


def test_those_unused_for_longest_are_forgotten() -> None:
    states = ProducerStates(3)
    for producer_id in (1, 2, 3):
        states.note("topic", 0, producer_id, stored(0, producer_id))
    states.note("topic", 0, 1, stored(1, 4))
    states.note("topic", 0, 4, stored(0, 5))
    assert len(states) == 3
    assert [find(states, 0, producer_id) is not None for producer_id in (1, 2, 3, 4)] == [
        True,
        False,
        True,
        True,
    ]


def test_a_failed_write_is_taken_back() -> None:
    states = ProducerStates(10)
    states.note("topic", 0, 1, stored(0, 0))
    states.note("topic", 0, 1, stored(1, 1))
    states.note("topic", 0, 2, stored(0, 2))
    states.forget_from([("topic", 0, 1), ("topic", 0, 2), ("topic", 0, 3)], 100, [])
    assert find(states, 0) == 0
    assert find(states, 1) is None
    assert len(states) == 1


def test_a_deleted_topic_is_forgotten() -> None:
    states = ProducerStates(10)
    states.note("topic", 0, 1, stored(0, 0))
    states.note("other", 0, 1, stored(0, 1))
    states.forget_topic("topic")
    assert [key for key, _ in states.dump()] == [("other", 0, 1)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 20)), max_size=60))
def test_a_dump_is_loaded_as_it_was(notes: list[tuple[int, int, int]]) -> None:
    states = ProducerStates(5)
    for place, (queue_id, producer_id, sequence) in enumerate(notes):
        states.note("topic", queue_id, producer_id, stored(sequence, place))
    again = ProducerStates(5)
    again.load(states.dump())
    assert list(again.dump()) == list(states.dump())
