"""Answers to brokers that ask how local transactions ended."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from mqmesh.batch.record_batch import check_batch, decode_messages
from mqmesh.clock import Clock
from mqmesh.errors import MQMeshError
from mqmesh.failure_text import error_to_log
from mqmesh.message import StoredMessage
from mqmesh.protocol.command import Command, decode_header
from mqmesh.protocol.transactions import CheckTransactionState, EndOutcome
from mqmesh.sdk.client.lock_order import LockRank, ranked_lock
from mqmesh.sdk.hooks import HookCalls
from mqmesh.sdk.transactions.listener_pool import ListenerPool
from mqmesh.sdk.transactions.transaction_ends import (
    EndSender,
    HalfPlace,
    OnEnded,
    hooked_end,
)
from mqmesh.sdk.transactions.transactions import DECISION_OF, LocalTransactionState

MAX_CHECKS_WAITING: Final = 100_000
"""Most questions that wait; others are dropped: brokers ask again."""
ANSWER_TIMEOUT_MS: Final = 10_000

Check = Callable[[StoredMessage], LocalTransactionState]
PlaceKey = tuple[str, int, int]
"""A half message: its broker, the queue offset of its batch, its ordinal there."""
_log = logging.getLogger(__name__)


class CheckService:
    """Service that calls the listener for each message; a call that hangs holds up no other.

    Args:
        group: Producer group.
        check: The listener's method.
        ends: Takes the answers.
        pool: Threads that call the listener.
        clock: For the answers' deadlines.
        hooks: The producer's.

    Attributes:
        checks: Number of calls of the listener.
        running: Local transactions that run in this process just now, or are about to; for these
            the listener is not called, since it could only guess.
    """

    def __init__(
        self,
        group: str,
        check: Check,
        ends: EndSender,
        pool: ListenerPool,
        clock: Clock,
        hooks: HookCalls | None = None,
        namespace: str = "",
    ) -> None:
        self._group = group
        self._namespace = namespace
        self._check = check
        self._ends = ends
        self._pool = pool
        self._clock = clock
        self._hooks = hooks
        self._lock = ranked_lock(LockRank.LEAF)
        self._asking: set[PlaceKey] = set()
        self.checks = 0
        self.running: set[PlaceKey] = set()

    def on_question(self, broker_name: str, command: Command) -> None:
        """Take a broker's question; in the client loop."""
        try:
            question = decode_header(CheckTransactionState, command.header)
        except MQMeshError as error:
            _log.error("a check-back of broker %s: %s", broker_name, error)
            return
        if question.group != self._group:
            return
        if self._pool.waiting > MAX_CHECKS_WAITING:
            _log.error("too many check-backs wait; those of broker %s are dropped", broker_name)
            return
        self._pool.submit(partial(self._open, broker_name, question, command.body))

    def _open(self, broker_name: str, question: CheckTransactionState, batch: memoryview) -> None:
        try:
            header = check_batch(batch)
            messages = decode_messages(
                batch, header, broker_name=broker_name, namespace=self._namespace
            )
        except MQMeshError as error:
            _log.error("a half message that broker %s asks about: %s", broker_name, error)
            return
        place = HalfPlace(
            broker_name,
            question.base_queue_offset,
            header.producer_id,
            header.first_sequence - question.first_ordinal,
            question.token,
        )
        for ordinal in question.ordinals:
            index = ordinal - question.first_ordinal
            if 0 <= index < len(messages):
                key = (broker_name, question.base_queue_offset, ordinal)
                with self._lock:
                    # Or the listener still works on an earlier check of the message.
                    if key in self.running or key in self._asking:
                        continue
                    self._asking.add(key)
                self._pool.submit(partial(self._ask, key, place, ordinal, messages[index]))

    def _ask(self, key: PlaceKey, place: HalfPlace, ordinal: int, message: StoredMessage) -> None:
        state = LocalTransactionState.UNKNOWN
        self.checks += 1
        try:
            state = self._check(message)
        except Exception:
            _log.error(
                "the listener failed when asked about message %s",
                message.message_id,
                exc_info=error_to_log(),
            )
        finally:
            with self._lock:
                self._asking.discard(key)
        decision = DECISION_OF.get(state)
        if decision is None:
            return  # the broker asks again
        deadline_ms = self._clock.monotonic_ms() + ANSWER_TIMEOUT_MS
        run_hooks = hooked_end(self._hooks, message, decision, self._clock, from_check=True)
        self._ends.add(
            place, ordinal, decision, deadline_ms, partial(_answered, message.message_id, run_hooks)
        )


def _answered(message_id: str, run_hooks: OnEnded, outcome: EndOutcome | MQMeshError) -> None:
    run_hooks(outcome)
    if isinstance(outcome, MQMeshError):
        _log.warning("the outcome of message %s could not be sent: %s", message_id, outcome)
    elif outcome is EndOutcome.DECIDED_OTHERWISE:
        _log.error("message %s had ended otherwise before it was asked about", message_id)
    elif outcome is EndOutcome.NOT_PROVEN:
        _log.info("the broker was started anew and will ask about message %s again", message_id)
