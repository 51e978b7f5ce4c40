"""Carries batches to brokers, in the client loop, and their outcomes back."""

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol

from mqmesh.batch.delayed_batch import DelayedMeta, pack_due_times
from mqmesh.batch.fast_encode import encode_at_once
from mqmesh.batch.payload import MAX_RAW_BYTES, Payload, encode_payload
from mqmesh.batch.record_batch import Attributes, batch_parts
from mqmesh.errors import (
    BrokerError,
    ClientClosed,
    EndpointUnreachable,
    InvalidArgument,
    MessageIllegal,
    MQMeshError,
    NoRoute,
    RemoteProtocolError,
    RequestTimeout,
    TransportError,
)
from mqmesh.message import (
    Message,
    MessageQueue,
)
from mqmesh.message_checks import Extras
from mqmesh.producer_key import producer_id_of
from mqmesh.protocol.codes import RequestCode, ResponseCode, error_of
from mqmesh.protocol.command import Command
from mqmesh.protocol.messaging import (
    MAX_BATCHES_PER_REQUEST,
    BatchOutcome,
    decode_outcomes,
    encode_send,
)
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.client.options import born_host
from mqmesh.sdk.hooks import HookCalls
from mqmesh.sdk.producer.lanes import Lane
from mqmesh.sdk.producer.pace import MAX_REQUEST_BYTES, SendPace
from mqmesh.sdk.producer.retry import BACKOFF_MS, SendFailure, judge, leaves_doubt
from mqmesh.sdk.producer.send_buffer import AT_TIMES, SendBuffer
from mqmesh.sdk.producer.send_result import PendingBatch, SendFuture, tell_hooks

WATCH_MS: Final = 100
"""Between looks at what waits for brokers without a connection."""

_OK: Final = int(ResponseCode.SUCCESS)
_log = logging.getLogger(__name__)


class Routes(Protocol):
    """Where else a batch may go; see ``PublishRoutes``."""

    def another_lane(self, queue: MessageQueue, never: frozenset[str]) -> Lane | None:
        """A lane in place of a queue's, not of the brokers named; or None."""

    def other_brokers(self, queue: MessageQueue) -> frozenset[str]:
        """Brokers, but the queue's own, that messages of its topic may go to just now."""

    def on_sent(self, broker_name: str, latency_ms: int, answered: bool) -> None:
        """Takes note of how a broker did."""


