"""Who may be told that a put is safe, and when."""

from __future__ import annotations

import itertools
import random

import pytest

from mqmesh.coordination.interface import AckReplicas
from mqmesh.errors import SystemBusy
from mqmesh.protocol.messaging import SendStatus
from mqmesh.roles.broker.commit_point import AckParticipant, CommitPoint
from mqmesh.roles.broker.config import BrokerConfig, BrokerStoreConfig
from mqmesh.roles.broker.environment import commit_point_of
from mqmesh.roles.broker.followers.follower_table import FollowerTable
from mqmesh.roles.broker.ha.confirm import AckPolicy
from mqmesh.roles.broker.ha_config import HaConfig, HaMode
from mqmesh.storage.interface import FlushDiskType
from mqmesh.units import MAX_OFFSET


class Positions:
    """A disk and a replica, where a test says."""

    def __init__(self, disk=0, replica=0):
        self.disk = disk
        self.replica = replica

    def holders(self):
        return (
            AckParticipant("the disk", lambda: self.disk, SendStatus.FLUSH_DISK_TIMEOUT),
            AckParticipant("replica 1", lambda: self.replica, SendStatus.FLUSH_SLAVE_TIMEOUT),
        )


class Disk:
    """Of a store nothing but how far it is synced."""

    def durable_offset(self):
        return 70


class Log(Disk):
    """And where its log ends."""

    def log_end(self):
        return 100

    read_raw = append_raw = truncate = begin_epoch = epochs = identity = beginning = log_end
    repair = None


def disk_only(at: Positions, **settings) -> CommitPoint[str]:
    return CommitPoint(at.holders()[:1], **settings)


def test_without_holders_everything_is_safe_at_once():
    point: CommitPoint[str] = CommitPoint()
    assert point.offset() == MAX_OFFSET
    assert point.is_safe(MAX_OFFSET)
    assert point.visible(123) == 123


@pytest.mark.parametrize("disk", [0, 5, 10])
@pytest.mark.parametrize("replica", [0, 5, 10])
def test_a_put_is_safe_when_all_holders_have_all_of_it(disk, replica):
    point: CommitPoint[str] = CommitPoint(Positions(disk, replica).holders())
    for end in range(12):
        assert point.is_safe(end) == (end <= disk and end <= replica)
    assert point.visible(7) == min(7, disk, replica)


@pytest.mark.parametrize(
    ("flush", "offset"),
    [(FlushDiskType.SYNC_FLUSH, 70), (FlushDiskType.ASYNC_FLUSH, MAX_OFFSET)],
)
def test_the_disk_counts_only_with_sync_flush(flush, offset):
    config = BrokerConfig(storage=BrokerStoreConfig(flush_disk_type=flush))
    assert (
        commit_point_of(config, Disk(), FollowerTable(window_bytes=0, fall_behind_bytes=0)).offset()
        == offset
    )


def test_nobody_waits_for_a_holder_that_is_not_there_but_is_told_that_it_lacks_the_put():
    at, there = Positions(disk=50, replica=20), [True]
    disk = at.holders()[0]
    replica = AckParticipant(
        "a follower",
        lambda: at.replica,
        SendStatus.FLUSH_SLAVE_TIMEOUT,
        is_there=lambda: there[0],
        absent_status=SendStatus.SLAVE_NOT_AVAILABLE,
    )
    point: CommitPoint[str] = CommitPoint((disk, replica), timeout_ms=100)
    point.wait("first", 20, now_ms=0)
    point.wait("second", 40, now_ms=0)
    point.wait("third", 60, now_ms=0)
    assert point.confirmed(now_ms=0) == ["first"]
    assert point.status_of(20) is SendStatus.SEND_OK
    there[0] = False
    assert point.confirmed(now_ms=0) == ["second"]
    assert point.status_of(40) is SendStatus.SLAVE_NOT_AVAILABLE
    ((waiter, late),) = point.expired(100)
    assert (waiter, late) == ("third", disk), "it waits for those that are there"
    there[0] = True
    assert point.offset() == 20


def test_double_write_counts_a_follower_that_can_keep_up():
    config = BrokerConfig(ha=HaConfig(mode=HaMode.MANUAL, ack_replicas=AckReplicas.ONE))
    table = FollowerTable(window_bytes=100, fall_behind_bytes=10)
    point = commit_point_of(config, Log(), table)
    assert (point.offset(), point.status_of(1)) == (MAX_OFFSET, SendStatus.SLAVE_NOT_AVAILABLE)
    table.open(b"a", 1, log_end=100, offset=95, now_ms=0)
    assert point.offset() == 0
    table.sent(next(iter(table)), 99, 0, 0)
    table.acknowledged(b"a", 97, 0, 0)
    assert point.is_safe(97)
    assert not point.is_safe(98)


class Replicas:
    """A leadership in which so much is confirmed and acknowledged."""

    def __init__(self, mode, confirmed, acknowledged):
        self.policy = AckPolicy(mode)
        self.confirmed, self.acknowledged = lambda: confirmed, lambda: acknowledged
        self.check, self.may_answer = (lambda: None), (lambda: True)


