"""Order by key: of each key one message after the other, whatever members do."""

from __future__ import annotations

from collections import defaultdict
from random import Random

import pytest

from mqmesh.roles.broker.delivery_state.key_order import KeyOrder
from mqmesh.roles.broker.delivery_state.runs import MAX_RUN, Run, RunState
from mqmesh.roles.broker.delivery_state.window import DeliveryWindow, LeaseNumbers, Settled

LEASE_MS = 60_000


class Ordered:
    """A window with order by key, over messages whose keys are the characters of a text."""

    def __init__(self, keys: str, first: int = 1 << 32) -> None:
        self.keys = keys
        self.window = DeliveryWindow(0, LeaseNumbers(first, 1_000_000), lambda *_: None)
        self.window.is_strict = True
        self.window.begin_order([])
        self.now_ms = 0

    def admit(self, count: int) -> None:
        start = self.window.next_offset
        end = min(start + count, len(self.keys))
        self.window.admit(end, [(at, self.key_of(at)) for at in range(start, end)])

    def key_of(self, offset: int) -> str | None:
        key = self.keys[offset]
        return None if key == "-" else key

    def take(self, most: int, member: str = "a") -> list[tuple[int, list[int]]]:
        """Lease messages; return the leases with their offsets."""
        return [
            (lease.lease, list(lease.offsets()))
            for run, bits in self.free(most).items()
            for lease in [self.window.hand_out_again(run, bits, member, self.now_ms, LEASE_MS)]
        ]

    def free(self, most: int) -> dict[Run, int]:
        found: dict[Run, int] = {}
        count = self.window.take_free(most, found)
        assert count == sum(bits.bit_count() for bits in found.values()) <= most
        return found

    def nack(self, lease: int, offset: int, delay_ms: int = 0) -> None:
        run = self.window.nack(lease, offset, 1)
        if delay_ms:
            self.window.leave(run)
            self.window.wait(run, self.now_ms + delay_ms)
        self.window.hold_back(run)


def offsets_of(leases: list[tuple[int, list[int]]]) -> list[int]:
    return [offset for _, offsets in leases for offset in offsets]


def test_messages_of_a_busy_key_are_passed_over_and_others_go_on():
    one = Ordered("aabacb")
    one.admit(1)
    ((lease, offsets),) = one.take(10)
    one.admit(5)
    assert offsets_of(one.take(10, "b")) == [2, 4, 5]
    assert one.window.passed == 2
    assert one.window.ack(lease, offsets[0], 1) is Settled.OK
    assert offsets_of(one.take(10, "c")) == [1, 3]
    assert one.window.passed == 0


def test_a_lease_has_several_messages_of_a_key_in_order():
    one = Ordered("aaab")
    one.admit(4)
    ((_, offsets),) = one.take(10)
    assert offsets == [0, 1, 2, 3]
    assert one.take(10) == []


def test_messages_that_are_let_in_one_after_the_other_are_one_run_and_one_lease():
    one = Ordered("abcd" * 1_000)
    for _ in range(300):
        one.admit(4)
    assert [run.bits.bit_length() for run in one.window.runs] == [MAX_RUN, 1_200 - MAX_RUN]
    ((_, offsets),) = one.take(3)
    one.admit(4)
    assert (offsets, len(one.window.runs)) == ([0, 4, 8], 3)
    assert one.window.passed == one.window.unsettled - 3 == 1_201


def test_what_was_taken_is_added_to_what_was_taken_before():
    one = Ordered("abca")
    one.admit(2)
    found: dict[Run, int] = {}
    assert one.window.take_free(5, found) == 2
    one.admit(2)
    assert one.window.take_free(5, found) == 1
    assert list(found.values()) == [0b0111]


def test_what_was_handed_out_before_goes_first_or_alone():
    one = Ordered("abcd")
    one.admit(4)
    ((lease, _),) = one.take(3)
    one.nack(lease, 2)
    found: dict[Run, int] = {}
    assert one.window.take_free(5, found, only_again=True) == 1
    assert [list(run.offsets(bits)) for run, bits in found.items()] == [[2]]
    assert one.window.take_free(5, found) == 1
    assert [list(run.offsets(bits)) for run, bits in found.items()] == [[2], [3]]


def test_messages_without_a_key_have_no_order():
    one = Ordered("---")
    one.admit(3)
    ((lease, _),) = one.take(1)
    assert offsets_of(one.take(1, "b")) == [1]
    one.nack(lease, 0, 1_000)
    assert offsets_of(one.take(5, "c")) == [2]


def test_a_message_that_failed_delays_its_key_only():
    one = Ordered("abab")
    one.admit(4)
    ((lease, offsets),) = one.take(4)
    assert offsets == [0, 1, 2, 3]
    one.nack(lease, 0, 1_000)
    assert one.take(10, "b") == [], "what is behind it was taken back, and waits for it"
    assert one.window.ack(lease, 2, 1) is Settled.STALE
    assert one.window.ack(lease, 1, 0b101) is Settled.OK, "the other key goes on"
    one.window.tick(2_000)
    ((again, offsets),) = one.take(10, "b")
    assert (offsets, one.window.ack(again, 0, 1)) == ([0], Settled.OK)
    assert offsets_of(one.take(10, "b")) == [2]


def test_the_attempt_of_what_was_taken_back_does_not_count():
    one = Ordered("aa")
    one.admit(2)
    ((lease, _),) = one.take(2)
    one.nack(lease, 0)
    assert [run.attempt for run in one.free(2)] == [1]
    assert {run.attempt for run in one.window.runs} == {0, 1}


