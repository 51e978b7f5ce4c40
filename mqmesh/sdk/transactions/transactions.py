"""Transactions for users: the listener, states, outcomes."""

import enum
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

import msgspec

from mqmesh.errors import (
    ClientClosed,
    MQMeshError,
    RequestTimeout,
    TransactionConflict,
)
from mqmesh.failure_text import error_to_log
from mqmesh.message import TRANS_HALF_TOPIC, BatchInfo, Message, StoredMessage
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.transactions import Decision, EndOutcome
from mqmesh.sdk.producer.send_result import SendResult
from mqmesh.transport.interface import Flag
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs

_log = logging.getLogger(__name__)


class LocalTransactionState(enum.Enum):
    """State of a local transaction."""

    COMMIT = "COMMIT"
    """The transaction is done: the message goes out."""
    ROLLBACK = "ROLLBACK"
    """The transaction did not happen, and never will: no consumer ever sees the message."""
    UNKNOWN = "UNKNOWN"
    """Not known yet: the broker asks again later."""


DECISION_OF: Final = {
    LocalTransactionState.COMMIT: Decision.COMMIT,
    LocalTransactionState.ROLLBACK: Decision.ROLLBACK,
}


class TransactionListener(ABC):
    """The local side of transactions. Called from several threads at once."""

    @abstractmethod
    def execute_local_transaction(self, message: StoredMessage, arg: Any) -> LocalTransactionState:
        """Runs the local transaction; the half message is stored.

        Args:
            message: The message; ``message_id`` and ``keys`` identify it. Write one of
                them with the local transaction, so that ``check_local_transaction`` finds it.
            arg: Argument given with the message.

        Returns:
            How it ended. Raising an exception means UNKNOWN.
        """

    @abstractmethod
    def check_local_transaction(self, message: StoredMessage) -> LocalTransactionState:
        """Returns how the local transaction of a message ended, when the broker asks.

        It may be a message of another member of the group, also of one that died before its
        local transaction, in the middle, or long after it. While that may still be running,
        answer UNKNOWN; when it can be excluded that it ever ends well, ROLLBACK.

        Returns:
            How it ended. Raising an exception means UNKNOWN.
        """


class TransactionSendResult(msgspec.Struct, frozen=True, gc=False):
    """A message sent in a transaction.

    Attributes:
        send_result: Of the half message: its ``message_id`` is the message's for ever, its
            ``queue_offset`` is a position in the half topic.
        local_transaction_state: State of the local transaction.
        is_ended: The broker has the decision. If not, it asks back later and learns it then.
    """

    send_result: SendResult
    local_transaction_state: LocalTransactionState
    is_ended: bool

    @property
    def message_id(self) -> str:
        """Id of the message, before and after its commit."""
        return self.send_result.message_id


