"""Sender of batches: makes the requests and judges their outcomes."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

import msgspec

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
from mqmesh.message import Message, MessageQueue
from mqmesh.metrics import (
    MAX_LABEL_SETS,
    OTHER,
    Histogram,
    Measured,
    counter,
    gauge,
    histogram,
)
from mqmesh.protocol.codes import ResponseCode, error_of
from mqmesh.protocol.command import Command
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import (
    MAX_BATCHES_PER_REQUEST,
    BatchOutcome,
    SendStatus,
    encode_send,
)
from mqmesh.sdk.client.backoff import Backoff
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.client.direct_channels import DirectChannels
from mqmesh.sdk.client.outbox import Effects, OutgoingRequest, RequestOutbox
from mqmesh.sdk.producer.batch_codec import BatchCodec, read_outcomes
from mqmesh.sdk.producer.lanes import Lane, PendingBatch, TopicLanes
from mqmesh.sdk.producer.pace import MAX_REQUEST_BYTES, SendPace
from mqmesh.sdk.producer.producer_options import ProducerOptions
from mqmesh.sdk.producer.publish_routes import PublishRoutes
from mqmesh.sdk.producer.retry import BACKOFF_MS, SendFailure, judge, leaves_doubt
from mqmesh.sdk.producer.send_buffer import SendBuffer
from mqmesh.sdk.producer.send_result import OnDone, SendFuture
from mqmesh.transport.interface import Channel
from mqmesh.transport.requests import no_connection, too_late

_OK: Final = int(ResponseCode.SUCCESS)
SEND_LATENCY_BOUNDS_MS: Final = (0.1, 0.25, 0.5, 1.0, 5.0, 10.0, 20.0, 50.0, 200.0, 500.0)
"""The buckets of RocketMQ's clients, with four more in front."""

_NAMES: Final = {status.value: status.name for status in SendStatus}
_log = logging.getLogger(__name__)


Watch = Callable[[Channel, Callable[[], None]], None]
"""Calls back once when a channel may have a response."""


class PostedRequest(msgspec.Struct, frozen=True, eq=False):
    """A request that left from its caller's thread, which does not wait for the answer."""

    request: OutgoingRequest
    channel: Channel
    lane: Lane
    batch: PendingBatch


