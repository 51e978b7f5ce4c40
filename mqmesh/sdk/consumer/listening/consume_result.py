"""What a listener answers, and how hooks hear of it."""

import enum
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

from mqmesh.errors import Reject
from mqmesh.message import StoredMessage
from mqmesh.sdk.hooks import HookCalls


class ConsumeResult(enum.Enum):
    """What became of messages that a listener was given."""

    SUCCESS = "SUCCESS"
    """They are done and need not come again. Returning nothing means the same."""
    RECONSUME_LATER = "RECONSUME_LATER"
    """They shall come again after a while. Raising an exception means the same."""
    SUSPEND_CURRENT_QUEUE_A_MOMENT = RECONSUME_LATER
    """The same, by the name that RocketMQ has for it in ordered consumption."""


Listener = Callable[[list[StoredMessage]], ConsumeResult | None]
"""Consumes messages of one queue, in order; called from several threads at once."""

_SUCCESS: Final = ConsumeResult.SUCCESS

Cause = BaseException | ConsumeResult
"""Why messages come again: what the listener raised, or ``RECONSUME_LATER``."""


class Ended(NamedTuple):
    """The answer for a call that ended its worker: the worker asks for no further call.

    Attributes:
        error: What ended it.
    """

    error: BaseException


def why_again(answer: object) -> Cause | None:
    """Why messages come again after a call of their listener; None when they are done.

    Args:
        answer: What the listener returned, or raised, or ``Ended``.

    Returns:
        An exception, or ``RECONSUME_LATER``. Whatever else was returned means success, but for a
        coroutine: nobody awaits it, so nothing of the work was done.
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


def told_of(cause: Cause) -> str:
    """What the log says of a failed call; the reason of a ``Reject`` in one line."""
    if isinstance(cause, Reject):
        return f"was rejected: {' '.join(str(cause).split())}"
    if isinstance(cause, BaseException):
        return "failed with an exception"
    return "is to come again later"


def trace_of(cause: Cause, attempt: int) -> BaseException | None:
    """The error whose traceback the log shows; None for none.

    Args:
        cause: Why the messages come again.
        attempt: How often they have failed before: one trace is enough, for the same failure may
            repeat for hours.
    """
    if attempt or not isinstance(cause, BaseException):
        return None
    # A Reject is an outcome that was chosen. What it was raised from may be news.
    return cause.__cause__ if isinstance(cause, Reject) else cause


def is_rejected(messages: Sequence[StoredMessage], cause: Cause) -> bool:
    """True when a failed call shall not be tried again, but its only message given up."""
    return isinstance(cause, Reject) and len(messages) == 1


def is_coroutine_function(listener: object) -> bool:
    """True for what returns a coroutine when it is called: functions, methods, and objects."""
    call = getattr(type(listener), "__call__", None)  # noqa: B004 - which one, not whether
    return inspect.iscoroutinefunction(listener) or inspect.iscoroutinefunction(call)


def hooked(
    listener: Callable[[list[StoredMessage]], object], hooks: HookCalls, wall_ms: Callable[[], int]
) -> Callable[[list[StoredMessage]], object]:
    """A listener around whose calls hooks are called.

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
    """The same for what returns a coroutine, a cancelled one included."""

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
