"""Templates of the console: every text of a cluster is shown as text, even if it holds HTML."""

import datetime
import unicodedata
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from mqmesh.units import GIB, KIB, MIB

_INVISIBLE: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of characters that are not seen, or turn the order of others around."""


def visible(text: str) -> str:
    """Return a text whose control characters and direction marks are seen, and do nothing.

    Line breaks and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one in "\n\t" or unicodedata.category(one) not in _INVISIBLE else _picture(one)
        for one in text
    )


def _picture(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


def finalize(value: Any) -> Any:
    """Make a value of a template's expression fit to be shown; markup stays as it is."""
    if value is None:
        return "–"
    return visible(value) if type(value) is str else value


def exact(value: Any) -> Markup:
    """Return a value as it is, for attributes that come back to the console, such as of inputs."""
    return escape(value)


def number(value: float | None) -> str:
    """Return a number with its thousands apart: ``12,345``; one with a fraction below 10."""
    if value is None:
        return "–"
    text = f"{value:,.1f}" if isinstance(value, float) and abs(value) < 10 else f"{value:,.0f}"
    return text.removesuffix(".0")


def share(value: float) -> str:
    """Return a share as a percentage."""
    return f"{value:.0%}"


def byte_size(value: float) -> str:
    """Return a size in bytes, KiB, MiB or GiB."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if value >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:,.0f} B"


def span(value_ms: float | None) -> str:
    """Return a duration in its two largest units: ``2 h 5 min``."""
    if value_ms is None:
        return "–"
    if value_ms < 1_000:
        return f"{value_ms:.0f} ms"
    seconds = round(value_ms / 1_000)
    for name, size, below, part in (
        ("d", 86_400, "h", 3_600),
        ("h", 3_600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if seconds >= size:
            rest = seconds % size // part
            return f"{seconds // size} {name}" + (f" {rest} {below}" if rest else "")
    return f"{seconds} s"


def moment(value_ms: int | None) -> Markup:
    """Return a moment as a ``time`` element, which the browser turns into its own time zone."""
    if not value_ms or value_ms < 0:
        return Markup("–")
    try:
        at = datetime.datetime.fromtimestamp(value_ms / 1_000, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return Markup(f"{value_ms:d} ms")
    text = f"{at:%Y-%m-%d %H:%M:%S}"
    return Markup('<time datetime="{0}T{1}Z" title="{0} {1} UTC">{0} {1}</time>').format(
        *text.split()
    )


def segment(value: Any) -> str:
    """Return a text as one segment of a path."""
    return quote(str(value), safe="")


def link(path: str, /, **arguments: Any) -> str:
    """Return a path with a query string; empty arguments are left out."""
    given = {key: value for key, value in arguments.items() if value not in (None, "", False)}
    return path + ("?" + urlencode(given) if given else "")


def again_link(
    path: str, arguments: msgspec.Struct, of_path: Collection[str], **changes: Any
) -> str:
    """Return the link to a page with its own arguments, but for those that change.

    Args:
        path: Of the page.
        arguments: Its arguments; those that are as by default are left out.
        of_path: Names of those that stand in the path.
        changes: Arguments that change.
    """
    kept = {
        field.name: getattr(arguments, field.name)
        for field in msgspec.structs.fields(arguments)
        if field.name not in of_path and getattr(arguments, field.name) != field.default
    }
    return link(path, **kept | changes)


@cache
def environment() -> Environment:
    """Return the environment of all templates; see docs/console.md and CONTRIBUTING.md."""
    made = Environment(
        loader=PackageLoader("mqmesh.console", "templates"),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {
        "exact": exact,
        "number": number,
        "share": share,
        "bytes": byte_size,
        "span": span,
        "moment": moment,
        "segment": segment,
    }
    made.globals |= {"link": link}
    return made


def has_block(name: str, block: str) -> bool:
    """Return True if a template has a block of its own."""
    return block in environment().get_template(name).blocks


def render(name: str, values: Mapping[str, Any], block: str = "") -> str:
    """Render a template, or one block of it.

    Args:
        name: File in ``templates/``.
        values: Values for the template; ``ui`` are the macros of ``macros.html``.
        block: Only this block; "" for all.
    """
    values = dict(values)
    values["ui"] = environment().get_template("macros.html").make_module(values)
    template = environment().get_template(name)
    if not block:
        return template.render(values)
    return environment().concat(template.blocks[block](template.new_context(values)))
