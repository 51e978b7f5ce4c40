"""Which readers are sent to which follower."""

from __future__ import annotations

import pytest

from mqmesh.batch.record_batch import BROKER_PART_SIZE, encode_batch, read_header, stamp
from mqmesh.message import Message
from mqmesh.protocol.pulling import PullRequest
from mqmesh.roles.broker.followers.follower_table import FollowerTable
from mqmesh.roles.broker.followers.read_advice import ReadAdvice
from mqmesh.roles.broker.ha_config import HaConfig
from mqmesh.storage.interface import GetResult, GetStatus
from mqmesh.units import KIB, QueueOffset

LOG_END = 1_000_000
MEMORY = 1_000_000


def batch_at(commitlog_offset: int) -> bytes:
    """A batch as it stands in the log."""
    batch = encode_batch(
        [Message("t", b"x")],
        topic="t",
        queue_id=0,
        producer_id=1,
        first_sequence=0,
        born_timestamp=0,
    )
    part = stamp(
        read_header(batch),
        commitlog_offset=commitlog_offset,
        base_queue_offset=0,
        store_timestamp=5,
        epoch=0,
        store_id=1,
    )
    return part + batch[BROKER_PART_SIZE:]


class Case:
    """A master whose log has a million bytes, on a machine with as many of memory."""

    def __init__(self, **settings) -> None:
        self.table = FollowerTable(window_bytes=64 * KIB, fall_behind_bytes=500)
        ha = HaConfig(**{"ha_window_bytes": 64 * KIB, "zone": "west", **settings})
        self.advice = ReadAdvice(ha, self.table, None, lambda: LOG_END, MEMORY)

    def follower(self, replica_id: int, *, lacks: int = 0, **said) -> None:
        peer = b"%d" % replica_id
        self.table.open(peer, replica_id, log_end=LOG_END, offset=LOG_END - lacks, now_ms=0, **said)

    def asked(
        self, *, at: int | None = None, zone: str = "", queue_id: int = 0, status=None
    ) -> int:
        """The advice for a reader who gets what stands at a commit-log offset, or nothing."""
        zero = QueueOffset(0)
        result = GetResult(status or GetStatus.NO_NEW_MESSAGE, zero, zero, zero)
        if at is not None:
            result = GetResult(GetStatus.FOUND, zero, zero, zero, [batch_at(at)], 1)
        return self.advice.replica_for(PullRequest("g", "t", queue_id, 0, zone=zone), result)


@pytest.fixture
def case() -> Case:
    return Case()


def test_without_followers_and_for_readers_nearby_there_is_none(case):
    assert case.asked(at=0, zone="east") == 0
    case.follower(1, zone="east")
    assert case.asked(at=LOG_END - 400_000) == 0
    assert case.asked() == 0


def test_who_is_far_behind_reads_from_a_follower_and_queues_are_divided(case):
    case.follower(1)
    case.follower(2)
    assert case.asked(at=LOG_END - 400_001) == 1
    assert case.asked(at=LOG_END - 400_001, queue_id=1) == 2


def test_who_stands_where_a_follower_is_reads_there(case):
    case.follower(1, zone="north")
    case.follower(2, zone="east")
    assert case.asked(zone="east") == 2
    assert case.asked(at=LOG_END - 1, zone="north") == 1
    assert case.asked(zone="south") == 0


def test_the_masters_own_zone_is_read_from_the_master(case):
    case.follower(1, zone="west")
    assert case.asked(zone="west") == 0


@pytest.mark.parametrize("lack", [{"lacks": 64 * KIB + 1}, {"serves_reads": False}])
def test_nobody_is_sent_to_who_lags_or_answers_no_reads(case, lack):
    case.follower(1, zone="east", **lack)
    assert case.asked(at=0, zone="east") == 0


def test_a_wrong_offset_is_not_taken_elsewhere(case):
    case.follower(1, zone="east")
    assert case.asked(zone="east", status=GetStatus.OFFSET_OVERFLOW) == 0
    assert case.asked(zone="east", status=GetStatus.OFFSET_TOO_SMALL) == 0


def test_it_may_be_switched_off():
    case = Case(slave_read_enable=False)
    case.follower(1, zone="east")
    assert case.asked(at=0, zone="east") == 0
