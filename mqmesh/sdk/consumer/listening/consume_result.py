"""Results of listeners, and their report to hooks."""

import enum
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

from mqmesh.errors import Reject
from mqmesh.failure_text import error_to_log, failure_text, one_line, text_of
from mqmesh.message import StoredMessage
from mqmesh.sdk.hooks import HookCalls


class ConsumeResult(enum.Enum):
    """Outcome of messages that a listener was given."""

    SUCCESS = "SUCCESS"
    """The messages are done and need not come again. Returning nothing means the same."""
    RECONSUME_LATER = "RECONSUME_LATER"
    """The messages shall come again after a while. Raising an exception means the same."""
    SUSPEND_CURRENT_QUEUE_A_MOMENT = RECONSUME_LATER
    """The same, by the name that RocketMQ has for it in ordered consumption."""


Listener = Callable[[list[StoredMessage]], ConsumeResult | None]
"""Consumes messages of one queue, in order; called from several threads at once."""

_SUCCESS: Final = ConsumeResult.SUCCESS

Cause = BaseException | ConsumeResult
"""Cause why messages come again: the listener's error, or ``RECONSUME_LATER``."""


class Ended(NamedTuple):
    """The answer for a call that ended its worker: the worker asks for no further call.

    Attributes:
        error: Error that ended it.
    """

    error: BaseException


def why_again(answer: object) -> Cause | None:
    """Return why messages come again after a call of their listener; None when they are done.

    Args:
        answer: Result or error of the listener, or ``Ended``.

    Returns:
        An exception, or ``RECONSUME_LATER``. Any other result means success, but for an awaitable:
        it is never awaited, so the work was not done.
    """
    if answer is None or answer is _SUCCESS:
        return None
    if answer is ConsumeResult.RECONSUME_LATER or isinstance(answer, BaseException):
        return answer
    if isinstance(answer, Ended):
        return answer.error
    if not inspect.isawaitable(answer):
        return None
    if inspect.iscoroutine(answer):
        answer.close()
    return TypeError(
        f"the listener returned {type(answer).__name__}, which nobody awaits; coroutine functions "
        "are for PushConsumer of mqmesh.aio"
    )


def log_failure(
    log: logging.Logger, level: int, what: str, cause: Cause, then: str, *, attempt: int
) -> None:
    """Log a failed call in one line of limited length, and at most one traceback.

    Args:
        log: Of the module that decides what comes next.
        level: Of the line.
        what: The messages and where they stand.
        cause: Why they come again.
        then: Next step.
        attempt: Number of failures before. A traceback follows the first failure only, for
            the same one may repeat for hours. A ``Reject``, or an error of ``dead_letter_on``, is
            an outcome that was chosen: its traceback is logged at DEBUG.
    """
    trace = error_to_log(cause) if isinstance(cause, BaseException) and not attempt else None
    if isinstance(cause, Reject):
        log.log(level, "%s was rejected: %s; %s", what, one_line(text_of(cause)), then)
        log.debug("%s was rejected here", what, exc_info=trace)
    elif isinstance(cause, BaseException):
        text = one_line(failure_text(cause))
        log.log(level, "%s failed with an exception: %s; %s", what, text, then, exc_info=trace)
    else:
        log.log(level, "%s is to come again later; %s", what, then)


def where_failed(messages: Sequence[StoredMessage]) -> str:
    """Return which messages a failed call was given, and where the first one stands."""
    first, others = messages[0], len(messages) - 1
    what = f"message {first.message_id}" + (f" and {others} more" if others else "")
    queue = f"{first.info.topic}:{first.broker_name}:{first.queue_id}"
    return f"{what} ({queue}, offset {first.queue_offset})"


def is_rejected(messages: Sequence[StoredMessage], cause: Cause) -> bool:
    """Return True when a failed call's only message shall be given up, and not tried again."""
    return isinstance(cause, Reject) and len(messages) == 1


def is_coroutine_function(listener: object) -> bool:
    """Return True for functions, methods and objects that return a coroutine when called."""
    call = getattr(type(listener), "__call__", None)  # noqa: B004 - which one, not whether
    return inspect.iscoroutinefunction(listener) or inspect.iscoroutinefunction(call)


def hooked(
    listener: Callable[[list[StoredMessage]], object], hooks: HookCalls, wall_ms: Callable[[], int]
) -> Callable[[list[StoredMessage]], object]:
    """Return a listener around whose calls hooks are called.

    Args:
        listener: The user's.
        hooks: The consumer's.
        wall_ms: The time, ms since 1970.
    """

    def call(messages: list[StoredMessage]) -> object:
        context = hooks.before_consume(messages, wall_ms())
        try:
            result = listener(messages)
        except BaseException as error:
            hooks.after_consume(context, error)
            raise
        hooks.after_consume(context, why_again(result))
        return result

    return call


def hooked_coroutine(
    listener: Callable[[list[StoredMessage]], Awaitable[Any]],
    hooks: HookCalls,
    wall_ms: Callable[[], int],
) -> Callable[[list[StoredMessage]], Awaitable[Any]]:
    """Return the same for what returns a coroutine, a cancelled one included."""

    async def call(messages: list[StoredMessage]) -> object:
        context = hooks.before_consume(messages, wall_ms())
        try:
            result = await listener(messages)
        except BaseException as error:
            hooks.after_consume(context, error)
            raise
        hooks.after_consume(context, why_again(result))
        return result

    return call
