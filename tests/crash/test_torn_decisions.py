"""The broker dies while it decides about half messages, or delivers delayed ones.

A decision and what it commits, and a delivery and the record of it, are there or not: what is said
again then is done once.
"""

from __future__ import annotations

from collections import Counter

from harness.batches import PRODUCER_ID, PRODUCER_KEY
from harness.broker_on_files import BrokerOnFiles
from harness.kill_points import KillPoints
from harness.store_files import StoreFiles, deliverable, put_bodies

from mqmesh.batch.delayed_batch import ANY_TIME_QUEUE, RECORD_QUEUE, DelayedMeta, pack_due_times
from mqmesh.batch.half_batch import half_parts
from mqmesh.batch.payload import encode_payload
from mqmesh.batch.record_batch import Attributes, batch_parts, decode_messages, read_header
from mqmesh.batch.schedule_record import ScheduleAction, decode_record, encode_runs
from mqmesh.message import SCHEDULE_TOPIC, Message
from mqmesh.protocol.command import decode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import decode_outcomes, encode_send
from mqmesh.protocol.schedule import (
    DeliverDueRequest,
    OpenScheduleRequest,
    OpenScheduleResponse,
)
from mqmesh.protocol.transactions import (
    Decision,
    End,
    EndOutcome,
    EndTransactionRequest,
    decode_end_outcomes,
    encode_ends,
)
from mqmesh.storage.interface import GetStatus
from mqmesh.testing.store_contract import batches_in

TOPIC = "t"
BODIES = ["a", "b", "c", "d"]


class Broker(BrokerOnFiles):
    """A broker that is sent one batch of each kind, and told what to do about it."""

    def send(self, *parts: bytes) -> int:
        """Store a batch; returns its commit-log offset."""
        header = encode_send(3_000, 1, PRODUCER_KEY)
        reply = self.ask(RequestCode.SEND_MESSAGE, header, *parts)
        (outcome,) = decode_outcomes(memoryview(reply.header), memoryview(b"".join(reply.body)))
        assert outcome.code == 0, outcome.remark
        return outcome.commitlog_offset

    def bodies(self) -> Counter[str]:
        """Messages of the topic, with how often they are there."""
        return Counter(deliverable(self.store, TOPIC).values())

    # ---- Half messages ---------------------------------------------------------------

    def send_halves(self) -> None:
        payload = encode_payload([Message(TOPIC, body.encode()) for body in BODIES])
        self.send(
            *half_parts(
                payload,
                producer_group="pg",
                real_topic=TOPIC,
                real_queue_id=0,
                has_immunity=False,
                producer_id=PRODUCER_ID,
                first_sequence=0,
                born_timestamp=1,
            )
        )

    def decide(self) -> list[EndOutcome]:
        """Commit all messages but the third, which is rolled back: in one turn."""
        ends = [
            End(0, PRODUCER_ID, 0, first, count, int(decision), PRODUCER_KEY)
            for first, count, decision in (
                (0, 2, Decision.COMMIT),
                (2, 1, Decision.ROLLBACK),
                (3, 1, Decision.COMMIT),
            )
        ]
        wanted = EndTransactionRequest("pg")
        reply = self.ask(RequestCode.END_TRANSACTION, wanted, encode_ends(ends))
        return decode_end_outcomes(b"".join(reply.body), len(ends))

    @property
    def pending(self) -> int:
        return self.features.state.half_messages.table.pending_count

    # ---- Delayed messages --------------------------------------------------------------

    def send_delayed(self) -> int:
        payload = encode_payload([Message(TOPIC, body.encode()) for body in BODIES])
        meta = DelayedMeta(TOPIC, due_times=pack_due_times([1] * len(BODIES)))
        return self.send(
            *batch_parts(
                payload,
                topic=TOPIC,
                queue_id=0,
                producer_id=PRODUCER_ID,
                first_sequence=0,
                born_timestamp=1,
                attributes=int(Attributes.HAS_DELAY),
                meta=meta,
            )
        )

    def waiting(self) -> list[tuple[int, int, int]]:
        """Runs of messages that no record says were delivered."""
        place = self._batches(ANY_TIME_QUEUE)[0][0]
        over = {
            (offset, ordinal)
            for _, data in self._batches(RECORD_QUEUE)
            for record in decode_messages(data, read_header(data))
            for offset, first, count in decode_record(record.body)[1]
            for ordinal in range(first, first + count)
        }
        return [(place, at, 1) for at in range(len(BODIES)) if (place, at) not in over]

    def _batches(self, queue_id: int) -> list[tuple[int, bytes]]:
        found = self.store.get(SCHEDULE_TOPIC, queue_id, 0, max_bytes=1 << 20)
        if found.status is not GetStatus.FOUND:
            return []
        return [(read_header(one).commitlog_offset, one) for one in batches_in(found)]

    def deliver(self) -> None:
        """Deliver what waits, as the schedule service does after a start."""
        reply = self.ask(RequestCode.OPEN_SCHEDULE, OpenScheduleRequest("service"))
        session = decode_header(OpenScheduleResponse, memoryview(reply.header)).session
        if runs := self.waiting():
            wanted = DeliverDueRequest(session, int(ScheduleAction.DELIVER))
            self.ask(RequestCode.DELIVER_DUE, wanted, encode_runs(runs))


def test_what_is_decided_is_committed_once_wherever_the_broker_dies(
    files: StoreFiles, kill_points: KillPoints
) -> None:
    broker = Broker(files)
    broker.send_halves()
    kill_points.start(files, tuple)
    assert set(broker.decide()) == {EndOutcome.ENDED}
    put_bodies(broker.store, ["behind"], topic="other")
    committed, found = Counter(["a", "b", "d"]), set()
    for copy, _ in kill_points.stop():
        started = Broker(copy)
        found.add((started.pending, tuple(started.bodies())))
        # The producer says it again, since it got no answer.
        assert set(started.decide()) <= {EndOutcome.ENDED, EndOutcome.ENDED_BEFORE}
        assert (started.pending, started.bodies()) == (0, committed)
        started.close()
    assert found == {(4, ()), (0, ("a", "b", "d"))}


def test_what_is_due_is_delivered_once_wherever_the_broker_dies(
    files: StoreFiles, kill_points: KillPoints
) -> None:
    broker = Broker(files)
    broker.send_delayed()
    kill_points.start(files, tuple)
    broker.deliver()
    put_bodies(broker.store, ["behind"], topic="other")
    found = set()
    for copy, _ in kill_points.stop():
        started = Broker(copy)
        found.add((len(started.waiting()), tuple(started.bodies())))
        started.deliver()
        assert (started.waiting(), started.bodies()) == ([], Counter(BODIES))
        started.close()
    assert found == {(4, ()), (0, tuple(BODIES))}
