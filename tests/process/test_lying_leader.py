"""A leader that says what cannot be: its follower refuses it, and loses nothing by it."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from harness.store_files import SEGMENT_BYTES, StoreFiles, put_bodies

from mqmesh.coordination.backends import open_coordinator
from mqmesh.coordination.interface import AckReplicas, GroupState, MemberIncarnation, Presence
from mqmesh.errors import MQMeshError
from mqmesh.log_identity import MAX_EPOCH, EpochStart
from mqmesh.metrics import Readings
from mqmesh.protocol.admin import RuntimeInfo, RuntimeInfoRequest
from mqmesh.protocol.command import MAX_FRAME_BYTES, Reply, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replication import (
    REPLICATION_VERSION,
    AckReplication,
    HaStatus,
    HaStatusRequest,
    OpenReplicationRequest,
    OpenReplicationResponse,
    ReplicateLog,
    ReplicationMode,
)
from mqmesh.protocol.request import Request
from mqmesh.roles.broker.config import BrokerConfig, BrokerStoreConfig
from mqmesh.roles.broker.features.replication.feature import how_to_go_on
from mqmesh.roles.broker.ha_config import HaConfig, HaMode
from mqmesh.roles.broker.server import BrokerServer
from mqmesh.roles.coordinator.config import CoordinatorConfig
from mqmesh.roles.coordinator.server import CoordinatorServer
from mqmesh.storage.commitlog.log_copy import encode_log_start
from mqmesh.storage.interface import LogChunk, QueueStart
from mqmesh.transport.zmq import plain_client, plain_server
from mqmesh.units import MAX_OFFSET, MIB, CommitLogOffset

GROUP = "broker-a"
FAR = 2**64 - 1
STREAM, TRUNCATE, COPY, _ = map(int, ReplicationMode)


class Leader:
    """Replica 1, honest but for what it is told to say once; then silent until ``be_honest``.

    Attributes:
        store: Its log.
        epoch: That it leads.
        confirmed: To where its log is confirmed.
        word: Header and body to send instead of what comes next.
        answer: Makes the one to the next OPEN_REPLICATION.
        acked_epoch: The follower acknowledged something in this one last.
    """

    def __init__(self, wire, store):
        self.store, self.epoch, self.confirmed = store, 1, 0
        self.word: tuple[bytes, bytes] | None = None
        self.answer: Callable[[Leader], Reply] | None = None
        self.acked_epoch = 0
        self._waits: Request | None = None
        self._sent, self._lied = CommitLogOffset(0), False
        self._server, self.endpoint = wire.server(
            {
                RequestCode.OPEN_REPLICATION: self._on_open,
                RequestCode.ACK_REPLICATION: self._on_ack,
            }
        )

    @property
    def end(self) -> int:
        return self.store.log_end()

    def next_chunk(self) -> LogChunk:
        return self.store.read_raw(self._sent, max_bytes=MIB)

    def header(self, chunk: LogChunk, **other) -> bytes:
        told = ReplicateLog(
            chunk.start,
            chunk.end,
            chunk.segment_end,
            chunk.epoch,
            self.end,
            self.epoch,
            self.confirmed,
        )
        return encode_header(msgspec.structs.replace(told, **other))

    def be_honest(self) -> None:
        self._lied = False
        if self._waits is not None:
            request, self._waits = self._waits, None
            request.later().done(self._opened(request))

    def _on_open(self, request: Request) -> Reply | None:
        if self.answer is not None:
            answer, self.answer, self._lied = self.answer, None, True
            return answer(self)
        if self._lied:
            self._waits = request
            return None
        return self._opened(request)

    def _opened(self, request: Request) -> Reply:
        asked = decode_header(OpenReplicationRequest, request.command.header)
        mode, offset = how_to_go_on(self.store.identity(), asked.log)
        self._sent = CommitLogOffset(offset)
        header = encode_header(OpenReplicationResponse(int(mode), offset, self.epoch))
        body = encode_log_start(self.store.beginning()) if mode is ReplicationMode.COPY else b""
        return Reply(header, (body,))

    def _on_ack(self, request: Request) -> None:
        self.acked_epoch = decode_header(AckReplication, request.command.header).epoch
        if self.acked_epoch != self.epoch or self._lied:
            return  # it will open anew
        if self.word is not None:
            (header, body), self.word, self._lied = self.word, None, True
            self._notify(request, header, body)
            return
        while (chunk := self.next_chunk()).data:
            self._sent = chunk.end
            self._notify(request, self.header(chunk), bytes(chunk.data))
        self._notify(request, self.header(chunk), b"")

    def _notify(self, request: Request, header: bytes, body: bytes) -> None:
        request.peer.notify(RequestCode.REPLICATE_LOG, header, body)


class Scene:
    """A follower, its leader and their coordinator, all in one loop."""

    def __init__(self, wire, folder: Path) -> None:
        self.wire, self.folder = wire, folder / "follower"
        self._files = StoreFiles(folder / "leader")
        store = self._files.open()
        self.leader = Leader(wire, store)
        self._coordinator = CoordinatorServer(
            CoordinatorConfig(listen_port=0, data_dir=str(folder / "coordinator")), wire.transport
        )
        where = self._coordinator.start().removeprefix("tcp://")
        url = f"embedded://{where}"
        config = BrokerConfig(
            broker_id=2,
            listen_port=0,
            store_path_root_dir=str(self.folder),
            storage=BrokerStoreConfig(mapped_file_size_commit_log=SEGMENT_BYTES),
            ha=HaConfig(mode=HaMode.AUTO, coordinator=url, total_replicas=2),
        )
        self._client = open_coordinator(url, wire.transport, cluster=config.cluster_name)
        address = self.leader.endpoint.removeprefix("tcp://")
        presence = Presence(group=GROUP, replica_id=1, address=address, replica_address=address)
        self._session = self._ask(self._client.begin_session, 600_000, presence)
        self._state = GroupState(
            log_id=store.identity().store_id,
            epoch=0,
            master=1,
            in_sync=(MemberIncarnation(1, 0),),
            mode=AckReplicas.QUORUM,
            copies=1,
            voters=(1, 2),
            paused=True,
        )
        self._version = 0
        self.begin_epoch()
        self._broker = BrokerServer(config, wire.transport)
        self._asker = wire.client(self._broker.start())

    def _ask(self, call: Callable[..., None], *arguments):
        found: list[object] = []
        call(*arguments, found.append)
        self.wire.until(lambda: found)
        assert not isinstance(found[0], MQMeshError), found
        return found[0]

    def begin_epoch(self) -> None:
        """The record says that the leader leads the next one, so that the follower opens anew."""
        self.leader.epoch = self._state.epoch + 1
        self._state = msgspec.structs.replace(self._state, epoch=self.leader.epoch)
        self._version = self._ask(
            self._client.change, GROUP, self._version, self._state, self._session
        )

    @property
    def status(self) -> HaStatus:
        return self.wire.ask(self._asker, RequestCode.GET_HA_STATUS, HaStatusRequest(), HaStatus)

    def counted(self, *names: str) -> int:
        """The sum of metrics of the follower."""
        code = RequestCode.GET_BROKER_RUNTIME_INFO
        info = self.wire.ask(self._asker, code, RuntimeInfoRequest(), RuntimeInfo)
        return sum(Readings(info.metrics).number(name) for name in names)

    @property
    def refused(self) -> int:
        return self.counted("ha_refused_chunks_total", "ha_stale_epoch_refusals_total")

    def catch_up(self) -> None:
        """The follower has all that its honest leader has."""
        self.wire.until(lambda: self.leader.acked_epoch == self.leader.epoch)
        self.wire.until(lambda: self.log == self._leaders_log)
        self.wire.until(lambda: self.status.confirmed == self.leader.confirmed)

    @property
    def log(self) -> list[tuple[str, bytes]]:
        """What the follower's disk has of it."""
        return self._log(self.folder, self.status.log_end)

    @property
    def _leaders_log(self) -> list[tuple[str, bytes]]:
        return self._log(self._files.directory, self.leader.end)

    @staticmethod
    def _log(folder: Path, end: int) -> list[tuple[str, bytes]]:
        segments = sorted(path for path in (folder / "commitlog").iterdir() if int(path.name) < end)
        return [(path.name, path.read_bytes()[: end - int(path.name)]) for path in segments]

    def close(self) -> None:
        self._broker.stop()
        self._client.close()
        self._coordinator.stop()
        self._files.close()


