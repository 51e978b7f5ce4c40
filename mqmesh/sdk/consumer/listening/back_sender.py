"""Sends failed messages back to the brokers they came from; many travel together."""

import threading
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import Final

import msgspec

from mqmesh.errors import EndpointUnreachable, MQMeshError, RemoteProtocolError, TransportError
from mqmesh.message import MessageQueue
from mqmesh.protocol.codes import RequestCode, ResponseCode, error_of
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.retries import (
    MAX_BATCH_MESSAGES,
    MAX_REASON_CHARACTERS,
    SendBackEntry,
    SendBackRequest,
    SendBackResponse,
)
from mqmesh.sdk.consumer.fetching.pull_loop import PullNetwork
from mqmesh.transport.interface import Condition

MAX_ENTRIES: Final = 64
"""Of a request: each may cost the broker the decoding of a batch."""
TIMEOUT_MS: Final = 6_000
"""A broker with SYNC_FLUSH may itself wait for its disk for 5 s."""
TRIES: Final = 2
"""Requests whose outcome is unknown are repeated so often; what was sent back stays that."""
AGAIN_MS: Final = 300

OnSentBack = Callable[[int | MQMeshError], None]
"""Told, in the client loop, how many messages became dead letters, or why none was taken."""

_PLACE = attrgetter("queue", "first")


class SentBack(msgspec.Struct, frozen=True, gc=False):
    """Messages of a queue that stand behind one another and are to be sent back.

    Attributes:
        queue: Where they were pulled from.
        first: Queue offset of the first.
        count: How many.
        reason: What went wrong.
        on_done: Told what became of them.
        delay_level: 0 for the level that is due; ``TO_DEAD_LETTERS`` to give them up.
        reconsume_times: Tries that were made here.
    """

    queue: MessageQueue
    first: int
    count: int
    reason: str
    on_done: OnSentBack
    delay_level: int = 0
    reconsume_times: int = 0

    @property
    def end(self) -> int:
        """Queue offset behind the last one."""
        return self.first + self.count


class BackSender:
    """Sends messages back, one request at a time to each broker.

    Args:
        group: Consumer group.
        network: The client's engine.
        post: Calls in the client loop, soon; from any thread.
        max_reconsume_times: What was sent back as often becomes a dead letter.
        is_down: True for a broker that there is no connection to: what is to go there is not
            worth waiting for.
        changed: What ``wait`` waits with; one of threads by default.
    """

    def __init__(
        self,
        group: str,
        network: PullNetwork,
        post: Callable[[Callable[[], None]], None],
        max_reconsume_times: int,
        is_down: Callable[[str], bool] = lambda broker_name: False,
        changed: Condition | None = None,
    ) -> None:
        self._is_down = is_down
        self._group = group
        self._network = network
        self._post = post
        self._max_reconsume_times = max_reconsume_times
        self._arrived: deque[SentBack] = deque()
        self._waiting: dict[str, list[SentBack]] = {}
        self._joined: dict[str, deque[list[SentBack]]] = {}
        self._busy: set[str] = set()
        self._changed: Condition = changed or threading.Condition()
        self._open = 0

    def send(self, messages: SentBack) -> None:
        """Sends messages back, soon; from any thread."""
        with self._changed:
            self._open += 1
            self._arrived.append(messages)
            first = len(self._arrived) == 1
        if first:
            self._post(self._take)

    def wait(self, timeout_s: float) -> bool:
        """Waits until the outcome of all that was sent back is known; not in the client loop.

        Args:
            timeout_s: How long at most.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._open == 0, timeout_s)

    # ---- In the client loop --------------------------------------------------------

    def _take(self) -> None:
        with self._changed:
            arrived = list(self._arrived)
            self._arrived.clear()
        for one in arrived:
            self._waiting.setdefault(one.queue.broker_name, []).append(one)
        for broker_name in list(self._waiting):
            self._send(broker_name)

    def _send(self, broker_name: str) -> None:
        if broker_name in self._busy:
            return
        # What was joined goes first: joining all that waits for each request would cost the
        # more, the more waits.
        joined = self._joined.setdefault(broker_name, deque())
        if not joined:
            joined.extend(join(self._waiting.pop(broker_name, [])))
        if self._is_down(broker_name):
            lost = [*joined, *join(self._waiting.pop(broker_name, []))]
            joined.clear()
            error = EndpointUnreachable(f"there is no connection to broker {broker_name}")
            self._finish(lost, [error] * len(lost))
            return
        now = [joined.popleft() for _ in range(min(len(joined), MAX_ENTRIES))]
        if not now:
            return
        self._busy.add(broker_name)
        request = SendBackRequest(
            self._group,
            [_entry(group) for group in now],
            self._max_reconsume_times,
        )
        self._ask(broker_name, encode_header(request), now, 1)

    def _ask(
        self, broker_name: str, header: bytes, groups: list[list[SentBack]], attempt: int
    ) -> None:
        def done(answer: Command | MQMeshError) -> None:
            down = self._is_down(broker_name)
            if isinstance(answer, TransportError) and attempt < TRIES and not down:
                self._network.call_later(
                    AGAIN_MS, lambda: self._ask(broker_name, header, groups, attempt + 1)
                )
                return
            self._busy.discard(broker_name)
            self._finish(groups, _outcomes(answer, len(groups)))
            self._send(broker_name)

        self._network.request(
            broker_name,
            RequestCode.CONSUMER_SEND_MSG_BACK,
            done,
            header=header,
            timeout_ms=TIMEOUT_MS,
        )

    def _finish(self, groups: list[list[SentBack]], outcomes: list[int | MQMeshError]) -> None:
        count = 0
        for group, outcome in zip(groups, outcomes, strict=True):
            for one in group:
                count += 1
                # One of many that are gone together may live on: all of them are told of all.
                one.on_done(outcome)
        with self._changed:
            self._open -= count
            self._changed.notify_all()


def join(messages: list[SentBack]) -> list[list[SentBack]]:
    """Puts together what stands behind one another and failed alike: an entry each."""
    groups: list[list[SentBack]] = []
    count = 0
    for one in sorted(messages, key=_PLACE):
        last = groups[-1][-1] if groups else None
        if (
            last is not None
            and last.queue == one.queue
            and last.end == one.first
            and last.reason == one.reason
            and last.delay_level == one.delay_level
            and last.reconsume_times == one.reconsume_times
            and count + one.count <= MAX_BATCH_MESSAGES
        ):
            groups[-1].append(one)
            count += one.count
        else:
            groups.append([one])
            count = one.count
    return groups


def _entry(group: list[SentBack]) -> SendBackEntry:
    first, last = group[0], group[-1]
    return SendBackEntry(
        first.queue.topic,
        first.queue.queue_id,
        first.first,
        last.end - first.first,
        first.reason[:MAX_REASON_CHARACTERS],
        first.delay_level,
        first.reconsume_times,
    )


def _outcomes(answer: Command | MQMeshError, count: int) -> list[int | MQMeshError]:
    if isinstance(answer, MQMeshError):
        return [answer] * count
    try:
        results = decode_header(SendBackResponse, answer.header).results
    except RemoteProtocolError as error:
        return [error] * count
    if len(results) != count:
        return [RemoteProtocolError(f"{len(results)} results for {count} entries")] * count
    return [
        result.dead_letters
        if result.code == ResponseCode.SUCCESS
        else error_of(result.code, result.remark)
        for result in results
    ]
