"""A broker without sockets, files and threads: its handlers around a memory store."""

from __future__ import annotations

import itertools

import pytest
from harness.batches import PRODUCER_ID, PRODUCER_KEY
from harness.peers import KeptAnswers
from harness.served import Guard, dispatched, features_on

from mqmesh.batch.record_batch import check_stored, decode_messages, encode_batch
from mqmesh.errors import MQMeshError, OffsetOutOfRange
from mqmesh.message import Message
from mqmesh.protocol.command import ONEWAY, decode_frame, decode_header, encode_frame, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import BatchOutcome, decode_outcomes, encode_send
from mqmesh.protocol.pulling import PullRequest, PullResponse
from mqmesh.protocol.request import Request
from mqmesh.roles.broker.config import BrokerConfig, BrokerStoreConfig
from mqmesh.storage.interface import FlushDiskType, GetResult, GetStatus
from mqmesh.storage.memory import MemoryStore
from mqmesh.testing.clock import ManualClock
from mqmesh.units import GIB, CommitLogOffset, QueueOffset


class SlowDisk(MemoryStore):
    """A memory store whose disk is as far as a test says; until then nobody sees more."""

    synced: int | None = None
    failure: MQMeshError | None = None

    def put(self, batches, store_timestamp, **options):
        if self.failure is not None:
            raise self.failure
        return super().put(batches, store_timestamp)

    def durable_offset(self):
        if self.synced is None:
            return super().durable_offset()
        return CommitLogOffset(self.synced)

    def get(self, topic, queue_id, queue_offset, **options):
        if self.synced is not None and self.synced < super().durable_offset():
            here = QueueOffset(queue_offset)
            return GetResult(GetStatus.NO_NEW_MESSAGE, here, QueueOffset(0), here)
        return super().get(topic, queue_id, queue_offset, **options)

    def read_at(self, commitlog_offset):
        if self.synced is not None and commitlog_offset >= self.synced:
            raise OffsetOutOfRange("planned: the disk has not got so far")
        return super().read_at(commitlog_offset)


class Stage:
    """Plays the command server and the loop for a broker's handlers."""

    def __init__(self, **settings) -> None:
        self.is_kept = settings.pop("is_kept", False)
        flush = settings.pop("flush_disk_type", FlushDiskType.ASYNC_FLUSH)
        self.rows = settings.pop("rows", None)
        segment = settings.pop("segment_bytes", 1 * GIB)
        storage = BrokerStoreConfig(
            backend="memory", flush_disk_type=flush, mapped_file_size_commit_log=segment
        )
        self.config = BrokerConfig(storage=storage, **settings)
        self.clock = ManualClock()
        self.store = SlowDisk(storage, clock=self.clock)
        self.kept = KeptAnswers()
        self.answers, self.notices = self.kept.answers, self.kept.notices
        self.peer = self.kept.peer
        self.saved: list[object] = []
        self._opaque = itertools.count(1)
        self._sequence = itertools.count(0, 1_000)
        self.index = None
        self.epoch = 0
        self.leadership = None
        self.guard = Guard()
        self.restart()

    def restart(self) -> None:
        """Builds all features anew, on the same store."""
        self.features = features_on(
            self.store,
            self.config,
            self.clock,
            self.guard,
            is_kept=self.is_kept,
            epoch=self.epoch,
            leadership=self.leadership,
            index=self.index,
            rows=self.rows,
        )
        self.features.core.state.write = self._write
        self.dispatch = dispatched(self.features)
        self.handlers = self.dispatch.handlers

    def begin(self, code, header=b"", *body, peer=b"peer", oneway=False) -> int:
        """Hands a request in; returns the number its answer will stand under."""
        data = header if isinstance(header, bytes) else encode_header(header)
        opaque = next(self._opaque)
        frame = encode_frame(code, opaque, *body, header=data, flags=ONEWAY if oneway else 0)
        request = Request(self.peer(peer), decode_frame(frame))
        try:
            reply = self.handlers[code](request)
        except MQMeshError as error:
            self.answers[opaque] = error
        else:
            if reply is not None:
                self.answers[opaque] = reply
        return opaque

    def end_tick(self) -> None:
        self.features.writes.write()
        self.features.pulling.begin_turn()
        self.features.delivery.serve()
        self.features.membership.send_notices()

    def ask(self, code, header=b"", kind=None, **options):
        """A request and the tick's end; the decoded answer, or its error raised."""
        opaque = self.begin(code, header, **options)
        self.end_tick()
        return self.answer(opaque, kind)

    def answer(self, opaque, kind=None):
        answer = self.answers[opaque]
        if isinstance(answer, Exception):
            raise answer
        return decode_header(kind, answer.header) if kind else answer

    def batch(
        self,
        topic="t",
        queue_id=0,
        *,
        bodies=(b"body",),
        tag=None,
        messages=(),
        producer_id=PRODUCER_ID,
        **options,
    ):
        messages = messages or [Message(topic, body, tag=tag) for body in bodies]
        options.setdefault("first_sequence", next(self._sequence))
        return encode_batch(
            messages,
            topic=topic,
            queue_id=queue_id,
            producer_id=producer_id,
            born_timestamp=1,
            **options,
        )

    def begin_send(self, *batches: bytes, **options) -> int:
        header = encode_send(3_000, len(batches), PRODUCER_KEY)
        return self.begin(RequestCode.SEND_MESSAGE, header, *batches, **options)

    def send(self, *batches: bytes) -> list[BatchOutcome]:
        opaque = self.begin_send(*batches)
        self.end_tick()
        return self.outcomes(opaque)

    def outcomes(self, opaque: int) -> list[BatchOutcome]:
        reply = self.answer(opaque)
        return decode_outcomes(memoryview(reply.header), memoryview(b"".join(reply.body)))

    def begin_pull(self, topic="t", queue_id=0, queue_offset=0, *, peer=b"peer", **options) -> int:
        pull = PullRequest("g", topic, queue_id, queue_offset, **options)
        return self.begin(RequestCode.PULL_MESSAGE, pull, peer=peer)

    def pull(self, *arguments, **options) -> tuple[PullResponse, list[bytes]]:
        return self.pulled(self.begin_pull(*arguments, **options))

    def pulled(self, opaque: int) -> tuple[PullResponse, list[bytes]]:
        """What a pull got: the answer, and the bodies of the messages in it."""
        reply = self.answer(opaque)
        data, position, bodies = b"".join(reply.body), 0, []
        while position < len(data):
            header = check_stored(data, position)
            messages = decode_messages(data, header, position=position)
            bodies += [message.body for message in messages]
            position += header.total_size
        return decode_header(PullResponse, reply.header), bodies

    def _write(self):
        features = self.features
        tables = {
            "topics": features.state.topics,
            "groups": features.state.group_table,
            "offsets": features.state.committed,
        }
        self.saved += [name for name, table in tables.items() if table.changed]
        return type(features.core.state).write(features.core.state)


@pytest.fixture
def make_stage():
    """Makes a broker without a process; settings by name."""
    return Stage


@pytest.fixture
def stage():
    """A broker without a process, as configured by default."""
    return Stage()
