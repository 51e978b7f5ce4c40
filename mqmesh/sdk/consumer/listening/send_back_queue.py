"""Return of failed messages to the brokers they came from; many travel together."""

from collections import deque
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Final

import msgspec

from mqmesh.errors import (
    MQMeshError,
    NotMaster,
    RemoteProtocolError,
    TransportError,
)
from mqmesh.message import MessageQueue
from mqmesh.protocol.codes import ResponseCode, error_of
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.retries import (
    MAX_BATCH_MESSAGES,
    MAX_REASON_CHARACTERS,
    SendBackEntry,
    SendBackRequest,
    SendBackResponse,
)
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.client.outbox import Effects, OutgoingRequest, RequestOutbox
from mqmesh.transport.interface import Condition
from mqmesh.transport.requests import no_connection

MAX_ENTRIES: Final = 64
"""Most entries of a request: each may cost the broker the decoding of a batch."""
TIMEOUT_MS: Final = 6_000
"""A broker with SYNC_FLUSH may itself wait for its disk for 5 s."""
TRIES: Final = 2
"""Requests whose outcome is unknown are repeated so often; messages sent back stay that."""
AGAIN_MS: Final = 300
IN_FLIGHT: Final = 1
"""Requests a broker; messages that fail meanwhile share the next one."""

OnSentBack = Callable[[int | MQMeshError], None]
"""Callback in the client loop: the number of new dead letters, or why none was taken."""

_PLACE = attrgetter("queue", "first")


