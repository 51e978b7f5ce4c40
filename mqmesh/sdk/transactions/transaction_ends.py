"""Sender of transaction decisions; those made meanwhile share the next request."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from mqmesh.clock import Clock
from mqmesh.errors import ClientClosed, EndpointUnreachable, MQMeshError, RequestTimeout
from mqmesh.failure_text import error_to_log
from mqmesh.message import StoredMessage
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
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
from mqmesh.sdk.client.lock_order import LockRank, ranked_lock
from mqmesh.sdk.client.outbox import BrokerNetwork, Effects, OutgoingRequest, RequestOutbox
from mqmesh.sdk.hooks import HookCalls
from mqmesh.transport.requests import no_connection

MAX_RUNS: Final = 4_096
MAX_MESSAGES: Final = 65_536
"""Decisions in a request; together with the half batches they are about, a few MiB."""
IN_FLIGHT: Final = 1
"""Requests a broker; decisions made meanwhile make the next one larger."""
PAUSE_MS: Final = 50

OnEnded = Callable[[EndOutcome | MQMeshError], None]
"""Callback with the outcome of a decision, in the client loop."""

_log = logging.getLogger(__name__)


class HalfPlace(msgspec.Struct, frozen=True, gc=False):
    """Place of a half batch.

    Attributes:
        broker_name: Broker group.
        base_queue_offset: Its queue offset in the half topic.
        producer_id: Its producer's instance id.
        first_sequence: Sequence of its first message.
        proof: Proof that this process may decide about it, see ``End``.
    """

    broker_name: str
    base_queue_offset: int
    producer_id: int
    first_sequence: int
    proof: bytes

    def __repr__(self) -> str:
        """Return a text for people, without the proof, which must stay secret."""
        return f"HalfPlace({self.broker_name!r}, {self.base_queue_offset})"


class _Item(msgspec.Struct, gc=False):
    ordinal: int
    deadline_ms: int
    on_ended: OnEnded
    alone: bool = False
    tries: int = 0


_Group = tuple[HalfPlace, Decision]
_Run = tuple[End, list[_Item], HalfPlace]


class Ends:
    """Decisions on their way: makes the requests and judges their outcomes.

    Args:
        group: Producer group.
        clock: For the deadlines.
    """

    def __init__(self, group: str, clock: Clock) -> None:
        self._header = encode_header(EndTransactionRequest(group))
        self._clock = clock
        self._lock = ranked_lock(LockRank.LEAF)
        self._waiting: dict[str, dict[_Group, list[_Item]]] = {}
        self._closed = False

    def put(
        self,
        place: HalfPlace,
        ordinal: int,
        decision: Decision,
        deadline_ms: int,
        on_ended: OnEnded,
    ) -> None:
        """Takes a decision; from any thread, arguments and errors as of ``EndSender.add``."""
        self._put(place, decision, [_Item(ordinal, deadline_ms, on_ended)])

    def brokers(self) -> list[str]:
        """Return the brokers that something waits for."""
        return list(self._waiting)

    def take(self, broker_name: str) -> OutgoingRequest | None:
        """Return the next request to a broker."""
        while runs := self._take(broker_name):
            now_ms = self._clock.monotonic_ms()
            left_ms = max(item.deadline_ms for _, items, _ in runs for item in items) - now_ms
            if left_ms <= 0:
                _end_all(runs, RequestTimeout("the broker did not answer in time"))
                continue
            for _, items, _ in runs:
                for item in items:
                    item.tries += 1
            return OutgoingRequest(
                RequestCode.END_TRANSACTION,
                [encode_ends([run[0] for run in runs])],
                self._header,
                left_ms,
                partial(self._answered, broker_name, runs),
            )
        return None

    def without(self, broker_name: str) -> None:
        """End late decisions, without a connection to a broker."""
        gone = no_connection(f"broker {broker_name}")
        now_ms = self._clock.monotonic_ms()
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
            _end_item(item, gone)

    def close(self, error: MQMeshError) -> None:
        """Ends everything that waits, and takes nothing any more."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, {}
        for groups in waiting.values():
            for items in groups.values():
                for item in items:
                    _end_item(item, error)

    def _put(self, place: HalfPlace, decision: Decision, items: list[_Item]) -> None:
        with self._lock:
            if self._closed:
                raise ClientClosed("the producer is closed")
            groups = self._waiting.setdefault(place.broker_name, {})
            groups.setdefault((place, decision), []).extend(items)

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

    def _answered(
        self, broker_name: str, runs: list[_Run], answer: Command | MQMeshError
    ) -> Effects | None:
        try:
            if isinstance(answer, MQMeshError):
                raise answer
            response = decode_header(EndTransactionResponse, answer.header)
            outcomes = decode_end_outcomes(answer.body, len(runs))
        except MQMeshError as error:
            return self._again(broker_name, runs, error)
        busy = []
        for run, outcome in zip(runs, outcomes, strict=True):
            end, items, place = run
            if outcome is EndOutcome.AGAIN:
                busy.append(run)
            elif response.status and outcome is EndOutcome.ENDED:
                for item in items:
                    _end_item(item, _not_safe(response.status))
            elif outcome > EndOutcome.ENDED_BEFORE and len(items) > 1:
                # One of them is different: each for itself.
                for item in items:
                    item.alone = True
                self._put(place, Decision(end.decision), items)
            else:
                for item in items:
                    in_doubt = outcome is EndOutcome.NOT_PENDING and item.tries > 1
                    _end_item(item, _doubt() if in_doubt else outcome)
        if not busy:
            return None
        busy_error = EndpointUnreachable("the broker is still writing it")
        return self._again(broker_name, busy, busy_error)

    def _again(self, broker_name: str, runs: list[_Run], error: MQMeshError) -> Effects:
        now_ms = self._clock.monotonic_ms()
        for end, items, place in runs:
            left = []
            for item in items:
                if error.retriable and item.deadline_ms > now_ms:
                    left.append(item)
                else:
                    _end_item(item, error)
            if left:
                self._put(place, Decision(end.decision), left)
        return Effects(pause=(broker_name, PAUSE_MS))


