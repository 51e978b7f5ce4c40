"""Delivery windows of all groups: what the log gets of them, and what a start makes of that."""

from random import Random

import pytest

from mqmesh.roles.broker.delivery_state.runs import Run, RunState
from mqmesh.roles.broker.delivery_state.window import DeliveryWindow, LeaseNumbers
from mqmesh.roles.broker.delivery_state.windows import DeliveryWindows
from mqmesh.roles.broker.group_state.committed_offsets import CommittedOffsets
from mqmesh.roles.broker.state_records import DeliveryRecord, in_bodies
from mqmesh.testing.clock import ManualClock

KEY = ("g", "t", 0)
LEASE_MS = 60_000


class Kept:
    """Windows, and the offsets that follow them."""

    def __init__(self, epoch: int = 1) -> None:
        self.offsets = CommittedOffsets(100)
        self.windows = DeliveryWindows(
            LeaseNumbers(epoch << 32, 10_000), self.offsets, lambda: 1_000_000
        )

    def written(self) -> list[DeliveryRecord]:
        """The records of the changes since the last write."""
        found = [one for key in self.windows.changed for one in self.windows.changes_of(key)]
        assert len(in_bodies(found, 1_000_000)) == 1
        self.windows.changed.clear()
        return found

    def apply(self, records) -> None:
        for record in records:
            self.windows.apply(record)
        self.windows.changed.clear()


def open_in(window: DeliveryWindow) -> dict[int, tuple[int, bool]]:
    return {
        run.first + at: (run.attempt, run.state is RunState.LEASED)
        for run in window.runs
        for at in range(run.bits.bit_length())
        if run.bits >> at & 1
    }


def take(window: DeliveryWindow, count: int, member: str = "a"):
    return window.hand_out(window.next_offset + count, (1 << count) - 1, member, 0, LEASE_MS)


def test_the_committed_offset_follows_the_floor_and_is_no_record_of_its_own():
    kept = Kept()
    window = kept.windows.begin(KEY, 5)
    kept.offsets.changed.clear()
    run = take(window, 4)
    assert kept.offsets.query(*KEY) == 5
    window.ack(run.lease, 5, 0b0011)
    assert kept.offsets.query(*KEY) == 7
    assert not kept.offsets.changed


def test_messages_handed_out_and_settled_between_two_writes_cost_a_floor():
    kept = Kept()
    window = kept.windows.begin(KEY, 0)
    kept.written()
    for _ in range(50):
        run = take(window, 10)
        window.ack(run.lease, run.first, (1 << 10) - 1)
    (record,) = kept.written()
    assert (record.floor, record.next_offset, record.runs, record.cleared) == (500, 500, [], [])


def test_a_window_that_was_opened_again_is_written_as_a_whole():
    kept, other = Kept(), Kept(2)
    take(kept.windows.begin(KEY, 0), 5)
    other.apply(kept.written())
    kept.windows.drop(KEY)
    kept.windows.begin(KEY, 100)
    (record,) = kept.written()
    assert not record.adds
    other.apply([record])
    window = other.windows.find(KEY)
    assert window is not None
    assert (window.floor, window.next_offset, window.runs) == (100, 100, [])
    assert window.valid_from == kept.windows.numbers.last + 1
    assert other.windows.numbers.runs == 0


def test_a_window_that_was_dropped_is_gone_everywhere():
    kept, other = Kept(), Kept(2)
    take(kept.windows.begin(KEY, 0), 5)
    take(kept.windows.begin(("g", "u", 1), 0), 5)
    other.apply(kept.written())
    kept.windows.drop_topic("t")
    other.apply(kept.written())
    assert (other.windows.find(KEY), len(other.windows)) == (None, 1)
    kept.windows.drop_group("g")
    other.apply(kept.written())
    assert (len(other.windows), len(kept.windows), other.windows.numbers.runs) == (0, 0, 0)
    assert kept.windows.of_group("g") == {}


def test_a_window_of_many_runs_takes_several_records():
    kept, other = Kept(), Kept(2)
    window = kept.windows.begin(KEY, 0)
    for _ in range(2_500):
        take(window, 1)
    records = list(kept.windows.records_of(KEY))
    assert [record.adds for record in records] == [False, True, True]
    other.apply(records)
    assert len(open_in(other.windows.find(KEY))) == 2_500
    assert open_in(other.windows.find(KEY)) == open_in(window)


def test_changes_that_could_not_be_written_become_the_whole_window():
    kept = Kept()
    window = kept.windows.begin(KEY, 0)
    kept.written()
    for _ in range(1_001):
        take(window, 1)
    (record,) = list(kept.windows.changes_of(KEY))[:1]
    assert not record.adds


def test_what_a_lost_record_handed_out_is_open():
    kept, other = Kept(), Kept(2)
    window = kept.windows.begin(KEY, 0)
    other.apply(kept.written())
    take(window, 5)
    kept.written()  # cannot be read
    late = take(window, 5)
    window.ack(late.lease, 5, 0b00011)
    other.apply(kept.written())
    copy = other.windows.find(KEY)
    known = dict.fromkeys((7, 8, 9), (1, True))
    assert open_in(copy) == dict.fromkeys(range(5), (0, True)) | known
    assert (copy.floor, copy.next_offset) == (0, 10)


