"""A broker without a process that has a table."""

from __future__ import annotations

import struct

import pytest
from harness.batches import PRODUCER_ID

from mqmesh.batch.delayed_batch import ExpectingMeta
from mqmesh.batch.payload import encode_payload
from mqmesh.batch.record_batch import Attributes, batch_parts
from mqmesh.message import Message
from mqmesh.protocol.command import decode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.route import TopicConfig
from mqmesh.protocol.tables import OPERATIONS, ReadTableRequest, TableEntries
from mqmesh.storage.table_rows import MemoryRows


class TableScene:
    """A broker, and the keys of its table ``kv``."""

    def __init__(self, stage, history=1) -> None:
        self.stage = stage
        self.sequence = 0
        stage.features.load()
        self.make("kv", history)

    @property
    def feature(self):
        return self.stage.features.tables

    @property
    def tables(self):
        return self.feature.tables

    def make(self, name, history=1):
        config = TopicConfig(name, 1, 1, history=history)
        self.stage.features.state.topics.update(config, self.stage.clock.wall_ms())

    def batch(self, *pairs, expected=None, ttl_ms=0, sequence=None, topic="kv"):
        """A batch of puts; a value of None is a tombstone."""
        messages = [
            Message(
                topic,
                b"-" if value is None else value,
                keys=[key],
                properties={"KV_OPERATION": "DEL"} if value is None else None,
            )
            for key, value in pairs
        ]
        payload = encode_payload(messages)
        attributes, packed, expires_ms = 0, b"", 0
        if expected is not None:
            attributes |= Attributes.HAS_EXPECTED
            packed = struct.pack(f"<{len(expected)}q", *expected)
        if ttl_ms:
            attributes |= Attributes.HAS_EXPIRY
            expires_ms = self.stage.clock.wall_ms() + ttl_ms
        if sequence is None:
            sequence = self.sequence
            self.sequence += len(messages)
        meta = ExpectingMeta(topic, expires_ms=expires_ms, expected=packed)
        parts = batch_parts(
            payload,
            topic=topic,
            queue_id=0,
            producer_id=PRODUCER_ID,
            first_sequence=sequence,
            born_timestamp=1,
            attributes=attributes,
            meta=meta if attributes else None,
        )
        return b"".join(parts)

    def put(self, *pairs, **options):
        """Outcome of a batch."""
        (outcome,) = self.stage.send(self.batch(*pairs, **options))
        return outcome

    def read(self, *keys, **options):
        """Key, revision, operation and value of each entry; the whole answer is kept."""
        request = ReadTableRequest("kv", list(keys), **options)
        reply = self.stage.ask(RequestCode.READ_TABLE, request)
        self.answer = decode_header(TableEntries, reply.header)
        body, place, found = b"".join(reply.body), 0, []
        for one in self.answer.entries:
            value = body[place : place + one.size]
            place += one.size
            found.append((one.key, one.revision, OPERATIONS[one.operation].value, value))
        assert place == len(body)
        return found

    def read_of(self, topic):
        return self.stage.ask(RequestCode.READ_TABLE, ReadTableRequest(topic))

    def restart(self):
        """Builds all features anew on the same log, with empty rows."""
        self.stage.restart()
        self.stage.features.load()
        self.feature.tick(0)

    def values(self, **options):
        return {key: value for key, _, _, value in self.read(**options)}

    def pass_ms(self, ms):
        """Lets time pass, and has the broker do what it does each second."""
        self.stage.clock.advance(ms)
        # As the write turn says it: nothing has waited for so long.
        self.stage.features.state.admission.readable_ms = self.stage.clock.monotonic_ms()
        self.feature.sample()
        self.stage.end_tick()


@pytest.fixture
def make_scene():
    return TableScene


@pytest.fixture
def scene(stage):
    return TableScene(stage)


@pytest.fixture
def kept(make_stage):
    """A table whose rows outlive the features of its broker, as a file does."""
    scene = TableScene(make_stage(is_kept=True, rows=MemoryRows()))
    scene.stage.end_tick()
    scene.feature.tick(0)
    return scene


@pytest.fixture
def ticking(monkeypatch):
    """Has the monotonic clock of a scene go on by so many ms whenever somebody looks at it."""

    def begin(scene, step_ms):
        clock = scene.stage.clock

        def look():
            clock.advance(step_ms)
            return type(clock).monotonic_ms(clock)

        monkeypatch.setattr(clock, "monotonic_ms", look)

    return begin
