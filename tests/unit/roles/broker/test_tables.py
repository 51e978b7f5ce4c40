"""The tables of a broker: kept in its log, and never begun anew in silence."""

from __future__ import annotations

import pytest
from harness.served import KeptState

from mqmesh.batch.record_batch import encode_batch, read_header
from mqmesh.errors import CorruptRecord, DiskFull
from mqmesh.message import STATE_TOPIC, Message
from mqmesh.protocol.groups import GroupConfig
from mqmesh.protocol.route import DataVersion, TopicConfig
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.storage.interface import BatchToPut, StoreConfig
from mqmesh.storage.memory import MemoryStore
from mqmesh.testing.clock import ManualClock


class FullStore(MemoryStore):
    """A store that takes nothing while it is full."""

    is_full = False

    def put(self, batches, store_timestamp, *, despite_full=False):
        assert despite_full
        if self.is_full:
            raise DiskFull("planned")
        return super().put(batches, store_timestamp)


@pytest.fixture
def store():
    return FullStore(StoreConfig(), clock=ManualClock())


def begin(store):
    """A life of a broker begins."""
    tables = KeptState(BrokerConfig(), ManualClock(), store)
    tables.load()
    tables.state.write()
    return tables


def put(store, topic, queue_id=0):
    data = encode_batch(
        [Message(topic, b"x")],
        topic=topic,
        queue_id=queue_id,
        producer_id=1,
        first_sequence=0,
        born_timestamp=0,
        attributes=32,
    )
    MemoryStore.put(store, [BatchToPut(topic, queue_id, read_header(data), data)], 1)


def test_what_was_written_comes_back(store):
    tables = begin(store)
    tables.topics.set(TopicConfig("t", 3, 3), 1)
    tables.groups.update(GroupConfig("g", retry_max_times=2))
    for _ in range(7):
        put(store, "t")
    tables.offsets.commit("g", "t", 0, 7)
    tables.offsets.sent_back.forget("g", 5)
    tables.state.write()
    again = begin(store)
    assert again.topics.require("t").config == TopicConfig("t", 3, 3)
    assert again.groups.get("g") == GroupConfig("g", retry_max_times=2)
    assert again.offsets.query("g", "t", 0) == 7
    assert again.offsets.sent_back.counts_from("g") == 5


def test_each_life_has_versions_of_the_topics_that_no_other_had(store):
    seen = set()
    for life in range(3):
        tables = begin(store)
        for change in range(3):
            tables.topics.set(TopicConfig(f"t{life}{change}", 1, 1), 1)
            seen.add(tables.topics.version)
        tables.state.write()
    assert len(seen) == 9
    assert all(isinstance(one, DataVersion) for one in seen)


def test_a_topic_is_written_in_its_turn_and_an_offset_later(store):
    tables = begin(store)
    assert not tables.state.is_urgent
    tables.offsets.commit("g", "t", 0, 0)
    assert not tables.state.is_urgent
    tables.topics.set(TopicConfig("t", 1, 1), 1)
    assert tables.state.is_urgent
    tables.state.write()
    assert not tables.state.is_urgent
    tables.groups.note_used("g")
    assert tables.state.is_urgent


def test_the_first_write_of_a_life_tells_whether_there_is_room(store):
    store.is_full = True
    tables = begin(store)
    assert isinstance(tables.state.failure, DiskFull)
    store.is_full = False
    tables.state.write()
    assert tables.state.failure is None


def test_who_waits_is_told_of_a_failure_and_the_change_is_tried_again(store):
    tables, told = begin(store), []
    store.is_full = True
    tables.topics.set(TopicConfig("t", 1, 1), 1)
    tables.state.save(told.append)
    written = tables.state.write()
    assert isinstance(written.error, DiskFull)
    assert written.waiters == [told.append]
    store.is_full = False
    assert tables.state.write().error is None
    assert begin(store).topics.get("t") is not None


def test_topics_that_only_the_store_knows_are_taken_in_and_written(store, caplog):
    put(store, "lost", queue_id=6)
    assert begin(store).topics.require("lost").config == TopicConfig("lost", 7, 7)
    assert "1 topics of the store were missing" in caplog.text
    caplog.clear()
    assert begin(store).topics.get("lost") is not None
    assert "missing" not in caplog.text


def test_offsets_of_a_topic_that_was_being_deleted_do_not_pass_over_new_messages(store, caplog):
    tables = begin(store)
    put(store, "t")
    tables.offsets.commit("g", "t", 0, 1)
    tables.state.write()
    store.delete_topic("t")  # and a crash before that was written
    again = begin(store)
    assert again.offsets.query("g", "t", 0) == 0
    assert "1 committed offsets stood behind the end of the log" in caplog.text


def test_records_that_cannot_be_read_stop_the_start(store):
    begin(store)
    data = encode_batch(
        [Message(STATE_TOPIC, b"\xc1")],
        topic=STATE_TOPIC,
        queue_id=0,
        producer_id=1,
        first_sequence=0,
        born_timestamp=0,
    )
    store.delete_topic(STATE_TOPIC)
    MemoryStore.put(store, [BatchToPut(STATE_TOPIC, 0, read_header(data), data)], 1)
    with pytest.raises(CorruptRecord, match="every consumer group would begin anew"):
        begin(store)


def test_without_a_store_answers_come_all_the_same():
    tables = KeptState(BrokerConfig(), ManualClock(), None)
    tables.load()
    told = []
    tables.state.save(told.append)
    tables.offsets.commit("g", "t", 0, 1)
    assert tables.state.write().waiters == [told.append]
    assert not tables.offsets.changed
    assert not tables.state.is_due
