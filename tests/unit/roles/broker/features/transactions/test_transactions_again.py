"""Transactions at a broker that was started again on the same store."""

from __future__ import annotations

from random import Random

import pytest

from mqmesh.message import TRANS_CHECK_MAX_TIME_TOPIC, TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC
from mqmesh.protocol.transactions import Decision, EndOutcome
from mqmesh.roles.broker.features.transactions.transaction_table import (
    Transactions as TransactionTable,
)
from mqmesh.storage.interface import BatchToPut
from mqmesh.units import KIB

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


def test_decisions_and_what_they_commit_and_park_are_in_one_group(make_scene):
    scene = make_scene(transaction_check_max=1)
    scene.join()
    bases = [scene.half(b"a1", b"a2"), scene.half(b"b", queue_id=1)]
    scene.half(b"stuck")
    puts = watched(scene)
    ends = [(bases[0], 0, 0, 1, Decision.COMMIT), (bases[1], 2, 0, 1, Decision.COMMIT)]
    scene.end(*ends, (bases[0], 0, 1, 1, Decision.ROLLBACK))
    ((ops, *commits),) = puts
    assert [one.topic for one in (ops, *commits)] == [TRANS_OP_HALF_TOPIC, "t", "t"]
    assert {one.group for one in (ops, *commits)} == {ops.group} != {0}
    del puts[:]
    scene.tick(6_000)
    scene.tick(30_000)
    parked = [one for one in puts if one[-1].topic == TRANS_CHECK_MAX_TIME_TOPIC]
    assert [[one.group > 0 for one in put] for put in parked] == [[True, True]]


@pytest.mark.parametrize("is_slow_link", [False, True])
def test_decisions_too_large_for_a_group_are_divided(make_scene, is_slow_link):
    scene = make_scene() if is_slow_link else make_scene(segment_bytes=64 * KIB)
    if is_slow_link:
        scene.stage.features.writes.group_bytes = 64 * KIB
    chance = Random(1)
    bases = [scene.half(chance.randbytes(20_000)) for _ in range(5)]
    puts = watched(scene)
    scene.end(*((base, at, 0, 1, Decision.COMMIT) for at, base in enumerate(bases)))
    ((*batches,),) = puts
    groups = [[one.topic for one in batches if one.group == number] for number in (1, 2)]
    assert groups == [[TRANS_OP_HALF_TOPIC, "t", "t", "t"], [TRANS_OP_HALF_TOPIC, "t", "t"]]
    scene.restart(None)
    assert scene.desk.table.pending_count == 0
    assert len(scene.bodies()) == 5


def test_scattered_messages_of_a_batch_are_parked_though_one_group_cannot_have_them(
    make_scene, caplog, monkeypatch
):
    scene = make_scene(segment_bytes=64 * KIB, transaction_check_max=1)
    scene.join()
    bodies = [b"%d" % number for number in range(1_000)]
    base = scene.half(*bodies)
    scene.end(*((base, 0, first, 1, Decision.ROLLBACK) for first in range(0, 1_000, 2)))
    monkeypatch.setattr(
        scene.stage.features.state.admission, "count_refused", lambda count, now_ms: 0
    )
    for ms in (6_000, 30_000):
        scene.tick(ms)
    assert scene.bodies(TRANS_CHECK_MAX_TIME_TOPIC) == bodies[1::2]
    assert (scene.desk.table.pending_count, scene.desk.table.parked_count) == (0, 500)
    assert caplog.text.count("they are parked") == 2, "a line a group"


def watched(scene) -> list[list[BatchToPut]]:
    """Batches of each put from now on."""
    puts = []
    put = scene.stage.store.put
    scene.stage.store.put = lambda batches, *rest, **options: (
        puts.append(list(batches)) or put(batches, *rest, **options)
    )
    return puts
