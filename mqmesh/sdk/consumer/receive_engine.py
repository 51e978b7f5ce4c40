"""Core of simple consumers: membership, and messages that no caller has taken yet."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from mqmesh.errors import (
    ClientClosed,
    MQMeshError,
    RequestTimeout,
    StaleReceipt,
    TopicNotFound,
)
from mqmesh.message import BatchInfo, StoredMessage
from mqmesh.protocol.command import Command
from mqmesh.protocol.delivery import MIN_INVISIBLE_MS, DeliveryMode, SettleAction
from mqmesh.protocol.membership import (
    ConsumerData,
    HeartbeatRequest,
    HeartbeatResponse,
    MessageModel,
    Subscription,
)
from mqmesh.protocol.route import TopicRoute
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.client.direct_channels import DirectChannels
from mqmesh.sdk.client.options import ClientOptions
from mqmesh.sdk.client.outbox import OutgoingRequest
from mqmesh.sdk.consumer.consumer_options import SimpleConsumerOptions
from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector
from mqmesh.sdk.consumer.hindrances import REPORT_MS, Hindrances
from mqmesh.sdk.consumer.processed_commits import ProcessedCommits
from mqmesh.sdk.consumer.processing import LeasedCommits
from mqmesh.sdk.consumer.receiving.held_leases import HeldLease, bits_of
from mqmesh.sdk.consumer.receiving.receive_source import Demand, LoneReport, ReceiveSource
from mqmesh.sdk.consumer.receiving.receiver import TICK_MS, Receiver
from mqmesh.sdk.consumer.receiving.settler import REQUEST_MS, OnSettled, Settling
from mqmesh.transport.interface import Transport
from mqmesh.version import VERSION

PREFETCH_MS: Final = 1_000
"""Brokers wait so long for messages that no caller waits for yet."""


class ReceiveEngine:
    """A member of a group that acknowledges each message.

    Methods are for the client loop, unless they say so. A report of a caller that waits leaves in
    its own thread if nothing else is under way, as a lone send does, and brings the next messages
    along: so the lock ``turn`` of the receiver goes with all of its machines.

    Args:
        group: Consumer group.
        client: Settings of the connection.
        options: Settings of the consumer.
        transport: The world; ZeroMQ by default.

    Attributes:
        client: Routes, connections and heartbeats.
        hindrances: Reasons why no messages come.
        changed: A condition for messages that came, and callers that wait for some; of any thread.
        on_arrival: Called in the client loop whenever something came, or can come no more.
        processed_commits: Commits of messages together with their outputs.
    """

    def __init__(
        self,
        group: str,
        client: ClientOptions,
        options: SimpleConsumerOptions,
        transport: Transport | None,
    ) -> None:
        self.group = group
        self.options = options
        self.client = ClientEngine(
            client,
            heartbeat=self._heartbeat,
            on_routes=self._routes_changed,
            on_broker=self._broker_changed,
            on_heartbeat=self._heartbeat_answered,
            transport=transport,
        )
        self.changed = self.client.transport.condition()
        self.on_arrival: Callable[[], None] = _nothing
        self.hindrances = Hindrances(
            group,
            self.client.loop.clock.monotonic_ms,
            self.client.call_later,
            topic_wait_ms=options.topic_wait_ms,
            topic_must_exist=options.topic_must_exist,
            on_missing=_ignore,
            on_fatal=self._wake,
        )
        self._selectors: dict[str, MessageSelector] = {}
        self._receiver = Receiver(
            group,
            self.client,
            settle_timeout_ms=options.settle_timeout_ms,
            demand=self._wanted,
            prefetch=self._prefetch,
            on_received=self._received,
            on_hindered=self._hindered,
            unbuffer=self._unbuffer,
        )
        self._turn = self._receiver.turn
        self._commits = ProcessedCommits(self.client)
        self.processed_commits = LeasedCommits(
            group,
            self.client,
            self._receiver,
            self._commits,
            # Messages for the caller's next receive come meanwhile.
            lambda source: source.receive(self._prefetch(source)),
        )
        self._direct = DirectChannels(self.client, 0)
        # Under the condition: messages that came; demands of callers, and the last one; sources
        # that got requests for them and have not answered; time of the last call.
        self._buffer: deque[tuple[HeldLease, list[StoredMessage]]] = deque()
        self._demands: dict[object, Demand] = {}
        self._last: Demand | None = None
        self._sources_of: dict[object, set[ReceiveSource]] = {}
        self._used_ms = 0

    # ---- From any thread -------------------------------------------------------------

    def start(self) -> None:
        """Starts the client loop."""
        self.client.start()
        self.client.post(self._begin)

    def take(self, most: int) -> list[StoredMessage]:
        """Return messages that came, at most so many; those whose lease ended are left out."""
        found: list[StoredMessage] = []
        now_ms = self.client.loop.clock.monotonic_ms()
        with self.changed:
            self._used_ms = now_ms
            while self._buffer and (room := most - len(found)) > 0:
                held, some = self._buffer.popleft()
                if len(some) > room:
                    self._buffer.appendleft((held, some[room:]))
                    some = some[:room]
                held.buffered -= len(some)
                if held.until_ms > now_ms:
                    found += some
        return found

    def want(self, caller: object, demand: Demand) -> None:
        """Have messages requested; ``take`` returns them.

        Args:
            caller: Caller that waits, until ``done``.
            demand: Its demand; brokers get one request even if its time is over.
        """
        now_ms = self.client.loop.clock.monotonic_ms()
        with self.changed:
            if caller in self._sources_of and demand.until_ms <= now_ms:
                return
            self._demands[caller] = self._last = demand
        self.client.post(lambda: self._ask(caller))

    def done(self, caller: object) -> None:
        """Note that a caller waits no more: nothing is requested on its behalf."""
        with self.changed:
            self._demands.pop(caller, None)
            self._sources_of.pop(caller, None)

    def is_answered(self, caller: object) -> bool:
        """Return whether all brokers have answered the requests for a caller."""
        with self.changed:
            return caller in self._sources_of and not self._sources_of[caller]

    def wait(self, timeout_ms: int) -> None:
        """Wait until something may have come."""
        with self.changed:
            if not self._buffer:
                self.changed.wait(timeout_ms / 1_000)

    def wake(self) -> None:
        """Have those who wait look again."""
        self._wake()

    # ---- Life ------------------------------------------------------------------------

    def subscribe(self, topic: str, selector: MessageSelector) -> None:
        """Takes part in a topic; from any thread before ``start``."""
        self._selectors[topic] = selector
        if self.client.started:
            self._follow(topic)
            self.client.heartbeats.send_all_soon()

    def unsubscribe(self, topic: str) -> None:
        """Takes no part in a topic any more: its messages that no caller took are returned."""
        self._selectors.pop(topic, None)
        self.hindrances.end(topic)
        with self._turn:
            for source in self._receiver.forget(topic):
                self._forget(source)
                source.drop(_ignore)
        self.client.heartbeats.send_all_soon()

    def leave(self, on_done: Callable[[bool | MQMeshError], None]) -> None:
        """Gives back all that this member holds: others get it at once."""
        sources = list(self._receiver.sources.values())
        left = len(sources)

        def done(error: MQMeshError | None) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                on_done(True)

        if not left:
            on_done(True)
        with self._turn:
            for source in sources:
                self._forget(source)
                source.drop(done)

    def close(self) -> None:
        """Closes the client; from any thread."""
        self._direct.close(0)
        self.client.close()
        self._abandon()

    def _abandon(self) -> None:
        """End reports that no broker has answered; after the client was closed."""
        self._receiver.abandon()
        self._commits.end_all()

    def _forget(self, source: ReceiveSource) -> None:
        """Leave out messages that came and that no caller got yet."""
        with self.changed:
            mine = {id(one) for one in source.leases.values()}
            self._buffer = deque(pair for pair in self._buffer if id(pair[0]) not in mine)

    # ---- Settle ----------------------------------------------------------------------

    def settle(
        self,
        messages: list[StoredMessage],
        action: SettleAction,
        on_done: OnSettled,
        *,
        delay_ms: int = -1,
        reason: str = "",
    ) -> None:
        """Reports on messages.

        Args:
            messages: As they were received.
            action: Outcome of the work.
            on_done: Called once, with the first error if there is any.
            delay_ms: As in ``Settlement``.
            reason: As in ``Settlement``.
        """
        with self._turn:
            self._settle(messages, action, on_done, delay_ms, reason)

    def settle_alone(self, messages: list[StoredMessage], timeout_ms: int) -> bool:
        """Acknowledges messages in the calling thread, if nothing else is under way.

        Not for the client loop; errors are left to that.

        Args:
            messages: As they were received.
            timeout_ms: Longest wait for the client loop.

        Returns:
            False if the client loop has to do all of it.

        Raises:
            StaleReceipt: Another member has one of the messages by now.
            MQMeshError: No broker has taken it in time.
        """
        source = self._receiver.only_source()
        if source is None or self.client.loop.in_loop_thread:
            return False
        endpoint = self.client.brokers.live_endpoint(source.broker_name)
        if endpoint is None or not self._direct.enter():
            return False
        outcome = _Outcome()
        lone: LoneReport | None = None
        answer: Command | MQMeshError = RequestTimeout("the report was interrupted")
        is_done = False
        try:
            with self._turn:
                if self._receiver.only_source() is source:
                    lone = self._begin_alone(source, messages, outcome)
            if lone is None:
                return False
            request = OutgoingRequest(lone.code, (), lone.header, REQUEST_MS, _ignore)
            answer = self._direct.request(source.broker_name, endpoint, request)
            with self._turn:
                is_done = source.end_alone(lone, answer)
        finally:
            self._direct.leave()
            if lone is not None and not is_done:
                taken = partial(source.answered, lone, answer)
                self.client.call(partial(outcome.wait, taken), timeout_ms)
        return True

    def _begin_alone(
        self, source: ReceiveSource, messages: list[StoredMessage], outcome: "_Outcome"
    ) -> LoneReport | None:
        by_lease: dict[int, list[int]] = {}
        offsets: list[int] = []
        last: BatchInfo | None = None
        for message in messages:
            if message.batch is not last:  # one for all messages of a batch
                last = info = message.info
                if (
                    info.broker_name != source.broker_name
                    or info.fencing_token not in source.leases
                ):
                    return None  # its lease ended
                offsets = by_lease.setdefault(info.fencing_token, [])
            offsets.append(message.queue_offset)
        give_up_ms = self.client.loop.clock.monotonic_ms() + self.options.settle_timeout_ms
        some = []
        for lease, offsets in by_lease.items():
            held = source.leases[lease]
            bits = bits_of(offsets, held.lease.first)
            held.reported |= bits
            some.append(Settling(held, bits, SettleAction.ACK, give_up_ms, outcome.end))
        outcome.left = len(some)
        return source.begin_alone(some, self._prefetch(source)) if some else None

    def _settle(
        self,
        messages: list[StoredMessage],
        action: SettleAction,
        on_done: OnSettled,
        delay_ms: int,
        reason: str,
    ) -> None:
        # Each broker group numbers its leases by itself.
        by_lease: dict[tuple[str, int], tuple[ReceiveSource, HeldLease, list[int]]] = {}
        found: tuple[ReceiveSource, HeldLease, list[int]] | None = None
        error: MQMeshError | None = None
        last: BatchInfo | None = None
        for message in messages:
            info = message.info
            if info is not last:  # one for all messages of a batch
                last, key = info, (info.broker_name, info.fencing_token)
                found = by_lease.get(key)
                if found is None and (known := self._receiver.held(*key)) is not None:
                    found = by_lease[key] = (*known, [])
            if found is None:
                error = StaleReceipt(
                    f"the lease of message {message.message_id} ended, or it is settled already"
                )
            else:
                found[2].append(message.queue_offset)
        left = len(by_lease)
        if not left:
            on_done(error)
            return

        def done(refusal: MQMeshError | None) -> None:
            nonlocal left, error
            left -= 1
            error = error or refusal
            if left == 0:
                on_done(error)

        in_order = self.options.delivery is DeliveryMode.FIFO
        for source, held, offsets in by_lease.values():
            bits = bits_of(offsets, held.lease.first)
            if action == SettleAction.NACK and in_order:
                self._return_behind(source, held, messages)
            if action == SettleAction.EXTEND:
                length_ms = max(delay_ms, MIN_INVISIBLE_MS)
                if held.bits & ~bits:
                    # All of it first, for a new master that does not know yet who has the lease.
                    source.extend(held, held.bits, length_ms)
                source.extend(held, bits, length_ms, done)
            else:
                self._receiver.settle(
                    source, held, bits, action, done, delay_ms=delay_ms, reason=reason
                )

    def _return_behind(
        self, source: ReceiveSource, held: HeldLease, failed: list[StoredMessage]
    ) -> None:
        """Return messages that no caller got yet behind failed ones, by key."""
        keys = {
            one.sharding_key for one in failed if one.info.fencing_token == held.lease.lease
        } - {None}
        behind: list[int] = []
        with self.changed:
            kept: deque[tuple[HeldLease, list[StoredMessage]]] = deque()
            for of, some in self._buffer:
                left = some
                if of is held:
                    behind += [one.queue_offset for one in some if one.sharding_key in keys]
                    left = [one for one in some if one.sharding_key not in keys]
                if left:
                    kept.append((of, left))
            self._buffer = kept
            held.buffered -= len(behind)
        if behind:
            bits = bits_of(behind, held.lease.first)
            self._receiver.settle(source, held, bits, SettleAction.RETURN, _ignore)

    # ---- Events ----------------------------------------------------------------------

    def _begin(self) -> None:
        self.client.loop.call_every(TICK_MS, self._tick)
        for topic in list(self._selectors):
            self._follow(topic)

    def _tick(self) -> None:
        with self._turn:
            self._receiver.tick(self._used_ms)

    def _follow(self, topic: str) -> None:
        def found(route: TopicRoute | MQMeshError) -> None:
            if topic not in self._selectors:
                return
            if isinstance(route, TopicRoute):
                self._routes_changed({topic})
            elif isinstance(route, TopicNotFound):
                self._receiver.follow(topic, self._selectors[topic], ())
                self.hindrances.miss(topic, lambda: TopicNotFound("it does not exist"))
            else:
                self.hindrances.miss(topic, partial(_itself, route), REPORT_MS)

        self.client.finder.find(topic, found)

    def _heartbeat(self) -> HeartbeatRequest:
        subscriptions = [
            Subscription(topic, one.expression, one.expression_type)
            for topic, one in self._selectors.items()
        ]
        data = ConsumerData(
            self.group,
            MessageModel.CLUSTERING,
            self.options.consume_from_where,
            subscriptions,
            self.options.delivery,
        )
        consumers = [data] if subscriptions else []
        return HeartbeatRequest(self.client.client_id, consumers=consumers, version=VERSION)

    def _heartbeat_answered(
        self, broker_name: str, answer: HeartbeatResponse | MQMeshError
    ) -> None:
        what = f"broker {broker_name} refused the heartbeat"
        if isinstance(answer, MQMeshError):
            self.hindrances.note(what, answer)
            return
        self.hindrances.end(what)
        self._receiver.member_known(broker_name)

    def _routes_changed(self, topics: set[str]) -> None:
        routes = self.client.routes
        with self._turn:
            for topic in topics & self._selectors.keys():
                self.hindrances.end(topic)
                names = dict.fromkeys(one.broker_name for one in routes.subscribe_queues(topic))
                self._receiver.follow(topic, self._selectors[topic], names)
            self._receiver.receive()

    def _broker_changed(self, broker_name: str, up: bool) -> None:
        if not up:
            self._direct.interrupt(broker_name)
            return
        with self._turn:
            self._receiver.broker_came(broker_name)

    def _wanted(self, source: ReceiveSource) -> Demand | None:
        now_ms = self.client.loop.clock.monotonic_ms()
        with self.changed:
            if self._buffer:
                return None
            return next((one for one in self._demands.values() if one.until_ms > now_ms), None)

    def _prefetch(self, source: ReceiveSource) -> Demand | None:
        """Return the next demand of the caller that has reported on all of its messages."""
        with self.changed:
            last = None if self._buffer else self._last
        if last is None or any(one.has_open for one in self._receiver.sources.values()):
            return None
        now_ms = self.client.loop.clock.monotonic_ms()
        demand = Demand(last.max_messages, last.invisible_ms, now_ms + PREFETCH_MS)
        for other in self._receiver.sources.values():
            if other is not source:
                other.receive(demand)
        return demand

    def _received(
        self, source: ReceiveSource, messages: list[tuple[HeldLease, list[StoredMessage]]]
    ) -> None:
        with self.changed:
            self._buffer += messages
        self._wake()

    def _ask(self, caller: object) -> None:
        with self.changed:
            demand = None if self._buffer else self._demands.get(caller)
        if demand is None:
            return
        with self._turn:
            sources = self._receiver.sources.values()
            receiving = {source for source in sources if source.receive(demand)}
        with self.changed:
            if caller in self._demands:
                self._sources_of.setdefault(caller, set()).update(receiving)
        if not receiving and demand.until_ms <= self.client.loop.clock.monotonic_ms():
            self._wake()

    def _hindered(self, source: ReceiveSource, error: MQMeshError | None) -> None:
        with self.changed:
            answered = [those for those in self._sources_of.values() if source in those]
            for those in answered:
                those.discard(source)
        if answered:
            self._wake()
        what = f"{source.topic} cannot be received from {source.broker_name}"
        if error is None:
            self.hindrances.end(what)
        elif not self.client.closed and not isinstance(error, ClientClosed):
            self.hindrances.note(what, error, self.options.report_after_ms)

    def _unbuffer(self, held: HeldLease) -> int:
        with self.changed:
            own = [some for of, some in self._buffer if of is held]
            offsets = [message.queue_offset for some in own for message in some]
            self._buffer = deque(pair for pair in self._buffer if pair[0] is not held)
            held.buffered = 0
        return bits_of(offsets, held.lease.first)

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()
        self.on_arrival()


class _Outcome:
    """Outcome of reports on messages of several leases.

    Attributes:
        left: Leases of which there is none yet.
    """

    def __init__(self) -> None:
        self.left = 0
        self._error: MQMeshError | None = None
        self._on_end: Callable[[bool | MQMeshError], None] = _ignore

    def end(self, error: MQMeshError | None) -> None:
        """Note the outcome of one lease."""
        self.left -= 1
        self._error = self._error or error
        if not self.left:
            self._on_end(self._error or True)

    def wait(self, go_on: Callable[[], None], on_end: Callable[[bool | MQMeshError], None]) -> None:
        """Have all of it reported; in the client loop."""
        self._on_end = on_end
        go_on()


def _nothing() -> None:
    """Do nothing."""


def _ignore(what: object) -> None:
    """Do nothing: it is in the log."""


def _itself(error: MQMeshError) -> MQMeshError:
    return error
