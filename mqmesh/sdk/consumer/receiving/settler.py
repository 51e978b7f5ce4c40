"""Settlements on their way to one broker; those that come during a request go together."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

import msgspec

from mqmesh.errors import MQMeshError, RemoteProtocolError, StaleReceipt
from mqmesh.protocol.codes import ResponseCode, error_of
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.delivery import SettleAction, Settlement, SettleRequest, SettleResponse
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.consumer.receiving.held_leases import HeldLease

MOST_AT_ONCE: Final = 1_000
RETRY_MS: Final = 200
REQUEST_MS: Final = 3_000

OnSettled = Callable[[MQMeshError | None], None]


class Settling(msgspec.Struct, eq=False):
    """Report of a member on messages of one lease.

    Attributes:
        held: The lease.
        bits: Messages, a bit each from its first one on.
        action: Outcome of the work.
        give_up_ms: Until when it is tried, monotonic clock.
        delay_ms: As in ``Settlement``.
        reason: As in ``Settlement``.
        on_done: Called with None, or why it could not be settled.
        alone: It may not be put together with others.
    """

    held: HeldLease
    bits: int
    action: SettleAction
    give_up_ms: int
    on_done: OnSettled
    delay_ms: int = -1
    reason: str = ""
    alone: bool = False


class Report(msgspec.Struct, frozen=True):
    """Settlements for one request.

    Attributes:
        gathered: Reports of the member; those of one settlement together.
        settlements: As the broker gets them.
    """

    gathered: list[list[Settling]]
    settlements: list[Settlement]


class Settler:
    """Settlements of one group at one broker, for one topic; in the client loop.

    Args:
        client: Connections.
        broker_name: Broker group.
        group: Consumer group.
        topic: Topic that is received from.
        leases: Leases by number; those without open messages are removed.
        ride: Sends a receive that takes waiting settlements along, if one is due.
        turn: Lock of the member's machines.
    """

    def __init__(
        self,
        client: ClientEngine,
        broker_name: str,
        group: str,
        topic: str,
        leases: dict[int, HeldLease],
        ride: Callable[[], bool],
        turn: AbstractContextManager[object],
    ) -> None:
        self._turn = turn
        self._client = client
        self._broker_name = broker_name
        self._group = group
        self._topic = topic
        self._leases = leases
        self._ride = ride
        self._waiting: deque[Settling] = deque()
        self._is_busy = False
        self._taken = 0
        self._again_ms = 0
        self._when_idle: list[Callable[[], None]] = []

    @property
    def is_idle(self) -> bool:
        """True when nothing is to be settled."""
        return not (self._is_busy or self._waiting or self._taken)

    def add(self, *some: Settling) -> None:
        """Report on messages; with others that came meanwhile."""
        self._waiting += some
        if some and not self._is_busy:
            self._is_busy = True
            self._client.call_later(0, self._send)

    def gather(
        self,
        action: SettleAction,
        some: Sequence[tuple[HeldLease, int]],
        give_up_ms: int,
        on_done: OnSettled,
        *,
        delay_ms: int = -1,
        reason: str = "",
    ) -> None:
        """Report the same of messages of several leases, as bits.

        Args:
            action: Outcome of the work.
            some: Messages.
            give_up_ms: Until when it is tried, monotonic clock.
            on_done: Called once, with the first error if there is any.
            delay_ms: As in ``Settlement``.
            reason: As in ``Settlement``.
        """
        left = len(some)
        first: MQMeshError | None = None

        def done(error: MQMeshError | None) -> None:
            nonlocal left, first
            left -= 1
            first = first or error
            if left == 0:
                on_done(first)

        if not some:
            self._client.call_later(0, lambda: on_done(None))
        self.add(
            *(
                Settling(held, bits, action, give_up_ms, done, delay_ms, reason)
                for held, bits in some
            )
        )

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Call back once nothing is to be settled any more."""
        self._when_idle.append(callback)
        self._look_idle()

    def _look_idle(self) -> None:
        if self.is_idle:
            callbacks, self._when_idle = self._when_idle, []
            for callback in callbacks:
                callback()

    def fail_all(self, error: MQMeshError) -> None:
        """End all reports that wait with an error; the client's loop does not run any more."""
        while self._waiting:
            self._waiting.popleft().on_done(error)

    def take(self) -> Report:
        """Return waiting settlements, for a request of another kind; ``answered`` follows.

        None of it before the pause after a refusal is over: else each answer would ask anew.
        """
        gathered = [] if self._pause_ms() else _gather(self._waiting)
        self._taken += bool(gathered)
        return Report(
            gathered,
            [
                some[0].held.settlement(
                    _bits_of(some), some[0].action, some[0].delay_ms, some[0].reason
                )
                for some in gathered
            ],
        )

    def take_alone(self, some: Sequence[Settling]) -> Report | None:
        """Return a report for a request of another kind that has all of some settlements.

        None if they are too many for one request, or others wait or are under way.
        """
        if len(some) > MOST_AT_ONCE or not self.is_idle or self._pause_ms():
            return None
        self._waiting += some
        return self.take()

    def answered(self, report: Report, codes: list[int], error: MQMeshError | None) -> None:
        """Note the outcome of a report that was taken.

        Args:
            report: From ``take``.
            codes: Response code of each settlement.
            error: Why there are none.
        """
        self._taken -= bool(report.gathered)
        delay_ms = self._note(report, codes, error)
        if self._waiting and not self._is_busy:
            self._is_busy = True
            self._client.call_later(delay_ms, self._send)
        self._look_idle()

    def _send(self) -> None:
        with self._turn:
            self._send_next()

    def _send_next(self) -> None:
        pause_ms = self._pause_ms()
        if self._waiting and pause_ms:
            self._client.call_later(pause_ms, self._send)
            return
        if not self._waiting or self._ride():
            self._is_busy = False
            self._look_idle()
            return
        report = self.take()
        self._client.request(
            self._broker_name,
            RequestCode.SETTLE_MESSAGES,
            lambda answer: self._answered(report, answer),
            header=self.request_of(report),
            timeout_ms=REQUEST_MS,
        )

    def request_of(self, report: Report) -> bytes:
        """Return the header of SETTLE_MESSAGES."""
        return encode_header(
            SettleRequest(self._group, self._topic, self._client.client_id, report.settlements)
        )

    def _answered(self, report: Report, answer: Command | MQMeshError) -> None:
        with self._turn:
            self._take_answer(report, answer)

    def _take_answer(self, report: Report, answer: Command | MQMeshError) -> None:
        codes: list[int] = []
        error: MQMeshError | None = None
        try:
            if isinstance(answer, MQMeshError):
                raise answer
            codes = decode_header(SettleResponse, answer.header).codes
        except MQMeshError as caught:
            error = caught
        self._taken -= bool(report.gathered)
        delay_ms = self._note(report, codes, error)
        if not self._waiting:
            self._is_busy = False
            self._look_idle()
        elif delay_ms:
            self._client.call_later(delay_ms, self._send)
        else:
            self._send_next()

    def _note(self, report: Report, codes: list[int], error: MQMeshError | None) -> int:
        """Report outcomes; return the pause before the next try of the rest."""
        gathered = report.gathered
        if error is None and len(codes) != len(gathered):
            error = RemoteProtocolError(f"{len(codes)} codes for {len(gathered)} settlements")
        again: list[Settling] = []
        now_ms = self._client.loop.clock.monotonic_ms()
        for index, some in enumerate(gathered):
            refusal = error or _error_of(codes[index])
            if refusal is None or isinstance(refusal, StaleReceipt):
                again += self._settled(some, refusal)
                continue
            for one in some:
                if refusal.retriable and now_ms < one.give_up_ms:
                    again.append(one)
                else:
                    one.on_done(refusal)
        self._waiting.extendleft(reversed(again))
        is_failed = (again and error is not None) or any(not one.alone for one in again)
        if is_failed:
            self._again_ms = now_ms + RETRY_MS
        return self._pause_ms()

    def _pause_ms(self) -> int:
        return max(self._again_ms - self._client.loop.clock.monotonic_ms(), 0)

    def _settled(self, some: list[Settling], refusal: MQMeshError | None) -> list[Settling]:
        """Report an outcome; return settlements that have to be tried by themselves."""
        if refusal is not None and len(some) > 1:
            # Another member has one of them by now, but not the others.
            for one in some:
                one.alone = True
            return some
        for one in some:
            if one.action != SettleAction.EXTEND:
                one.held.bits &= ~one.bits
                if not one.held.bits:
                    self._leases.pop(one.held.lease.lease, None)
            one.on_done(refusal)
        return []


def _gather(waiting: deque[Settling]) -> list[list[Settling]]:
    """Take settlements for one request, acknowledgements of one lease together."""
    found: list[list[Settling]] = []
    acks: dict[HeldLease, list[Settling]] = {}
    while waiting and len(found) < MOST_AT_ONCE:
        one = waiting.popleft()
        if one.action != SettleAction.ACK or one.alone:
            found.append([one])
        elif one.held in acks:
            acks[one.held].append(one)
        else:
            acks[one.held] = [one]
            found.append(acks[one.held])
    return found


def _bits_of(some: list[Settling]) -> int:
    bits = 0
    for one in some:
        bits |= one.bits
    return bits


def _error_of(code: int) -> MQMeshError | None:
    if code == ResponseCode.SUCCESS:
        return None
    if code == ResponseCode.STALE_RECEIPT:
        return StaleReceipt("the lease of the message has ended: another member has got it")
    return error_of(code, "the broker could not settle the message")
