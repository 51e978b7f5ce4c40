"""Sender of batches: makes the requests and judges their outcomes."""

import logging
from collections import Counter
from collections.abc import Collection
from functools import partial
from typing import Final, Protocol

from mqmesh.errors import (
    BrokerError,
    ClientClosed,
    InvalidArgument,
    MessageIllegal,
    MQMeshError,
    NoPermission,
    NoRoute,
    NotMaster,
    RequestTimeout,
    TransportError,
)
from mqmesh.message import MessageQueue
from mqmesh.metrics import (
    MAX_LABEL_SETS,
    OTHER,
    Distribution,
    Histogram,
    Measured,
    counter,
    gauge,
    histogram,
)
from mqmesh.protocol.codes import RequestCode, ResponseCode, error_of
from mqmesh.protocol.command import Command
from mqmesh.protocol.messaging import (
    MAX_BATCHES_PER_REQUEST,
    BatchOutcome,
    SendStatus,
    encode_send,
)
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.client.outbox import Effects, OutgoingRequest, RequestOutbox
from mqmesh.sdk.client.repeats import Repeats
from mqmesh.sdk.producer.batch_codec import BatchCodec, read_outcomes
from mqmesh.sdk.producer.lanes import Lane
from mqmesh.sdk.producer.pace import MAX_REQUEST_BYTES, SendPace
from mqmesh.sdk.producer.retry import BACKOFF_MS, SendFailure, judge, leaves_doubt
from mqmesh.sdk.producer.send_buffer import SendBuffer
from mqmesh.sdk.producer.send_result import PendingBatch
from mqmesh.transport.requests import no_connection

_OK: Final = int(ResponseCode.SUCCESS)
SEND_LATENCY_BOUNDS_MS: Final = (0.1, 0.25, 0.5, 1.0, 5.0, 10.0, 20.0, 50.0, 200.0, 500.0)
"""The buckets of RocketMQ's clients, with four more in front."""

_NAMES: Final = {status.value: status.name for status in SendStatus}
_STORED: Final = SendStatus.SEND_OK.name
_log = logging.getLogger(__name__)


class SendCounts:
    """Outcomes and latencies of one way to send; one thread at a time writes.

    Attributes:
        ended: Messages by topic and outcome; beyond ``MAX_LABEL_SETS`` the topic is ``OTHER``.
        latency: Of requests that a broker answered, in ms.
    """

    def __init__(self) -> None:
        self.ended: dict[tuple[str, str], int] = {}
        self.latency = Histogram(SEND_LATENCY_BOUNDS_MS)

    def stored(self, topic: str, count: int, status: int = 0) -> None:
        """Called when messages are stored, as safely as ``status`` says."""
        self._add(topic, _NAMES[status] if status else _STORED, count)

    def failed(self, topic: str, count: int, error: BaseException) -> None:
        """Called when the send of messages ended with an error."""
        self._add(topic, type(error).__name__, count)

    def _add(self, topic: str, outcome: str, count: int) -> None:
        key = (topic, outcome)
        try:
            self.ended[key] += count
        except KeyError:
            if len(self.ended) >= MAX_LABEL_SETS:
                key = (OTHER, outcome)
            self.ended[key] = self.ended.get(key, 0) + count


class Routes(Protocol):
    """Routes for retries of a batch; see ``PublishRoutes``."""

    def another_lane(self, queue: MessageQueue, never: frozenset[str]) -> Lane | None:
        """Return a lane in place of a queue's, not of the brokers named; or None."""

    def other_brokers(self, queue: MessageQueue) -> frozenset[str]:
        """Return brokers, but the queue's own, that messages of its topic may go to just now."""

    def on_sent(self, broker_name: str, latency_ms: float, answered: bool) -> None:
        """Takes note of how a broker did."""


