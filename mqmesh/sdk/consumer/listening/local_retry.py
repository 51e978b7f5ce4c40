"""Retry of failed messages that no other member can take: they wait here.

They hold back what the group commits of their queue, but not the messages behind them.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Final

from mqmesh.errors import CorruptBatch
from mqmesh.message import MessageQueue, StoredMessage
from mqmesh.sdk.consumer.fetching.process_queue import DONE, OPEN, StateSpan
from mqmesh.sdk.consumer.listening.consume_result import (
    Cause,
    ConsumeResult,
    log_failure,
    where_failed,
)
from mqmesh.sdk.consumer.listening.consume_work import Portion, QueueWork

RETRY_DELAYS_MS: Final = (1_000, 5_000, 10_000, 30_000, 60_000, 120_000)
"""Delays before each further try; the last one repeats."""

_log = logging.getLogger(__name__)


class LocalRetry:
    """Retry of failed messages after a growing delay, without limit.

    Args:
        call_later: Calls in the client loop after so many milliseconds; from any thread.
        submit: Has messages consumed, as ``ConcurrentService.submit_again``.
        delays_ms: Before each further try.
    """

    def __init__(
        self,
        call_later: Callable[[int, Callable[[], None]], object],
        submit: Callable[[QueueWork, list[StoredMessage], StateSpan, int], None],
        delays_ms: tuple[int, ...] = RETRY_DELAYS_MS,
    ) -> None:
        self._call_later = call_later
        self._submit = submit
        self._delays_ms = delays_ms

    def on_failed(self, portion: Portion, messages: list[StoredMessage], cause: Cause) -> None:
        """Plans the next try of a failed call's messages; called by a worker."""
        delay_ms = self._delays_ms[min(portion.attempt, len(self._delays_ms) - 1)]
        then = f"try {portion.attempt + 2} in {delay_ms} ms"
        report_failure(messages, portion.attempt, cause, then)

        def retry() -> None:
            if portion.work.revoked:
                return
            for message in messages:
                portion.span.mark(message.queue_offset, message.queue_offset, OPEN)
            self._submit(portion.work, list(messages), portion.span, portion.attempt + 1)

        self._call_later(delay_ms, retry)


class NoRetry:
    """Broadcasting does not try again: a failed message is reported, and counts as done."""

    def on_failed(self, portion: Portion, messages: list[StoredMessage], cause: Cause) -> None:
        """Gives up a failed call's messages; called by a worker."""
        report_failure(
            messages, portion.attempt, cause, "BROADCASTING does not try again", wanted=False
        )
        for message in messages:
            portion.span.mark(message.queue_offset, message.queue_offset, DONE)

    def on_undecodable(
        self, queue: MessageQueue, first: int, end: int, span: StateSpan, error: CorruptBatch
    ) -> None:
        """Gives up messages that cannot be read; called by a worker."""
        _log.error(
            "%s, offsets %d to %d: messages that cannot be decoded are passed over: %s",
            queue,
            first,
            end - 1,
            error,
        )
        span.mark(first, end - 1, DONE)

    def on_overdue(self, queue: MessageQueue, offset: int, span: StateSpan, late_ms: int) -> None:
        """Reports a message that is with a listener for too long; in the client loop."""
        _log.warning(
            "%s: the message at offset %d is with its listener for %d ms (consume_timeout_ms)",
            queue,
            offset,
            late_ms,
        )

    def look(self, now_ms: int, commit_offsets: Mapping[MessageQueue, int]) -> None:
        """Do nothing, since nothing waits."""

    def wait(self, timeout_s: float) -> bool:
        """Return True, since nothing is ever under way."""
        return True


def report_failure(
    messages: list[StoredMessage],
    attempt: int,
    cause: Cause,
    then: str,
    *,
    wanted: bool = True,
) -> None:
    """Logs that a listener failed.

    Args:
        messages: Messages of the call.
        attempt: Number of failures here before.
        cause: Error of the listener, or ``RECONSUME_LATER``.
        then: Next step.
        wanted: A listener that asks for a later try gets one, so that is not reported.
    """
    what = where_failed(messages)
    on_purpose = cause is ConsumeResult.RECONSUME_LATER and wanted
    level = logging.DEBUG if on_purpose else logging.WARNING
    log_failure(_log, level, what, cause, then, attempt=attempt)
