"""The tables of a broker: loaded, saved when they change, and never begun anew in silence."""

from __future__ import annotations

import pytest

from mqmesh.errors import CorruptRecord, DiskFull, StorageError
from mqmesh.protocol.groups import GroupConfig
from mqmesh.protocol.route import TopicConfig
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.tables import GROUPS_FILE, OFFSETS_FILE, TOPICS_FILE, BrokerTables
from mqmesh.testing.clock import ManualClock


class FakeStore:
    """A store that has messages of some topics."""

    def __init__(self, **highest):
        self.highest = highest

    def topics(self):
        return list(self.highest)

    def queues(self, topic):
        return [self.highest[topic]]

    def queue_bounds(self, topic, queue_id):
        return 0, 100

    def epoch(self):
        return 0


class FakeSaver:
    """Saves into a dict, when it is told to."""

    def __init__(self, disk, name, dump):
        self.disk, self.name, self.dump = disk, name, dump
        self.failing = False
        self.retried = 0
        self.closed = False
        self.failure = None
        self.has_room = True

    def take_room(self):
        self.failure = None if self.has_room else DiskFull("no room")

    def look_for_room(self):
        self.take_room()

    def save(self, on_saved=None):
        error = StorageError("full") if self.failing else None
        if error is None:
            self.disk[self.name] = self.dump()
        if on_saved is not None:
            on_saved(error)

    def save_if_failed(self):
        self.retried += 1

    def close(self):
        self.closed = True
        if self.failing:
            raise StorageError("full")


class Case:
    def __init__(self, disk=None, store=None, *, load=True, is_first_life=True):
        self.disk = {} if disk is None else disk
        self.soon = []
        self.savers: dict[str, FakeSaver] = {}
        self.tables = BrokerTables(BrokerConfig(), ManualClock(), self.soon.append)
        if load:
            self.tables.load(
                store or FakeStore(), self.disk.get, self._make, is_first_life=is_first_life
            )

    def _make(self, name, dump):
        self.savers[name] = FakeSaver(self.disk, name, dump)
        return self.savers[name]


def test_what_was_saved_comes_back():
    case = Case()
    case.tables.topics.set(TopicConfig("t", 3, 3), 1)
    case.tables.groups.update(GroupConfig("g", retry_max_times=2), 1)
    case.tables.offsets.commit("g", "t", 0, 7)
    told = []
    case.tables.save_topics(told.append)
    case.tables.save_groups(told.append)
    case.tables.save_offsets(told.append)
    assert told == [None, None, None]
    assert set(case.disk) == {TOPICS_FILE, GROUPS_FILE, OFFSETS_FILE}
    again = Case(case.disk).tables
    assert again.topics.require("t").config == TopicConfig("t", 3, 3)
    assert again.groups.get("g") == GroupConfig("g", retry_max_times=2)
    assert again.offsets.query("g", "t", 0) == 7


def test_offsets_are_saved_when_they_changed():
    case = Case()
    case.tables.tick()
    assert case.disk == {}
    case.tables.offsets.commit("g", "t", 0, 7)
    case.tables.tick()
    assert list(case.disk) == [OFFSETS_FILE]
    case.disk.clear()
    case.tables.tick()
    assert case.disk == {}
    assert {saver.retried for saver in case.savers.values()} == {3}


def test_commits_fail_from_the_start_until_there_is_room_to_save_them():
    case = Case()
    case.savers[OFFSETS_FILE].has_room = False
    case.tables.take_room()
    assert isinstance(case.tables.offsets_failure(), DiskFull)
    case.tables.look_for_room()
    assert isinstance(case.tables.offsets_failure(), DiskFull)
    case.savers[OFFSETS_FILE].has_room = True
    case.tables.look_for_room()
    assert case.tables.offsets_failure() is None


def test_who_waits_for_the_disk_is_told_of_its_failure():
    case, told = Case(), []
    case.savers[GROUPS_FILE].failing = True
    case.tables.save_groups(told.append)
    assert isinstance(told[0], StorageError)


def test_topics_that_only_the_store_knows_are_taken_in_and_saved(caplog):
    case = Case(store=FakeStore(lost=6))
    assert case.tables.topics.require("lost").config == TopicConfig("lost", 7, 7)
    assert TOPICS_FILE in case.disk
    assert "1 topics of the store were missing" in caplog.text


@pytest.mark.parametrize("name", [TOPICS_FILE, OFFSETS_FILE, GROUPS_FILE])
def test_a_table_that_cannot_be_read_is_an_error(name):
    with pytest.raises(CorruptRecord):
        Case({name: b"{"})


def test_every_table_is_closed_though_one_cannot_be_saved(caplog):
    case = Case()
    case.savers[TOPICS_FILE].failing = True
    case.tables.close()
    assert all(saver.closed for saver in case.savers.values())
    assert "what changed last is lost: full" in caplog.text
    case.tables.close()


def test_without_a_disk_answers_come_all_the_same_but_later():
    case, told = Case(load=False), []
    case.tables.save_groups(told.append)
    assert told == []
    case.soon.pop()()
    assert told == [None]
    case.tables.offsets.commit("g", "t", 0, 1)
    case.tables.tick()


def test_offsets_that_are_gone_stop_the_start():
    with pytest.raises(CorruptRecord, match=r"consumer_offsets\.json and its backup are gone"):
        Case(is_first_life=False)
    case = Case()
    case.tables.save_offsets()
    Case(case.disk, is_first_life=False)


def test_messages_without_any_offsets_are_told_of(caplog):
    Case()
    assert caplog.text == ""
    Case(store=FakeStore(t=0))
    assert "every group begins anew" in caplog.text


def test_offsets_that_count_what_the_log_lost_are_moved_back_and_saved(caplog):
    case = Case()
    for group, at in (("g", 20), ("h", 7)):
        case.tables.offsets.commit(group, "t", 0, at)
    case.tables.offsets.commit("g", "u", 0, 101)
    case.tables.offsets.epoch = 4
    case.tables.save_offsets()
    store = FakeStore()
    store.epoch = lambda: 5
    store.cut_offset = lambda topic, queue_id, epoch: {("t", 4): 10}.get((topic, epoch))
    # Other messages came there already: the queue's end alone would not tell.
    assert store.queue_bounds("t", 0)[1] == 100
    again = Case(case.disk, store)
    assert again.tables.offsets.query("g", "t", 0) == 10
    assert again.tables.offsets.query("h", "t", 0) == 7
    assert again.tables.offsets.query("g", "u", 0) == 100
    assert "2 committed offsets stood behind the end of the log" in caplog.text
    # Saved at once, and true in the epoch of now.
    last = Case(case.disk, store).tables
    assert last.offsets.query("g", "t", 0) == 10
    assert last.offsets.epoch == 5
