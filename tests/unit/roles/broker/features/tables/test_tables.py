"""Tables of a broker without a process: puts, comparisons, reads, expiry."""

import pytest
from harness.served import features_on

from mqmesh.batch.record_batch import Attributes
from mqmesh.errors import (
    BrokerNotAvailable,
    CorruptRecord,
    DiskFull,
    InvalidArgument,
    MessageIllegal,
)
from mqmesh.message import Message
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.route import TopicConfig
from mqmesh.roles.broker.features.tables import answer, counts, feature, tables, unsettled
from mqmesh.roles.broker.features.tables.row import MOST_INLINE_BYTES
from mqmesh.security.access_list import AccessList, Namespace, NamespaceQuota
from mqmesh.storage.interface import FlushDiskType
from mqmesh.storage.table_rows import MemoryRows
from mqmesh.units import KIB, MAX_OFFSET

CONFLICT = ResponseCode.REVISION_CONFLICT


def test_the_newest_value_of_a_key_is_read_with_its_revision(scene):
    assert scene.put(("a", b"1"), ("b", b"2")).base_queue_offset == 0
    scene.put(("a", b"3"))
    assert scene.read("a", "b", "c") == [("a", 3, "PUT", b"3"), ("b", 2, "PUT", b"2")]
    assert scene.answer.revision == 3


def test_a_deleted_key_has_no_value_and_is_seen_by_who_asks_for_tombstones(scene):
    scene.put(("a", b"1"), ("b", b"2"))
    scene.put(("a", None))
    assert scene.read("a", "b") == [("b", 2, "PUT", b"2")]
    assert scene.read(deleted=True) == [("a", 3, "DEL", b""), ("b", 2, "PUT", b"2")]
    assert scene.read(newer_than=2, deleted=True) == [("a", 3, "DEL", b"")]


def test_a_write_that_expects_another_revision_is_refused_with_the_newest_one(scene):
    assert scene.put(("a", b"1"), expected=[0]).code == 0
    again = scene.put(("a", b"2"), expected=[0])
    assert (again.code, again.base_queue_offset) == (CONFLICT, 0)
    assert "revision 1, not 0" in again.remark
    assert scene.put(("a", b"2"), expected=[1]).code == 0
    missing = scene.put(("b", b"2"), expected=[1])
    assert (missing.code, missing.base_queue_offset) == (CONFLICT, -1)
    assert scene.values() == {"a": b"2"}
    assert scene.feature.conflicts == 2


def test_a_comparison_that_is_repeated_is_answered_as_stored(scene):
    data = scene.batch(("a", b"1"), expected=[0])
    (first,), (again,) = scene.stage.send(data), scene.stage.send(data)
    assert (again.code, again.base_queue_offset) == (0, first.base_queue_offset)
    scene.put(("a", b"2"), expected=[1])
    assert scene.stage.send(data)[0].code == 0, "also when somebody wrote since"


def test_of_two_writes_of_one_turn_that_expect_the_same_one_is_refused(scene):
    first = scene.stage.begin_send(scene.batch(("a", b"1"), expected=[0]))
    second = scene.stage.begin_send(scene.batch(("a", b"2"), expected=[0]))
    scene.stage.end_tick()
    assert scene.stage.outcomes(first)[0].code == 0
    assert scene.stage.outcomes(second)[0].code == CONFLICT
    assert scene.values() == {"a": b"1"}


def test_a_write_behind_a_put_of_the_broker_is_compared_with_it(scene):
    scene.put(("a", b"1"))
    scene.stage.features.writes.put_encoded([scene.batch(("a", b"2"))], [].append)
    assert scene.put(("a", b"3"), expected=[1]).code == CONFLICT
    assert scene.values() == {"a": b"2"}