def test_a_window_whose_begin_is_lost_is_open_from_its_floor_on():
    kept, other = Kept(), Kept(2)
    take(kept.windows.begin(KEY, 500), 5)
    other.apply(kept.written())
    kept.windows.drop(KEY)
    take(kept.windows.begin(KEY, 100), 5)
    kept.written()  # cannot be read
    take(kept.windows.find(KEY), 5)
    other.apply(kept.written())
    assert sorted(open_in(other.windows.find(KEY))) == list(range(100, 110))


def test_a_failed_write_is_no_lost_record():
    kept, other = Kept(), Kept(2)
    window = kept.windows.begin(KEY, 0)
    other.apply(kept.written())
    take(window, 5)
    list(kept.windows.changes_of(KEY))  # fails to be put
    take(window, 5)
    (record,) = kept.written()
    assert (record.previous_offset, record.next_offset) == (0, 10)


def test_a_start_ends_windows_at_the_end_of_the_log():
    kept, other = Kept(), Kept(2)
    take(kept.windows.begin(KEY, 0), 5)
    other.apply(kept.written())
    assert other.windows.resume(lambda topic, queue_id: 3, 0, 1_000_000, 3_000) == 1
    assert other.windows.find(KEY).next_offset == 3
    assert other.offsets.query(*KEY) == 0


def test_a_snapshot_before_the_start_knows_when_what_waits_is_due():
    kept, other, late = Kept(), Kept(2), Kept(3)
    window = kept.windows.begin(KEY, 0)
    run = take(window, 3)
    window.nack(run.lease, 0, 0b001, due_ms=5_000)
    window.nack(run.lease, 0, 0b010)
    records = kept.written()
    for copy in (other, late):
        copy.apply(records)
        records = list(copy.windows.records_of(KEY))
    assert [one.due_ms for record in records for one in record.runs] == [1_005_000, 1, 0]
    late.windows.resume(lambda topic, queue_id: 3, 1_000, 1_001_000, 3_000)
    (record,) = late.windows.records_of(KEY)
    assert [one.due_ms for one in record.runs] == [1_005_000, 1, 0]


def test_messages_far_apart_are_written_one_by_one_and_others_between_them_stay():
    kept, other = Kept(), Kept(2)
    window = kept.windows.begin(KEY, 0)
    window.is_strict = True
    window.begin_order([])
    window.admit(100, [(at, str(at % 50)) for at in range(100)])
    other.apply(kept.written())
    leases = []
    for _ in range(25):
        found: dict[Run, int] = {}
        window.take_free(2, found)
        leases += [window.hand_out_again(*one, "a", 0, LEASE_MS) for one in found.items()]
    other.apply(kept.written())
    assert open_in(other.windows.find(KEY)) == open_in(window)
    window.ack(leases[3].lease, leases[3].first, leases[3].bits)
    window.nack(leases[4].lease, leases[4].first, 1)
    (record,) = kept.written()
    assert sum(end - first for first, end in record.cleared) == 3
    assert len(record.runs) == 1
    other.apply([record])
    assert open_in(other.windows.find(KEY)) == open_in(window)


@pytest.mark.parametrize("seed", range(30))
def test_whoever_applies_the_records_has_the_same_windows(seed):
    random, clock = Random(seed), ManualClock()
    kept, other = Kept(), Kept(2)
    window = kept.windows.begin(KEY, 0)
    leases: list[tuple[int, int, int]] = []
    records: list[DeliveryRecord] = []
    for _ in range(200):
        clock.advance(random.randrange(3_000))
        window.tick(clock.monotonic_ms())
        kind = random.random()
        if kind < 0.35:
            span = random.randrange(1, 40)
            bits = random.choice(((1 << span) - 1, random.randrange(1, 1 << span)))
            run = window.hand_out(
                window.next_offset + span, bits, "a", clock.monotonic_ms(), 20_000
            )
            leases.append((run.lease, run.first, run.bits))
        elif kind < 0.5 and (run := window.due()) is not None:
            run = window.hand_out_again(
                run,
                run.bits & -run.bits if random.random() < 0.5 else run.bits,
                "b",
                clock.monotonic_ms(),
                20_000,
            )
            leases.append((run.lease, run.first, run.bits))
        elif leases:
            lease, first, bits = random.choice(leases)
            some = bits & random.getrandbits(40) or bits
            if kind < 0.8:
                window.ack(lease, first, some)
            elif kind < 0.95:
                window.nack(lease, first, some, due_ms=random.choice((0, clock.monotonic_ms())))
            else:
                window.extend(lease, first, some, "a", clock.monotonic_ms(), 20_000)
        if random.random() < 0.3:
            new = kept.written()
            if random.random() < 0.1:
                new = list(kept.windows.records_of(KEY))  # a snapshot
            records += new
            other.apply(new)
            if random.random() < 0.2:
                other.apply(new)  # it may be read twice
            copy = other.windows.find(KEY)
            assert open_in(copy) == open_in(window)
            assert (copy.floor, copy.next_offset) == (window.floor, window.next_offset)
            assert other.offsets.query(*KEY) == window.floor
    late = Kept(3)
    late.apply(records)
    assert open_in(late.windows.find(KEY)) == open_in(other.windows.find(KEY))
    assert late.windows.numbers.runs == len(late.windows.find(KEY).runs)
