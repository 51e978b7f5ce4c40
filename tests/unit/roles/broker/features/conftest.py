"""A scene for tests of transactions: a broker without sockets, a producer, members of its group."""

from __future__ import annotations

from random import Random

import pytest
from harness.batches import PRODUCER_ID, PRODUCER_KEY

from mqmesh.batch.half_batch import half_parts, have_immunity
from mqmesh.batch.payload import encode_payload
from mqmesh.batch.record_batch import check_stored, decode_messages, read_header
from mqmesh.message import Message, format_message_id
from mqmesh.protocol.command import decode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import HeartbeatRequest
from mqmesh.protocol.transactions import (
    CheckTransactionState,
    Decision,
    End,
    EndHalfMessageRequest,
    EndOutcome,
    EndTransactionRequest,
    decode_end_outcomes,
    encode_ends,
)
from mqmesh.roles.broker.features.transactions.check_timetable import TransactionSettings
from mqmesh.roles.broker.features.transactions.half_messages import PendingHalfMessages

PRODUCER = PRODUCER_ID


class Scene:
    """A broker, a producer of half messages, and a member of its group."""

    def __init__(self, stage) -> None:
        self.stage = stage
        self.sequence = 0
        self.recover(stage.features.state.half_messages, None)

    def settings(self) -> TransactionSettings:
        config = self.stage.config
        return TransactionSettings(
            timeout_ms=config.transaction_timeout_ms,
            check_interval_ms=config.transaction_check_interval_ms,
            check_max=config.transaction_check_max,
            pending_max=config.transaction_pending_max,
        )

    @property
    def desk(self) -> PendingHalfMessages:
        return self.stage.features.state.half_messages

    def half(self, *bodies: bytes, topic="t", group="pg", **place) -> int:
        """Sends a half batch; returns its queue offset in the half topic."""
        outcome = self.send_half(*bodies, topic=topic, group=group, **place)
        assert outcome.code == 0, outcome.remark
        return outcome.base_queue_offset

    def send_half(
        self, *bodies, topic="t", group="pg", queue_id=0, seconds=None, sequence=None, **wrong
    ):
        properties = (
            {"CHECK_IMMUNITY_TIME_IN_SECONDS": str(seconds)} if seconds is not None else None
        )
        messages = [Message(topic, body, properties=properties) for body in bodies]
        first = self.sequence if sequence is None else sequence
        self.sequence = max(self.sequence, first + len(bodies))
        parts = half_parts(
            encode_payload(messages),
            producer_group=group,
            real_topic=topic,
            real_queue_id=queue_id,
            has_immunity=have_immunity(messages),
            producer_id=PRODUCER,
            first_sequence=first,
            born_timestamp=1,
            **wrong,
        )
        return self.stage.send(b"".join(parts))[0]

    def begin_end(
        self, *ends: tuple[int, int, int, int, Decision], proof: bytes = PRODUCER_KEY
    ) -> int:
        body = encode_ends(
            [End(base, PRODUCER, seq, first, n, int(d), proof) for base, seq, first, n, d in ends]
        )
        return self.stage.begin(RequestCode.END_TRANSACTION, EndTransactionRequest("pg"), body)

    def finish(self) -> None:
        self.stage.features.transactions.finish()
        self.stage.end_tick()

    def end(self, *ends, **options) -> list[EndOutcome]:
        opaque = self.begin_end(*ends, **options)
        self.finish()
        reply = self.stage.answer(opaque)
        return decode_end_outcomes(b"".join(reply.body), len(ends))

    def end_by_hand(self, base: int, decision: Decision) -> list[EndOutcome]:
        """`mqmesh tx` ends the first message of a batch, whose first sequence is the base."""
        wanted = EndHalfMessageRequest(format_message_id(PRODUCER, base), decision)
        opaque = self.stage.begin(RequestCode.END_HALF_MESSAGE, wanted)
        self.finish()
        return decode_end_outcomes(b"".join(self.stage.answer(opaque).body), 1)

    def bodies(self, topic="t", queue_id=0) -> list[bytes]:
        return [message.body for message in self.messages(topic, queue_id)]

    def messages(self, topic="t", queue_id=0):
        found, offset = [], 0
        while True:
            result = self.stage.store.get(topic, queue_id, offset, max_bytes=1 << 20)
            if not result.data:
                return found
            data, position = b"".join(result.data), 0
            while position < len(data):
                header = check_stored(data, position)
                found += decode_messages(data, header, position=position)
                position += header.total_size
            offset = result.next_queue_offset

    def join(self, peer=b"member", group="pg") -> None:
        heartbeat = HeartbeatRequest(peer.decode(), [group])
        self.stage.ask(RequestCode.HEART_BEAT, heartbeat, peer=peer)

    def tick(self, ms=100) -> None:
        self.stage.clock.advance(ms)
        self.stage.features.transactions.tick(self.stage.clock.monotonic_ms())
        self.finish()

    def asked(self) -> list[tuple[CheckTransactionState, list[bytes]]]:
        """What was asked since the last call, with the bodies of the messages."""
        found = []
        for notice in self.stage.notices:
            if notice[1] == RequestCode.CHECK_TRANSACTION_STATE:
                question = decode_header(CheckTransactionState, notice[2])
                data = b"".join(notice[3:])
                messages = decode_messages(data, read_header(data))
                wanted = [messages[one - question.first_ordinal].body for one in question.ordinals]
                found.append((question, wanted))
        self.stage.notices.clear()
        return found

    def restart(self, document: bytes | None = None) -> None:
        """A broker on the same store that knows nothing but that."""
        desk = PendingHalfMessages(self.settings(), Random(2))
        self.recover(desk, document)
        for name in desk.__dict__:
            setattr(self.desk, name, getattr(desk, name))

    def recover(self, desk: PendingHalfMessages, document: bytes | None) -> None:
        """Has a desk take up what the store has."""
        desk.recover(
            self.stage.store,
            document,
            wall_ms=self.stage.clock.wall_ms(),
            now_ms=self.stage.clock.monotonic_ms(),
        )


@pytest.fixture
def make_scene(make_stage):
    """Makes a broker without a process; settings by name."""
    return lambda **settings: Scene(make_stage(**settings))


@pytest.fixture
def scene(make_scene):
    """A broker without a process, as configured by default."""
    return make_scene()