def test_a_write_of_another_table_does_not_hide_what_its_request_has_in_front(scene):
    scene.make("other")
    writing = scene.batch(("x", b"1"), topic="other")
    scene.stage.begin_send(writing)
    first = scene.stage.begin_send(
        scene.batch(("a", b"1")), scene.batch(("x", b"2"), topic="other", expected=[1])
    )
    late = scene.stage.begin_send(scene.batch(("a", b"2"), expected=[0]))
    scene.stage.end_tick()
    assert [one.code for one in scene.stage.outcomes(first)] == [0, 0]
    assert scene.stage.outcomes(late)[0].code == CONFLICT
    assert scene.values() == {"a": b"1"}


def test_a_write_behind_a_plain_put_of_its_request_has_to_come_again(scene):
    _, second = scene.stage.send(scene.batch(("a", b"1")), scene.batch(("a", b"2"), expected=[0]))
    assert second.code == ResponseCode.SERVICE_NOT_AVAILABLE


def test_a_key_that_was_deleted_can_be_created_again(scene):
    scene.put(("a", b"1"))
    scene.put(("a", None), expected=[1])
    assert scene.put(("a", b"2"), expected=[0]).code == 0
    assert scene.put(("a", b"3"), expected=[1]).code == CONFLICT
    assert scene.values() == {"a": b"2"}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("kv", b"1"), "one key"),
        (Message("kv", b"1", keys=["a", "b"]), "one key"),
        (Message("kv", b"1", keys=["é" * 128]), "1 to 255 bytes"),
        (Message("kv", b"1", keys=["a"], properties={"KV_OPERATION": "ADD"}), "is none of PUT"),
    ],
)
def test_what_is_no_message_of_a_table_is_refused(scene, message, reason):
    (outcome,) = scene.stage.send(scene.stage.batch("kv", messages=[message]))
    assert outcome.code == ResponseCode.MESSAGE_ILLEGAL
    assert reason in outcome.remark


def test_a_table_takes_no_delayed_messages(scene):
    data = scene.stage.batch(
        "kv", messages=[Message("kv", b"1", keys=["a"])], attributes=Attributes.HAS_DELAY
    )
    assert scene.stage.send(data)[0].code != 0


def test_revisions_are_not_compared_in_a_topic_that_is_no_table(scene):
    outcome = scene.put(("a", b"1"), topic="t", expected=[0])
    assert outcome.code == ResponseCode.MESSAGE_ILLEGAL
    assert "no table" in outcome.remark


def test_keys_with_a_prefix_come_in_order_a_page_at_a_time(scene):
    scene.put(*[(f"x/{number:02}", b"v") for number in range(25)], ("w", b"-"), ("y", b"-"))
    found, after, more = [], "", True
    while more:
        found += [key for key, *_ in scene.read(prefix="x/", after=after, limit=10)]
        after, more = scene.answer.after, scene.answer.more
    assert found == [f"x/{number:02}" for number in range(25)]


def test_values_of_an_answer_have_a_limit_and_the_rest_is_asked_for(scene):
    scene.put(("a", bytes(900)), ("b", bytes(900)), ("c", b"-"))
    assert [key for key, *_ in scene.read("a", "b", "c", max_bytes=1_024)] == ["a"]
    assert (scene.answer.after, scene.answer.more) == ("a", True)


def test_history_has_the_revisions_that_are_kept_with_their_values(make_stage, make_scene):
    scene = make_scene(make_stage(), history=3)
    for value in (b"1", b"2" * (MOST_INLINE_BYTES + 1), None, b"4"):
        scene.put(("a", value))
    assert scene.read("a", history=True) == [
        ("a", 2, "PUT", b"2" * (MOST_INLINE_BYTES + 1)),
        ("a", 3, "DEL", b""),
        ("a", 4, "PUT", b"4"),
    ]


def test_a_history_comes_in_parts_of_a_limited_size(make_stage, make_scene):
    scene = make_scene(make_stage(), history=5)
    for _ in range(5):
        scene.put(("a", bytes(600)))
    found, newer_than, more = [], 0, True
    while more:
        some = scene.read("a", history=True, newer_than=newer_than, max_bytes=1_300)
        assert len(some) <= 2
        found += [revision for _, revision, *_ in some]
        newer_than, more = found[-1], scene.answer.more
    assert found == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("keys", [(), ("a", "b")])
