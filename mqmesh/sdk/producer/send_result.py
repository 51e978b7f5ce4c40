"""Outcome of a send: the result, and the future that it arrives in."""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from mqmesh.errors import MQMeshError
from mqmesh.message import MessageQueue, format_message_id
from mqmesh.protocol.messaging import SendStatus
from mqmesh.sdk.hooks import HookCalls, SendContext
from mqmesh.sdk.producer.lanes import PendingBatch
from mqmesh.sdk.tracing.message_trace import Facts, MessageTrace
from mqmesh.sdk.tracing.trace_records import TraceMessageType
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs


class SendResult(msgspec.Struct, frozen=True, gc=False):
    """A message, or an explicit batch, as the broker has it.

    Attributes:
        status: ``SEND_OK``, or the missing safety.
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
        if batch.outcome is None and batch.error is None:
            batch.wait(timeout)
        if batch.error is not None:
            # One error may be raised many times; its last traceback is not of interest.
            raise batch.error.with_traceback(None)
        return make_result(batch, self.index)

    def add_done_callback(self, on_done: OnDone) -> None:
        """Calls back with this future when it is done, at once if it is.

        The call comes in the producer's own thread and must not block; its errors are
        logged.
        """
        batch = self._batch
        with batch.lock:
            if not batch.done:
                batch.callbacks.append(partial(on_done, self))
                return
        on_done(self)


def run_after_send(hooks: HookCalls, context: SendContext, batch: PendingBatch) -> None:
    """Calls ``after_send`` for a batch that is done.

    Args:
        hooks: The producer's.
        context: Context of ``before_send``.
        batch: Batch that is done.
    """
    if batch.outcome is not None:
        context.status = _STATUS[batch.outcome.status]
        context.queue = batch.queue
        context.queue_offset = batch.outcome.base_queue_offset
        context.commitlog_offset = batch.outcome.commitlog_offset
        context.first_id = batch.producer_id, batch.first_sequence
    context.error = batch.error
    hooks.after_send(context)


def trace_stored(
    trace: MessageTrace,
    facts: Sequence[Facts],
    message_type: TraceMessageType,
    batch: PendingBatch,
) -> None:
    """Has a batch traced that is done, if it is stored.

    Args:
        trace: The producer's.
        facts, message_type: See ``MessageTrace.stored``.
        batch: Batch that is done.
    """
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
