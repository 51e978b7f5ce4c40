"""Messages as FastStream sees them, and their handlers' decisions.

FastStream's own facts about a message are properties of it, which filters can use:

=================  =======================================================
``content_type``   how the body is encoded: FastStream's ``application/json``
``correlation_id`` the same from a message to those that are sent because of it
``reply_to``       a topic that waits for the result of the handler
=================  =======================================================
"""

import traceback
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Final

from faststream.exceptions import FeatureNotSupportedException
from faststream.message import AckStatus, StreamMessage, decode_message

from mqmesh.errors import Reject
from mqmesh.failure_text import text_of
from mqmesh.message import PROPERTY_REPLY_TO_CLIENT, RESERVED_PROPERTIES, Message, StoredMessage
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.producer.replies import is_request

CONTENT_TYPE: Final = "content_type"
CORRELATION_ID: Final = "correlation_id"
REPLY_TO: Final = "reply_to"

_NO_HEADERS: Final = RESERVED_PROPERTIES | {CONTENT_TYPE, CORRELATION_ID, REPLY_TO}

dead_letter_on: Final[ContextVar[tuple[type[Exception], ...]]] = ContextVar(
    "dead_letter_on", default=()
)
"""Errors of which the handler at work makes dead letters at once."""


class Delivery:
    """Delivery to a handler by way of a subscriber: FastStream's raw message.

    Args:
        messages: As they were received: one, or with ``batch=True`` a list's, of one queue and in
            order. Of a reply a plain ``Message``.
        is_requested: The subscriber has no function; see ``MQMeshSubscriber.get_one``.
        on_ack: Awaited when it is acknowledged: commits it.

    Attributes:
        decision: Decision of the handler; None for none.
        error: Error of the handler.
    """

    __slots__ = ("decision", "error", "is_requested", "messages", "on_ack")

    def __init__(
        self,
        *messages: Message,
        is_requested: bool = False,
        on_ack: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.messages = messages
        self.on_ack = on_ack
        self.is_requested = is_requested
        self.decision: AckStatus | None = None
        self.error: BaseException | None = None

    @property
    def message(self) -> Message:
        """The message; the first one of a list."""
        return self.messages[0]

    def result(self) -> ConsumeResult:
        """Return the result for the consumer; of a list it holds for all.

        Raises:
            Reject: The message shall be a dead letter. A list comes again message by message, and
                then it is known which of them is meant.
            BaseException: Error of the handler; the message comes again.
        """
        if self.decision is AckStatus.ACKED:
            return ConsumeResult.SUCCESS
        error = self.error
        if self.decision is AckStatus.REJECTED and not isinstance(error, Reject):
            reason = "the handler rejected the message" if error is None else _description(error)
            raise Reject(reason) from (None if is_of_body(error) else error)
        if error is not None:
            raise error
        return ConsumeResult.RECONSUME_LATER


class MQMeshMessage(StreamMessage[Delivery]):
    """A message in a handler: ``message: Annotated[MQMeshMessage, Context("message")]``."""

    @property
    def stored(self) -> StoredMessage:
        """The message as consumers of mqmesh get it: tag, keys, queue, offset and all.

        Of a list it is the first one; all are ``raw_message.messages``.

        Raises:
            TypeError: It is a reply, which is not stored.
        """
        message = self.raw_message.message
        if not isinstance(message, StoredMessage):
            raise TypeError("a reply is not stored")
        return message

    async def ack(self) -> None:
        """Acknowledge the message: it is done.

        A message of ``get_one`` or an iteration with ``auto_commit=False`` is committed, with all
        before it in its queue.

        Raises:
            MQMeshError: It could not be committed.
        """
        await super().ack()
        self.raw_message.decision = self.committed
        if self.raw_message.on_ack is not None:
            await self.raw_message.on_ack()

    async def nack(self) -> None:
        """Have the message come again later; with ``consume_orderly`` its queue waits for it.

        Raises:
            FeatureNotSupportedException: It came from ``get_one`` or an iteration.
        """
        self._check_sent_back()
        await super().nack()
        self.raw_message.decision = self.committed

    async def reject(self) -> None:
        """Make the message a dead letter at once.

        Raises:
            FeatureNotSupportedException: It came from ``get_one`` or an iteration.
        """
        self._check_sent_back()
        await super().reject()
        self.raw_message.decision = self.committed

    def _check_sent_back(self) -> None:
        if self.raw_message.is_requested:
            raise FeatureNotSupportedException(
                "a message that get_one or an iteration gave cannot be sent back: retries and dead "
                "letters are for subscribers that have a function"
            )


async def parse(delivery: Delivery) -> MQMeshMessage:
    """FastStream's view of a message."""
    message = delivery.message
    properties = message.properties or {}
    waits = properties.get(PROPERTY_REPLY_TO_CLIENT, "") if is_request(message) else ""
    return MQMeshMessage(
        raw_message=delivery,
        body=bytes(message.body),
        headers={name: text for name, text in properties.items() if name not in _NO_HEADERS},
        reply_to=waits or properties.get(REPLY_TO, ""),
        content_type=properties.get(CONTENT_TYPE),
        correlation_id=properties.get(CORRELATION_ID),
        message_id=message.message_id if isinstance(message, StoredMessage) else None,
    )


async def parse_batch(delivery: Delivery) -> MQMeshMessage:
    """FastStream's view of a list of messages: facts of the first one, bodies and headers of all.

    A list has no ``reply_to``: its result could answer several requests.
    """
    parts = [await parse(Delivery(one)) for one in delivery.messages]
    first = parts[0]
    return MQMeshMessage(
        raw_message=delivery,
        body=[one.body for one in parts],
        headers=first.headers,
        batch_headers=[{**one.headers, CORRELATION_ID: one.correlation_id} for one in parts],
        correlation_id=first.correlation_id,
        message_id=first.message_id,
    )


async def decode(message: StreamMessage[Any]) -> Any:
    """Return the value of a body.

    Raises:
        Reject: It is not what its ``content_type`` says: no retry mends it.
    """
    try:
        return decode_message(message)
    except ValueError as error:  # JSON's and Unicode's errors are such
        raise Reject(f"the body is no {message.content_type}: {error}") from None


# FastStream asks for this name, to know that a codec is to decode lists.
async def decode_batch(message: StreamMessage[Any]) -> list[Any]:
    """Return the values of a list's bodies.

    Raises:
        Reject: One of them is not what its ``content_type`` says.
    """
    return [await decode(await parse(Delivery(one))) for one in message.raw_message.messages]


def is_of_body(error: BaseException | None) -> bool:
    """Return True if an error means that values do not fit the function's parameter types.

    FastDepends checks that by pydantic or msgspec. An error of a handler's own validation, such as
    one of another service's answer, is not of this kind: a retry may succeed.
    """
    if not isinstance(error, ValueError):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [frame.f_globals.get("__name__", "").partition(".")[0] for frame in frames]
    callers = [module for module in modules if module != "pydantic"]
    return callers[-1:] == ["fast_depends"]


def _description(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error)}"
