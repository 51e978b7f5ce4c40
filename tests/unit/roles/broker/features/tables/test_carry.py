"""What a table keeps is written once more before its segment of the log goes."""

import pytest

from mqmesh.errors import CorruptRecord, DiskFull
from mqmesh.message import CARRIED_TOPIC
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replication import AckReplication
from mqmesh.roles.broker.features.tables.changes import read_carried
from mqmesh.roles.broker.features.tables.row import MOST_INLINE_BYTES
from mqmesh.roles.broker.features.tables.tables import HOLDER
from mqmesh.storage.interface import FlushDiskType
from mqmesh.storage.table_rows import MemoryRows
from mqmesh.units import KIB, MAX_OFFSET, CommitLogOffset


@pytest.fixture
def scene(make_stage, make_scene):
    scene = make_scene(make_stage(is_kept=True, segment_bytes=64 * KIB), history=2)
    scene.stage.end_tick()
    return scene


def fill(scene, count):
    """Writes messages that nobody keeps, and returns where the log ends."""
    for _ in range(count):
        scene.put(("filler", bytes(8_000)))
    return scene.stage.store.stats().max_commitlog_offset


def wish(scene, offset):
    """Retention would remove everything before an offset."""
    offset -= offset % (64 * KIB)
    scene.stage.store.retention_wish = lambda: CommitLogOffset(offset)
    return offset


def histories(scene):
    return [scene.read(key, history=True) for key in ("a", "b", "gone")]


def places(scene):
    table = next(iter(scene.tables))
    rows = scene.tables.rows_behind(table, b"", None, 1_000)
    return {key.decode(): [one.place for one in row.revisions] for key, row in rows}


def test_what_is_kept_stands_behind_what_may_go_and_is_read_as_before(scene):
    long = b"l" * (MOST_INLINE_BYTES + 1)
    scene.put(("a", b"1"), ("b", long))
    scene.put(("a", b"2"))
    scene.put(("gone", b"3"))
    scene.put(("gone", None))
    end = wish(scene, fill(scene, 30))
    before = histories(scene)
    assert scene.tables.lowest() == 0
    scene.feature.tick(0)
    assert scene.tables.lowest() >= end
    found = places(scene)
    assert all(place >= end for key in found for place in found[key])
    assert histories(scene) == before
    scene.restart()
    assert histories(scene) == before


def test_of_each_key_newer_revisions_stand_behind_older_ones(scene):
    scene.put(("a", b"1"))
    wish(scene, fill(scene, 10))
    scene.feature.tick(0)
    scene.put(("a", b"2"))
    wish(scene, fill(scene, 30))
    scene.feature.tick(0)
    newer, older = places(scene)["a"]
    assert newer >= older


def test_a_row_is_carried_once_for_each_turn_of_the_log(scene):
    scene.put(*[(f"k{number}", bytes(100)) for number in range(100)])
    end = wish(scene, fill(scene, 20))
    for _ in range(5):
        scene.feature.tick(0)
    carried = scene.feature.carry.carried_bytes
    live = scene.tables.counts.live_bytes - 2 * (8_000 + len("filler"))
    assert live < carried < 1.7 * live
    assert scene.tables.released == end


def test_a_key_that_somebody_writes_just_now_is_left_for_later(make_stage, make_scene):
    flush = FlushDiskType.SYNC_FLUSH
    stage = make_stage(is_kept=True, segment_bytes=64 * KIB, flush_disk_type=flush)
    scene = make_scene(stage)
    stage.end_tick()
    scene.put(("a", b"1"))
    end = wish(scene, fill(scene, 20))
    stage.store.synced = stage.store.stats().max_commitlog_offset
    stage.begin_send(scene.batch(("a", b"2")))
    stage.end_tick()
    scene.feature.tick(0)
    assert scene.tables.lowest() < end
    stage.store.synced = None
    stage.features.durable()
    scene.feature.tick(0)
    scene.feature.tick(0)
    assert scene.tables.lowest() >= end
    assert scene.read("a") == [("a", 22, "PUT", b"2")]


def test_a_deleted_key_does_not_come_back_when_the_table_is_made_again(scene):
    scene.put(("a", b"1"))
    wish(scene, fill(scene, 20))
    scene.feature.tick(0)
    scene.put(("a", None))
    scene.pass_ms(scene.stage.config.table_tombstone_ms + 1)
    assert scene.read("a", deleted=True) == []
    scene.restart()
    scene.pass_ms(0)
    assert scene.read("a", deleted=True) == []


def test_carried_messages_of_a_table_that_was_deleted_are_nobodys(scene):
    scene.put(("a", b"1"))
    wish(scene, fill(scene, 20))
    scene.feature.tick(0)
    assert scene.stage.store.queue_bounds(CARRIED_TOPIC, 0)[1] > 0
    scene.stage.clock.advance(5)
    scene.stage.features.state.topics.delete("kv", scene.stage.clock.wall_ms())
    scene.make("kv", 2)
    scene.stage.end_tick()
    scene.restart()
    assert scene.values() == {}


def test_what_the_log_did_not_take_is_carried_later_and_kept_until_then(scene):
    scene.put(("a", b"1"))
    end = wish(scene, fill(scene, 20))
    scene.stage.store.failure = DiskFull("planned: no room")
    for _ in range(4):
        scene.feature.tick(0)
    assert scene.tables.lowest() == 0
    scene.stage.store.failure = None
    for _ in range(3):
        scene.feature.tick(0)
    assert scene.tables.lowest() >= end
    assert all(place >= end for place in places(scene)["a"])


