"""`mqmesh console`: the web console, and its users."""

import importlib.util
import sys
from pathlib import Path
from typing import Final

import click
import msgspec

from mqmesh.clock import SystemClock
from mqmesh.console.config import ConsoleConfig
from mqmesh.console.users import UsersFile, load_users, new_user, save_users
from mqmesh.errors import ConfigError, InvalidArgument
from mqmesh.roles.process import ExitCode, report_failure, run_role
from mqmesh.security.keys import load_credentials

from ..options import json_option, namesrv_option
from ..render import Column, print_answer, print_records
from .serve import ProcessOptions, process_options

EXTRA: Final = ("starlette", "uvicorn", "jinja2", "python_multipart")
"""Packages of the extra ``console``."""

_USERS: Final = (Column("name", "USER"), Column("credentials", "CREDENTIALS"))


class ConsoleUserView(msgspec.Struct, frozen=True):
    """A person who may log in, without the password's hash."""

    name: str
    credentials: str


def check_extra() -> None:
    """Checks that the packages of the console are there.

    Raises:
        ConfigError: They are not; the sentence says how to install them.
    """
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the console needs {', '.join(missing)}: run pip install 'mqmesh[console]'"
        )


@click.group(invoke_without_command=True)
@process_options
@namesrv_option
@click.pass_context
def console(context: click.Context, process: ProcessOptions, namesrv: str) -> int:
    """Run the web console of a cluster, or say who may log in there.

    It is at http://127.0.0.1:8082/.

    \b
    Examples:
      mqmesh console --namesrv 10.0.0.1:9876
      mqmesh console -c conf/console.toml
      mqmesh console add-user bob --credentials bob.toml --users-file users.toml
    """
    if context.invoked_subcommand is not None:
        return ExitCode.OK
    check_extra()
    config = process.load(ConsoleConfig, namesrv)
    from mqmesh.console.server import ConsoleLoop, ConsoleServer

    health = process.begin("console", config.name)
    loop = ConsoleLoop()
    try:
        try:
            server = ConsoleServer(config, SystemClock(), loop)
        except Exception as error:
            return report_failure(config.name, error)
        return run_role(
            "console", config.name, loop, server, supervised=process.supervised, health=health
        )
    finally:
        loop.close()


_users_file_option = click.option(
    "--users-file",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="File of the users, as users_file of the console's settings names it.",
)


@console.command("add-user")
@click.argument("name")
@click.option(
    "--credentials",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    required=True,
    help="File with the keys of the mqmesh user that the person acts as.",
)
@_users_file_option
@json_option
def add_user(name: str, credentials: Path, users_file: Path) -> None:
    """Let a person log in, or give a new password.

    The command asks for the password; without a terminal it is the first line of standard input. A
    console that runs learns of it within a second.

    \b
    Examples:
      mqmesh console add-user bob --credentials bob.toml --users-file users.toml
    """
    load_credentials(credentials)
    user = new_user(name, _password(), str(credentials.absolute()))
    others = [one for one in load_users(users_file).user if one.name != name]
    save_users(users_file, UsersFile(user=[*others, user]))
    view = ConsoleUserView(name, user.credentials)
    print_answer(view, f"{name} may log in, and acts by {user.credentials}")


@console.command()
@_users_file_option
@json_option
def users(users_file: Path) -> None:
    """Show who may log in.

    \b
    Examples:
      mqmesh console users --users-file users.toml
    """
    found = sorted(load_users(users_file).user, key=lambda one: one.name)
    print_records(_USERS, [ConsoleUserView(one.name, one.credentials) for one in found])


@console.command("remove-user")
@click.argument("name")
@_users_file_option
@json_option
def remove_user(name: str, users_file: Path) -> None:
    """Let a person log in no more; an open session ends within a second.

    \b
    Examples:
      mqmesh console remove-user bob --users-file users.toml
    """
    known = load_users(users_file)
    if known.find(name) is None:
        raise InvalidArgument(f"nobody is called {name!r} in {users_file}")
    rest = [one for one in known.user if one.name != name]
    save_users(users_file, msgspec.structs.replace(known, user=rest))
    print_answer({"removed": name}, f"{name} may log in no more")


def _password() -> str:
    if sys.stdin is not None and sys.stdin.isatty():
        password: str = click.prompt("Password", hide_input=True, confirmation_prompt=True)
        return password
    return "" if sys.stdin is None else sys.stdin.readline().rstrip("\n")
