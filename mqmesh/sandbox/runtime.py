"""Turns the source of a filter into a function. Only ever called inside a confined worker.

The names that a filter is given are chosen so that honest mistakes are reported early. They
are no wall: a malicious filter gets around them. The wall is ``confinement.py``.
"""

import base64
import builtins
import datetime
import decimal
import json
import math
import re
import string
import struct
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Final

from mqmesh.message import StoredMessage

MODULES: Final[dict[str, ModuleType]] = {
    module.__name__: module
    for module in (base64, datetime, decimal, json, math, re, string, struct)
}
"""Modules that a filter may import."""

FORBIDDEN: Final = frozenset(
    {
        "__import__",
        "breakpoint",
        "compile",
        "copyright",
        "credits",
        "eval",
        "exec",
        "exit",
        "globals",
        "help",
        "input",
        "license",
        "locals",
        "open",
        "print",
        "quit",
        "vars",
    }
)
ENTRY: Final = "match"
FILE_NAME: Final = "<filter>"
_TEXT_LENGTH = 300

Match = Callable[[StoredMessage], object]


class FilterError(Exception):
    """Raised when a filter cannot be used, or failed; the text is for its author."""


class FilterExhausted(FilterError):
    """Raised when a filter has used up its memory: the process is of no use any more."""


def load_filter(source: str) -> Match:
    """Runs a filter's source and finds its ``match``.

    Raises:
        FilterError: The source is no Python, fails, or has no ``match``.
    """
    names: dict[str, Any] = {"__name__": FILE_NAME, "__builtins__": _builtins()}
    try:
        code = compile(source, FILE_NAME, "exec", dont_inherit=True)
        exec(code, names)  # noqa: S102  # in a locked process, see the head of the module
    except BaseException as error:
        raise FilterError(f"the filter cannot be loaded: {describe(error)}") from None
    match = names.get(ENTRY)
    if not callable(match):
        raise FilterError("the filter has no function match(message)")
    return match  # type: ignore[no-any-return]  # what it answers is looked at each time


def match_all(match: Match, messages: Iterable[StoredMessage]) -> bytes:
    """Asks a filter about messages.

    Returns:
        One byte a message: 1 for a match, else 0.

    Raises:
        FilterExhausted: The filter has used up its memory.
        FilterError: The filter raised, or returned something else than True or False.
    """
    found = bytearray()
    add = found.append
    for message in messages:
        try:
            answer = match(message)
        except MemoryError as error:
            raise FilterExhausted(_failed_at(message, f"raised {describe(error)}")) from None
        except BaseException as error:
            raise FilterError(_failed_at(message, f"raised {describe(error)}")) from None
        # A filter that forgets to return something shall not lose every message for it.
        if answer is True:
            add(1)
        elif answer is False:
            add(0)
        else:
            kind = type(answer).__name__
            raise FilterError(_failed_at(message, f"answered {kind}, not True or False"))
    return bytes(found)


def describe(error: BaseException) -> str:
    """Describes any error in one short line."""
    kind = type(error).__name__
    try:
        text = str(error)
    except BaseException:
        text = "(it cannot be shown)"
    line = error.lineno if isinstance(error, SyntaxError) else _line_of(error)
    where = f" (line {line} of the filter)" if line else ""
    return f"{kind}: {text[:_TEXT_LENGTH]}{where}"


def _line_of(error: BaseException) -> int | None:
    found = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == FILE_NAME:
            found = trace.tb_lineno
        trace = trace.tb_next
    return found


def _failed_at(message: StoredMessage, what: str) -> str:
    return f"match() {what}, at queue {message.queue_id}, offset {message.queue_offset}"


def _builtins() -> dict[str, Any]:
    names = {name: value for name, value in vars(builtins).items() if name not in FORBIDDEN}
    names["__import__"] = _import
    return names


def _import(name: str, *_: object, **__: object) -> ModuleType:
    try:
        return MODULES[name]
    except KeyError:
        known = ", ".join(sorted(MODULES))
        raise ImportError(f"a filter may import {known}, not {name}") from None