@pytest.mark.parametrize("mode", [AckReplicas.ONE, AckReplicas.QUORUM, AckReplicas.ALL])
@pytest.mark.parametrize("acknowledged", [0, 40])
def test_where_a_master_is_elected_a_put_waits_until_it_is_acknowledged(mode, acknowledged):
    """Whoever is connected: the next election may take back what is not confirmed."""
    followers = FollowerTable(window_bytes=0, fall_behind_bytes=0)
    replicas = Replicas(mode, 50, acknowledged)
    point = commit_point_of(BrokerConfig(), Log(), followers, replicas)
    assert point.offset() == acknowledged
    assert point.status_of(60) is SendStatus.SEND_OK, "it has no other one"
    assert point.is_safe(40) == (acknowledged == 40)
    assert (point.visible(100), point.is_safe(41)) == (50, False)
    point.wait("put", 60, now_ms=0)
    assert point.confirmed(now_ms=0) == []
    assert point.take_all() == ["put"]
    assert point.waiting_count == point.waits_ms.read().count == 0


def test_puts_wait_in_order_until_they_are_safe():
    at = Positions()
    point = disk_only(at)
    for end in (10, 20, 15, 30):
        point.wait(str(end), end, now_ms=0)
    at.disk = 9
    assert point.confirmed(now_ms=0) == []
    at.disk = 10
    assert point.confirmed(now_ms=0) == ["10"]
    assert point.confirmed(now_ms=0) == [], "each is told once"
    at.disk = 20
    assert point.confirmed(now_ms=6) == ["20", "15"]
    assert point.waiting_count == 1
    assert (point.waits_ms.read().count, point.waits_ms.read().total) == (3, 12)


def test_after_too_long_a_put_says_who_is_late():
    at = Positions(disk=10, replica=20)
    point: CommitPoint[str] = CommitPoint(at.holders(), timeout_ms=100)
    point.wait("first", 15, now_ms=0)
    point.wait("second", 15, now_ms=1)
    assert point.expired(99) == []
    ((waiter, late),) = point.expired(100)
    assert (waiter, late.name, late.status) == ("first", "the disk", SendStatus.FLUSH_DISK_TIMEOUT)
    at.disk, at.replica = 20, 14
    ((waiter, late),) = point.expired(101)
    assert (waiter, late.status) == ("second", SendStatus.FLUSH_SLAVE_TIMEOUT)
    assert point.waiting_count == 0


def test_when_all_are_late_the_last_one_is_named():
    at = Positions(disk=3, replica=2)
    point: CommitPoint[str] = CommitPoint(at.holders(), timeout_ms=100)
    point.wait("put", 15, now_ms=0)
    assert [late.name for _, late in point.expired(100)] == ["replica 1"]


def test_what_became_safe_just_before_its_time_was_over_lacks_nothing():
    at = Positions()
    point = disk_only(at, timeout_ms=100)
    point.wait("put", 10, now_ms=0)
    at.disk = 10
    assert point.expired(100) == [("put", None)]


def test_arrivals_are_told_until_all_of_them_is_safe():
    at = Positions()
    point = disk_only(at)
    point.note_arrival(("t", 0), 10)
    point.note_arrival(("t", 1), 20)
    point.note_arrival(("t", 0), 30)
    at.disk = 20
    assert point.arrivals() == [("t", 0), ("t", 1)]
    at.disk = 25
    assert point.arrivals() == [("t", 0)], "there may be more for it with each step"
    at.disk = 30
    assert point.arrivals() == [("t", 0)]
    at.disk = 99
    assert point.arrivals() == []


def test_no_more_wait_than_may():
    at = Positions()
    point = disk_only(at, most_waits=2, retry_after_ms=30)
    for end in (10, 20):
        point.check_room()
        point.wait(str(end), end, now_ms=0)
    with pytest.raises(SystemBusy, match=r"2 sends wait for the disk.*max_sync_flush_waits") as got:
        point.check_room()
    assert got.value.retry_after_ms == 30
    at.disk = 10
    point.confirmed(now_ms=0)
    point.check_room()


@pytest.mark.parametrize("seed", range(50))
def test_each_put_is_told_once_and_never_before_it_is_safe(seed):
    """Against what must be true of every step, whatever the order of events."""
    chance = random.Random(seed)
    at = Positions()
    point: CommitPoint[int] = CommitPoint(at.holders(), timeout_ms=50)
    ends: dict[int, int] = {}
    due: dict[int, int] = {}
    told: list[int] = []
    now_ms = log_end = 0
    numbers = itertools.count()
    for _ in range(300):
        match chance.randrange(5):
            case 0:
                log_end += chance.randrange(1, 20)
                number = next(numbers)
                # Now and then a repetition of what stands further to the front.
                ends[number] = chance.choice((log_end, max(log_end - 30, 1)))
                due[number] = now_ms + 50
                point.wait(number, ends[number], now_ms)
            case 1:
                at.disk = min(at.disk + chance.randrange(30), log_end)
            case 2:
                at.replica = min(at.replica + chance.randrange(30), log_end)
            case 3:
                now_ms += chance.randrange(20)
                for number, late in point.expired(now_ms):
                    assert due[number] <= now_ms
                    assert (late is None) == point.is_safe(ends[number])
                    told.append(number)
                assert all(due[n] > now_ms for n in ends if n not in told)
            case 4:
                for number in point.confirmed(now_ms=0):
                    assert ends[number] <= min(at.disk, at.replica)
                    told.append(number)
                assert point.visible(log_end) == min(at.disk, at.replica)
        assert point.waiting_count == len(ends) - len(told)
    at.disk = at.replica = log_end
    told += point.confirmed(now_ms=0)
    assert told == list(ends), "in the order in which they came, each once"
