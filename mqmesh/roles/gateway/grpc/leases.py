"""Messages that clients by gRPC were given, and reports on them.

A lease of a broker has many messages, and a client has each of them for a time of its own: so the
gateway keeps how long that is, extends a lease as long as a client has a message of it, and gives
back those whose time is over.
"""

import heapq
import itertools
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import msgspec

from mqmesh.errors import MQMeshError, StaleReceipt
from mqmesh.protocol.codes import ResponseCode, error_of
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.delivery import (
    BY_SCHEDULE,
    MAX_SETTLEMENTS,
    MIN_INVISIBLE_MS,
    SettleAction,
    Settlement,
    SettleRequest,
    SettleResponse,
)
from mqmesh.roles.gateway.grpc.handles import Receipt
from mqmesh.roles.gateway.upstream import Upstream
from mqmesh.sdk.consumer.receiving.held_leases import HeldLease

RENEWED_MS: Final = 3 * 3_600_000
"""A message that the gateway renews for its client may be worked on for so long."""
TICK_MS: Final = 250
LOOK_MS: Final = 60_000
"""Each lease is looked at so often, at least."""
_AT_ONCE: Final = 0

OnSettled = Callable[[MQMeshError | None], None]
_log = logging.getLogger(__name__)


class Reports:
    """Reports on their way to brokers: those of one turn of the loop go together.

    Args:
        upstream: Way to the brokers.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._waiting: dict[tuple[str, str, str, str], list[tuple[Settlement, OnSettled]]] = {}

    def add(
        self,
        broker_name: str,
        group: str,
        topic: str,
        member: str,
        settlement: Settlement,
        on_settled: OnSettled,
    ) -> None:
        """Report on messages.

        Args:
            broker_name: Broker group.
            group: Consumer group.
            topic: Topic that was received from.
            member: Client that reports.
            settlement: The report.
            on_settled: Called once with why it does not count, or None; never before this returns.
        """
        key = (broker_name, group, topic, member)
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = []
            self._upstream.post(partial(self._send, key))
        waiting.append((settlement, on_settled))
        if len(waiting) >= MAX_SETTLEMENTS:
            self._send(key)

    def flush(self) -> None:
        """Send what waits now, before the way to the brokers is closed."""
        for key in list(self._waiting):
            self._send(key)

    def _send(self, key: tuple[str, str, str, str]) -> None:
        reports = self._waiting.pop(key, None)
        if reports is None:
            return
        broker_name, group, topic, member = key

        def done(answer: Command | MQMeshError) -> None:
            error: MQMeshError | None = None
            codes: list[int] = []
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                codes = decode_header(SettleResponse, answer.header).codes
            except MQMeshError as caught:
                error = caught
            for number, (_, on_settled) in enumerate(reports):
                code = codes[number] if number < len(codes) else ResponseCode.SYSTEM_ERROR
                if code == ResponseCode.SUCCESS:
                    on_settled(None)
                else:
                    on_settled(error or error_of(code, _TEXTS.get(code, "try it again")))

        header = encode_header(SettleRequest(group, topic, member, [one for one, _ in reports]))
        self._upstream.ask(broker_name, RequestCode.SETTLE_MESSAGES, header, done)


_TEXTS: Final = {
    int(
        ResponseCode.STALE_RECEIPT
    ): "the lease of the message has ended: another consumer has got it, or may get it"
}


class ClientLease(msgspec.Struct, eq=False):
    """A lease that a client has.

    Attributes:
        client_id: The client.
        group: Its group.
        held: As the broker gave it.
        unsettled: Messages of it without a report, by queue offset: until when the client has them,
            monotonic clock.
        is_renewed: The gateway renews it for the client.
        source: Connection that it was given by.
        given_ms: When that was, monotonic clock.
        planned_ms: Time of its next check, monotonic clock; 0 for none.
        extensions: Number of extensions of it without an answer.
    """

    client_id: str
    group: str
    held: HeldLease
    unsettled: dict[int, int]
    is_renewed: bool
    source: object
    given_ms: int
    planned_ms: int = 0
    extensions: int = 0


class ClientLeases:
    """All leases of clients.

    Args:
        reports: Reports on their way.
        now_ms: Monotonic clock.
        most: Messages that are kept; no more are received then.

    Attributes:
        messages: Messages that clients have.
    """

    def __init__(self, reports: Reports, now_ms: Callable[[], int], most: int) -> None:
        self._reports = reports
        self._now_ms = now_ms
        self._most = most
        self._leases: dict[tuple[str, int], ClientLease] = {}
        self._by_client: dict[str, dict[ClientLease, None]] = {}
        self._events: list[tuple[int, int, ClientLease]] = []
        self._serial = itertools.count()
        self.messages = 0

    @property
    def is_full(self) -> bool:
        """True when no more may be received."""
        return self.messages >= self._most

    def add(
        self,
        client_id: str,
        group: str,
        held: HeldLease,
        offsets: Iterable[int],
        renewed: bool,
        source: object,
    ) -> None:
        """Note a lease that a client was given by a connection, the ``source``."""
        now_ms = self._now_ms()
        until_ms = now_ms + RENEWED_MS if renewed else held.until_ms
        unsettled = dict.fromkeys(offsets, until_ms)
        one = ClientLease(client_id, group, held, unsettled, renewed, source, now_ms)
        if not one.unsettled:
            return
        key = (held.broker_name, held.lease.lease)
        former = self._leases.get(key)
        if former is not None:
            self._drop(former)  # an answer that was lost has come once more
        self._leases[key] = one
        self._by_client.setdefault(client_id, {})[one] = None
        self.messages += len(one.unsettled)
        self._plan(one)

    def find(self, receipt: Receipt) -> ClientLease | None:
        """Return the lease of a receipt, if a client of this gateway has its message."""
        one = self._leases.get((receipt.broker_name, receipt.lease))
        return one if one is not None and receipt.queue_offset in one.unsettled else None

    def take(self, receipt: Receipt) -> None:
        """Note that a message has its report."""
        one = self.find(receipt)
        if one is not None:
            self._take(one, receipt.queue_offset)

    def change(self, one: ClientLease, offset: int, length_ms: int, on_done: OnSettled) -> None:
        """Let a client have a message for another time.

        Args:
            one: Its lease.
            offset: The message.
            length_ms: From now on.
            on_done: Called once; maybe before this returns.
        """
        former_ms, until_ms = one.unsettled[offset], self._now_ms() + length_ms
        one.unsettled[offset] = until_ms

        def done(error: MQMeshError | None) -> None:
            if error is not None and one.unsettled.get(offset) == until_ms:
                one.unsettled[offset] = former_ms
            on_done(error)

        if until_ms <= one.held.until_ms:
            on_done(None)
        else:
            self._extend(one, length_ms, done)
        self._plan(one)

    def show(self, client_id: str, broker_name: str) -> None:
        """Report the leases of a client to a broker, which may be another master now."""
        now_ms = self._now_ms()
        for one in self._by_client.get(client_id, ()):
            if one.held.broker_name == broker_name and one.held.until_ms > now_ms:
                self._extend(one, max(one.held.until_ms - now_ms, MIN_INVISIBLE_MS), _ignore)

    def give_back(self, held: HeldLease) -> None:
        """Give back the messages of a lease that did not reach their client."""
        one = self._leases.get((held.broker_name, held.lease.lease))
        if one is not None and one.held is held:
            self._report(one, list(one.unsettled), SettleAction.RETURN, BY_SCHEDULE)
            self._drop(one)

    def source_ended(self, client_id: str, source: object, since_ms: int) -> None:
        """Renew no more what a connection that ended may not have carried to its client.

        Args:
            client_id: The client.
            source: The connection.
            since_ms: Time from which on messages that were given are in doubt, monotonic clock.
        """
        for one in self._by_client.get(client_id, ()):
            if one.is_renewed and one.source is source and one.given_ms >= since_ms:
                one.unsettled = dict.fromkeys(one.unsettled, one.held.until_ms)
                self._plan(one)

    def client_left(self, client_id: str) -> None:
        """Give back the leases that the gateway renews for a client; others end by themselves."""
        for one in list(self._by_client.get(client_id, ())):
            if one.is_renewed:
                self._report(one, list(one.unsettled), SettleAction.RETURN, BY_SCHEDULE)
            self._drop(one)

    def tick(self) -> None:
        """Extend leases and give back messages; to be called each ``TICK_MS``."""
        now_ms = self._now_ms()
        while self._events and self._events[0][0] <= now_ms:
            at_ms, _, one = heapq.heappop(self._events)
            if at_ms != one.planned_ms:
                continue  # it was looked at before
            one.planned_ms = 0
            held = one.held
            if self._leases.get((held.broker_name, held.lease.lease)) is not one:
                continue
            if held.until_ms <= now_ms and not one.extensions:
                self._drop(one)  # it ended at the broker, too
                continue
            over = [offset for offset, until_ms in one.unsettled.items() if until_ms <= now_ms]
            for offset in over:
                self._take(one, offset)
            if over:
                self._report(one, over, SettleAction.NACK, _AT_ONCE)
            if not one.unsettled:
                continue
            if self._is_short(one) and now_ms >= self._renew_ms(one) and not one.extensions:
                length_ms = min(held.lease.length_ms, max(one.unsettled.values()) - now_ms)
                self._extend(one, max(length_ms, MIN_INVISIBLE_MS), _ignore)
            self._plan(one)

    # ---- Helpers -------------------------------------------------------------------------

    def _is_short(self, one: ClientLease) -> bool:
        return max(one.unsettled.values()) > one.held.until_ms

    def _renew_ms(self, one: ClientLease) -> int:
        return one.held.until_ms - one.held.lease.length_ms * 2 // 3

    def _plan(self, one: ClientLease) -> None:
        at_ms = min(min(one.unsettled.values()), one.held.until_ms)
        if self._is_short(one):
            at_ms = min(at_ms, self._renew_ms(one))
        # Not in this tick; and what is settled meanwhile stays in the heap until then.
        now_ms = self._now_ms()
        at_ms = min(max(at_ms, now_ms + 1), now_ms + LOOK_MS)
        if one.planned_ms and one.planned_ms <= at_ms:
            return
        one.planned_ms = at_ms
        heapq.heappush(self._events, (at_ms, next(self._serial), one))

    def _extend(self, one: ClientLease, length_ms: int, on_done: OnSettled) -> None:
        until_ms = self._now_ms() + length_ms

        def done(error: MQMeshError | None) -> None:
            one.extensions -= 1
            if isinstance(error, StaleReceipt):
                self._drop(one)
            elif one.unsettled:
                if error is None:
                    one.held.until_ms = max(one.held.until_ms, until_ms)
                self._plan(one)  # one that failed is tried again while the lease lasts
            on_done(error)

        one.extensions += 1
        self._report(one, list(one.unsettled), SettleAction.EXTEND, length_ms, done)

    def _report(
        self,
        one: ClientLease,
        offsets: list[int],
        action: SettleAction,
        delay_ms: int,
        on_done: OnSettled | None = None,
    ) -> None:
        held = one.held
        bits = sum(1 << (offset - held.lease.first) for offset in offsets)
        self._reports.add(
            held.broker_name,
            one.group,
            held.topic,
            one.client_id,
            held.settlement(bits, action, delay_ms),
            on_done or _ignore,
        )

    def _take(self, one: ClientLease, offset: int) -> None:
        del one.unsettled[offset]
        self.messages -= 1
        if not one.unsettled:
            self._drop(one)

    def _drop(self, one: ClientLease) -> None:
        held = one.held
        if self._leases.pop((held.broker_name, held.lease.lease), None) is None:
            return
        self.messages -= len(one.unsettled)
        own = self._by_client[one.client_id]
        del own[one]
        if not own:
            del self._by_client[one.client_id]


def _ignore(error: MQMeshError | None) -> None:
    if error is not None:
        _log.info("a report of the gateway's on messages did not count: %s", error)
