"""Texts of exceptions, of limited length: those of users may be of any length."""

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Final

MAX_FAILURE_CHARACTERS: Final = 1_024
"""Longest text of an exception in a line of a log, or in a property of a message."""
MAX_CHAIN: Final = 16
"""Exceptions of a chain in one traceback."""
CUT: Final = "… (cut)"
"""Ends a text that was cut."""


def failure_text(error: BaseException) -> str:
    """Return type and text of an exception, at most ``MAX_FAILURE_CHARACTERS`` long.

    A longer text is cut and ends with ``CUT``. Characters that UTF-8 cannot encode become ``?``.
    """
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    text = text_of(error)
    return cut(f"{name}: {text}" if text else name)


def text_of(error: BaseException) -> str:
    """Return the text of an exception, cut as ``cut`` does; "" if it fails to make one."""
    try:
        return cut(str(error))
    except Exception:
        return ""  # a user's exception may fail even at this


def one_line(text: str) -> str:
    """Return a text with each run of white space, line breaks too, as one space.

    Control characters, and marks that turn the direction of text, become escapes: so a text of
    any source moves no terminal's cursor.
    """
    words = " ".join(text.split())
    if words.isprintable():
        return words
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in words)


def cut(text: str) -> str:
    """Return at most ``MAX_FAILURE_CHARACTERS`` of a text, with ``CUT`` at its end if it is cut."""
    if len(text) > MAX_FAILURE_CHARACTERS:
        text = text[: MAX_FAILURE_CHARACTERS - len(CUT)] + CUT
    return text.encode(errors="replace").decode()


def error_to_log(error: BaseException | None = None) -> BaseException | None:
    """Return the ``exc_info`` for a logger: an exception whose traceback is not too long.

    Args:
        error: Exception to log; by default the one that is being handled.

    Returns:
        The exception itself; if its chain or a text in it is too long, a stand-in with its
        traceback, the name of its type and its text cut, without the chain.
    """
    error = sys.exception() if error is None else error
    if error is None:
        return None
    chain = list(islice(_chain(error), MAX_CHAIN + 1))
    if len(chain) <= MAX_CHAIN and all(map(_is_short, chain)):
        return error
    kind = type(error)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    stand_in: BaseException = type(kind.__name__, (Exception,), names)(text_of(error))
    return stand_in.with_traceback(error.__traceback__)


def _is_short(error: BaseException) -> bool:
    notes = getattr(error, "__notes__", ())
    try:
        return len(str(error)) + sum(map(len, notes)) <= MAX_FAILURE_CHARACTERS
    except Exception:
        return True  # the logger says that it has no text


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following = [error]
    while following:
        one = following.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, BaseExceptionGroup):
            following += one.exceptions[:MAX_CHAIN]
        following += [other for other in (one.__cause__, one.__context__) if other is not None]
