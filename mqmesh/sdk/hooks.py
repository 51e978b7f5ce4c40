"""Hooks: users' code around each batch that is sent or consumed, for traces, metrics and audits.

A client is given hooks when it is made, and calls them in that order. Without any it does nothing
for them. A hook sees whole batches, so it costs little; it runs where the batch is at that time
(the client loop, a sender's thread, a worker's), and must not block. Its errors are counted, and
logged the first time of each kind; they affect neither the batch nor other hooks.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from mqmesh.errors import InvalidArgument, MQMeshError
from mqmesh.failure_text import error_to_log
from mqmesh.message import Message, MessageQueue, StoredMessage, describe, format_message_id
from mqmesh.message_checks import check_not_reserved, check_properties
from mqmesh.metrics import Measured, counter
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.transactions import Decision

MAX_HOOKS: Final = 64
"""Hooks of one client."""

_log = logging.getLogger(__name__)


class SendContext:
    """A batch that is sent, as hooks see it.

    Attributes:
        group: Producer group.
        topic: Topic.
        messages: As they are sent; read them, and add to them by ``add_properties``.
        is_half: They are half messages of transactions.
        queue: Queue they go to; None before one is chosen. After the send, their queue.
        began_ms: When ``before_send`` was called, ms since 1970.
        status: After the send: ``SEND_OK``, or the missing safety; None if it failed.
        queue_offset: Of the first message, -1 if it failed.
        commitlog_offset: Start of the batch in the broker's log, -1 if it failed.
        first_id: Producer id and sequence of the first message, (0, -1) if it failed.
        error: Why it failed.
        state: For the hooks' own use, from before to after.
    """

    __slots__ = (
        "began_ms",
        "commitlog_offset",
        "error",
        "first_id",
        "group",
        "is_half",
        "messages",
        "queue",
        "queue_offset",
        "state",
        "status",
        "topic",
    )

    def __init__(
        self,
        group: str,
        messages: Sequence[Message],
        queue: MessageQueue | None,
        *,
        is_half: bool,
        began_ms: int,
    ) -> None:
        self.group = group
        self.topic = messages[0].topic
        self.messages = list(messages)
        self.is_half = is_half
        self.queue = queue
        self.began_ms = began_ms
        self.status: SendStatus | None = None
        self.queue_offset = -1
        self.commitlog_offset = -1
        self.first_id = (0, -1)
        self.error: MQMeshError | None = None
        self.state: dict[Any, Any] = {}

    @property
    def message_ids(self) -> list[str]:
        """Ids of the messages, in order; none if it failed."""
        producer_id, first = self.first_id
        if first < 0:
            return []
        last = first + len(self.messages)
        return [format_message_id(producer_id, one) for one in range(first, last)]

    @property
    def body_bytes(self) -> int:
        """Size of all bodies together, in bytes."""
        return sum(len(message.body) for message in self.messages)

    def add_properties(self, properties: Mapping[str, str], index: int | None = None) -> None:
        """Adds properties to messages, within ``before_send``; the sender's objects do not change.

        Args:
            properties: Names and values; they replace those of the same name.
            index: Position of the one message that gets them; all do by default.

        Raises:
            InvalidArgument: A name is reserved, or there would be too many; nothing was added.
        """
        check_not_reserved(properties)
        chosen = range(len(self.messages)) if index is None else (index,)
        changed = []
        for place in chosen:
            message = self.messages[place]
            more = {**(message.properties or {}), **properties}
            check_properties(more)
            changed.append(msgspec.structs.replace(message, properties=more))
        for place, message in zip(chosen, changed, strict=True):
            self.messages[place] = message


class ConsumeContext:
    """Messages of one queue that are consumed together, as hooks see them.

    Attributes:
        group: Consumer group.
        topic: Topic that they were sent to.
        queue: Queue that they came from; that of a retry topic if they failed before.
        messages: Messages of one call of a listener, or of a poll and a queue.
        began_ms: When ``before_consume`` was called, ms since 1970.
        again: After it: they are not done and shall come again.
        error: Error of the listener.
        state: For the hooks' own use, from before to after.
    """

    __slots__ = ("again", "began_ms", "error", "group", "messages", "queue", "state", "topic")

    def __init__(self, group: str, messages: Sequence[StoredMessage], *, began_ms: int) -> None:
        self.group = group
        self.topic = messages[0].topic
        self.queue = messages[0].message_queue
        self.messages = tuple(messages)
        self.began_ms = began_ms
        self.again = False
        self.error: BaseException | None = None
        self.state: dict[Any, Any] = {}

    @property
    def body_bytes(self) -> int:
        """Size of all bodies together, in bytes."""
        return sum(len(message.body) for message in self.messages)


class TransactionContext:
    """The end of a transaction, as hooks see it.

    Attributes:
        group: Producer group.
        message: The message, with its id.
        decision: Commit or rollback.
        from_check: The decision answers a check of the broker.
        began_ms: Time when the decision went to the broker, ms since 1970.
        error: Why it does not have the decision; None if it has.
    """

    __slots__ = ("began_ms", "decision", "error", "from_check", "group", "message")

    def __init__(
        self,
        group: str,
        message: StoredMessage,
        decision: Decision,
        *,
        from_check: bool,
        began_ms: int,
    ) -> None:
        self.group = group
        self.message = message
        self.decision = decision
        self.from_check = from_check
        self.began_ms = began_ms
        self.error: MQMeshError | None = None


class Hooks:
    """Called around each batch; inherit from it and write those methods that are of use."""

    def before_send(self, batch: SendContext) -> None:
        """Called before a batch is encoded: once, however often it is sent again."""

    def after_send(self, batch: SendContext) -> None:
        """Called when a batch of ``before_send`` has its outcome; ``send`` may have returned."""

    def before_consume(self, batch: ConsumeContext) -> None:
        """Called before a listener is called, or a poll returns."""

    def after_consume(self, batch: ConsumeContext) -> None:
        """Called when the listener ended, at the next poll, or when the consumer is closed."""

    def after_transaction(self, transaction: TransactionContext) -> None:
        """Called when a broker has answered, or failed to answer, a transaction's decision."""


