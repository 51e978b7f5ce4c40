"""Start of assigned queues: the lock, the offset, and retries until reading begins."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from mqmesh.errors import MQMeshError, NoPermission
from mqmesh.message import MessageQueue
from mqmesh.sdk.consumer.offset_store import OffsetStore
from mqmesh.sdk.consumer.queue_leases import QueueLeases
from mqmesh.sdk.consumer.start_positions import Position, StartPositions

LOCATE_RETRY_MS: Final = 20
LOCK_RETRY_MAX_MS: Final = 200
RETRY_MAX_MS: Final = 1_000
MOST_AT_ONCE: Final = 4_096
"""Queues of one request for locks or offsets."""


class Start(msgspec.Struct, eq=False):
    """A queue that is to be begun.

    Attributes:
        queue: Queue to begin.
        tries: To find out where to begin.
    """

    queue: MessageQueue
    tries: int = 0


class QueueStarts:
    """The queues of one consumer that it was given and does not read yet.

    Args:
        offsets: Store of the group's offsets.
        positions: Knows where to begin.
        call_later: Calls once, not before so many ms.
        is_ours: True while a queue is given to the consumer.
        is_wanted: False when the queue was given up, or given up and given again, or all ends.
        begin: Begins to read.
        on_hindered: Called with a queue and the reason why its start is not known.

    Attributes:
        leases: Locks of queues, for a consumer that needs them.
        leaving: Queues whose former messages are still being worked on here.
    """

    def __init__(
        self,
        offsets: OffsetStore,
        positions: StartPositions,
        call_later: Callable[[int, Callable[[], None]], None],
        *,
        is_ours: Callable[[MessageQueue], bool],
        is_wanted: Callable[[Start], bool],
        begin: Callable[[Start, Position], None],
        on_hindered: Callable[[MessageQueue, MQMeshError], None],
    ) -> None:
        self.leases: QueueLeases | None = None
        self.leaving: set[MessageQueue] = set()
        self._is_ours = is_ours
        self._is_wanted = is_wanted
        self._begin = begin
        self._on_hindered = on_hindered
        self._offsets = offsets
        self._positions = positions
        self._call_later = call_later
        self._gathered: dict[tuple[str, int], list[Start]] = {}

    def plan(self, starts: Iterable[Start], delay_ms: int) -> None:
        """Sees to it that queues are begun, however long their brokers take."""
        by_broker: dict[str, list[Start]] = defaultdict(list)
        for start in starts:
            by_broker[start.queue.broker_name].append(start)
        for broker_name, some in by_broker.items():
            self._plan(broker_name, some, delay_ms)

    def _plan(self, broker_name: str, starts: list[Start], delay_ms: int) -> None:
        key = broker_name, delay_ms
        gathered = self._gathered.get(key)
        if gathered is not None:
            # Planned in the same turn: ten thousand topics must not make so many requests.
            gathered.extend(starts)
            return
        starts = self._gathered[key] = list(starts)

        def seal() -> None:
            if self._gathered.get(key) is starts:
                del self._gathered[key]

        def run() -> None:
            seal()
            wanted = [start for start in starts if self._is_wanted(start)]
            for first in range(0, len(wanted), MOST_AT_ONCE):
                some = wanted[first : first + MOST_AT_ONCE]
                if self.leases is not None:
                    self._lock(broker_name, some, self.leases)
                else:
                    self._locate(broker_name, some)

        if delay_ms:
            self._call_later(0, seal)
        self._call_later(delay_ms, run)

    def _again(self, start: Start, most_ms: int) -> None:
        delay_ms = min(LOCATE_RETRY_MS << min(start.tries, 10), most_ms)
        start.tries += 1
        self._plan(start.queue.broker_name, [start], delay_ms)

    def _lock(self, broker_name: str, starts: list[Start], leases: QueueLeases) -> None:
        free = {start.queue: start for start in starts if start.queue not in self.leaving}
        for start in starts:
            if start.queue in self.leaving:
                self._again(start, LOCK_RETRY_MAX_MS)

        def locked(granted: list[MessageQueue], refused: list[MessageQueue]) -> None:
            void = [queue for queue in granted if not self._is_ours(queue)]
            if void:
                leases.forget(void)
                self._offsets.release(void)
            mine = [free[queue] for queue in granted if self._is_wanted(free[queue])]
            if mine:
                self._locate(broker_name, mine)
            for queue in refused:
                if self._is_wanted(free[queue]):
                    self._again(free[queue], LOCK_RETRY_MAX_MS)

        if free:
            leases.acquire(broker_name, list(free), locked)

    def _locate(self, broker_name: str, starts: list[Start]) -> None:
        by_queue = {start.queue: start for start in starts}

        def located(queue: MessageQueue, found: Position | MQMeshError) -> None:
            start = by_queue[queue]
            if not self._is_wanted(start):
                return
            if isinstance(found, Position):
                self._begin(start, found)
                return
            is_late = LOCATE_RETRY_MS << min(start.tries, 10) >= RETRY_MAX_MS
            if is_late or isinstance(found, NoPermission):
                self._on_hindered(queue, found)
            self._again(start, RETRY_MAX_MS)

        self._positions.locate(broker_name, list(by_queue), located)
