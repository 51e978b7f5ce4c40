"""Helpers that the commands of the archive share."""

import importlib
from contextlib import AbstractContextManager
from typing import Any, Final

from mqmesh.errors import ConfigError

SPAN_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def span_seconds(text: str) -> int:
    """Returns the seconds of a span of time like ``90s``, ``10m``, ``2h``, ``7d``.

    Raises:
        ConfigError: The text is no span.
    """
    unit = SPAN_SECONDS.get(text[-1:], 0)
    number = text[:-1]
    if not unit or not (number.isascii() and number.isdecimal()) or not int(number):
        raise ConfigError(f"{text!r} is no span of time; write 90s, 10m, 2h or 7d")
    return int(number) * unit


def archive_module(name: str, extra: str = "") -> Any:
    """Imports a module of the archive, which needs packages that mqmesh can do without.

    Args:
        name: Module of ``mqmesh.spark``.
        extra: Extra that has these packages, for the error; that without Spark by default.
    """
    try:
        return importlib.import_module(f"mqmesh.spark.{name}")
    except ImportError as error:
        if (error.name or "").startswith("mqmesh"):
            raise
        extra = extra or ("spark" if name == "session" else "archive")
        raise ConfigError(f"{error}: pip install 'mqmesh[{extra}]'") from error


def errors_of_libraries() -> AbstractContextManager[None]:
    """Turns errors of Spark, Delta Lake and Arrow into errors of ours, one sentence each."""
    found: AbstractContextManager[None] = archive_module("failures").errors_of_libraries()
    return found


def plain_row(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of an archive as JSON: bodies as text, else as ``body_base64``."""
    values = dict(row)
    values["properties"] = dict(values["properties"] or ())
    content = values.pop("body")
    try:
        values["body"] = content.decode()
    except UnicodeDecodeError:
        values["body_base64"] = content
    return values
