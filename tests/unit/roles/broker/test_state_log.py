"""State records: what is written when, snapshots, and starts from damaged ones."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import msgspec
import pytest
from harness.served import KeptState

from mqmesh.batch.record_batch import check_stored, encode_batch, read_header
from mqmesh.errors import CorruptRecord, NotMaster
from mqmesh.message import STATE_TOPIC, Message
from mqmesh.protocol.route import TopicConfig
from mqmesh.roles.broker import state_log
from mqmesh.roles.broker.config import BrokerConfig, BrokerStoreConfig
from mqmesh.roles.broker.state_log import StateLog
from mqmesh.roles.broker.state_records import (
    GroupRecord,
    GroupSettings,
    JoinedRecords,
    MemberSubscriptions,
    OffsetsRecord,
    OwnersRecord,
    RecordPart,
    StateBody,
    decode_state,
    encode_state,
    in_bodies,
)
from mqmesh.storage.interface import BatchToPut, GetStatus, PutResult, PutStatus
from mqmesh.storage.memory import MemoryStore
from mqmesh.testing.clock import ManualClock
from mqmesh.units import KIB

SEGMENT = 64 * KIB
CONFIG = BrokerConfig(storage=BrokerStoreConfig(mapped_file_size_commit_log=SEGMENT))


class HoldingStore(MemoryStore):
    """A memory store that knows from where on its log is wanted, and has bad places."""

    def __init__(self):
        super().__init__(CONFIG.storage, clock=ManualClock())
        self.kept = {}
        self.bad = set()

    def keep_from(self, holder, commitlog_offset):
        self.kept[holder] = commitlog_offset

    def get(self, topic, queue_id, queue_offset, **options):
        if topic == STATE_TOPIC and queue_offset in self.bad:
            raise CorruptRecord(f"planned: {queue_offset}")
        if topic == STATE_TOPIC:
            options["max_bytes"] = 1  # so that each bad place is met by itself
        return super().get(topic, queue_id, queue_offset, **options)

    def fill(self, size=SEGMENT):
        """Messages move the log on."""
        data = encode_batch(
            [Message("t", bytes(size // 2))],
            topic="t",
            queue_id=0,
            producer_id=1,
            first_sequence=0,
            born_timestamp=0,
            attributes=32,
        )
        self.put([BatchToPut("t", 0, read_header(data), data)] * 2, 1)

    def bodies(self):
        """All state bodies, in order."""
        found, place = [], 0
        while True:
            got = MemoryStore.get(self, STATE_TOPIC, 0, place, max_bytes=1)
            if got.status is not GetStatus.FOUND:
                return found
            found.append(decode_state(got.data[0]))
            place = got.next_queue_offset


@pytest.fixture
def store():
    return HoldingStore()


def begin(store):
    tables = KeptState(CONFIG, ManualClock(), store)
    tables.load()
    tables.state.write()
    return tables


def settle(tables, most=100):
    """All that is due is written."""
    writes = 0
    while tables.state.is_due:
        tables.state.write()
        writes += 1
        assert writes < most
    return writes


def facts(tables):
    offsets = {
        (group, topic, queue_id): at
        for group in tables.offsets.groups()
        for topic, queues in tables.offsets.topics(group).items()
        for queue_id, at in queues.items()
    }
    return tables.topics.configs(), tables.groups.names(), offsets


def test_records_come_back_as_they_were_and_as_they_once_were_written():
    golden = runpy.run_path(str(Path(__file__).parents[3] / "data" / "make_golden.py"))
    data = golden["STATE_FILE"].read_bytes()
    assert golden["encode_records"]() == data, "a new form needs a new version and a new file"
    found = decode_state(data)
    assert (found.version, found.snapshot_at, found.records) == (6, 5, golden["STATE"])


def test_records_of_version_5_have_no_tables():
    golden = runpy.run_path(str(Path(__file__).parents[3] / "data" / "make_golden.py"))
    found = decode_state(golden["STATE_FILE_5"].read_bytes())
    assert (found.version, found.records) == (5, golden["STATE_5"])


def test_records_of_version_4_say_nothing_of_queues_that_were_processed():
    golden = runpy.run_path(str(Path(__file__).parents[3] / "data" / "make_golden.py"))
    found = decode_state(golden["STATE_FILE_4"].read_bytes())
    assert (found.version, found.records) == (4, golden["STATE_4"])


def test_records_of_version_3_say_nothing_of_what_is_known_of_owners():
    golden = runpy.run_path(str(Path(__file__).parents[3] / "data" / "make_golden.py"))
    found = decode_state(golden["STATE_FILE_3"].read_bytes())
    assert (found.version, found.records) == (3, golden["STATE_3"])


def test_records_of_version_2_have_no_owners():
    golden = runpy.run_path(str(Path(__file__).parents[3] / "data" / "make_golden.py"))
    found = decode_state(golden["STATE_FILE_2"].read_bytes())
    before = [one for one in golden["STATE_3"] if not isinstance(one, OwnersRecord)]
    assert (found.version, found.records) == (2, before)


def test_records_of_version_1_have_the_defaults_of_what_came_later():
    golden = runpy.run_path(str(Path(__file__).parents[3] / "data" / "make_golden.py"))
    found = decode_state(golden["OLD_STATE_FILE"].read_bytes())
    before = [
        GroupRecord("g", GroupSettings(False, False, 3, False)) if one.settings else one
        for one in golden["STATE_3"]
        if isinstance(one, GroupRecord)
    ]
    groups = [one for one in found.records if isinstance(one, GroupRecord)]
    assert (found.version, groups) == (1, before)


def test_records_are_divided_by_size_and_one_that_is_larger_into_parts():
    records = [OffsetsRecord("g", f"t{number}", {0: 1}) for number in range(10)]
    bodies = in_bodies(records, 30)
    assert len(bodies) == 5
    assert sum(map(len, bodies)) == 10
    assert in_bodies([], 100) == [[]]
    large = OffsetsRecord("g", "large", dict.fromkeys(range(100), 1))
    bodies = in_bodies([records[0], large, records[1]], 30)
    assert max(sum(map(len, body)) for body in bodies) <= 30 + 20
    assert read(*bodies) == [records[0], large, records[1]]
    assert read(*bodies[:4], *bodies) == [records[0], records[0], large, records[1]], "a torn end"
    assert read(*bodies[:2], *bodies[3:])[-1] == records[1]
    assert set(read(*bodies[:2], *bodies[3:])[1:-1]) == {None}, "a part is missing"
    broken = RecordPart(0, True, b"\xc1")
    assert list(JoinedRecords().read(StateBody(4, 0, [broken]))) == [None]


def read(*bodies):
    """What a reader makes of bodies."""
    joined = JoinedRecords()
    stored = [decode_state(encode_state(body, 0, 1)) for body in bodies]
    return [record for body in stored for record in joined.read(body)]


class OneTable:
    """A table of one record.

    Attributes:
        record: The record; None for none yet.
        applied: Records that were read.
    """

    def __init__(self, record=None):
        self.changed = {} if record is None else {"": None}
        self.record = record
        self.applied = []

    def state_keys(self):
        return [] if self.record is None else [""]

    def records_of(self, key):
        return [self.record]

    def apply(self, record):
        self.applied.append(record)


def logged(store, table, **options):
    state = StateLog(store, ManualClock(), config=CONFIG.storage)
    state.keep(OwnersRecord, table, **options)
    return state


LARGE = OwnersRecord("g", {"a": MemberSubscriptions("", "", [("t", "x" * 3 * SEGMENT, "TAG")])})


def test_a_record_that_is_larger_than_a_segment_is_written_and_read(store, monkeypatch):
    assert logged(store, OneTable(LARGE)).write().error is None
    table = OneTable()
    logged(store, table).load()
    assert table.applied == [LARGE]
    end = len(store.bodies())
    assert end == 7, "parts of half a segment"
    # A follower gets the parts one after the other, and begins in between.
    bounds = {"return_value": (0, 2)}
    monkeypatch.setattr(store, "queue_bounds", lambda topic, queue_id: bounds["return_value"])
    table = OneTable()
    following = logged(store, table)
    following.load()
    for place in range(3, end + 1):
        assert not table.applied
        bounds["return_value"] = (0, place)
        assert following.follow()
    assert table.applied == [LARGE]


def test_what_the_log_does_not_take_is_not_claimed_to_be_done(store, monkeypatch):
    table = OneTable(LARGE)
    state = logged(store, table)
    refused = PutResult(PutStatus.MESSAGE_ILLEGAL, -1, -1, -1, 1)
    monkeypatch.setattr(store, "put", lambda batches, *_, **__: [refused] * len(batches))
    state.save()
    written = state.write()
    assert re.search(r"MESSAGE_ILLEGAL.*65536 \(storage.mapped_file_size", str(written.error))
    assert len(written.waiters) == 1
    assert table.changed, "it is tried again"


def test_damage_is_reported_between_the_records_before_and_behind_it(store):
    table = OneTable(OwnersRecord("before"))
    state = logged(store, table)
    for group in ("before", "damaged", "behind"):
        table.record, table.changed = OwnersRecord(group), {"": None}
        state.write()
    store.bad = {1}
    table = OneTable()
    logged(store, table, on_damaged=lambda: table.applied.append("damage")).load()
    assert table.applied == [OwnersRecord("before"), "damage", OwnersRecord("behind")]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "cannot be read"),
        (b"\xc1", "cannot be read"),
        (msgspec.msgpack.encode([7, 0, []]), "has version 7; this broker reads 1 to 6"),
        (msgspec.msgpack.encode([1, -1, []]), "cannot be read"),
        (msgspec.msgpack.encode([1, 0, [[9, "t"]]]), "cannot be read"),
        (msgspec.msgpack.encode([1, 0, [[3, "g", "t", {0: -1}]]]), "cannot be read"),
        (b"\x91" * 5_000, "cannot be read"),
    ],
)
def test_other_bytes_are_no_records(body, why):
    data = encode_batch(
        [Message(STATE_TOPIC, body)],
        topic=STATE_TOPIC,
        queue_id=0,
        producer_id=1,
        first_sequence=0,
        born_timestamp=0,
    )
    with pytest.raises(CorruptRecord, match=why):
        decode_state(data)


def test_who_waits_for_a_write_that_will_not_be_is_told_why(store):
    told, error = [], NotMaster("another one is")
    tables = begin(store)
    tables.state.save(told.append)
    tables.state.abandon(error)
    assert told == [error]
    assert tables.state.write().waiters == []


def test_nothing_is_written_where_nothing_changed(store):
    tables = begin(store)
    assert len(store.bodies()) == 1, "the first of a life"
    tables.state.write()
    assert len(store.bodies()) == 1
    assert not tables.state.is_due


def test_many_changes_share_a_batch_and_one_thing_is_told_of_once(store):
    tables = begin(store)
    for at in range(5):
        store.fill(1_000)
        tables.offsets.commit("g", "t", 0, at)
        tables.offsets.commit("h", "t", 0, at)
    tables.state.write()
    assert store.bodies()[-1].records == [
        OffsetsRecord("g", "t", {0: 4}),
        OffsetsRecord("h", "t", {0: 4}),
    ]


def test_each_segment_gets_a_snapshot_from_which_alone_a_start_is_complete(store):
    tables = begin(store)
    tables.topics.set(TopicConfig("t", 2, 2), 1)
    tables.groups.note_used("g")
    tables.state.write()
    for round_ in range(3):
        store.fill()
        tables.offsets.commit("g", "t", 0, 2 * round_ + 1)
        assert tables.state.is_due
        settle(tables)
        expected = facts(tables)
        at = store.bodies()[-1].snapshot_at
        log_end = store.stats().max_commitlog_offset
        assert store.kept["the broker's state"] // SEGMENT == log_end // SEGMENT
        # Everything before it may be gone.
        store.bad = set(range(at))
        assert facts(begin(store)) == expected
        store.bad.clear()
    assert at > 0


def test_a_snapshot_of_much_is_made_bit_by_bit_beside_changes(store, monkeypatch):
    monkeypatch.setattr(state_log, "SNAPSHOT_SLICE", 10)
    tables = begin(store)
    tables.topics.set(TopicConfig("t", 1, 1), 1)
    for number in range(54):
        tables.topics.set(TopicConfig(f"t{number:02}", 1, 1), 1)
    tables.state.write()
    store.fill()
    begun = len(store.bodies())
    for number in range(4):
        assert tables.state.is_due
        tables.topics.delete(f"t{number:02}", 1)
        tables.topics.delete(f"t{53 - number}", 1)
        tables.topics.set(TopicConfig(f"new{number}", 1, 1), 1)
        tables.state.write()
        assert store.bodies()[-1].snapshot_at == 0, "not whole yet"
        assert facts(begin_quietly(store)) == facts(tables)
    settle(tables)
    assert store.bodies()[-1].snapshot_at == begun
    store.bad = set(range(begun))
    assert facts(begin_quietly(store)) == facts(tables)


def begin_quietly(store):
    """A start that writes nothing."""
    tables = KeptState(CONFIG, ManualClock(), store)
    tables.load()
    return tables


def test_a_crash_in_the_middle_of_a_snapshot_starts_from_the_one_before(store, monkeypatch):
    monkeypatch.setattr(state_log, "SNAPSHOT_SLICE", 10)
    tables = begin(store)
    tables.topics.set(TopicConfig("t", 1, 1), 1)
    for number in range(25):
        tables.topics.set(TopicConfig(f"t{number:02}", 1, 1), 1)
    tables.state.write()
    store.fill()
    tables.state.write()
    again = begin(store)
    assert facts(again) == facts(tables)
    settle(again)
    assert store.bodies()[-1].snapshot_at > 0


def test_a_snapshot_that_is_larger_than_a_segment_is_no_reason_for_the_next_one(store):
    tables = begin(store)
    for number in range(8_000):
        tables.topics.set(TopicConfig(f"t{number:04}", 1, 1), 1)
    tables.state.write()
    store.fill()
    settle(tables, most=20)
    assert store.stats().max_commitlog_offset > 4 * SEGMENT
    again = begin(store)
    assert not again.state.is_due
    store.fill()
    assert again.state.is_due


def test_many_records_without_messages_are_a_reason_for_a_snapshot_too(store, monkeypatch):
    monkeypatch.setattr(state_log, "LEAST_REPLAY_BYTES", 1_000)
    tables = begin(store)
    tables.topics.set(TopicConfig("t", 1, 1), 1)
    for number in range(200):
        store.fill(100)
        tables.offsets.commit("g", "t", 0, number)
        tables.state.write()
    settle(tables)
    assert 100 < store.bodies()[-1].snapshot_at < 200


@pytest.mark.parametrize("bad", range(8))
def test_a_damaged_place_costs_what_stands_there_and_no_more(store, bad, caplog):
    tables = begin(store)  # 0
    tables.topics.set(TopicConfig("t", 2, 2), 1)
    tables.groups.note_used("g")
    tables.state.write()  # 1
    store.fill()
    tables.offsets.commit("g", "t", 0, 1)
    settle(tables)  # 2, a snapshot
    tables.offsets.commit("g", "t", 1, 0)
    tables.state.write()  # 3
    store.fill()
    settle(tables)  # 4, a snapshot
    tables.groups.note_used("h")
    tables.state.write()  # 5
    store.fill(100)
    tables.offsets.commit("g", "t", 0, 2)
    tables.state.write()  # 6
    tables.offsets.commit("h", "t", 0, 2)
    tables.state.write()  # 7
    assert [body.snapshot_at for body in store.bodies()] == [0, 0, 2, 2, 4, 4, 4, 4]
    store.bad = {bad}
    configs, names, offsets = facts(begin_quietly(store))
    assert configs == tables.topics.configs()
    assert names == (["g"] if bad == 5 else ["g", "h"])
    # Never ahead of what was committed: a group may get again what it had, and skips nothing.
    expected = {("g", "t", 0): 1 if bad == 6 else 2, ("g", "t", 1): 0, ("h", "t", 0): 2}
    if bad == 7:
        del expected["h", "t", 0]
    assert offsets == expected
    assert ("damaged" in caplog.text) is (bad >= 4)


def test_with_no_snapshot_left_the_start_ends(store):
    tables = begin(store)
    tables.topics.set(TopicConfig("t", 2, 2), 1)
    tables.state.write()
    store.fill()
    settle(tables)
    store.bad = {0, 2}
    with pytest.raises(CorruptRecord, match="put back a copy of the store"):
        begin(store)


def test_a_retry_of_what_could_not_be_written_waits_a_second(store, monkeypatch):
    clock = ManualClock()
    tables = KeptState(CONFIG, clock, store)
    put = store.put

    def refuse(*arguments, **options):
        raise CorruptRecord("planned")

    monkeypatch.setattr(store, "put", refuse)
    tables.topics.set(TopicConfig("t", 1, 1), 1)
    tables.state.write()
    # What changed waits with the rest; who wants an answer gets it in his turn.
    assert not tables.state.is_urgent
    assert not tables.state.is_due
    tables.state.save()
    assert tables.state.is_urgent
    tables.state.write()
    clock.advance(1_000)
    assert tables.state.is_due
    monkeypatch.setattr(store, "put", put)
    tables.state.write()
    assert tables.state.failure is None
    assert check_stored(store.get(STATE_TOPIC, 0, 0, max_bytes=1).data[0])
