"""Subscriptions: functions that handle topics for groups, and their arguments."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from mqmesh.errors import InvalidArgument, Reject
from mqmesh.failure_text import text_of
from mqmesh.message import StoredMessage, check_consumer_group, check_topic
from mqmesh.protocol.delivery import DeliveryMode
from mqmesh.protocol.membership import MessageModel
from mqmesh.sdk.app.bodies import Codec, Decode, decoder_of
from mqmesh.sdk.client.options import make_options
from mqmesh.sdk.consumer.consumer_options import (
    PushConsumerKeywords,
    PushConsumerOptions,
)
from mqmesh.sdk.consumer.fetching.message_selector import Wanted, as_selector
from mqmesh.sdk.consumer.listening.consume_result import is_coroutine_function

Errors = tuple[type[Exception], ...]


class TypedHandler:
    """A user's function, called with the arguments that its parameters name.

    Args:
        function: Has one parameter, annotated with the type of the body, and may have a second
            one for the ``StoredMessage``.
        dead_letter_on: Errors that no retry will mend.
        codec: Form of the bodies; None for JSON, bytes and text.

    Raises:
        InvalidArgument: The parameters are others, or values of their type cannot be decoded.
    """

    def __init__(
        self, function: Callable[..., Any], dead_letter_on: Errors, codec: Codec | None = None
    ) -> None:
        self.function = function
        self.is_coroutine = is_coroutine_function(function)
        self._dead_letter_on = dead_letter_on
        self._decode, self._wants_message = _parameters_of(function, codec)

    def listen(self, messages: list[StoredMessage]) -> Any:
        """Call the function with one message, as the listener of a ``PushConsumer``."""
        (message,) = messages
        try:
            return self.function(*self._arguments(message))
        except self._dead_letter_on as error:
            raise _rejected(error) from error

    async def listen_async(self, messages: list[StoredMessage]) -> Any:
        """Await the function's handling of one message, for ``mqmesh.aio``."""
        (message,) = messages
        try:
            called: Awaitable[Any] = self.function(*self._arguments(message))
            return await called
        except self._dead_letter_on as error:
            raise _rejected(error) from error

    def _arguments(self, message: StoredMessage) -> list[Any]:
        value = self._decode(message)
        return [value, message] if self._wants_message else [value]


class TypedSubscription(msgspec.Struct, frozen=True):
    """A function that handles a topic for a group.

    Attributes:
        topic: Topic.
        group: Consumer group.
        expression: Filter of its messages.
        listener: Calls the function.
        options: Of the group's consumer.
        batch: The function gets lists.
        bind: Returns the listener in place of ``listener``, given the group's consumer.
        outputs: Topics of output messages, which are stored with the progress.
    """

    topic: str
    group: str
    expression: Wanted
    listener: Callable[[list[StoredMessage]], Any]
    options: PushConsumerKeywords
    batch: bool = False
    bind: Callable[[Any], Callable[[list[StoredMessage]], Any]] | None = None
    outputs: Sequence[str] = ()

    def listener_of(self, consumer: object) -> Callable[[list[StoredMessage]], Any]:
        """Return the listener for the group's consumer."""
        return self.listener if self.bind is None else self.bind(consumer)


class Subscriptions:
    """The subscriptions of an application; a group has one consumer for all of its topics."""

    def __init__(self) -> None:
        self._groups: dict[str, list[TypedSubscription]] = {}

    def add(self, subscription: TypedSubscription) -> None:
        """Takes a subscription.

        Raises:
            InvalidArgument: A name or an option is out of bounds, the group has a handler of this
                topic already, or its options are others.
        """
        group, topic = check_consumer_group(subscription.group), check_topic(subscription.topic)
        as_selector(subscription.expression)
        check_options(subscription.options, batch=subscription.batch)
        others = self._groups.setdefault(group, [])
        for other in others:
            if other.topic == topic:
                raise InvalidArgument(f"group {group!r} has two handlers of topic {topic!r}")
            if other.options != subscription.options:
                raise InvalidArgument(
                    f"group {group!r} has one consumer for all its topics, and so one set of "
                    f"options: {other.options} for {other.topic!r}, {subscription.options} for "
                    f"{topic!r}"
                )
        others.append(subscription)

    def remove(self, group: str, topic: str) -> None:
        """Takes a subscription away, if it is there."""
        left = [one for one in self._groups.pop(group, []) if one.topic != topic]
        if left:
            self._groups[group] = left

    def by_group(self) -> dict[str, list[TypedSubscription]]:
        """Return all subscriptions by group; those of a group have the same options."""
        return self._groups


def in_order(options: PushConsumerKeywords) -> PushConsumerKeywords:
    """Return the options of a consumer whose progress is stored with output messages.

    Members that share queues consume them in order, so that the progress is that of one call.

    Raises:
        InvalidArgument: They are not to, or each reads all queues.
    """
    if options.get("delivery", DeliveryMode.QUEUE) != DeliveryMode.QUEUE:
        return options
    for name, other in (("consume_orderly", False), ("message_model", MessageModel.BROADCASTING)):
        if options.get(name) == other:
            raise InvalidArgument(
                f"exactly_once has members share queues and consume them in order, or one by one "
                f"(delivery); not with {name} = {other}"
            )
    return {"consume_orderly": True, **options}


def check_options(options: PushConsumerKeywords, *, batch: bool) -> None:
    """Checks the options of a group's consumer.

    Args:
        options: By name.
        batch: The function gets lists.

    Raises:
        InvalidArgument: One is unknown or out of bounds, or wants lists without ``batch``.
    """
    made = make_options(PushConsumerOptions, dict(options), "consumer option")
    if made.consume_message_batch_max_size != 1 and not batch:
        raise InvalidArgument(
            "consume_message_batch_max_size must be 1 here: a handler gets one message; for "
            "more there is PushConsumer, and for FastStream batch=True"
        )


def _parameters_of(function: Callable[..., Any], codec: Codec | None) -> tuple[Decode, bool]:
    name = getattr(function, "__qualname__", repr(function))
    try:
        parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    except (NameError, TypeError, ValueError) as error:
        raise InvalidArgument(f"the parameters of {name} are not known: {error}") from error
    kinds = [parameter.annotation for parameter in parameters]
    if not 1 <= len(kinds) <= 2 or kinds[1:] not in ([], [StoredMessage]):
        raise InvalidArgument(
            f"{name} must have one parameter for the body, and may have a second one for the "
            "message: def handle(order: Order, message: StoredMessage)"
        )
    if kinds[0] is inspect.Parameter.empty:
        raise InvalidArgument(
            f"parameter {parameters[0].name!r} of {name} needs an annotation: bytes, str, or the "
            "type that its body is decoded into"
        )
    return decoder_of(kinds[0], codec), len(kinds) == 2


def _rejected(error: Exception) -> Reject:
    if isinstance(error, Reject):
        return error
    return Reject(f"{type(error).__name__}: {text_of(error)}")
