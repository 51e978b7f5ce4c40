"""Hooks: users' code around each batch that is sent or consumed, for traces, metrics and audits.

A client is given hooks when it is made, and calls them in that order. Without any it does nothing
for them. A hook sees whole batches, so it costs little; it runs where the batch is at that time
(the client loop, a sender's thread, a worker's), and must not block. What it raises is logged, the
first time of each kind, and neither the batch nor any other hook suffers.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from mqmesh.errors import InvalidArgument, MQMeshError
from mqmesh.message import Message, MessageQueue, StoredMessage, describe, format_message_id
from mqmesh.message_checks import check_not_reserved, check_properties
from mqmesh.protocol.messaging import SendStatus

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
        queue: Where they go; None before a queue is chosen. After the send, where they are.
        began_ms: When ``before_send`` was called, ms since 1970.
        status: After the send: ``SEND_OK``, or what is still missing; None if it failed.
        queue_offset: Of the first message, -1 if it failed.
        message_ids: In order; none if it failed.
        error: Why it failed.
        state: For the hooks' own use, from before to after.
    """

    __slots__ = (
        "began_ms",
        "error",
        "group",
        "is_half",
        "message_ids",
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
        self.message_ids: list[str] = []
        self.error: MQMeshError | None = None
        self.state: dict[Any, Any] = {}

    @property
    def body_bytes(self) -> int:
        """Of all bodies together."""
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

    def succeeded(
        self, status: SendStatus, queue: MessageQueue, queue_offset: int, first_id: tuple[int, int]
    ) -> None:
        """The batch is stored; for the SDK.

        Args:
            status: How safely.
            queue: Where.
            queue_offset: Of its first message.
            first_id: Producer id and sequence of its first message.
        """
        producer_id, first = first_id
        last = first + len(self.messages)
        self.status, self.queue, self.queue_offset = status, queue, queue_offset
        self.message_ids = [format_message_id(producer_id, one) for one in range(first, last)]


class ConsumeContext:
    """Messages of one queue that are consumed together, as hooks see them.

    Attributes:
        group: Consumer group.
        topic: Topic that they were sent to.
        queue: Queue that they came from; that of a retry topic if they failed before.
        messages: What a listener gets in one call, or a poll returned of the queue.
        began_ms: When ``before_consume`` was called, ms since 1970.
        again: After it: they are not done and shall come again.
        error: What the listener raised.
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
        """Of all bodies together."""
        return sum(len(message.body) for message in self.messages)


class Hooks:
    """Called around each batch; inherit from it and write those methods that are of use."""

    def before_send(self, batch: SendContext) -> None:
        """A batch is about to be encoded: once, however often it is sent again."""

    def after_send(self, batch: SendContext) -> None:
        """A batch that ``before_send`` was told of has its outcome; ``send`` may have returned."""

    def before_consume(self, batch: ConsumeContext) -> None:
        """A listener is about to be called, or a poll about to return."""

    def after_consume(self, batch: ConsumeContext) -> None:
        """The listener returned or raised, or it is the next poll, or the consumer is closed."""


class HookCalls:
    """Calls the hooks of one client.

    Args:
        hooks: At least one.
        group: The client's.
    """

    def __init__(self, hooks: Sequence[Hooks], group: str) -> None:
        self._hooks = tuple(hooks)
        self._group = group
        self._told: set[tuple[Hooks, str]] = set()

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
            queue: Where they go, if that is known.
            now_ms: Wall clock.
            is_half: They are half messages.

        Returns:
            In its ``messages`` stands what is to be sent.
        """
        context = SendContext(self._group, messages, queue, is_half=is_half, began_ms=now_ms)
        for hook in self._hooks:
            self._call(hook, hook.before_send, context)
        return context

    def after_send(self, context: SendContext) -> None:
        """Calls ``after_send`` of all."""
        for hook in self._hooks:
            self._call(hook, hook.after_send, context)

    def before_consume(self, messages: Sequence[StoredMessage], now_ms: int) -> ConsumeContext:
        """Calls ``before_consume`` of all, for messages of one queue, by the wall clock."""
        context = ConsumeContext(self._group, messages, began_ms=now_ms)
        for hook in self._hooks:
            self._call(hook, hook.before_consume, context)
        return context

    def after_consume(self, context: ConsumeContext, cause: object) -> None:
        """Calls ``after_consume`` of all.

        Args:
            context: What ``before_consume`` made.
            cause: Why the messages come again, None if they are done.
        """
        context.again = cause is not None
        context.error = cause if isinstance(cause, BaseException) else None
        for hook in self._hooks:
            self._call(hook, hook.after_consume, context)

    def _call(self, hook: Hooks, method: Callable[[Any], None], context: object) -> None:
        try:
            method(context)
        except (Exception, SystemExit):
            # Neither may end the client loop or a worker, in which it may be called.
            key = hook, method.__name__
            if key not in self._told:
                self._told.add(key)
                name = f"{type(hook).__name__}.{method.__name__}"
                _log.exception("%s failed; its further errors are not told", name)


def make_hook_calls(hooks: Sequence[Hooks], group: str) -> HookCalls | None:
    """Who calls a client's hooks; None when it has none.

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
    return HookCalls(hooks, group) if hooks else None
