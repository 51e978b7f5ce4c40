"""Half messages that wait: decisions, check-backs and limits; the clock is simulated."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqmesh.errors import RemoteProtocolError, SequenceConflict
from mqmesh.protocol.transactions import Decision, End, EndOutcome
from mqmesh.roles.broker.features.transactions import check_timetable
from mqmesh.roles.broker.features.transactions.check_timetable import (
    Check,
    CheckedMessages,
    Park,
    TransactionSettings,
)
from mqmesh.roles.broker.features.transactions.half_batches import HalfBatch
from mqmesh.roles.broker.features.transactions.transaction_table import Transactions

COMMIT, ROLLBACK = int(Decision.COMMIT), int(Decision.ROLLBACK)
S = 1_000


def half(base: int, count: int = 1, *, group: str = "g", size: int = 100) -> HalfBatch:
    return HalfBatch(
        base, count, base * 1_000, base * 1_000 + size, size, 0, 7, base, group, "t", 0
    )


class Desk:
    """A table whose decisions are stored when the test says so."""

    def __init__(self, **settings) -> None:
        self.table = Transactions(TransactionSettings(**settings))
        self.members = {"g": [b"one"]}
        self.now_ms = 0

    def add(self, base: int, count: int = 1, immunities=None, **facts) -> HalfBatch:
        batch = half(base, count, **facts)
        self.table.admit(batch.producer_id, batch.first_sequence, count, batch.producer_crc)
        self.table.staged_halves = 0
        self.table.on_half(batch, 0, self.now_ms, immunities)
        return batch

    def decide(self, base, first, count, decision, *, exists=True, sequence=None) -> EndOutcome:
        end = End(base, 7, base if sequence is None else sequence, first, count, decision)
        return self.table.decide(end, lambda topic, queue_id: exists)

    def write(self) -> list[tuple[int, int, int, int]]:
        runs = self.table.take()
        self.table.stored(runs)
        return [(run.batch.base, run.first, run.count, run.decision) for run in runs]

    def at(self, now_ms: int) -> list[Check | Park]:
        self.now_ms = now_ms
        return self.table.tick(now_ms, lambda group: self.members.get(group, []))

    def checks(self, until_ms: int, step_ms: int = 100) -> list[tuple[int, Check | Park]]:
        found = []
        while self.now_ms < until_ms:
            effects = self.at(self.now_ms + step_ms)
            found += [(self.now_ms, one) for one in effects]
        return found


# ---- Decisions ---------------------------------------------------------------------------


@pytest.mark.parametrize("decision", [COMMIT, ROLLBACK])
def test_a_decision_is_written_once_and_recognised_afterwards(decision):
    desk = Desk()
    desk.add(0, 3)
    assert desk.decide(0, 0, 3, decision) is EndOutcome.ENDED
    assert desk.decide(0, 0, 3, decision) is EndOutcome.AGAIN
    assert desk.write() == [(0, 0, 3, decision)]
    assert desk.decide(0, 0, 3, decision) is EndOutcome.ENDED_BEFORE
    assert desk.decide(0, 0, 3, 3 - decision) is EndOutcome.DECIDED_OTHERWISE
    assert desk.write() == []
    assert desk.table.pending_count == 0
    assert not desk.table.batches


def test_decisions_side_by_side_become_one_run():
    desk = Desk()
    desk.add(0, 10)
    for first in range(5):
        assert desk.decide(0, first, 1, COMMIT) is EndOutcome.ENDED
    desk.decide(0, 5, 2, ROLLBACK)
    desk.decide(0, 7, 3, COMMIT)
    assert desk.write() == [(0, 0, 5, COMMIT), (0, 5, 2, ROLLBACK), (0, 7, 3, COMMIT)]


def test_a_range_that_is_decided_in_part_decides_the_rest():
    desk = Desk()
    desk.add(0, 5)
    desk.decide(0, 2, 1, ROLLBACK)
    desk.write()
    assert desk.decide(0, 0, 5, COMMIT) is EndOutcome.DECIDED_OTHERWISE
    assert desk.write() == [(0, 0, 2, COMMIT), (0, 3, 2, COMMIT)]


def test_what_could_not_be_written_may_be_decided_again_the_other_way():
    desk = Desk()
    batch = desk.add(0, 2)
    desk.decide(0, 0, 2, COMMIT)
    runs = desk.table.take()
    assert desk.table.pending_count == 0
    desk.table.failed(runs)
    assert desk.table.pending_count == 2
    assert batch.open_ordinals(range(2)) == [0, 1]
    assert desk.decide(0, 0, 2, ROLLBACK) is EndOutcome.ENDED


@pytest.mark.parametrize(
    ("base", "sequence", "exists", "outcome"),
    [
        (9, None, True, EndOutcome.NOT_PENDING),
        (0, 99, True, EndOutcome.NOT_PENDING),
        (0, None, False, EndOutcome.TOPIC_GONE),
    ],
)
def test_what_cannot_be_decided_is_refused(base, sequence, exists, outcome):
    desk = Desk()
    desk.add(0)
    assert desk.decide(base, 0, 1, COMMIT, exists=exists, sequence=sequence) is outcome
    assert desk.write() == []


def test_a_rollback_needs_no_topic():
    desk = Desk()
    desk.add(0)
    assert desk.decide(0, 0, 1, ROLLBACK, exists=False) is EndOutcome.ENDED


def test_the_end_of_messages_beyond_the_batch_is_an_error():
    desk = Desk()
    desk.add(0, 2)
    with pytest.raises(RemoteProtocolError, match="a batch of 2"):
        desk.decide(0, 1, 2, COMMIT)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 7), st.integers(1, 8), st.sampled_from([1, 2])),
        max_size=40,
    ),
    st.integers(0, 2**30),
)
def test_however_decisions_come_each_message_ends_once(ends, fates):
    desk = Desk()
    batches = {base: desk.add(base, 8) for base in (0, 8, 16)}
    ended: dict[tuple[int, int], int] = {}
    for number, (which, first, count, decision) in enumerate(ends):
        base = which * 8
        desk.decide(base, first, min(count, 8 - first), decision)
        if fates >> (number % 30) & 1:
            runs = desk.table.take()
            if fates >> ((number + 7) % 30) & 1:
                desk.table.failed(runs)
                continue
            desk.table.stored(runs)
            for run in runs:
                for ordinal in range(run.first, run.first + run.count):
                    assert (run.batch.base, ordinal) not in ended
                    ended[run.batch.base, ordinal] = run.decision
    desk.table.failed(desk.table.take())
    assert desk.table.pending_count == 24 - len(ended)
    assert sum(batch.left for batch in batches.values()) == 24 - len(ended)
    for (base, ordinal), decision in ended.items():
        assert batches[base].states[ordinal] == decision


# ---- The timetable ---------------------------------------------------------------------------


def test_checks_come_after_the_timeout_and_then_at_intervals_and_end_in_parking():
    desk = Desk(check_max=15)
    batch = desk.add(0)
    effects = desk.checks(600 * S)
    checks = [(when, one.check_times) for when, one in effects if isinstance(one, Check)]
    assert checks == [(6 * S + number * 30 * S, number + 1) for number in range(15)]
    parks = [(when, one) for when, one in effects if isinstance(one, Park)]
    assert [(when, one.ordinals, one.check_times) for when, one in parks] == [(456 * S, [0], 15)]
    assert desk.table.parked(batch, [0]) == []
    assert (desk.table.pending_count, desk.table.parked_count) == (0, 1)
    assert desk.checks(1_000 * S) == []


def test_what_was_parked_may_still_be_decided():
    desk = Desk(check_max=1)
    batch = desk.add(0, 2)
    desk.checks(40 * S)
    desk.table.parked(batch, [0, 1])
    assert desk.decide(0, 0, 1, COMMIT) is EndOutcome.ENDED
    assert desk.write() == [(0, 0, 1, COMMIT)]
    assert desk.table.parked_count == 1


def test_parking_that_could_not_be_written_is_tried_again():
    desk = Desk(check_max=1)
    desk.add(0)
    (park,) = [one for _, one in desk.checks(40 * S) if isinstance(one, Park)]
    assert desk.checks(100 * S) == []
    desk.table.parked_or_not(park, stored=False)
    assert [type(one) for _, one in desk.checks(140 * S)] == [Park]


def test_only_what_nobody_has_decided_is_asked_about():
    desk = Desk()
    desk.add(0, 4)
    desk.decide(0, 1, 2, COMMIT)
    desk.write()
    (check,) = desk.at(6 * S)
    assert check.ordinals == [0, 3]
    desk.decide(0, 0, 1, ROLLBACK)
    desk.decide(0, 3, 1, COMMIT)
    desk.write()
    assert desk.checks(100 * S) == []


def test_another_member_is_asked_each_time():
    desk = Desk()
    desk.members["g"] = [b"one", b"two", b"three"]
    desk.add(0)
    assert [one.peer for _, one in desk.checks(100 * S)] == [b"one", b"two", b"three", b"one"]


def test_a_group_without_members_uses_up_no_checks_and_is_asked_as_soon_as_there_is_one():
    desk = Desk(check_max=2)
    desk.members.clear()
    desk.add(0)
    assert desk.checks(1_000 * S) == []
    desk.members["g"] = [b"back"]
    (found,) = desk.checks(1_001 * S)
    assert found[1].check_times == 1


def test_waiting_for_absent_groups_does_not_keep_out_others():
    desk = Desk(pending_max=10)
    desk.members.clear()
    for base in range(8):
        desk.add(base)
    effects = [one for _, one in desk.checks(10 * S)]
    assert len(effects) == 3, "so many that half of the room is free"
    assert all(isinstance(one, Park) for one in effects)
    for park in effects:
        desk.table.parked_or_not(park, stored=True)
    assert desk.table.pending_count == 5


def test_a_flood_of_checks_is_spread():
    desk = Desk()
    for base in range(20):
        desk.add(base, size=1024 * 1024)
    assert len(desk.at(6 * S)) == 4
    assert len(desk.at(6 * S + 100)) == 4


def test_one_message_that_never_ends_is_parked_and_the_others_end():
    desk = Desk()
    for base in range(50):
        desk.add(base)
    for base in range(50):
        if base != 17:
            desk.decide(base, 0, 1, COMMIT)
    desk.write()
    found = desk.checks(500 * S)
    assert {one.batch.base for _, one in found} == {17}
    assert isinstance(found[-1][1], Park)


# ---- Limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "producer_crc"), [(2, 98), (1, 99)])
def test_other_half_messages_under_known_ids_are_refused(count, producer_crc):
    desk = Desk()
    desk.add(5, 2).producer_crc = 99
    with pytest.raises(SequenceConflict, match="0000000000000007 sent half messages from sequence"):
        desk.table.admit(7, 5, count, producer_crc)
    assert desk.table.staged_halves == 0


def test_too_many_parked_ones_go_oldest_first():
    desk = Desk(parked_max=2)
    batches = [desk.add(base) for base in range(3)]
    assert desk.table.parked(batches[0], [0]) == []
    assert desk.table.parked(batches[1], [0]) == []
    assert desk.table.parked(batches[2], [0]) == [batches[0]]
    assert desk.table.parked_count == 2
    assert desk.decide(0, 0, 1, COMMIT) is EndOutcome.NOT_PENDING


def test_what_is_remembered_of_ended_ones_is_bounded(monkeypatch):
    monkeypatch.setattr(
        "mqmesh.roles.broker.features.transactions.transaction_table.ENDED_REMEMBERED", 3
    )
    desk = Desk()
    for base in range(10):
        desk.add(base)
        desk.decide(base, 0, 1, COMMIT)
        desk.write()
    assert desk.decide(0, 0, 1, COMMIT) is EndOutcome.NOT_PENDING
    assert desk.decide(9, 0, 1, COMMIT) is EndOutcome.ENDED_BEFORE
    assert len(desk.table._keys) == 3


def test_what_the_log_lost_while_its_end_was_written_does_no_harm():
    desk = Desk()
    batch = desk.add(0)
    desk.decide(0, 0, 1, COMMIT)
    runs = desk.table.take()
    desk.table.forget(batch)
    desk.table.stored(runs)
    assert desk.table.pending_count == 0


# ---- Again after a start --------------------------------------------------------------------


def test_what_was_found_in_the_log_counts():
    desk = Desk()
    desk.add(0, 4)
    desk.table.replay(0, 0, 2, COMMIT)
    desk.table.replay(0, 0, 2, COMMIT)
    desk.table.replay(99, 0, 2, COMMIT)
    desk.table.timetable.replay({0: [CheckedMessages(2, 2, 14, 50 * S)]})
    assert desk.table.pending_count == 2
    (found,) = desk.checks(60 * S)
    assert (found[0], found[1].check_times, found[1].ordinals) == (50 * S, 15, [2, 3])


def test_the_age_of_what_was_found_counts_and_a_clock_set_back_does_not_make_it_wait_longer():
    desk = Desk()
    desk.table.on_half(half(0), 5 * S, 0)
    desk.table.on_half(half(1), -3_600 * S, 0)
    desk.table.on_half(half(2), 3_600 * S, 0)
    assert [(when, one.batch.base) for when, one in desk.checks(7 * S)] == [
        (100, 2),
        (1 * S, 0),
        (6 * S, 1),
    ]


@pytest.mark.parametrize("lonely", [False, True])
def test_what_has_ended_is_not_watched_for_as_long_as_its_immunity(monkeypatch, lonely):
    monkeypatch.setattr(check_timetable, "UNSWEPT", 100)
    desk = Desk()
    if lonely:
        desk.members.clear()
    waiting = desk.add(0, immunities=[3_600 * S])
    for base in range(1, 2_000):
        desk.add(base, immunities=[0 if lonely else 3_600 * S])
        desk.at(base)
        desk.decide(base, 0, 1, COMMIT)
        desk.write()
    assert len(list(desk.table.timetable.watches())) < 500
    desk.members["g"] = [b"one"]
    (check,) = desk.at(3_600 * S)
    assert isinstance(check, Check)
    assert check.batch is waiting