class TransactionFuture:
    """The outcome of an asynchronous transaction, when it comes.

    Made by ``TransactionProducer.send_message_in_transaction_async``.
    """

    __slots__ = (
        "_callbacks",
        "_deadline_ms",
        "_error",
        "_event",
        "_flag",
        "_lock",
        "_result",
        "arg",
        "message",
        "sent",
        "state",
    )

    def __init__(
        self, lock: threading.Lock, flag: Callable[[], Flag], message: Message, arg: Any
    ) -> None:
        self._lock = lock
        self._flag = flag
        self._result: TransactionSendResult | None = None
        self._error: MQMeshError | None = None
        self._event: Flag | None = None
        self._callbacks: list[Callable[[TransactionFuture], None]] = []
        self._deadline_ms = 0
        self.message = message
        self.arg = arg
        self.sent: SendResult | None = None
        self.state = LocalTransactionState.UNKNOWN

    def done(self) -> bool:
        """Return True once ``result`` returns or raises at once."""
        return self._result is not None or self._error is not None

    def exception(self) -> MQMeshError | None:
        """Return why there is no result; None when there is one, or nothing yet."""
        return self._error

    def result(self, timeout: float | None = None) -> TransactionSendResult:
        """Waits for the outcome.

        Args:
            timeout: Seconds, None for as long as it takes.

        Raises:
            RequestTimeout: It did not come in time.
            TransactionConflict: The transaction had ended the other way before.
            MQMeshError: The half message could not be sent; the local transaction was not run.
        """
        if not self.done():
            with self._lock:
                if self._event is None:
                    self._event = self._flag()
            if not self.done() and not self._event.wait(timeout):
                raise RequestTimeout(f"no outcome of the transaction within {timeout} s")
        if self._error is not None:
            raise self._error.with_traceback(None)
        assert self._result is not None
        return self._result

    def add_done_callback(self, on_done: Callable[["TransactionFuture"], None]) -> None:
        """Calls back with this future when it is done, at once if it is; must not block."""
        with self._lock:
            if not self.done():
                self._callbacks.append(on_done)
                return
        on_done(self)

    def finish(self, result: TransactionSendResult | None, error: MQMeshError | None) -> bool:
        """Sets the outcome; for the producer only.

        Returns:
            False when there was one already.
        """
        with self._lock:
            if self.done():
                return False
            self._result, self._error = result, error
            event, callbacks = self._event, self._callbacks
            self._callbacks = []
        if event is not None:
            event.set()
        for on_done in callbacks:
            try:
                on_done(self)
            except Exception:
                # The others must be called.
                _log.error("a callback of a transaction failed", exc_info=error_to_log())
        return True


def judge_end(outcome: EndOutcome | MQMeshError, decision: Decision, message_id: str) -> bool:
    """Judge the outcome of a decision for its sender.

    Returns:
        True when the broker has the decision; False when it will ask back.

    Raises:
        TransactionConflict: It has another one.
    """
    wanted = decision.name
    if isinstance(outcome, ClientClosed):
        return False
    if isinstance(outcome, MQMeshError):
        _log.warning(
            "the %s of message %s did not reach the broker, which will ask back: %s",
            wanted,
            message_id,
            outcome,
        )
        return False
    if outcome is EndOutcome.DECIDED_OTHERWISE:
        raise TransactionConflict(
            f"message {message_id} cannot end by {wanted}: its transaction had ended otherwise, "
            "by a check-back or an administrator"
        )
    if outcome is EndOutcome.TOPIC_GONE:
        raise TransactionConflict(
            f"message {message_id} cannot be committed: its topic, or its queue there, does not "
            "exist any more"
        )
    if outcome is EndOutcome.NOT_PROVEN:
        raise TransactionConflict(
            f"message {message_id} cannot end by {wanted}: the broker does not believe that this "
            "producer sent it"
        )
    if outcome is EndOutcome.NOT_PENDING:
        raise TransactionConflict(
            f"message {message_id} does not wait for its {wanted} any more; how its transaction "
            "ended is not known"
        )
    return True


def local_message(message: Message, result: SendResult, group: str) -> StoredMessage:
    """Return the message as a listener gets it, with its id."""
    stored = StoredMessage(
        message.topic,
        message.body,
        message.tag,
        message.keys,
        message.properties,
        message.flag,
        message.sharding_key,
        message.delay_level,
        message.deliver_at_ms,
    )
    stored.queue_offset = result.queue_offset
    stored.batch = BatchInfo(
        TRANS_HALF_TOPIC,
        0,
        result.message_queue.broker_name,
        QueueOffset(result.queue_offset),
        CommitLogOffset(result.commitlog_offset),
        0,
        TimestampMs(0),
        TimestampMs(result.store_timestamp),
        group,
        "",
        result.producer_id,
        result.sequence,
        0,
    )
    return stored


def is_safe(result: SendResult) -> bool:
    """Return True when a half message is as safe as the broker's mode promises."""
    return result.status is SendStatus.SEND_OK
