"""Contract tests of message stores: derive a class and define how a store is opened.

For a backend of one's own::

    class TestMyStore(StoreContract):
        def open_store(self, directory, config):
            return MyStore.open(directory, config, clock=ManualClock(), wake=..., on_progress=...)

Stores that keep their batches beyond ``close`` set ``durable = True``.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Final

import msgspec
import pytest

from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.record_batch import (
    BROKER_PART_SIZE,
    Attributes,
    check_batch,
    check_stored,
    decode_messages,
    encode_batch,
    read_header,
    read_meta,
)
from mqmesh.errors import CorruptRecord, OffsetOutOfRange, StoreClosed
from mqmesh.message import Message, tag_hash
from mqmesh.storage.interface import (
    BatchToPut,
    GetResult,
    GetStatus,
    MessageStore,
    PutResult,
    PutStatus,
    StoreConfig,
)
from mqmesh.units import MIB, CommitLogOffset, QueueOffset, TimestampMs

NOW: Final = TimestampMs(1_600_000_000_000)
ZERO: Final = QueueOffset(0)


def make_batch(
    bodies: Sequence[str | bytes] = ("body",),
    *,
    topic: str = "topic",
    queue_id: int = 0,
    producer_id: int = 1,
    first_sequence: int = 0,
    tags: Sequence[str | None] = (),
    attributes: int = 0,
    group: int = 0,
) -> BatchToPut:
    """Makes a batch for tests.

    Args:
        bodies: Bodies of the messages.
        topic: Physical topic.
        queue_id: Queue id, from 0.
        producer_id: Id of the producer.
        first_sequence: Sequence of the first message.
        tags: Tags, one a message, or none at all.
        attributes: Attributes of the batch.
        group: Number of the group that it is put with, 0 for none.
    """
    messages = [
        Message(topic, body.encode() if isinstance(body, str) else body, tag)
        for body, tag in zip(bodies, tags or [None] * len(bodies), strict=True)
    ]
    data = encode_batch(
        messages,
        topic=topic,
        queue_id=queue_id,
        producer_id=producer_id,
        first_sequence=first_sequence,
        born_timestamp=NOW,
        attributes=attributes,
    )
    header = check_batch(data)
    hashes = read_meta(data, header).tag_hashes
    return BatchToPut(topic, queue_id, header, memoryview(data), hashes, group)


def batches_in(result: GetResult) -> list[bytes]:
    """Returns the stored batches of a read, one by one."""
    return [
        bytes(batch) for buffer in result.data for _, batch in iter_batches(buffer, check_stored)
    ]


def bodies_in(result: GetResult, queue_offset: int = 0) -> list[str]:
    """Returns bodies of the messages of a read, from a queue offset on."""
    return [
        message.body.decode()
        for batch in batches_in(result)
        for message in decode_messages(batch, read_header(batch))
        if message.queue_offset >= queue_offset
    ]


def read_queue(
    store: MessageStore, topic: str = "topic", queue_id: int = 0, *, max_bytes: int = MIB
) -> list[str]:
    """Reads all visible messages of a queue as a consumer does, and returns their bodies."""
    bodies = []
    queue_offset, end = store.queue_bounds(topic, queue_id)
    while queue_offset < end:
        result = store.get(topic, queue_id, queue_offset, max_bytes=max_bytes)
        assert result.next_queue_offset > queue_offset
        found = bodies_in(result, queue_offset)
        assert len(found) == result.message_count
        bodies += found
        queue_offset = result.next_queue_offset
    return bodies


class StoreContract:
    """The suite. Every test gets a fresh store with segments of 1 MiB."""

    durable: ClassVar[bool] = False
    """True if batches are there again when the store is opened again."""

    config: ClassVar[StoreConfig] = StoreConfig(
        mapped_file_size_commit_log=1 * MIB, mapped_file_size_consume_queue=100
    )

    def open_store(self, directory: Path, config: StoreConfig) -> MessageStore:
        """Opens a store; the one method that a backend's test must define."""
        raise AssertionError(f"{type(self).__name__} does not say how to open a store")

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        """Returns the directory of a test's store."""
        return tmp_path / "store"

    @pytest.fixture
    def store(self, directory: Path) -> Iterator[MessageStore]:
        """An empty store."""
        store = self.open_store(directory, self.config)
        yield store
        store.close()

    # Put

    def test_a_batch_gets_the_next_offsets_of_its_queue(self, store: MessageStore) -> None:
        first, second = store.put(
            [make_batch(["a", "b"]), make_batch(["c"], first_sequence=2)], NOW
        )
        assert (first.status, second.status) == (PutStatus.PUT_OK, PutStatus.PUT_OK)
        assert (first.base_queue_offset, second.base_queue_offset) == (0, 2)
        assert first.commitlog_offset < first.end_offset <= second.commitlog_offset
        assert first.store_timestamp == NOW
        assert store.queue_bounds("topic", 0) == (0, 3)

    def test_queues_count_for_themselves(self, store: MessageStore) -> None:
        store.put(
            [
                make_batch(["a"], queue_id=0),
                make_batch(["b"], queue_id=1),
                make_batch(["c"], topic="other", queue_id=1),
                make_batch(["d"], queue_id=1, first_sequence=1),
            ],
            NOW,
        )
        assert read_queue(store, queue_id=0) == ["a"]
        assert read_queue(store, queue_id=1) == ["b", "d"]
        assert read_queue(store, "other", 1) == ["c"]
        assert store.queues("topic") == [0, 1]
        assert store.queues("nothing") == []
        assert sorted(store.topics()) == ["other", "topic"]

    def test_the_producers_bytes_are_stored_unchanged(self, store: MessageStore) -> None:
        batch = make_batch(["a", "b"], queue_id=3)
        (result,) = store.put([batch], NOW)
        stored = store.read_at(result.commitlog_offset)
        assert stored[BROKER_PART_SIZE:] == bytes(batch.data)[BROKER_PART_SIZE:]
        header = check_stored(stored)
        assert header.commitlog_offset == result.commitlog_offset
        assert header.base_queue_offset == result.base_queue_offset
        assert header.store_timestamp == NOW

    def test_a_put_of_nothing_stores_nothing(self, store: MessageStore) -> None:
        assert store.put([], NOW) == []
        assert store.stats().put_batches == 0

    def test_a_batch_larger_than_a_segment_is_illegal(self, store: MessageStore) -> None:
        large = make_batch([bytes(self.config.mapped_file_size_commit_log)])
        fitting = make_batch(["a"], first_sequence=1)
        illegal, stored = store.put([large, fitting], NOW)
        assert illegal.status is PutStatus.MESSAGE_ILLEGAL
        assert stored.status is PutStatus.PUT_OK
        assert read_queue(store) == ["a"]

    def test_many_batches_are_all_there(self, store: MessageStore) -> None:
        bodies = [f"{number:06}" + "x" * 3000 for number in range(1000)]
        for number in range(0, len(bodies), 8):
            store.put(
                [
                    make_batch([bodies[index]], first_sequence=index)
                    for index in range(number, number + 8)
                ],
                NOW,
            )
        assert read_queue(store, max_bytes=100_000) == bodies

    def test_the_caller_may_reuse_the_memory_of_a_batch(self, store: MessageStore) -> None:
        batch = make_batch(["a"])
        memory = bytearray(batch.data)
        reused = BatchToPut(batch.topic, batch.queue_id, batch.header, memoryview(memory))
        store.put([reused], NOW)
        memory[:] = bytes(len(memory))
        assert read_queue(store) == ["a"]

    # Duplicates

    def test_a_repeated_batch_gets_the_first_result(self, store: MessageStore) -> None:
        first, _ = store.put([make_batch(["a"]), make_batch(["b"], first_sequence=1)], NOW)
        (again,) = store.put([make_batch(["a"])], TimestampMs(NOW + 5))
        assert again == PutResult(
            PutStatus.DUPLICATE,
            first.base_queue_offset,
            first.commitlog_offset,
            first.end_offset,
            NOW,
        )
        assert read_queue(store) == ["a", "b"]
        assert store.stats().duplicates == 1

    def test_a_batch_repeated_in_the_same_put_is_stored_once(self, store: MessageStore) -> None:
        first, second = store.put([make_batch(["a"]), make_batch(["a"])], NOW)
        assert second.status is PutStatus.DUPLICATE
        assert second.base_queue_offset == first.base_queue_offset
        assert read_queue(store) == ["a"]

    def test_other_content_under_known_sequences_is_refused(self, store: MessageStore) -> None:
        first = make_batch(["a", "b"], first_sequence=5)
        store.put([first], NOW)
        others = [
            make_batch(["a", "x"], first_sequence=5),
            make_batch(["a"], first_sequence=5),
            make_batch(["b", "c"], first_sequence=6),
        ]
        results = store.put([*others, first, make_batch(["c"], first_sequence=7)], NOW)
        assert [result.status for result in results] == [
            *[PutStatus.SEQUENCE_CONFLICT] * 3,
            PutStatus.DUPLICATE,
            PutStatus.PUT_OK,
        ]
        assert [result.base_queue_offset for result in results[:3]] == [-1] * 3
        assert read_queue(store) == ["a", "b", "c"]

    def test_other_producers_and_queues_are_no_duplicates(self, store: MessageStore) -> None:
        results = store.put(
            [
                make_batch(["a"]),
                make_batch(["a"], producer_id=2),
                make_batch(["a"], queue_id=1),
                make_batch(["a"], topic="other"),
            ],
            NOW,
        )
        assert [result.status for result in results] == [PutStatus.PUT_OK] * 4

    def test_a_producer_is_remembered_by_its_newest_batches(self, store: MessageStore) -> None:
        assert not store.producer_window("topic", 0, 1)
        for first in range(9):
            (result,) = store.put([make_batch(["a"], producer_id=1, first_sequence=first)], NOW)
        window = store.producer_window("topic", 0, 1)
        found = [(one.first_sequence, one.message_count) for one in window]
        assert found == [(first, 1) for first in range(4, 9)]
        assert window[-1].end_offset == result.end_offset
        assert not store.producer_window("topic", 1, 1)
        store.delete_topic("topic")
        assert not store.producer_window("topic", 0, 1)

    def test_a_redelivered_batch_is_no_duplicate(self, store: MessageStore) -> None:
        again = make_batch(["a"], attributes=Attributes.REDELIVERED)
        results = store.put([make_batch(["a"]), again, again], NOW)
        assert [result.status for result in results] == [PutStatus.PUT_OK] * 3

    def test_redelivered_batches_do_not_displace_what_may_be_repeated(
        self, store: MessageStore
    ) -> None:
        sent = make_batch(["a"], first_sequence=1_000)
        due = [
            make_batch(["a"], first_sequence=first, attributes=Attributes.REDELIVERED)
            for first in range(20)
        ]
        results = store.put([sent, *due, sent], NOW)
        assert [result.status for result in results] == [PutStatus.PUT_OK] * 21 + [
            PutStatus.DUPLICATE
        ]

    # Groups

    def test_a_group_is_stored_in_order_between_others(self, store: MessageStore) -> None:
        results = store.put(
            [
                make_batch(["a"]),
                make_batch(["b"], first_sequence=1, group=1),
                make_batch(["c"], topic="other", group=1),
                make_batch(["d"], first_sequence=2, group=2),
                make_batch(["e"], first_sequence=3, group=2),
                make_batch(["f"], first_sequence=4),
            ],
            NOW,
        )
        assert [result.status for result in results] == [PutStatus.PUT_OK] * 6
        places = [result.commitlog_offset for result in results]
        assert places == sorted(places)
        for result in results:
            header = check_stored(store.read_at(result.commitlog_offset))
            assert header.base_queue_offset == result.base_queue_offset
        assert read_queue(store) == ["a", "b", "d", "e", "f"]
        assert read_queue(store, "other") == ["c"]

    def test_a_repeated_group_gets_the_first_results(self, store: MessageStore) -> None:
        group = [
            make_batch(["mark"], topic="marks", attributes=Attributes.REDELIVERED, group=1),
            make_batch(["a"], group=1),
            make_batch(["b"], queue_id=1, group=1),
        ]
        mark, *first = store.put(group, NOW)
        assert mark.status is PutStatus.PUT_OK
        again = store.put(group, TimestampMs(NOW + 5))
        assert [result.status for result in again] == [PutStatus.DUPLICATE] * 3
        places = [(result.base_queue_offset, result.commitlog_offset) for result in first]
        assert [(one.base_queue_offset, one.commitlog_offset) for one in again[1:]] == places
        assert again[0].base_queue_offset >= 0
        assert read_queue(store, "marks") == ["mark"]

    def test_a_repeated_group_is_known_however_many_batches_it_has(
        self, store: MessageStore
    ) -> None:
        group = [make_batch([f"{number}"], first_sequence=number, group=1) for number in range(40)]
        for status in (PutStatus.PUT_OK, PutStatus.DUPLICATE, PutStatus.DUPLICATE):
            assert {result.status for result in store.put(group, NOW)} == {status}
        longer = [*group[30:], make_batch(["new"], first_sequence=40, group=1)]
        assert {one.status for one in store.put(longer, NOW)} == {PutStatus.SEQUENCE_CONFLICT}
        assert read_queue(store) == [f"{number}" for number in range(40)]

    def test_a_group_of_which_a_part_is_stored_is_refused(self, store: MessageStore) -> None:
        store.put([make_batch(["a"])], NOW)
        known, new = make_batch(["a"], group=1), make_batch(["b"], first_sequence=1, group=1)
        mark = make_batch(["mark"], topic="marks", attributes=Attributes.REDELIVERED, group=1)
        results = store.put([mark, known, new, make_batch(["c"], queue_id=1)], NOW)
        conflict = PutStatus.SEQUENCE_CONFLICT
        assert [result.status for result in results] == [conflict] * 3 + [PutStatus.PUT_OK]
        assert [result.base_queue_offset for result in results[:3]] == [-1] * 3
        twice = [make_batch(["d"], first_sequence=5, group=2)] * 2
        assert [result.status for result in store.put(twice, NOW)] == [conflict] * 2
        assert read_queue(store) == ["a"]
        assert read_queue(store, "marks") == []

    def test_a_group_that_fits_no_segment_is_illegal(self, store: MessageStore) -> None:
        body = bytes(self.config.mapped_file_size_commit_log // 4)
        large = [make_batch([body], first_sequence=number, group=1) for number in range(4)]
        results = store.put([*large, make_batch(["a"], first_sequence=9)], NOW)
        illegal = PutStatus.MESSAGE_ILLEGAL
        assert [result.status for result in results] == [illegal] * 4 + [PutStatus.PUT_OK]
        fitting = [msgspec.structs.replace(one, group=2) for one in large[:3]]
        assert [one.status for one in store.put(fitting, NOW)] == [PutStatus.PUT_OK] * 3

    # Get

    def test_an_unknown_queue_reads_as_empty(self, store: MessageStore) -> None:
        assert store.queue_bounds("topic", 7) == (0, 0)
        result = store.get("topic", 7, 0, max_bytes=1)
        assert result == GetResult(GetStatus.NO_NEW_MESSAGE, ZERO, ZERO, ZERO)
        assert store.get("topic", 7, 1, max_bytes=1).status is GetStatus.OFFSET_OVERFLOW
        assert store.offset_by_time("topic", 7, NOW) == 0

    def test_reading_outside_of_the_queue_says_where_to_go_on(self, store: MessageStore) -> None:
        store.put([make_batch(["a", "b"])], NOW)
        end = store.get("topic", 0, 2, max_bytes=MIB)
        assert (end.status, end.next_queue_offset) == (GetStatus.NO_NEW_MESSAGE, 2)
        behind = store.get("topic", 0, 3, max_bytes=MIB)
        assert (behind.status, behind.next_queue_offset) == (GetStatus.OFFSET_OVERFLOW, 2)
        before = store.get("topic", 0, -1, max_bytes=MIB)
        assert (before.status, before.next_queue_offset) == (GetStatus.OFFSET_TOO_SMALL, 0)

    def test_reading_begins_with_the_batch_that_holds_the_offset(self, store: MessageStore) -> None:
        store.put([make_batch(["a", "b", "c"]), make_batch(["d", "e"], first_sequence=3)], NOW)
        result = store.get("topic", 0, 1, max_bytes=MIB)
        assert result.status is GetStatus.FOUND
        assert (result.min_queue_offset, result.max_queue_offset) == (0, 5)
        assert result.next_queue_offset == 5
        assert result.message_count == 4
        assert bodies_in(result, 1) == ["b", "c", "d", "e"]
        assert len(batches_in(result)) == 2

    def test_what_is_sound_is_read_alike_when_it_is_verified(self, store: MessageStore) -> None:
        store.put([make_batch(["a", "b", "c"]), make_batch(["d", "e"], first_sequence=3)], NOW)
        usual = store.get("topic", 0, 1, max_bytes=MIB)
        verified = store.get("topic", 0, 1, max_bytes=MIB, verify=True)
        assert bodies_in(verified, 1) == bodies_in(usual, 1)
        assert verified.message_count == usual.message_count
        assert verified.next_queue_offset == usual.next_queue_offset

    def test_one_batch_comes_whatever_its_size(self, store: MessageStore) -> None:
        store.put([make_batch(["a" * 9000]), make_batch(["b"], first_sequence=1)], NOW)
        result = store.get("topic", 0, 0, max_bytes=1)
        assert len(batches_in(result)) == 1
        assert result.next_queue_offset == 1

    def test_reading_stops_before_it_is_too_much(self, store: MessageStore) -> None:
        batches = [make_batch(["x" * 1000], first_sequence=n) for n in range(5)]
        store.put(batches, NOW)
        size = batches[0].header.total_size
        assert store.get("topic", 0, 0, max_bytes=3 * size).message_count == 3
        assert store.get("topic", 0, 0, max_bytes=3 * size - 1).message_count == 2

    def test_batches_of_every_length_are_found_from_every_offset(self, store: MessageStore) -> None:
        bodies: list[str] = []
        for count in (1, 2, 1, 1, 30, 1, 250, 3, 100, 1):
            more = [f"{len(bodies) + index}" for index in range(count)]
            store.put([make_batch(more, first_sequence=len(bodies))], NOW)
            bodies += more
        for start in range(len(bodies)):
            result = store.get("topic", 0, start, max_bytes=MIB)
            assert bodies_in(result, start) == bodies[start:]

    # Tags

    def test_only_batches_with_a_wanted_tag_are_read(self, store: MessageStore) -> None:
        store.put(
            [
                make_batch(["a", "b"], tags=["red", "green"]),
                make_batch(["c"], tags=["blue"], first_sequence=2),
                make_batch(["d", "e"], first_sequence=3),
                make_batch(["f", "g"], tags=["red", "red"], first_sequence=5),
            ],
            NOW,
        )
        wanted = frozenset([tag_hash("red")])
        result = store.get("topic", 0, 0, max_bytes=MIB, tag_hashes=wanted)
        assert bodies_in(result) == ["a", "b", "f", "g"]
        assert result.message_count == 4
        assert result.next_queue_offset == 7
        both = frozenset([tag_hash("blue"), tag_hash("green")])
        result = store.get("topic", 0, 0, max_bytes=MIB, tag_hashes=both)
        assert bodies_in(result) == ["a", "b", "c"]

    def test_a_tag_before_the_offset_does_not_count(self, store: MessageStore) -> None:
        store.put([make_batch(["a", "b"], tags=["red", "green"])], NOW)
        wanted = frozenset([tag_hash("red")])
        result = store.get("topic", 0, 1, max_bytes=MIB, tag_hashes=wanted)
        assert (result.status, result.next_queue_offset) == (GetStatus.NO_MATCHED_MESSAGE, 2)

    def test_a_filter_that_fits_nothing_comes_to_the_end(self, store: MessageStore) -> None:
        for number in range(40):
            batch = make_batch(["x"] * 2000, tags=["red"] * 2000, first_sequence=2000 * number)
            store.put([batch], NOW)
        queue_offset, reads = 0, 0
        while queue_offset < 80_000:
            result = store.get(
                "topic", 0, queue_offset, max_bytes=MIB, tag_hashes=frozenset([tag_hash("blue")])
            )
            assert result.status is GetStatus.NO_MATCHED_MESSAGE
            assert result.next_queue_offset > queue_offset
            queue_offset = result.next_queue_offset
            reads += 1
        assert reads < 80

    # Time

    def test_offset_by_time_is_the_first_message_not_older(self, store: MessageStore) -> None:
        for number in range(50):
            store.put([make_batch(["x"] * 7, first_sequence=7 * number)], _time(10 * number))
        assert store.offset_by_time("topic", 0, _time(-1)) == 0
        assert store.offset_by_time("topic", 0, _time(0)) == 0
        assert store.offset_by_time("topic", 0, _time(1)) == 7
        assert store.offset_by_time("topic", 0, _time(100)) == 70
        assert store.offset_by_time("topic", 0, _time(490)) == 343
        assert store.offset_by_time("topic", 0, _time(491)) == 350

    # Read at

    def test_read_at_reads_only_where_a_batch_begins(self, store: MessageStore) -> None:
        first, second = store.put([make_batch(["a"]), make_batch(["b"], first_sequence=1)], NOW)
        assert read_header(store.read_at(second.commitlog_offset)).base_queue_offset == 1
        with pytest.raises(CorruptRecord):
            store.read_at(CommitLogOffset(first.commitlog_offset + 1))
        for outside in (-1, second.end_offset, second.end_offset + MIB):
            with pytest.raises(OffsetOutOfRange):
                store.read_at(CommitLogOffset(outside))

    # Topics

    def test_a_deleted_topic_is_forgotten(self, store: MessageStore) -> None:
        store.put([make_batch(["a"]), make_batch(["b"], topic="other", queue_id=2)], NOW)
        store.delete_topic("topic")
        store.delete_topic("never heard of")
        assert store.topics() == ["other"]
        assert store.queue_bounds("topic", 0) == (0, 0)
        assert read_queue(store, "other", 2) == ["b"]

    def test_a_topic_made_again_begins_at_0(self, store: MessageStore) -> None:
        store.put([make_batch(["a", "b"])], NOW)
        store.delete_topic("topic")
        (result,) = store.put([make_batch(["a", "b"])], NOW)
        assert (result.status, result.base_queue_offset) == (PutStatus.PUT_OK, 0)
        store.put([make_batch(["c"], first_sequence=2)], NOW)
        assert read_queue(store) == ["a", "b", "c"]

    # Background and end

    def test_ticks_change_nothing_that_can_be_seen(self, store: MessageStore) -> None:
        store.put([make_batch(["a", "b"])], NOW)
        for now_ms in range(0, 100_000, 1000):
            store.tick(now_ms)
        store.put([make_batch(["c"], first_sequence=2)], NOW)
        for now_ms in range(100_000, 200_000, 1000):
            store.tick(now_ms)
        assert read_queue(store) == ["a", "b", "c"]

    def test_stats_count(self, store: MessageStore) -> None:
        (result,) = store.put([make_batch(["a", "b"])], NOW)
        stats = store.stats()
        assert (stats.put_batches, stats.put_messages) == (1, 2)
        assert (stats.topics, stats.queues) == (1, 1)
        assert stats.max_commitlog_offset == result.end_offset
        assert stats.writable
        assert stats.started_clean
        assert not stats.damaged

    def test_a_closed_store_refuses_everything(self, store: MessageStore) -> None:
        store.close()
        store.close()
        calls = [
            lambda: store.put([], NOW),
            lambda: store.get("topic", 0, 0, max_bytes=1),
            lambda: store.queue_bounds("topic", 0),
            lambda: store.offset_by_time("topic", 0, NOW),
            lambda: store.read_at(CommitLogOffset(0)),
            lambda: store.queues("topic"),
            store.topics,
            lambda: store.delete_topic("topic"),
            store.durable_offset,
            lambda: store.tick(0),
            store.stats,
        ]
        for call in calls:
            with pytest.raises(StoreClosed):
                call()

    def test_everything_is_there_again_after_a_clean_stop(
        self, store: MessageStore, directory: Path
    ) -> None:
        bodies = [f"{number}" for number in range(300)]
        for number in range(0, 300, 3):
            store.put([make_batch(bodies[number : number + 3], first_sequence=number)], NOW)
        store.put([make_batch(["z"], topic="gone")], NOW)
        store.delete_topic("gone")
        store.close()
        again = self.open_store(directory, self.config)
        try:
            if not self.durable:
                assert again.topics() == []
                return
            assert read_queue(again) == bodies
            assert again.topics() == ["topic"]
            assert again.durable_offset() == again.stats().max_commitlog_offset
            (repeated,) = again.put([make_batch(bodies[297:], first_sequence=297)], NOW)
            assert repeated.status is PutStatus.DUPLICATE
            (new,) = again.put([make_batch(["new"], first_sequence=300)], NOW)
            assert new.base_queue_offset == 300
            assert read_queue(again) == [*bodies, "new"]
        finally:
            again.close()


def _time(milliseconds: int) -> TimestampMs:
    return TimestampMs(NOW + milliseconds)
