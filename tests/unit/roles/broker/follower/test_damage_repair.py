"""A follower's damage: what is asked for, and what becomes of the answers."""

from __future__ import annotations

import pytest

from mqmesh.errors import BrokerNotAvailable, CorruptRecord, MQMeshError
from mqmesh.protocol.command import Command, encode_header
from mqmesh.protocol.replication import ReplicateLog
from mqmesh.roles.broker.follower.damage_repair import RETRY_MS, DamageRepair
from mqmesh.roles.broker.replica_metrics import ReplicaCounts
from mqmesh.storage.interface import DamagedRange
from mqmesh.testing.clock import ManualClock


class Log:
    """A log with damage, as far as its repair sees it."""

    def __init__(self) -> None:
        self.repair = self
        self.ranges = [(100, 200), (300, 400)]
        self.failure: MQMeshError | None = None
        self.looks = 0

    def look(self) -> None:
        self.looks += 1

    def damaged(self) -> list[DamagedRange]:
        return [DamagedRange(start, end, "bad", 0) for start, end in self.ranges]

    def put_back(self, chunk) -> None:
        if self.failure is not None:
            raise self.failure
        (end,) = (end for start, end in self.ranges if start == chunk.start)
        self.ranges = [one for one in self.ranges if one[0] != chunk.start]
        if chunk.end < end:
            self.ranges.insert(0, (chunk.end, end))


class Follower:
    def __init__(self) -> None:
        self.log, self.clock, self.counts = Log(), ManualClock(), ReplicaCounts()
        self.asked: list[tuple[int, int]] = []
        self.repaired = 0
        self.refusal: MQMeshError | None = None
        self.repair = DamageRepair(
            lambda: self.log, self.counts, on_repaired=self._repaired, clock=self.clock
        )

    def _repaired(self) -> None:
        self.repaired += 1

    def _read_log(self, start, end, on_done) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append((start, end))
        self.on_done = on_done

    def tick(self, confirmed: int = 1_000, wait_ms: int = 0) -> list[tuple[int, int]]:
        self.clock.advance(wait_ms)
        self.repair.tick(self.clock.monotonic_ms(), self._read_log, confirmed)
        asked, self.asked = self.asked, []
        return asked

    def answer(self, start: int, end: int) -> None:
        header = encode_header(ReplicateLog(start, end, 65_536, 1, 1_000))
        self.on_done(Command(0, 1, 1, memoryview(header), memoryview(bytes(end - start))))


@pytest.fixture
def follower() -> Follower:
    return Follower()


def test_one_range_after_the_other_is_asked_for_and_put_back(follower):
    assert follower.tick() == [(100, 200)]
    assert follower.tick() == [], "one at a time"
    follower.answer(100, 150)
    assert follower.tick() == [(150, 200)], "the rest of it"
    follower.answer(150, 200)
    assert follower.tick() == [(300, 400)]
    assert follower.repaired == 0
    follower.answer(300, 400)
    assert follower.tick() == []
    assert (follower.repaired, follower.counts.repaired_bytes) == (1, 200)
    assert follower.log.looks == 5, "with each tick"


def test_what_is_not_confirmed_is_left(follower):
    assert follower.tick(confirmed=199) == []
    assert follower.tick(confirmed=200) == [(100, 200)]
    follower.answer(100, 200)
    assert follower.tick(confirmed=399) == []
    assert follower.repaired == 0


@pytest.mark.parametrize("at", ["asking", "answer", "bytes"])
def test_a_leader_that_cannot_help_is_asked_again_later(follower, at, caplog):
    why = BrokerNotAvailable("why")
    if at == "asking":
        follower.refusal = why
    follower.tick()
    if at == "answer":
        follower.on_done(why)
    elif at == "bytes":
        follower.log.failure = CorruptRecord("why")
        follower.answer(100, 200)
    assert caplog.messages == ["bytes 100 to 200 of the log stay damaged: why"]
    follower.refusal = follower.log.failure = None
    assert follower.tick(wait_ms=RETRY_MS - 1) == []
    assert follower.tick(wait_ms=1) == [(100, 200)]


def test_what_comes_after_its_end_changes_nothing(follower):
    follower.tick()
    follower.repair.close()
    follower.answer(100, 200)
    assert follower.log.ranges == [(100, 200), (300, 400)]
