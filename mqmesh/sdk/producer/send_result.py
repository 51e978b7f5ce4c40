"""Outcome of a send: the result, and the future that it arrives in."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from mqmesh.batch.payload import Payload
from mqmesh.clock import Clock
from mqmesh.errors import MQMeshError, RequestTimeout
from mqmesh.failure_text import error_to_log
from mqmesh.message import Message, MessageQueue, format_message_id
from mqmesh.protocol.messaging import BatchOutcome, SendStatus
from mqmesh.sdk.hooks import HookCalls, SendContext
from mqmesh.sdk.tracing.message_trace import Facts, MessageTrace
from mqmesh.sdk.tracing.trace_records import TraceMessageType
from mqmesh.transport.interface import Flag
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs

GRACE_MS: Final = 1_000
"""Time after its deadline that an outcome may come, on a machine that is stuck."""

_log = logging.getLogger(__name__)


class SendResult(msgspec.Struct, frozen=True, gc=False):
    """A message, or an explicit batch, as the broker has it.

    Attributes:
        status: ``SEND_OK``, or what is still missing.
        message_queue: Queue it went to.
        queue_offset: Of the message, or of the batch's first one.
        commitlog_offset: Start of its batch in the broker's log.
        store_timestamp: When the broker stored it, ms.
        producer_id: Instance id of the producer.
        sequence: Of the message, or of the batch's first one.
        message_count: 1, or the size of an explicit batch.
    """

    status: SendStatus
    message_queue: MessageQueue
    queue_offset: QueueOffset
    commitlog_offset: CommitLogOffset
    store_timestamp: TimestampMs
    producer_id: int
    sequence: int
    message_count: int = 1

    @property
    def message_id(self) -> str:
        """Id of the message, or of the batch's first one."""
        return format_message_id(self.producer_id, self.sequence)

    @property
    def message_ids(self) -> list[str]:
        """Ids of all messages of the batch, in order."""
        first = self.sequence
        return [
            format_message_id(self.producer_id, sequence)
            for sequence in range(first, first + self.message_count)
        ]


# A look-up, because calling an enumeration costs as much as all the rest of a result.
_STATUS = {status.value: status for status in SendStatus}

OnDone = Callable[["SendFuture"], None]


class Waits(msgspec.Struct, frozen=True, eq=False):
    """Shared state of a producer's sends: the lock of their outcomes, and how to wait for one.

    Attributes:
        lock: Guards messages until their batch is taken for sending, and outcomes with those who
            wait for them.
        flag: Makes something to wait for.
        clock: Of the deadlines.
    """

    lock: threading.Lock
    flag: Callable[[], Flag]
    clock: Clock


class PendingBatch(msgspec.Struct, eq=False):
    """Messages that travel together, from the call of send to their outcome.

    Attributes:
        waits: Its producer's.
        queue: Queue it goes to.
        deadline_ms: Deadline of its youngest message; the latest possible while it is open.
        bound: It must go to this queue and no other.
        explicit_count: Messages of a batch that its sender made, 0 for one that grew by itself.
        retries: Times it may be sent again.
        wait_store: It wants to be on disk and at the slave, as the broker's mode says.
        size: Memory charged for its messages, in bytes.
        payload: Its messages encoded, as soon as none is added any more.
        delay: Delay level of its messages, ``AT_TIMES`` for points in time, 0 for no delay.
        due_times: Those points in time; see ``delayed_batch.DelayedMeta``.
        attempts: Number of sends that count.
        producer_id, first_sequence: Of its first message; -1 for none yet.
        born_timestamp: When these were given to it. All three stay whatever queue it goes to, so
            that the same ids never stand for different bytes in one queue.
        encoded: All of it, as it goes to ``queue``.
        cause: Why it had to be sent again last.
        doubt: The error that left it unknown whether a broker has stored the batch.
        accepted: Outcome of a broker that has it, though not as safely as it should be.
        holders: Brokers that may have stored it.
        stays_until_ms: Monotonic time before which it is repeated at its broker group only.
        outcome, error: Result of the batch; one of them when it is done.
        event: Set when it is done, if somebody waits.
        callbacks: To be called then, each with its future.
    """

    waits: Waits
    queue: MessageQueue
    deadline_ms: int
    bound: bool
    explicit_count: int
    retries: int
    wait_store: bool
    messages: list[Message] = []
    size: int = 0
    payload: Payload | None = None
    delay: int = 0
    due_times: bytes = b""
    attempts: int = 0
    producer_id: int = 0
    first_sequence: int = -1
    born_timestamp: int = 0
    encoded: tuple[bytes, ...] | None = None
    cause: MQMeshError | None = None
    doubt: MQMeshError | None = None
    accepted: tuple[MessageQueue, BatchOutcome] | None = None
    holders: frozenset[str] = frozenset()
    stays_until_ms: int = 0
    outcome: BatchOutcome | None = None
    error: MQMeshError | None = None
    event: Flag | None = None
    callbacks: list[tuple["OnDone", "SendFuture"]] = []

    @property
    def message_count(self) -> int:
        """Number of its messages, until its outcome is reported."""
        return self.explicit_count or len(self.messages)

    @property
    def done(self) -> bool:
        """True once there is an outcome or an error."""
        return self.outcome is not None or self.error is not None

    def finish(self, outcome: BatchOutcome | None, error: MQMeshError | None) -> None:
        """Sets the outcome and notifies everybody who waits; further calls do nothing."""
        with self.waits.lock:
            is_first = self.conclude(outcome, error)
        if is_first:
            self.tell()

    def conclude(self, outcome: BatchOutcome | None, error: MQMeshError | None) -> bool:
        """Sets the outcome if there is none yet, with the lock held; if so, call ``tell`` then."""
        assert (outcome is None) is not (error is None)
        if self.done:
            return False
        self.outcome, self.error = outcome, error
        return True

    def tell(self) -> None:
        """Wakes and calls everybody who waits for the outcome, without the lock."""
        # Programs may hold futures for long; what was sent need not stay with them.
        self.messages, self.payload, self.encoded = [], None, None
        if self.event is not None:
            self.event.set()
        if not self.callbacks:
            return
        callbacks, self.callbacks = self.callbacks, []
        for on_done, future in callbacks:
            try:
                on_done(future)
            except BaseException:
                # Whatever it is, SystemExit too, the others must be called.
                _log.error("a callback of a send failed", exc_info=error_to_log())


