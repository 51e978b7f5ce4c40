"""Errors, warnings and notes of commands, on standard error."""

import sys
from collections.abc import Sequence

import click

from mqmesh.logs import one_line

from .streams import json_text


class Options:
    """Options that hold for all commands.

    Attributes:
        namesrv: Name servers, None if not given.
        context: Name of a context, None if not given.
        namespace: Namespace of topics and groups, None if not given.
        as_json: Answer in JSON.
        debug: Show tracebacks.
    """

    def __init__(self) -> None:
        self.namesrv: str | None = None
        self.context: str | None = None
        self.namespace: str | None = None
        self.as_json = False
        self.debug = False


def answers_json() -> bool:
    """Returns True if the command answers in JSON: ``--json`` was given."""
    context = click.get_current_context(silent=True)
    options = None if context is None else context.find_object(Options)
    return options is not None and options.as_json


def print_error(text: str, *, as_json: bool | None = None) -> None:
    """Prints an error: a line, or ``{"error": text}`` where answers are JSON.

    Args:
        text: Description of the error.
        as_json: None to use the option of the command.
    """
    _print("error", text, as_json=as_json)


def print_warning(text: str) -> None:
    """Prints a warning: the answer may lack something."""
    _print("warning", text)


def warn_of_silent(namesrvs: Sequence[str], advice: str = "; repeat it later") -> None:
    """Warns of name servers that did not answer, if there are some."""
    if namesrvs:
        print_warning(f"no answer from name server {', '.join(namesrvs)}{advice}")


def print_note(text: str) -> None:
    """Prints a note for people, which programs may ignore."""
    _print("note", text, prefix="")


def print_progress(text: str) -> None:
    """Prints the present step of a long command, if standard error is a terminal."""
    if sys.stderr.isatty():
        print_note(f"{text} …")


def _print(kind: str, text: str, *, as_json: bool | None = None, prefix: str | None = None) -> None:
    if answers_json() if as_json is None else as_json:
        line = json_text({kind: text}, sys.stderr)
    else:
        line = one_line(f"{kind}: {text}" if prefix is None else f"{prefix}{text}")
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