class Sends:
    """The batches of a producer, from the buffer to their outcomes. For the client loop.

    Every batch that it took ends exactly once: stored, refused, or given up.

    Args:
        engine: The client's engine; asked, and never sent anything.
        buffer: Source of batches.
        codec: Encodes them.
        routes: For retries at another broker; learns brokers' latencies and failures.
        retry_not_stored: Also retry, at another broker, what a broker did not store safely.
        patience_ms: Time that a batch in doubt stays with a broker group that replaces its master.

    Attributes:
        counts: Outcomes of batches here.
        lost: Messages of each topic that were given up because the client was closed.
    """

    def __init__(
        self,
        engine: ClientEngine,
        buffer: SendBuffer,
        codec: BatchCodec,
        routes: Routes,
        *,
        retry_not_stored: bool,
        patience_ms: int,
    ) -> None:
        self._engine = engine
        self._buffer = buffer
        self._lanes = buffer.lanes
        self._codec = codec
        self._routes = routes
        self._retry_not_stored = retry_not_stored
        self._patience_ms = patience_ms
        self.counts = SendCounts()
        self.lost: Counter[str] = Counter()
        self._followed: dict[str, Repeats] = {}

    def brokers(self) -> Collection[str]:
        """Return the brokers that something can be sent to."""
        return self._lanes.ready_brokers()

    def take(self, broker_name: str) -> OutgoingRequest | None:
        """Return the next request to a broker."""
        while taken := self._lanes.take(broker_name, MAX_REQUEST_BYTES, MAX_BATCHES_PER_REQUEST):
            letter = self._letter(broker_name, taken)
            if letter is not None:
                return letter
        return None

    def without(self, broker_name: str) -> None:
        """End what is late, and move what may go elsewhere, without a connection to a broker."""
        now_ms = self._engine.loop.clock.monotonic_ms()
        error = self._engine.brokers.failures.get(broker_name) or no_connection(
            f"broker {broker_name}"
        )
        for batch in self._lanes.take_late(broker_name, now_ms):
            self._finish(batch, None, batch.cause or error)
        if self._engine.brokers.may_come(broker_name):
            return
        free = self._lanes.take_free(broker_name, self._routes.other_brokers, now_ms)
        for lane, batch in free:
            other = self._routes.another_lane(batch.queue, batch.holders)
            self._lanes.move(other or lane, batch)

    def adopt(
        self, lane: Lane, batch: PendingBatch, answer: BatchOutcome | MQMeshError
    ) -> Effects | None:
        """Goes on with a batch whose first try went past the buffer."""
        if not self._buffer.adopt(lane, batch):
            return None  # its sender was interrupted and does not wait any more
        batch.attempts = 1
        effects = Effects()
        self._judge(lane, batch, answer, effects)
        self._follow(lane.queue.broker_name, answer, effects)
        return effects

    def close(self, error: MQMeshError) -> None:
        """Ends every batch that waits, and lets no message in any more."""
        for batch in self._buffer.close():
            self._finish(batch, None, error)

    # ---- Requests and answers ------------------------------------------------------------

    def _letter(
        self, broker_name: str, taken: list[tuple[Lane, PendingBatch]]
    ) -> OutgoingRequest | None:
        clock = self._engine.loop.clock
        now_ns, wall_ms = clock.monotonic_ns(), clock.wall_ms()
        now_ms = now_ns // 1_000_000
        items: list[tuple[Lane, PendingBatch]] = []
        parts: list[bytes] = []
        timeout_ms = 0
        for item in taken:
            lane, batch = item
            left_ms = batch.deadline_ms - now_ms
            if left_ms <= 0:
                self._finish(batch, None, batch.cause or _too_late(batch.queue), lane)
                continue
            try:
                parts += self._codec.encode(batch, wall_ms)
            except InvalidArgument as error:
                self._finish(batch, None, error, lane)
                continue
            batch.attempts += 1
            if left_ms > timeout_ms:
                timeout_ms = left_ms
            items.append(item)
        if not items:
            return None
        return OutgoingRequest(
            RequestCode.SEND_MESSAGE,
            parts,
            encode_send(timeout_ms, len(items), self._codec.key),
            timeout_ms,
            partial(self._answered, broker_name, items, now_ns),
        )

    def _answered(
        self,
        broker_name: str,
        items: list[tuple[Lane, PendingBatch]],
        sent_ns: int,
        answer: Command | MQMeshError,
    ) -> Effects:
        effects = Effects()
        latency_ms = (self._engine.loop.clock.monotonic_ns() - sent_ns) / 1_000_000
        try:
            if isinstance(answer, MQMeshError):
                raise answer
            outcomes = read_outcomes(answer, len(items))
        except MQMeshError as error:
            if not isinstance(error, NotMaster):
                self._routes.on_sent(broker_name, latency_ms, False)
            for lane, batch in items:
                self._judge(lane, batch, error, effects)
            self._follow(broker_name, error, effects)
            return effects
        self._routes.on_sent(broker_name, latency_ms, True)
        self.counts.latency.observe(latency_ms)
        if any(outcome.code or outcome.status for outcome in outcomes):
            for (lane, batch), outcome in zip(items, outcomes, strict=True):
                self._judge(lane, batch, outcome, effects)
        else:
            stored = self._buffer.end_stored(items, outcomes)
            for batch in stored:
                self.counts.stored(batch.queue.topic, batch.message_count)
            effects.told = partial(_tell, stored)
        return effects

    def _judge(
        self,
        lane: Lane,
        batch: PendingBatch,
        answer: BatchOutcome | MQMeshError,
        effects: Effects,
    ) -> None:
        """Decides the outcome of a batch in flight; all answers but plain success come here."""
        if isinstance(answer, MQMeshError):
            self._failed(lane, batch, answer, effects)
        elif answer.code != _OK:
            error = error_of(answer.code, answer.remark, answer.retry_after_ms)
            self._failed(lane, batch, error, effects)
        elif not self._stored_elsewhere(lane, batch, answer):
            self._finish(batch, answer, None, lane)

    def _stored_elsewhere(self, lane: Lane, batch: PendingBatch, outcome: BatchOutcome) -> bool:
        # Not as safe as it should be: another broker may do better.
        if not (
            outcome.status
            and self._retry_not_stored
            and not batch.bound
            and batch.attempts <= batch.retries
        ):
            return False
        batch.accepted = (batch.queue, outcome)
        batch.stays_until_ms = 0
        batch.holders |= {batch.queue.broker_name}
        return self._move(lane, batch)

    # ---- Failures ------------------------------------------------------------------------

    def _failed(
        self, lane: Lane, batch: PendingBatch, error: MQMeshError, effects: Effects
    ) -> None:
        batch.cause = error
        now_ms = self._engine.loop.clock.monotonic_ms()
        if leaves_doubt(error):
            self._doubt(batch, error, now_ms)
        verdict = judge(error, attempts=batch.attempts, retries=batch.retries)
        if batch.deadline_ms <= now_ms or self._engine.closed:
            verdict = SendFailure.GIVE_UP
        if isinstance(error, BrokerError | NoRoute):
            self._engine.finder.refresh([batch.queue.topic])
        if verdict is SendFailure.GIVE_UP:
            elsewhere = isinstance(error, MessageIllegal | NoPermission)
            if elsewhere and not batch.bound and batch.retries:
                # Perhaps only the queue is gone, or read only; the routes will show it in a moment.
                again = partial(self._reconsider, lane, batch, error)
                effects.later.append((BACKOFF_MS, again))
            else:
                self._finish(batch, None, error, lane)
            return
        if verdict in (SendFailure.WAIT, SendFailure.FOLLOW):
            batch.attempts -= 1
        elif not batch.bound and self._move(lane, batch):
            return
        # The lane stays in flight while its first batch waits, so that nothing overtakes it.
        delay_ms = 0 if isinstance(error, TransportError) else BACKOFF_MS
        effects.later.append((delay_ms, partial(self._again, lane, batch)))

    def _follow(
        self, broker_name: str, answer: BatchOutcome | MQMeshError, effects: Effects
    ) -> None:
        """Repeat at the master that a former one names, at once or after a growing delay."""
        if isinstance(answer, NotMaster) and self._engine.routes.follow(answer, broker_name):
            if broker_name not in self._followed:
                now_ms = self._engine.loop.clock.monotonic_ms
                self._followed[broker_name] = Repeats(now_ms, BACKOFF_MS)
            delay_ms = self._followed[broker_name].next_delay_ms()
            effects.later = [(delay_ms, event) for _, event in effects.later]

    def _doubt(self, batch: PendingBatch, error: MQMeshError, now_ms: int) -> None:
        name = batch.queue.broker_name
        if batch.doubt is None or not isinstance(error, NotMaster):
            batch.doubt = error
        if name not in batch.holders and self._engine.routes.elects(name):
            # Where masters are elected the next one recognises it; another group would not.
            batch.stays_until_ms = now_ms + self._patience_ms
        batch.holders |= {name}

    def _again(self, lane: Lane, batch: PendingBatch) -> None:
        if batch.bound or not self._move(lane, batch):
            self._lanes.put_back(lane, batch)

    def _reconsider(self, lane: Lane, batch: PendingBatch, error: MQMeshError) -> None:
        if batch.queue in self._engine.routes.publish_queues(batch.queue.topic) or not self._move(
            lane, batch
        ):
            self._finish(batch, None, error, lane)

    def _move(self, lane: Lane, batch: PendingBatch) -> bool:
        # A broker recognises a repetition only in the queue it knows it from, and only while
        # not much else came there: one that was left in doubt is not gone back to.
        if not batch.retries or self._engine.loop.clock.monotonic_ms() < batch.stays_until_ms:
            return False
        other = self._routes.another_lane(batch.queue, batch.holders)
        if other is None:
            return False
        self._lanes.move(other, batch, lane)
        return True

    # ---- Ends ----------------------------------------------------------------------------

    def _finish(
        self,
        batch: PendingBatch,
        outcome: BatchOutcome | None,
        error: MQMeshError | None,
        lane: Lane | None = None,
    ) -> None:
        """End a batch; ``lane`` is where it is in flight, if it is."""
        if error is not None and batch.accepted is not None:
            (batch.queue, outcome), error = batch.accepted, None
        elif batch.doubt is not None and isinstance(error, BrokerError | NoRoute):
            # That it was refused the last time does not mean that it is not there.
            if error is not batch.doubt:
                batch.doubt.__cause__ = error
            error = batch.doubt
        if not batch.done:
            topic, count = batch.queue.topic, batch.message_count
            if error is not None:
                self.counts.failed(topic, count, error)
            elif outcome is not None:
                self.counts.stored(topic, count, outcome.status)
            if isinstance(error, ClientClosed):
                self.lost[topic] += count
        self._buffer.settle(batch, lane)
        batch.finish(outcome, error)


