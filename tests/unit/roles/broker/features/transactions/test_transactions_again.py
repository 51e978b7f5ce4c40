"""Transactions at a broker that was started again on the same store."""

from __future__ import annotations

import pytest

from mqmesh.errors import BrokerNotAvailable
from mqmesh.message import TRANS_CHECK_MAX_TIME_TOPIC, TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC
from mqmesh.protocol.transactions import Decision, EndOutcome
from mqmesh.roles.broker.features.transactions.transaction_table import (
    Transactions as TransactionTable,
)
from mqmesh.storage.interface import FlushDiskType

# ---- Started again -----------------------------------------------------------------------------


def decide_some(scene) -> tuple[int, int]:
    """Half messages in all states."""
    first, second = scene.half(b"a", b"b", b"c", b"d"), scene.half(b"e")
    scene.end((first, 0, 0, 1, Decision.COMMIT), (first, 0, 1, 1, Decision.ROLLBACK))
    return first, second


@pytest.mark.parametrize("noted", ["nothing", "before", "after"])
def test_a_start_finds_what_waits(scene, noted):
    document = None
    if noted == "before":
        scene.half(b"z", sequence=1_000)
        document = scene.desk.dump()
        scene.sequence = 0
        scene.end((0, 1_000, 0, 1, Decision.ROLLBACK))
    first, second = decide_some(scene)
    if noted == "after":
        document = scene.desk.dump()
    scene.restart(document)
    table = scene.desk.table
    assert [batch.base for batch in table.batches.values()] == [first, second]
    assert table.pending_count == 3
    outcomes = scene.end((first, 0, 0, 4, Decision.COMMIT), (second, 4, 0, 1, Decision.COMMIT))
    assert outcomes == [EndOutcome.DECIDED_OTHERWISE, EndOutcome.ENDED]
    assert scene.bodies() == [b"a", b"c", b"d", b"e"]


def test_a_note_makes_a_start_read_little(scene):
    for number in range(20):
        base = scene.half(b"x")
        if number != 7:
            scene.end((base, number, 0, 1, Decision.COMMIT))
    document = scene.desk.dump()
    reads = []
    get = scene.stage.store.get
    scene.stage.store.get = lambda topic, *rest, **options: (
        reads.append(topic) or get(topic, *rest, **options)
    )
    scene.restart(document)
    assert scene.desk.table.pending_count == 1
    assert reads.count(TRANS_HALF_TOPIC) <= 4
    assert reads.count(TRANS_OP_HALF_TOPIC) <= 4


def test_with_too_much_to_note_the_topics_are_read_from_the_oldest_on(scene, monkeypatch):
    monkeypatch.setattr("mqmesh.roles.broker.features.transactions.half_checkpoint.MAX_NOTED", 1)
    scene.end((scene.half(b"gone"), 0, 0, 1, Decision.COMMIT))
    scene.half(b"a")
    scene.half(b"b")
    scene.restart(scene.desk.dump())
    assert scene.desk.table.pending_count == 2


def test_a_start_without_a_note_holds_no_more_than_waited_at_a_time(scene, monkeypatch):
    for number in range(50):
        base = scene.half(b"x")
        scene.end((base, number, 0, 1, Decision.COMMIT))
    most = []
    take = TransactionTable.on_half
    monkeypatch.setattr(
        TransactionTable,
        "on_half",
        lambda table, *facts: take(table, *facts) or most.append(table.pending_count),
    )
    scene.restart()
    assert len(most) == 50
    assert max(most) == 1


@pytest.mark.parametrize("document", [b"", b"{", b'{"version":99}', b"null"])
def test_a_note_that_cannot_be_read_costs_only_time(scene, document):
    scene.half(b"a")
    scene.restart(document)
    assert scene.desk.table.pending_count == 1


def test_a_note_that_knows_more_than_the_log_is_not_believed(scene, make_scene, caplog):
    scene.half(b"a")
    other = make_scene()
    for body in (b"1", b"2", b"3"):
        other.half(body)
    assert other.stage.store.stats().store_id == scene.stage.store.stats().store_id
    scene.restart(other.desk.dump())
    assert scene.desk.table.pending_count == 1
    assert "does not fit the log" in caplog.text


