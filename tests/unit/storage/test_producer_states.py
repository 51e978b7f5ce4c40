"""What is remembered of producers."""

from hypothesis import given
from hypothesis import strategies as st

from mqmesh.storage.producer_states import WINDOW, ProducerStates, StoredBatch
from mqmesh.testing.store_contract import make_batch
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs


def stored(first_sequence: int, place: int, count: int = 1) -> StoredBatch:
    return StoredBatch(
        first_sequence,
        count,
        QueueOffset(place),
        CommitLogOffset(place * 100),
        CommitLogOffset(place * 100 + 50),
        TimestampMs(0),
    )


def find(states: ProducerStates, first_sequence: int, producer_id: int = 1) -> StoredBatch | None:
    batch = make_batch(first_sequence=first_sequence, producer_id=producer_id)
    return states.find("topic", 0, batch.header)


def test_last_batches_of_a_producer_are_found() -> None:
    states = ProducerStates(10)
    for number in range(WINDOW + 2):
        states.note("topic", 0, 1, stored(number, number))
    assert [find(states, number) for number in range(WINDOW + 2)] == [
        None,
        None,
        *[stored(number, number) for number in range(2, WINDOW + 2)],
    ]
    assert find(states, 3, producer_id=2) is None


def test_another_number_of_messages_is_another_batch() -> None:
    states = ProducerStates(10)
    states.note("topic", 0, 1, stored(0, 0, count=2))
    assert find(states, 0) is None


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
    states.forget_from([("topic", 0, 1), ("topic", 0, 2), ("topic", 0, 3)], 100)
    assert find(states, 0) == stored(0, 0)
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
