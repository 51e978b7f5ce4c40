"""Messages of leases on their way through the listener; they take the place of process queues."""

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final

import msgspec

from mqmesh.errors import ClientClosed, MQMeshError, StaleReceipt
from mqmesh.message import MessageQueue, StoredMessage
from mqmesh.protocol.delivery import DeliveryMode, SettleAction
from mqmesh.protocol.membership import Subscription
from mqmesh.protocol.retries import MAX_REASON_CHARACTERS
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector
from mqmesh.sdk.consumer.fetching.process_queue import DONE, OPEN, PARKED, StateSpan
from mqmesh.sdk.consumer.fetching.pull_loop import PullCounters, PullMeter
from mqmesh.sdk.consumer.listening.consume_result import Cause, is_rejected
from mqmesh.sdk.consumer.listening.consume_service import ConcurrentService
from mqmesh.sdk.consumer.listening.consume_work import AnyListener, Portion, QueueWork
from mqmesh.sdk.consumer.listening.group_retry import reason_of
from mqmesh.sdk.consumer.listening.local_retry import report_failure
from mqmesh.sdk.consumer.receiving.held_leases import HeldLease, bits_of
from mqmesh.sdk.consumer.receiving.receive_source import Demand, ReceiveSource
from mqmesh.sdk.consumer.receiving.receiver import Receiver

SETTLE_MS: Final = 60_000
"""So long an acknowledgement is tried; until then the lease is mostly not over."""
REPORT_MS: Final = 3_000
"""A source that gives nothing for so long is reported."""
PREFETCH: Final = 2
"""Messages that are held for each that workers may have at a time."""
_REPORTED: Final = 3
"""State of a message that was done and is acknowledged: it is not found again."""