def test_a_history_is_of_one_key(scene, keys):
    with pytest.raises(MessageIllegal, match="of one key"):
        scene.read(*keys, history=True)


def test_what_a_read_takes_of_the_log_has_a_limit(scene, monkeypatch):
    monkeypatch.setattr(answer, "_MOST_READ_BYTES", 1)
    scene.put(("a", bytes(5_000)))
    scene.put(("b", bytes(5_000)))
    assert [key for key, *_ in scene.read("a", "b")] == ["a"]
    assert (scene.answer.after, scene.answer.more) == ("a", True)
    assert [key for key, *_ in scene.read("b")] == ["b"]


def test_a_value_expires_and_its_tombstone_goes_later(scene):
    scene.put(("a", b"1"), ttl_ms=5_000)
    scene.put(("b", b"2"))
    scene.pass_ms(4_999)
    assert scene.values() == {"a": b"1", "b": b"2"}
    scene.stage.clock.advance(1)
    assert scene.values() == {"b": b"2"}, "at once, before the tombstone is written"
    scene.pass_ms(0)
    assert scene.read("a", deleted=True) == [("a", 3, "EXPIRE", b"")]
    scene.pass_ms(scene.stage.config.table_tombstone_ms)
    assert scene.read("a", deleted=True) == []
    assert scene.tables.counts.live_bytes == 2


def test_a_damaged_row_does_not_end_expiry(scene, monkeypatch):
    scene.put(("a", b"1"), ttl_ms=1_000)
    scene.put(("b", b"2"))
    scene.read()

    def fail(*arguments):
        monkeypatch.undo()
        raise CorruptRecord("planned")

    monkeypatch.setattr(MemoryRows, "get_many", fail)
    scene.pass_ms(1_000)
    scene.feature.tick(0)
    scene.pass_ms(0)
    assert scene.read(deleted=True) == [("a", 3, "EXPIRE", b""), ("b", 2, "PUT", b"2")]


def test_a_read_that_finds_damage_does_not_answer_of_rows_that_are_gone(scene, monkeypatch):
    scene.put(("a", b"1"))

    def fail(*arguments):
        monkeypatch.undo()
        raise CorruptRecord("planned")

    monkeypatch.setattr(MemoryRows, "get_many", fail)
    with pytest.raises(BrokerNotAvailable, match="made again"):
        scene.read("a")
    scene.feature.tick(0)
    assert scene.values() == {"a": b"1"}


def test_damaged_rows_that_cannot_be_forgotten_are_forgotten_later(kept, monkeypatch):
    kept.put(("a", b"1"))
    kept.read()

    def fail(*arguments):
        raise DiskFull("planned")

    with monkeypatch.context() as full:
        full.setattr(MemoryRows, "reset", fail)
        kept.tables.begin_anew("planned")
        kept.feature.tick(0)
        assert not kept.tables.is_whole
        assert kept.tables.lowest() == 0, "all rows will be made from the log"
    kept.feature.tick(0)
    assert kept.tables.is_whole
    assert kept.tables.generation > 1
    assert kept.values() == {"a": b"1"}


def test_a_start_that_could_not_forget_rows_does_not_take_them_over_later(kept, monkeypatch):
    kept.make("other")
    kept.put(("a", b"1"))
    kept.put(("b", b"2"), topic="other")
    kept.read()
    queue_bounds = kept.stage.store.queue_bounds

    def shorter(topic, queue_id):
        return (0, 0) if topic == "other" else queue_bounds(topic, queue_id)

    def fail(rows):
        rows.write([], [key for key, _ in rows.range(b"", b"\xff", most=1_000)])
        raise DiskFull("planned: the file was removed, and not made again")

    kept.stage.restart()
    with monkeypatch.context() as planned:
        planned.setattr(kept.stage.store, "queue_bounds", shorter)
        planned.setattr(MemoryRows, "reset", fail)
        kept.stage.features.load()
    with pytest.raises(BrokerNotAvailable, match="being made again"):
        kept.read()
    kept.feature.tick(0)
    assert kept.values() == {"a": b"1"}