class EndSender:
    """Sender of decisions, again and again until their time is over.

    Args:
        network: Where they go.
        group: Producer group.
    """

    def __init__(self, network: BrokerNetwork, group: str) -> None:
        self._ends = Ends(group, network.loop.clock)
        self._outbox = RequestOutbox(network, self._ends, IN_FLIGHT)

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
            decision: Decision of its transaction.
            deadline_ms: When to give up, monotonic.
            on_ended: Called once, never before this returns.

        Raises:
            ClientClosed: The producer is closed.
        """
        self._ends.put(place, ordinal, decision, deadline_ms, on_ended)
        self._outbox.schedule()

    def end_all(self, error: MQMeshError) -> None:
        """Ends everything that has no outcome; in the client loop, at its end."""
        self._outbox.close(error)
        self._ends.close(error)


def no_hooks(_outcome: EndOutcome | MQMeshError) -> None:
    """Report nothing of a decision's outcome."""


def hooked_end(
    hooks: HookCalls | None,
    message: StoredMessage,
    decision: Decision,
    clock: Clock,
    *,
    from_check: bool = False,
) -> OnEnded:
    """Return the callback that reports a decision about to be sent to hooks, with its outcome.

    Args:
        hooks: The producer's.
        message: The message, with its id.
        decision: The decision.
        clock: Source of time.
        from_check: The decision answers a check of the broker.
    """
    if hooks is None:
        return no_hooks
    context = hooks.ending(message, decision, clock.wall_ms(), from_check=from_check)
    return partial(hooks.after_transaction, context)


def _end_item(item: _Item, outcome: EndOutcome | MQMeshError) -> None:
    try:
        item.on_ended(outcome)
    except Exception:
        # The others must be called, too.
        _log.error("a callback of a transaction failed", exc_info=error_to_log())


def _end_all(runs: list[_Run], error: MQMeshError) -> None:
    for _, items, _ in runs:
        for item in items:
            _end_item(item, error)


def _make_runs(place: HalfPlace, decision: Decision, items: list[_Item]) -> list[_Run]:
    """Group consecutive messages, but for those that must go alone."""
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
