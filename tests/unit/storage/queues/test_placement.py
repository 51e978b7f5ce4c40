"""Batches get their offsets; nothing is written, and what was noted can be taken back."""

from __future__ import annotations

import pytest

from mqmesh.batch.record_batch import Attributes, check_stored
from mqmesh.errors import DiskFull
from mqmesh.storage.interface import MIN_SEGMENT_BYTES, PutStatus, StoreConfig
from mqmesh.storage.queues.placement import InARow, Placement
from mqmesh.storage.queues.producer_states import ProducerStates
from mqmesh.testing.store_contract import NOW, make_batch

CONFIG = StoreConfig(mapped_file_size_commit_log=MIN_SEGMENT_BYTES)


class Queue:
    def __init__(self, end: int) -> None:
        self.end = end


class Scene:
    def __init__(self) -> None:
        self.states = ProducerStates(100)
        self.queues = {("a", 0): Queue(7), ("b", 1): Queue(0)}
        self.placement = Placement(
            self.states, lambda *key: self.queues[key], store_id=9, config=CONFIG
        )
        self.placed: list = []

    def place(self, places, batches):
        return self.placement.place(places, batches, NOW, 3, self.placed)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_batches_stand_one_behind_the_other_in_log_and_queue(scene):
    batches = [
        make_batch(["x", "y"], topic="a", first_sequence=0),
        make_batch(["z"], topic="b", queue_id=1),
        make_batch(["w"], topic="a", first_sequence=2),
    ]
    places = InARow(500)
    results = scene.place(places, batches)
    assert [result.base_queue_offset for result in results] == [7, 0, 9]
    position = 500
    for batch, result, data in zip(batches, results, places.records(), strict=True):
        header = check_stored(data)
        assert (header.commitlog_offset, result.commitlog_offset) == (position, position)
        assert (header.base_queue_offset, header.epoch) == (result.base_queue_offset, 3)
        assert (header.store_id, header.store_timestamp) == (9, NOW)
        assert data[48:] == bytes(batch.data)[48:]
        position += len(data)
        assert result.end_offset == position
    assert places.end == position
    # Whoever writes them moves the ends.
    assert [queue.end for queue in scene.queues.values()] == [7, 0]
    a, b = scene.queues.values()
    assert [queue for _, queue, _ in scene.placed] == [a, b, a]


def test_what_is_known_or_too_large_gets_no_place(scene):
    batch = make_batch(["x"], topic="a")
    again = make_batch(["x"], topic="a", attributes=int(Attributes.REDELIVERED))
    large = make_batch(["x" * MIN_SEGMENT_BYTES], topic="a", first_sequence=1)
    other = make_batch(["other"], topic="a")
    results = scene.place(InARow(0), [batch, batch, again, large, other])
    assert [result.status for result in results] == [
        PutStatus.PUT_OK,
        PutStatus.DUPLICATE,
        PutStatus.PUT_OK,
        PutStatus.MESSAGE_ILLEGAL,
        PutStatus.SEQUENCE_CONFLICT,
    ]
    assert results[1].base_queue_offset == 7
    assert scene.placement.duplicates == 1
    assert len(scene.placed) == 2


def test_what_finds_no_room_is_not_remembered(scene):
    class Full(InARow):
        def place(self, size):
            if self.pieces:
                raise DiskFull("no room")
            return super().place(size)

    batches = [make_batch(["x"], topic="a"), make_batch(["y"], topic="a", first_sequence=1)]
    with pytest.raises(DiskFull):
        scene.place(Full(100), batches)
    assert len(scene.placed) == 1 and len(scene.states) == 1
    scene.placement.take_back(scene.placed, 100)
    assert len(scene.states) == 0


