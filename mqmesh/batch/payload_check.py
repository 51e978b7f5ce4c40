"""The structure of payloads that clients send, checked before a broker stores them.

One message that cannot be decoded would stop every consumer of its queue, and an index would take
any number of keys. ``native/check.c`` walks through the encoded messages and makes no objects. A
payload that it does not surely pass, and every payload without it, is decoded and checked here,
where the fault can be named.
"""

from typing import Final

from mqmesh.batch.payload import MAX_STRINGS, Buffer, decode_payload, split_payload
from mqmesh.errors import CorruptBatch, InvalidArgument, MessageIllegal
from mqmesh.message import (
    FIELD_LIMITS,
    MAX_KEY_LENGTH,
    MAX_KEYS,
    MAX_PROPERTIES_BYTES,
    MAX_SHARDING_KEY_LENGTH,
    MAX_TAG_LENGTH,
    MAX_TOPIC_LENGTH,
    StoredMessage,
)
from mqmesh.units import KIB

try:
    from mqmesh._native import Checker
except ImportError:
    Checker = None  # type: ignore[assignment,misc]

FIELDS_A_MESSAGE: Final = 9
MESSAGE_OVERHEAD_BYTES: Final = 4 * (
    MAX_TOPIC_LENGTH + MAX_TAG_LENGTH + MAX_KEYS * (MAX_KEY_LENGTH + 3) + MAX_SHARDING_KEY_LENGTH
) + (2 * MAX_PROPERTIES_BYTES + 1 * KIB)
"""More than a legal message can have beside its body; characters may take four bytes."""

_NINE_FIELDS: Final = 0x90 | FIELDS_A_MESSAGE
_checker: Final = (
    None if Checker is None else Checker(max_strings=MAX_STRINGS, field_limits=FIELD_LIMITS)
)


def _never(payload: Buffer, message_count: int, topic: str, max_message_size: int) -> bool:
    return False


is_surely_sound: Final = _never if _checker is None else _checker.check
"""The quick check of ``check_payload``, with the same arguments; False proves nothing."""


def check_payload(payload: Buffer, message_count: int, topic: str, max_message_size: int) -> None:
    """Checks that a producer may send an opened payload.

    Args:
        payload: Without compression; from anywhere.
        message_count: Messages that must be in it.
        topic: Topic of each message.
        max_message_size: Largest body in bytes, the setting of that name.

    Raises:
        MessageIllegal: A producer may not send it: names the message, its field and the limit.
    """
    if is_surely_sound(payload, message_count, topic, max_message_size):
        return
    try:
        messages = decode_payload(payload)
        fields = [bytes(raw)[:1] for raw in split_payload(payload)]
    except CorruptBatch as error:
        raise MessageIllegal(str(error)) from error
    if len(messages) != message_count:
        raise MessageIllegal(f"{len(messages)} messages in a batch of {message_count}")
    for position, message in enumerate(messages):
        try:
            if fields[position][0] != _NINE_FIELDS:
                raise InvalidArgument(f"is no array of {FIELDS_A_MESSAGE} fields")
            _check_message(message, topic, max_message_size)
        except InvalidArgument as error:
            raise MessageIllegal(f"message {position} of {message_count}: {error}") from None


def keys_in(payload: Buffer, message_count: int) -> tuple[bytes, int] | None:
    """Return the encoded keys in an opened payload, unchecked.

    Args:
        payload, message_count: As for ``check_payload``.

    Returns:
        Msgpack arrays of texts, one behind the other, none of them empty, and how many they are;
        None if the payload must be decoded to find them, or has more of them than a batch may.
    """
    return None if _checker is None else _checker.keys(payload, message_count)


def _check_message(message: StoredMessage, topic: str, max_message_size: int) -> None:
    if message.topic != topic:
        raise InvalidArgument(
            f"topic {message.topic[:64]!r} differs from {topic[:64]!r} of its batch"
        )
    size = len(message.body)
    if not 0 < size <= max_message_size:
        raise InvalidArgument(
            f"body of {size} bytes; 1 to {max_message_size} are allowed (max_message_size)"
        )
    size = 0
    for name, value in (message.properties or {}).items():
        if not name:
            raise InvalidArgument("properties have an empty name")
        size += len(name.encode()) + len(value.encode())
    if size > MAX_PROPERTIES_BYTES:
        raise InvalidArgument(
            f"properties of {size} bytes are over the limit of {MAX_PROPERTIES_BYTES}"
        )
