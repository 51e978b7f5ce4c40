"""Checks and encodes the messages of a batch at once, in C where that could be compiled.

``message_checks.check_messages`` and ``payload.encode_payload`` look at each field of each message
from outside; ``native/encode.c`` finds the fields where the class keeps them, and takes a tenth of
the time. It leaves to them what is not surely legal, since they can name the error. Without it
(no compiler when mqmesh was installed) they do everything.
"""

from collections.abc import Sequence
from typing import Final

from mqmesh.batch.payload import (
    CODEC_NONE,
    MAX_MESSAGES,
    MAX_RAW_BYTES,
    MAX_STRINGS,
    Payload,
    compress_payload,
    pack_tag_hashes,
)
from mqmesh.message import FIELD_LIMITS, LONGEST_TOPIC, RESERVED_PROPERTIES, Message, tag_hash

try:
    from mqmesh._native import Encoder
except ImportError:
    Encoder = None  # type: ignore[assignment,misc]

MAX_KNOWN_TAGS: Final = 8_192
"""Number of tags whose hashes a process keeps for ``native/encode.c``."""

_hashes: Final[dict[str, bytes]] = {}
_encoder: Final = (
    None
    if Encoder is None
    else Encoder(
        message_type=Message,
        hashes=_hashes,
        reserved=RESERVED_PROPERTIES,
        limits=(MAX_MESSAGES, MAX_RAW_BYTES, MAX_STRINGS, LONGEST_TOPIC),
        field_limits=FIELD_LIMITS,
    )
)


def is_compiled() -> bool:
    """Return True when ``encode_at_once`` encodes anything."""
    return _encoder is not None


def encode_at_once(
    messages: Sequence[Message],
    *,
    max_body_bytes: int,
    is_one: bool,
    compress_over_bytes: int | None = None,
    with_places: bool = False,
    prefix: str = "",
) -> Payload | None:
    """Checks and encodes messages of one topic, whose name is not checked.

    Args:
        messages: Any sequence; only lists of legal messages are encoded.
        max_body_bytes: Largest body.
        is_one: The sender made one batch: all messages must have the same sharding key, or
            none; and the same delay level, or points in time, or neither. None may have a
            property that is reserved. Else each send has checked that already.
        compress_over_bytes: As for ``payload.encode_payload``.
        with_places: Some of them will be read with ``payload.pick_messages``.
        prefix: Text put in front of the topic of each message.

    Returns:
        The result of ``encode_payload``; None when ``check_messages`` and ``encode_payload`` must
            look at each message.
    """
    if _encoder is None:
        return None
    found = _encoder.encode(messages, max_body_bytes, is_one, with_places, prefix)
    if found is None:
        return None
    data, has_keys, hashes, places = found
    raw_size, count = len(data), len(messages)
    if hashes is None:
        hashes = _learn(messages)
    codec = CODEC_NONE
    if compress_over_bytes is not None and raw_size >= compress_over_bytes * count:
        data, codec = compress_payload(data)
    return Payload(data, codec, raw_size, count, has_keys, hashes, places)


def _learn(messages: Sequence[Message]) -> bytes:
    # Seldom: a program has few tags. One with many is no slower than without this table.
    tags = {message.tag for message in messages} - {None}
    if len(_hashes) + len(tags) > MAX_KNOWN_TAGS:
        _hashes.clear()
    _hashes.update(
        (tag, tag_hash(tag).to_bytes(8, "little")) for tag in list(tags)[:MAX_KNOWN_TAGS] if tag
    )
    return pack_tag_hashes(messages)
