"""Options of readers and writers as users give them, and the errors when one is wrong."""

import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from mqmesh.errors import ConfigError

DAY_MS: Final = 86_400_000
_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}
_SPAN: Final = re.compile(r"([0-9]{1,9}) ?(ms|s|m|h)")

Options = Mapping[str, str]
"""Values by name; Spark's own mapping does not mind capitals, a dict does."""


def check_names(options: Options, known: Iterable[str], what: str) -> None:
    """Refuses unknown options.

    Args:
        options: Options that the user gave.
        known: Names that may be there.
        what: Name of the reader or writer, for the error.

    Raises:
        ConfigError: Names the first unknown one, and all that there are.
    """
    names = list(known)
    lower = {name.lower() for name in names}
    for name in options:
        if name.lower() not in lower:
            raise ConfigError(f"{what} has no option {name!r}; it has {', '.join(sorted(names))}")


def words(text: str | None) -> list[str]:
    """Splits a text at its commas."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def flag(options: Options, name: str, default: bool = False) -> bool:
    """Reads an option that is ``true`` or ``false``.

    Raises:
        ConfigError: The value is neither.
    """
    text = (options.get(name) or str(default)).lower()
    if text not in ("true", "false"):
        raise ConfigError(f"option {name} is {text!r}; it may be 'true' or 'false'")
    return text == "true"


def number(options: Options, name: str, default: int, low: int, high: int) -> int:
    """Reads an option that is a whole number.

    Raises:
        ConfigError: The value is no whole number, or out of bounds.
    """
    text = options.get(name)
    if not text:
        return default
    try:
        found = int(text)
    except ValueError:
        found = low - 1
    if not low <= found <= high:
        raise ConfigError(f"option {name} is {text!r}; it may be {low} to {high}")
    return found


def span_ms(options: Options, name: str, default: int) -> int:
    """Reads an option that is a span of time, as ``500ms``, ``10s``, ``15m``, ``1h``; in ms.

    Raises:
        ConfigError: The value is none, or over a day.
    """
    text = (options.get(name) or "").strip()
    if not text:
        return default
    match = _SPAN.fullmatch(text)
    found = int(match[1]) * _UNITS_MS[match[2]] if match else 0
    if not 0 < found <= DAY_MS:
        raise ConfigError(f"option {name} is {text!r}; write 500ms, 10s, 15m or 1h, at most 24h")
    return found


def json_object(options: Options, name: str) -> dict[str, Any]:
    """Reads an option that is an object of JSON.

    Raises:
        ConfigError: The value is no object of JSON.
    """
    text = options.get(name) or ""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"option {name} is {text[:200]!r}; it must be an object of JSON")
    return found


def time_ms(text: str | None, default: int) -> int:
    """Reads a time as ms since 1970, or in ISO form, UTC if it names no zone.

    Raises:
        ConfigError: The text is no time.
    """
    if not text:
        return default
    if text.isascii() and text.isdecimal():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{text!r} is no time; write 2026-03-01T12:00Z, or ms since 1970"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1_000)
