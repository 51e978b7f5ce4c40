"""Errors, warnings and notes of commands, on standard error."""

import sys

import click

from mqmesh.logs import one_line

from .streams import json_text


class Options:
    """Options that hold for all commands.

    Attributes:
        namesrv: Name servers, None if not given.
        context: Name of a context, None if not given.
        as_json: Answer in JSON.
        debug: Show tracebacks.
    """

    def __init__(self) -> None:
        self.namesrv: str | None = None
        self.context: str | None = None
        self.as_json = False
        self.debug = False


def tell_error(text: str, *, as_json: bool | None = None) -> None:
    """Prints an error: a line, or ``{"error": text}`` where answers are JSON.

    Args:
        text: What went wrong.
        as_json: None to use the option of the command.
    """
    _tell("error", text, as_json=as_json)


def tell_warning(text: str) -> None:
    """Prints a warning: the answer may lack something."""
    _tell("warning", text)


def tell_note(text: str) -> None:
    """Prints what people may want to know and programs may pass over."""
    _tell("note", text, prefix="")


def tell_progress(text: str) -> None:
    """Prints what a long command does now, where somebody watches a terminal."""
    if sys.stderr.isatty():
        tell_note(f"{text} …")


def _tell(kind: str, text: str, *, as_json: bool | None = None, prefix: str | None = None) -> None:
    if as_json is None:
        context = click.get_current_context(silent=True)
        options = None if context is None else context.find_object(Options)
        as_json = options is not None and options.as_json
    if as_json:
        line = json_text({kind: text}, sys.stderr)
    else:
        line = one_line(f"{kind}: {text}" if prefix is None else f"{prefix}{text}")
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
