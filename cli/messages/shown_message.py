"""A message as it is shown: to programs, and to people in a line."""

import base64
from typing import Any, Final

from mqmesh.checksum import crc32
from mqmesh.message import StoredMessage

from ..render import timestamp

PREVIEW_BYTES: Final = 64


def message_dict(message: StoredMessage) -> dict[str, Any]:
    """Returns all of a message, the same in all answers; the names and their order are stable."""
    body = message.body
    try:
        text: str | None = body.decode()
    except UnicodeDecodeError:
        text = None
    return {
        "topic": message.topic,
        "broker_name": message.broker_name,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "message_id": message.message_id,
        "tag": message.tag,
        "keys": list(message.keys),
        "properties": message.properties or {},
        "sharding_key": message.sharding_key,
        "flag": message.flag,
        "born_timestamp": message.born_timestamp,
        "store_timestamp": message.store_timestamp,
        "born_host": message.born_host,
        "reconsume_times": message.reconsume_times,
        "body": text,
        "body_base64": base64.b64encode(body).decode() if text is None else None,
        "physical_topic": message.info.topic,
        "offset_message_id": message.offset_message_id,
        "commitlog_offset": message.commitlog_offset,
        "ordinal": message.ordinal,
        "store_size": message.store_size,
        "store_host": message.store_host,
        "delay_level": message.delay_level,
        "deliver_at_ms": message.deliver_at_ms,
        "body_size": len(body),
        "body_crc32": crc32(body),
    }


def parts_of(message: StoredMessage) -> list[tuple[str, str]]:
    """Returns the parts of a message as shown to people, each with its style."""
    parts = [
        (timestamp(message.store_timestamp).partition("T")[2].removesuffix("Z"), "dim"),
        (f"{message.broker_name}/{message.queue_id}@{message.queue_offset}", "cyan"),
    ]
    if message.tag is not None:
        parts.append((message.tag, "green"))
    if message.keys:
        parts.append((",".join(message.keys), "magenta"))
    for name, value in (message.properties or {}).items():
        parts.append((f"{name}={value}", "yellow"))
    parts.append((_body_text(message.body), ""))
    return parts


def _body_text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        shown = body[:PREVIEW_BYTES].hex()
        return f"<{len(body):,} bytes> {shown}{'…' if len(body) > PREVIEW_BYTES else ''}"
