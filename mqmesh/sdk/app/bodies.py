"""Bodies as values: JSON for msgspec's types, dataclasses and pydantic's models; bytes; text."""

from collections.abc import Callable
from typing import Any

import msgspec

from mqmesh.errors import InvalidArgument, Reject
from mqmesh.message import StoredMessage

Decode = Callable[[StoredMessage], Any]
Encode = Callable[[Any], bytes]


def decoder_of(kind: Any) -> Decode:
    """Return the function that makes a value of a type from a message.

    Args:
        kind: ``StoredMessage`` for the message itself, ``bytes``, ``str``, a model of pydantic, or
            whatever msgspec decodes from JSON: Structs, dataclasses, TypedDicts, ``dict``, …

    Returns:
        A function that raises ``Reject`` where a body is no such value: no retry mends it.

    Raises:
        InvalidArgument: Nobody can decode such a type.
    """
    if kind is StoredMessage:
        return lambda message: message
    if kind is bytes:
        return lambda message: message.body
    decode: Callable[[bytes], Any]
    if kind is str:
        decode = _text
    elif _is_pydantic(kind):
        decode = kind.model_validate_json
    else:
        try:
            decode = msgspec.json.Decoder(kind).decode
        except TypeError as error:
            raise InvalidArgument(f"no JSON can be decoded as {kind!r}: {error}") from error

    def decoded(message: StoredMessage) -> Any:
        try:
            return decode(message.body)
        except ValueError as error:  # msgspec's, pydantic's and Unicode's errors are such
            name = getattr(kind, "__name__", str(kind))
            # From None: where it was decoded says nothing about the body, and fills the log.
            raise Reject(f"the body is no {name}: {error}") from None

    return decoded


def encoder_of(kind: Any) -> Encode:
    """Return the function that makes a body from a value of a type; ``decoder_of`` reversed.

    Raises:
        InvalidArgument: For ``StoredMessage``; and by the function, for a value that cannot be
            encoded, or that is none of the type.
    """
    if kind is StoredMessage:
        raise InvalidArgument("a publisher sends values, not stored messages; use a Producer")
    if kind is bytes:
        return _checked(kind, bytes)
    if kind is str:
        return _checked(kind, str.encode)
    if _is_pydantic(kind):
        return _checked(kind, lambda value: value.model_dump_json().encode())
    return _checked(kind, msgspec.json.encode)


def _checked(kind: Any, encode: Callable[[Any], bytes]) -> Encode:
    plain = kind if isinstance(kind, type) else object

    def encoded(value: Any) -> bytes:
        if not isinstance(value, plain):
            raise InvalidArgument(f"{type(value).__name__} is no {plain.__name__}")
        try:
            return encode(value)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"{kind!r} cannot be encoded: {error}") from error

    return encoded


def _text(body: bytes) -> str:
    return bytes(body).decode()


def _is_pydantic(kind: Any) -> bool:
    # By what is used of it, so that pydantic is needed only for its models.
    return hasattr(kind, "model_validate_json") and hasattr(kind, "model_dump_json")
