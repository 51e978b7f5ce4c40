"""Receives of one topic at one broker: one at a time waits there."""

import logging
from collections.abc import Callable
from typing import Final

import msgspec

from mqmesh.errors import (
    CorruptBatch,
    MQMeshError,
    RemoteProtocolError,
    StaleGeneration,
    StaleReceipt,
    SystemBusy,
)
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.delivery import (
    MAX_RECEIVED,
    MIN_INVISIBLE_MS,
    ReceiveRequest,
    ReceiveResponse,
    SettleAction,
)
from mqmesh.protocol.pulling import MAX_SUSPEND_MS
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector
from mqmesh.sdk.consumer.receiving.held_leases import HeldLease, ReceivedAnswer, read_answer
from mqmesh.sdk.consumer.receiving.settler import Settler, Settling

ANSWER_MS: Final = 10_000
"""Longest wait for an answer beyond the time that the broker may hold the request."""
RETRY_MS: Final = 200

_log = logging.getLogger(__name__)


class Demand(msgspec.Struct, frozen=True):
    """Demand of the callers that wait for messages.

    Attributes:
        max_messages: Most messages, from 1.
        invisible_ms: Length of the leases; 0 for the group's.
        until_ms: So long somebody waits, monotonic clock.
    """

    max_messages: int
    invisible_ms: int
    until_ms: int


class ReceiveSource:
    """Receives of one topic at one broker, and the leases that came of them; in the client loop.

    Args:
        client: Connections.
        broker_name: Broker group.
        group: Consumer group.
        topic: Topic.
        selector: Messages that are wanted.
        demand: Returns what callers want; None if nobody waits.
        on_received: Called with what came.
        on_hindered: Called with why nothing comes; None if that is over.
        on_lost: Called with a lease that somebody else has by now.

    Attributes:
        leases: Leases with messages that are not settled, by number.
        settler: Settlements on their way.
    """

    def __init__(
        self,
        client: ClientEngine,
        broker_name: str,
        group: str,
        topic: str,
        selector: MessageSelector,
        *,
        demand: Callable[[], Demand | None],
        on_received: Callable[["ReceiveSource", ReceivedAnswer], None],
        on_hindered: Callable[["ReceiveSource", MQMeshError | None], None],
        on_lost: Callable[[HeldLease], None],
    ) -> None:
        self.broker_name = broker_name
        self.topic = topic
        self.leases: dict[int, HeldLease] = {}
        self.settler = Settler(client, broker_name, group, topic)
        self.dropped = False
        self._client = client
        self._group = group
        self._selector = selector
        self._on_received = on_received
        self._on_hindered = on_hindered
        self._on_lost = on_lost
        self._is_busy = False
        self._demand = demand

    def receive(self) -> None:
        """Ask for messages if somebody waits for some, unless that is under way."""
        demand = None if self._is_busy or self.dropped else self._demand()
        if demand is None:
            return
        wait_ms = max(demand.until_ms - self._client.loop.clock.monotonic_ms(), 0)
        self._is_busy = True
        suspend_ms = min(wait_ms, MAX_SUSPEND_MS)
        wanted = ReceiveRequest(
            self._group,
            self.topic,
            self._client.client_id,
            min(demand.max_messages, MAX_RECEIVED),
            invisible_ms=demand.invisible_ms,
            suspend_timeout_ms=suspend_ms,
            expression=self._selector.expression,
            expression_type=self._selector.expression_type,
        )
        self._client.request(
            self.broker_name,
            RequestCode.RECEIVE_MESSAGE,
            self._answered,
            header=encode_header(wanted),
            timeout_ms=suspend_ms + ANSWER_MS,
        )

    def tick(self, now_ms: int, asked_ms: int) -> None:
        """Extend leases of messages that nobody has got yet; forget those that ended.

        Args:
            now_ms: Monotonic clock.
            asked_ms: When a caller asked for messages last: they are not kept from others for one
                that does not ask for the length of a lease.
        """
        for held in list(self.leases.values()):
            length_ms = held.lease.length_ms
            if not held.bits or held.until_ms + length_ms < now_ms:
                del self.leases[held.lease.lease]
            elif (
                held.buffered
                and now_ms - asked_ms < length_ms
                and held.until_ms - now_ms < length_ms * 2 // 3
            ):
                self.extend(held, held.bits, length_ms)

    def show(self) -> None:
        """Show the broker, which may be another master now, what this member holds."""
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
        """Let a lease end later."""
        asked_ms = self._client.loop.clock.monotonic_ms()

        def done(error: MQMeshError | None) -> None:
            if error is None:
                held.until_ms = max(held.until_ms, asked_ms + length_ms)
            elif isinstance(error, StaleReceipt):
                self._on_lost(held)
            if on_done is not None:
                on_done(error)

        # So that the next tick does not ask again before the answer is here.
        held.until_ms = max(held.until_ms, asked_ms + length_ms)
        self.settler.add(
            Settling(held, bits, SettleAction.EXTEND, asked_ms + length_ms, done, length_ms)
        )

    def _answered(self, answer: Command | MQMeshError) -> None:
        self._is_busy = False
        try:
            if isinstance(answer, MQMeshError):
                raise answer
            found = decode_header(ReceiveResponse, answer.header)
            received = read_answer(
                found.leases,
                (answer.body, *answer.further),
                broker_name=self.broker_name,
                topic=self.topic,
                tags=self._selector.wanted_tags(),
                now_ms=self._client.loop.clock.monotonic_ms(),
            )
        except (CorruptBatch, RemoteProtocolError) as error:
            self._hindered(error, RETRY_MS)
            return
        except SystemBusy as error:
            self._hindered(error, max(error.retry_after_ms, RETRY_MS))
            return
        except StaleGeneration as error:
            _log.info("broker %s does not know this member yet: %s", self.broker_name, error)
            self._client.heartbeats.send_all_soon()
            self._client.call_later(RETRY_MS, self.receive)
            return
        except MQMeshError as error:
            self._hindered(error, RETRY_MS)
            return
        self._on_hindered(self, None)
        for held in received.held:
            self.leases[held.lease.lease] = held
        self._on_received(self, received)
        self.receive()

    def _hindered(self, error: MQMeshError, delay_ms: int) -> None:
        self._on_hindered(self, error)
        self._client.call_later(delay_ms, self.receive)
