"""PULL_MESSAGE where clients ask for more than a turn, or their own room, has."""

from __future__ import annotations

import pytest

from mqmesh.errors import SystemBusy
from mqmesh.protocol.pulling import MAX_PULL_BYTES, PullStatus
from mqmesh.roles.broker.features.pulling.feature import JUDGED_AS_BYTES
from mqmesh.roles.broker.features.pulling.pull_turns import TURN_BYTES
from mqmesh.units import MIB


class Reads:
    """Counts what is read of a store."""

    def __init__(self, stage, monkeypatch) -> None:
        self.asked: list[int] = []
        self.read_bytes = 0
        get = stage.features.core.store.get

        def counted(*place, max_bytes, **options):
            self.asked.append(max_bytes)
            result = get(*place, max_bytes=max_bytes, **options)
            self.read_bytes += sum(map(len, result.data))
            return result

        monkeypatch.setattr(stage.features.core.store, "get", counted)


@pytest.fixture
def full(stage, monkeypatch):
    """A broker with 10 MiB in queue 0 of topic t."""
    for number in range(20):
        stage.send(stage.batch(bodies=(bytes([number]) * (MIB // 2),)))
    stage.reads = Reads(stage, monkeypatch)
    return stage


def turns_until_answered(stage, opaques) -> int:
    count = 0
    while not all(opaque in stage.answers for opaque in opaques):
        before = stage.reads.read_bytes
        stage.features.pulling.begin_turn()
        assert stage.reads.read_bytes - before <= TURN_BYTES + MIB
        count += 1
    return count


def test_a_turn_reads_a_bounded_number_of_bytes_whoever_asks(full):
    peers = [b"peer%d" % number for number in range(60)]
    begun = [full.begin_pull(max_bytes=MAX_PULL_BYTES, peer=peer) for peer in peers]
    assert full.reads.read_bytes <= TURN_BYTES + MIB
    assert sum(opaque in full.answers for opaque in begun) < 5
    # Whoever sends is served all the while.
    assert full.send(full.batch(bodies=(b"small",)))[0].code == 0
    assert 10 <= turns_until_answered(full, begun) <= 60
    assert {full.pulled(opaque)[0].status for opaque in begun} == {PullStatus.FOUND}
    assert not full.features.pulling.begin_turn()


def test_a_client_that_goes_on_from_what_it_gets_misses_nothing(full):
    offset, bodies = 0, []
    while len(bodies) < 20:
        opaque = full.begin_pull(queue_offset=offset, max_bytes=MAX_PULL_BYTES)
        turns_until_answered(full, [opaque])
        answer, some = full.pulled(opaque)
        offset, bodies = answer.next_queue_offset, bodies + some
    assert [body[0] for body in bodies] == list(range(20))


def test_a_pull_that_waited_for_its_turn_then_waits_for_a_message(full):
    full.features.pulling.turns.left = 0
    patient = full.begin_pull(queue_offset=20, suspend_timeout_ms=1_000)
    hasty = full.begin_pull(queue_offset=20)
    assert full.reads.asked == []
    assert not full.features.pulling.begin_turn()
    assert full.pulled(hasty)[0].status == PullStatus.NO_NEW_MSG
    assert patient not in full.answers
    full.send(full.batch(bodies=(b"new",)))
    assert full.pulled(patient)[1] == [b"new"]


def test_one_message_does_not_wake_more_than_a_turn_has(full):
    waiting = [
        full.begin_pull(queue_offset=20, suspend_timeout_ms=1_000, peer=b"peer%d" % number)
        for number in range(30)
    ]
    full.reads.read_bytes = 0
    full.send(full.batch(bodies=(bytes(MIB),)))
    # The end of that turn, and the one after it.
    assert full.reads.read_bytes <= 2 * (TURN_BYTES + MIB + 4_096)
    assert turns_until_answered(full, waiting) >= 4
    assert all(full.pulled(opaque)[1] == [bytes(MIB)] for opaque in waiting)


def test_no_more_is_read_than_the_client_has_room_for(full):
    full.peer(b"peer").room = lambda: MIB
    answer, bodies = full.pull(max_bytes=MAX_PULL_BYTES)
    assert full.reads.asked == [MIB]
    assert (len(bodies), answer.next_queue_offset) == (1, 1)


def no_room() -> int:
    raise SystemBusy("planned: no room")


def test_without_room_nothing_is_read(full):
    full.peer(b"peer").room = no_room
    with pytest.raises(SystemBusy, match="planned"):
        full.pull(max_bytes=MAX_PULL_BYTES)
    full.features.pulling.turns.left = 0
    later = full.begin_pull(max_bytes=MAX_PULL_BYTES)
    full.features.pulling.begin_turn()
    with pytest.raises(SystemBusy, match="planned"):
        full.answer(later)
    assert full.reads.asked == []


def test_messages_that_are_judged_in_vain_use_up_a_turn_too(stage, monkeypatch):
    count = 1_000
    for _ in range(5):
        assert stage.send(stage.batch(bodies=(b"x",) * count, tag="B"))[0].code == 0
    stage.reads = Reads(stage, monkeypatch)
    begun = [
        stage.begin_pull(expression="A", peer=b"peer%d" % number, max_bytes=MAX_PULL_BYTES)
        for number in range(30)
    ]
    at_once = TURN_BYTES // (JUDGED_AS_BYTES * 5 * count) + 1
    assert len(stage.reads.asked) == at_once < 30
    turns_until_answered(stage, begun)
    assert {stage.pulled(opaque)[0].status for opaque in begun} == {PullStatus.NO_MATCHED_MSG}
