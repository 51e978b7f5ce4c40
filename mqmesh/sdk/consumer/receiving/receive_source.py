"""Receives of one topic at one broker: one at a time waits there."""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Final

import msgspec

from mqmesh.errors import (
    ClientClosed,
    MQMeshError,
    StaleGeneration,
    StaleReceipt,
    TopicNotFound,
)
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.delivery import (
    MAX_RECEIVED,
    MIN_INVISIBLE_MS,
    ReceiveRequest,
    ReceiveResponse,
    SettleAction,
    SettleResponse,
)
from mqmesh.protocol.pulling import MAX_SUSPEND_MS
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector
from mqmesh.sdk.consumer.receiving.held_leases import HeldLease, ReceivedAnswer, read_answer
from mqmesh.sdk.consumer.receiving.settler import (
    REQUEST_MS,
    OnSettled,
    Report,
    Settler,
    Settling,
)

ANSWER_MS: Final = 10_000
"""Longest wait for an answer beyond the time that the broker may hold the request."""
RETRY_MS: Final = 200
KEEP_MS: Final = 2_000
"""Messages are kept so long for a caller that does not receive them."""
RETURN_MS: Final = 1_000
"""The return of messages is tried so long; then their lease ends by itself."""

_log = logging.getLogger(__name__)


class Demand(msgspec.Struct, frozen=True):
    """Demand of the callers that wait for messages.

    Attributes:
        max_messages: Most messages, from 1.
        invisible_ms: Length of the leases; 0 for the group's.
        until_ms: Time until which a caller waits, monotonic clock.
    """

    max_messages: int
    invisible_ms: int
    until_ms: int


class LoneReport(msgspec.Struct, frozen=True, eq=False):
    """Report for a request from its caller's thread.

    Attributes:
        report: The report.
        code: Of the request: RECEIVE_MESSAGE where messages are wanted as well.
        header: Of the request.
    """

    report: Report
    code: RequestCode
    header: bytes


