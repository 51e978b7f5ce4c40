"""A message as people see it, in a line."""

from typing import Final

from mqmesh.message import StoredMessage

from ..render import timestamp

PREVIEW_BYTES: Final = 64


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
