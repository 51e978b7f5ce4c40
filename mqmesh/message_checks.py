"""Checks of messages to send: a message that passes can be encoded, stored and decoded."""

import enum
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Final

from mqmesh.errors import InvalidArgument
from mqmesh.message import (
    MAX_FLAG,
    MAX_KEY_LENGTH,
    MAX_KEYS,
    MAX_PROPERTIES_BYTES,
    MAX_SHARDING_KEY_LENGTH,
    MAX_TAG_LENGTH,
    NO_KEYS,
    RESERVED_PROPERTIES,
    Message,
    StoredMessage,
    SystemMessage,
    as_plain,
    check_number,
    check_topic,
    describe,
    is_closed_topic,
    without_reserved,
)
from mqmesh.units import MAX_TIMESTAMP_MS

_ZERO: Final = 0
_SEQUENCES: Final = (list, tuple, Sequence)


class Extras(enum.Enum):
    """Content of messages beside topic and body; without it, checks can be left out."""

    NONE = enum.auto()
    KEYS = enum.auto()
    ANY = enum.auto()


def check_messages(
    messages: Sequence[Message], *, max_message_size: int, allow_system: bool = False
) -> list[Message]:
    """Checks messages before they are sent; those that pass can be encoded, stored and decoded.

    A message with nothing but topic and body costs 0.1 µs. The messages must not be changed
    between this check and their sending.

    Args:
        messages: Messages of one topic, at least one.
        max_message_size: Largest body in bytes, the setting of that name.
        allow_system: Accept retry, dead-letter and other reserved topics.

    Returns:
        The messages in order, those of a subclass (``StoredMessage``) as plain ``Message`` without
        reserved properties, and with a body that cannot change any more.

    Raises:
        InvalidArgument: Names the field, its value, its limit, and the setting if there is one.
    """
    return check_messages_of_batch(
        messages, max_message_size=max_message_size, allow_system=allow_system
    )[0]


def check_messages_of_batch(
    messages: Sequence[Message], *, max_message_size: int, allow_system: bool = False
) -> tuple[list[Message], Extras]:
    """Check as ``check_messages``; also return what the messages have beside topic and body."""
    if not isinstance(messages, _SEQUENCES) or not messages:
        raise InvalidArgument("messages must be a sequence of at least one Message")
    if not isinstance(messages[0], Message):
        raise InvalidArgument(f"messages must be of class Message, not {describe(messages[0])}")
    topic = messages[0].topic
    if type(topic) is not str:
        raise InvalidArgument(f"topic must be a str, not {describe(topic)}")
    _check_sendable_topic(topic, allow_system)
    # One pass without a call per message. Defaults are recognized by identity, since 0 == False.
    empty, zero = NO_KEYS, _ZERO
    unusual = [
        m
        for m in messages
        if type(m) is not Message
        or type(m.body) is not bytes
        or not 0 < len(m.body) <= max_message_size
        or (m.topic is not topic and (type(m.topic) is not str or m.topic != topic))
        or m.tag is not None
        or m.properties is not None
        or m.sharding_key is not None
        or m.flag is not zero
        or m.delay_level is not zero
        or m.deliver_at_ms is not zero
    ]
    if not unusual:
        keyed = [m.keys for m in messages if m.keys is not empty]
        if not keyed:
            return list(messages), Extras.NONE
        if _are_plain_keys(keyed):
            return list(messages), Extras.KEYS
    checked = list(messages)
    for position, message in enumerate(messages):
        try:
            checked[position] = _check_message(message, topic, max_message_size)
        except InvalidArgument as error:
            if len(messages) == 1:
                raise
            raise InvalidArgument(f"message {position} of {len(messages)}: {error}") from None
    return checked, Extras.ANY


def is_plain(message: Message, max_message_size: int) -> bool:
    """Return True for a message that is surely legal but for its topic's name; the fast check.

    Args:
        message: Anything; only a message of nothing but topic and body passes.
        max_message_size: Largest body in bytes.
    """
    return (
        type(message) is Message
        and type(message.topic) is str
        and type(message.body) is bytes
        and 0 < len(message.body) <= max_message_size
        and message.keys is NO_KEYS
        and message.tag is None
        and message.properties is None
        and message.sharding_key is None
        and message.flag is _ZERO
        and message.delay_level is _ZERO
        and message.deliver_at_ms is _ZERO
    )


@lru_cache(maxsize=1024)
def _check_sendable_topic(topic: str, allow_system: bool) -> None:
    check_topic(topic)
    if not allow_system and is_closed_topic(topic):
        raise InvalidArgument(f"topic {topic!r} is reserved; users may not send to it")