def test_the_log_is_kept_while_the_rows_cannot_be_opened(make_stage, make_scene, monkeypatch):
    stage, kept = make_stage(), {}
    stage.store.keep_from = kept.__setitem__

    def fail(rows):
        raise DiskFull("planned: no room")

    monkeypatch.setattr(MemoryRows, "begin", fail)
    scene = make_scene(stage)
    scene.feature.tick(0)
    assert kept == {HOLDER: 0}
    stage.features.state.topics.delete("kv", 0)
    scene.feature.tick(0)
    assert kept == {HOLDER: MAX_OFFSET}, "nobody needs it any more"


def test_a_value_that_cannot_be_read_keeps_the_log_until_its_key_is_written(scene, monkeypatch):
    scene.put(("a", bytes(MOST_INLINE_BYTES + 1)), ("b", b"1"))
    end = wish(scene, fill(scene, 20))
    scene.tables.settle()
    before = places(scene)["a"]
    read_at = scene.stage.store.read_at

    def fail(place):
        raise CorruptRecord("planned")

    monkeypatch.setattr(scene.stage.store, "read_at", fail)
    for _ in range(3):
        scene.feature.tick(0)
        scene.stage.clock.advance(10_000)
    assert scene.tables.lowest() == 0
    assert scene.feature.carry.unreadable == 1
    assert places(scene)["a"] == before, "no tombstone stands in its place"
    assert places(scene)["b"] >= [end]
    monkeypatch.setattr(scene.stage.store, "read_at", read_at)
    scene.put(("a", b"2"))
    scene.put(("a", b"3"))
    for _ in range(3):
        scene.feature.tick(0)
    assert scene.tables.lowest() >= end
    assert scene.feature.carry.unreadable == 0


def test_a_pass_begins_again_when_the_rows_are_made_again(scene):
    scene.make("other")
    scene.put(("a", b"1"), topic="other")
    end = wish(scene, fill(scene, 20))
    scene.stage.features.state.topics.delete("kv", 0)
    scene.stage.store.failure = DiskFull("planned: no room")
    scene.feature.tick(0)
    scene.stage.store.failure = None
    scene.tables.begin_anew(CorruptRecord("planned"))
    for _ in range(4):
        scene.feature.tick(0)
    assert scene.tables.lowest() >= end
    assert places(scene)["a"] >= [end]


@pytest.fixture
def puts(scene, monkeypatch):
    """The batches of each put that carried something."""
    found, put = [], scene.stage.store.put

    def noting(batches, now_ms, **options):
        if batches and batches[0].topic == CARRIED_TOPIC:
            found.append(batches)
        return put(batches, now_ms, **options)

    monkeypatch.setattr(scene.stage.store, "put", noting)
    return found


def test_a_step_has_a_limit_of_bytes_and_several_wait_for_the_disk(scene, puts):
    for number in range(40):
        scene.put((f"k{number}", bytes(4_000)))
    end = wish(scene, fill(scene, 10))
    scene.tables.settle()
    scene.stage.store.synced = scene.stage.store.stats().max_commitlog_offset
    scene.stage.features.core.commit_point.high_watermark = lambda: scene.stage.store.synced
    scene.feature.tick(0)
    assert 1 < scene.tables.unsettled.carried_batches <= 8
    del scene.stage.features.core.commit_point.high_watermark
    scene.stage.store.synced = None
    for _ in range(5):
        scene.feature.tick(0)
    assert scene.tables.lowest() >= end
    assert max(sum(len(one.data) for one in batches) for batches in puts) < 24 * KIB


def test_revisions_of_a_key_are_carried_together(scene, puts):
    for value in (bytes(9_000), bytes(9_000)):
        scene.put(("large", value))
    for number in range(20):
        scene.put((f"k{number}", bytes(3_000)))
        scene.put((f"k{number}", None))
    wish(scene, fill(scene, 10))
    scene.feature.tick(0)
    together = {}
    for number, batches in enumerate(puts):
        for at, batch in enumerate(batches):
            for one in read_carried(batch.data, batch.header):
                place = (number, batch.group or -1 - at)
                together.setdefault(one.change.key, set()).add(place)
    assert len(together) >= 21
    assert all(len(found) == 1 for found in together.values())


def test_a_step_has_a_limit_of_time(scene, puts, ticking):
    scene.put(*[(f"k{number}", b"1") for number in range(50)])
    end = wish(scene, fill(scene, 10))
    scene.tables.settle()
    ticking(scene, 6)
    scene.feature.tick(0)
    assert 1 <= scene.feature.carry.carried_values < 50
    for _ in range(100):
        scene.feature.tick(0)
    assert scene.tables.lowest() >= end


def test_what_is_long_is_carried_compressed(scene):
    scene.put(("a", bytes(20_000)))
    wish(scene, fill(scene, 20))
    before = scene.read("a")
    scene.feature.tick(0)
    assert 0 < scene.feature.carry.carried_bytes < 1_000
    assert scene.read("a") == before


def test_the_log_is_carried_that_a_replica_has_no_room_for(scene):
    scene.put(("a", b"1"))
    end = fill(scene, 20)
    followers = scene.stage.features.replication.followers
    replica = scene.stage.peer(b"replica")
    followers.open(replica, 1, log_end=end, offset=end, now_ms=0)
    scene.feature.tick(0)
    assert scene.tables.lowest() == 0
    ack = AckReplication(end, 0, wish=64 * KIB)
    scene.stage.begin(RequestCode.ACK_REPLICATION, ack, peer=b"replica", oneway=True)
    scene.feature.tick(0)
    assert scene.tables.lowest() >= 64 * KIB
    assert places(scene)["a"] >= [end]
    followers.forget(replica)
    assert followers.wish == 0