class BatchCodec:
    """Numbers the messages of one producer instance and encodes its batches.

    Args:
        key: Of the instance, see ``producer_key``.
        compress_over_bytes: See ``record_batch.encode_batch``.
        hooks: Called before a batch is encoded, and when it is done.
    """

    is_half = False
    """The messages are half messages of transactions."""

    def __init__(
        self, key: bytes, compress_over_bytes: int | None, hooks: HookCalls | None = None
    ) -> None:
        self.key = key
        self._hooks = hooks
        self.producer_id = producer_id_of(key)
        self._compress_over_bytes = compress_over_bytes
        self._born_host = born_host()
        self._lock = threading.Lock()
        self._next_sequence = 0

    def payload(self, messages: Sequence[Message], extras: Extras = Extras.ANY) -> Payload:
        """Encodes messages; ``extras`` as for ``payload.encode_payload``.

        Raises:
            InvalidArgument: The messages do not fit into one batch.
        """
        try:
            return encode_payload(
                messages, compress_over_bytes=self._compress_over_bytes, extras=extras
            )
        except Exception as error:
            # Also what messages do that were changed after they were checked.
            raise InvalidArgument(f"the messages cannot be sent as one batch: {error}") from error

    def at_once(
        self, messages: Sequence[Message], max_message_size: int, *, is_one: bool
    ) -> Payload | None:
        """Checks and encodes messages at once; see ``fast_encode.encode_at_once``."""
        try:
            return encode_at_once(
                messages,
                max_body_bytes=max_message_size,
                is_one=is_one,
                compress_over_bytes=self._compress_over_bytes,
            )
        except Exception as error:
            # Whoever looks at each message will say what is wrong, or has the memory for it.
            _log.debug("messages cannot be encoded at once: %s", error)
            return None

    def encode(self, batch: PendingBatch, now_ms: int) -> tuple[bytes, ...]:
        """The batch in pieces; encoded once a queue, numbered once for ever.

        Raises:
            InvalidArgument: The messages do not fit into one batch.
        """
        if batch.encoded is not None:
            return batch.encoded
        payload = batch.payload
        if payload is None:
            if self._hooks is not None:
                self._call_hooks(self._hooks, batch, now_ms)
            # Checked when they were sent; this is the quickest way to encode most of them.
            payload = self.at_once(batch.messages, MAX_RAW_BYTES, is_one=False)
            if payload is None:
                payload = self.payload(batch.messages)
            batch.payload = payload
            if batch.delay == AT_TIMES:
                batch.due_times = pack_due_times([one.deliver_at_ms for one in batch.messages])
        if batch.first_sequence < 0:
            batch.producer_id, batch.born_timestamp = self.producer_id, now_ms
            with self._lock:
                batch.first_sequence = self._next_sequence
                self._next_sequence += payload.message_count
        try:
            batch.encoded = self._parts(batch, payload)
        except Exception as error:
            # Whatever it is: a batch that is taken must have its outcome.
            raise InvalidArgument(f"the messages cannot be sent as one batch: {error}") from error
        return batch.encoded

    def _call_hooks(self, hooks: HookCalls, batch: PendingBatch, now_ms: int) -> None:
        context = hooks.before_send(batch.messages, batch.queue, now_ms, is_half=self.is_half)
        batch.messages = context.messages.copy()
        done = partial(tell_hooks, hooks, context)
        with batch.lock:
            batch.callbacks.insert(0, (done, SendFuture(batch, 0)))

    def _parts(self, batch: PendingBatch, payload: Payload) -> tuple[bytes, ...]:
        attributes = 0 if batch.wait_store else int(Attributes.NO_WAIT_STORE)
        meta = None
        if batch.delay:
            attributes |= Attributes.HAS_DELAY
            meta = DelayedMeta(
                batch.queue.topic,
                payload.tag_hashes,
                self._born_host,
                0 if batch.delay == AT_TIMES else batch.delay,
                batch.due_times,
            )
        return batch_parts(
            payload,
            topic=batch.queue.topic,
            queue_id=batch.queue.queue_id,
            producer_id=batch.producer_id,
            first_sequence=batch.first_sequence,
            born_timestamp=batch.born_timestamp,
            born_host=self._born_host,
            attributes=attributes,
            meta=meta,
        )