def test_a_note_of_what_another_master_cut_is_not_believed(scene, make_scene, caplog):
    """By its end the log may be as long again, with others' records."""
    former = make_scene()
    first = former.half(b"x")
    former.end((first, 0, 0, 1, Decision.COMMIT))
    scene.half(b"waits")
    second = scene.half(b"y")
    scene.end((second, 1, 0, 1, Decision.ROLLBACK))
    known = []
    scene.stage.store.cut_offset = lambda topic, queue_id, epoch: known.append(epoch) or 0
    scene.restart(former.desk.dump())
    assert scene.desk.table.pending_count == 1
    assert "does not fit the log" in caplog.text
    assert set(known) == {former.stage.store.epoch()}


def test_how_often_was_asked_survives_a_start(make_scene):
    scene = make_scene(transaction_check_max=3)
    scene.join()
    scene.half(b"stuck")
    scene.tick(6_000)
    scene.tick(30_000)
    scene.asked()
    for document in (None, scene.desk.dump()):
        scene.restart(document)
        scene.stage.features.state.groups.tick(scene.stage.clock.monotonic_ms())
        scene.tick(100)
        assert scene.asked() == [], "not at once: it was asked a moment ago"
    scene.tick(30_000)
    ((question, _),) = scene.asked()
    assert question.check_times == 3


def test_parked_messages_stay_parked_after_a_start(make_scene):
    scene = make_scene(transaction_check_max=1)
    scene.join()
    scene.half(b"stuck")
    scene.tick(6_000)
    scene.tick(30_000)
    for document in (None, scene.desk.dump()):
        scene.restart(document)
        assert (scene.desk.table.pending_count, scene.desk.table.parked_count) == (0, 1)
    assert scene.bodies(TRANS_CHECK_MAX_TIME_TOPIC) == [b"stuck"]


def torn_write(scene, *, keep: int, ends) -> None:
    """Writes decisions as a crash leaves them: only the first batches of the write."""
    scene.begin_end(*ends)
    scene.stage.features.transactions.finish()
    put = scene.stage.store.put
    scene.stage.store.put = lambda batches, now: put(batches[:keep], now)
    with pytest.raises(IndexError):
        scene.stage.features.writes.write()
    del scene.stage.store.put


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("with_note", [False, True])
def test_commits_that_a_crash_cut_off_are_written_again_once(scene, keep, with_note):
    bases = [scene.half(b"a1", b"a2"), scene.half(b"b"), scene.half(b"c", queue_id=1)]
    ends = [
        (bases[0], 0, 0, 1, Decision.COMMIT),
        (bases[1], 2, 0, 1, Decision.COMMIT),
        (bases[2], 3, 0, 1, Decision.COMMIT),
        (bases[0], 0, 1, 1, Decision.ROLLBACK),
    ]
    document = scene.desk.dump() if with_note else None
    torn_write(scene, keep=keep, ends=ends)
    scene.restart(document)
    assert len(scene.desk.torn) == 4 - keep
    with pytest.raises(BrokerNotAvailable):
        scene.end((bases[0], 0, 0, 1, Decision.COMMIT))
    scene.tick()
    assert not scene.desk.torn
    assert sorted(scene.bodies() + scene.bodies("t", 1)) == [b"a1", b"b", b"c"]
    scene.restart(document)
    assert not scene.desk.torn, "they are found"
    assert scene.desk.table.pending_count == 0


def test_with_a_slow_disk_they_are_written_again_once(make_scene):
    scene = make_scene(flush_disk_type=FlushDiskType.SYNC_FLUSH)
    base = scene.half(b"a")
    torn_write(scene, keep=1, ends=[(base, 0, 0, 1, Decision.COMMIT)])
    scene.restart()
    scene.stage.store.synced = 0
    for _ in range(5):
        scene.tick()
    scene.stage.store.synced = None
    scene.stage.features.writes.answer_confirmed()
    scene.tick()
    assert not scene.desk.torn
    assert scene.bodies() == [b"a"]


def test_a_torn_commit_for_a_deleted_topic_is_left(scene):
    base = scene.half(b"a")
    torn_write(scene, keep=1, ends=[(base, 0, 0, 1, Decision.COMMIT)])
    scene.stage.features.state.topics.delete("t", 1)
    scene.restart()
    assert not scene.desk.torn
