"""The locks that a consumer holds at brokers, and when they may be relied on.

A worker looks at its queue's lease before each message. The client loop prolongs leases by
a second each quarter of a second, as long as it knows of nothing against them: the broker's
lease runs, the connection that the lock was granted by stands, and the thread itself did not
stand still. After a second of standing still (the process was stopped, the machine swapped) the
broker may have given the queue to another member, so the consumer renews the lock before the next
message begins. That second is shorter than the time a broker needs to give up a client and its
lock. An answer that takes longer counts, if the thread went on meanwhile and the connection stood.

A broker whose log is confirmed by copies gives leases of some seconds. They end by the clock before
another master gives the queue away, even if this client does not know of that master.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

from mqmesh.clock import Clock
from mqmesh.errors import MQMeshError, RemoteProtocolError
from mqmesh.message import MessageQueue
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import (
    LOCK_PENDING,
    LockBatchRequest,
    LockBatchResponse,
    LockEntry,
)
from mqmesh.protocol.pulling import MAX_OFFSETS_PER_REQUEST
from mqmesh.sdk.consumer.fetching.pull_loop import PullNetwork
from mqmesh.sdk.consumer.offset_store import REQUEST_TIMEOUT_MS

TICK_MS: Final = 250
TRUST_MS: Final = 1_000
"""Time for which a lock is trusted without a turn of the loop: within it a message may begin."""
ASK_AGAIN_MS: Final = 200
"""Interval of questions about a lock that cannot be relied on."""

_log = logging.getLogger(__name__)


class Lease:
    """Lock of one queue, as a worker sees it; read by workers, written by the client loop.

    Args:
        clock: Source of time.
        token: Of the lock; 0 for one that is lost.

    Attributes:
        token: See above.
        until_ms: Time since boot until which a message may be begun; sleep of the machine counts.
    """

    __slots__ = ("_clock", "token", "until_ms")

    def __init__(self, clock: Clock, token: int = 0) -> None:
        self._clock = clock
        self.token = token
        self.until_ms = 0

    def holds(self) -> bool:
        """Return True when a message of the queue may be begun now."""
        return self._clock.boot_ms() < self.until_ms


class _Held:
    """Lock with the time until which the broker keeps it."""

    __slots__ = ("ends_ms", "is_asked", "lease", "lease_ms", "requested_ms", "sure")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.ends_ms = 0
        self.lease_ms = 0
        self.requested_ms = 0
        self.is_asked = False  # by a request on this connection that has no answer yet
        self.sure = False


class QueueLeases:
    """The locks of one consumer; in the client loop.

    Args:
        group: Consumer group.
        client_id: This member.
        network: The client's engine.
        clock: Source of time.
        renew_ms: Longest time between renewals; a third of the lease where that is shorter.
        on_lost: Called with a queue that another member has, or had meanwhile.
        on_regained: Called when workers that stopped may go on.
    """

    def __init__(
        self,
        group: str,
        client_id: str,
        network: PullNetwork,
        clock: Clock,
        *,
        renew_ms: int,
        on_lost: Callable[[MessageQueue], None],
        on_regained: Callable[[], None],
    ) -> None:
        self._group = group
        self._client_id = client_id
        self._network = network
        self._clock = clock
        self._renew_ms = renew_ms
        self._on_lost = on_lost
        self._on_regained = on_regained
        self._held: dict[MessageQueue, _Held] = {}
        self._connections: dict[str, int] = defaultdict(int)
        self._ticked_ms = self._awake_ms = clock.boot_ms()

    def lease(self, queue: MessageQueue) -> Lease:
        """Return the lease of an acquired queue; one that never holds, if it was lost since."""
        held = self._held.get(queue)
        return held.lease if held is not None else Lease(self._clock)

    def acquire(
        self,
        broker_name: str,
        queues: list[MessageQueue],
        on_done: Callable[[list[MessageQueue], list[MessageQueue]], None],
    ) -> None:
        """Asks a broker for locks.

        Args:
            broker_name: Broker group of all the queues.
            queues: Queues to lock.
            on_done: Called with those that were granted, and those to ask for again.
        """

        def answered(tokens: dict[MessageQueue, int], requested_ms: int, lease_ms: int) -> None:
            granted = []
            for queue, token in tokens.items():
                if token > 0:
                    held = self._held.get(queue)
                    if held is None or held.lease.token != token:
                        self.forget([queue])
                        held = self._held[queue] = _Held(Lease(self._clock, token))
                    self._confirm(held, requested_ms, lease_ms)
                    granted.append(queue)
            on_done(granted, [queue for queue, token in tokens.items() if token <= 0])

        self._ask(broker_name, queues, answered)

    def forget(self, queues: Iterable[MessageQueue]) -> None:
        """Drop queues that are not ours any more; workers that look at their leases see that."""
        for queue in queues:
            held = self._held.pop(queue, None)
            if held is not None:
                held.lease.until_ms = 0

    def broker_changed(self, broker_name: str, up: bool) -> None:
        """Note that the connection to a broker was made or broke."""
        self._connections[broker_name] += 1
        for queue in self._of(broker_name):
            self._held[queue].is_asked = False
            if not up:
                self._doubt(self._held[queue])
        if up:
            self._renew(broker_name, self._of(broker_name))

    def tick(self) -> None:
        """Prolongs leases, renews locks, and requests those that are in doubt."""
        now_ms = self._clock.boot_ms()
        stood_still = now_ms - self._ticked_ms >= TRUST_MS
        self._ticked_ms = now_ms
        if stood_still:
            self._awake_ms = now_ms
        due: dict[str, list[MessageQueue]] = defaultdict(list)
        for queue, held in self._held.items():
            if stood_still or now_ms >= held.ends_ms:
                self._doubt(held)
            if held.sure:
                held.lease.until_ms = min(held.ends_ms, now_ms + TRUST_MS)
            wait_ms = min(self._renew_ms, held.lease_ms // 3) if held.sure else ASK_AGAIN_MS
            if not held.is_asked and now_ms - held.requested_ms >= wait_ms:
                due[queue.broker_name].append(queue)
        for broker_name, queues in due.items():
            self._renew(broker_name, queues)
        self._on_regained()

    def _of(self, broker_name: str) -> list[MessageQueue]:
        return [queue for queue in self._held if queue.broker_name == broker_name]

    def _doubt(self, held: _Held) -> None:
        held.sure = False
        held.lease.until_ms = 0

    def _confirm(self, held: _Held, requested_ms: int, lease_ms: int) -> None:
        now_ms = self._clock.boot_ms()
        held.requested_ms = requested_ms
        held.lease_ms = lease_ms
        held.ends_ms = requested_ms + lease_ms
        stood_still = now_ms - max(requested_ms, self._ticked_ms) >= TRUST_MS
        if now_ms < held.ends_ms and requested_ms >= self._awake_ms and not stood_still:
            held.sure = True
            held.lease.until_ms = min(held.ends_ms, now_ms + TRUST_MS)

    def _renew(self, broker_name: str, queues: list[MessageQueue]) -> None:
        def answered(tokens: dict[MessageQueue, int], requested_ms: int, lease_ms: int) -> None:
            lost = []
            for queue, token in tokens.items():
                held = self._held.get(queue)
                if held is None or token == LOCK_PENDING:
                    continue
                if token == held.lease.token:
                    self._confirm(held, requested_ms, lease_ms)
                else:
                    lost.append(queue)
            self.forget(lost)
            for queue in lost:
                self._on_lost(queue)
            self._on_regained()

        now_ms = self._clock.boot_ms()
        for queue in queues:
            self._held[queue].requested_ms, self._held[queue].is_asked = now_ms, True
        self._ask(broker_name, queues, answered)

    def _ask(
        self,
        broker_name: str,
        queues: list[MessageQueue],
        answered: Callable[[dict[MessageQueue, int], int, int], None],
    ) -> None:
        requested_ms = self._clock.boot_ms()
        connection = self._connections[broker_name]
        for start in range(0, len(queues), MAX_OFFSETS_PER_REQUEST):
            some = queues[start : start + MAX_OFFSETS_PER_REQUEST]
            held = [self._held.get(queue) for queue in some]
            entries = [
                LockEntry(queue.topic, queue.queue_id, one.lease.token if one is not None else 0)
                for queue, one in zip(some, held, strict=True)
            ]

            def done(answer: Command | MQMeshError, some: list[MessageQueue] = some) -> None:
                if connection != self._connections[broker_name]:
                    # An answer of an earlier connection may be outdated.
                    answered(dict.fromkeys(some, LOCK_PENDING), requested_ms, 0)
                    return
                for queue in some:
                    if queue in self._held:
                        self._held[queue].is_asked = False
                try:
                    if isinstance(answer, MQMeshError):
                        raise answer
                    found = decode_header(LockBatchResponse, answer.header)
                    if len(found.queues) != len(some):
                        raise RemoteProtocolError(f"{len(found.queues)} locks for {len(some)}")
                except MQMeshError as error:
                    _log.info("group %s: locks of %s: %s", self._group, broker_name, error)
                    answered(dict.fromkeys(some, LOCK_PENDING), requested_ms, 0)
                else:
                    tokens = [one.token for one in found.queues]
                    answered(dict(zip(some, tokens, strict=True)), requested_ms, found.lease_ms)

            self._network.request(
                broker_name,
                RequestCode.LOCK_BATCH_MQ,
                done,
                header=encode_header(LockBatchRequest(self._group, self._client_id, entries)),
                timeout_ms=REQUEST_TIMEOUT_MS,
            )
