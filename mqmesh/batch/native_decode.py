"""Decodes the messages of a batch at once, in C where that could be compiled.

``payload.decode_payload`` makes messages by their types and their bounds, and its caller gives them
their places. ``native/decode.c`` does both in a fifth of the time, and messages share the topic,
and neighbours the tag. It reads the output of ``native_encode.py``; everything else, and all
damaged payloads, it leaves to ``decode_payload``. Without it (no compiler when mqmesh was
installed) ``decode_payload`` reads everything.

Keys and properties are checked, but made only at their first use. For that, and since a property in
Python takes as long as a whole message in C, ``native/fields.c`` replaces some properties of the
class; it does the same, and leaves unusual cases to them.
"""

from typing import Final

from mqmesh.batch.payload import MAX_STRINGS, Buffer
from mqmesh.message import FIELD_LIMITS, NO_KEYS, BatchInfo, Message, StoredMessage

try:
    from mqmesh._native import Decoder, Field, PropertyMethod
except ImportError:
    Decoder = None  # type: ignore[assignment,misc]

_OF_BATCH: Final = (
    "queue_id",
    "broker_name",
    "commitlog_offset",
    "store_size",
    "prepared_transaction_offset",
    "born_timestamp",
    "store_timestamp",
    "born_host",
    "store_host",
)
_decoder: Final = (
    None
    if Decoder is None
    else Decoder(
        message_type=StoredMessage,
        batch_type=BatchInfo,
        no_keys=NO_KEYS,
        max_strings=MAX_STRINGS,
        field_limits=FIELD_LIMITS,
    )
)
if _decoder is not None:
    for _name in ("keys", "properties"):
        setattr(StoredMessage, _name, Field(_decoder, _name, vars(Message)[_name]))
    for _name in ("message_id", *_OF_BATCH):
        setattr(StoredMessage, _name, Field(_decoder, _name, vars(StoredMessage)[_name]))
    setattr(StoredMessage, "property", PropertyMethod(_decoder, Message.property))  # noqa: B010


def is_compiled() -> bool:
    """Return True when ``decode_at_once`` decodes anything."""
    return _decoder is not None


def decode_at_once(
    payload: Buffer, message_count: int, batch: BatchInfo, topic: str = ""
) -> list[StoredMessage] | None:
    """Decodes messages of their batch's own topic, which stand at consecutive queue offsets.

    Args:
        payload: An opened payload, from anywhere.
        message_count: Messages that must be in it.
        batch: Properties that the messages share, with the offset of the first and their topic.
        topic: Topic under which they are stored; "" for the topic of ``batch``.

    Returns:
        The messages of ``decode_payload``, with their places; None when that must read the payload,
            and name the error, if there is one.
    """
    if _decoder is None:
        return None
    shown, first_offset = batch.topic, batch.base_queue_offset
    return _decoder.decode(payload, message_count, topic or shown, first_offset, batch, shown)
