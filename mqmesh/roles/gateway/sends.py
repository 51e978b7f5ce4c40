"""Sends of RocketMQ's producers: those of one turn for one queue are one record batch."""

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

import msgspec

from mqmesh.batch.delayed_batch import DelayedMeta, pack_due_times
from mqmesh.batch.half_batch import half_parts, have_immunity
from mqmesh.batch.payload import COMPRESS_OVER_BYTES, encode_payload
from mqmesh.batch.record_batch import Attributes, batch_parts
from mqmesh.clock import Clock
from mqmesh.errors import (
    EndpointUnreachable,
    InvalidArgument,
    MQMeshError,
    NotMaster,
    RemoteProtocolError,
    RequestTimeout,
    SystemBusy,
)
from mqmesh.message import Message, MessageQueue
from mqmesh.producer_key import producer_id_of
from mqmesh.protocol.codes import ResponseCode, error_of
from mqmesh.protocol.command import Command
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import (
    MAX_BATCHES_PER_REQUEST,
    BatchOutcome,
    decode_outcomes,
    encode_send,
)
from mqmesh.sdk.client.outbox import Effects, OutgoingRequest, RequestOutbox
from mqmesh.sdk.producer.retry import BACKOFF_MS, SendFailure, judge
from mqmesh.units import KIB, MIB

MAX_REQUESTS_IN_FLIGHT: Final = 2
"""Requests in flight a broker, as of the SDK's producers."""
MAX_REQUEST_BYTES: Final = 512 * KIB
MAX_BATCH_MESSAGES: Final = 1_000
MAX_BATCH_BYTES: Final = 1 * MIB
"""Bodies of one batch, unless one alone has more."""
SEND_MS: Final = 3_000
"""Time for a send, all tries together: RocketMQ's clients give up then, too."""
RETRIES: Final = 2

_OK: Final = int(ResponseCode.SUCCESS)
_AT_TIMES: Final = -1
_log = logging.getLogger(__name__)


class Stored(msgspec.Struct, frozen=True):
    """Place of messages that were stored.

    Attributes:
        status: ``SendStatus``.
        base_queue_offset: Queue offset of the first message of their batch; of half messages, in
            the half topic.
        commitlog_offset: Commit-log offset of their batch.
        ordinal: Ordinal of the first one in the batch.
        first_sequence: Sequence of the first message of the batch.
    """

    status: int
    base_queue_offset: int
    commitlog_offset: int
    ordinal: int
    first_sequence: int

    @property
    def queue_offset(self) -> int:
        """Queue offset of the first message."""
        return self.base_queue_offset + self.ordinal


OnSent = Callable[[Stored | MQMeshError], None]


class _Waiting(msgspec.Struct, eq=False):
    """Messages of one send, which stay together."""

    messages: list[Message]
    on_sent: OnSent
    size: int
    delay: int
    half_group: str
    deadline_ms: int


class _SendBatch(msgspec.Struct, eq=False):
    """Sends that go as one record batch; encoded once."""

    queue: MessageQueue
    sends: list[_Waiting]
    first_sequence: int
    parts: tuple[bytes, ...]
    deadline_ms: int
    attempts: int = 0
    failure: MQMeshError | None = None


class _Line(msgspec.Struct, eq=False):
    """Sends of one queue: those that wait, and the batch that is tried."""

    waiting: deque[_Waiting]
    batch: _SendBatch | None = None


