"""Carries batches to brokers, in the engine's thread, and their outcomes back."""

import logging
import threading
from collections.abc import Callable
from typing import Final

from mqmesh.errors import (
    BrokerError,
    InvalidArgument,
    LocalProtocolError,
    MQMeshError,
    RemoteProtocolError,
    RequestTimeout,
)
from mqmesh.message import MessageQueue
from mqmesh.protocol.codes import RequestCode, ResponseCode, error_of
from mqmesh.protocol.command import Command
from mqmesh.protocol.messaging import (
    MAX_BATCHES_PER_REQUEST,
    BatchOutcome,
    decode_outcomes,
    encode_send,
)
from mqmesh.record_batch import Attributes, encode_batch
from mqmesh.sdk.client import ClientEngine
from mqmesh.sdk.options import born_host
from mqmesh.sdk.retry import BACKOFF_MS, SendFailure, judge
from mqmesh.sdk.send_buffer import Lane, SendBuffer
from mqmesh.sdk.send_result import PendingBatch

MAX_REQUEST_BYTES: Final = 1024 * 1024
"""A request takes no further batch beyond it."""

_OK: Final = int(ResponseCode.SUCCESS)
_log = logging.getLogger(__name__)

ChooseLane = Callable[[str, frozenset[str]], Lane | None]
"""Gives another lane of a topic, not on the brokers named, or None."""


class BatchCodec:
    """Numbers the messages of one producer instance and encodes its batches.

    Args:
        producer_id: Random id of the instance, u64.
        compress_over_bytes: See ``record_batch.encode_batch``.
    """

    def __init__(self, producer_id: int, compress_over_bytes: int | None) -> None:
        self.producer_id = producer_id
        self._compress_over_bytes = compress_over_bytes
        self._born_host = born_host()
        self._lock = threading.Lock()
        self._next_sequence = 0

    def encode(self, batch: PendingBatch, now_ms: int) -> bytes:
        """The batch's bytes; encoded once a queue, numbered once for ever.

        Raises:
            InvalidArgument: The messages do not fit into one batch.
        """
        if batch.encoded is not None:
            return batch.encoded
        messages = batch.messages
        if batch.first_sequence < 0:
            batch.producer_id = self.producer_id
            with self._lock:
                batch.first_sequence = self._next_sequence
                self._next_sequence += len(messages)
        try:
            batch.encoded = encode_batch(
                messages,
                topic=batch.queue.topic,
                queue_id=batch.queue.queue_id,
                producer_id=batch.producer_id,
                first_sequence=batch.first_sequence,
                born_timestamp=now_ms,
                born_host=self._born_host,
                attributes=0 if batch.wait_store else Attributes.NO_WAIT_STORE,
                compress_over_bytes=self._compress_over_bytes,
            )
        except LocalProtocolError as error:
            raise InvalidArgument(f"the messages cannot be sent as one batch: {error}") from error
        return batch.encoded