class Sender:
    """Sender of what the buffer has ready; a few requests in flight a broker.

    Args:
        engine: The client's engine.
        buffer: Source of batches.
        codec: Encodes them.
        routes: For retries at another broker; learns brokers' latencies and failures.
        pace: Notes when it works, and when it is to.
        max_in_flight: Requests in flight a broker.
        retry_not_stored: Also retry, at another broker, what a broker did not store safely.
        patience_ms: See ``Sends``.

    Attributes:
        has_room, schedule: See ``RequestOutbox``.
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
        patience_ms: int,
        retry_not_stored: bool = False,
    ) -> None:
        self._lanes = buffer.lanes
        self._routes = routes
        self._retry_not_stored = retry_not_stored
        self._sends = Sends(
            engine,
            buffer,
            codec,
            routes,
            retry_not_stored=retry_not_stored,
            patience_ms=patience_ms,
        )
        self._outbox = RequestOutbox(engine, self._sends, max_in_flight, pace)
        self._direct = SendCounts()
        self._buffer = buffer
        self.has_room = self._outbox.has_room
        self.schedule = self._outbox.schedule

    @property
    def ended(self) -> dict[tuple[str, ...], int]:
        """Messages whose send has ended, by topic and outcome; from any thread."""
        found = Counter[tuple[str, ...]](self._direct.ended.copy())
        found.update(self._sends.counts.ended.copy())
        return found

    @property
    def latency(self) -> Distribution:
        """Latency of requests that brokers answered, in ms; from any thread."""
        return self._direct.latency.read() + self._sends.counts.latency.read()

    @property
    def in_flight(self) -> int:
        """Requests without an answer, but for one of a lone send; from any thread."""
        return self._outbox.in_flight

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait, from ``SendBuffer.pending_bytes``."""
        return self._buffer.pending_bytes

    def take_first(
        self,
        lane: Lane,
        batch: PendingBatch,
        answer: BatchOutcome | MQMeshError,
        latency_ms: float,
    ) -> None:
        """Ends a batch whose first try went past the buffer, or goes on with it; from any thread.

        Args:
            lane: Claimed by the batch.
            batch: Sent once.
            answer: Outcome.
            latency_ms: Duration.

        Raises:
            ClientClosed: The client is closed.
        """
        outcome = answer if isinstance(answer, BatchOutcome) else None
        if outcome is not None:
            self._direct.latency.observe(latency_ms)
        if not isinstance(answer, NotMaster):
            self._routes.on_sent(lane.queue.broker_name, latency_ms, outcome is not None)
        is_again = outcome is None or (outcome.status and self._retry_not_stored)
        if outcome is not None and outcome.code == _OK and not is_again:
            self._direct.stored(batch.queue.topic, 1, outcome.status)
            batch.outcome = outcome
            self.give_back(lane, batch)
            if batch.callbacks:
                batch.tell()
        else:
            self._outbox.post(partial(self._sends.adopt, lane, batch, answer))

    def give_back(self, lane: Lane, batch: PendingBatch) -> None:
        """Ends a batch's claim of a lane, unless that has ended; from any thread."""
        if self._lanes.unclaim(lane, batch):
            self.schedule()

    def end_all(self, error: MQMeshError, whose: str) -> None:
        """Ends every batch that has no outcome yet, and lets no message in any more.

        In the client loop, at its end.

        Args:
            error: Error for those who wait.
            whose: Owner's name in the log, which reports losses also where nobody waits.
        """
        self._outbox.close(error)
        self._sends.close(error)
        lost = sorted(self._sends.lost.items())
        if lost:
            what = ", ".join(f"{count} to {topic}" for topic, count in lost)
            _log.error("%s: messages that may not be stored: %s: %s", whose, what, error)


SEND_METRICS: Final[tuple[Measured[Sender], ...]] = (
    counter(
        "sends_total",
        "messages whose send has an outcome: its SendStatus, or the name of its error",
        lambda sender: sender.ended,
        unit="messages",
        labels=("topic", "status"),
    ),
    histogram(
        "send_latency_ms",
        "from a send request to the broker's answer",
        lambda sender: sender.latency,
        rocketmq_name="rocketmq_send_cost_time",
    ),
    gauge(
        "send_requests_in_flight",
        "send requests of the client loop without an answer, at all brokers",
        lambda sender: sender.in_flight,
    ),
    gauge(
        "send_buffer_bytes",
        "messages without an outcome, as buffer_memory_bytes counts them",
        lambda sender: sender.pending_bytes,
    ),
)


def _tell(batches: list[PendingBatch]) -> None:
    for batch in batches:
        batch.tell()


def _too_late(queue: MessageQueue) -> RequestTimeout:
    return RequestTimeout(
        f"the message for {queue.topic}/{queue.broker_name}/{queue.queue_id} was not stored "
        "within its timeout (send_msg_timeout_ms)"
    )
