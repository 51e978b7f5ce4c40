"""Offset stores of consumers; at the brokers, for a group that shares its messages."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from mqmesh.errors import MQMeshError, RemoteProtocolError
from mqmesh.message import MessageQueue
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import LockEntry, UnlockBatchRequest
from mqmesh.protocol.pulling import (
    MAX_OFFSETS_PER_REQUEST,
    ConsumerOffsets,
    QueryConsumerOffsetRequest,
    QueueOffsetEntry,
    UpdateConsumerOffsetRequest,
)
from mqmesh.sdk.consumer.fetching.pull_loop import PullNetwork
from mqmesh.sdk.consumer.memberships import Memberships

REQUEST_TIMEOUT_MS: Final = 3_000

OnFetched = Callable[[dict[MessageQueue, int] | MQMeshError], None]
OnCommitted = Callable[[MQMeshError | None], None]

_log = logging.getLogger(__name__)


class OffsetStore(Protocol):
    """Store of a group's offsets; used in the client loop."""

    claiming: bool
    epochs: dict[MessageQueue, int]
    """Epoch of the broker's log in which this member's place is right, by queue."""
    processing: set[MessageQueue]
    """Queues whose progress is on its way together with outputs of their messages, or may be
    in the log: nothing of them is committed otherwise."""

    def open(self) -> None:
        """Makes it usable; from any thread, once.

        Raises:
            ConfigError: It cannot be used.
        """

    def close(self) -> None:
        """Ends its use; from any thread."""

    def fetch(self, broker_name: str, queues: list[MessageQueue], on_done: OnFetched) -> None:
        """Looks up committed offsets.

        Args:
            broker_name: Broker group that all the queues are on.
            queues: Queues to look up.
            on_done: Called with the offset of each queue, -1 where none was ever committed.
        """

    def claim(self, broker_name: str, queues: list[MessageQueue], on_done: OnFetched) -> None:
        """Looks up committed offsets of queues that this member was given, and begins to read.

        Args:
            broker_name, queues, on_done: As for ``fetch``.
        """

    def release(self, queues: list[MessageQueue]) -> None:
        """Release queues that this member does not read any more, without waiting for an answer."""

    def commit(self, offsets: Mapping[MessageQueue, int], on_done: OnCommitted) -> None:
        """Commits offsets that differ from those committed last.

        Args:
            offsets: By queue, the next offset to read.
            on_done: Called once, when all is committed, or with the first error.
        """

    def known(self, queue: MessageQueue) -> int:
        """Return where the group stands in a queue once all is carried out; -1 for nowhere yet."""

    def note_processed(self, queue: MessageQueue, offset: int) -> None:
        """Note that an offset was committed together with outputs of the messages."""

    def forget(self, queue: MessageQueue) -> None:
        """Forget the last committed offset of a queue that was given away."""

    def forget_broker(self, broker_name: str) -> None:
        """Forget the commits at a broker that came back, perhaps without the last ones."""