class Sender:
    """Sends what the buffer has ready; a few requests in flight a broker.

    Args:
        engine: The client's engine; all methods are for its thread.
        buffer: Where batches come from.
        codec: Encodes them.
        choose_lane: For retries at another broker.
        max_in_flight: Requests in flight a broker. More would not be faster: what waits
            meanwhile makes the next request larger.
        on_sent: Told broker, latency in ms, and success of each request.
        retry_not_stored: Also retry, at another broker, what a broker did not store safely.
    """

    def __init__(
        self,
        engine: ClientEngine,
        buffer: SendBuffer,
        codec: BatchCodec,
        choose_lane: ChooseLane,
        *,
        max_in_flight: int,
        on_sent: Callable[[str, int, bool], None],
        retry_not_stored: bool = False,
    ) -> None:
        self._engine = engine
        self._buffer = buffer
        self._codec = codec
        self._choose_lane = choose_lane
        self._max_in_flight = max_in_flight
        self._on_sent = on_sent
        self._retry_not_stored = retry_not_stored
        self._in_flight: dict[str, int] = {}
        self._scheduled = False
        self.unfinished = 0

    def has_room(self, broker_name: str) -> bool:
        """True when another request may go to a broker now; from any thread, a hint only."""
        return self._in_flight.get(broker_name, 0) < self._max_in_flight

    def schedule(self) -> None:
        """Makes the engine's thread pump soon; from any thread."""
        if not self._scheduled:
            self._scheduled = True
            self._engine.post(self.pump)

    def pump(self) -> None:
        """Sends what is ready and may be sent."""
        self._scheduled = False
        for broker_name in self._buffer.ready_brokers():
            while self.has_room(broker_name):
                taken = self._buffer.take(broker_name, MAX_REQUEST_BYTES, MAX_BATCHES_PER_REQUEST)
                if not taken:
                    break
                self.unfinished += len(taken)
                self._send(broker_name, taken)

    def adopt(self, lane: Lane, batch: PendingBatch, error: MQMeshError) -> None:
        """Takes over a batch whose first try, past the buffer, failed; its lane is claimed."""
        self._buffer.account(batch)
        self.unfinished += 1
        batch.attempts = 1
        self._failed(lane, batch, error)

    def _send(self, broker_name: str, taken: list[tuple[Lane, PendingBatch]]) -> None:
        now_ms = self._engine.loop.clock.monotonic_ms()
        wall_ms = self._engine.loop.clock.wall_ms()
        items: list[tuple[Lane, PendingBatch]] = []
        parts: list[bytes] = []
        timeout_ms = 0
        for lane, batch in taken:
            left_ms = batch.deadline_ms - now_ms
            if left_ms <= 0:
                self._end(lane, batch, None, _too_late(batch.queue))
                continue
            try:
                parts.append(self._codec.encode(batch, wall_ms))
            except InvalidArgument as error:
                self._end(lane, batch, None, error)
                continue
            batch.attempts += 1
            timeout_ms = max(timeout_ms, left_ms)
            items.append((lane, batch))
        if not items:
            return
        self._in_flight[broker_name] = self._in_flight.get(broker_name, 0) + 1
        self._engine.request(
            broker_name,
            RequestCode.SEND_MESSAGE,
            lambda answer: self._answered(broker_name, items, now_ms, answer),
            *parts,
            header=encode_send(timeout_ms, len(parts)),
            timeout_ms=timeout_ms,
        )

    def _answered(
        self,
        broker_name: str,
        items: list[tuple[Lane, PendingBatch]],
        sent_ms: int,
        answer: Command | MQMeshError,
    ) -> None:
        self._in_flight[broker_name] -= 1
        latency_ms = self._engine.loop.clock.monotonic_ms() - sent_ms
        if not isinstance(answer, MQMeshError):
            try:
                outcomes = decode_outcomes(answer.header, answer.body)
                if len(outcomes) != len(items):
                    raise RemoteProtocolError(
                        f"{len(outcomes)} outcomes for {len(items)} batches from {broker_name}"
                    )
            except RemoteProtocolError as error:
                answer = error
        if isinstance(answer, MQMeshError):
            self._on_sent(broker_name, latency_ms, False)
            for lane, batch in items:
                self._failed(lane, batch, answer)
        else:
            self._on_sent(broker_name, latency_ms, True)
            for (lane, batch), outcome in zip(items, outcomes, strict=True):
                self._take_outcome(lane, batch, outcome)
        self.pump()

    def _take_outcome(self, lane: Lane, batch: PendingBatch, outcome: BatchOutcome) -> None:
        if outcome.code != _OK:
            error = error_of(outcome.code, outcome.remark, outcome.retry_after_ms)
            self._failed(lane, batch, error)
        elif (
            outcome.status
            and self._retry_not_stored
            and not batch.bound
            and batch.attempts <= batch.retries
            and self._move(lane, batch)
        ):
            return
        else:
            self._end(lane, batch, outcome, None)

    def _failed(self, lane: Lane, batch: PendingBatch, error: MQMeshError) -> None:
        verdict = judge(error, attempts=batch.attempts, retries=batch.retries)
        now_ms = self._engine.loop.clock.monotonic_ms()
        if verdict is SendFailure.GIVE_UP or batch.deadline_ms <= now_ms or self._engine.closed:
            self._end(lane, batch, None, error)
            return
        if verdict is SendFailure.WAIT:
            batch.attempts -= 1
        if isinstance(error, BrokerError):
            self._engine.refresh([batch.queue.topic])
        if not batch.bound and self._move(lane, batch):
            return
        # The lane stays in flight while its first batch waits, so that nothing overtakes it.
        delay_ms = BACKOFF_MS if isinstance(error, BrokerError) else 0
        self._engine.loop.call_later(delay_ms, lambda: self._again(lane, batch))

    def _again(self, lane: Lane, batch: PendingBatch) -> None:
        self.unfinished -= 1
        self._buffer.put_back(lane, batch)
        self._buffer.release(lane)
        self.pump()

    def _move(self, lane: Lane, batch: PendingBatch) -> bool:
        other = self._choose_lane(batch.queue.topic, frozenset((batch.queue.broker_name,)))
        if other is None or other.queue.broker_name == batch.queue.broker_name:
            return False
        self.unfinished -= 1
        self._buffer.release(lane)
        self._buffer.put_back(other, batch)
        self.schedule()
        return True

    def _end(
        self,
        lane: Lane,
        batch: PendingBatch,
        outcome: BatchOutcome | None,
        error: MQMeshError | None,
    ) -> None:
        self.unfinished -= 1
        self._buffer.release(lane)
        self._buffer.settle(batch)
        try:
            batch.finish(outcome, error)
        except Exception:
            _log.exception("a callback of a send failed")


def _too_late(queue: MessageQueue) -> RequestTimeout:
    return RequestTimeout(
        f"the message for {queue.topic}/{queue.broker_name}/{queue.queue_id} was not stored "
        "within its timeout (send_msg_timeout_ms)"
    )