def test_a_follower_keeps_the_log_that_its_rows_could_not_get(kept, monkeypatch):
    stage = kept.stage
    features = features_on(
        stage.store, stage.config, stage.clock, is_kept=True, is_follower=True, rows=MemoryRows()
    )
    features.load()
    followed = features.state.tables

    def follow():
        features.core.state.follow()
        followed.follow(stage.store.stats().max_commitlog_offset)

    kept.put(("a", b"1"))
    kept.put(("a", None))
    follow()
    assert followed.is_whole
    (table,) = followed
    place = table.mark[0]

    def fail(*arguments):
        raise DiskFull("planned")

    monkeypatch.setattr(followed, "released", MAX_OFFSET)  # no row leads into the log
    assert followed.lowest() == MAX_OFFSET
    with monkeypatch.context() as full:
        full.setattr(MemoryRows, "write", fail)
        kept.put(("b", b"2"))
        follow()
    assert followed.lowest() == place
    follow()
    assert followed.lowest() == MAX_OFFSET


def test_a_value_that_was_replaced_does_not_expire(scene):
    scene.put(("a", b"1"), ttl_ms=5_000)
    scene.put(("a", b"2"))
    scene.pass_ms(6_000)
    assert scene.read("a") == [("a", 2, "PUT", b"2")]


def test_what_is_not_confirmed_is_not_read_and_yet_compared(make_stage, make_scene):
    scene = make_scene(make_stage(flush_disk_type=FlushDiskType.SYNC_FLUSH))
    scene.put(("a", b"1"))
    scene.stage.store.synced = scene.stage.store.stats().max_commitlog_offset
    first = scene.stage.begin_send(scene.batch(("a", b"2"), expected=[1]))
    scene.stage.end_tick()
    late = scene.stage.begin_send(scene.batch(("a", b"3"), expected=[1]))
    scene.stage.end_tick()
    assert scene.values() == {"a": b"1"}
    assert not {first, late} & scene.stage.answers.keys(), "both wait for the disk"
    scene.stage.store.synced = None
    scene.stage.features.durable()
    assert scene.stage.outcomes(first)[0].code == 0
    assert scene.stage.outcomes(late)[0].base_queue_offset == 1
    assert scene.values() == {"a": b"2"}


def test_a_restart_makes_the_table_again_from_the_log(make_stage, make_scene):
    scene = make_scene(make_stage(is_kept=True), history=2)
    scene.stage.end_tick()
    for value in (b"1", b"2", b"3"):
        scene.put(("a", value))
    scene.put(("b", b"4"))
    scene.put(("b", None))
    before = scene.read(deleted=True)
    scene.restart()
    assert scene.read(deleted=True) == before
    assert scene.put(("a", b"5"), expected=[3]).code == 0


def test_rows_are_made_only_of_what_the_store_has_verified(make_stage, make_scene, monkeypatch):
    scene = make_scene(make_stage(is_kept=True))
    scene.stage.end_tick()
    scene.put(("a", b"1"))
    get, verified = scene.stage.store.get, []

    def noting(topic, *place, verify=False, **options):
        verified.append((topic, verify))
        return get(topic, *place, verify=verify, **options)

    monkeypatch.setattr(scene.stage.store, "get", noting)
    scene.restart()
    assert [verify for topic, verify in verified if topic == "kv"] == [True]


def test_counts_of_an_empty_table_are_not_believed_when_it_was_filled_since(kept):
    kept.feature.stopping()
    kept.restart()
    kept.put(("a", b"1"))
    kept.read()
    kept.restart()  # without an orderly end
    assert kept.tables.counts.live_bytes == 2
    assert kept.tables.lowest() == 0, "the log is needed from its first segment on"
    assert list(kept.tables.counts.keys.values()) == [1]