class SendFuture(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The outcome of one asynchronous send, when it comes.

    Programs hold hundreds of thousands of them, so the garbage collector is spared: the one
    cycle, by a callback, is cut when the batch is done.

    Attributes:
        index: Position of the message in that batch.
    """

    _batch: PendingBatch
    index: int

    @property
    def batch(self) -> PendingBatch:
        """The batch that the message travels in; for the SDK's own parts."""
        return self._batch

    def done(self) -> bool:
        """Return True once ``result`` returns or raises at once."""
        batch = self._batch
        return batch.outcome is not None or batch.error is not None

    def exception(self) -> MQMeshError | None:
        """Return why the send failed; None when it did not, or is not done yet."""
        return self._batch.error

    def result(self, timeout: float | None = None) -> SendResult:
        """Waits for the outcome.

        Args:
            timeout: Seconds, None for as long as the send's own timeout lasts.

        Raises:
            RequestTimeout: The outcome did not come within ``timeout``.
            MQMeshError: The send failed; after a ``RequestTimeout`` or a broken connection
                it is unknown whether the message was stored.
        """
        batch = self._batch
        if batch.outcome is None and not batch.done:
            _wait(batch, timeout)
        if batch.error is not None:
            # One error may be raised many times; what it saw the last time is not of interest.
            raise batch.error.with_traceback(None)
        return make_result(batch, self.index)

    def add_done_callback(self, on_done: OnDone) -> None:
        """Calls back with this future when it is done, at once if it is.

        The call comes in the producer's own thread and must not block; what it raises is
        logged.
        """
        batch = self._batch
        with batch.waits.lock:
            if not batch.done:
                batch.callbacks.append((on_done, self))
                return
        on_done(self)


def _wait(batch: PendingBatch, timeout_s: float | None) -> None:
    waits = batch.waits
    with waits.lock:
        if batch.done:
            return
        event = batch.event = batch.event or waits.flag()
    if timeout_s is None:
        # No longer than the send can take; also for waits in a callback, where none comes.
        timeout_s = max(batch.deadline_ms + GRACE_MS - waits.clock.monotonic_ms(), 0) / 1_000
    if not event.wait(timeout_s):
        raise RequestTimeout(
            f"no outcome of the send within {timeout_s:.3f} s; whether the message was stored is "
            "unknown"
        )


def tell_hooks(hooks: HookCalls, context: SendContext, sent: SendFuture) -> None:
    """Calls ``after_send`` for a batch that is done.

    Args:
        hooks: The producer's.
        context: Context of ``before_send``.
        sent: Its first message's future.
    """
    batch = sent.batch
    if batch.outcome is not None:
        context.status = _STATUS[batch.outcome.status]
        context.queue = batch.queue
        context.queue_offset = batch.outcome.base_queue_offset
        context.commitlog_offset = batch.outcome.commitlog_offset
        context.first_id = batch.producer_id, batch.first_sequence
    context.error = batch.error
    hooks.after_send(context)


def tell_trace(
    trace: MessageTrace, facts: Sequence[Facts], message_type: TraceMessageType, sent: SendFuture
) -> None:
    """Has a batch traced that is done, if it is stored.

    Args:
        trace: The producer's.
        facts, message_type: See ``MessageTrace.stored``.
        sent: The batch's first message's future.
    """
    batch = sent.batch
    if batch.outcome is not None:
        trace.stored(
            facts,
            batch.queue,
            (batch.producer_id, batch.first_sequence),
            message_type,
            batch.born_timestamp,
            batch.outcome.commitlog_offset,
            success=_STATUS[batch.outcome.status] is SendStatus.SEND_OK,
        )


def make_result(batch: PendingBatch, index: int) -> SendResult:
    """Return the result of one message of a batch that was stored."""
    outcome = batch.outcome
    assert outcome is not None
    return SendResult(
        _STATUS[outcome.status],
        batch.queue,
        outcome.base_queue_offset + index,  # type: ignore[arg-type]  # calls of NewTypes cost
        outcome.commitlog_offset,  # type: ignore[arg-type]  # as much as all the rest
        outcome.store_timestamp,  # type: ignore[arg-type]
        batch.producer_id,
        batch.first_sequence + index,
        batch.explicit_count or 1,
    )
