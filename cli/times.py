"""Times as users write them."""

import re
from datetime import UTC, datetime
from typing import Final

from mqmesh.errors import ConfigError

_AGO = re.compile(r"(\d{1,9})(s|m|h|d)\Z")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_MS = re.compile(r"\d{10,16}\Z")


def parse_time(text: str, now_ms: int) -> int:
    """Reads a time as users write it.

    Args:
        text: ISO 8601 (UTC where it names no zone), ms since 1970, or an age: ``10m``.
        now_ms: Wall clock.

    Returns:
        Milliseconds since 1970.

    Raises:
        ConfigError: It is none of these.
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
            f"--from {text!r}: must be first, last, a time like 2026-03-01T12:00Z, ms since 1970, "
            "or an age like 30s, 10m, 2h, 1d"
        ) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(int(moment.timestamp() * 1_000), 0)
