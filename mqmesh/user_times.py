"""Times as users write them: UTC, unless they name a zone."""

import re
from datetime import UTC, datetime
from typing import Final

from mqmesh.errors import ConfigError
from mqmesh.message import MAX_DELAY_MS

TIME_HELP: Final = "2026-03-01T12:00 (UTC, or +01:00 behind it), ms since 1970, or an age like 2h"
"""The forms of a time, for the help of options."""

_AGO = re.compile(r"(\d{1,9})(s|m|h|d)\Z")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_DURATION = re.compile(r"(\d{1,12})(ms|s|m|h|d)")
_UNIT_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_MS = re.compile(r"\d{10,16}\Z")


def parse_time(text: str, now_ms: int, option: str, also: str = "") -> int:
    """Reads a time as users write it.

    Args:
        text: ISO 8601 (UTC where it names no zone), ms since 1970, or an age: ``10m``.
        now_ms: Wall clock.
        option: Name of the option on the command line, for the error.
        also: Other values of the option, for the error, with a comma and a space behind.

    Returns:
        Milliseconds since 1970.

    Raises:
        ConfigError: The text is none of these.
    """
    ago = _AGO.match(text)
    if ago:
        return max(now_ms - int(ago[1]) * _SECONDS[ago[2]] * 1_000, 0)
    if _MS.match(text):
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{option} {text!r}: must be {also}a time like 2026-03-01T12:00 (UTC, or +01:00 behind "
            "it), ms since 1970, or an age like 30s, 10m, 2h, 1d"
        ) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(int(moment.timestamp() * 1_000), 0)


def is_duration(text: str) -> bool:
    """Return True for a duration as ``parse_duration`` reads it, however long."""
    return _DURATION.fullmatch(text) is not None


def parse_duration(text: str, option: str) -> int:
    """Reads a duration as users write it.

    Args:
        text: Number and unit: ``500ms``, ``30s``, ``10m``, ``2h``, ``1d``.
        option: Name of the option on the command line, for the error.

    Returns:
        Milliseconds, up to 40 years.

    Raises:
        ConfigError: The text is no duration, or a longer one.
    """
    found = _DURATION.fullmatch(text)
    if found is None or (duration_ms := int(found[1]) * _UNIT_MS[found[2]]) > MAX_DELAY_MS:
        raise ConfigError(
            f"{option} {text!r}: must be a duration of up to 40 years like 500ms, 30s, 10m, 2h, 1d"
        )
    return duration_ms