@pytest.fixture
def scene(wire, short_tmp_path, monkeypatch):
    # Both ends are in one loop: where that stands still, neither of them is to be called silent.
    for end in plain_client, plain_server:
        monkeypatch.setattr(end, "HEARTBEAT_TIMEOUT_MS", 60_000)
    scene = Scene(wire, short_tmp_path)
    put_bodies(scene.leader.store, ["first"] * 3)
    scene.leader.confirmed = scene.leader.end
    scene.catch_up()
    put_bodies(scene.leader.store, ["not confirmed"] * 3)
    scene.catch_up()
    yield scene
    scene.close()


def refuse(scene: Scene, caplog, what: str, lie: Callable[[], None]) -> None:
    """Has the leader lie, and sees that this changes nothing; then it is honest again."""
    before = scene.status, scene.log
    refused = scene.refused
    promised = scene.counted("ha_promised_epoch")
    caplog.clear()
    lie()
    scene.wire.until(lambda: scene.refused > refused)
    assert scene.refused == refused + 1, what
    said = [line for line in caplog.messages if line.startswith("nothing comes from the leader")]
    assert len(said) == 1, (what, said)
    after = scene.status
    assert not after.connected, what
    assert after.problem in said[0], what
    assert (after.confirmed, after.log_end) == (before[0].confirmed, before[0].log_end), what
    assert scene.log == before[1], what
    assert scene.counted("ha_promised_epoch") in (promised, scene.leader.epoch), what
    scene.leader.be_honest()
    put_bodies(scene.leader.store, [f"after {what}"])
    scene.catch_up()