@pytest.mark.parametrize("most", [1, 2, 100])
def test_what_was_forgotten_for_what_finds_no_room_is_remembered_again(scene, most):
    scene.states = ProducerStates(most)
    scene.placement = Placement(
        scene.states, lambda *key: scene.queues[key], store_id=9, config=CONFIG
    )
    places = InARow(0)
    old = [make_batch(["x"], topic="a", first_sequence=number) for number in range(6)]
    scene.place(places, [make_batch(["z"], topic="b", queue_id=1, producer_id=3), *old])
    before, start = [(key, list(window)) for key, window in scene.states.dump()], places.end
    for _ in range(3):
        placed = scene.placed = []
        more = [make_batch(["y"], topic="a", first_sequence=6 + number) for number in range(7)]
        other = make_batch(["y"], topic="b", queue_id=1, producer_id=2)
        scene.place(InARow(start), [*more, other, make_batch(["y"], topic="a", first_sequence=20)])
        scene.placement.take_back(placed, start)
    assert [(key, list(window)) for key, window in scene.states.dump()] == before
    results = scene.place(InARow(start), old[1:])
    assert [result.status for result in results] == [PutStatus.DUPLICATE] * 5


def test_the_largest_batch_fits_a_group_with_a_note_of_it(scene):
    room = CONFIG.max_batch_bytes - make_batch([""], topic="a").header.total_size - 10
    large = make_batch(["x" * room], topic="a", group=1)
    note = make_batch(["x" * 500], topic="b", queue_id=1, group=1)
    assert CONFIG.max_batch_bytes - large.header.total_size < 20
    results = scene.place(InARow(0), [note, large])
    assert [result.status for result in results] == [PutStatus.PUT_OK] * 2


def test_a_group_of_a_producer_that_there_is_no_room_for_is_refused_as_a_whole(scene):
    scene.states = ProducerStates(1, min_age_ms=1_000)
    scene.placement = Placement(
        scene.states, lambda *key: scene.queues[key], store_id=9, config=CONFIG
    )
    scene.place(InARow(0), [make_batch(["x"], topic="a")])
    again = int(Attributes.REDELIVERED)
    group = [
        make_batch(["y"], topic="b", queue_id=1, attributes=again, group=1),
        make_batch(["z"], topic="b", queue_id=1, producer_id=2, group=1),
    ]
    results = scene.place(InARow(0), group)
    assert [result.status for result in results] == [PutStatus.TOO_MANY_PRODUCERS] * 2
    assert len(scene.placed) == 1


def test_a_group_makes_no_young_producers_go(scene):
    scene.states = ProducerStates(2, min_age_ms=1_000)
    scene.placement = Placement(
        scene.states, lambda *key: scene.queues[key], store_id=9, config=CONFIG
    )
    places = InARow(0)
    scene.place(places, [make_batch(["x"], topic="a", producer_id=1)])
    group = [
        make_batch(["y"], topic="a", producer_id=2, group=1),
        make_batch(["z"], topic="b", queue_id=1, producer_id=2, group=1),
    ]
    results = scene.place(places, group)
    assert [result.status for result in results] == [PutStatus.TOO_MANY_PRODUCERS] * 2
    results = scene.placement.place(places, group, NOW + 1_000, 3, [])
    assert [result.status for result in results] == [PutStatus.PUT_OK] * 2


def test_a_group_does_not_make_its_own_producers_go(scene):
    scene.states = ProducerStates(2)
    scene.placement = Placement(
        scene.states, lambda *key: scene.queues[key], store_id=9, config=CONFIG
    )
    places = InARow(0)
    scene.place(places, [make_batch(["x"], topic="a", producer_id=n) for n in (1, 2)])
    group = [
        make_batch(["y"], topic="b", queue_id=1, producer_id=3, group=1),
        make_batch(["y"], topic="a", producer_id=1, first_sequence=1, group=1),
    ]
    scene.place(places, group)
    assert [key for key, _ in scene.states.dump()] == [("b", 1, 3), ("a", 0, 1)]
    assert scene.place(places, [make_batch(["x"], topic="a", producer_id=1)])[0].status is (
        PutStatus.DUPLICATE
    )
