"""Messages received under leases from all brokers, and the settlements of them."""

import logging
from collections.abc import Callable, Iterable
from typing import Final

from mqmesh.errors import ClientClosed, MQMeshError
from mqmesh.message import StoredMessage
from mqmesh.protocol.delivery import SettleAction
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector
from mqmesh.sdk.consumer.receiving.held_leases import HeldLease, ReceivedAnswer
from mqmesh.sdk.consumer.receiving.receive_source import Demand, ReceiveSource
from mqmesh.sdk.consumer.receiving.settler import OnSettled

TICK_MS: Final = 250

_log = logging.getLogger(__name__)


class Receiver:
    """Sources of messages of one member, by broker and topic; in the client loop.

    Args:
        group: Consumer group.
        client: Connections.
        settle_timeout_ms: So long a settlement is tried.
        demand: Returns the demand at a source; None for none.
        prefetch: Returns the demand to send together with a report; None for none.
        on_received: Called with the messages of an answer, those of each batch with their lease.
        on_hindered: Called with the error because of which a source gives nothing; None if that is
            over.
        unbuffer: Forgets the messages of a lease; returns those that are not begun, as bits.

    Attributes:
        sources: By broker group and topic.
        on_received: See above.
        turn: Lock of these machines. They are the client loop's, but for reports from their
            callers' threads.
    """

    def __init__(
        self,
        group: str,
        client: ClientEngine,
        *,
        settle_timeout_ms: int,
        demand: Callable[[ReceiveSource], Demand | None],
        prefetch: Callable[[ReceiveSource], Demand | None],
        on_received: Callable[[ReceiveSource, list[tuple[HeldLease, list[StoredMessage]]]], None],
        on_hindered: Callable[[ReceiveSource, MQMeshError | None], None],
        unbuffer: Callable[[HeldLease], int],
    ) -> None:
        self.sources: dict[tuple[str, str], ReceiveSource] = {}
        self.turn = client.transport.condition()  # a lock that may be taken twice
        self._group = group
        self._client = client
        self._settle_timeout_ms = settle_timeout_ms
        self._demand = demand
        self._prefetch = prefetch
        self.on_received = on_received
        self._on_hindered = on_hindered
        self._unbuffer = unbuffer
        self._met: set[str] = set()
        self._followed: set[str] = set()
        self._turn = 0
        # Of topics that are not received any more, while messages of them are not settled.
        self._dropped: list[ReceiveSource] = []

    # ---- Sources ---------------------------------------------------------------------

    def follow(self, topic: str, selector: MessageSelector, broker_names: Iterable[str]) -> None:
        """Receive from a topic at brokers, and go on at those that are known.

        Args:
            topic: The topic.
            selector: Messages that are wanted.
            broker_names: Broker groups that have the topic; none if it does not exist yet. The
                first call for a topic says which had it before this member subscribed.
        """
        is_earlier = topic in self._followed
        self._followed.add(topic)
        for broker_name in broker_names:
            if (broker_name, topic) in self.sources:
                continue
            self.sources[broker_name, topic] = ReceiveSource(
                self._client,
                broker_name,
                self._group,
                topic,
                selector,
                is_earlier=is_earlier,
                demand=self._demand,
                prefetch=self._prefetch,
                on_received=self._received,
                on_hindered=self._on_hindered,
                on_lost=self._lost,
                unbuffer=self._unbuffer,
                turn=self.turn,
            )
            try:
                self._client.brokers.connection(broker_name)
            except MQMeshError as error:
                _log.info("broker %s cannot be reached: %s", broker_name, error)

    def forget(self, topic: str) -> list[ReceiveSource]:
        """Receive no more from a topic; return its sources, whose leases may still be settled."""
        self._followed.discard(topic)
        found = [self.sources.pop(key) for key in list(self.sources) if key[1] == topic]
        for source in found:
            source.dropped = True
        self._dropped += found
        return found

    def broker_came(self, broker_name: str) -> None:
        """Extend this member's leases at a broker that was away, and may be another master now."""
        if broker_name in self._met:
            for source in self._all():
                if source.broker_name == broker_name:
                    source.show()
        self._met.add(broker_name)
        self.receive()

    def member_known(self, broker_name: str) -> None:
        """Ask a broker that knows this member now; it may have refused it a moment before."""
        for source in list(self.sources.values()):
            if source.broker_name == broker_name:
                source.receive_again()

    def receive(self) -> None:
        """Send demands to all sources; to another one first each time."""
        sources = list(self.sources.values())
        self._turn += 1
        at = self._turn % max(len(sources), 1)
        for source in (*sources[at:], *sources[:at]):
            source.receive()

    def tick(self, used_ms: int) -> None:
        """Extend the leases of messages that are kept; see ``ReceiveSource.tick``."""
        now_ms = self._client.loop.clock.monotonic_ms()
        for source in self._all():
            source.tick(now_ms, used_ms)
        self._dropped = [one for one in self._dropped if one.leases or not one.settler.is_idle]

    # ---- Settle ----------------------------------------------------------------------

    def only_source(self) -> ReceiveSource | None:
        """Return the source, if there is one only."""
        found = self._all()
        return found[0] if len(found) == 1 else None

    def held(self, broker_name: str, lease: int) -> tuple[ReceiveSource, HeldLease] | None:
        """Return a lease, with its source; None if it is settled, or over."""
        for source in self._all():
            if source.broker_name == broker_name:
                found = source.leases.get(lease)
                if found is not None:
                    return source, found
        return None

    def settle(
        self,
        source: ReceiveSource,
        held: HeldLease,
        bits: int,
        action: SettleAction,
        on_done: OnSettled,
        *,
        delay_ms: int = -1,
        reason: str = "",
    ) -> None:
        """Report on messages of a lease, a bit each from its first one on."""
        held.reported |= bits
        now_ms = self._client.loop.clock.monotonic_ms()
        give_up_ms = now_ms + self._settle_timeout_ms
        source.settler.gather(
            action, [(held, bits)], give_up_ms, on_done, delay_ms=delay_ms, reason=reason
        )

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call back once nothing is to be settled any more."""
        busy = [one for one in self._all() if not one.settler.is_idle]
        left = len(busy)

        def idle() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                callback()

        if not busy:
            callback()
        for one in busy:
            one.settler.when_idle(idle)

    def abandon(self) -> None:
        """End reports that no broker has answered; after the client was closed."""
        for source in self._all():
            source.settler.fail_all(ClientClosed("the consumer was closed before brokers answered"))

    # ---- Helpers ---------------------------------------------------------------------

    def _all(self) -> list[ReceiveSource]:
        return [*self.sources.values(), *self._dropped]

    def _received(self, source: ReceiveSource, received: ReceivedAnswer) -> None:
        for held, bits, why in received.unreadable:
            _log.error(
                "group %s: messages from %d on of queue %d of %s at %s cannot be decoded, and are "
                "dead letters: %s",
                self._group,
                held.lease.first,
                held.lease.queue_id,
                held.topic,
                held.broker_name,
                why,
            )
            self.settle(source, held, bits, SettleAction.REJECT, _ignore, reason=why[:1_000])
        for held, bits in received.unwanted:
            self.settle(source, held, bits, SettleAction.ACK, _ignore)
        if received.messages:
            self.on_received(source, received.messages)

    def _lost(self, held: HeldLease) -> None:
        """Forget the messages of a lease that another member has by now."""
        self._unbuffer(held)
        held.bits = 0


def _ignore(error: MQMeshError | None) -> None:
    """Do nothing: it is in the log, or the lease ends by itself."""
