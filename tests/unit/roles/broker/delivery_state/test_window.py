"""The delivery window: hand out, settle, expire, come again; and what the log says of it."""

from random import Random

import pytest

from mqmesh.roles.broker.delivery_state.runs import MAX_RUN, NOBODY, Run, RunState, stretches
from mqmesh.roles.broker.delivery_state.window import (
    SLOT_MS,
    DeliveryWindow,
    LeaseNumbers,
    Settled,
)

LEASE_MS = 60_000
LATE = LEASE_MS + 2 * SLOT_MS


def bits_of(*offsets: int, first: int = 0) -> int:
    return sum(1 << (offset - first) for offset in offsets)


def some(count: int) -> int:
    return (1 << count) - 1


def lowest(run: Run, most: int) -> int:
    """The bits of a run's first messages."""
    return sum(1 << (offset - run.first) for offset in offsets_of(run)[:most])


class Driven:
    """A window at 0, and what it said of changes."""

    def __init__(self, start: int = 0, first: int = 1 << 32) -> None:
        self.changes: list[tuple[int, int, int, Run | None]] = []
        self.numbers = LeaseNumbers(first, 1_000)
        self.window = DeliveryWindow(
            start, self.numbers, lambda *change: self.changes.append(change)
        )

    def take(self, count: int, member: str = "a", now_ms: int = 0) -> Run:
        window = self.window
        run = window.hand_out(window.next_offset + count, some(count), member, now_ms, LEASE_MS)
        assert run is not None
        return run

    def again(self, most: int = MAX_RUN, member: str = "b", now_ms: int = 0) -> Run | None:
        run = self.window.due()
        return run and self.window.hand_out_again(run, lowest(run, most), member, now_ms, LEASE_MS)


def test_acknowledged_messages_move_the_floor():
    one = Driven()
    first, second = one.take(10), one.take(5)
    assert (one.window.floor, one.window.next_offset, one.window.unsettled) == (0, 15, 15)
    assert one.window.ack(second.lease, 10, some(5)) is Settled.OK
    assert one.window.floor == 0
    assert one.window.ack(first.lease, 0, some(10)) is Settled.OK
    assert (one.window.floor, one.window.unsettled, one.numbers.runs) == (15, 0, 0)


def test_one_message_in_the_middle_holds_the_floor_and_nobody_else():
    one = Driven()
    run = one.take(8)
    one.window.ack(run.lease, 0, bits_of(0, 1, 2, 4, 5, 6, 7))
    assert one.window.floor == 3
    assert one.take(8).first == 8
    assert one.window.floor == 3


def test_messages_that_are_passed_over_are_settled():
    one = Driven()
    run = one.window.hand_out(10, bits_of(2, 5), "a", 0, LEASE_MS)
    assert (run.count, run.low, one.window.floor) == (2, 2, 2)
    assert one.window.hand_out(20, 0, "a", 0, LEASE_MS) is None
    one.window.ack(run.lease, 2, bits_of(2, 5, first=2))
    assert one.window.floor == 20


def test_a_lease_that_ends_comes_again_with_another_number_and_attempt():
    one = Driven()
    run = one.take(3)
    lease = run.lease
    assert one.window.tick(LEASE_MS) == []
    assert one.again() is None
    assert one.window.tick(LATE) == [run]
    again = one.again(now_ms=LATE)
    assert (again.first, again.count, again.attempt, again.member) == (0, 3, 2, "b")
    assert again.lease > lease
    assert one.again() is None


def test_the_oldest_waiting_messages_come_first():
    one = Driven()
    runs = [one.take(2) for _ in range(3)]
    for run in (runs[2], runs[0], runs[1]):
        one.window.nack(run.lease, run.first, some(2))
    assert [one.again().first for _ in range(3)] == [0, 2, 4]


def test_a_run_that_waits_is_divided_if_it_is_too_long():
    one = Driven()
    run = one.take(10)
    one.window.nack(run.lease, 0, bits_of(1, 3, 5, 7, 9))
    again = one.again(2)
    assert [again.first + at for at in range(10) if again.bits >> at & 1] == [1, 3]
    rest = one.again(100)
    assert [rest.first + at for at in range(10) if rest.bits >> at & 1] == [5, 7, 9]
    assert (again.attempt, rest.attempt, one.window.unsettled) == (2, 2, 10)


