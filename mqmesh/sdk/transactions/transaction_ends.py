"""Tells brokers how transactions ended; what is decided meanwhile shares the next request."""

import logging
import threading
from collections.abc import Callable
from typing import Final

import msgspec

from mqmesh.errors import ClientClosed, EndpointUnreachable, MQMeshError, RequestTimeout
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.transactions import (
    Decision,
    End,
    EndOutcome,
    EndTransactionRequest,
    EndTransactionResponse,
    decode_end_outcomes,
    encode_ends,
)
from mqmesh.sdk.client.client import ClientEngine

MAX_RUNS: Final = 4_096
MAX_MESSAGES: Final = 65_536
"""Decisions in a request; together with the half batches they are about, a few MiB."""
IN_FLIGHT: Final = 1
"""Requests a broker; what is decided meanwhile makes the next one larger."""
PAUSE_MS: Final = 50

OnEnded = Callable[[EndOutcome | MQMeshError], None]
"""Told what became of a decision, in the client loop."""

_log = logging.getLogger(__name__)


class HalfPlace(msgspec.Struct, frozen=True, gc=False):
    """Where a half batch is.

    Attributes:
        broker_name: Broker group.
        base_queue_offset: Its queue offset in the half topic.
        producer_id: Its producer's instance id.
        first_sequence: Sequence of its first message.
        proof: That this process may decide about it, see ``End``.
    """

    broker_name: str
    base_queue_offset: int
    producer_id: int
    first_sequence: int
    proof: bytes

    def __repr__(self) -> str:
        """For people, who must not see the proof."""
        return f"HalfPlace({self.broker_name!r}, {self.base_queue_offset})"


class _Item(msgspec.Struct, gc=False):
    ordinal: int
    deadline_ms: int
    on_ended: OnEnded
    alone: bool = False
    tries: int = 0


_Group = tuple[HalfPlace, Decision]
_Run = tuple[End, list[_Item], HalfPlace]