def test_the_number_of_a_table_that_is_gone_is_not_given_to_another_one(kept):
    kept.stage.clock.advance(5)
    kept.stage.features.state.topics.delete("kv", 0)
    kept.make("kv")
    kept.stage.end_tick()
    for _ in range(2):
        kept.restart()
        kept.put(("a", b"1"))
        for _ in range(3):
            kept.feature.tick(0)
    assert kept.values() == {"a": b"1"}


def test_rows_are_counted_in_slices_while_the_table_answers(kept, ticking, monkeypatch):
    monkeypatch.setattr(counts, "_SCAN", 2)
    kept.put(*[(f"k{number}", b"1") for number in range(9)])
    kept.read()
    kept.stage.restart()
    kept.stage.features.load()
    ticking(kept, tables.SLICE_MS - 1)
    kept.feature.tick(0)
    assert not kept.tables.is_whole
    assert kept.tables.lowest() == 0
    kept.put(("k0", b"22"), ("k8", b"22"), ("new", b"22"))
    assert len(kept.values()) == 10
    for _ in range(5):
        kept.feature.tick(0)
    assert kept.tables.is_whole
    assert kept.tables.counts.live_bytes == 7 * 3 + 2 * 4 + 5
    assert list(kept.tables.counts.keys.values()) == [10]


@pytest.mark.parametrize("is_repaired", [True, False])
def test_a_table_waits_for_the_repair_of_its_queue_and_passes_over_what_is_lost(
    kept, monkeypatch, is_repaired
):
    kept.put(("a", b"1"))
    kept.put(("b", b"2"))
    store, repairing = kept.stage.store, [True]

    def get(topic, queue_id, queue_offset, **options):
        if topic == "kv" and queue_offset == 0 and (repairing[0] or not is_repaired):
            raise CorruptRecord("planned")
        return type(store).get(store, topic, queue_id, queue_offset, **options)

    monkeypatch.setattr(store, "get", get)
    monkeypatch.setattr(store, "is_repairing", lambda topic, queue_id: repairing[0])
    kept.tables.begin_anew("planned")
    kept.feature.tick(0)
    assert kept.put(("a", b"3"), expected=[1]).code == ResponseCode.SERVICE_NOT_AVAILABLE
    repairing[0] = False
    kept.feature.tick(0)
    assert kept.values() == ({"a": b"1", "b": b"2"} if is_repaired else {"b": b"2"})


def unconfirmed(make_stage, make_scene):
    """A table whose disk takes no more."""
    scene = make_scene(make_stage(flush_disk_type=FlushDiskType.SYNC_FLUSH))
    scene.stage.store.synced = scene.stage.store.stats().max_commitlog_offset
    return scene


def test_the_memory_of_what_is_not_confirmed_has_a_limit(make_stage, make_scene, monkeypatch):
    scene = unconfirmed(make_stage, make_scene)
    monkeypatch.setattr(feature, "MOST_UNSETTLED_BYTES", 1_500)
    for value in (bytes(MOST_INLINE_BYTES + 1), b"1"):
        scene.stage.begin_send(scene.batch(("a", value)))
        scene.stage.end_tick()
    assert scene.tables.unsettled.size_bytes < 1_500, "long values stay in the log alone"
    scene.stage.begin_send(scene.batch(("a", bytes(MOST_INLINE_BYTES))))
    scene.stage.end_tick()
    refused = scene.put(("b", b"2"))
    assert refused.code == ResponseCode.SYSTEM_BUSY
    assert "1500 may" in refused.remark
    scene.stage.store.synced = None
    scene.stage.features.durable()
    scene.tables.settle()
    assert scene.put(("b", b"2")).code == 0
    scene.tables.settle()
    assert scene.tables.unsettled.size_bytes == 0


def test_what_is_confirmed_at_once_is_written_in_slices(
    make_stage, make_scene, ticking, monkeypatch
):
    monkeypatch.setattr(unsettled, "_MOST_WRITTEN", 1)
    scene = unconfirmed(make_stage, make_scene)
    for number in range(4):
        scene.stage.begin_send(scene.batch((f"k{number}", b"1")))
        scene.stage.end_tick()
    scene.stage.store.synced = None
    scene.stage.features.durable()
    ticking(scene, tables.SLICE_MS)
    with pytest.raises(BrokerNotAvailable, match="are being written"):
        scene.read()
    assert scene.tables.unsettled.count == 3
    for _ in range(3):
        scene.tables.settle()
    assert len(scene.values()) == 4