class SentBack(msgspec.Struct, frozen=True, gc=False):
    """Messages of a queue that stand behind one another and are to be sent back.

    Attributes:
        queue: Queue they were pulled from.
        first: Queue offset of the first.
        count: Number of messages.
        reason: Reason of the failure.
        on_done: Called with their outcome.
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


class SendBacks:
    """Messages on their way back: makes the requests and judges their outcomes.

    Args:
        group: Consumer group.
        max_reconsume_times: Times sent back after which a message becomes a dead letter.
        may_come: False for a broker that is not worth waiting for.
        changed: Condition of ``wait``; guards waiting messages.
    """

    def __init__(
        self,
        group: str,
        max_reconsume_times: int,
        may_come: Callable[[str], bool],
        changed: Condition,
    ) -> None:
        self._group = group
        self._max_reconsume_times = max_reconsume_times
        self._may_come = may_come
        self._changed = changed
        self._waiting: dict[str, list[SentBack]] = {}
        self._joined: dict[str, deque[list[SentBack]]] = {}
        self._again: dict[str, OutgoingRequest] = {}
        self._open = 0
        self._closed: MQMeshError | None = None

    def put(self, messages: SentBack) -> None:
        """Take messages; from any thread. After ``close`` their outcome is reported at once."""
        with self._changed:
            closed = self._closed
            if closed is None:
                self._open += 1
                self._waiting.setdefault(messages.queue.broker_name, []).append(messages)
        if closed is not None:
            messages.on_done(closed)

    def close(self, error: MQMeshError) -> None:
        """Ends everything that waits, and takes nothing more.

        Args:
            error: Error for messages that wait.
        """
        with self._changed:
            self._closed = error
        for broker_name in self.brokers():
            self._end(broker_name, error)

    def wait(self, timeout_s: float) -> bool:
        """Waits until the outcome of all is known; not in the client loop."""
        with self._changed:
            return self._changed.wait_for(lambda: self._open == 0, timeout_s)

    def brokers(self) -> list[str]:
        """Return the brokers that something waits for."""
        joined = [name for name, groups in self._joined.items() if groups]
        return list(dict.fromkeys([*self._again, *joined, *self._waiting]))

    def take(self, broker_name: str) -> OutgoingRequest | None:
        """Return the next request to a broker; first the one that had no answer."""
        again = self._again.pop(broker_name, None)
        if again is not None:
            return again
        # Joined messages go first: to join all waiting ones for each request would cost the more,
        # the more of them wait.
        joined = self._joined.setdefault(broker_name, deque())
        if not joined:
            joined.extend(self._join(broker_name))
        groups = [joined.popleft() for _ in range(min(len(joined), MAX_ENTRIES))]
        if not groups:
            return None
        entries = [_entry(group) for group in groups]
        header = encode_header(SendBackRequest(self._group, entries, self._max_reconsume_times))
        return self._letter(broker_name, header, groups, 1)

    def without(self, broker_name: str) -> Effects | None:
        """End messages to a broker that is not connected, unless it is worth waiting for."""
        if self._may_come(broker_name):
            return None
        error = no_connection(f"broker {broker_name}")
        return self._end(broker_name, error)

    def _end(self, broker_name: str, error: MQMeshError) -> Effects | None:
        again = self._again.pop(broker_name, None)
        lost = [*self._joined.pop(broker_name, ()), *self._join(broker_name)]
        self._finish(lost, [error] * len(lost))
        return None if again is None else again.on_answer(error)

    def _join(self, broker_name: str) -> list[list[SentBack]]:
        with self._changed:
            return join(self._waiting.pop(broker_name, []))

    def _letter(
        self, broker_name: str, header: bytes, groups: list[list[SentBack]], attempt: int
    ) -> OutgoingRequest:
        return OutgoingRequest(
            RequestCode.CONSUMER_SEND_MSG_BACK,
            (),
            header,
            TIMEOUT_MS,
            partial(self._answered, broker_name, header, groups, attempt),
        )

    def _answered(
        self,
        broker_name: str,
        header: bytes,
        groups: list[list[SentBack]],
        attempt: int,
        answer: Command | MQMeshError,
    ) -> Effects | None:
        may_come = self._may_come(broker_name)
        # Another replica will lead in a moment: that is no try.
        tries = attempt if isinstance(answer, NotMaster) else attempt + 1
        if isinstance(answer, TransportError | NotMaster) and tries <= TRIES and may_come:
            self._again[broker_name] = self._letter(broker_name, header, groups, tries)
            return Effects(pause=(broker_name, AGAIN_MS))
        self._finish(groups, _outcomes(answer, len(groups)))
        return None

    def _finish(self, groups: list[list[SentBack]], outcomes: list[int | MQMeshError]) -> None:
        count = 0
        for group, outcome in zip(groups, outcomes, strict=True):
            for one in group:
                count += 1
                # One of many that are gone together may live on: each callback gets all of them.
                one.on_done(outcome)
        with self._changed:
            self._open -= count
            self._changed.notify_all()


class SendBackQueue:
    """Queue of messages sent back, one request at a time to each broker.

    Messages to a broker that is not connected, and not worth waiting for, end with an error.

    Args:
        group: Consumer group.
        network: The client's engine.
        may_come: False for a broker that is not worth waiting for.
        max_reconsume_times: Times sent back after which a message becomes a dead letter.
        changed: Condition of ``wait``.
    """

    def __init__(
        self,
        group: str,
        network: ClientEngine,
        may_come: Callable[[str], bool],
        max_reconsume_times: int,
        changed: Condition,
    ) -> None:
        self._backs = SendBacks(group, max_reconsume_times, may_come, changed)
        self._outbox = RequestOutbox(network, self._backs, IN_FLIGHT)

    def send(self, messages: SentBack) -> None:
        """Sends messages back, soon; from any thread."""
        self._backs.put(messages)
        self._outbox.schedule()

    def wait(self, timeout_s: float) -> bool:
        """Waits until the outcome of all messages sent back is known; not in the client loop.

        Args:
            timeout_s: Longest wait.
        """
        return self._backs.wait(timeout_s)

    def end_all(self, error: MQMeshError) -> None:
        """Ends everything that has no outcome; in the client loop, at its end."""
        self._outbox.close(error)
        self._backs.close(error)


def join(messages: list[SentBack]) -> list[list[SentBack]]:
    """Joins messages that stand behind one another and failed alike into one entry each."""
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
