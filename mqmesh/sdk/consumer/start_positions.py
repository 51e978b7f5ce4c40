"""Start positions of a consumer in queues it was given."""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import msgspec

from mqmesh.errors import MQMeshError, RemoteProtocolError
from mqmesh.message import RETRY_PREFIX, MessageQueue
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import ConsumeFromWhere
from mqmesh.protocol.pulling import (
    OffsetResponse,
    QueueBoundsRequest,
    QueueBoundsResponse,
    SearchOffsetRequest,
)
from mqmesh.sdk.consumer.fetching.pull_loop import PullNetwork
from mqmesh.sdk.consumer.offset_store import REQUEST_TIMEOUT_MS, OffsetStore

MOST_CHOICES: Final = 256
"""Queues whose bounds or times are requested at a time."""

OnPosition = Callable[[MessageQueue, "Position | MQMeshError"], None]
OnOffset = Callable[[int | MQMeshError], None]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Position(msgspec.Struct, frozen=True):
    """Position to begin at.

    Attributes:
        queue_offset: The next message to read.
        committed: The group had committed it; otherwise it should do so at once, because
            the next owner of the queue would choose anew.
    """

    queue_offset: int
    committed: bool


class StartPositions:
    """Finder of start positions; in the client loop.

    Args:
        offsets: Store of the group's offsets.
        network: The client's engine.
        where: For queues without an offset.
        timestamp_ms: For ``TIMESTAMP``.

    Attributes:
        settled: The consumer has got its first queues. Before that, ``LAST_OFFSET`` is the
            end of a queue; later it is where the queue ended when the consumer started.
        started_at_ms: When the consumer was started, wall clock.
    """

    def __init__(
        self, offsets: OffsetStore, network: PullNetwork, where: ConsumeFromWhere, timestamp_ms: int
    ) -> None:
        self.settled = False
        self.started_at_ms = 0
        self._offsets = offsets
        self._network = network
        self._where = where
        self._timestamp_ms = timestamp_ms
        self._waiting: deque[tuple[MessageQueue, OnPosition]] = deque()
        self._choosing = 0
        self._first_queues: dict[str, frozenset[MessageQueue]] = {}

    def note_queues(self, topic: str, queues: tuple[MessageQueue, ...]) -> None:
        """Note a topic's queues; the first call for a topic counts.

        A queue that comes later is read from its beginning: ``LAST_OFFSET`` leaves out what
        was there before the consumer, and nothing else.
        """
        self._first_queues.setdefault(topic, frozenset(queues))

    def locate(self, broker_name: str, queues: list[MessageQueue], on_done: OnPosition) -> None:
        """Find the start offsets of queues of one broker group; each is reported by itself."""

        def fetched(found: dict[MessageQueue, int] | MQMeshError) -> None:
            for queue in queues:
                if isinstance(found, MQMeshError):
                    on_done(queue, found)
                elif found[queue] >= 0:
                    on_done(queue, Position(found[queue], True))
                else:
                    self._waiting.append((queue, on_done))
            self._choose_waiting()

        self._offsets.claim(broker_name, queues, fetched)

    def find_bounds(
        self, queue: MessageQueue, on_done: Callable[[QueueBoundsResponse | MQMeshError], None]
    ) -> None:
        """Asks where a queue begins and ends."""
        self._ask(
            queue,
            RequestCode.QUERY_QUEUE_BOUNDS,
            QueueBoundsRequest(queue.topic, queue.queue_id),
            lambda answer: on_done(_decoded(QueueBoundsResponse, answer)),
        )

    def find_time(self, queue: MessageQueue, timestamp_ms: int, on_done: OnOffset) -> None:
        """Asks for the first message stored at or after a time; the end if there is none."""

        def done(answer: Command | MQMeshError) -> None:
            found = _decoded(OffsetResponse, answer)
            on_done(found if isinstance(found, MQMeshError) else found.queue_offset)

        request = SearchOffsetRequest(queue.topic, queue.queue_id, timestamp_ms)
        self._ask(queue, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, request, done)

    def _choose_waiting(self) -> None:
        """Chooses for some queues at a time: all answers of ten thousand would come too late."""
        while self._waiting and self._choosing < MOST_CHOICES:
            self._choosing += 1
            queue, on_done = self._waiting.popleft()
            self._choose(queue, partial(self._chosen, on_done))

    def _chosen(
        self, on_done: OnPosition, queue: MessageQueue, found: Position | MQMeshError
    ) -> None:
        self._choosing -= 1
        on_done(queue, found)
        self._choose_waiting()

    def _choose(self, queue: MessageQueue, on_done: OnPosition) -> None:
        def chosen(offset: int | MQMeshError) -> None:
            if isinstance(offset, MQMeshError):
                on_done(queue, offset)
                return
            _log.debug("%s: no committed offset; beginning at %d (%s)", queue, offset, self._where)
            on_done(queue, Position(offset, False))

        def bounded(bounds: QueueBoundsResponse | MQMeshError) -> None:
            if isinstance(bounds, MQMeshError):
                chosen(bounds)
            else:
                chosen(bounds.max_queue_offset if last else bounds.min_queue_offset)

        if queue.topic.startswith(RETRY_PREFIX):
            # All messages there failed in this group, which has to retry them.
            self.find_bounds(
                queue, lambda b: chosen(b if isinstance(b, MQMeshError) else b.min_queue_offset)
            )
            return
        is_old = queue in self._first_queues.get(queue.topic, ())
        last = self._where == ConsumeFromWhere.LAST_OFFSET and is_old
        if self._where == ConsumeFromWhere.TIMESTAMP:
            self.find_time(queue, self._timestamp_ms, chosen)
        elif last and self.settled:
            self.find_time(queue, self.started_at_ms, chosen)
        else:
            self.find_bounds(queue, bounded)

    def _ask(
        self,
        queue: MessageQueue,
        code: int,
        request: msgspec.Struct,
        on_done: Callable[[Command | MQMeshError], None],
    ) -> None:
        self._network.request(
            queue.broker_name,
            code,
            on_done,
            header=encode_header(request),
            timeout_ms=REQUEST_TIMEOUT_MS,
        )


def _decoded(kind: type[_T], answer: Command | MQMeshError) -> _T | MQMeshError:
    if isinstance(answer, MQMeshError):
        return answer
    try:
        return decode_header(kind, answer.header)
    except RemoteProtocolError as error:
        return error