class Sends:
    """Sends on their way to brokers. One batch of a queue is under way at a time.

    Args:
        outbox: Makes the outbox that carries the requests of this source.
        clock: Clock of the loop.
        key: Key of the gateway as a producer, see ``producer_key``.
        born_host: The gateway, as stored messages name it.
        follow: Called with a refusal that names another master, and the broker group.
        max_waiting_bytes: Bodies that may wait; more are refused.

    Attributes:
        producer_id: Producer id of the gateway.
        messages: Messages that were stored.
        waiting_bytes: Bytes of bodies without an outcome.
    """

    def __init__(
        self,
        outbox: Callable[["Sends"], RequestOutbox],
        clock: Clock,
        key: bytes,
        born_host: str,
        follow: Callable[[NotMaster, str], bool],
        max_waiting_bytes: int,
    ) -> None:
        self._clock = clock
        self._key = key
        self.producer_id = producer_id_of(key)
        self._born_host = born_host
        self._follow = follow
        self._max_waiting_bytes = max_waiting_bytes
        self._next_sequence = 0
        self._lines: dict[MessageQueue, _Line] = {}
        self._ready: dict[str, dict[MessageQueue, None]] = {}
        self.messages = 0
        self.waiting_bytes = 0
        self._outbox = outbox(self)

    def send(
        self,
        queue: MessageQueue,
        messages: list[Message],
        on_sent: OnSent,
        half_group: str = "",
    ) -> None:
        """Send messages, which were checked, to a queue.

        Args:
            queue: Where to.
            messages: At least one; all with one delay level, all with points in time, or neither.
            on_sent: Called once with their place, or why they have none.
            half_group: Producer group whose transaction they belong to; "" for plain ones.

        Raises:
            SystemBusy: Too much waits already.
        """
        size = sum(len(one.body) for one in messages)
        self.hold(size)
        line = self._lines.get(queue)
        if line is None:
            line = self._lines[queue] = _Line(deque())
        first = messages[0]
        delay = _AT_TIMES if first.deliver_at_ms else first.delay_level
        deadline_ms = self._clock.monotonic_ms() + SEND_MS
        line.waiting.append(_Waiting(messages, on_sent, size, delay, half_group, deadline_ms))
        if line.batch is None:
            self._ready.setdefault(queue.broker_name, {})[queue] = None
            self._outbox.schedule()

    def hold(self, size: int) -> None:
        """Count bodies that wait, also before it is known where to; see ``release``.

        Raises:
            SystemBusy: Too much waits already.
        """
        if self.waiting_bytes + size > self._max_waiting_bytes:
            raise SystemBusy(
                f"{self.waiting_bytes} bytes wait for brokers (limit {self._max_waiting_bytes}, "
                "max_waiting_bytes)",
                retry_after_ms=BACKOFF_MS,
            )
        self.waiting_bytes += size

    def release(self, size: int) -> None:
        """Count bodies of ``hold`` no more."""
        self.waiting_bytes -= size

    def close(self, error: MQMeshError) -> None:
        """End everything that has no outcome."""
        self._outbox.close(error)
        for line in list(self._lines.values()):
            batch = line.batch
            sends = [*(batch.sends if batch is not None else ()), *line.waiting]
            self._end(sends, error)
        self._lines.clear()
        self._ready.clear()

    # ---- For the outbox ------------------------------------------------------------------

    def brokers(self) -> Collection[str]:
        """Return the brokers that something waits for."""
        return [name for name, queues in self._ready.items() if queues]

    def take(self, broker_name: str) -> OutgoingRequest | None:
        """Return the next request to a broker; None when nothing may go now."""
        ready, batches, parts = self._ready.get(broker_name, {}), list[_SendBatch](), list[bytes]()
        size = 0
        while ready and size < MAX_REQUEST_BYTES and len(batches) < MAX_BATCHES_PER_REQUEST:
            queue = next(iter(ready))
            del ready[queue]
            batch = self._next_batch(self._lines[queue], queue)
            if batch is None:
                continue
            batch.attempts += 1
            batches.append(batch)
            parts += batch.parts
            size += sum(map(len, batch.parts))
        if not batches:
            return None
        left_ms = max(one.deadline_ms for one in batches) - self._clock.monotonic_ms()
        timeout_ms = max(left_ms, 1)
        return OutgoingRequest(
            RequestCode.SEND_MESSAGE,
            parts,
            encode_send(timeout_ms, len(batches), self._key),
            timeout_ms,
            partial(self._answered, broker_name, batches),
        )

    def without(self, broker_name: str) -> None:
        """End what is late, without a connection to a broker that something waits for."""
        now_ms = self._clock.monotonic_ms()
        gone = EndpointUnreachable(f"there is no connection to broker {broker_name}")
        for queue in list(self._ready.get(broker_name, {})):
            line = self._lines[queue]
            batch = self._next_batch(line, queue)
            if batch is None:
                del self._ready[broker_name][queue]
            elif batch.deadline_ms <= now_ms:
                self._finish(line, batch, batch.failure or gone)

    # ---- Batches -------------------------------------------------------------------------

    def _next_batch(self, line: _Line, queue: MessageQueue) -> _SendBatch | None:
        """Return the batch of a queue that is to be sent, made if there is none."""
        now_ms = self._clock.monotonic_ms()
        while line.batch is None and line.waiting:
            sends = [line.waiting.popleft()]
            if sends[0].deadline_ms <= now_ms:
                # Its client gave it up, and may have sent it again.
                self._end(
                    sends, RequestTimeout(f"no place for a message of {queue} in {SEND_MS} ms")
                )
                continue
            count, size = len(sends[0].messages), sends[0].size
            while line.waiting:
                other = line.waiting[0]
                count, size = count + len(other.messages), size + other.size
                if (
                    (other.delay, other.half_group) != (sends[0].delay, sends[0].half_group)
                    or count > MAX_BATCH_MESSAGES
                    or size > MAX_BATCH_BYTES
                ):
                    break
                sends.append(line.waiting.popleft())
            try:
                parts = self._encode(queue, sends)
            except Exception as error:
                # Any error ends the sends: a send that was taken must have its outcome.
                _log.warning("messages of %s cannot be encoded: %s", queue, error)
                self._end(sends, InvalidArgument(f"the messages cannot be encoded: {error}"))
                continue
            deadline_ms = sends[0].deadline_ms
            line.batch = _SendBatch(queue, sends, self._next_sequence, parts, deadline_ms)
            self._next_sequence += sum(len(one.messages) for one in sends)
        if line.batch is None:
            del self._lines[queue]
        return line.batch

    def _encode(self, queue: MessageQueue, sends: Sequence[_Waiting]) -> tuple[bytes, ...]:
        messages = [message for one in sends for message in one.messages]
        payload = encode_payload(messages, compress_over_bytes=COMPRESS_OVER_BYTES)
        attributes, meta, delay = 0, None, sends[0].delay
        if sends[0].half_group:
            return half_parts(
                payload,
                producer_group=sends[0].half_group,
                real_topic=queue.topic,
                real_queue_id=queue.queue_id,
                has_immunity=have_immunity(messages),
                producer_id=self.producer_id,
                first_sequence=self._next_sequence,
                born_timestamp=self._clock.wall_ms(),
                born_host=self._born_host,
            )
        if delay:
            attributes = int(Attributes.HAS_DELAY)
            times = pack_due_times([one.deliver_at_ms for one in messages])
            at_times = delay == _AT_TIMES
            meta = DelayedMeta(
                queue.topic,
                payload.tag_hashes,
                self._born_host,
                0 if at_times else delay,
                times if at_times else b"",
            )
        return batch_parts(
            payload,
            topic=queue.topic,
            queue_id=queue.queue_id,
            producer_id=self.producer_id,
            first_sequence=self._next_sequence,
            born_timestamp=self._clock.wall_ms(),
            born_host=self._born_host,
            attributes=attributes,
            meta=meta,
        )

    def _answered(
        self, broker_name: str, batches: list[_SendBatch], answer: Command | MQMeshError
    ) -> Effects:
        effects = Effects()
        results: Sequence[BatchOutcome | MQMeshError]
        try:
            if isinstance(answer, MQMeshError):
                raise answer
            results = decode_outcomes(answer.header, answer.body)
            if len(results) != len(batches):
                raise RemoteProtocolError(f"{len(results)} outcomes for {len(batches)} batches")
        except MQMeshError as error:
            if isinstance(error, NotMaster):
                self._follow(error, broker_name)
            results = [error] * len(batches)
        for batch, result in zip(batches, results, strict=True):
            self._judge(batch, result, effects)
        return effects

    def _judge(
        self, batch: _SendBatch, result: BatchOutcome | MQMeshError, effects: Effects
    ) -> None:
        line = self._lines.get(batch.queue)
        if line is None:
            return  # closing ended it
        if isinstance(result, BatchOutcome):
            if result.code == _OK:
                self._finish(line, batch, result)
                return
            result = error_of(result.code, result.remark, result.retry_after_ms)
        batch.failure = result
        verdict = judge(result, attempts=batch.attempts, retries=RETRIES)
        if batch.deadline_ms <= self._clock.monotonic_ms() or verdict is SendFailure.GIVE_UP:
            self._finish(line, batch, result)
            return
        if verdict is not SendFailure.TRY_AGAIN:
            batch.attempts -= 1
        # The line has its batch until then, so that nothing overtakes it.
        effects.later.append((BACKOFF_MS, partial(self._again, batch.queue)))

    def _again(self, queue: MessageQueue) -> None:
        if queue in self._lines:
            self._ready.setdefault(queue.broker_name, {})[queue] = None

    def _finish(self, line: _Line, batch: _SendBatch, result: BatchOutcome | MQMeshError) -> None:
        line.batch = None
        if line.waiting:
            self._again(batch.queue)
        else:
            del self._lines[batch.queue]
            self._ready.get(batch.queue.broker_name, {}).pop(batch.queue, None)
        self._end(batch.sends, result, batch.first_sequence)

    def _end(
        self,
        sends: Sequence[_Waiting],
        result: BatchOutcome | MQMeshError,
        first_sequence: int = 0,
    ) -> None:
        ordinal = 0
        for one in sends:
            self.waiting_bytes -= one.size
            if isinstance(result, MQMeshError):
                one.on_sent(result)
                continue
            self.messages += len(one.messages)
            one.on_sent(
                Stored(
                    result.status,
                    result.base_queue_offset,
                    result.commitlog_offset,
                    ordinal,
                    first_sequence,
                )
            )
            ordinal += len(one.messages)