def _check_message(message: Message, topic: str, max_message_size: int) -> Message:
    if not isinstance(message, Message):
        raise InvalidArgument(f"must be a Message, not {describe(message)}")
    if type(message.topic) is not str:
        raise InvalidArgument(f"topic must be a str, not {describe(message.topic)}")
    if message.topic != topic:
        raise InvalidArgument(
            f"topic {message.topic[:64]!r} differs from {topic[:64]!r} of the first message; "
            "messages sent together have one topic"
        )
    body = _as_bytes(message.body)
    if not body:
        raise InvalidArgument("body is empty; it must have at least 1 byte")
    if len(body) > max_message_size:
        raise InvalidArgument(
            f"body of {len(body)} bytes is over the limit (max_message_size = {max_message_size})"
        )
    if message.tag is not None:
        _check_tag(message.tag)
    if message.keys is not NO_KEYS:
        check_keys(message.keys)
    properties = message.properties
    if properties is not None:
        check_properties(properties)
        if isinstance(message, StoredMessage):
            message = without_reserved(message)  # sent on, it carries nothing of its way
        elif not isinstance(message, SystemMessage):
            check_not_reserved(properties)
    if message.sharding_key is not None:
        _check_text("sharding_key", message.sharding_key, MAX_SHARDING_KEY_LENGTH)
    if message.flag is not _ZERO:
        check_number("flag", message.flag, MAX_FLAG)
    if message.delay_level is not _ZERO:
        check_number("delay_level", message.delay_level, MAX_FLAG)
    if message.deliver_at_ms is not _ZERO:
        check_number("deliver_at_ms", message.deliver_at_ms, MAX_TIMESTAMP_MS)
    if message.delay_level and message.deliver_at_ms:
        raise InvalidArgument(
            f"delay_level = {message.delay_level} and deliver_at_ms = {message.deliver_at_ms} "
            "exclude each other; set one of them"
        )
    if type(message) is Message and body is message.body:
        return message
    message = as_plain(message)
    message.body = body
    return message


def check_not_reserved(properties: Mapping[str, str]) -> None:
    """Checks that properties have no name that only mqmesh sets.

    Raises:
        InvalidArgument: Names it.
    """
    if not RESERVED_PROPERTIES.isdisjoint(properties):
        name = min(RESERVED_PROPERTIES.intersection(properties))
        raise InvalidArgument(
            f"property {name!r} is reserved: mqmesh sets it, users may only read it"
        )


def _as_bytes(body: object) -> bytes:
    if type(body) is bytes:
        return body
    if not isinstance(body, bytearray | memoryview):
        raise InvalidArgument(f"body must be bytes, bytearray or memoryview, not {describe(body)}")
    try:
        return bytes(body)
    except ValueError as error:
        raise InvalidArgument(f"body cannot be read: {error}") from error


def _check_tag(tag: str) -> None:
    _check_text("tag", tag, MAX_TAG_LENGTH)
    # Tag expressions are split at || and stripped: no subscription could name such a tag.
    if "|" in tag and ("||" in tag or tag[0] == "|" or tag[-1] == "|"):
        raise InvalidArgument(f"tag {tag!r} may not contain '||' nor begin or end with '|'")
    if tag[0].isspace() or tag[-1].isspace():
        raise InvalidArgument(f"tag {tag!r} may not begin or end with white space")


def _are_plain_keys(keyed: Sequence[Sequence[str]]) -> bool:
    """Return True when keys are surely legal; half a call a key, where ``check_keys`` makes two."""
    if not {tuple, list}.issuperset(map(type, keyed)) or max(map(len, keyed)) > MAX_KEYS:
        return False
    keys = list(chain.from_iterable(keyed))
    if not set(map(type, keys)) <= {str}:
        return False
    lengths = set(map(len, keys))
    if 0 in lengths or max(lengths, default=0) > MAX_KEY_LENGTH:
        return False
    try:
        "".join(keys).encode()
    except UnicodeEncodeError:
        return False
    return True


def check_keys(keys: Sequence[str]) -> None:
    """Checks the keys of a message.

    Raises:
        InvalidArgument: Names what is wrong, and the limit.
    """
    if type(keys) is not tuple and type(keys) is not list:
        raise InvalidArgument(f"keys must be a list or tuple of str, not {describe(keys)}")
    if len(keys) > MAX_KEYS:
        raise InvalidArgument(f"{len(keys)} keys are too many (limit {MAX_KEYS})")
    for key in keys:
        _check_text("key", key, MAX_KEY_LENGTH)


def check_properties(properties: dict[str, str]) -> None:
    """Checks the properties of a message, but for reserved names.

    Raises:
        InvalidArgument: Names what is wrong, and the limit.
    """
    if type(properties) is not dict:
        raise InvalidArgument(
            f"properties must be a dict of str to str, not {describe(properties)}"
        )
    # Nearly all are short and ASCII, where a character is a byte; the loop says what is wrong.
    try:
        text = "".join(chain(properties, properties.values()))
    except TypeError:
        is_short_ascii = False
    else:
        is_short_ascii = text.isascii() and len(text) <= MAX_PROPERTIES_BYTES
    if is_short_ascii and "" not in properties:
        return
    size = 0
    for name, value in properties.items():
        if not name:
            raise InvalidArgument("properties have an empty name; it needs at least 1 character")
        size += _utf8_size("property name", name) + _utf8_size("property value", value)
    if size > MAX_PROPERTIES_BYTES:
        raise InvalidArgument(
            f"properties of {size} bytes as UTF-8 are over the limit of {MAX_PROPERTIES_BYTES}"
        )


def _check_text(field: str, text: str, limit: int) -> None:
    size = _utf8_size(field, text)
    if not size:
        raise InvalidArgument(f"{field} is empty; 1 to {limit} characters are allowed")
    if len(text) > limit:
        raise InvalidArgument(
            f"{field} of {len(text)} characters is too long (limit {limit}): {text[:64]!r}…"
        )


def _utf8_size(field: str, text: str) -> int:
    if type(text) is not str:
        raise InvalidArgument(f"{field} must be a str, not {describe(text)}")
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{field} {text[:64]!r} has a lone surrogate at {error.start}; it cannot be UTF-8"
        ) from None