def test_a_refused_message_waits_until_it_is_due():
    one = Driven()
    run = one.take(2)
    one.window.nack(run.lease, 0, bits_of(0), due_ms=5_000)
    one.window.tick(4_900)
    assert one.again() is None
    one.window.tick(5_100)
    assert (one.again().low, run.count) == (0, 1)


def test_a_message_that_was_given_back_counts_no_attempt():
    one = Driven()
    run = one.take(1)
    lease = run.lease
    for _ in range(2):
        assert one.window.give_back(lease, 0, 1) is Settled.OK
    assert one.again().attempt == 1
    assert one.window.give_back(lease, 0, 1) is Settled.STALE


@pytest.mark.parametrize("at", [0, 2**40])
def test_messages_that_a_lease_has_not_any_more_are_not_given_back(at):
    one = Driven()
    run = one.take(2)
    one.window.ack(run.lease, 0, bits_of(0))
    assert one.window.give_back(run.lease, at, 1) is Settled.OK
    assert (one.window.floor, one.window.unsettled, one.numbers.runs) == (1, 1, 1)
    assert one.window.due() is None


def test_an_acknowledgement_far_behind_a_lease_is_stale():
    one = Driven()
    run = one.take(2)
    assert one.window.ack(run.lease, 2**62, 1) is Settled.STALE


@pytest.mark.parametrize("settle", ["ack", "nack", "give_back"])
def test_settling_no_message_changes_nothing(settle):
    one = Driven()
    run = one.take(2)
    assert getattr(one.window, settle)(run.lease, 0, 0) is Settled.OK
    assert (one.window.floor, one.window.unsettled, one.numbers.runs) == (0, 2, 1)


def test_late_work_counts_as_long_as_nobody_has_the_message():
    one = Driven()
    run = one.take(2)
    lease = run.lease
    one.window.tick(LATE)
    assert one.window.ack(lease, 0, bits_of(0)) is Settled.OK
    again = one.again()
    assert (again.low, again.count) == (1, 1)
    assert one.window.ack(lease, 1, 1) is Settled.STALE
    assert one.window.ack(again.lease, 1, 1) is Settled.OK
    assert one.window.floor == 2


def test_an_acknowledgement_may_be_repeated():
    one = Driven()
    run = one.take(4)
    lease = run.lease
    assert one.window.ack(lease, 0, some(4)) is Settled.OK
    assert one.window.ack(lease, 0, some(4)) is Settled.BEFORE
    assert one.window.nack(lease, 0, some(4)) is Settled.OK


def test_a_number_that_was_never_given_out_settles_nothing_that_is_held():
    one = Driven()
    one.take(4)
    assert one.window.ack(77 << 32, 0, some(4)) is Settled.STALE
    assert one.window.unsettled == 4


def test_messages_that_were_never_handed_out_cannot_be_settled():
    one = Driven()
    run = one.take(1)
    assert one.window.ack(run.lease, 0, some(2)) is Settled.STALE
    assert one.window.ack(run.lease, 1, 1) is Settled.STALE
    assert one.window.unsettled == 1


def test_leases_of_before_a_reset_are_stale():
    one = Driven()
    run = one.take(1)
    one.window.tick(LATE)
    one.window.valid_from = one.numbers.last + 1
    assert one.window.ack(run.lease or one.numbers.last, 0, 1) is Settled.STALE


def test_an_extended_lease_ends_later():
    one = Driven()
    run = one.take(2)
    assert one.window.extend(run.lease, 0, some(2), "a", 50_000, LEASE_MS) is Settled.OK
    assert one.window.tick(LATE) == []
    assert one.window.tick(50_000 + LATE) == [run]


def test_a_lease_is_never_made_shorter():
    one = Driven()
    run = one.take(1)
    one.window.extend(run.lease, 0, 1, "a", 0, 1_000)
    assert one.window.tick(2_000) == []


def test_a_lease_that_ended_goes_on_if_nobody_else_has_it():
    one = Driven()
    run = one.take(2)
    lease = run.lease
    one.window.tick(LATE)
    assert one.window.extend(lease, 0, some(2), "a", LATE, LEASE_MS) is Settled.OK
    assert one.again() is None
    assert one.window.ack(lease, 0, some(2)) is Settled.OK
    assert one.window.floor == 2


