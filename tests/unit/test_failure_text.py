"""Texts of exceptions have a limit, in logs and in properties of messages."""

from __future__ import annotations

import io
import logging

import pytest

from mqmesh.failure_text import (
    CUT,
    MAX_FAILURE_CHARACTERS,
    cut,
    error_to_log,
    failure_text,
    one_line,
)

LONG = "x" * 10_000_000


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("not even this")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad amount"), "ValueError: bad amount"),
        (KeyError(), "KeyError"),
        (Unspeakable(), f"{__name__}.Unspeakable"),
        (ValueError("\ud800"), "ValueError: ?"),
    ],
)
def test_a_failure_has_the_type_and_the_text_of_its_exception(error, text):
    assert failure_text(error) == text


def test_a_long_text_is_cut_and_says_so():
    text = failure_text(ValueError(LONG))
    assert len(text) <= MAX_FAILURE_CHARACTERS
    assert text.startswith("ValueError: xxx")
    assert text.endswith(CUT)
    assert cut("y" * MAX_FAILURE_CHARACTERS) == "y" * MAX_FAILURE_CHARACTERS


def raised(error, cause=None):
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def chained(count):
    error = KeyError("first")
    for number in range(count):
        error = raised(ValueError(f"{number}"), error)
    return error


def noted(error, note):
    error.add_note(note)
    return error


@pytest.mark.parametrize(
    "error",
    [
        raised(ValueError(LONG)),
        raised(ValueError("short"), KeyError(LONG)),
        raised(ValueError("short"), raised(KeyError("short"), OSError(LONG))),
        raised(noted(ValueError("short"), LONG)),
        raised(ExceptionGroup("several", [KeyError("short"), OSError(LONG)])),
        chained(500),
    ],
    ids=["itself", "cause", "its cause", "note", "group", "chain"],
)
def test_a_traceback_of_a_long_text_keeps_type_and_lines_and_no_more(error):
    log, written = logging.Logger("test"), io.StringIO()
    log.addHandler(logging.StreamHandler(written))
    log.error("it failed", exc_info=error_to_log(error))
    text = written.getvalue()
    assert len(text) < 3_000
    assert f"{type(error).__name__}: " in text
    assert "in raised" in text


def test_an_exception_of_usual_length_is_logged_as_it_is():
    error = raised(ValueError("short"), KeyError("short"))
    assert error_to_log(error) is error
    error.__context__ = error  # a circle
    assert error_to_log(error) is error
    with pytest.raises(KeyError) as caught:
        raise KeyError("now")
    assert error_to_log(caught.value) is caught.value
    try:
        raise error
    except ValueError:
        assert error_to_log() is error
    assert error_to_log() is None


def test_a_text_in_one_line_moves_no_cursor():
    assert one_line("no\n\x1b[2Jsecond\u202eline\x00 für Größe") == (
        "no \\x1b[2Jsecond\\u202eline\\x00 für Größe"
    )