def changed(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) >= 1
    return data.replace(old, new, 1)


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes((data[position] ^ 16,)) + data[position + 1 :]


def overflowing(header: bytes, number: int) -> bytes:
    """With another number in the place of a known one."""
    return changed(header, msgspec.msgpack.encode(number), msgspec.msgpack.encode(FAR))


WORDS: dict[str, Callable[[Leader, LogChunk, bytes], tuple[bytes, bytes]]] = {
    "random bytes": lambda one, chunk, data: (random.Random(1).randbytes(60), data),
    "nothing": lambda one, chunk, data: (b"", b""),
    "random records": lambda one, chunk, data: (one.header(chunk), random.Random(2).randbytes(500)),
    "a record of zeros": lambda one, chunk, data: (one.header(chunk), bytes(len(data))),
    "a record that is cut": lambda one, chunk, data: (one.header(chunk), data[:-1]),
    "half a head": lambda one, chunk, data: (one.header(chunk), data[:20]),
    "a record twice": lambda one, chunk, data: (one.header(chunk), data + data),
    "a flipped bit of a head": lambda one, chunk, data: (one.header(chunk), flipped(data, 30)),
    "a flipped bit of a body": lambda one, chunk, data: (one.header(chunk), flipped(data, -9)),
    "a huge record": lambda one, chunk, data: (
        one.header(chunk),
        changed(data, len(data).to_bytes(4, "little"), b"\xff" * 4),
    ),
    "a huge chunk": lambda one, chunk, data: (
        one.header(chunk, end=MAX_OFFSET, leader_end=MAX_OFFSET),
        data,
    ),
    "what was there before": lambda one, chunk, data: (
        one.header(one.store.read_raw(CommitLogOffset(0), max_bytes=500)),
        bytes(one.store.read_raw(CommitLogOffset(0), max_bytes=500).data),
    ),
    "a place behind the end": lambda one, chunk, data: (
        one.header(chunk, start=chunk.start + 1),
        data,
    ),
    "a place at the end of all": lambda one, chunk, data: (
        one.header(chunk, start=MAX_OFFSET),
        data,
    ),
    "a place that overflows": lambda one, chunk, data: (
        overflowing(one.header(chunk), chunk.start),
        data,
    ),
    "a log that goes back": lambda one, chunk, data: (
        one.header(chunk, leader_end=chunk.start - 1),
        b"",
    ),
    "less than it sends": lambda one, chunk, data: (
        one.header(chunk, leader_end=chunk.start),
        data,
    ),
    "more confirmed than there is": lambda one, chunk, data: (
        one.header(chunk, confirmed=one.end + 1),
        data,
    ),
    "less confirmed than before": lambda one, chunk, data: (
        one.header(chunk, confirmed=one.confirmed - 1),
        data,
    ),
    "an older epoch": lambda one, chunk, data: (
        one.header(chunk, leader_epoch=one.epoch - 1),
        data,
    ),
    "a newer epoch": lambda one, chunk, data: (one.header(chunk, leader_epoch=MAX_EPOCH), data),
    "records of an older epoch": lambda one, chunk, data: (one.header(chunk, epoch=0), data),
    "records of a newer epoch": lambda one, chunk, data: (
        one.header(chunk, epoch=MAX_EPOCH),
        data,
    ),
}


def test_words_that_cannot_be_are_refused_and_change_nothing(scene, caplog):
    leader = scene.leader
    scene.begin_epoch()
    scene.begin_epoch()  # so that there is an older one
    scene.catch_up()
    for what, lie in WORDS.items():

        def say(lie=lie) -> None:
            put_bodies(leader.store, ["more"])
            chunk = leader.next_chunk()
            leader.word = lie(leader, chunk, bytes(chunk.data))

        refuse(scene, caplog, what, say)