def test_a_lease_goes_on_with_what_nobody_else_has_got():
    one = Driven()
    run = one.take(2)
    lease = run.lease
    one.window.tick(LATE)
    other = one.window.hand_out_again(one.window.due(), 0b01, "b", LATE, LEASE_MS)
    assert one.window.extend(lease, 0, 0b01, "a", LATE, LEASE_MS) is Settled.STALE
    assert one.window.extend(lease, 0, 0b11, "a", LATE, LEASE_MS) is Settled.OK
    assert (one.window.held(lease).low, one.window.held(other.lease).low) == (1, 0)
    assert one.window.extend(lease, 0, 0b01, "a", LATE, LEASE_MS) is Settled.STALE
    assert one.window.extend(lease, 0, 0b10, "a", LATE, LEASE_MS) is Settled.OK
    assert one.window.ack(other.lease, 0, 0b01) is Settled.OK
    assert one.window.extend(lease, 0, 0b01, "a", LATE, LEASE_MS) is Settled.OK, "it is done"


def test_another_member_cannot_extend_a_lease():
    one = Driven()
    run = one.take(2)
    assert one.window.extend(run.lease, 0, some(2), "b", 0, LEASE_MS) is Settled.STALE


def test_what_a_member_holds_can_be_taken_away():
    one = Driven()
    mine, other = one.take(2), one.take(2, "b")
    assert one.window.release("a") == [mine]
    assert one.again(member="c").first == 0
    assert other.state is RunState.LEASED


def test_a_message_that_is_sent_back_is_settled_once_that_is_stored():
    one = Driven()
    run = one.take(3)
    lease = run.lease
    left = one.window.nack(lease, 0, some(3))
    one.window.leave(left)
    assert one.again() is None
    assert one.window.ack(lease, 0, some(3)) is Settled.LEAVING
    assert one.window.floor == 0
    one.window.settle(left)
    assert (one.window.floor, one.numbers.runs) == (3, 0)


def test_a_message_that_could_not_be_sent_back_comes_again():
    one = Driven()
    left = one.window.nack(one.take(1).lease, 0, 1)
    one.window.leave(left)
    one.window.wait(left, 1_000)
    assert one.again() is None
    one.window.tick(1_200)
    assert one.again().attempt == 2


def test_messages_that_are_gone_from_the_log_are_settled():
    one = Driven()
    one.take(4)
    one.take(4)
    one.window.pass_over(6)
    assert (one.window.floor, one.window.unsettled, one.window.next_offset) == (6, 2, 8)
    one.window.pass_over(20)
    assert (one.window.floor, one.window.unsettled, one.window.next_offset) == (20, 0, 20)


def test_the_member_that_holds_most_is_known():
    one = Driven()
    one.take(2), one.take(3, "b"), one.take(2)
    assert one.window.holder_of_most() == ("a", 4)
    assert Driven().window.holder_of_most() == ("", 0)


def test_runs_are_counted_over_all_windows():
    one = Driven()
    run = one.take(4)
    one.window.nack(run.lease, 0, bits_of(1))
    assert one.numbers.runs == 2
    one.window.drop()
    assert one.numbers.runs == 0
    assert not one.numbers.is_full
    one.numbers.most = 0
    assert one.numbers.is_full


def recovered(one: Driven, quiet_ms: int = 3_000) -> Driven:
    """A window of the next epoch, with what the log knows of another one."""
    new = Driven(first=2 << 32)
    new.window.next_offset = one.window.next_offset
    for run in one.window.runs:
        due = 1 if run.state is not RunState.LEASED else 0
        new.window.restore(run.first, run.bits, run.attempt, due)
    new.window.resume(0, 1_000_000, quiet_ms)
    return new


def test_after_a_restart_members_have_time_to_show_what_they_hold():
    one = Driven()
    mine, other = one.take(2), one.take(2, "b")
    new = recovered(one)
    assert new.again() is None
    assert new.window.extend(mine.lease, 0, some(2), "a", 500, LEASE_MS) is Settled.OK
    assert [run.first for run in new.window.tick(3_200)] == [other.first]
    assert new.again(member="c").attempt == 2
    assert new.again() is None
    assert new.window.ack(mine.lease, 0, some(2)) is Settled.OK


def test_after_a_restart_an_acknowledgement_of_before_counts():
    one = Driven()
    mine = one.take(2)
    new = recovered(one)
    assert new.window.ack(mine.lease, 0, some(2)) is Settled.OK
    assert new.window.floor == 2