class BrokerOffsets(OffsetStore):
    """Offsets kept by the brokers.

    Args:
        group: Consumer group.
        client_id: This member.
        network: The client's engine.
        memberships: Standing of this member at brokers.

    Attributes:
        claiming: The queues are divided among members, so brokers learn each queue's owner, and
            commits carry the generation. False for queues assigned by hand.
    """

    def __init__(
        self, group: str, client_id: str, network: PullNetwork, memberships: Memberships
    ) -> None:
        self.claiming = True
        self.epochs = {}
        self.processing = set()
        self._memberships = memberships
        self._group = group
        self._client_id = client_id
        self._network = network
        self._committed: dict[MessageQueue, int] = {}
        # Where the group stands, with commits that have no answer yet.
        self._known: dict[MessageQueue, int] = {}

    def open(self) -> None:
        """Do nothing: offsets are requested from brokers when they are needed."""

    def close(self) -> None:
        """Do nothing."""

    def fetch(self, broker_name: str, queues: list[MessageQueue], on_done: OnFetched) -> None:
        self._ask(broker_name, queues, "", on_done, begins=False)

    def claim(self, broker_name: str, queues: list[MessageQueue], on_done: OnFetched) -> None:
        client_id = self._client_id if self.claiming else ""
        self._ask(broker_name, queues, client_id, on_done, begins=True)

    def release(self, queues: list[MessageQueue]) -> None:
        if not self.claiming:
            return
        by_broker: dict[str, list[LockEntry]] = defaultdict(list)
        for queue in queues:
            by_broker[queue.broker_name].append(LockEntry(queue.topic, queue.queue_id))
        for broker_name, entries in by_broker.items():
            for start in range(0, len(entries), MAX_OFFSETS_PER_REQUEST):
                some = entries[start : start + MAX_OFFSETS_PER_REQUEST]
                self._network.request(
                    broker_name,
                    RequestCode.UNLOCK_BATCH_MQ,
                    _report_release,
                    header=encode_header(UnlockBatchRequest(self._group, self._client_id, some)),
                    timeout_ms=REQUEST_TIMEOUT_MS,
                )

    def _ask(
        self,
        broker_name: str,
        queues: list[MessageQueue],
        client_id: str,
        on_done: OnFetched,
        *,
        begins: bool,
    ) -> None:
        header = encode_header(QueryConsumerOffsetRequest(self._group, _entries(queues), client_id))

        def done(answer: Command | MQMeshError) -> None:
            if isinstance(answer, MQMeshError):
                on_done(answer)
                return
            try:
                offsets_found = decode_header(ConsumerOffsets, answer.header)
                found = offsets_found.queues
                if len(found) != len(queues):
                    raise RemoteProtocolError(f"{len(found)} offsets for {len(queues)} queues")
            except RemoteProtocolError as error:
                on_done(error)
                return
            offsets = {q: one.queue_offset for q, one in zip(queues, found, strict=True)}
            self._known.update(offsets)
            self._committed.update({q: at for q, at in offsets.items() if at >= 0})
            for queue, one in zip(queues, found, strict=True):
                if begins or queue not in self.epochs:
                    self.epochs[queue] = one.epoch
            if client_id:
                self._memberships.on_claim(queues, offsets_found.generation)
            on_done(offsets)

        self._network.request(
            broker_name,
            RequestCode.QUERY_CONSUMER_OFFSET,
            done,
            header=header,
            timeout_ms=REQUEST_TIMEOUT_MS,
        )

    def commit(self, offsets: Mapping[MessageQueue, int], on_done: OnCommitted) -> None:
        by_broker: dict[str, list[MessageQueue]] = defaultdict(list)
        for queue, offset in offsets.items():
            if self._committed.get(queue) != offset and queue not in self.processing:
                by_broker[queue.broker_name].append(queue)
        requests = [
            (broker_name, queues[start : start + MAX_OFFSETS_PER_REQUEST])
            for broker_name, queues in by_broker.items()
            for start in range(0, len(queues), MAX_OFFSETS_PER_REQUEST)
        ]
        outcomes: list[MQMeshError | None] = []

        def done(error: MQMeshError | None) -> None:
            outcomes.append(error)
            if len(outcomes) == len(requests):
                on_done(next((one for one in outcomes if one is not None), None))

        if not requests:
            on_done(None)
        for broker_name, queues in requests:
            self._send(broker_name, {queue: offsets[queue] for queue in queues}, done)

    def known(self, queue: MessageQueue) -> int:
        return self._known.get(queue, -1)

    def note_processed(self, queue: MessageQueue, offset: int) -> None:
        self._committed[queue] = self._known[queue] = offset
        self.processing.discard(queue)

    def forget(self, queue: MessageQueue) -> None:
        self._committed.pop(queue, None)
        self._known.pop(queue, None)
        self.processing.discard(queue)

    def forget_broker(self, broker_name: str) -> None:
        kept = {q: at for q, at in self._committed.items() if q.broker_name != broker_name}
        self._committed = kept

    def _send(
        self, broker_name: str, offsets: dict[MessageQueue, int], on_done: OnCommitted
    ) -> None:
        self._known.update(offsets)  # a later request arrives behind this one
        header = encode_header(
            UpdateConsumerOffsetRequest(
                self._group,
                self._client_id,
                [
                    QueueOffsetEntry(q.topic, q.queue_id, at, self.epochs.get(q, 0))
                    for q, at in offsets.items()
                ],
                self._memberships.generation(broker_name) if self.claiming else 0,
            )
        )

        def done(answer: Command | MQMeshError) -> None:
            if isinstance(answer, MQMeshError):
                on_done(answer)
            else:
                self._committed.update(offsets)
                on_done(None)

        self._network.request(
            broker_name,
            RequestCode.UPDATE_CONSUMER_OFFSET,
            done,
            header=header,
            timeout_ms=REQUEST_TIMEOUT_MS,
        )


def _report_release(answer: Command | MQMeshError) -> None:
    if isinstance(answer, MQMeshError):
        _log.info("queues were not given back: %s", answer)


def _entries(queues: Iterable[MessageQueue]) -> list[QueueOffsetEntry]:
    return [QueueOffsetEntry(queue.topic, queue.queue_id) for queue in queues]
