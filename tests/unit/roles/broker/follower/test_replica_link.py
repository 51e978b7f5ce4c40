"""A follower's link: what it says to its leader, and does with what comes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from mqmesh.errors import CorruptRecord, DiskFull, RequestTimeout, StoreClosed
from mqmesh.log_identity import EpochStart, LogIdentity
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replication import (
    REPLICATION_VERSION,
    AckReplication,
    OpenReplicationRequest,
    OpenReplicationResponse,
    ReplicateLog,
    ReplicationMode,
)
from mqmesh.roles.broker.follower.replica_link import (
    FIRST_RETRY_MS,
    MOST_STEPS,
    RETRY_MS,
    SILENT_MS,
    LinkTerms,
    ReplicaLink,
)
from mqmesh.roles.broker.ha.replica_state import first_state
from mqmesh.roles.broker.ha.vote_state import KeptVoteState
from mqmesh.roles.broker.replica_metrics import ReplicaCounts
from mqmesh.storage.commitlog.log_copy import encode_log_start
from mqmesh.storage.interface import LogStart
from mqmesh.storage.log.store_key import StoreKey
from mqmesh.testing.clock import ManualClock

STREAM, TRUNCATE, COPY, RENEW = map(int, ReplicationMode)
BEGINNING = LogStart(b"k" * 32, 7, 65_536, 0, [EpochStart(1, 0)], [])


class Log:
    """A log of bytes, and what a test wants of it."""

    def __init__(self) -> None:
        self.data = b"." * 100
        self.failure: Exception | None = None

    def identity(self) -> LogIdentity:
        proof = StoreKey(BEGINNING.key).proof()
        return LogIdentity(7, proof, 0, len(self.data), [EpochStart(1, 0)])

    def beginning(self) -> LogStart:
        return BEGINNING

    def log_end(self) -> int:
        return len(self.data)

    def append_raw(self, chunk) -> None:
        if self.failure is not None:
            raise self.failure
        assert chunk.start == len(self.data)
        self.data += bytes(chunk.data)


class Leader:
    """The leader's side of one link, and everything around the follower's."""

    def __init__(self) -> None:
        self.kept = Log()
        self.clock = ManualClock()
        self.synced = 50
        self.wish = 0
        self.asked: list[tuple[OpenReplicationRequest, object]] = []
        self.acks: list[AckReplication] = []
        self.done: list[object] = []
        self.closed = False
        self.counts = ReplicaCounts()
        self.promises = KeptVoteState(
            first_state(7, 2, identity="i", boot_id="b", place="p", drawn=0),
            lambda state: None,
            lambda bits: 76,
        )
        self.later: list[tuple[int, Callable[[], None]]] = []
        self.link = ReplicaLink(
            "broker-a",
            2,
            99,
            "leader:1",
            self,
            LinkTerms(self.promises, self.counts),
            connect=self._connect,
            clock=self.clock,
            call_later=lambda delay_ms, callback: self.later.append((delay_ms, callback)),
        )

    def _connect(self, on_command, on_connection):
        self.send, self.connect = on_command, on_connection
        return self

    def log(self) -> Log:
        return self.kept

    def durable_offset(self) -> int:
        return self.synced

    def retention_wish(self) -> int:
        return self.wish

    def on_chunk(self, chunk) -> None:
        self.done.append(chunk.confirmed)

    def become_copy(self, beginning: LogStart) -> None:
        self.done.append(beginning)
        self.incarnation_at_copy = self.promises.incarnation

    def truncate(self, end_offset: int) -> None:
        self.kept.data = self.kept.data[:end_offset]

    def request(self, code, on_done, *, header, timeout_ms) -> None:
        assert code == RequestCode.OPEN_REPLICATION
        self.asked.append((decode_header(OpenReplicationRequest, memoryview(header)), on_done))

    def oneway(self, code, *, header) -> None:
        assert code == RequestCode.ACK_REPLICATION
        self.acks.append(decode_header(AckReplication, memoryview(header)))

    def close(self) -> None:
        self.closed = True

    def answer(
        self, mode: int, offset: int, body: bytes = b"", version: int = REPLICATION_VERSION
    ) -> None:
        header = encode_header(OpenReplicationResponse(mode, offset, 3, version))
        self.asked[-1][1](Command(0, 1, 1, memoryview(header), memoryview(body)))

    def chunk(self, data: bytes = b"", start: int | None = None) -> None:
        start = len(self.kept.data) if start is None else start
        header = encode_header(ReplicateLog(start, start + len(data), 65_536, 1, 1_000, 3, 20))
        code = int(RequestCode.REPLICATE_LOG)
        self.send(Command(code, 0, 2, memoryview(header), memoryview(data)))

    def tick(self, step_ms: int) -> None:
        self.clock.advance(step_ms)
        self.link.tick(self.clock.monotonic_ms())


@pytest.fixture
def leader() -> Leader:
    leader = Leader()
    leader.connect(True)
    return leader


@pytest.fixture
def streaming(leader: Leader) -> Leader:
    leader.answer(STREAM, 100)
    assert leader.link.streaming
    return leader


def test_it_says_what_it_has_as_soon_as_it_is_connected(leader):
    ((asked, _),) = leader.asked
    assert (asked.broker_name, asked.replica_id, asked.instance_id) == ("broker-a", 2, 99)
    assert asked.log == leader.kept.identity()
    assert not leader.link.streaming


def test_what_comes_is_added_and_acknowledged_once_a_turn(streaming):
    streaming.chunk(b"one")
    streaming.chunk(b"two")
    streaming.link.turn_ended()
    streaming.link.turn_ended()
    assert streaming.kept.data.endswith(b"onetwo")
    assert streaming.acks == [AckReplication(106, 50, 3)]
    assert streaming.done == [20, 20], "the role is told what is confirmed"
    assert (streaming.counts.chunks, streaming.counts.bytes) == (2, 6)
    streaming.wish = 64
    streaming.synced = 200  # of the store that was here before
    streaming.link.turn_ended()
    assert streaming.acks[-1] == AckReplication(106, 106, 3, 64)


def test_a_sign_of_life_adds_nothing_and_tells_where_the_leader_is(streaming):
    streaming.chunk()
    assert streaming.link.leader_end == 1_000
    assert len(streaming.kept.data) == 100
    assert streaming.done == [20]


def test_nothing_is_taken_before_the_leader_says_how_to_go_on(leader):
    leader.chunk(b"early")
    assert leader.kept.data == b"." * 100


def test_an_end_that_the_leader_has_not_is_cut_then_it_opens_again(leader):
    leader.answer(TRUNCATE, 60)
    assert leader.kept.data == b"." * 60
    assert leader.asked[-1][0].log.log_end == 60
    leader.answer(STREAM, 60)
    assert leader.link.streaming
    assert (leader.counts.cuts, leader.counts.cut_bytes) == (1, 40)


def test_without_anything_in_common_it_becomes_a_copy(leader):
    leader.answer(COPY, 0, encode_log_start(BEGINNING))
    assert leader.done == [BEGINNING]
    assert len(leader.asked) == 2


def test_what_it_had_acknowledged_and_lacks_makes_it_another_member(leader):
    leader.answer(RENEW, 200)
    assert leader.kept.data == b"." * 100, "what it has it keeps"
    assert [asked.incarnation for asked, _ in leader.asked] == [1, 77]
    leader.answer(STREAM, 100)
    assert leader.link.streaming


@pytest.mark.parametrize(
    ("mode", "offset", "body", "version", "why"),
    [
        (STREAM, 90, b"", 2, "go on at 90"),
        (COPY, 0, b"x", 2, "cannot be read"),
        (9, 0, b"", 2, "mode 9"),
        (STREAM, 100, b"", 3, "version 3"),
        (STREAM, 100, b"", 1, "upgrade the other one"),
    ],
)
def test_what_makes_no_sense_is_asked_again_later(leader, mode, offset, body, version, why):
    leader.answer(mode, offset, body, version)
    assert not leader.link.streaming
    assert why in leader.link.failure
    leader.tick(FIRST_RETRY_MS - 1)
    assert len(leader.asked) == 1
    leader.tick(1)
    assert len(leader.asked) == 2
    leader.answer(STREAM, 100)
    assert leader.link.failure is None


def test_who_fails_often_waits_longer(leader):
    waits = []
    for _ in range(8):
        leader.answer(9, 0)
        waits.append(leader.later[-1][0])
        leader.tick(waits[-1])
    assert waits[:3] == [FIRST_RETRY_MS, 2 * FIRST_RETRY_MS, 4 * FIRST_RETRY_MS]
    assert waits[-1] == RETRY_MS
    leader.answer(STREAM, 100)
    leader.kept.failure = DiskFull("no room")
    leader.chunk(b"one")
    assert leader.later[-1][0] == FIRST_RETRY_MS


@pytest.mark.parametrize("mode", [TRUNCATE, COPY, RENEW])
def test_a_leader_that_never_goes_on_is_asked_with_pauses_and_the_log_says_so(leader, mode, caplog):
    body = encode_log_start(BEGINNING)
    for _ in range(MOST_STEPS - 1):
        leader.answer(mode, 50, body)
    assert len(leader.asked) == MOST_STEPS, "what may be needed to begin waits for nothing"
    waits = []
    for _ in range(8):
        asked = len(leader.asked)
        leader.answer(mode, 50, body)
        assert len(leader.asked) == asked, "it is not asked at once"
        waits.append(leader.later[-1][0])
        leader.tick(waits[-1])
        assert len(leader.asked) == asked + 1
    assert waits[:2] == [FIRST_RETRY_MS, 2 * FIRST_RETRY_MS]
    assert waits[-1] == RETRY_MS
    said = [line for line in caplog.messages if "never goes on" in line]
    assert len(said) == 1, "once"
    assert ReplicationMode(mode).name in said[0]
    leader.answer(STREAM, len(leader.kept.data))
    assert leader.link.streaming
    assert leader.link.failure is None


def test_it_promises_the_epoch_of_whom_it_follows(leader):
    leader.answer(STREAM, 100)
    assert leader.promises.promised_epoch == 3


def test_a_leader_of_an_epoch_that_is_over_is_not_followed(leader):
    leader.promises.promise(4)
    leader.answer(TRUNCATE, 60)
    assert leader.kept.data == b"." * 100
    assert not leader.link.streaming
    assert "promised 4" in leader.link.failure
    assert leader.counts.stale_epochs == 1


def test_a_store_with_another_log_is_not_moved_aside_for_a_leader_that_may_be_wiped(leader):
    other = msgspec.structs.replace(BEGINNING, store_id=8)
    leader.answer(COPY, 0, encode_log_start(other))
    assert leader.done == []
    assert "another log (0x00000007)" in leader.link.failure
    assert "store_path_root_dir" in leader.link.failure
    leader.kept.data = b""
    leader.tick(RETRY_MS)
    leader.answer(COPY, 0, encode_log_start(other))
    assert leader.done == [other], "there is nothing to lose"


def test_a_copy_has_another_incarnation_before_anything_is_gone(leader):
    leader.answer(COPY, 0, encode_log_start(BEGINNING))
    assert leader.incarnation_at_copy == 77
    assert leader.promises.state.log_id == BEGINNING.store_id


@pytest.mark.parametrize("failure", [CorruptRecord("rotten"), DiskFull("no room")])
def test_a_chunk_that_cannot_be_added_is_asked_for_anew(streaming, failure):
    streaming.kept.failure = failure
    streaming.chunk(b"one")
    streaming.chunk(b"two")
    assert not streaming.link.streaming
    streaming.kept.failure = None
    streaming.tick(RETRY_MS)
    assert streaming.asked[-1][0].log.log_end == 100
    streaming.answer(STREAM, 100)
    streaming.chunk(b"one")
    assert streaming.kept.data.endswith(b"one")
    assert streaming.counts.refused_chunks == isinstance(failure, CorruptRecord)


def test_a_store_that_has_stopped_takes_nothing_more(streaming):
    streaming.kept.failure = StoreClosed("the disk refuses")
    streaming.chunk(b"one")
    assert not streaming.link.streaming
    assert streaming.link.failure == "the disk refuses"


def test_answers_of_a_connection_that_broke_count_for_nothing(leader):
    (_, on_done) = leader.asked[0]
    leader.connect(False)
    leader.connect(True)
    assert len(leader.asked) == 2
    on_done(RequestTimeout("late"))
    assert leader.link.failure is None
    leader.answer(STREAM, 100)
    assert leader.link.streaming


def test_a_leader_that_says_nothing_for_long_is_asked_again(streaming):
    for _ in range(SILENT_MS // 500):
        streaming.tick(500)
    assert streaming.link.streaming
    assert len(streaming.acks) == SILENT_MS // 500, "it says all the time how far it is"
    streaming.tick(1)
    assert not streaming.link.streaming
    assert len(streaming.asked) == 2


def test_once_closed_nothing_is_taken(streaming):
    streaming.link.close()
    streaming.chunk(b"late")
    assert streaming.closed
    assert streaming.kept.data == b"." * 100