def opened(
    one: Leader,
    mode: int,
    offset: int,
    *,
    epoch: int = 0,
    version: int = REPLICATION_VERSION,
    body: bytes = b"",
) -> Reply:
    return Reply(
        encode_header(OpenReplicationResponse(mode, offset, epoch or one.epoch, version)), (body,)
    )


def copied(one: Leader, **other) -> Reply:
    """A copy that would begin where the log ends; what is there now would go."""
    beginning = msgspec.structs.replace(one.store.beginning(), log_start=one.end, **other)
    return opened(one, COPY, beginning.log_start, body=encode_log_start(beginning))


def queues(*names: str) -> list[QueueStart]:
    return [QueueStart(name, 0, 1) for name in names]


ANSWERS: dict[str, Callable[[Leader], Reply]] = {
    "random bytes": lambda one: Reply(random.Random(3).randbytes(30)),
    "nothing": lambda one: Reply(),
    "another answer": lambda one: Reply(encode_header(one.store.identity())),
    "an unknown mode": lambda one: opened(one, 9, 0),
    "a version that nobody asked for": lambda one: opened(
        one, STREAM, one.end, version=REPLICATION_VERSION + 1
    ),
    "a stream from before": lambda one: opened(one, STREAM, 0),
    "a stream from behind the end": lambda one: opened(one, STREAM, MAX_OFFSET),
    "a place that overflows": lambda one: Reply(
        overflowing(opened(one, STREAM, one.end).header, one.end)
    ),
    "an older epoch": lambda one: opened(one, TRUNCATE, one.confirmed, epoch=one.epoch - 2),
    "a newer epoch": lambda one: opened(one, STREAM, one.end, epoch=one.epoch + 1),
    "the last epoch": lambda one: opened(one, TRUNCATE, one.confirmed, epoch=MAX_EPOCH),
    "a cut behind the end": lambda one: opened(one, TRUNCATE, MAX_OFFSET),
    "a cut of what is confirmed": lambda one: opened(one, TRUNCATE, 0),
    "a cut within a record": lambda one: opened(one, TRUNCATE, one.confirmed + 1),
    "a copy of random bytes": lambda one: opened(
        one, COPY, 0, body=random.Random(4).randbytes(1_000)
    ),
    "half a copy": lambda one: opened(
        one, COPY, 0, body=encode_log_start(one.store.beginning())[:-1]
    ),
    "a copy of what is confirmed": lambda one: opened(
        one, COPY, 0, body=encode_log_start(one.store.beginning())
    ),
    "a copy of another store": lambda one: copied(one, store_id=7),
    "a copy with another key": lambda one: copied(one, key=bytes(32)),
    "a copy with other segments": lambda one: copied(one, segment_bytes=4 * SEGMENT_BYTES),
    "epochs in disorder": lambda one: copied(one, epochs=[EpochStart(2, 0), EpochStart(1, 9)]),
    "places of epochs in disorder": lambda one: copied(
        one, epochs=[EpochStart(1, 9), EpochStart(2, 0)]
    ),
    "epochs that begin later": lambda one: copied(one, epochs=[EpochStart(1, MAX_OFFSET)]),
    "far too many epochs": lambda one: copied(one, epochs=[EpochStart(1, 0)] * 100_000),
    "a path for a topic": lambda one: copied(one, queues=queues("../../etc")),
    "a queue twice": lambda one: copied(one, queues=queues("t", "t")),
}


def test_answers_that_cannot_be_are_refused_and_change_nothing(scene, caplog):
    scene.begin_epoch()
    scene.catch_up()
    for what, lie in ANSWERS.items():

        def answer(lie=lie) -> None:
            scene.leader.answer = lie
            scene.begin_epoch()

        refuse(scene, caplog, what, answer)


def test_an_answer_that_is_far_too_large_takes_no_memory(scene, caplog):
    """A copy may tell of two million queues, and a frame has 32 MiB."""
    scene.begin_epoch()
    scene.catch_up()
    one = scene.leader
    start = encode_log_start(one.store.beginning()).removesuffix(b"\x90")  # no queues
    queue, most = msgspec.msgpack.encode(queues("t")[0]), MAX_FRAME_BYTES // 8
    many = b"".join((start, b"\xdd", most.to_bytes(4), queue * most))

    def answer() -> None:
        one.answer = lambda one: opened(one, COPY, 0, body=many)
        scene.begin_epoch()

    tracemalloc.start()
    try:
        refuse(scene, caplog, "far too many queues", answer)
        # The leader's frame, the follower's buffer, which grows by an eighth, and no queues.
        assert tracemalloc.get_traced_memory()[1] < 2.25 * len(many)
    finally:
        tracemalloc.stop()