class HookCalls:
    """Calls the hooks of one client.

    Args:
        hooks: At least one.
        group: The client's.

    Attributes:
        sees_before_send: Some hook has a ``before_send``, so may change messages.
        sees_sends: Some hook has that, or an ``after_send``.
        failures: Errors that hooks raised.
    """

    def __init__(self, hooks: Sequence[Hooks], group: str) -> None:
        self._group = group
        self._logged: set[Callable[[Any], None]] = set()
        self.failures = 0
        # Those that do something; a method may also have been put on the object.
        self._before_send = _written(hooks, "before_send")
        self._after_send = _written(hooks, "after_send")
        self._before_consume = _written(hooks, "before_consume")
        self._after_consume = _written(hooks, "after_consume")
        self._after_transaction = _written(hooks, "after_transaction")
        self.sees_before_send = bool(self._before_send)
        self.sees_sends = bool(self._before_send or self._after_send)

    def before_send(
        self,
        messages: Sequence[Message],
        queue: MessageQueue | None,
        now_ms: int,
        *,
        is_half: bool = False,
    ) -> SendContext:
        """Calls ``before_send`` of all.

        Args:
            messages: Checked, at least one.
            queue: Queue they go to, if known.
            now_ms: Wall clock.
            is_half: They are half messages.

        Returns:
            Context whose ``messages`` are to be sent.
        """
        context = SendContext(self._group, messages, queue, is_half=is_half, began_ms=now_ms)
        for method in self._before_send:
            self._call(method, context)
        return context

    def after_send(self, context: SendContext) -> None:
        """Calls ``after_send`` of all."""
        for method in self._after_send:
            self._call(method, context)

    def before_consume(self, messages: Sequence[StoredMessage], now_ms: int) -> ConsumeContext:
        """Calls ``before_consume`` of all, for messages of one queue, by the wall clock."""
        context = ConsumeContext(self._group, messages, began_ms=now_ms)
        for method in self._before_consume:
            self._call(method, context)
        return context

    def after_consume(self, context: ConsumeContext, cause: object) -> None:
        """Calls ``after_consume`` of all.

        Args:
            context: Context of ``before_consume``.
            cause: Why the messages come again, None if they are done.
        """
        context.again = cause is not None
        context.error = cause if isinstance(cause, BaseException) else None
        for method in self._after_consume:
            self._call(method, context)

    def ending(
        self, message: StoredMessage, decision: Decision, now_ms: int, *, from_check: bool = False
    ) -> TransactionContext:
        """Return the context of a transaction's end for hooks, by the wall clock."""
        return TransactionContext(
            self._group, message, decision, from_check=from_check, began_ms=now_ms
        )

    def after_transaction(self, context: TransactionContext, outcome: object) -> None:
        """Calls ``after_transaction`` of all.

        Args:
            context: Context of ``ending``.
            outcome: Outcome: an error, or anything else.
        """
        context.error = outcome if isinstance(outcome, MQMeshError) else None
        for method in self._after_transaction:
            self._call(method, context)

    def _call(self, method: Callable[[Any], None], context: object) -> None:
        try:
            method(context)
        except KeyboardInterrupt:
            raise
        except BaseException:
            # None may end the client loop or a worker, in which it may be called.
            self.failures += 1
            if method not in self._logged:
                self._logged.add(method)
                name = ".".join(method.__qualname__.split(".")[-2:])
                error = error_to_log()
                _log.error("%s failed; its further errors are not logged", name, exc_info=error)


def _written(hooks: Sequence[Hooks], name: str) -> list[Callable[[Any], None]]:
    """Return the methods of a name that are not those of ``Hooks``, which do nothing."""
    empty = getattr(Hooks, name)
    found = [getattr(hook, name) for hook in hooks]
    return [one for one in found if getattr(one, "__func__", None) is not empty]


def make_hook_calls(
    hooks: Sequence[Hooks], group: str, own: Sequence[Hooks] = ()
) -> HookCalls | None:
    """Return the calls of a client's hooks; None when it has none.

    Args:
        hooks: The user's.
        group: The client's.
        own: The SDK's, which come last.

    Raises:
        InvalidArgument: They are no hooks, or too many.
    """
    if isinstance(hooks, str | bytes) or not isinstance(hooks, Sequence):
        raise InvalidArgument(f"hooks must be a list of Hooks, not {describe(hooks)}")
    for hook in hooks:
        if not isinstance(hook, Hooks):
            raise InvalidArgument(f"a hook must be an object of class Hooks, not {describe(hook)}")
    if len(hooks) > MAX_HOOKS:
        raise InvalidArgument(f"{len(hooks)} hooks are too many (limit {MAX_HOOKS})")
    return HookCalls([*hooks, *own], group) if hooks or own else None


HOOK_METRICS: Final[tuple[Measured[HookCalls], ...]] = (
    counter("hook_failures_total", "errors that hooks raised", lambda calls: calls.failures),
)