class EndSender:
    """Sends decisions, again and again until their time is over.

    Args:
        engine: The producer's.
        group: Its group.
    """

    def __init__(self, engine: ClientEngine, group: str) -> None:
        self._engine = engine
        self._header = encode_header(EndTransactionRequest(group))
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[_Group, list[_Item]]] = {}
        self._in_flight: dict[str, int] = {}
        self._sent: dict[int, list[_Run]] = {}
        self._paused: set[str] = set()
        self._scheduled = False
        self._closed = False

    def add(
        self,
        place: HalfPlace,
        ordinal: int,
        decision: Decision,
        deadline_ms: int,
        on_ended: OnEnded,
    ) -> None:
        """Sends a decision, soon; from any thread.

        Args:
            place: The half batch.
            ordinal: Position of the message in it.
            decision: How its transaction ends.
            deadline_ms: When to give up, monotonic.
            on_ended: Called once, never before this returns.

        Raises:
            ClientClosed: The producer is closed.
        """
        self._put(place, decision, [_Item(ordinal, deadline_ms, on_ended)])
        if not self._scheduled:
            self._scheduled = True
            self._engine.post(self._pump)

    def end_all(self, error: MQMeshError) -> None:
        """Ends everything that has no outcome; in the client loop, at its end."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, {}
        items = [item for groups in waiting.values() for group in groups.values() for item in group]
        items += [item for runs in self._sent.values() for run in runs for item in run[1]]
        self._sent.clear()
        for item in items:
            self._tell(item, error)

    def _put(self, place: HalfPlace, decision: Decision, items: list[_Item]) -> None:
        with self._lock:
            if self._closed:
                raise ClientClosed("the producer is closed")
            groups = self._waiting.setdefault(place.broker_name, {})
            groups.setdefault((place, decision), []).extend(items)

    # ---- In the client loop ----------------------------------------------------------

    def _pump(self) -> None:
        self._scheduled = False
        if self._engine.closed:
            return
        for broker_name in list(self._waiting):
            while self._in_flight.get(broker_name, 0) < IN_FLIGHT:
                if broker_name in self._paused:
                    break
                if not self._engine.is_connected(broker_name):
                    self._wait_for(broker_name)
                    break
                runs = self._take(broker_name)
                if not runs:
                    break
                self._send(broker_name, runs)

    def _take(self, broker_name: str) -> list[_Run]:
        runs: list[_Run] = []
        count = 0
        with self._lock:
            groups = self._waiting.get(broker_name, {})
            while groups and len(runs) < MAX_RUNS and count < MAX_MESSAGES:
                group = next(iter(groups))
                items = groups.pop(group)
                count += len(items)
                runs += _make_runs(*group, items)
            if not groups:
                self._waiting.pop(broker_name, None)
        return runs

    def _send(self, broker_name: str, runs: list[_Run]) -> None:
        now_ms = self._now_ms()
        left_ms = max(item.deadline_ms for _, items, _ in runs for item in items) - now_ms
        if left_ms <= 0:
            self._again(broker_name, runs, RequestTimeout("the broker did not answer in time"))
            return
        self._in_flight[broker_name] = self._in_flight.get(broker_name, 0) + 1
        for _, items, _ in runs:
            for item in items:
                item.tries += 1
        number = id(runs)
        self._sent[number] = runs

        def done(answer: Command | MQMeshError) -> None:
            self._in_flight[broker_name] -= 1
            if self._sent.pop(number, None) is None:
                return
            self._answered(broker_name, runs, answer)
            self._pump()

        self._engine.request(
            broker_name,
            RequestCode.END_TRANSACTION,
            done,
            encode_ends([run[0] for run in runs]),
            header=self._header,
            timeout_ms=left_ms,
        )

    def _answered(self, broker_name: str, runs: list[_Run], answer: Command | MQMeshError) -> None:
        try:
            if isinstance(answer, MQMeshError):
                raise answer
            response = decode_header(EndTransactionResponse, answer.header)
            outcomes = decode_end_outcomes(answer.body, len(runs))
        except MQMeshError as error:
            self._again(broker_name, runs, error)
            return
        busy = []
        for run, outcome in zip(runs, outcomes, strict=True):
            end, items, place = run
            if outcome is EndOutcome.AGAIN:
                busy.append(run)
            elif response.status and outcome is EndOutcome.ENDED:
                for item in items:
                    self._tell(item, _not_safe(response.status))
            elif outcome > EndOutcome.ENDED_BEFORE and len(items) > 1:
                # One of them is different: each for itself.
                for item in items:
                    item.alone = True
                self._put(place, Decision(end.decision), items)
            else:
                for item in items:
                    in_doubt = outcome is EndOutcome.NOT_PENDING and item.tries > 1
                    self._tell(item, _doubt() if in_doubt else outcome)
        if busy:
            self._again(broker_name, busy, EndpointUnreachable("the broker is still writing it"))

    def _again(self, broker_name: str, runs: list[_Run], error: MQMeshError) -> None:
        now_ms = self._now_ms()
        for end, items, place in runs:
            left = []
            for item in items:
                if error.retriable and item.deadline_ms > now_ms:
                    left.append(item)
                else:
                    self._tell(item, error)
            if left:
                self._put(place, Decision(end.decision), left)
        self._pause(broker_name)

    def _wait_for(self, broker_name: str) -> None:
        try:
            self._engine.broker(broker_name)
        except MQMeshError as error:
            _log.debug("broker %s cannot be connected to: %s", broker_name, error)
        gone = EndpointUnreachable(f"there was no connection to broker {broker_name} in time")
        now_ms = self._now_ms()
        late: list[_Item] = []
        with self._lock:
            groups = self._waiting.get(broker_name, {})
            for group, items in list(groups.items()):
                late += [item for item in items if item.deadline_ms <= now_ms]
                groups[group] = [item for item in items if item.deadline_ms > now_ms]
                if not groups[group]:
                    del groups[group]
            if not groups:
                self._waiting.pop(broker_name, None)
        for item in late:
            self._tell(item, gone)
        if broker_name in self._waiting:
            self._pause(broker_name)

    def _pause(self, broker_name: str) -> None:
        if broker_name in self._paused:
            return
        self._paused.add(broker_name)

        def go_on() -> None:
            self._paused.discard(broker_name)
            self._pump()

        self._engine.loop.call_later(PAUSE_MS, go_on)

    def _tell(self, item: _Item, outcome: EndOutcome | MQMeshError) -> None:
        try:
            item.on_ended(outcome)
        except Exception:
            # The others must be told, too.
            _log.exception("a callback of a transaction failed")

    def _now_ms(self) -> int:
        return self._engine.loop.clock.monotonic_ms()


def _make_runs(place: HalfPlace, decision: Decision, items: list[_Item]) -> list[_Run]:
    """Consecutive messages together, but for those that must go alone."""
    items.sort(key=_ordinal)
    runs: list[_Run] = []
    first, members = -1, list[_Item]()
    for item in items:
        if members and item.ordinal == first + len(members) and not item.alone:
            members.append(item)
            continue
        if members:
            runs.append((_end(place, first, len(members), decision), members, place))
        first, members = item.ordinal, [item]
    runs.append((_end(place, first, len(members), decision), members, place))
    return runs


def _not_safe(status: int) -> RequestTimeout:
    name = SendStatus(status).name if status in tuple(SendStatus) else str(status)
    return RequestTimeout(f"the decision is stored, but not as safely as it should be: {name}")


def _doubt() -> RequestTimeout:
    return RequestTimeout(
        "an earlier answer was lost, and the broker does not remember any more how it ended"
    )


def _ordinal(item: _Item) -> int:
    return item.ordinal


def _end(place: HalfPlace, first: int, count: int, decision: Decision) -> End:
    return End(
        place.base_queue_offset,
        place.producer_id,
        place.first_sequence,
        first,
        count,
        decision,
        place.proof,
    )