def test_a_value_that_has_expired_is_not_compared_with_but_created_anew(scene):
    scene.put(("a", b"1"), ttl_ms=1_000)
    scene.stage.clock.advance(1_000)
    late = scene.put(("a", b"2"), expected=[1])
    assert (late.code, late.base_queue_offset) == (CONFLICT, 0)
    assert "has expired" in late.remark
    assert scene.put(("a", b"3"), expected=[0]).code == 0
    assert scene.values() == {"a": b"3"}


def test_tables_of_a_namespace_do_not_grow_beyond_its_quota(scene):
    quotas = scene.stage.features.core.quotas
    quotas.put(AccessList(namespace=[Namespace("ns", NamespaceQuota(table_bytes=30))]))
    for name in ("ns%one", "ns%two"):
        scene.make(name)
    assert scene.put(("a", bytes(20)), topic="ns%one").code == 0
    scene.tables.settle()
    data = scene.batch(("b", bytes(8)), topic="ns%two")
    for _ in range(2):
        assert scene.stage.send(data)[0].code == 0, "a repeat takes nothing more"
        scene.tables.settle()
    refused = scene.put(("c", b"1"), topic="ns%two")
    assert refused.code == ResponseCode.SYSTEM_BUSY
    assert "namespace 'ns'" in refused.remark
    assert "30 of 30 table_bytes" in refused.remark
    assert scene.put(("a", bytes(21)), topic="ns%one").code == ResponseCode.SYSTEM_BUSY
    assert scene.put(("a", bytes(20)), topic="ns%one").code == 0
    assert scene.put(("a", None), topic="ns%one").code == 0
    scene.tables.settle()
    assert scene.put(("c", b"1"), topic="ns%two").code == 0
    assert scene.put(("free", bytes(100))).code == 0, "another namespace"


def test_a_topic_never_becomes_a_table_nor_a_table_a_topic(scene):
    topics = scene.stage.features.state.topics
    with pytest.raises(InvalidArgument, match="is a table, and that never changes"):
        topics.update(TopicConfig("kv", 1, 1), 0)
    with pytest.raises(InvalidArgument, match="has 1 queue"):
        topics.update(TopicConfig("other", 4, 4, history=1), 0)
    topics.update(TopicConfig("plain", 1, 1), 0)
    with pytest.raises(InvalidArgument, match="no table, and that never changes"):
        topics.update(TopicConfig("plain", 1, 1, history=1), 0)


def test_a_topic_that_is_no_table_is_not_read_as_one(scene):
    scene.stage.features.state.topics.update(TopicConfig("plain", 1, 1), 0)
    with pytest.raises(MessageIllegal, match="no table"):
        scene.read_of("plain")


def test_a_table_that_was_deleted_leaves_nothing_to_its_successor(scene):
    scene.put(("a", b"1"), ("b", b"2"))
    scene.read()
    scene.stage.clock.advance(5)
    scene.stage.features.state.topics.delete("kv", 0)
    scene.make("kv")
    assert scene.values() == {}
    scene.put(("a", b"3"))
    assert scene.read() == [("a", 1, "PUT", b"3")]
    for _ in range(3):
        scene.feature.tick(0)
    assert scene.tables.counts.live_bytes == 2


def test_many_values_that_expire_at_once_get_their_tombstones_in_small_segments(
    make_stage, make_scene
):
    scene = make_scene(make_stage(segment_bytes=64 * KIB))
    for start in range(0, 600, 100):
        scene.put(*[(f"k{start + one}", b"v") for one in range(100)], ttl_ms=1_000)
    scene.pass_ms(1_001)
    assert {operation for _, _, operation, _ in scene.read(deleted=True)} == {"EXPIRE"}
