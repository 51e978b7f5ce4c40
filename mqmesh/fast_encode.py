"""Checks and encodes the messages of a batch at once, in C where that could be compiled.

``message_checks.check_messages`` and ``payload.encode_payload`` look at each field of each message
from outside; ``_fast_encode.c`` finds the fields where the class keeps them, and takes a fifth of
the time. It leaves to them what is unusual: properties, delays, texts beyond ASCII, messages of a
subclass, and all that is illegal, since they can tell what is wrong. Without it (no compiler when
mqmesh was installed) they do everything.
"""

from collections.abc import Sequence
from typing import Final

from mqmesh.message import (
    DLQ_PREFIX,
    MAX_FLAG,
    MAX_GROUP_LENGTH,
    MAX_KEY_LENGTH,
    MAX_KEYS,
    MAX_SHARDING_KEY_LENGTH,
    MAX_TAG_LENGTH,
    RETRY_PREFIX,
    Message,
)
from mqmesh.payload import (
    CODEC_NONE,
    MAX_MESSAGES,
    MAX_RAW_BYTES,
    MAX_STRINGS,
    Payload,
    compress_payload,
    pack_tag_hashes,
)

try:
    from mqmesh._fast_encode import Encoder
except ImportError:
    Encoder = None  # type: ignore[assignment,misc]

_LONGEST_TOPIC: Final = max(len(RETRY_PREFIX), len(DLQ_PREFIX)) + MAX_GROUP_LENGTH

_LIMITS: Final = (
    MAX_MESSAGES,
    MAX_RAW_BYTES,
    MAX_STRINGS,
    _LONGEST_TOPIC,
    MAX_TAG_LENGTH,
    MAX_KEYS,
    MAX_KEY_LENGTH,
    MAX_SHARDING_KEY_LENGTH,
    MAX_FLAG,
)
_encoder: Final = None if Encoder is None else Encoder(message_type=Message, limits=_LIMITS)


def is_compiled() -> bool:
    """True when ``encode_plain`` encodes anything."""
    return _encoder is not None


def encode_plain(
    messages: Sequence[Message],
    *,
    max_body_bytes: int,
    one_sharding_key: bool,
    compress_over_bytes: int | None = None,
) -> Payload | None:
    """Checks and encodes messages of one topic, whose name is not checked.

    Args:
        messages: Anything; only lists of legal messages are encoded. No other thread changes
            it meanwhile.
        max_body_bytes: Largest body.
        one_sharding_key: All must have the same one, or none.
        compress_over_bytes: As for ``payload.encode_payload``.

    Returns:
        What ``encode_payload`` gives; None when whoever looks at each message must tell whether it
        can be sent, and encode it.
    """
    if _encoder is None:
        return None
    found = _encoder.encode(messages, max_body_bytes, one_sharding_key)
    if found is None:
        return None
    data, has_keys, has_tags = found
    raw_size, count = len(data), len(messages)
    hashes = pack_tag_hashes(messages) if has_tags else b""
    codec = CODEC_NONE
    if compress_over_bytes is not None and raw_size >= compress_over_bytes * count:
        data, codec = compress_payload(data)
    return Payload(data, codec, raw_size, count, has_keys, hashes)
