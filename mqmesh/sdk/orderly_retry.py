"""What becomes of messages that were not consumed, where messages are consumed in order.

Nothing is passed over: a failure keeps its queue waiting. Only with ``max_reconsume_times``
a message that failed too often becomes a dead letter.
"""

import logging
from collections.abc import Callable

from mqmesh.errors import CorruptBatch, MQMeshError
from mqmesh.message import MessageQueue, StoredMessage
from mqmesh.protocol.retries import TO_DEAD_LETTERS
from mqmesh.sdk.back_sender import BackSender, SentBack
from mqmesh.sdk.consume_service import Portion
from mqmesh.sdk.group_retry import Retry, consecutive, reason_of
from mqmesh.sdk.orderly_service import ToDeadLetters
from mqmesh.sdk.process_queue import Span

_log = logging.getLogger(__name__)


class OrderlyRetry(Retry):
    """Reports what keeps a queue waiting; failed calls are the service's own affair.

    Args:
        sender: Sends dead letters.

    Attributes:
        failures: Always 0: the service counts them.
    """

    def __init__(self, sender: BackSender) -> None:
        self.failures = 0
        self._sender = sender

    def on_failed(
        self, portion: Portion, messages: list[StoredMessage], cause: BaseException | object
    ) -> None:
        raise AssertionError("what fails in order is not taken out of it")

    def on_undecodable(
        self, queue: MessageQueue, first: int, end: int, span: Span, error: CorruptBatch
    ) -> None:
        _log.error(
            "%s waits at offset %d: messages %d to %d cannot be decoded, and in order nothing is "
            "passed over; move the group's offset to %d to go on without them: %s",
            queue,
            first,
            first,
            end - 1,
            end,
            error,
        )

    def on_overdue(self, queue: MessageQueue, offset: int, span: Span, late_ms: int) -> None:
        _log.warning(
            "%s: the message at offset %d is not done after %d ms (consume_timeout_ms)",
            queue,
            offset,
            late_ms,
        )

    def wait(self, timeout_s: float) -> bool:
        return self._sender.wait(timeout_s)


def to_dead_letters(sender: BackSender) -> ToDeadLetters:
    """How messages that failed too often in order become dead letters.

    Args:
        sender: Sends them.
    """

    def send(
        messages: list[StoredMessage],
        cause: BaseException | object,
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
