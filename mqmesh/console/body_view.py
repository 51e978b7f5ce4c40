"""Views of a message's body: text, JSON, msgpack, bytes. Pure; never markup."""

import json
from typing import Any, Final, Literal

import msgspec

from mqmesh.units import KIB

MAX_SHOWN_BYTES: Final = 64 * KIB
"""Part of a body that is shown; the rest is there by download."""
MAX_CHARACTERS: Final = 256 * KIB
"""Longest view: msgpack and JSON grow when they are indented."""
BYTES_PER_LINE: Final = 16
PREVIEW_BYTES: Final = 200
"""Part of a body that a row of a table shows."""

BodyKind = Literal["text", "json", "msgpack", "bytes"]


class BodyView(msgspec.Struct, frozen=True):
    """A body as people see it.

    Attributes:
        kind: Kind of the view: the requested one, or the first of JSON, text, msgpack and bytes
            that the body can be read as.
        kinds: All kinds that it can be read as.
        text: The view.
        size: Size of the whole body, bytes.
        cut: Only the beginning is shown.
    """

    kind: BodyKind
    kinds: tuple[BodyKind, ...]
    text: str
    size: int
    cut: bool


def view_body(body: bytes, wanted: str = "") -> BodyView:
    """Return a view of a body.

    Args:
        body: All of it.
        wanted: Kind to read it as, if it can be; "" for the first that it can be.
    """
    shown = body[:MAX_SHOWN_BYTES]
    is_whole = len(shown) == len(body)
    views: dict[BodyKind, str] = {}
    text = _text(shown, is_whole)
    # A part of a document is none.
    if text is not None and is_whole:
        tree = _json(text)
        if tree is not None:
            views["json"] = tree
    if text is not None:
        views["text"] = text
    if is_whole and text is None and body:
        packed = _msgpack(body)
        if packed is not None:
            views["msgpack"] = packed
    views["bytes"] = hex_dump(shown)
    kinds = tuple(views)
    kind = next((one for one in kinds if one == wanted), kinds[0])
    found = views[kind]
    cut = not is_whole or len(found) > MAX_CHARACTERS
    return BodyView(kind, kinds, found[:MAX_CHARACTERS], len(body), cut)


def preview(body: bytes) -> str:
    """Return the beginning of a body in one line: as text, or as bytes in hex if it is none."""
    begin = body[:PREVIEW_BYTES]
    text = _text(begin, len(begin) == len(body))
    if text is None:
        return begin[:BYTES_PER_LINE].hex(" ")
    return " ".join(text.split())


def _text(shown: bytes, is_whole: bool) -> str | None:
    """Return UTF-8 as text, without a character that was cut in two; None if it is none."""
    for lost in range(1 if is_whole else 4):
        try:
            text = shown[: len(shown) - lost].decode()
        except UnicodeDecodeError:
            continue
        return None if "\0" in text else text
    return None


def _json(text: str) -> str | None:
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        tree = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
        return tree.encode("utf-8", "backslashreplace").decode()  # escapes name half characters
    except (ValueError, RecursionError):
        return None


def _msgpack(body: bytes) -> str | None:
    try:
        tree = msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError):
        return None
    # Nearly every byte is a number in msgpack: only a value with parts is worth a view.
    if not isinstance(tree, dict | list):
        return None
    try:
        return json.dumps(tree, indent=2, ensure_ascii=False, default=_plain, skipkeys=True)
    except (ValueError, TypeError, RecursionError):
        return None


def _plain(value: Any) -> str:
    if isinstance(value, bytes):
        return f"<{len(value)} bytes: {value[:32].hex(' ')}>"
    return str(value)


def hex_dump(data: bytes) -> str:
    """Return bytes as lines: position, 16 bytes in hex, and the letters among them."""
    lines = []
    for begin in range(0, len(data), BYTES_PER_LINE):
        part = data[begin : begin + BYTES_PER_LINE]
        letters = "".join(chr(one) if 0x20 <= one < 0x7F else "·" for one in part)
        lines.append(f"{begin:08x}  {part.hex(' '):<47}  {letters}")
    return "\n".join(lines)