_log = logging.getLogger(__name__)


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Modes and sizes of received messages.

    Attributes:
        delivery: ``message``, or ``fifo``: messages of one key are consumed one after the other.
        invisible_ms: Length of the leases; 0 for the group's.
        workers: Most calls of listeners side by side.
        batch_size: Most messages of a call.
        consume_timeout_ms: A message that is with its listener for longer comes again.
        suspend_ms: Longest wait of a receive at its broker.
    """

    delivery: DeliveryMode
    invisible_ms: int
    workers: int
    batch_size: int
    consume_timeout_ms: int
    suspend_ms: int


class ReceivedRun(QueueWork):
    """Messages of a lease that are consumed; with order by key, those of one key.

    Args:
        source: Source of the lease.
        held: The lease.
        messages: In order, at least one.
        came_ms: When they came, monotonic clock.
        listener, batch_size, on_progress: As for ``QueueWork``.

    Attributes:
        source: See above.
        held: See above.
        open: Messages of which brokers have no report, by queue offset.
        rest: Messages that are begun when those before them are done.
        span: States of the messages.
        came_ms: See above.
        begun_ms: Of messages that were seen with a worker, since when.
    """

    __slots__ = ("begun_ms", "came_ms", "held", "open", "rest", "source", "span")

    def __init__(
        self,
        source: ReceiveSource,
        held: HeldLease,
        messages: Sequence[StoredMessage],
        came_ms: int,
        listener: AnyListener,
        batch_size: int,
        on_progress: Callable[["ReceivedRun"], None],
    ) -> None:
        super().__init__(
            listener,
            batch_size,
            partial(on_progress, self),
            _ignore,  # they are decoded already
            topic=messages[0].info.topic,
        )
        first, last = messages[0].queue_offset, messages[-1].queue_offset
        self.source = source
        self.held = held
        self.open: dict[int, StoredMessage] = {one.queue_offset: one for one in messages}
        self.rest = deque(messages)
        self.span = StateSpan(first, bytearray(last + 1 - first), 0)
        self.came_ms = came_ms
        self.begun_ms: dict[int, int] = {}

    def state(self, offset: int) -> int:
        """Return the state of a message."""
        return self.span.states[offset - self.span.base]

    def take_done(self) -> list[StoredMessage]:
        """Return the messages that were done since the last call; they are still ``open``."""
        states, found = self.span.states, []
        at = -1
        while (at := states.find(DONE, at + 1)) >= 0:
            states[at] = _REPORTED
            if (message := self.open.get(self.span.base + at)) is not None:
                found.append(message)
        return found

    def next_portion(self) -> Portion:
        """Take the messages of the next call, of which there are some."""
        call = [self.rest.popleft() for _ in range(min(self.batch_size, len(self.rest)))]
        return Portion(self, call, self.span, call[0].delivery_attempt - 1)


class ReceivedRuns:
    """All messages that a push consumer holds under leases. For the client loop, unless stated.

    Twice as many messages are held as workers may have, so that none of them waits for brokers,
    and no more, so that others get what this member cannot work on.

    Args:
        group: Consumer group.
        client: Connections.
        settings: Modes and sizes.
        counters: Counters of the consumer.
        meters: Counters by topic.
        listener: Listener of all messages.
        on_hindered: Called with words for the log and why a source gives nothing, None if that is
            over, and how long to wait until it is reported.
        on_known: Called with a topic from which messages sent from now on will come.

    Attributes:
        delivery: That of the settings.
        receiver: Sources of the messages.
    """

    def __init__(
        self,
        group: str,
        client: ClientEngine,
        settings: RunSettings,
        counters: PullCounters,
        meters: dict[str, PullMeter],
        listener: AnyListener,
        on_hindered: Callable[[str, MQMeshError | None, int], None],
        on_known: Callable[[str], None],
    ) -> None:
        self.delivery = settings.delivery
        self._is_ordered = settings.delivery is DeliveryMode.FIFO
        self.receiver = Receiver(
            group,
            client,
            settle_timeout_ms=SETTLE_MS,
            demand=self._demand,
            prefetch=lambda source: None,
            on_received=self._take,
            on_hindered=self._hindered,
            unbuffer=self._lost,
        )
        self._group = group
        self._client = client
        self._settings = settings
        self._counters = counters
        self._meters = meters
        self._listener = listener
        self._on_hindered = on_hindered
        self._on_known = on_known
        self._most = PREFETCH * settings.workers * settings.batch_size
        self._runs: dict[HeldLease, dict[ReceivedRun, None]] = {}
        # Messages that are held; with order by key, keys, of which one message is at work.
        self._count = 0
        self._known: set[str] = set()
        self._service: ConcurrentService | None = None
        # Runs of which messages were done, by workers; and whether the client loop looks at them.
        self._progressed: deque[ReceivedRun] = deque()
        self._is_flushing = False

    def attach(self, service: ConcurrentService) -> None:
        """Set the service that has listeners called, before the first message comes."""
        self._service = service

    # ---- From workers ----------------------------------------------------------------

    def on_failed(self, portion: Portion, messages: list[StoredMessage], cause: Cause) -> None:
        """Give a failed call's messages back to their broker; called by a worker."""
        run = portion.work
        assert isinstance(run, ReceivedRun)
        is_rejected_now = is_rejected(messages, cause)
        then = "it is a dead letter" if is_rejected_now else "it comes again later"
        report_failure(messages, portion.attempt, cause, then)
        action = SettleAction.REJECT if is_rejected_now else SettleAction.NACK
        left: list[StoredMessage] = []
        if not is_rejected_now:
            left = list(run.rest)
            run.rest.clear()

        def report() -> None:
            self._report(run, left, SettleAction.RETURN)
            self._report(run, messages, action, reason_of(cause))
            self.receiver.receive()

        self._post(report)

    def _progress(self, run: ReceivedRun) -> None:
        """Have done messages acknowledged; called by a worker."""
        if self._is_ordered and run.rest:
            assert self._service is not None
            self._service.submit_portions([run.next_portion()])
        self._progressed.append(run)
        if not self._is_flushing:
            self._is_flushing = True
            self._post(self._flush)

    def _post(self, callback: Callable[[], None]) -> None:
        try:
            self._client.post(callback)
        except MQMeshError:
            _log.debug("group %s is closed", self._group)

    # ---- Life ------------------------------------------------------------------------

    def tick(self) -> None:
        """Extend leases of messages that are held."""
        self.receiver.tick(self._client.loop.clock.monotonic_ms())

    def look(self, now_ms: int) -> None:
        """Return messages that a listener has for too long, or none has begun for as long."""
        timeout_ms = self._settings.consume_timeout_ms
        at_hand = self._with_listeners()
        for run in [run for runs in self._runs.values() for run in runs]:
            begun = [at for at in at_hand.get(run.held, ()) if at in run.open]
            for offset in begun:
                since_ms = run.begun_ms.setdefault(offset, now_ms)
                if now_ms - since_ms >= timeout_ms and run.state(offset) == OPEN:
                    self._overdue(run, offset)
            if not begun and now_ms - run.came_ms >= timeout_ms:
                self._return_waiting(run, begun)

    def stop(self) -> None:
        """Return messages that no listener has begun: others get them at once. No more come."""
        assert self._service is not None
        for source in self.receiver.sources.values():
            source.dropped = True
        self._service.close()  # so that nothing is begun meanwhile
        self._give_back([run for runs in self._runs.values() for run in runs])

    def finish(self, on_done: Callable[[bool | MQMeshError], None]) -> None:
        """Report done messages; those that listeners still have come again after the leave."""
        self._flush()
        self.receiver.when_settled(lambda: on_done(True))

    def follow(self, wanted: Subscription, queues: Iterable[MessageQueue]) -> None:
        """Receive from a topic at the brokers of its queues."""
        selector = MessageSelector(
            expression=wanted.expression, expression_type=wanted.expression_type
        )
        self.receiver.follow(
            wanted.topic, selector, dict.fromkeys(one.broker_name for one in queues)
        )
        self.receiver.receive()

    def forget(self, topic: str) -> None:
        """Receive no more from a topic; messages that no listener has begun are returned."""
        sources = self.receiver.forget(topic)
        self._known.discard(topic)
        self._give_back(
            [run for runs in self._runs.values() for run in runs if run.source in sources]
        )

    # ---- What is held ----------------------------------------------------------------

    def held(self) -> dict[str, tuple[int, int]]:
        """Return the messages that are not done, and the bytes of their bodies, by topic."""
        found: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for runs in self._runs.values():
            for run in runs:
                count, size = found[run.topic]
                bodies = sum(len(one.body) for one in run.open.values())
                found[run.topic] = count + len(run.open), size + bodies
        return found

    def begun_ms(self, message: StoredMessage) -> int | None:
        """Return since when the listener has a message, monotonic; None for less than a second."""
        info = message.info
        found = self.receiver.held(info.broker_name, info.fencing_token)
        runs = {} if found is None else self._runs.get(found[1], {})
        begun = (run.begun_ms.get(message.queue_offset) for run in runs)
        return next((one for one in begun if one is not None), None)

    # ---- Messages --------------------------------------------------------------------

    def _demand(self, source: ReceiveSource) -> Demand | None:
        if self._count >= self._most:
            return None
        now_ms = self._client.loop.clock.monotonic_ms()
        until_ms = now_ms
        if source.is_known:
            until_ms += self._settings.suspend_ms
        wanted = 1  # from one that had nothing: it may wait there for long
        if not source.is_quiet:
            if self._count > self._most // PREFETCH:
                return None  # not one by one
            expected = sum(one.expected for one in self.receiver.sources.values())
            wanted = max(self._most - self._count - expected, 1)
        return Demand(wanted, self._settings.invisible_ms, until_ms)

    def _take(
        self, source: ReceiveSource, messages: list[tuple[HeldLease, list[StoredMessage]]]
    ) -> None:
        by_lease: dict[HeldLease, list[StoredMessage]] = {}
        for held, some in messages:
            by_lease.setdefault(held, []).extend(some)
        for held, some in by_lease.items():
            self._begin(source, held, some)

    def _begin(self, source: ReceiveSource, held: HeldLease, messages: list[StoredMessage]) -> None:
        topic = messages[0].info.topic
        self._counters.messages += len(messages)
        meter = self._meters.setdefault(topic, PullMeter())
        meter.messages += len(messages)
        meter.pulls += 1
        # One by one when they failed: so the one that spoilt a call of many is found.
        is_again = held.lease.is_retry or held.lease.attempt > 1
        size = 1 if is_again else self._settings.batch_size
        now_ms = self._client.loop.clock.monotonic_ms()
        runs = self._runs[held] = {
            ReceivedRun(source, held, some, now_ms, self._listener, size, self._progress): None
            for some in (_by_key(messages) if self._is_ordered else [messages])
        }
        self._count += len(runs if self._is_ordered else messages)
        portions: list[Portion] = []
        for run in runs:
            while run.rest:
                portions.append(run.next_portion())
                if self._is_ordered:
                    break
        assert self._service is not None
        self._service.submit_portions(portions)

    def _flush(self) -> None:
        self._is_flushing = False
        acks: dict[HeldLease, tuple[ReceiveSource, int]] = {}
        while self._progressed:
            run = self._progressed.popleft()
            if bits := self._end(run, run.take_done()):
                _, others = acks.get(run.held, (run.source, 0))
                acks[run.held] = run.source, others | bits
            if run.revoked:  # else its failures are reported by the worker
                failed = [one for at, one in run.open.items() if run.state(at) == PARKED]
                self._report(run, failed, SettleAction.NACK, "its listener failed")
        for held, (source, bits) in acks.items():
            if bits & held.bits:  # else they were settled together with their outputs
                self._settle(source, held, bits, SettleAction.ACK)
        self.receiver.receive()

    def _report(
        self,
        run: ReceivedRun,
        messages: Iterable[StoredMessage],
        action: SettleAction,
        reason: str = "",
    ) -> None:
        """Report on messages of a run, unless that was done."""
        if bits := self._end(run, messages):
            self._settle(run.source, run.held, bits, action, reason)

    def _end(self, run: ReceivedRun, messages: Iterable[StoredMessage]) -> int:
        """Forget messages of a run that are to be reported; return them as bits of its lease."""
        own = [one for one in messages if run.open.pop(one.queue_offset, None) is not None]
        if not own:
            return 0
        self._count -= (not run.open) if self._is_ordered else len(own)
        if not run.open:
            runs = self._runs[run.held]
            del runs[run]
            if not runs:
                del self._runs[run.held]
        run.held.buffered -= len(own)
        return bits_of([one.queue_offset for one in own], run.held.lease.first)

    def _settle(
        self,
        source: ReceiveSource,
        held: HeldLease,
        bits: int,
        action: SettleAction,
        reason: str = "",
    ) -> None:
        self.receiver.settle(
            source,
            held,
            bits,
            action,
            partial(self._reported, held, action),
            reason=reason[:MAX_REASON_CHARACTERS],
        )

    def _reported(self, held: HeldLease, action: SettleAction, error: MQMeshError | None) -> None:
        if error is None:
            return
        level = logging.WARNING if action is SettleAction.ACK else logging.INFO
        more = "another member has got them" if isinstance(error, StaleReceipt) else str(error)
        _log.log(
            level,
            "group %s: the %s of messages from offset %d on of queue %d of %s did not count: %s",
            self._group,
            action.name,
            held.lease.first,
            held.lease.queue_id,
            held.topic,
            more,
        )

    def _overdue(self, run: ReceivedRun, offset: int) -> None:
        late_ms, message = self._settings.consume_timeout_ms, run.open[offset]
        _log.warning(
            "%s: the message at offset %d is with its listener for %d ms (consume_timeout_ms); "
            "it comes again later",
            message.message_queue,
            offset,
            late_ms,
        )
        run.span.mark(offset, offset, PARKED)
        left = list(run.rest)
        run.rest.clear()
        self._report(run, left, SettleAction.RETURN)
        reason = f"ConsumeTimeout: with its listener for {late_ms} ms (consume_timeout_ms)"
        self._report(run, [message], SettleAction.NACK, reason)

    def _give_back(self, runs: list[ReceivedRun]) -> None:
        at_hand = self._with_listeners()
        for run in runs:
            self._return_waiting(run, at_hand.get(run.held, ()))

    def _return_waiting(self, run: ReceivedRun, begun: Collection[int]) -> None:
        """Give back the messages of a run that no listener has; nothing more of it is begun."""
        assert self._service is not None
        self._service.revoke(run)
        run.rest.clear()
        left = [one for at, one in run.open.items() if at not in begun and run.state(at) != DONE]
        for one in left:
            run.span.mark(one.queue_offset, one.queue_offset, PARKED)
        self._report(run, left, SettleAction.RETURN)

    def _lost(self, held: HeldLease) -> int:
        """Forget the messages of a lease that another member has by now."""
        assert self._service is not None
        for run in self._runs.pop(held, {}):
            self._service.revoke(run)
            run.rest.clear()
            self._count -= 1 if self._is_ordered else len(run.open)
            run.open.clear()
        held.buffered = 0
        return 0

    def _with_listeners(self) -> dict[HeldLease, list[int]]:
        """Return the queue offsets of messages that listeners have, by lease."""
        assert self._service is not None
        found: dict[HeldLease, list[int]] = {}
        for message in self._service.with_listeners:
            info = message.info
            known = self.receiver.held(info.broker_name, info.fencing_token)
            if known is not None:
                found.setdefault(known[1], []).append(message.queue_offset)
        return found

    # ---- Sources ---------------------------------------------------------------------

    def _hindered(self, source: ReceiveSource, error: MQMeshError | None) -> None:
        if error is None:
            self._counters.pulls += 1
            self._note_known(source.topic)
        else:
            self._counters.failures += 1
        what = f"{source.topic} cannot be received from {source.broker_name}"
        if not isinstance(error, ClientClosed):
            self._on_hindered(what, error, REPORT_MS)

    def _note_known(self, topic: str) -> None:
        """Note that brokers have answered: messages that are sent from now on will come."""
        if topic not in self._known and all(
            one.is_known for one in self.receiver.sources.values() if one.topic == topic
        ):
            self._known.add(topic)
            self._on_known(topic)


def _ignore(*_: object) -> None:
    """Do nothing."""


def _by_key(messages: list[StoredMessage]) -> Iterable[list[StoredMessage]]:
    """Divide messages by sharding key, those without one by themselves."""
    found: dict[object, list[StoredMessage]] = {}
    for one in messages:
        found.setdefault(one.sharding_key or one.queue_offset, []).append(one)
    return found.values()
