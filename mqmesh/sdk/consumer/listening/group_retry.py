"""Retry of messages whose listener failed, in a group that shares its messages.

They are sent back to their broker, which delivers them again later, to any member, or gives
them up as dead letters. Messages that cannot be sent back stay here and are tried again: none
counts as done before the broker says so.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol

from mqmesh.errors import CorruptBatch, MQMeshError
from mqmesh.failure_text import failure_text, one_line
from mqmesh.message import MessageQueue, StoredMessage, dlq_topic
from mqmesh.protocol.retries import TO_DEAD_LETTERS
from mqmesh.sdk.consumer.fetching.process_queue import DONE, PARKED, StateSpan
from mqmesh.sdk.consumer.listening.consume_result import Cause, ConsumeResult, is_rejected
from mqmesh.sdk.consumer.listening.consume_work import OnFailed, Portion
from mqmesh.sdk.consumer.listening.local_retry import report_failure
from mqmesh.sdk.consumer.listening.send_back_queue import SendBackQueue, SentBack

SEND_AGAIN_MS: Final = 5_000
"""Delay of the next send-back after one that failed, of a message not to be retried here."""

_log = logging.getLogger(__name__)


class Retry(Protocol):
    """Retry of messages that were not consumed."""

    def on_failed(self, portion: Portion, messages: list[StoredMessage], cause: Cause) -> None:
        """Takes over a failed call's messages; called by a worker."""

    def on_undecodable(
        self, queue: MessageQueue, first: int, end: int, span: StateSpan, error: CorruptBatch
    ) -> None:
        """Takes over messages that cannot even be read; called by a worker.

        Args:
            queue: Queue of the messages.
            first: Queue offset of the first.
            end: Queue offset behind the last.
            span: States of the messages.
            error: Error of decoding them.
        """

    def on_overdue(self, queue: MessageQueue, offset: int, span: StateSpan, late_ms: int) -> None:
        """Handle a message that is with a listener for too long; in the client loop.

        Args:
            queue: Queue of the message.
            offset: Its queue offset.
            span: State of the message.
            late_ms: For how long.
        """

    def look(self, now_ms: int, commit_offsets: Mapping[MessageQueue, int]) -> None:
        """Called each second; in the client loop.

        Args:
            now_ms: Monotonic clock.
            commit_offsets: Offset before which all is done, by queue.
        """

    def wait(self, timeout_s: float) -> bool:
        """Waits until nothing is under way; not in the client loop."""


class GroupRetry:
    """Retry that sends failed messages back.

    Args:
        group: Consumer group.
        sender: Sends them.
        call_later: Calls in the client loop after so many milliseconds; from any thread.
        keep: Takes over messages that cannot be sent back, and has them consumed here once more.
    """

    def __init__(
        self,
        group: str,
        sender: SendBackQueue,
        call_later: Callable[[int, Callable[[], None]], object],
        keep: OnFailed,
    ) -> None:
        self._group = group
        self._sender = sender
        self._call_later = call_later
        self._keep = keep

    def on_failed(self, portion: Portion, messages: list[StoredMessage], cause: Cause) -> None:
        """Sends a failed call's messages back; called by a worker."""
        rejected = is_rejected(messages, cause)
        then = "it goes to the dead letters" if rejected else "it is sent back for a later try"
        report_failure(messages, portion.attempt, cause, then)
        reason = reason_of(cause)
        for some in consecutive(messages):
            self._send_failed(portion, some, cause, reason, TO_DEAD_LETTERS if rejected else 0)

    def on_undecodable(
        self, queue: MessageQueue, first: int, end: int, span: StateSpan, error: CorruptBatch
    ) -> None:
        """Sends messages that cannot be read to the dead letters; called by a worker.

        A broker that can read them treats them as any others that failed.
        """
        span.mark(first, end - 1, PARKED)
        _log.error(
            "%s, offsets %d to %d: messages that cannot be decoded go to %s: %s",
            queue,
            first,
            end - 1,
            dlq_topic(self._group),
            error,
        )
        self._send_unread(queue, first, end - first, span, reason_of(error))

    def on_overdue(self, queue: MessageQueue, offset: int, span: StateSpan, late_ms: int) -> None:
        """Sends a message back that is with a listener for too long; in the client loop."""
        span.mark(offset, offset, PARKED)
        _log.warning(
            "%s: the message at offset %d is with its listener for %d ms (consume_timeout_ms); "
            "it is sent back for a later try",
            queue,
            offset,
            late_ms,
        )
        reason = f"ConsumeTimeout: with its listener for {late_ms} ms (consume_timeout_ms)"
        self._send_unread(queue, offset, 1, span, reason)

    def look(self, now_ms: int, commit_offsets: Mapping[MessageQueue, int]) -> None:
        """Do nothing: the send-back queue looks after waiting messages."""

    def wait(self, timeout_s: float) -> bool:
        """Waits until nothing is under way; not in the client loop."""
        return self._sender.wait(timeout_s)

    def _send_failed(
        self,
        portion: Portion,
        messages: list[StoredMessage],
        cause: Cause,
        reason: str,
        delay_level: int,
    ) -> None:
        first, last = messages[0], messages[-1]

        def done(outcome: int | MQMeshError) -> None:
            if isinstance(outcome, MQMeshError):
                _log.warning(
                    "group %s: message %s could not be sent back, it is kept here: %s",
                    self._group,
                    first.message_id,
                    outcome,
                )
                self._keep(portion, messages, cause)
                return
            portion.span.mark(first.queue_offset, last.queue_offset, DONE)
            if outcome:
                _log.log(
                    # Of one that was rejected the log has a line already.
                    logging.DEBUG if delay_level == TO_DEAD_LETTERS else logging.WARNING,
                    "group %s: message %s is a dead letter now: %s",
                    self._group,
                    first.message_id,
                    one_line(reason),
                )
            portion.work.on_progress()

        count = last.queue_offset - first.queue_offset + 1
        place = (first.message_queue, first.queue_offset)
        self._sender.send(SentBack(*place, count, reason, done, delay_level))

    def _send_unread(
        self, queue: MessageQueue, first: int, count: int, span: StateSpan, reason: str
    ) -> None:
        def send() -> None:
            self._sender.send(SentBack(queue, first, count, reason, done))

        def done(outcome: int | MQMeshError) -> None:
            if isinstance(outcome, MQMeshError):
                _log.warning("%s, offset %d: could not be sent back: %s", queue, first, outcome)
                self._call_later(SEND_AGAIN_MS, send)
            else:
                span.mark(first, first + count - 1, DONE)

        send()


def reason_of(cause: Cause) -> str:
    """Return why a call failed, in the words that travel with the messages."""
    if cause is ConsumeResult.RECONSUME_LATER:
        return "the listener answered RECONSUME_LATER"
    assert isinstance(cause, BaseException)
    return failure_text(cause)


def consecutive(messages: list[StoredMessage]) -> Iterator[list[StoredMessage]]:
    """Divides messages of a queue where a filter left some out."""
    start = 0
    for at in range(1, len(messages) + 1):
        if at == len(messages) or messages[at].queue_offset != messages[at - 1].queue_offset + 1:
            yield messages[start:at]
            start = at