class Sender:
    """Sends what the buffer has ready; a few requests in flight a broker.

    Every batch that it took ends exactly once: stored, refused, or given up. Methods are for
    the client loop, unless they say otherwise.

    Args:
        engine: The client's engine.
        buffer: Where batches come from.
        codec: Encodes them.
        routes: For retries at another broker; is told how brokers do.
        pace: Told when it works, and when it is to.
        max_in_flight: Requests in flight a broker. More would not be faster: what waits
            meanwhile makes the next request larger.
        retry_not_stored: Also retry, at another broker, what a broker did not store safely.
    """

    def __init__(
        self,
        engine: ClientEngine,
        buffer: SendBuffer,
        codec: BatchCodec,
        routes: Routes,
        pace: SendPace,
        *,
        max_in_flight: int,
        retry_not_stored: bool = False,
    ) -> None:
        self._engine = engine
        self._buffer = buffer
        self._lanes = buffer.lanes
        self._codec = codec
        self._routes = routes
        self._pace = pace
        self._max_in_flight = max_in_flight
        self._retry_not_stored = retry_not_stored
        self._in_flight: dict[str, int] = {}
        self._held: dict[PendingBatch, Lane] = {}
        self._coming: set[PendingBatch] = set()
        self._absent: set[str] = set()
        self._watching = False

    def has_room(self, broker_name: str) -> bool:
        """True when another request may go to a broker now; from any thread, a hint only."""
        return (
            broker_name not in self._absent
            and self._in_flight.get(broker_name, 0) < self._max_in_flight
        )

    def schedule(self) -> None:
        """Makes the client loop pump soon; from any thread."""
        if self._pace.plan():
            try:
                self._engine.post(self.pump)
            except ClientClosed:
                return  # whoever closes ends what is in the buffer

    def pump(self) -> None:
        """Sends what is ready and may be sent."""
        self._pace.begin()
        try:
            self._pump()
        finally:
            self._pace.end()

    def _pump(self) -> None:
        # First forgotten and then looked for again: who reads it meanwhile schedules in vain,
        # whereas the other way round a message could be overlooked.
        self._absent = set()
        if self._engine.closed:
            return
        for broker_name in self._lanes.ready_brokers():
            if not self._engine.is_connected(broker_name):
                self._wait_for(broker_name)
                continue
            while self.has_room(broker_name):
                taken = self._lanes.take(broker_name, MAX_REQUEST_BYTES, MAX_BATCHES_PER_REQUEST)
                if not taken:
                    break
                self._send(broker_name, taken)

    def take_first(
        self, lane: Lane, batch: PendingBatch, answer: BatchOutcome | MQMeshError, latency_ms: int
    ) -> None:
        """Ends a batch whose first try went past the buffer, or goes on with it; from any thread.

        Args:
            lane: Claimed by the batch.
            batch: Sent once.
            answer: What came of it.
            latency_ms: How long that took.

        Raises:
            ClientClosed: The client is closed.
        """
        outcome = answer if isinstance(answer, BatchOutcome) else None
        self._routes.on_sent(lane.queue.broker_name, latency_ms, outcome is not None)
        is_again = outcome is None or (outcome.status and self._retry_not_stored)
        if outcome is not None and outcome.code == _OK and not is_again:
            batch.outcome = outcome
            self.give_back(lane, batch)
            if batch.callbacks:
                batch.tell()
        else:
            self._coming.add(batch)
            self._engine.post(lambda: self._adopt(lane, batch, answer))

    def give_back(self, lane: Lane, batch: PendingBatch) -> None:
        """Ends a batch's claim of a lane, unless that has ended; from any thread."""
        if self._lanes.unclaim(lane, batch):
            self.schedule()

    def end_all(self, error: MQMeshError, whose: str) -> None:
        """Ends every batch that has no outcome yet, and lets no message in any more.

        Args:
            error: What those who wait are told.
            whose: In the log, which tells what was lost also where nobody waits.
        """
        waiting, held, coming = self._buffer.close(), list(self._held.items()), list(self._coming)
        lost: Counter[str] = Counter()
        for batch in [*waiting, *(batch for batch, _ in held), *coming]:
            if not batch.done:
                lost[batch.queue.topic] += batch.explicit_count or len(batch.messages)
        for batch in waiting:
            self._finish(batch, None, error)
        for batch, lane in held:
            self._end(lane, batch, None, error)
        for batch in coming:
            batch.finish(None, error)
        if lost:
            what = ", ".join(f"{count} to {topic}" for topic, count in sorted(lost.items()))
            _log.error("%s: messages that may not be stored: %s: %s", whose, what, error)

    def _adopt(self, lane: Lane, batch: PendingBatch, answer: BatchOutcome | MQMeshError) -> None:
        self._coming.discard(batch)
        if not self._buffer.adopt(lane, batch):
            return  # its sender was interrupted and does not wait any more
        self._held[batch] = lane
        batch.attempts = 1
        if isinstance(answer, BatchOutcome):
            self._take_outcome(lane, batch, answer)
        else:
            self._failed(lane, batch, answer)
        self.pump()

    # ---- Brokers without a connection ----------------------------------------------------

    def _wait_for(self, broker_name: str) -> None:
        # Batches wait in the buffer, not in a request: there they grow, may still go to
        # another broker, and end by their own deadlines.
        self._absent.add(broker_name)
        if not self._watching:
            self._watching = True
            self._engine.loop.call_later(WATCH_MS, self._watch)
        try:
            self._engine.broker(broker_name)
        except MQMeshError as error:
            _log.debug("broker %s cannot be connected to: %s", broker_name, error)

    def _watch(self) -> None:
        self._watching = False
        try:
            for broker_name in self._lanes.ready_brokers():
                if not self._engine.is_connected(broker_name):
                    self._look_after(broker_name)
        finally:
            self.pump()  # watches on, if need be

    def _look_after(self, broker_name: str) -> None:
        now_ms = self._engine.loop.clock.monotonic_ms()
        error = EndpointUnreachable(f"there was no connection to broker {broker_name} in time")
        for batch in self._lanes.take_late(broker_name, now_ms):
            self._finish(batch, None, batch.cause or error)
        if not self._engine.may_come(broker_name):
            self._evacuate(broker_name)

    def _evacuate(self, broker_name: str) -> None:
        for lane, batch in self._lanes.take_free(broker_name, self._routes.other_brokers):
            other = self._routes.another_lane(batch.queue, batch.holders)
            self._lanes.move(other or lane, batch)

    # ---- Requests and answers ------------------------------------------------------------

    def _send(self, broker_name: str, taken: list[tuple[Lane, PendingBatch]]) -> None:
        now_ms = self._engine.loop.clock.monotonic_ms()
        wall_ms = self._engine.loop.clock.wall_ms()
        items: list[tuple[Lane, PendingBatch]] = []
        parts: list[bytes] = []
        timeout_ms = 0
        for lane, batch in taken:
            self._held[batch] = lane
        for item in taken:
            lane, batch = item
            left_ms = batch.deadline_ms - now_ms
            if left_ms <= 0:
                self._end(lane, batch, None, batch.cause or _too_late(batch.queue))
                continue
            try:
                parts += self._codec.encode(batch, wall_ms)
            except InvalidArgument as error:
                self._end(lane, batch, None, error)
                continue
            batch.attempts += 1
            if left_ms > timeout_ms:
                timeout_ms = left_ms
            items.append(item)
        if not items:
            return
        self._in_flight[broker_name] = self._in_flight.get(broker_name, 0) + 1
        self._engine.request(
            broker_name,
            RequestCode.SEND_MESSAGE,
            lambda answer: self._answered(broker_name, items, now_ms, answer),
            *parts,
            header=encode_send(timeout_ms, len(items), self._codec.key),
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
        stored: list[PendingBatch] = []
        latency_ms = self._engine.loop.clock.monotonic_ms() - sent_ms
        try:
            if isinstance(answer, MQMeshError):
                raise answer
            outcomes = read_outcomes(answer, len(items))
        except MQMeshError as error:
            self._routes.on_sent(broker_name, latency_ms, False)
            for lane, batch in items:
                self._failed(lane, batch, error)
        else:
            self._routes.on_sent(broker_name, latency_ms, True)
            if any(outcome.code or outcome.status for outcome in outcomes):
                for (lane, batch), outcome in zip(items, outcomes, strict=True):
                    self._take_outcome(lane, batch, outcome)
            else:
                for _, batch in items:
                    del self._held[batch]
                stored = self._buffer.end_stored(items, outcomes)
        try:
            self.pump()
        finally:
            # Once the next request has left: whoever is woken by this wants the interpreter.
            for batch in stored:
                batch.tell()

    def _take_outcome(self, lane: Lane, batch: PendingBatch, outcome: BatchOutcome) -> None:
        if outcome.code != _OK:
            error = error_of(outcome.code, outcome.remark, outcome.retry_after_ms)
            self._failed(lane, batch, error)
            return
        if (
            outcome.status
            and self._retry_not_stored
            and not batch.bound
            and batch.attempts <= batch.retries
        ):
            batch.accepted = (batch.queue, outcome)
            batch.holders |= {batch.queue.broker_name}
            if self._move(lane, batch):
                return
        self._end(lane, batch, outcome, None)

    # ---- Failures ------------------------------------------------------------------------

    def _failed(self, lane: Lane, batch: PendingBatch, error: MQMeshError) -> None:
        batch.cause = error
        if leaves_doubt(error):
            batch.doubt = error
            batch.holders |= {batch.queue.broker_name}
        loop = self._engine.loop
        verdict = judge(error, attempts=batch.attempts, retries=batch.retries)
        if batch.deadline_ms <= loop.clock.monotonic_ms() or self._engine.closed:
            verdict = SendFailure.GIVE_UP
        if isinstance(error, BrokerError | NoRoute):
            self._engine.refresh([batch.queue.topic])
        if verdict is SendFailure.GIVE_UP:
            if isinstance(error, MessageIllegal) and not batch.bound and batch.retries:
                # Perhaps only the queue is gone; the routes will tell in a moment.
                loop.call_later(BACKOFF_MS, lambda: self._reconsider(lane, batch, error))
            else:
                self._end(lane, batch, None, error)
            return
        if verdict is SendFailure.WAIT:
            batch.attempts -= 1
        elif not batch.bound and self._move(lane, batch):
            return
        # The lane stays in flight while its first batch waits, so that nothing overtakes it.
        delay_ms = 0 if isinstance(error, TransportError) else BACKOFF_MS
        loop.call_later(delay_ms, lambda: self._again(lane, batch))

    def _again(self, lane: Lane, batch: PendingBatch) -> None:
        if batch not in self._held:
            return  # ended by closing
        if batch.bound or not self._move(lane, batch):
            del self._held[batch]
            self._lanes.put_back(lane, batch)
        self.pump()

    def _reconsider(self, lane: Lane, batch: PendingBatch, error: MessageIllegal) -> None:
        if batch not in self._held:
            return
        if self._engine.has_queue(batch.queue) or not self._move(lane, batch):
            self._end(lane, batch, None, error)
        self.pump()

    def _move(self, lane: Lane, batch: PendingBatch) -> bool:
        # A broker recognises a repetition only in the queue it knows it from, and only while
        # not much else came there: one that was left in doubt is not gone back to.
        other = self._routes.another_lane(batch.queue, batch.holders)
        if other is None:
            return False
        del self._held[batch]
        self._lanes.move(other, batch, lane)
        self.schedule()
        return True

    # ---- Ends ----------------------------------------------------------------------------

    def _end(
        self,
        lane: Lane,
        batch: PendingBatch,
        outcome: BatchOutcome | None,
        error: MQMeshError | None,
    ) -> None:
        del self._held[batch]
        self._finish(batch, outcome, error, lane)

    def _finish(
        self,
        batch: PendingBatch,
        outcome: BatchOutcome | None,
        error: MQMeshError | None,
        lane: Lane | None = None,
    ) -> None:
        if error is not None and batch.accepted is not None:
            (batch.queue, outcome), error = batch.accepted, None
        elif batch.doubt is not None and isinstance(error, BrokerError | NoRoute):
            # That it was refused the last time does not mean that it is not there.
            batch.doubt.__cause__, error = error, batch.doubt
        self._buffer.settle(batch, lane)
        batch.finish(outcome, error)


def read_outcomes(answer: Command, batch_count: int) -> list[BatchOutcome]:
    """What became of the batches of a request.

    Raises:
        RemoteProtocolError: The answer cannot be read, or does not fit the request.
    """
    outcomes = decode_outcomes(answer.header, answer.body)
    if len(outcomes) != batch_count:
        raise RemoteProtocolError(f"{len(outcomes)} outcomes for {batch_count} batches")
    return outcomes


def _too_late(queue: MessageQueue) -> RequestTimeout:
    return RequestTimeout(
        f"the message for {queue.topic}/{queue.broker_name}/{queue.queue_id} was not stored "
        "within its timeout (send_msg_timeout_ms)"
    )