def test_after_a_restart_what_waited_waits_no_longer_than_before():
    one = Driven()
    one.window.nack(one.take(1).lease, 0, 1, due_ms=5_000)
    new = Driven()
    new.window.next_offset = 1
    new.window.restore(0, 1, 1, 1_004_000)
    new.window.resume(0, 1_000_000, 3_000)
    new.window.tick(3_900)
    assert new.again() is None
    new.window.tick(4_100)
    assert new.again().low == 0


def test_a_shown_lease_that_the_log_does_not_know_moves_the_window():
    one = Driven()
    one.take(2)
    new = recovered(one)
    shown = one.take(3)
    new.window.meet(shown.lease, shown.first, some(3), 10, 100)
    assert new.window.next_offset == 5
    assert new.window.extend(shown.lease, 2, some(3), "a", 0, LEASE_MS) is Settled.OK
    assert new.again() is None


@pytest.mark.parametrize(
    ("lease", "first", "end", "most"),
    [
        ((1 << 32) + 5, 2, 4, 100),  # behind the end of the queue
        ((1 << 32) + 5, 50, 100, 20),  # too far
        ((2 << 32) + 1, 2, 100, 100),  # of this epoch: it would be known
    ],
)
def test_a_shown_lease_moves_the_window_only_within_bounds(lease, first, end, most):
    new = recovered(Driven())
    new.window.meet(lease, first, some(3), end, most)
    assert new.window.next_offset == 0


def test_messages_between_the_log_and_a_shown_lease_are_handed_out():
    new = recovered(Driven())
    new.window.meet((1 << 32) + 9, 3_000, 1, 5_000, 5_000)
    assert new.window.extend((1 << 32) + 9, 3_000, 1, "a", 0, LEASE_MS) is Settled.OK
    got = 0
    while (run := new.again()) is not None:
        got += run.count
    assert (got, new.window.next_offset) == (3_000, 3_001)


def test_a_window_ends_where_the_log_does():
    one = Driven()
    one.take(4), one.take(4)
    assert one.window.bound(8) is False
    assert one.window.bound(6) is True
    assert (one.window.next_offset, one.window.unsettled) == (6, 6)
    assert one.window.bound(2) is True
    assert (one.window.next_offset, one.window.unsettled, len(one.window.runs)) == (2, 2, 1)


def test_single_messages_become_no_runs_of_their_own_when_there_are_too_many():
    one = Driven()
    run = one.take(4)
    one.numbers.most = 1
    assert one.window.nack(run.lease, 0, bits_of(1)) is Settled.FULL
    assert one.window.give_back(run.lease, 0, bits_of(1)) is Settled.FULL
    assert one.window.ack(run.lease, 0, bits_of(1)) is Settled.OK
    assert isinstance(one.window.nack(run.lease, 0, bits_of(0, 2, 3)), Run)
    one.window.meet(1 << 32, 5_000, 1, 10_000, 10_000)
    assert (one.numbers.runs, one.window.next_offset) == (1, 4)


def test_messages_of_a_run_that_waits_become_a_run_of_their_own():
    one = Driven()
    run = one.window.nack(one.take(4).lease, 0, some(4))
    part = one.window.split(run, bits_of(1, 2))
    assert (run.bits, part.first, part.bits) == (bits_of(0, 3), 1, 0b11)
    assert one.window.split(run, run.bits) is run
    assert [one.again().first for _ in range(2)] == [0, 1]


# ---- Against a model ------------------------------------------------------------------


class Model:
    """Each message by itself: None when it is settled, else (holder, attempt, until)."""

    def __init__(self) -> None:
        self.open: dict[int, list] = {}

    def check(self, window: DeliveryWindow) -> None:
        """Compare a window with the model."""
        seen = {}
        for run in window.runs:
            assert run.bits
            for offset in offsets_of(run):
                assert offset not in seen
                seen[offset] = (run.lease, run.attempt)
        assert seen == {offset: (one[0], one[1]) for offset, one in self.open.items()}
        assert window.unsettled == len(self.open)
        assert window.leased == sum(one[0] != NOBODY for one in self.open.values())
        assert window.floor == min(self.open, default=window.next_offset)


def replayed(window: DeliveryWindow, log: list, new: DeliveryWindow) -> None:
    """Tell another window what the log would: what changed, as it is now."""
    for first, end, bits, _ in log:
        for low, count in stretches(first, bits) if bits >= 0 else [(first, end - first)]:
            new.clear(low, low + count)
    new.next_offset = window.next_offset
    for run in {run for _, _, _, run in log if run is not None and run.bits}:
        new.restore(run.first, run.bits, run.attempt, 0 if run.state is RunState.LEASED else 1)
    new.clear_before(window.floor)
    log.clear()