class Sender:
    """Sender of the buffer's ready batches: numbers them, sends requests, judges the answers.

    A lone synchronous send leaves in its caller's thread; all else, and each retry, in the client
    loop, which has a few requests in flight a broker. Both number, count and judge here. Every
    batch that was taken from the buffer ends exactly once: stored, refused, or given up. Methods
    are for the client loop, unless they say otherwise.

    Args:
        engine: The client's engine.
        buffer: Source of batches.
        codec: Encodes them.
        routes: For retries at another broker; learns brokers' latencies and failures.
        pace: Notes when it works, and when it is to.
        options: The producer's: retries, and requests in flight.
        direct: Channels of lone sends; None if there are none.

    Attributes:
        ended: Messages whose send has ended, by topic and outcome; beyond ``MAX_LABEL_SETS`` the
            topic is ``OTHER``.
        latency: Latency of requests that a broker answered, in ms.
        lost: Messages of each topic that were given up because the client was closed.
        watch: Has answers to sends that leave at once taken, in the client loop by default.
        has_room, schedule: See ``RequestOutbox``.
    """

    def __init__(
        self,
        engine: ClientEngine,
        buffer: SendBuffer,
        codec: BatchCodec,
        routes: PublishRoutes,
        pace: SendPace,
        options: ProducerOptions,
        direct: DirectChannels | None = None,
    ) -> None:
        self._engine = engine
        self._clock = engine.loop.clock
        self._buffer = buffer
        self._codec = codec
        self._routes = routes
        self._direct = direct
        self._on_sent = routes.on_sent if options.send_latency_fault_enable else None
        self._retry_not_stored = options.retry_another_broker_when_not_store_ok
        self._patience_ms = options.failover_patience_ms
        self._followed: dict[str, Backoff] = {}
        self._outbox = RequestOutbox(engine, self, options.max_requests_in_flight, pace)
        self._watches_linger = False
        self._posted: PostedRequest | None = None
        self._deadline_due_ms = 0
        self.watch: Watch = engine.transport.watch
        self.ended: dict[tuple[str, ...], int] = {}
        self.latency = Histogram(SEND_LATENCY_BOUNDS_MS)
        self.lost: Counter[str] = Counter()
        self.has_room = self._outbox.has_room
        self.schedule = self._outbox.schedule

    @property
    def in_flight(self) -> int:
        """Requests without an answer, but for one of a lone send; from any thread."""
        return self._outbox.in_flight

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait, from ``SendBuffer.pending_bytes``; from any thread."""
        return self._buffer.pending_bytes

    def added(self, lane: Lane) -> None:
        """Has the client loop send a lane's new messages, when they may go; from any thread."""
        if lane.lingers:
            if not self._watches_linger:
                self._watches_linger = True
                try:
                    self._engine.post(self._watch_linger)
                except ClientClosed:
                    return  # the closing thread ends what waits
        elif not lane.in_flight and self.has_room(lane.queue.broker_name):
            self.schedule()

    def send_lone(
        self,
        lane: Lane | None,
        topic: TopicLanes,
        message: Message,
        deadline_ms: int,
        retries: int,
        wait_store: bool,
        on_done: OnDone | None = None,
        *,
        waits: bool = True,
    ) -> SendFuture | None:
        """Sends a message once in the calling thread, if the buffer ``is_quiet``.

        Args:
            lane: Lane it must go to, or None for the next lane of ``topic``.
            topic, message, deadline_ms, retries, wait_store, on_done: See ``SendBuffer.append``.
            waits: Wait for the answer; else ``watch`` has it taken.

        Returns:
            Its outcome, of which the client loop takes care unless it is done; None when the
            message has to be added to the buffer.

        Raises:
            ClientClosed: The producer is closed.
        """
        batch = self._buffer.lone_batch(message, deadline_ms, retries, lane is not None, wait_store)
        future = SendFuture(batch, 0)
        if on_done is not None:
            batch.callbacks.append(partial(on_done, future))
        try:
            claimed = self._buffer.claim(batch, lane, topic)
            if claimed is None:
                return None
            if not self._send_directly(batch, claimed, waits):
                self._buffer.put_back(batch)
            if claimed.listed:
                self.schedule()
        except BaseException as error:
            # Ctrl-C anywhere: the lane must not stay in flight, nor its messages be forgotten.
            if batch.size:
                known = error if isinstance(error, MQMeshError) else _interrupted(batch.queue)
                self._finish(batch, known)
                posted = self._posted
                if posted is not None and posted.batch is batch:
                    self.take_posted(known)
                batch.notify()
            self.schedule()
            raise
        return future

    def _send_directly(self, batch: PendingBatch, lane: Lane, waits: bool) -> bool:
        name, direct = batch.queue.broker_name, self._direct
        endpoint = self._engine.brokers.live_endpoint(name)
        if direct is None or endpoint is None or not direct.enter():
            return False
        posted = None
        try:
            request = self._request(name, [batch])
            if request is None:
                return True
            if waits:
                self._outbox.take_elsewhere(request, direct.request(name, endpoint, request))
                return True
            posted = direct.post(name, endpoint, request)
            if posted is None:
                batch.attempts -= 1
                return False
            channel, is_there = posted
            self._posted = PostedRequest(request, channel, lane, batch)
        finally:
            if posted is None:
                direct.leave()
        if is_there:
            self._on_readable()
        else:
            self._watch_posted(self._posted)
        return True

    def _watch_posted(self, posted: "PostedRequest") -> None:
        self.watch(posted.channel, self._on_readable)
        # Mostly the client loop looks for a late answer early enough already.
        if not 0 < self._deadline_due_ms <= posted.batch.deadline_ms:
            self._deadline_due_ms = posted.batch.deadline_ms
            self._engine.post(self._look_for_late)

    def _on_readable(self) -> None:
        self.take_posted()
        posted = self._posted
        if posted is not None:
            self._watch_posted(posted)

    def take_posted(self, error: MQMeshError | None = None) -> None:
        """Takes the answer to a request whose caller does not wait, if it is there.

        From any thread: the one that finds the request in its place deals with it.

        Args:
            error: Ends it without an answer.
        """
        with self._buffer.lock:
            posted, self._posted = self._posted, None
        if posted is None or self._direct is None:
            return
        answer = self._direct.take(posted.channel) or error
        if answer is None:
            self._posted = posted
            return
        self._direct.leave()
        try:
            self._outbox.take_elsewhere(posted.request, answer)
        except ClientClosed as closed:
            self._finish(posted.batch, closed)
        if posted.lane.listed:
            self.schedule()

    def _look_for_late(self) -> None:
        posted, now_ms = self._posted, self._engine.loop.clock.monotonic_ms()
        self._deadline_due_ms = 0
        if posted is not None and posted.batch.deadline_ms <= now_ms:
            self.take_posted(too_late(posted.channel.endpoint))
        elif posted is not None:
            self._deadline_due_ms = posted.batch.deadline_ms
            self._engine.loop.call_later(posted.batch.deadline_ms - now_ms, self._look_for_late)

    def end_all(self, error: MQMeshError, whose: str) -> None:
        """Ends every batch that has no outcome yet, and lets no message in any more.

        At the end of the client loop.

        Args:
            error: Error for callers that wait.
            whose: Owner's name in the log, which reports all losses, also of sends without a
                waiting caller.
        """
        self.take_posted(error)
        self._outbox.close(error)
        for batch in self._buffer.close():
            self._finish(batch, error)
        lost = sorted(self.lost.items())
        if lost:
            what = ", ".join(f"{count} to {topic}" for topic, count in lost)
            _log.error("%s: messages that may not be stored: %s: %s", whose, what, error)

    def _watch_linger(self) -> None:
        # Reset first: a batch that is added meanwhile then starts a watch of its own.
        self._watches_linger = False
        now_ms = self._engine.loop.clock.monotonic_ms()
        due_ms = self._buffer.end_linger(now_ms)
        if due_ms is not None and not self._watches_linger:
            self._watches_linger = True
            self._engine.loop.call_later(due_ms - now_ms, self._watch_linger)
        self.schedule()

    # ---- For the outbox ------------------------------------------------------------------

    def brokers(self) -> Collection[str]:
        """Return the brokers that something can be sent to."""
        return self._buffer.ready_brokers()

    def take(self, broker_name: str) -> OutgoingRequest | None:
        """Return the next request to a broker."""
        while taken := self._buffer.take(broker_name, MAX_REQUEST_BYTES, MAX_BATCHES_PER_REQUEST):
            request = self._request(broker_name, taken)
            if request is not None:
                return request
        return None

    def without(self, broker_name: str) -> None:
        """End late batches, and move others elsewhere, without a connection to a broker."""
        now_ms = self._engine.loop.clock.monotonic_ms()
        error = self._engine.brokers.failures.get(broker_name) or no_connection(
            f"broker {broker_name}"
        )
        for batch in self._buffer.take_late(broker_name, now_ms):
            self._finish(batch, batch.cause or error)
        if self._engine.brokers.may_come(broker_name):
            return
        free = self._buffer.take_free(broker_name, self._routes.other_brokers, now_ms)
        for lane, batch in free:
            other = self._routes.another_lane(batch.queue, batch.holders)
            self._buffer.move(other or lane, batch)

    # ---- Requests and answers; of lone sends in their callers' threads -------------------

    def _request(self, broker_name: str, taken: list[PendingBatch]) -> OutgoingRequest | None:
        """Number and encode batches, and end those that cannot be sent; None if none is left."""
        now_ns, wall_ms = self._clock.monotonic_ns(), self._clock.wall_ns() // 1_000_000
        now_ms = now_ns // 1_000_000
        batches: list[PendingBatch] = []
        parts: list[bytes] = []
        timeout_ms = 0
        for batch in taken:
            left_ms = batch.deadline_ms - now_ms
            if left_ms <= 0:
                self._finish(batch, batch.cause or _too_late(batch.queue))
                continue
            try:
                parts += self._codec.encode(batch, wall_ms)
            except InvalidArgument as error:
                self._finish(batch, error)
                continue
            batch.attempts += 1
            if left_ms > timeout_ms:
                timeout_ms = left_ms
            batches.append(batch)
        if not batches:
            return None
        return OutgoingRequest(
            RequestCode.SEND_MESSAGE,
            parts,
            encode_send(timeout_ms, len(batches), self._codec.key),
            timeout_ms,
            partial(self._answered, broker_name, batches, now_ns),
        )

    def _answered(
        self,
        broker_name: str,
        batches: list[PendingBatch],
        sent_ns: int,
        answer: Command | MQMeshError,
    ) -> Effects:
        """End the batches if all are stored; others are judged by an event."""
        latency_ms = (self._clock.monotonic_ns() - sent_ns) / 1_000_000
        results: Sequence[BatchOutcome | MQMeshError]
        try:
            if isinstance(answer, MQMeshError):
                raise answer
            results = outcomes = read_outcomes(answer, len(batches))
        except MQMeshError as error:
            if self._on_sent is not None and not isinstance(error, NotMaster):
                self._on_sent(broker_name, latency_ms, False)
            results = [error] * len(batches)
        else:
            if self._on_sent is not None:
                self._on_sent(broker_name, latency_ms, True)
            for outcome in outcomes:
                if outcome.code or (outcome.status and self._retry_not_stored):
                    self._end((), (), latency_ms)
                    break
            else:
                ended = self._end(batches, outcomes, latency_ms)
                return Effects(
                    on_left=ended[0].notify if len(ended) == 1 else partial(_notify, ended)
                )
        return Effects(later=[(0, partial(self._judge_all, broker_name, batches, results))])

    def _end(
        self,
        batches: Sequence[PendingBatch],
        results: Sequence[BatchOutcome | MQMeshError],
        latency_ms: float | None = None,
    ) -> list[PendingBatch]:
        """End batches and count them; return those whose waiters have to be notified."""
        ended, buffer = [], self._buffer
        # All at once, since the lock is dear while many threads send.
        with buffer.lock:
            if latency_ms is not None:
                self.latency.observe(latency_ms)
            for batch, result in zip(batches, results, strict=True):
                if buffer.end(batch, result):
                    self._count(batch, result)
                    ended.append(batch)
        return ended

    def _count(self, batch: PendingBatch, result: BatchOutcome | MQMeshError) -> None:
        topic, count = batch.queue.topic, batch.explicit_count or len(batch.messages)
        if isinstance(result, BatchOutcome):
            key = (topic, _NAMES[result.status])
        else:
            key = (topic, type(result).__name__)
            if isinstance(result, ClientClosed):
                self.lost[topic] += count
        ended = self.ended
        if key not in ended:
            if len(ended) >= MAX_LABEL_SETS:
                key = (OTHER, key[1])
            ended.setdefault(key, 0)
        ended[key] += count

    def _finish(self, batch: PendingBatch, result: BatchOutcome | MQMeshError) -> None:
        """End a batch, with the best that is known of it."""
        if isinstance(result, MQMeshError):
            if batch.accepted is not None:
                batch.queue, result = batch.accepted
            elif batch.doubt is not None and isinstance(result, BrokerError | NoRoute):
                # That it was refused the last time does not mean that it is not there.
                if result is not batch.doubt:
                    batch.doubt.__cause__ = result
                result = batch.doubt
        _notify(self._end([batch], [result]))

    # ---- The judge; in the client loop ---------------------------------------------------

    def _judge_all(
        self,
        broker_name: str,
        batches: list[PendingBatch],
        results: Sequence[BatchOutcome | MQMeshError],
    ) -> Effects:
        effects = Effects()
        for batch, result in zip(batches, results, strict=True):
            self._judge(batch, result, effects)
        self._follow(broker_name, results[0], effects)
        return effects

    def _judge(
        self, batch: PendingBatch, result: BatchOutcome | MQMeshError, effects: Effects
    ) -> None:
        """Decides the outcome of a batch in flight."""
        if isinstance(result, MQMeshError):
            self._failed(batch, result, effects)
        elif result.code != _OK:
            error = error_of(result.code, result.remark, result.retry_after_ms)
            self._failed(batch, error, effects)
        elif not self._stored_elsewhere(batch, result):
            self._finish(batch, result)

    def _stored_elsewhere(self, batch: PendingBatch, outcome: BatchOutcome) -> bool:
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
        return self._move(batch)

    def _failed(self, batch: PendingBatch, error: MQMeshError, effects: Effects) -> None:
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
                effects.later.append((BACKOFF_MS, partial(self._reconsider, batch, error)))
            else:
                self._finish(batch, error)
            return
        if verdict in (SendFailure.WAIT, SendFailure.FOLLOW):
            batch.attempts -= 1
        elif not batch.bound and self._move(batch):
            return
        # The lane stays in flight while its first batch waits, so that nothing overtakes it.
        delay_ms = 0 if isinstance(error, TransportError) else BACKOFF_MS
        effects.later.append((delay_ms, partial(self._again, batch)))

    def _follow(
        self, broker_name: str, result: BatchOutcome | MQMeshError, effects: Effects
    ) -> None:
        """Repeat at the master that a former one names, at once or after a growing delay."""
        if isinstance(result, NotMaster) and self._engine.routes.follow(result, broker_name):
            if broker_name not in self._followed:
                now_ms = self._engine.loop.clock.monotonic_ms
                self._followed[broker_name] = Backoff(now_ms, BACKOFF_MS)
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

    def _again(self, batch: PendingBatch) -> None:
        if batch.bound or not self._move(batch):
            self._buffer.put_back(batch)

    def _reconsider(self, batch: PendingBatch, error: MQMeshError) -> None:
        if batch.queue in self._engine.routes.publish_queues(batch.queue.topic) or not self._move(
            batch
        ):
            self._finish(batch, error)

    def _move(self, batch: PendingBatch) -> bool:
        # A broker recognises a repetition only in the queue it knows it from, and only while
        # not much else came there: one that was left in doubt is not gone back to.
        if not batch.retries or self._engine.loop.clock.monotonic_ms() < batch.stays_until_ms:
            return False
        other = self._routes.another_lane(batch.queue, batch.holders)
        if other is None:
            return False
        self._buffer.move(other, batch)
        return True


SEND_METRICS: Final[tuple[Measured[Sender], ...]] = (
    counter(
        "sends_total",
        "messages whose send has an outcome: its SendStatus, or the name of its error",
        lambda sender: sender.ended.copy(),
        unit="messages",
        labels=("topic", "status"),
    ),
    histogram(
        "send_latency_ms",
        "from a send request to the broker's answer",
        lambda sender: sender.latency.read(),
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


def _notify(batches: list[PendingBatch]) -> None:
    for batch in batches:
        batch.notify()


def _interrupted(queue: MessageQueue) -> RequestTimeout:
    return RequestTimeout(
        f"the send to {queue} was interrupted; whether the message was stored is unknown"
    )


def _too_late(queue: MessageQueue) -> RequestTimeout:
    return RequestTimeout(
        f"the message for {queue.topic}/{queue.broker_name}/{queue.queue_id} was not stored "
        "within its timeout (send_msg_timeout_ms)"
    )