def test_a_rejected_message_frees_its_key_once_that_is_stored():
    one = Ordered("aa")
    one.admit(1)
    ((lease, _),) = one.take(1)
    one.admit(1)
    left = one.window.nack(lease, 0, 1)
    one.window.leave(left)
    assert one.take(1) == []
    one.window.settle(left)
    assert offsets_of(one.take(1)) == [1]


def test_only_the_lease_that_has_a_message_settles_it():
    one = Ordered("a")
    one.admit(1)
    ((lease, _),) = one.take(1)
    one.window.tick(2 * LEASE_MS)
    assert one.window.ack(lease, 0, 1) is Settled.STALE, "late work does not count"
    assert one.window.extend(lease, 0, 1, "a", 0, LEASE_MS) is Settled.STALE
    ((again, _),) = one.take(1, "b")
    assert one.window.ack(again, 0, 1) is Settled.OK
    assert one.window.ack(again, 0, 1) is Settled.BEFORE, "repeated"
    assert one.window.floor == 1


def recovered(one: Ordered) -> Ordered:
    """A window of the next epoch, with what the log knows of another one."""
    new = Ordered(one.keys, first=2 << 32)
    new.window.order = None
    new.window.next_offset = one.window.next_offset
    for run in one.window.runs:
        due = 1 if run.state is not RunState.LEASED else 0
        new.window.restore(run.first, run.bits, run.attempt, due, run.lease)
    new.window.resume(0, 1_000_000, 3_000)
    new.window.begin_order(
        sorted((at, new.key_of(at)) for run in new.window.runs for at in run.offsets())
    )
    return new


def test_after_a_restart_only_the_noted_lease_is_shown_and_settles():
    one = Ordered("aab")
    one.admit(3)
    ((lease, _),) = one.take(1)
    ((other, _),) = one.take(1, "b")
    new = recovered(one)
    assert new.take(5, "c") == []
    assert new.window.ack(lease, 2, 1) is Settled.STALE
    assert new.window.extend(lease, 0, 1, "a", 0, LEASE_MS) is Settled.OK
    assert new.window.ack(other, 2, 1) is Settled.OK
    assert new.window.ack(lease, 0, 1) is Settled.OK
    assert offsets_of(new.take(5, "c")) == [1]


def test_what_was_taken_back_holds_up_nothing_else_of_its_lease():
    one = Ordered("aab")
    one.admit(3)
    ((lease, _),) = one.take(3)
    one.nack(lease, 0, 1_000)
    new = recovered(one)
    assert new.window.extend(lease, 0, 0b110, "a", 0, LEASE_MS) is Settled.OK, "of b"
    assert new.window.extend(lease, 0, 0b011, "b", 0, LEASE_MS) is Settled.STALE
    assert new.window.ack(lease, 0, 0b110) is Settled.STALE
    assert [list(run.offsets()) for run in new.window.runs] == [[0], [1]], "b is settled"


def test_after_a_restart_hand_outs_that_the_log_lacks_are_not_met():
    one = recovered(Ordered("aa"))
    one.window.meet((1 << 32) + 1, 0, 1, 2, 100)
    assert one.window.next_offset == 0


def test_what_is_read_ahead_is_taken_in_spans():
    order = KeyOrder()
    order.read([(at, "k") for at in (1, 2, 5, 9)], 12)
    assert order.take_ahead(2, 10, 7) == ([(2, "k"), (5, "k")], 6)
    assert order.take_ahead(6, 10, MAX_RUN) == ([(9, "k")], 12)
    assert order.take_ahead(12, 10, MAX_RUN) == ([], 12)


def test_the_key_that_holds_most_is_known():
    order = KeyOrder()
    assert order.longest() == ("", 0)
    for offset, key in enumerate("abb"):
        order.add(offset, key)
    assert order.longest() == ("b", 2)


@pytest.mark.parametrize("seed", range(40))
def test_each_key_is_settled_in_order_in_random_courses(seed):
    chance = Random(seed)
    one = Ordered("".join(chance.choice("abcdefgh-" + "a" * (seed % 5)) for _ in range(300)))
    held: dict[int, list[int]] = {}
    settled: dict[str, list[int]] = defaultdict(list)
    left = set(range(300))
    for _ in range(20_000):
        if not left:
            break
        step = chance.random()
        if step < 0.3:
            one.admit(chance.randrange(1, 30))
        elif step < 0.6:
            held.update(one.take(chance.randrange(1, 12), chance.choice("xyz")))
        elif step < 0.65:
            one.now_ms += chance.choice((500, LEASE_MS + 1_000))
            for run in one.window.tick(one.now_ms):
                one.window.hold_back(run)
        elif held:
            lease = chance.choice(list(held))
            # A member works on its messages in order, and ends at the first that fails.
            offsets = held.pop(lease)
            for offset in offsets[: chance.randrange(1, len(offsets) + 1)]:
                if step < 0.7:
                    run = one.window.nack(lease, offset, 1)
                    if isinstance(run, Settled):
                        continue
                    one.window.leave(run)
                    one.window.wait(run, one.now_ms + chance.choice((1, 700)))
                    one.window.hold_back(run)
                    break
                if one.window.ack(lease, offset, 1) is Settled.OK and offset in left:
                    left.discard(offset)
                    settled[one.keys[offset]].append(offset)
        busy = defaultdict(set)
        for run in one.window.runs:
            if run.lease:
                for offset in run.offsets():
                    busy[one.keys[offset]].add((run.member, run.lease))
        assert all(len(some) == 1 for key, some in busy.items() if key != "-"), "one lease a key"
    assert not left
    assert one.window.floor == 300
    for key, offsets in settled.items():
        assert key == "-" or offsets == sorted(offsets)
    assert len(one.window.order) == one.window.passed == one.window.unsettled == 0
