"""`mqmesh context`: names for clusters."""

from typing import Any, Final

import click

from mqmesh.errors import ConfigError
from mqmesh.sdk.client.options import namesrv_addresses

from .contexts import contexts_file, load_contexts, save_contexts
from .options import json_option
from .render import Column, print_json, print_records, say

_COLUMNS: Final = (
    Column("context", "CONTEXT"),
    Column("namesrv", "NAME SERVERS"),
    Column("in_use", "IN USE"),
)


@click.group()
def context() -> None:
    """Names for clusters, and which one commands use.

    Commands ask the name servers of --namesrv, else of MQMESH_NAMESRV, else of --context, else
    of the context in use, else those that `mqmesh up` starts here.

    \b
    Examples:
      mqmesh context add production --namesrv 10.0.0.1:9876,10.0.0.2:9876
      mqmesh context use production
      mqmesh context list
      mqmesh --context production topic list
      mqmesh context remove production
    """


@context.command()
@click.argument("name")
@click.option("--namesrv", required=True, metavar="HOST:PORT,…", help="Its name servers.")
@click.option("--use", "in_use", is_flag=True, help="Use it from now on.")
@json_option
def add(name: str, namesrv: str, in_use: bool, as_json: bool) -> None:
    """Add a context, or give one other name servers.

    \b
    Examples:
      mqmesh context add production --namesrv 10.0.0.1:9876,10.0.0.2:9876 --use
    """
    if not 0 < len(name) <= 255:
        raise ConfigError("a context's name has 1 to 255 characters")
    contexts = load_contexts()
    contexts.contexts[name] = namesrv_addresses(namesrv)
    if in_use:
        contexts.current = name
    save_contexts(contexts)
    one = _as_dict(name, contexts.contexts[name], contexts.current)
    if as_json:
        print_json(one)
    else:
        say(f"context {name}: {one['namesrv']}{', in use' if one['in_use'] else ''}")


@context.command()
@click.argument("name")
@json_option
def use(name: str, as_json: bool) -> None:
    """Let commands use a context.

    \b
    Examples:
      mqmesh context use production
    """
    contexts = load_contexts()
    namesrv = contexts.namesrv(name)
    contexts.current = name
    save_contexts(contexts)
    if as_json:
        print_json(_as_dict(name, contexts.contexts[name], name))
    else:
        say(f"commands ask {namesrv} from now on")


@context.command("list")
@json_option
def list_contexts(as_json: bool) -> None:
    """List all contexts.

    \b
    Examples:
      mqmesh context list
    """
    contexts = load_contexts()
    rows = [
        _as_dict(name, namesrvs, contexts.current)
        for name, namesrvs in sorted(contexts.contexts.items())
    ]
    print_records(_COLUMNS, rows, as_json=as_json)


@context.command()
@click.argument("name")
@json_option
def remove(name: str, as_json: bool) -> None:
    """Remove a context. The cluster itself is not touched.

    \b
    Examples:
      mqmesh context remove production
    """
    contexts = load_contexts()
    contexts.namesrv(name)
    namesrvs = contexts.contexts.pop(name)
    if contexts.current == name:
        contexts.current = ""
    save_contexts(contexts)
    if as_json:
        print_json(_as_dict(name, namesrvs, contexts.current))
    else:
        say(f"context {name} is removed from {contexts_file()}")


def _as_dict(name: str, namesrvs: list[str], current: str) -> dict[str, Any]:
    return {"context": name, "namesrv": ";".join(namesrvs), "in_use": name == current}
