"""Bodies as values: JSON for msgspec's types, dataclasses and pydantic's models; bytes; text."""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from mqmesh.errors import InvalidArgument, Reject
from mqmesh.message import PROPERTY_CONTENT_TYPE, StoredMessage

Decode = Callable[[StoredMessage], Any]
Encode = Callable[[Any], bytes]

MAX_CONTENT_TYPE_LENGTH: Final = 255


class Codec(msgspec.Struct, frozen=True):
    """Form of bodies, for handlers and publishers of an ``App``.

    Attributes:
        content_type: Its name, which a publisher writes into the property ``CONTENT_TYPE``: a
            media type, 1 to 255 characters.
        encode: Makes a body of a value; raises ``TypeError`` or ``ValueError`` for one that is none
            of its kind.
        decode: Makes a value of a body, given the type that the handler wants; raises
            ``ValueError`` for a body that is no such value.
    """

    content_type: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes, Any], Any]

    def __post_init__(self) -> None:
        if not 1 <= len(self.content_type) <= MAX_CONTENT_TYPE_LENGTH:
            raise InvalidArgument(
                f"content_type has {len(self.content_type)} characters; it must have 1 to "
                f"{MAX_CONTENT_TYPE_LENGTH}"
            )


def _decode_json(body: bytes, kind: Any) -> Any:
    if _is_pydantic(kind):
        return kind.model_validate_json(body)
    return msgspec.json.decode(body, type=kind)


def _encode_json(value: Any) -> bytes:
    if _is_pydantic(value):
        return value.model_dump_json().encode()  # type: ignore[no-any-return]
    return msgspec.json.encode(value)


def _decode_msgpack(body: bytes, kind: Any) -> Any:
    if _is_pydantic(kind):
        return kind.model_validate(msgspec.msgpack.decode(body))
    return msgspec.msgpack.decode(body, type=kind)


def _encode_msgpack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value.model_dump() if _is_pydantic(value) else value)


JSON_CODEC: Final = Codec("application/json", _encode_json, _decode_json)
"""JSON, of Structs, dataclasses, TypedDicts and models of pydantic."""
MSGPACK_CODEC: Final = Codec("application/msgpack", _encode_msgpack, _decode_msgpack)
"""msgpack, of the same."""


def decoder_of(kind: Any, codec: Codec | None = None) -> Decode:
    """Return the function that makes a value of a type from a message.

    Args:
        kind: ``StoredMessage`` for the message itself, ``bytes``, ``str``, a model of pydantic, or
            any type that msgspec decodes from JSON: Structs, dataclasses, TypedDicts, ``dict``, …
        codec: Form of the bodies; None for JSON, bytes and text.

    Returns:
        A function that raises ``Reject`` where a body is no such value: no retry mends it.

    Raises:
        InvalidArgument: Values of this type cannot be decoded.
    """
    if kind is StoredMessage:
        return lambda message: message
    if codec is not None:
        return _decoder_by(codec, kind)
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
            raise _no_such_value(kind, error) from None

    return decoded


def _decoder_by(codec: Codec, kind: Any) -> Decode:
    def decoded(message: StoredMessage) -> Any:
        named = message.property(PROPERTY_CONTENT_TYPE)
        if named is not None and named != codec.content_type:
            raise Reject(f"the body is {named[:300]}; this handler decodes {codec.content_type}")
        try:
            return codec.decode(message.body, kind)
        except ValueError as error:
            raise _no_such_value(kind, error) from None

    return decoded


def _no_such_value(kind: Any, error: ValueError) -> Reject:
    # To be raised from None: where it was decoded says nothing of the body, and fills the log.
    return Reject(f"the body is no {getattr(kind, '__name__', str(kind))}: {error}")


def encoder_of(kind: Any, codec: Codec | None = None) -> Encode:
    """Return the function that makes a body from a value of a type; ``decoder_of`` reversed.

    Args:
        kind: As for ``decoder_of``.
        codec: Form of the bodies; None for JSON, bytes and text.

    Raises:
        InvalidArgument: For ``StoredMessage``; and by the function, for a value that cannot be
            encoded, or that is none of the type.
    """
    if kind is StoredMessage:
        raise InvalidArgument("a publisher sends values, not stored messages; use a Producer")
    if codec is not None:
        return _checked(kind, codec.encode)
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
