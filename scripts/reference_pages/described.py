"""Descriptions in the code: sections of docstrings, types with their bounds, defaults."""

import ast
import enum
import inspect
import re
import types
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec

_POWERS: Final = {
    2**63 - 1: "2^63-1",
    2**62: "2^62",
    2**32 - 1: "2^32-1",
    2**31 - 1: "2^31-1",
    2**31: "2^31",
}
_SECTION: Final = re.compile(r"^(Attributes|Args|Errors|Raises|Returns):$", re.MULTILINE)
_DOCUMENT: Final = re.compile(r"`*docs/([\w/-]+\.md)`*")
_ENTRY: Final = re.compile(r"^    (\w+(?:, \w+)*):(?: |\n)", re.MULTILINE)


def sections(text: str) -> dict[str, str]:
    """Return the sections of a docstring in Google's form by name; "" is what stands before."""
    head, *rest = _SECTION.split(inspect.cleandoc(text))
    return {"": head.strip(), **dict(zip(rest[::2], rest[1::2], strict=True))}


def entries(section: str) -> dict[str, str]:
    """Return the entries of a section, each in one line, by name."""
    _, *parts = _ENTRY.split(section)
    return {
        name: " ".join(text.split())
        for names, text in zip(parts[::2], parts[1::2], strict=True)
        for name in names.split(", ")
    }


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a text, each in one line."""
    return [" ".join(one.split()) for one in text.split("\n\n") if one.strip()]


def fields_of(kind: type) -> dict[str, str]:
    """Return the meanings of a struct's fields, those that it inherits among them."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        found |= entries(sections(one.__dict__.get("__doc__") or "").get("Attributes", ""))
    return found


@cache
def members_of(kind: type[enum.Enum]) -> dict[str, str]:
    """Return the docstrings below the members of an enumeration, by name."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    return {
        before.targets[0].id: inspect.cleandoc(after.value.value)
        for before, after in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(before, ast.Assign) and isinstance(before.targets[0], ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(after.value.value, str)
    }


def number(value: Any) -> str:
    """Return a number as people read it."""
    return _POWERS.get(value, f"{value:,}")


def type_name(kind: Any, meta: msgspec.Meta | None = None) -> str:
    """Return a type as msgpack has it, with its bounds."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *metas = get_args(kind)
        return type_name(inner, metas[-1])
    if origin in (Union, types.UnionType):
        kinds = sorted(get_args(kind), key=lambda one: one is type(None))
        return " or ".join("nil" if one is type(None) else type_name(one) for one in kinds)
    most = f" ≤ {meta.max_length:,}" if meta and meta.max_length is not None else ""
    if origin in (tuple, list):
        return f"[{type_name(get_args(kind)[0])}]{most}"
    if origin is dict:
        key, value = map(type_name, get_args(kind))
        return f"{{{key}: {value}}}{most}"
    if kind is int:
        low = meta.ge if meta else None
        high = meta.le if meta else None
        # msgpack knows none beyond 64 bits, and msgspec no bound beyond 63.
        if low is None and high is None:
            return "int"
        return f"int {number(low)}…{'2^64-1' if high is None else number(high)}"
    if kind is str or (isinstance(kind, type) and issubclass(kind, enum.StrEnum)):
        least = f"{meta.min_length} ≤ " if meta and meta.min_length is not None else ""
        return f"{least}text{most}"
    return f"{kind.__name__}{most}"


def amount(value: float, unit: str) -> str:
    """Return a number as people read it: numbers of bytes as KiB, MiB and so on."""
    if unit.startswith("bytes") and isinstance(value, int) and value:
        for size, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
            if value % size == 0:
                return f"{value // size:,} {name}"
    return f"{value:,g}" if isinstance(value, float) else f"{value:,}"


def bounds(kind: Any, unit: str) -> str:
    """Return what a setting may be: its bounds, or its words."""
    if get_origin(kind) is Literal:
        return _words(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _words([one.value for one in kind])
    if get_origin(kind) is not Annotated:
        return ""
    inner, *metas = get_args(kind)
    meta = metas[-1]
    if inner in (int, float):
        low = meta.ge if meta.ge is not None else meta.gt
        if meta.le is None:
            return "" if low is None else f"from {amount(low, unit)}"
        return f"{amount(low, unit)} to {amount(meta.le, unit)}"
    if meta.max_length is None:
        return "not empty" if meta.min_length else ""
    least = f"{meta.min_length:,} to" if meta.min_length else "up to"
    return f"{least} {meta.max_length:,} {'characters' if inner is str else 'entries'}"


def default_name(field: msgspec.structs.FieldInfo) -> str:
    """Return a field's default; "—" if it must be given."""
    if field.required:
        return "—"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None:
        return "nil"
    return f"{value:,}" if type(value) is int else msgspec.json.encode(value).decode()


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table of Markdown."""
    return [
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
        *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows),
    ]


def code(text: str) -> str:
    """Return a text as code; nothing for none."""
    return f"`{text}`" if text else ""


def marks(text: str, docs: str = "") -> str:
    """Return a docstring's text with the marks and links of Markdown.

    Args:
        text: The text.
        docs: The way to ``docs`` from the page that it is put into.
    """
    return _DOCUMENT.sub(rf"[\1]({docs}\1)", text).replace("``", "`")


def _words(values: Iterable[Any]) -> str:
    return ", ".join(f"`{one}`" for one in values if one)
