"""Retry of messages that were not consumed, where messages are consumed in order.

Nothing is passed over: a failure keeps its queue waiting. Only with ``max_reconsume_times``
a message that failed too often becomes a dead letter, and only with that or
``dead_letter_undecodable`` one that cannot be decoded.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from mqmesh.errors import CorruptBatch, MQMeshError
from mqmesh.message import MessageQueue, StoredMessage
from mqmesh.protocol.retries import TO_DEAD_LETTERS
from mqmesh.sdk.consumer.fetching.process_queue import StateSpan
from mqmesh.sdk.consumer.listening.consume_result import Cause
from mqmesh.sdk.consumer.listening.consume_work import Portion
from mqmesh.sdk.consumer.listening.group_retry import Retry, consecutive, reason_of
from mqmesh.sdk.consumer.listening.orderly_service import ToDeadLetters
from mqmesh.sdk.consumer.listening.send_back_queue import SendBackQueue, SentBack

LOG_EACH_MS: Final = 60_000
"""Interval of the log's reports about a queue that waits for ever."""

_log = logging.getLogger(__name__)


class Unreadable(msgspec.Struct):
    """Messages that cannot be decoded and keep their queue waiting.

    Attributes:
        first: Queue offset of the first.
        end: Queue offset behind the last.
        error: Error of decoding them.
        told_ms: Time of the last log line, monotonic; -1 for never.
        is_leaving: They are on their way to the dead letters.
    """

    first: int
    end: int
    error: CorruptBatch
    logged_ms: int = -1
    is_leaving: bool = False


class OrderlyRetry(Retry):
    """Retry for queues that wait; failed calls are the service's own affair.

    Args:
        sender: Sends dead letters.
        gives_up: Messages that cannot be decoded become dead letters, when all before them are
            done.
        pass_over: Lets a queue go on at an offset; in the client loop.
    """

    def __init__(
        self,
        sender: SendBackQueue,
        gives_up: bool,
        pass_over: Callable[[MessageQueue, int], None],
    ) -> None:
        self._sender = sender
        self._gives_up = gives_up
        self._pass_over = pass_over
        self._unreadable: dict[MessageQueue, Unreadable] = {}

    def on_failed(self, portion: Portion, messages: list[StoredMessage], cause: Cause) -> None:
        raise AssertionError("what fails in order is not taken out of it")

    def on_undecodable(
        self, queue: MessageQueue, first: int, end: int, span: StateSpan, error: CorruptBatch
    ) -> None:
        self._unreadable[queue] = Unreadable(first, end, error)

    def on_overdue(self, queue: MessageQueue, offset: int, span: StateSpan, late_ms: int) -> None:
        _log.warning(
            "%s: the message at offset %d is not done after %d ms (consume_timeout_ms)",
            queue,
            offset,
            late_ms,
        )

    def look(self, now_ms: int, commit_offsets: Mapping[MessageQueue, int]) -> None:
        for queue, one in list(self._unreadable.items()):
            offset = commit_offsets.get(queue)
            if offset is None or offset > one.first:
                del self._unreadable[queue]  # another member has it, or the group was moved
            elif offset == one.first and not one.is_leaving:
                if self._gives_up:
                    self._bury(queue, one)
                elif one.logged_ms < 0 or now_ms - one.logged_ms >= LOG_EACH_MS:
                    one.logged_ms = now_ms
                    _report_unreadable(queue, one)

    def wait(self, timeout_s: float) -> bool:
        return self._sender.wait(timeout_s)

    def _bury(self, queue: MessageQueue, one: Unreadable) -> None:
        one.is_leaving = True
        _log.error(
            "%s, offsets %d to %d: messages that cannot be decoded go to the dead letters: %s",
            queue,
            one.first,
            one.end - 1,
            one.error,
        )

        def done(outcome: int | MQMeshError) -> None:
            one.is_leaving = False
            if isinstance(outcome, MQMeshError):
                _log.warning("%s: they could not be sent there yet: %s", queue, outcome)
            elif self._unreadable.get(queue) is one:
                del self._unreadable[queue]
                self._pass_over(queue, one.end)

        reason, count = reason_of(one.error), one.end - one.first
        self._sender.send(SentBack(queue, one.first, count, reason, done, TO_DEAD_LETTERS))


def _report_unreadable(queue: MessageQueue, one: Unreadable) -> None:
    _log.error(
        "%s waits at offset %d: messages %d to %d cannot be decoded, and in order nothing is "
        "passed over (dead_letter_undecodable); move the group's offset to %d to go on without "
        "them: %s",
        queue,
        one.first,
        one.first,
        one.end - 1,
        one.end,
        one.error,
    )


def to_dead_letters(sender: SendBackQueue) -> ToDeadLetters:
    """Return the function that makes dead letters of messages that failed too often in order.

    Args:
        sender: Sends them.
    """

    def send(
        messages: list[StoredMessage],
        cause: Cause,
        on_done: Callable[[bool], None],
    ) -> None:
        groups = list(consecutive(messages))
        outcomes: list[int | MQMeshError] = []

        def done(outcome: int | MQMeshError) -> None:
            outcomes.append(outcome)
            if len(outcomes) == len(groups):
                failed = [one for one in outcomes if isinstance(one, MQMeshError)]
                for error in failed:
                    _log.warning("dead letters of %s: %s", messages[0].message_queue, error)
                on_done(not failed)

        reason = reason_of(cause)
        for some in groups:
            queue, first = some[0].message_queue, some[0].queue_offset
            times = max(message.reconsume_times for message in some)
            back = SentBack(queue, first, len(some), reason, done, TO_DEAD_LETTERS, times)
            sender.send(back)

    return send