class ReceiveSource:
    """Receives of one topic at one broker, and the leases that came of them; in the client loop.

    Args:
        client: Connections.
        broker_name: Broker group.
        group: Consumer group.
        topic: Topic.
        selector: Messages that are wanted.
        is_earlier: The member subscribed before the broker had the topic.
        demand: Returns the demand at this source; None for none.
        prefetch: Returns the demand to send together with a report, as a caller will have it soon;
            None for none.
        on_received: Called with the received messages.
        on_hindered: Called with the error because of which nothing comes; None if that is over.
        on_lost: Called with a lease whose messages another member has by now.
        unbuffer: Takes the messages of a lease out of those that no caller got yet; returns them.
        turn: Lock of the member's machines: reports may be sent from their callers' threads.

    Attributes:
        leases: Leases with messages that are not settled, by number.
        settler: Settlements on their way.
        dropped: No more messages are requested.
        expected: Messages that the receive under way may bring; 0 without one.
        is_known: The broker has answered a receive.
        is_quiet: The last answer had no message.
    """

    def __init__(
        self,
        client: ClientEngine,
        broker_name: str,
        group: str,
        topic: str,
        selector: MessageSelector,
        *,
        is_earlier: bool = False,
        demand: Callable[["ReceiveSource"], Demand | None],
        prefetch: Callable[["ReceiveSource"], Demand | None],
        on_received: Callable[["ReceiveSource", ReceivedAnswer], None],
        on_hindered: Callable[["ReceiveSource", MQMeshError | None], None],
        on_lost: Callable[[HeldLease], None],
        unbuffer: Callable[[HeldLease], int],
        turn: AbstractContextManager[object],
    ) -> None:
        self.broker_name = broker_name
        self.topic = topic
        self.leases: dict[int, HeldLease] = {}
        self.settler = Settler(client, broker_name, group, topic, self.leases, self._ride, turn)
        self._turn = turn
        self.dropped = False
        self.expected = 0
        self.is_known = False
        self.is_quiet = True
        self._again_ms = 0
        self._verify = False
        self._client = client
        self._group = group
        self._selector = selector
        self._is_earlier = is_earlier
        self._on_received = on_received
        self._on_hindered = on_hindered
        self._on_lost = on_lost
        self._unbuffer = unbuffer
        self._demand = demand
        self._prefetch = prefetch
        # The broker gives the same leases to a receive of the same number, if an answer was lost.
        # Another source of the member had others, of which it may give leases once more.
        self._attempt_id = client.transport.random.getrandbits(32) << 16 | 1

    @property
    def has_open(self) -> bool:
        """True if callers have messages that they did not report on."""
        return any(one.has_open for one in self.leases.values())

    def receive(self, demand: Demand | None = None) -> bool:
        """Request messages if a caller waits for some, unless a request is under way.

        Args:
            demand: Demand to send even if no caller waits.

        Returns:
            True if a request was sent.
        """
        now_ms = self._client.loop.clock.monotonic_ms()
        if self.expected or self.dropped or (demand is None and now_ms < self._again_ms):
            return False
        demand = demand or self._demand(self)
        if demand is None:
            return False
        wait_ms = max(demand.until_ms - now_ms, 0)
        report = self.settler.take()
        # With a report the broker answers at once.
        suspend_ms = 0 if report.settlements else min(wait_ms, MAX_SUSPEND_MS)
        self._client.request(
            self.broker_name,
            RequestCode.RECEIVE_MESSAGE,
            lambda answer: self._answered(report, answer),
            header=self._ask(demand, report, suspend_ms),
            timeout_ms=REQUEST_MS if report.settlements else suspend_ms + ANSWER_MS,
        )
        return True

    def receive_again(self) -> None:
        """Request messages if a caller waits for some, without the pause after an earlier error."""
        with self._turn:
            self._again_ms = 0
            self.receive()

    def _ask(self, demand: Demand, report: Report, suspend_ms: int) -> bytes:
        """Note that messages are requested; return the header of RECEIVE_MESSAGE."""
        self.expected = min(demand.max_messages, MAX_RECEIVED)
        wanted = ReceiveRequest(
            self._group,
            self.topic,
            self._client.client_id,
            self.expected,
            invisible_ms=demand.invisible_ms,
            suspend_timeout_ms=suspend_ms,
            expression=self._selector.expression,
            expression_type=self._selector.expression_type,
            verify=self._verify,
            settle=report.settlements,
            attempt_id=self._attempt_id,
            is_earlier=self._is_earlier,
        )
        return encode_header(wanted)

    def begin_alone(self, some: Sequence[Settling], demand: Demand | None) -> LoneReport | None:
        """Begin a report from its caller's thread; ``end_alone`` or ``answered`` follows.

        Args:
            some: Acknowledgements.
            demand: Demand to send together with them; None for none.

        Returns:
            None where other requests are under way.
        """
        if self.expected or self.dropped or not self.is_known:
            return None
        report = self.settler.take_alone(some)
        if report is None:
            return None
        if demand is None:
            header = self.settler.request_of(report)
            return LoneReport(report, RequestCode.SETTLE_MESSAGES, header)
        return LoneReport(report, RequestCode.RECEIVE_MESSAGE, self._ask(demand, report, 0))

    def end_alone(self, lone: LoneReport, answer: Command | MQMeshError) -> bool:
        """Take the answer in the caller's thread; False if the client loop has to, by ``answered``.

        That is after an error: here no request may be sent or planned.
        """
        if isinstance(answer, MQMeshError) or self.dropped:
            return False
        report = lone.report
        received: ReceivedAnswer | None = None
        try:
            if lone.code == RequestCode.SETTLE_MESSAGES:
                codes = decode_header(SettleResponse, answer.header).codes
            else:
                found = decode_header(ReceiveResponse, answer.header)
                codes = found.settled
                received = self._read(found, (answer.body, *answer.further))
        except MQMeshError:
            return False
        if any(codes) or len(codes) != len(report.gathered):
            return False
        if received is not None:
            if received.error is not None or received.unreadable or received.unwanted:
                return False
            self.expected = 0
            self._attempt_id += 1
            self._note(received)
        self.settler.answered(report, codes, None)
        if self._demand(self) is not None:
            with suppress(ClientClosed):
                self._client.post(self.receive_again)
        return True

    def answered(self, lone: LoneReport, answer: Command | MQMeshError) -> None:
        """Take the answer to a report from its caller's thread, in the client loop."""
        if lone.code == RequestCode.RECEIVE_MESSAGE:
            self._answered(lone.report, answer)
            return
        codes: list[int] = []
        error = answer if isinstance(answer, MQMeshError) else None
        if not isinstance(answer, MQMeshError):
            try:
                codes = decode_header(SettleResponse, answer.header).codes
            except MQMeshError as caught:
                error = caught
        with self._turn:
            self.settler.answered(lone.report, codes, error)

    def _ride(self) -> bool:
        if self.expected or self.dropped:
            return False
        demand = self._demand(self) or self._prefetch(self)
        return demand is not None and self.receive(demand)

    def tick(self, now_ms: int, used_ms: int) -> None:
        """Extend leases of messages that no caller has got yet; forget those that ended.

        Args:
            now_ms: Monotonic clock.
            used_ms: Time of the last call for messages: buffered messages are given back after
                ``KEEP_MS``, or a third of a lease, without one.
        """
        for held in list(self.leases.values()):
            length_ms = held.lease.length_ms
            if not held.bits or held.until_ms + length_ms < now_ms:
                del self.leases[held.lease.lease]
            elif held.buffered and now_ms - used_ms >= min(length_ms // 3, KEEP_MS):
                if bits := self._unbuffer(held):
                    some = [(held, bits)]
                    self.settler.gather(SettleAction.RETURN, some, now_ms + RETURN_MS, _nobody)
            elif held.buffered and held.until_ms - now_ms < length_ms * 2 // 3:
                self.extend(held, held.bits, length_ms)

    def show(self) -> None:
        """Extend this member's leases at the broker, which may be another master now."""
        now_ms = self._client.loop.clock.monotonic_ms()
        for held in self.leases.values():
            left_ms = held.until_ms - now_ms
            if held.bits and left_ms > 0:
                self.extend(held, held.bits, max(left_ms, MIN_INVISIBLE_MS))

    def extend(
        self,
        held: HeldLease,
        bits: int,
        length_ms: int,
        on_done: Callable[[MQMeshError | None], None] | None = None,
    ) -> None:
        """Let a lease end later.

        Args:
            held: The lease.
            bits: Messages of it; if none of them is the member's any more, they are forgotten.
            length_ms: It lasts so long from now on.
            on_done: Called with the outcome.
        """
        used_ms = self._client.loop.clock.monotonic_ms()

        def done(error: MQMeshError | None) -> None:
            if error is None:
                held.until_ms = max(held.until_ms, used_ms + length_ms)
            elif isinstance(error, StaleReceipt):
                held.bits &= ~bits
                if not held.bits:
                    self._on_lost(held)
            if on_done is not None:
                on_done(error)

        # So that the next tick does not ask again before the answer is here.
        held.until_ms = max(held.until_ms, used_ms + length_ms)
        self.settler.add(
            Settling(held, bits, SettleAction.EXTEND, used_ms + length_ms, done, length_ms)
        )

    def drop(self, on_done: OnSettled) -> None:
        """Receive no more, and give back all that is held: others get it at once.

        Args:
            on_done: Called once the broker has that, or does not answer.
        """
        self.dropped = True
        self._return(self.leases.values(), on_done)

    def _return(self, leases: Iterable[HeldLease], on_done: OnSettled) -> None:
        self.settler.gather(
            SettleAction.RETURN,
            [(held, held.bits) for held in leases if held.bits],
            self._client.loop.clock.monotonic_ms() + RETURN_MS,
            on_done,
        )

    def _answered(self, report: Report, answer: Command | MQMeshError) -> None:
        with self._turn:
            self._take_answer(report, answer)

    def _take_answer(self, report: Report, answer: Command | MQMeshError) -> None:
        self.expected = 0
        found = ReceiveResponse()
        error = answer if isinstance(answer, MQMeshError) else None
        if not isinstance(answer, MQMeshError):
            try:
                found = decode_header(ReceiveResponse, answer.header)
                self._attempt_id += 1
                self._take(found, (answer.body, *answer.further))
            except MQMeshError as caught:
                error = caught
        # Behind the messages: a caller that waits for its report finds them.
        self.settler.answered(report, found.settled, None if found.settled else error)
        self._go_on(error)

    def _go_on(self, error: MQMeshError | None) -> None:
        if error is None:
            self._on_hindered(self, None)
            self.receive()
        elif isinstance(error, StaleGeneration):
            _log.info("broker %s does not know this member yet: %s", self.broker_name, error)
            self._client.heartbeats.send_all_soon()
            self._client.call_later(RETRY_MS, self.receive_again)
        else:
            self._on_hindered(self, error)
            self._is_earlier |= isinstance(error, TopicNotFound)
            pause_ms = max(getattr(error, "retry_after_ms", 0), RETRY_MS)
            self._again_ms = self._client.loop.clock.monotonic_ms() + pause_ms
            self._client.call_later(pause_ms, self.receive_again)

    def _take(self, found: ReceiveResponse, bodies: Sequence[memoryview]) -> None:
        """Take received messages.

        Raises:
            CorruptBatch, RemoteProtocolError: Some of it is damaged.
        """
        received = self._read(found, bodies)
        if self.dropped:
            self.leases.update((held.lease.lease, held) for held in received.held)
            self._return(received.held, _nobody)  # it was under way meanwhile
            return
        self._note(received)
        if received.error is not None:
            _log.warning("an answer of broker %s is damaged: %s", self.broker_name, received.error)
            give_up_ms = self._client.loop.clock.monotonic_ms() + RETURN_MS
            self.settler.gather(SettleAction.RETURN, received.damaged, give_up_ms, _nobody)
            raise received.error

    def _read(self, found: ReceiveResponse, bodies: Sequence[memoryview]) -> ReceivedAnswer:
        return read_answer(
            found.leases,
            bodies,
            broker_name=self.broker_name,
            topic=self.topic,
            tags=self._selector.wanted_tags(),
            now_ms=self._client.loop.clock.monotonic_ms(),
            namespace=self._client.namespace,
        )

    def _note(self, received: ReceivedAnswer) -> None:
        for held in received.held:
            self.leases[held.lease.lease] = held
        self.is_known, self.is_quiet = True, not received.messages
        # After damage the next request has the broker verify its disk, and skip lost messages.
        self._verify = received.error is not None
        if received.messages or received.unreadable or received.unwanted:
            self._on_received(self, received)


def _nobody(error: MQMeshError | None) -> None:
    """Do nothing: messages that could not be returned come again when their lease is over."""
