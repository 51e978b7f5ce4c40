"""Options that several commands have, and their effects."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from mqmesh.errors import ConfigError
from mqmesh.logs import one_line

from .credentials import choose_cluster
from .notes import Options, answers_json

RATE: Final = click.FloatRange(0.001, 10_000_000)
"""Messages a second."""
SECONDS: Final = click.FloatRange(0.001, 31_536_000)
"""Up to a year."""

DEFAULT_DATA_DIR: Final = "./mqmesh-data"

_F = TypeVar("_F", bound=Callable[..., Any])


def json_option(function: _F) -> _F:
    """Adds ``--json``, for ``answers_json``; the root of all commands has the option, too."""

    @click.option("--json", "as_json", is_flag=True, help="Answer in JSON, for programs.")
    @click.pass_context
    @functools.wraps(function)
    def command(context: click.Context, /, *args: Any, as_json: bool, **kwargs: Any) -> Any:
        options = context.ensure_object(Options)
        options.as_json = as_json or options.as_json
        return function(*args, **kwargs)

    return command  # type: ignore[return-value]  # click's decorators lose the type


def namesrv_option(function: _F) -> _F:
    """Adds ``--namesrv``; the command gets ``namesrv``: the option's value, or the one found."""

    @click.option("--namesrv", metavar="HOST:PORT,…", help="Name servers.")
    @click.pass_context
    @functools.wraps(function)
    def command(context: click.Context, /, *args: Any, namesrv: str | None, **kwargs: Any) -> Any:
        options = context.ensure_object(Options)
        given = options.namesrv if namesrv is None else namesrv
        # An option of the command overrides one of `mqmesh` itself.
        named = options.context if namesrv is None else None
        chosen = choose_cluster(given, named, Path(DEFAULT_DATA_DIR), options.namespace)
        return function(*args, namesrv=chosen, **kwargs)

    return command  # type: ignore[return-value]  # click's decorators lose the type


def cluster_options(function: _F) -> _F:
    """Adds ``--namesrv`` and ``--json``: options of a command that sends requests to a cluster."""
    return namesrv_option(json_option(function))


broker_option: Final = click.option(
    "--broker", metavar="NAME", default="", help="Only on this broker group. [default: on all]"
)
"""The command gets ``broker``, "" for all."""


def max_option(default: int, help: str, most: int = 1_000_000) -> Callable[[_F], _F]:
    """Returns a decorator that adds ``--max``; the command gets ``most``.

    Args:
        default: Value if it is not given.
        help: Help of the option.
        most: Largest value.
    """
    return click.option(
        "-n",
        "--max",
        "most",
        type=click.IntRange(1, most),
        default=default,
        show_default=True,
        help=help,
    )


yes_option: Final = click.option("-y", "--yes", is_flag=True, help="Do not ask.")
"""The command gets ``yes``, for ``confirm``."""


def confirm(effect: str, question: str, *, yes: bool) -> None:
    """Ask the user before something that cannot be undone.

    Args:
        effect: Effect of the command, for the error: "this deletes …".
        question: For a person at a terminal; the answer no ends the command.
        yes: The user gave ``--yes``: no question is asked.

    Raises:
        ConfigError: Standard input is no terminal, and ``--yes`` is missing.
    """
    if yes:
        return
    if answers_json() or not sys.stdin.isatty():  # a program reads the output
        raise ConfigError(f"{effect}; add --yes")
    click.confirm(one_line(question), abort=True)


def config_options(function: _F) -> _F:
    """Adds ``-c`` and ``--set``; the command gets ``config_path`` and ``overrides``."""
    function = click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override a setting of the file: its dotted key and a value. Repeatable.",
    )(function)
    return click.option(
        "-c",
        "--config",
        "config_path",
        type=click.Path(path_type=Path, dir_okay=True),
        help="Configuration file (TOML).",
    )(function)