def offsets_of(run: Run) -> list[int]:
    return [run.first + at for at in range(run.bits.bit_length()) if run.bits >> at & 1]


def by_message(window: DeliveryWindow) -> dict[int, int]:
    return {offset: run.attempt for run in window.runs for offset in offsets_of(run)}


class Course:
    """A random course of a window, beside its model and one that follows it by the log."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.one, self.model, self.now_ms = Driven(), Model(), 0
        self.window = self.one.window
        self.follower = Driven(first=2 << 32).window
        self.leases: list[tuple[int, int, int]] = []

    def step(self) -> None:
        random, window = self.random, self.window
        self.now_ms += random.randrange(2_000)
        for run in window.tick(self.now_ms):
            for offset in offsets_of(run):
                self.model.open[offset][0] = NOBODY
        for lease, _, until_ms in self.model.open.values():
            assert not lease or until_ms // SLOT_MS >= self.now_ms // SLOT_MS
        action = random.random()
        if action < 0.3:
            self.hand_out()
        elif action < 0.5:
            self.hand_out_again()
        elif self.leases:
            lease, first, held = random.choice(self.leases)
            if bits := held & random.getrandbits(12) if random.random() < 0.7 else held:
                self.settle(action, lease, first, bits)
        self.model.check(window)
        if random.random() < 0.3:
            replayed(window, self.one.changes, self.follower)
            assert by_message(self.follower) == by_message(window)
            assert self.follower.floor == window.floor

    def note(self, run: Run) -> None:
        self.leases.append((run.lease, run.first, run.bits))
        for offset in offsets_of(run):
            self.model.open[offset] = [run.lease, run.attempt, run.until_ms]

    def hand_out(self) -> None:
        span = self.random.randrange(1, 12)
        bits = self.random.choice((some(span), self.random.randrange(1 << span)))
        end = self.window.next_offset + span
        run = self.window.hand_out(end, bits, "a", self.now_ms, 5_000)
        if run is not None:
            self.note(run)

    def hand_out_again(self) -> None:
        run = self.window.due()
        if run is None:
            return
        assert run.low == min(one.low for one in self.window.runs if not one.until_ms)
        attempts = {offset: self.model.open[offset][1] for offset in offsets_of(run)}
        taken = self.window.hand_out_again(
            run, lowest(run, self.random.randrange(1, 9)), "b", self.now_ms, 5_000
        )
        self.note(taken)
        for offset in offsets_of(taken):
            assert self.model.open[offset][1] == attempts[offset] + 1

    def settle(self, action: float, lease: int, first: int, bits: int) -> None:
        window, known = self.window, self.model.open
        offsets = [first + at for at in range(12) if bits >> at & 1 and first + at in known]
        may = all(known[offset][0] in (NOBODY, lease) for offset in offsets)
        if action < 0.8:
            right = Settled.OK if len(offsets) == bits.bit_count() else Settled.BEFORE
            assert window.ack(lease, first, bits) is (right if may else Settled.STALE)
            for offset in [at for at in offsets if known[at][0] in (NOBODY, lease)]:
                del known[offset]
        elif action < 0.93:
            due_ms = self.random.choice((0, self.now_ms + 3_000))
            got = window.nack(lease, first, bits, due_ms=due_ms)
            assert (got is Settled.STALE) is not may
            for offset in offsets if isinstance(got, Run) else ():
                known[offset] = [NOBODY, got.attempt, due_ms]
        elif any(one[0] == lease for one in known.values()):
            if window.extend(lease, first, bits, "a", self.now_ms, 5_000) is Settled.OK:
                for value in known.values():
                    if value[0] == lease:
                        value[2] = max(value[2], self.now_ms + 5_000)
        else:
            got = window.extend(lease, first, bits, "a", self.now_ms, 5_000)
            free = [offset for offset in offsets if known[offset][0] == NOBODY]
            assert got is (Settled.OK if free or not offsets else Settled.STALE)
            attempt = max((known[offset][1] for offset in free), default=0)
            for offset in free:
                known[offset] = [lease, attempt, self.now_ms + 5_000]


@pytest.mark.parametrize("seed", range(60))
def test_the_window_is_as_a_model_that_keeps_each_message(seed):
    course = Course(seed)
    for _ in range(120):
        course.step()
    assert len(course.window.runs) == course.one.numbers.runs
