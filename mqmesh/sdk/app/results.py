"""Results of handlers as messages: values that functions return are sent."""

import inspect
import types
from collections.abc import Callable
from typing import Any, Union, cast, get_args, get_origin

from mqmesh.errors import InvalidArgument
from mqmesh.message import Message, check_topic
from mqmesh.sdk.app.bodies import Codec
from mqmesh.sdk.app.message_maker import MessageMaker

OPTIONAL = (Union, types.UnionType)


class ResultMaker:
    """Maker of messages from the results of a handler.

    Args:
        topic: Topic.
        function: The handler. The annotation of its result is the type of a body, ``Message`` for
            messages with a tag, keys or a sharding key, or a list of one of these; None sends
            nothing.
        codec: Form of the bodies; None for JSON, bytes and text.

    Raises:
        InvalidArgument: The topic's name is illegal, or the annotation is missing or none of these.
    """

    def __init__(
        self, topic: str, function: Callable[..., Any], codec: Codec | None = None
    ) -> None:
        self.topic = check_topic(topic)
        kind, self._is_list = _kind_of(function)
        self._maker = None if kind is Message else MessageMaker[Any](topic, kind, codec)

    def messages(self, result: object) -> list[Message]:
        """Return the messages of a result.

        Raises:
            InvalidArgument: It is not what the annotation says, or a message of another topic.
        """
        if result is None:
            return []
        values = cast("list[Any]", result) if self._is_list else [result]
        return [self._message(value) for value in values]

    def _message(self, value: object) -> Message:
        if self._maker is not None:
            return self._maker.message(value)
        if not isinstance(value, Message) or value.topic != self.topic:
            raise InvalidArgument(f"{value!r:.100} is no message of topic {self.topic!r}")
        return value


def _kind_of(function: Callable[..., Any]) -> tuple[Any, bool]:
    """Return the type of a function's results, and whether it returns a list of them."""
    name = getattr(function, "__qualname__", repr(function))
    try:
        found = inspect.signature(function, eval_str=True).return_annotation
    except (NameError, TypeError, ValueError) as error:
        raise InvalidArgument(f"the result of {name} is not known: {error}") from error
    if get_origin(found) in OPTIONAL:
        others = [one for one in get_args(found) if one is not type(None)]
        found = others[0] if len(others) == 1 else found
    is_list = get_origin(found) is list
    if is_list:
        (found,) = get_args(found)
    if found in (None, inspect.Signature.empty):
        raise InvalidArgument(f"{name} needs an annotation of its result, which is to be sent")
    return found, is_list
